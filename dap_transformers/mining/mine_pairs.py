"""Mine two texts, or score given pairs: from vectors to scored pairs and a threshold.

`mine` is the function for other programs. The command `mine-bitext` calls the same functions.

Legend: `N` source rows, `M` target rows, `D` dimensions, `P` pairs, `K` known translations.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from dap_transformers.encoding.encoder import Encoder, SentenceEncoder, listed
from dap_transformers.encoding.shards import embed_to_disk, model_fingerprint
from dap_transformers.errors import UserError, counted, reading
from dap_transformers.mining.margin import (
    PAIR,
    Vectors,
    candidate_pairs,
    neighbourhoods,
    score_known,
    score_pairs,
    select,
)
from dap_transformers.mining.texts import DistinctSentences, GroupedText, Texts, pair_table
from dap_transformers.mining.threshold import FEWEST_CANDIDATES, Choice, choose
from dap_transformers.options import arg, require_least
from dap_transformers.search.exact import Neighbours, NeighbourSearch, mutual_neighbours

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
        if self.min_precision is not None and not 0 < self.min_precision <= 1:
            raise ValueError(f"min_precision={self.min_precision:g}: give a share, such as 0.9")
        if self.threshold == "none":
            self.threshold = None
        elif self.threshold not in (None, "auto"):
            with reading("threshold (give a number, 'auto' or 'none')"):
                self.threshold = float(self.threshold)
                if not math.isfinite(self.threshold):
                    raise ValueError(self.threshold)


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
    kept = select(candidates, choice.threshold).copy()  # its rows become lines
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
    search: NeighbourSearch,
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
    if known is not None and options.k == 1:
        raise UserError("k=1 cannot be calibrated: all nearest pairs score about 1; give more")
    # one neighbour more than a margin needs, for the runner-ups
    wider = neighbourhoods(*vectors, options.k, search, extra=1)
    k = min(options.k, wider.forward.scores.shape[1])
    neighbours = Neighbours(*(near.nearest(k) for near in wider))
    candidates = candidate_pairs(neighbours)

    known_scores = None if known is None else score_known(known, vectors, k)
    if known_scores is not None and len(known_scores) < FEWEST_FOUND:
        if options.threshold == "auto" and len(candidates) >= FEWEST_CANDIDATES:
            raise UserError(
                f"only {len(known_scores)} of the {len(known[0])} known translations are nearest "
                f"neighbours in the texts, at least {FEWEST_FOUND} are needed; give more, or none"
            )
        known_scores = None  # a given threshold does not depend on the estimate

    choice = choose(candidates, wider, k, options.threshold, options.min_precision, known_scores)
    return neighbours, candidates, choice


def encode_texts(
    encoder: Encoder, texts: Texts, folder: str | Path, progress: bool
) -> dict[str, np.ndarray]:
    """Encode the distinct sentences of texts. Vectors of an earlier run are read instead.

    Several processes share the work, and only the first one gets the vectors (N, D). In the others
    they have no rows.

    Args:
        folder: keeps the vectors. Those of each model and its settings, and those of groups, have
            subfolders.
    """
    fingerprint = model_fingerprint(encoder)
    vectors = {}
    for role, text in texts.items():
        name = f"{role}.{Path(text.name).name}"
        kind = f".groups{text.groups.shape[1]}" if isinstance(text, GroupedText) else ""
        place = Path(folder, f"{name}{kind}.{fingerprint[:8]}")
        vectors[role] = embed_to_disk(
            encoder,
            text,
            place,
            fingerprint=fingerprint,
            where=text.place,
            name=name,
            progress=progress,
        )
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
            side = side.to(torch.promote_types(side.dtype, torch.float32)).numpy(force=True)
        if not isinstance(side, np.ndarray) or side.dtype.kind != "f":
            texts[name] = DistinctSentences(listed(side), name)
            side = np.asarray(model.encode(list(texts[name])))
        if not np.isfinite(side).all():  # the search would find it late
            raise UserError(f"{name}: NaN or infinity in the vectors")
        vectors.append(side)

    found = mine_texts(texts, (vectors[0], vectors[1]), chosen)
    choice = json.dumps(found.numbers["threshold_choice"])
    return found.table.replace_schema_metadata({"mining": choice})
