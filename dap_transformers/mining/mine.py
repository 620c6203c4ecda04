"""Mine two texts, or score given pairs: from vectors to scored pairs and a threshold.

`mine` is the function for other programs. The command calls `mine_texts` and `score_texts`.

Legend: `N` source rows, `M` target rows, `D` dimensions, `P` pairs, `K` known translations.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from dap_transformers.disk_arrays import concatenate_on_disk, row_blocks
from dap_transformers.errors import UserError, counted, reading
from dap_transformers.mining.margin import (
    MARGINS,
    RETRIEVALS,
    MinedPairs,
    candidate_pairs,
    margin_of,
    nearest_k,
    neighbourhoods,
    score_pairs,
    select,
)
from dap_transformers.mining.texts import SCHEMA, DistinctSentences, TextPair, Vectors
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
from dap_transformers.options import arg, require_least
from dap_transformers.search.exact import (
    Neighbours,
    Search,
    mutual_neighbours,
    nearest_neighbours,
    unit_rows,
)

#: Fewest known translations that mining must be able to find, to calibrate an estimate by them.
FEWEST_FOUND = 10


@dataclass
class MiningOptions:
    """How pairs are scored, and which are kept.

    `threshold` may also be a number, or None to keep all pairs.
    """

    margin: str = arg(
        "ratio", "How the cosine is compared with the neighbours'.", choices=tuple(MARGINS)
    )
    retrieval: str = arg(
        "max",
        "Which candidates are kept: 'forward' those of the source sentences, 'backward' those of "
        "the target sentences, 'intersection' those of both, 'max' the best of both with no "
        "sentence twice.",
        choices=RETRIEVALS,
    )
    k: int = arg(4, "Number of neighbours of each sentence.")
    threshold: str | None = arg(
        "auto",
        "Lowest score of a pair: a number, 'auto' to choose it from the scores, or 'none'. Given "
        "pairs have no 'auto': all are kept.",
    )
    min_precision: float | None = arg(
        None, "Choose the lowest threshold with this estimated precision, such as 0.9."
    )
    top_n: int | None = arg(None, "Number of the best pairs to keep. Default: all.")

    def __post_init__(self) -> None:
        require_least(self, k=1, top_n=1)
        if self.min_precision is not None and self.threshold != "auto":
            raise ValueError("min_precision chooses the threshold: leave threshold out")
        if self.threshold not in ("auto", "none", None):
            with reading("threshold"):
                self.threshold = float(self.threshold)

    @property
    def lowest(self) -> float | None:
        """Return the threshold as a number. It is None for "auto", and to keep all pairs."""
        return self.threshold if isinstance(self.threshold, float) else None


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

    def __str__(self) -> str:
        """Return the note, the estimate and the remark, and the table below them.

        The row of the chosen threshold is marked.
        """
        text = self.note
        if self.precision is not None:
            text += f", estimated precision {100 * self.precision:.0f}%"
        if self.remark:
            text += f"; {self.remark}"
        lines = [text]
        if self.table:
            lines.append("threshold   pairs kept   estimated precision")
        for row in self.table:
            mark = "  <- chosen" if row["threshold"] == self.threshold else ""
            share = f"{100 * row['precision']:.0f}%"
            lines.append(f"{row['threshold']:9.6f}   {row['kept']:10,}   {share:>19}{mark}")
        return "\n".join(lines)


@dataclass(frozen=True)
class MiningResult:
    """What was found in two texts.

    Attributes:
        neighbours: the nearest neighbours of all sentences, with which the margin compares.
        candidates: all pairs of lines, counted from 0.
        kept: those that reach the threshold, at most `top_n`, in the order of `candidates`.
        choice: how the threshold was chosen. None if none was chosen.
    """

    neighbours: Neighbours
    candidates: MinedPairs
    kept: MinedPairs
    choice: Choice | None = None

    def numbers(self, texts: TextPair) -> dict[str, Any]:
        """Return the counts of lines, sentences and pairs, and the choice, for a report."""
        numbers = {
            "source": texts.source.counts(),
            "target": texts.target.counts(),
            "candidates": len(self.candidates),
            "kept": len(self.kept),
        }
        return numbers | ({"threshold_choice": asdict(self.choice)} if self.choice else {})

    def __str__(self) -> str:
        """Return text that says how many pairs are kept and why, and a table of thresholds."""
        kept = counted(len(self.kept), "pair")
        if self.choice is None:
            return f"{kept} kept of {len(self.candidates):,} given ones"
        return f"{kept} kept of {counted(len(self.candidates), 'candidate')}: {self.choice}"


def mine_texts(
    texts: TextPair,
    vectors: Vectors,
    options: MiningOptions,
    search: Search = mutual_neighbours,
    known: Vectors | None = None,
) -> MiningResult:
    """Find the pairs of sentences that are translations, best first.

    Args:
        vectors: vectors of the texts' distinct sentences, (N, D) and (M, D).
        known: vectors of K known translations, (K, D) each, which calibrate the threshold.
    """
    neighbours, rows, choice = mine_vectors(vectors, options, search, known)
    candidates = texts.first_lines(rows)
    kept = select_some(candidates, choice.threshold, options.top_n)
    return MiningResult(neighbours, candidates, kept, choice)


def score_texts(
    texts: TextPair,
    vectors: Vectors,
    options: MiningOptions,
    search: Search = mutual_neighbours,
) -> MiningResult:
    """Score each pair of lines with the same number by its margin, in the order of the texts.

    Lines that are empty on one side are left out.

    Args:
        vectors: vectors of their distinct sentences, (N, D) and (M, D).
    """
    neighbours = neighbourhoods(*vectors, options.k, search)
    lines = texts.filled_lines()  # (P,)
    blocks = list(row_blocks(len(lines)))
    source_rows = concatenate_on_disk(texts.source.rows[lines[block]] for block in blocks)
    target_rows = concatenate_on_disk(texts.target.rows[lines[block]] for block in blocks)
    scored = score_pairs(*vectors, source_rows, target_rows, neighbours, options.margin)
    given = MinedPairs(scored.scores, lines, lines)
    kept = select_some(given, options.lowest, options.top_n) if len(given) else given
    return MiningResult(neighbours, given, kept)


def select_some(pairs: MinedPairs, threshold: float | None, top_n: int | None) -> MinedPairs:
    """Keep pairs as `select` does, and raise `UserError` if none reaches the threshold."""
    kept = select(pairs, threshold, top_n)
    if not len(kept):
        best = float(pairs.scores.max()) if len(pairs) else float("nan")
        raise UserError(
            f"threshold={threshold}: no pair scores so high, the best of {len(pairs)} has "
            f"{best:.6f}; give a lower one"
        )
    return kept


def mine_vectors(
    vectors: Vectors,
    options: MiningOptions,
    search: Search = mutual_neighbours,
    known: Vectors | None = None,
) -> tuple[Neighbours, MinedPairs, Choice]:
    """Find the pairs of two texts that may be translations, and choose the threshold.

    Args:
        vectors: vectors of the source (N, D) and of the target (M, D).
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
                    f"only {len(known_scores)} of the {len(known[0])} known translations are "
                    f"nearest neighbours in the texts, at least {FEWEST_FOUND} are needed; give "
                    "more, or none"
                )
            known_scores = None  # a given threshold does not depend on the estimate
    return neighbours, candidates, choose(candidates, found, options, k, known_scores)


def choose(
    candidates: MinedPairs,
    neighbours: Neighbours,
    options: MiningOptions,
    k: int,
    known_scores: np.ndarray | None = None,
) -> Choice:
    """Choose the threshold, and estimate the precision where the scores allow it.

    Args:
        neighbours: the `k` + 1 nearest neighbours of all rows, or `k` if there are no more.
        known_scores: (K,) margin scores of known translations, which calibrate the estimate. None
            calibrates nothing.

    Returns:
        The choice. A threshold that the options give is kept, and only the precision is estimated.
        With fewer than `FEWEST` candidates, or without a `k` + 1st neighbour, nothing is estimated,
        and "auto" keeps all pairs. Nothing is estimated either for a given threshold if no group of
        translations stands out.
    """
    is_auto = options.threshold == "auto"
    given = options.lowest
    if len(candidates) < FEWEST or neighbours.forward_scores.shape[1] <= k:
        if options.min_precision is not None:
            raise UserError(
                f"min_precision={options.min_precision:g}: too few candidates for an estimate "
                f"({len(candidates)}); give a threshold"
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
            "give known translations, a higher min_precision or more sentences"
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
        margin: "ratio", "distance" or "absolute" (`dap_transformers.mining.margin.margin_of`).

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
    return margin_of(cosine, *means, margin)[is_nearest]


def mine(
    source: Sequence[str] | np.ndarray,
    target: Sequence[str] | np.ndarray,
    model: Any = None,
    **options: Any,
) -> pa.Table:
    """Find translations in two texts that are in memory, as the command `mine-bitext` does.

    Example::

        from sentence_transformers import SentenceTransformer
        from dap_transformers import mine

        model = SentenceTransformer("sentence-transformers/LaBSE")
        table = mine(german_sentences, english_sentences, model)
        table.to_pandas()

    Args:
        source: sentences, or vectors (N, D).
        target: sentences, or vectors (M, D).
        model: encodes sentences: an object with `encode(sentences)`, such as a
            SentenceTransformer, or the name of a model. Vectors need none.
        options: fields of `MiningOptions`, such as `threshold` or `top_n`.

    Returns:
        A table with one row per pair, best first. Its columns are "score", "source" and "target"
        (only for sentences), "source_line" and "target_line" (from 1). Its metadata hold the
        `Choice` as JSON under "mining".
    """
    chosen = MiningOptions(**options)
    if isinstance(model, str):
        from dap_transformers.encoding.encoder import SentenceEncoder

        model = SentenceEncoder.from_pretrained(model)
    sides = [_in_memory(source, "source", model), _in_memory(target, "target", model)]
    _, candidates, choice = mine_vectors((sides[0][1], sides[1][1]), chosen)
    kept = select_some(candidates, choice.threshold, chosen.top_n)

    columns: dict[str, Any] = {"score": np.round(kept.scores, 6)}
    for name, (sentences, _), rows in zip(("source", "target"), sides, (kept.source, kept.target)):
        if sentences is None:
            columns[f"{name}_line"] = rows + 1
        else:
            columns[name] = [sentences[row] for row in rows.tolist()]
            columns[f"{name}_line"] = sentences.first_line[rows]
    table = pa.table({name: columns[name] for name in SCHEMA.names if name in columns})
    return table.replace_schema_metadata({"mining": json.dumps(asdict(choice))})


def _in_memory(
    text: Sequence[str] | np.ndarray, name: str, model: Any
) -> tuple[DistinctSentences | None, np.ndarray]:
    """Return the distinct sentences of a text and their vectors, or None and the given vectors."""
    if not isinstance(text, np.ndarray) and hasattr(text, "numpy"):
        text = text.detach().cpu().numpy()
    if isinstance(text, np.ndarray) and text.dtype.kind == "f":
        return None, text
    if isinstance(text, str):
        raise UserError(f"{name}: one string; give a list of sentences, or vectors")
    sentences = DistinctSentences(text, name)
    if not len(sentences):
        raise UserError(f"the {name} text has no sentences: nothing can be mined")
    if model is None:
        raise UserError(f"{name}: sentences need a model that encodes them")
    return sentences, np.asarray(model.encode(list(sentences)))
