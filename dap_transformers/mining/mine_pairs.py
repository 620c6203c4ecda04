"""Mine two texts, or score given pairs: from vectors to scored pairs and a threshold.

`mine` is the function for other programs. The command `mine-bitext` calls the same functions.

Legend: `N` source rows, `M` target rows, `D` dimensions, `P` pairs, `K` known translations.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dap_transformers.encoding.encoder import Encoder, SentenceEncoder, listed
from dap_transformers.encoding.shards import embed_to_disk, model_fingerprint
from dap_transformers.errors import UserError, counted
from dap_transformers.mining.margin import (
    PAIR,
    candidate_pairs,
    margin_of,
    neighbourhoods,
    score_pairs,
    select,
)
from dap_transformers.mining.texts import DistinctSentences, Texts, Vectors, pair_table
from dap_transformers.mining.threshold import (
    CLEAR_PAIRS,
    CLEAR_SHARE,
    LOW_PRECISION,
    ScoreModel,
    fit_scores,
    runner_up_scores,
)
from dap_transformers.options import arg, require_least
from dap_transformers.search.exact import (
    Neighbours,
    NeighbourSearch,
    mutual_neighbours,
    nearest_neighbours,
    unit_rows,
)

#: With fewer candidates nothing is estimated.
FEWEST_CANDIDATES = 50
#: At most this many candidates, evenly spread over the ranks, are used for the estimate.
SAMPLE = 200_000
#: Fewest known translations that mining must be able to find, to calibrate an estimate by them.
FEWEST_FOUND = 10
#: Given pairs whose vectors are in memory at a time.
VECTOR_BLOCK = 4096


@dataclass
class MiningOptions:
    """How pairs are scored, and which are kept."""

    k: int = arg(4, "Number of neighbours of each sentence.")
    threshold: float | str | None = arg(
        "auto",
        "Lowest score of a pair: a number, 'auto' to choose it from the scores, or 'none'. Given "
        "pairs have no 'auto': all are kept.",
    )
    min_precision: float | None = arg(
        None, "Choose the lowest threshold with this estimated precision, such as 0.9."
    )

    def __post_init__(self) -> None:
        require_least(self, k=1)
        if self.min_precision is not None and self.threshold != "auto":
            raise ValueError("min_precision chooses the threshold: leave threshold out")
        if self.threshold == "none":
            self.threshold = None
        elif self.threshold not in (None, "auto"):
            try:
                self.threshold = float(self.threshold)
            except ValueError as error:
                raise ValueError(
                    f"threshold={self.threshold!r}: give a number, 'auto' or 'none'"
                ) from error


@dataclass(frozen=True)
class Choice:
    """The chosen threshold, and what is estimated. None stands for what could not be estimated.

    Attributes:
        threshold: lowest score of a kept pair. None keeps all pairs.
        precision: share of translations among the kept pairs, 0 to 1.
        share: share of translations among all candidates, 0 to 1.
        table: rows of `ScoreModel.table`.
        note: one sentence on how the threshold was chosen.
        calibrated: whether known translations were used for the estimate.
        remark: what to know about the estimate, or an empty text.
    """

    threshold: float | None
    precision: float | None
    share: float | None
    table: list[dict[str, Any]]
    note: str
    calibrated: bool = False
    remark: str = ""

    def __str__(self) -> str:
        """Return the note, the estimate and the remark, and the table below them."""
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
        protocol: what was done, for a report.
        neighbours: the nearest neighbours of all sentences, with which the margin compares. None
            if no margin is computed.
        table: the pairs of lines that reach the threshold (`pair_table`). An alignment of texts in
            order has groups, also those without a translation (`group_table`).
        summary: text that says how many pairs are kept and why.
        numbers: numbers by name, for a report.
    """

    protocol: str
    neighbours: Neighbours | None
    table: pa.Table
    summary: str
    numbers: dict[str, Any]


def mine_texts(
    texts: Texts,
    vectors: Vectors,
    options: MiningOptions,
    search: NeighbourSearch = mutual_neighbours,
    known: Vectors | None = None,
) -> MiningResult:
    """Find the pairs of sentences of two texts that are translations, best first.

    `texts` may lack a side of which only the vectors are known. `vectors` are of the distinct
    sentences. `mine_vectors` describes the other arguments.
    """
    neighbours, candidates, choice = mine_vectors(vectors, options, search, known)
    kept = select(candidates, choice.threshold)
    for name, text in texts.items():  # from sentences to the first lines that hold them
        kept[name] = text.first_line[kept[name]] - 1
    numbers = {"candidates": len(candidates), "kept": len(kept), "threshold_choice": asdict(choice)}
    summary = f"{counted(len(kept), 'pair')} kept of {counted(len(candidates), 'candidate')}"
    protocol = "bitext mining by margin over nearest neighbours"
    table = pair_table(kept, texts)
    return MiningResult(protocol, neighbours, table, f"{summary}: {choice}", numbers)


def score_texts(
    texts: Texts,
    vectors: Vectors,
    options: MiningOptions,
    search: NeighbourSearch = mutual_neighbours,
) -> MiningResult:
    """Score line i of one text with line i of the other by margin, in their order.

    `vectors` are of the distinct sentences. Lines that are empty on one side are left out.
    """
    source, target = (text.rows for text in texts.values())  # (L,) each
    neighbours = neighbourhoods(*vectors, options.k, search)
    lines = np.flatnonzero((source >= 0) & (target >= 0))
    pairs = np.empty(len(lines), PAIR)
    pairs["source"] = pairs["target"] = lines
    for start in range(0, len(lines), VECTOR_BLOCK):
        block = slice(start, start + VECTOR_BLOCK)
        rows = source[lines[block]], target[lines[block]]
        pairs["score"][block] = score_pairs(*vectors, *rows, neighbours)

    kept = select(pairs, options.threshold)
    numbers = {"candidates": len(pairs), "kept": len(kept)}
    summary = f"{counted(len(kept), 'pair')} kept of {len(pairs):,} given ones"
    protocol = "margin of given pairs over nearest neighbours"
    return MiningResult(protocol, neighbours, pair_table(kept, texts), summary, numbers)


def mine_vectors(
    vectors: Vectors,
    options: MiningOptions,
    search: NeighbourSearch = mutual_neighbours,
    known: Vectors | None = None,
) -> tuple[Neighbours, np.ndarray, Choice]:
    """Find the pairs of two texts that may be translations, and choose the threshold.

    `vectors` are (N, D) and (M, D). Those of K `known` translations, (K, D) each, calibrate
    the estimate of the precision.

    Returns:
        The k nearest neighbours of all rows, all candidates (best first), and the choice.
    """
    found = neighbourhoods(*vectors, options.k, search, extra=1)
    k = min(options.k, found.forward.scores.shape[1])
    neighbours = Neighbours(*(near.nearest(k) for near in found))
    candidates = candidate_pairs(neighbours)
    known_scores = None if known is None else score_known(known, vectors, k)
    if known_scores is not None and len(known_scores) < FEWEST_FOUND:
        if options.threshold == "auto" and len(candidates) >= FEWEST_CANDIDATES:
            raise UserError(
                f"only {len(known_scores)} of the {len(known[0])} known translations are nearest "
                f"neighbours in the texts, at least {FEWEST_FOUND} are needed; give more, or none"
            )
        known_scores = None  # a given threshold does not depend on the estimate
    return neighbours, candidates, choose(candidates, found, options, k, known_scores)


def choose(
    candidates: np.ndarray,
    neighbours: Neighbours,
    options: MiningOptions,
    k: int,
    known_scores: np.ndarray | None = None,
) -> Choice:
    """Choose the threshold unless it is given, and estimate the precision if the scores allow it.

    "auto" keeps all candidates if there are fewer than `FEWEST_CANDIDATES`. `neighbours` are the
    `k` + 1 nearest ones. Scores (K,) of known translations calibrate the estimate.

    Raises:
        UserError: if `min_precision` cannot be reached or estimated, or if "auto" finds no group of
            translations among the scores.
    """
    count = len(candidates)
    is_auto = options.threshold == "auto"
    threshold = None if is_auto else options.threshold
    if count < FEWEST_CANDIDATES or neighbours.forward.scores.shape[1] <= k:
        note = f"too few candidates for an estimate of the precision ({count})"
        if options.min_precision is not None:
            raise UserError(f"min_precision={options.min_precision:g}: {note}; give a threshold")
        if is_auto:
            note += "; all are kept"
        return Choice(threshold, None, None, [], note)

    rows = np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int64)
    sample = np.array(candidates[rows])
    runner_ups = runner_up_scores(sample, neighbours, k)
    model = fit_scores(sample["score"], runner_ups, known_scores, count)

    if is_auto:
        row = model.choose(options.min_precision)
        threshold = row["threshold"]
        wanted = options.min_precision
        goal = "expected F1" if wanted is None else f"estimated precision of at least {wanted:g}"
        note = f"threshold {threshold:.6f}, chosen by {goal}"
    else:
        row = model.row(model.scores[-1] if threshold is None else threshold)
        note = "all are kept" if threshold is None else "threshold as given"
        if not model.is_clear:
            remark = "no group of translations stands out, so the precision cannot be estimated"
            return Choice(threshold, None, None, [], note, remark=remark)
    remark = remark_on(model, row["precision"] if is_auto else None)
    share = round(model.share, 4)
    table = model.table()
    return Choice(threshold, row["precision"], share, table, note, model.calibrated, remark)


def remark_on(model: ScoreModel, precision: float | None) -> str:
    """Return what to know about the estimates, or an empty text.

    `precision` is the estimate for a threshold that was chosen, None if it was given.
    """
    if model.translations < 1:
        return "no candidate looks like a translation"
    if model.share > 0.99:
        return "almost all candidates look like translations"
    few = None
    if model.calibrated and model.translations < CLEAR_PAIRS:
        few = f"about {model.share * model.candidates:,.0f}"
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


def score_known(known: Vectors, vectors: Vectors, k: int = 4) -> np.ndarray:
    """Return the margins of known translations, as if their sentences were in the two texts.

    Each sentence's neighbours are those in the other text and its own translation, which is counted
    once if the other text also holds it.

    A pair is left out if each of its sentences has a neighbour in the other text with a higher
    cosine. Mining seldom finds such a pair, so its low score would mislead.
    """
    products = unit_rows(known[0]) * unit_rows(known[1])
    cosine = products.sum(1).numpy().astype(np.float64)  # (K,)
    means = []
    is_nearest = np.zeros(len(cosine), bool)
    for sentences, text in ((known[0], vectors[1]), (known[1], vectors[0])):
        near, _ = nearest_neighbours(sentences, text, min(k, len(text)))  # (K, k)
        is_nearest |= cosine >= near[:, 0] - 1e-6
        is_in_text = np.isclose(near, cosine[:, None], atol=1e-6).any(1)
        partner = np.where(is_in_text, -np.inf, cosine)
        with_partner = np.sort(np.column_stack([near, partner]))[:, ::-1]
        means.append(with_partner[:, :k].mean(1))
    return margin_of(cosine, *means)[is_nearest]


def encode_texts(
    encoder: Encoder, texts: Texts, folder: str | Path, **options: Any
) -> dict[str, np.ndarray]:
    """Encode the distinct sentences of texts. Vectors of an earlier run are read instead.

    Several processes share the work, and only the first one gets the vectors (N, D). In the others
    they have no rows.

    Args:
        folder: keeps the vectors. Those of each model and its settings have subfolders.
        options: `shard_size` and `progress` of `embed_to_disk`.
    """
    options["fingerprint"] = model_fingerprint(encoder)
    vectors = {}
    for role, text in texts.items():
        name = f"{role}.{Path(text.name).name}"
        place = Path(folder, f"{name}.{options['fingerprint'][:8]}")
        vectors[role] = embed_to_disk(encoder, text, place, where=text.place, name=name, **options)
    return vectors


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
        source: sentences, or vectors (N, D). The target is sentences, or vectors (M, D).
        model: an object with `encode(sentences)`, or the name of a model. Vectors need none.
        options: fields of `MiningOptions`, such as `threshold`.

    Returns:
        A table with one row per pair, best first. Its columns are "score", "source" and "target"
        (only for sentences), "source_line" and "target_line" (from 1). Its metadata hold the
        `Choice` as JSON under "mining".
    """
    chosen = MiningOptions(**options)
    if isinstance(model, str):
        model = SentenceEncoder.from_pretrained(model)
    texts = {}
    vectors = []
    for name, side in (("source", source), ("target", target)):
        if torch.is_tensor(side):
            side = side.numpy(force=True)
        if not isinstance(side, np.ndarray) or side.dtype.kind != "f":
            texts[name] = DistinctSentences(listed(side), name)
            side = np.asarray(model.encode(list(texts[name])))
        vectors.append(side)

    found = mine_texts(texts, (vectors[0], vectors[1]), chosen)
    choice = json.dumps(found.numbers["threshold_choice"])
    return found.table.replace_schema_metadata({"mining": choice})
