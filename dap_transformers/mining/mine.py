"""Mine sentences or vectors that are in memory, and choose the threshold.

`mine` is the function for other programs. `mine_vectors` is what the command uses, too.

Legend: `N` source rows, `M` target rows, `D` dimensions, `P` pairs, `K` known translations.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dap_transformers.errors import UserError
from dap_transformers.mining.distinct import DistinctSentences
from dap_transformers.mining.margin import (
    MinedPairs,
    candidate_pairs,
    margin_scores,
    nearest_k,
    neighbourhoods,
    select,
)
from dap_transformers.mining.threshold import (
    CLEAR_PAIRS,
    CLEAR_SHARE,
    FEWEST,
    LOW_PRECISION,
    ScoreModel,
    choose_row,
    fit_scores,
    precision_table,
    runner_up_scores,
    sample_of,
)
from dap_transformers.search.exact import (
    Neighbours,
    Search,
    mutual_neighbours,
    nearest_neighbours,
    unit_rows,
)

#: Fewest known translations that mining must be able to find, to calibrate an estimate by them.
FEWEST_FOUND = 10
#: Vectors of source and target.
Vectors = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Choice:
    """The chosen threshold, and what is estimated about the pairs that it keeps.

    Attributes:
        threshold: lowest score of a kept pair. None keeps all pairs.
        precision: estimated share of translations among the kept pairs, 0 to 1. None if it could
            not be estimated.
        share: estimated share of translations among all candidates, 0 to 1. None if it could not be
            estimated.
        table: rows of `dap_transformers.mining.threshold.precision_table`. Empty if nothing could
        be estimated.
        note: one sentence on how the threshold was chosen.
        calibrated: whether known translations were used for the estimate.
        remark: what to know about the estimate. Empty if there is nothing special.
    """

    threshold: float | None
    precision: float | None
    share: float | None
    table: list[dict[str, Any]]
    note: str
    calibrated: bool = False
    remark: str = ""


@dataclass(frozen=True)
class Margin:
    """Options of mining: how pairs are scored, and which are kept.

    They have the names of the flags of `mine-bitext`.

    Attributes:
        margin: how a cosine is compared with the neighbours': "ratio", "distance" or "absolute"
            (`dap_transformers.mining.margin.margin_scores`).
        k: number of neighbours of each sentence.
        retrieval: which candidates are kept: "max", "intersection", "forward" or "backward"
            (`dap_transformers.mining.candidate_pairs`).
        threshold: lowest score of a pair, "auto" to choose it, "none" or None to keep all. A
            number may be given as a string.
        min_precision: choose the lowest threshold with this estimated precision, 0 to 1. None
            chooses by the best expected F1.

    Raises:
        UserError: `threshold` or `min_precision` has another value, or both are given.
    """

    margin: str = "ratio"
    k: int = 4
    retrieval: str = "max"
    threshold: str | float | None = "auto"
    min_precision: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.threshold, str) and self.threshold not in ("auto", "none"):
            try:
                threshold = float(self.threshold)
            except ValueError:
                threshold = np.nan
            object.__setattr__(self, "threshold", threshold)
        if isinstance(self.threshold, (int, float)) and not np.isfinite(self.threshold):
            raise UserError("--threshold: give auto, none or a finite number")
        if self.min_precision is not None:
            if not 0 < self.min_precision < 1:
                raise UserError(
                    f"--min_precision {self.min_precision}: give a number above 0 and below 1"
                )
            if self.threshold != "auto":
                raise UserError("--min_precision chooses the threshold: leave --threshold out")


def mine_vectors(
    vectors: Vectors,
    options: Margin,
    search: Search = mutual_neighbours,
    known: Vectors | None = None,
) -> tuple[Neighbours, MinedPairs, Choice]:
    """Find the pairs of two texts that may be translations, and choose the threshold.

    Args:
        vectors: vectors of the source (N, D) and of the target (M, D).
        options: how to score pairs and to choose the threshold.
        search: function that finds nearest neighbours, such as `mutual_neighbours`.
        known: vectors of the sources and the targets of K known translations, (K, D) each. Their
            scores calibrate the estimated precision. None calibrates nothing.

    Returns:
        The k nearest neighbours of all rows, all candidates (best first), and the choice of the
        threshold. The candidates are not filtered by it.
    """
    found = neighbourhoods(*vectors, options.k, search, extra=1)
    k = min(options.k, len(vectors[0]), len(vectors[1]))
    neighbours = nearest_k(found, k)
    candidates = candidate_pairs(neighbours, options.margin, options.retrieval)
    known_scores = None
    if known is not None:
        known_scores = score_known(known, vectors, k, options.margin)
        if len(known_scores) < FEWEST_FOUND:
            if options.threshold == "auto" and len(candidates) >= FEWEST:
                raise UserError(
                    f"--calibrate: only {len(known_scores)} of the {len(known[0])} known "
                    "translations are nearest neighbours in the texts, at least "
                    f"{FEWEST_FOUND} are needed; give more, or leave it out"
                )
            known_scores = None  # a given threshold does not depend on the estimate
    return neighbours, candidates, choose(candidates, found, options, k, known_scores)


def choose(
    candidates: MinedPairs,
    neighbours: Neighbours,
    options: Margin,
    k: int,
    known_scores: np.ndarray | None = None,
) -> Choice:
    """Choose the threshold, and estimate the precision where the scores allow it.

    Args:
        candidates: all candidates, best first.
        neighbours: the `k` + 1 nearest neighbours of all rows, or `k` if there are no more.
        options: how to choose.
        k: number of neighbours whose mean cosine the margin compares with.
        known_scores: (K,) margin scores of known translations, which calibrate the estimate. None
            calibrates nothing.

    Returns:
        The choice. A threshold that the options give is kept, and only the precision is estimated.
        With fewer than `FEWEST` candidates, or without a `k` + 1st neighbour, nothing is estimated,
        and "auto" keeps all pairs. Nothing is estimated either for a given threshold if no group of
        translations stands out.
    """
    is_auto = options.threshold == "auto"
    given = options.threshold if isinstance(options.threshold, (int, float)) else None
    if len(candidates) < FEWEST or neighbours.forward_scores.shape[1] <= k:
        if options.min_precision is not None:
            raise UserError(
                f"--min_precision {options.min_precision:g}: too few candidates for an estimate "
                f"({len(candidates)}); give --threshold a number"
            )
        note = f"too few candidates for an estimate of the precision ({len(candidates)})"
        if is_auto:
            note += "; all are kept"
        return Choice(given, None, None, [], note)

    as_given = "all are kept" if given is None else "threshold as given"
    sample = sample_of(candidates)
    runner_ups = runner_up_scores(sample, neighbours, k, options.margin)
    model = fit_scores(sample.scores, runner_ups, known_scores)
    if not is_auto and not model.is_clear:
        remark = "no group of translations stands out, so the precision cannot be estimated"
        return Choice(given, None, None, [], as_given, remark=remark)

    table = precision_table(model, len(candidates))
    if is_auto:
        row = choose_row(model, len(candidates), options.min_precision)
        wanted = options.min_precision
        goal = "expected F1" if wanted is None else f"estimated precision of at least {wanted:g}"
        note = f"threshold {row['threshold']:.6f}, chosen by {goal}"
    else:
        lowest = -np.inf if given is None else given
        kept = model.scores >= lowest
        precision = round(float(model.probabilities[kept].mean()), 4) if kept.any() else None
        row = {"threshold": given, "precision": precision}
        note = as_given
    share = round(model.share, 4)
    threshold, precision = row["threshold"], row["precision"]
    calibrated = model.calibrated
    remark = remark_on(model, precision if is_auto else None)
    return Choice(threshold, precision, share, table, note, calibrated, remark)


def remark_on(model: ScoreModel, precision: float | None) -> str:
    """Return what to know about the estimates of a model of the scores, or an empty string.

    Four cases are special: almost all candidates look like translations, none does, so few that
    similar sentences may be among them, or the chosen threshold has a low estimated precision. Such
    an estimate is often wrong.

    Args:
        model: the two groups of scores.
        precision: estimated precision at a threshold that was chosen, 0 to 1. None if the threshold
            was given.
    """
    if model.share * model.pairs < 1:
        return "no candidate looks like a translation"
    if model.share > 0.99:
        return "almost all candidates look like translations"
    few = None
    if model.calibrated and model.share * model.pairs < CLEAR_PAIRS:
        few = f"about {model.share * model.pairs:.0f}"
    elif not model.calibrated and model.share < CLEAR_SHARE:
        few = f"{100 * model.share:.0f}%"
    if few is not None:
        return (
            f"only {few} of the candidates look like translations, and some may only be similar: "
            "check a few pairs"
        )
    if precision is not None and precision < LOW_PRECISION and not model.calibrated:
        return (
            f"an estimate below {100 * LOW_PRECISION:.0f}% is often wrong by more than 5 points: "
            "give --calibrate, a higher --min_precision or more sentences"
        )
    return ""


def score_known(known: Vectors, vectors: Vectors, k: int = 4, margin: str = "ratio") -> np.ndarray:
    """Score known translations by their margin, as if their sentences were in the two texts.

    Each sentence's neighbours are those in the other text and its own translation, which is counted
    once if the other text also holds it.

    A pair is left out if each of its sentences has a neighbour in the other text with a higher
    cosine. Mining seldom finds such a pair. Its low score would widen the distribution of the
    translations' scores.

    Args:
        known: vectors of the sources and the targets of K known translations, (K, D) each.
        vectors: vectors of the two texts, (N, D) and (M, D).
        k: number of neighbours whose mean cosine the margin compares with.
        margin: "ratio", "distance" or "absolute" (`dap_transformers.mining.margin.margin_scores`).

    Returns:
        Margin scores of the pairs that are not left out, at most K.
    """
    sides = unit_rows(known[0], "known source"), unit_rows(known[1], "known target")
    cosine = (sides[0] * sides[1]).sum(1).numpy().astype(np.float64)  # (K,)
    means = []
    is_nearest = np.zeros(len(cosine), bool)
    for own, text in ((known[0], vectors[1]), (known[1], vectors[0])):
        near, _ = nearest_neighbours(own, text, min(k, len(text)))  # (K, k)
        is_nearest |= cosine >= near.max(1) - 1e-6
        is_in_text = np.isclose(near, cosine[:, None], atol=1e-6).any(1)
        partner = np.where(is_in_text, -np.inf, cosine)
        with_partner = np.sort(np.concatenate([near, partner[:, None]], 1), axis=1)
        means.append(with_partner[:, ::-1][:, :k].mean(1))
    return margin_scores(cosine, *means, margin)[is_nearest]


def table_text(choice: Choice) -> str:
    """Format a choice's table as lines of text: threshold, pairs kept, estimated precision.

    The row of the chosen threshold is marked. Without estimates only the header is returned.
    """
    lines = ["threshold   pairs kept   estimated precision"]
    for row in choice.table:
        mark = "  <- chosen" if row["threshold"] == choice.threshold else ""
        share = f"{100 * row['precision']:.0f}%"
        lines.append(f"{row['threshold']:9.6f}   {row['kept']:10,}   {share:>19}{mark}")
    return "\n".join(lines)


def report_of(choice: Choice) -> dict[str, Any]:
    """Return a choice as a dictionary for the JSON report."""
    return asdict(choice)


def mine(
    source: Sequence[str] | np.ndarray,
    target: Sequence[str] | np.ndarray,
    model: Any = None,
    *,
    threshold: str | float | None = "auto",
    min_precision: float | None = None,
    top_n: int | None = None,
    margin: str = "ratio",
    retrieval: str = "max",
    k: int = 4,
) -> pa.Table:
    """Find translations in two texts that are in memory.

    The result is that of the command `mine-bitext` with the same options.

    Example::

        from sentence_transformers import SentenceTransformer
        from dap_transformers.mining import mine

        model = SentenceTransformer("sentence-transformers/LaBSE")
        table = mine(german_sentences, english_sentences, model)
        table.to_pandas()

    Args:
        source: sentences, or vectors (N, D).
        target: sentences, or vectors (M, D).
        model: encodes sentences: an object with `encode(sentences)`, such as a
            SentenceTransformer, or the name of a model. Vectors need none.
        threshold: lowest score of a pair, "auto" to choose it from the scores, or None to keep all.
        min_precision: choose the lowest threshold with at least this estimated precision, 0 to 1.
            None chooses by the best expected F1.
        top_n: largest number of pairs to keep. None keeps all that reach the threshold.
        margin: "ratio", "distance" or "absolute" (`dap_transformers.mining.margin.margin_scores`).
        retrieval: "max", "intersection", "forward" or "backward" (`candidate_pairs`).
        k: number of neighbours of each sentence.

    Returns:
        A table with one row per pair, best first. Its columns are "score", "source" and "target"
        (only for sentences), "source_line" and "target_line" (from 1). Its metadata hold the
        `Choice` as JSON under "mining".
    """
    options = Margin(margin, k, retrieval, threshold, min_precision)
    if isinstance(model, str):
        from dap_transformers.encoding.encoder import SentenceEncoder

        model = SentenceEncoder.from_pretrained(model)
    sides = [_Side(source, "source", model), _Side(target, "target", model)]
    _, candidates, choice = mine_vectors((sides[0].vectors, sides[1].vectors), options)
    kept = require_some(select(candidates, choice.threshold, top_n), candidates, choice)

    columns: dict[str, Any] = {"score": np.round(kept.scores, 6)}
    rows = {"source": np.array(kept.source), "target": np.array(kept.target)}
    for side, (name, chosen) in zip(sides, rows.items(), strict=True):
        if side.sentences is not None:
            columns[name] = [side.sentences[row] for row in chosen.tolist()]
    for side, (name, chosen) in zip(sides, rows.items(), strict=True):
        columns[f"{name}_line"] = side.lines[chosen]
    table = pa.table(columns)
    return table.replace_schema_metadata({"mining": json.dumps(report_of(choice))})


class _Side:
    """One text in memory with its vectors. Sentences are encoded here.

    Args:
        text: sentences, or their vectors: an array or tensor of floats, (N, D).
        name: "source" or "target", for messages.
        model: object whose `encode(sentences)` returns vectors. Not used if `text` has vectors.

    Attributes:
        sentences: the distinct sentences, or None if vectors were given.
        vectors: the vectors of the distinct sentences, or the given vectors.
        lines: for each vector the number, from 1, of its row or of its sentence's first line.

    Raises:
        UserError: the text is a single string or has no sentences, or a model is missing.
    """

    def __init__(self, text: Sequence[str] | np.ndarray, name: str, model: Any) -> None:
        self.sentences: DistinctSentences | None = None
        if not isinstance(text, np.ndarray) and hasattr(text, "numpy"):
            text = text.detach().cpu().numpy()
        if isinstance(text, np.ndarray) and text.dtype.kind == "f":
            self.vectors = text
            self.lines = np.arange(1, len(text) + 1)
            return
        if isinstance(text, str):
            raise UserError(f"{name}: one string; give a list of sentences, or vectors")
        self.sentences = DistinctSentences(text)
        if not len(self.sentences):
            raise UserError(f"the {name} text has no sentences: nothing can be mined")
        if model is None:
            raise UserError(f"{name}: sentences need a model that encodes them")
        self.vectors = np.asarray(model.encode(list(self.sentences)))
        self.lines = np.array(self.sentences.first_line)


def require_some(kept: MinedPairs, candidates: MinedPairs, choice: Choice) -> MinedPairs:
    """Return the kept pairs unchanged, if there are any.

    Args:
        kept: the pairs that reach the threshold.
        candidates: all candidates, for the message.
        choice: the choice of the threshold, for the message.
    """
    if len(kept):
        return kept
    best = float(candidates.scores.max()) if len(candidates) else float("nan")
    raise UserError(
        f"--threshold {choice.threshold}: no pair scores so high, the best of {len(candidates)} "
        f"candidates has {best:.6f}; give a lower one, or auto"
    )
