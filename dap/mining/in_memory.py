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

from dap.errors import UserError
from dap.mining.distinct import DistinctSentences
from dap.mining.margin import (
    MinedPairs,
    candidate_pairs,
    margin_scores,
    nearest_k,
    neighbourhoods,
    select,
)
from dap.mining.threshold import (
    FEWEST,
    choose_row,
    fit_scores,
    precision_table,
    runner_up_scores,
    sample_of,
)
from dap.search import Neighbours, Search, mutual_neighbours, nearest_neighbours, unit_rows

#: Vectors of source and target.
Vectors = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Choice:
    """Which candidates are kept, and what is known about their precision.

    Attributes:
        threshold: lowest score of a pair, or None to keep all.
        precision: estimated share of translations among the kept pairs, or None.
        share: estimated share of translations among all candidates, or None.
        table: rows of `dap.mining.threshold.precision_table`, or [].
        note: one sentence on how the threshold was chosen.
        calibrated: whether known translations were used.
    """

    threshold: float | None
    precision: float | None
    share: float | None
    table: list[dict[str, Any]]
    note: str
    calibrated: bool = False


@dataclass(frozen=True)
class Margin:
    """How pairs are scored and which are candidates. The names are those of the command."""

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
                raise UserError(f"--min_precision {self.min_precision}: give a number from 0 to 1")
            if self.threshold != "auto":
                raise UserError("--min_precision chooses the threshold: leave --threshold out")


def mine_vectors(
    vectors: Vectors,
    options: Margin,
    search: Search = mutual_neighbours,
    known: Vectors | None = None,
) -> tuple[Neighbours, MinedPairs, Choice]:
    """Find the candidates of two texts, and choose the threshold.

    Args:
        vectors: (N, D) and (M, D).
        options: how to score and to choose.
        search: finds the neighbours.
        known: vectors of known translations, (K, D) each, to calibrate the estimate.

    Returns:
        The k nearest neighbours, the candidates (best first), and the choice.
    """
    found = neighbourhoods(*vectors, options.k, search, extra=1)
    k = min(options.k, len(vectors[0]), len(vectors[1]))
    neighbours = nearest_k(found, k)
    candidates = candidate_pairs(neighbours, options.margin, options.retrieval)
    known_scores = None
    if known is not None:
        known_scores = score_known(known, vectors, k, options.margin)
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
        candidates: best first.
        neighbours: `k` + 1 neighbours, or `k` if there are no more.
        options: how to choose.
        k: neighbours whose mean the margin compares with.
        known_scores: (K,) of known translations.

    Raises:
        UserError: the threshold was to be chosen, and the scores do not tell it.
    """
    is_auto = options.threshold == "auto"
    given = options.threshold if isinstance(options.threshold, (int, float)) else None
    if len(candidates) < FEWEST or neighbours.forward_scores.shape[1] <= k:
        if options.min_precision is not None:
            raise UserError(
                f"--min_precision {options.min_precision:g}: {len(candidates)} candidates are too "
                "few for an estimate; give --threshold a number"
            )
        note = f"{len(candidates)} candidates are too few for an estimate of the precision"
        if is_auto:
            note += "; all are kept"
        return Choice(given, None, None, [], note)

    sample = sample_of(candidates)
    runner_ups = runner_up_scores(sample, neighbours, k, options.margin)
    model = fit_scores(sample.scores, runner_ups, known_scores)
    if not is_auto and not model.is_clear:
        return Choice(given, None, None, [], "no group of translations stands out")

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
        note = "threshold as given"
    if model.share > 0.99:
        note += "; almost all candidates look like translations"
    share = round(model.share, 4)
    return Choice(row["threshold"], row["precision"], share, table, note, model.calibrated)


def score_known(known: Vectors, vectors: Vectors, k: int = 4, margin: str = "ratio") -> np.ndarray:
    """Score known translations as if their sentences were part of the two texts, (K,).

    Args:
        known: vectors of the two sides of known translations, (K, D) each.
        vectors: vectors of the two texts.
        k: neighbours whose mean the margin compares with.
        margin: one of `dap.mining.MARGINS`.
    """
    sides = unit_rows(known[0], "known source"), unit_rows(known[1], "known target")
    cosine = (sides[0] * sides[1]).sum(1).numpy().astype(np.float64)  # (K,)
    means = []
    for own, text in ((known[0], vectors[1]), (known[1], vectors[0])):
        near, _ = nearest_neighbours(own, text, min(k, len(text)))  # (K, k)
        is_in_text = np.isclose(near, cosine[:, None], atol=1e-6).any(1)
        partner = np.where(is_in_text, -np.inf, cosine)
        with_partner = np.sort(np.concatenate([near, partner[:, None]], 1), axis=1)
        means.append(with_partner[:, ::-1][:, :k].mean(1))
    return margin_scores(cosine, *means, margin)


def table_text(choice: Choice) -> str:
    """Show how many pairs each threshold keeps, and their estimated precision."""
    lines = ["threshold   pairs kept   estimated precision"]
    for row in choice.table:
        mark = "  <- chosen" if row["threshold"] == choice.threshold else ""
        share = f"{100 * row['precision']:.0f}%"
        lines.append(f"{row['threshold']:9.6f}   {row['kept']:10,}   {share:>19}{mark}")
    return "\n".join(lines)


def report_of(choice: Choice) -> dict[str, Any]:
    """Return a choice for the JSON report."""
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

    The result is that of the command `mine_bitext.py` with the same options.

    Example::

        from sentence_transformers import SentenceTransformer
        from dap.mining import mine

        model = SentenceTransformer("sentence-transformers/LaBSE")
        table = mine(german_sentences, english_sentences, model)
        table.to_pandas()

    Args:
        source: sentences, or vectors (N, D).
        target: sentences, or vectors (M, D).
        model: encodes sentences: an object with `encode(sentences)`, such as a
            SentenceTransformer, or the name of a model. Vectors need none.
        threshold: lowest score of a pair, "auto" to choose it, or None to keep all.
        min_precision: choose the lowest threshold whose estimated precision is this, 0 to 1.
        top_n: number of the best pairs to keep.
        margin: one of `dap.mining.MARGINS`.
        retrieval: one of `dap.mining.RETRIEVALS`.
        k: number of neighbours of each sentence.

    Returns:
        A table of the pairs, best first: "score", "source" and "target" (only for sentences),
        "source_line" and "target_line", from 1. Its metadata have the `Choice` under "mining", as
        JSON.

    Raises:
        UserError: input that cannot be mined, or scores from which no threshold follows.
    """
    options = Margin(margin, k, retrieval, threshold, min_precision)
    if isinstance(model, str):
        from dap.encoding import load_encoder

        model = load_encoder(model)
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
    """One text in memory: vectors of its distinct sentences, and the line of each, from 1."""

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
    """Return the kept pairs. Raise `UserError` if there are none."""
    if len(kept):
        return kept
    best = float(candidates.scores.max()) if len(candidates) else float("nan")
    raise UserError(
        f"--threshold {choice.threshold}: no pair scores so high, the best of {len(candidates)} "
        f"candidates has {best:.6f}; give a lower one, or auto"
    )
