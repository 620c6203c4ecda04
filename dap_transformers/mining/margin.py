"""Find translations in two texts, by margin scores over nearest neighbours.

Mined pairs are a structured array (P,) of `PAIR`, which may be in a temporary file, so that there
can be more pairs than memory holds.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours, `P` pairs.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

import numpy as np

from dap_transformers.disk_arrays import (
    blocks_of,
    concatenate_on_disk,
    records_on_disk,
    row_blocks,
    sort_records,
    zeros_on_disk,
)
from dap_transformers.errors import UserError
from dap_transformers.search.exact import Neighbours, Search, mutual_neighbours, unit_rows

logger = logging.getLogger(__name__)

#: A pair of a source row and a target row (or line, from 0) with its margin score.
PAIR = np.dtype([("score", np.float64), ("source", np.int64), ("target", np.int64)])


def _ratio(cosine: np.ndarray, mean: np.ndarray) -> np.ndarray:
    """Divide, and return 0 where the mean is not positive."""
    return np.divide(cosine, mean, out=np.zeros_like(cosine), where=mean > 0)


#: Kind of margin -> function of the cosine and the mean cosine of both neighbourhoods.
MARGINS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "ratio": _ratio,
    "distance": lambda cosine, mean: cosine - mean,
    "absolute": lambda cosine, mean: cosine,
}


def neighbourhoods(
    source: np.ndarray,
    target: np.ndarray,
    k: int = 4,
    search: Search = mutual_neighbours,
    extra: int = 0,
) -> Neighbours:
    """Find the k + `extra` nearest neighbours of all source rows (N, D) and target rows (M, D).

    If a text has fewer than k sentences, k is reduced to their number, with a warning.
    """
    fewest = min(len(source), len(target))
    if k > fewest:
        text = "k=%d neighbours, but a text has only %d distinct sentences: k=%d is used"
        logger.warning(text, k, fewest, fewest)
    return search(source, target, min(k + extra, fewest))


def margin_of(
    cosine: np.ndarray, source_mean: np.ndarray, target_mean: np.ndarray, kind: str = "ratio"
) -> np.ndarray:
    """Compute the margin of pairs: how their cosine compares with the sentences' neighbourhoods.

    b is the mean of the mean cosines of both sentences and their k nearest. The score is cosine / b
    ("ratio", 0 where b is not positive), cosine - b ("distance") or the cosine ("absolute"), as in
    Artetxe & Schwenk (2019), section 3. Arrays are broadcast, the result is float64.

    The paper's appendix "Scoring Function For BUCC" prints the ratio without the factor ½ in b, and
    φ(x, y) where φ(x, z) is meant.

    >>> margin_of(np.array([0.9]), np.array([0.7]), np.array([0.5])).round(6).tolist()
    [1.5]
    """
    return MARGINS[kind](np.asarray(cosine, np.float64), (source_mean + target_mean) / 2)


def _intersection(forward: np.ndarray, backward: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the forward candidates whose target has the source as its own candidate."""
    for block in blocks_of(forward):
        yield block[backward["source"][block["target"]] == block["source"]]


#: Which candidates are kept -> function of those of all source rows and of all target rows.
RETRIEVALS: dict[str, Callable[[np.ndarray, np.ndarray], Iterator[np.ndarray]]] = {
    "max": lambda forward, backward: chain(blocks_of(forward), blocks_of(backward)),
    "intersection": _intersection,
    "forward": lambda forward, backward: blocks_of(forward),
    "backward": lambda forward, backward: blocks_of(backward),
}


def candidate_pairs(
    neighbours: Neighbours, margin: str = "ratio", retrieval: str = "max"
) -> np.ndarray:
    """Choose the pairs (P,) that may be translations, best first, then by source and target row.

    The candidate of a sentence is the one of its k neighbours with the best margin. `retrieval`
    keeps those of the source ("forward") or of the target ("backward"), of both ("intersection"),
    or of either, but no sentence twice ("max", Artetxe & Schwenk 2019, section 3.2, as in LASER).

    Memory does not grow with N and M, because large arrays are in temporary files.

    >>> found = mutual_neighbours(np.eye(3), np.eye(3)[[1, 2, 0]], k=2)
    >>> candidate_pairs(found).tolist()
    [(2.0, 0, 2), (2.0, 1, 0), (2.0, 2, 1)]
    """
    forward = _best_candidates(neighbours, margin, "source", "target")
    backward = _best_candidates(turned(neighbours), margin, "target", "source")

    ordered = sort_records(RETRIEVALS[retrieval](forward, backward))
    if retrieval == "max":
        ordered = _without_repeated_sentences(ordered, len(forward), len(backward))
    pairs = records_on_disk(ordered, PAIR)
    np.negative(pairs["score"], out=pairs["score"])
    return pairs


def turned(near: Neighbours) -> Neighbours:
    """Exchange source and target."""
    return Neighbours(
        near.backward_scores, near.backward_indices, near.forward_scores, near.forward_indices
    )


def _best_candidates(near: Neighbours, margin: str, own: str, other: str) -> np.ndarray:
    """Pair each row of the side `own`, the source of `near`, with its neighbour of best margin.

    Scores are negated, so that the best sort first.
    """
    backward = blocks_of(near.backward_scores)
    other_means = concatenate_on_disk(block.mean(1, dtype=np.float64) for block in backward)  # (M,)

    def best_of_each_block() -> Iterator[np.ndarray]:
        for block in row_blocks(len(near.forward_scores)):
            cosines, indices = near.forward_scores[block], near.forward_indices[block]  # (n, k)
            own_means = cosines.mean(1, dtype=np.float64, keepdims=True)
            scores = margin_of(cosines, own_means, other_means[indices], margin)  # (n, k)
            rows = np.arange(len(indices))
            best = scores.argmax(1)  # (n,)
            pairs = np.empty(len(indices), PAIR)
            pairs["score"] = -scores[rows, best]
            pairs[own] = block.start + rows
            pairs[other] = indices[rows, best]
            yield pairs

    return concatenate_on_disk(best_of_each_block())


def _without_repeated_sentences(
    ordered: Iterable[tuple], source_count: int, target_count: int
) -> Iterator[tuple]:
    """Yield the pairs in their order, without those of sentences that were yielded before."""
    source_taken = memoryview(zeros_on_disk((source_count,), np.uint8))
    target_taken = memoryview(zeros_on_disk((target_count,), np.uint8))
    for pair in ordered:
        _, i, j = pair
        if not (source_taken[i] or target_taken[j]):
            source_taken[i] = 1
            target_taken[j] = 1
            yield pair


def score_pairs(
    source: np.ndarray,
    target: np.ndarray,
    source_rows: np.ndarray,
    target_rows: np.ndarray,
    neighbours: Neighbours,
    margin: str = "ratio",
) -> np.ndarray:
    """Score given pairs (P,) of rows by their margin over the neighbourhoods in both texts.

    Vectors (N, D) and (M, D) need not be normalised. Those of all P pairs are in memory.
    """
    source_means = neighbours.forward_scores[source_rows].mean(1, dtype=np.float64)
    target_means = neighbours.backward_scores[target_rows].mean(1, dtype=np.float64)
    products = unit_rows(source[source_rows], "source") * unit_rows(target[target_rows], "target")
    return margin_of(products.sum(1).numpy(), source_means, target_means, margin)


def select(pairs: np.ndarray, threshold: float | None) -> np.ndarray:
    """Keep the pairs (P,) that score at least `threshold`, in their order. None keeps all."""
    if threshold is None:
        return pairs
    kept = concatenate_on_disk(block[block["score"] >= threshold] for block in blocks_of(pairs))
    if not len(kept):
        best = pairs["score"].max(initial=-np.inf)
        raise UserError(
            f"threshold={threshold}: no pair scores so high, the best of {len(pairs)} has "
            f"{best:.6f}; give a lower one"
        )
    return kept
