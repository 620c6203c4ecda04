"""Find translations in two texts, by margin scores over nearest neighbours.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours, `P` pairs.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from dap_transformers import disk_arrays
from dap_transformers.disk_arrays import (
    concatenate_on_disk,
    row_blocks,
    sort_records,
    zeros_on_disk,
)
from dap_transformers.search.exact import Neighbours, Search, mutual_neighbours, unit_rows

logger = logging.getLogger(__name__)

RETRIEVALS = ("max", "intersection", "forward", "backward")
#: Pairs whose vectors are in memory at a time.
VECTOR_BLOCK = 4096
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


@dataclass(frozen=True)
class MinedPairs:
    """Pairs of a source row and a target row with their margin scores.

    The arrays may be in a temporary file, so that there can be more pairs than memory holds.

    Attributes:
        scores: (P,) float64.
        source: (P,) int64, rows of the source.
        target: (P,) int64, rows of the target.
    """

    scores: np.ndarray
    source: np.ndarray
    target: np.ndarray

    def __len__(self) -> int:
        return len(self.scores)

    def __getitem__(self, chosen: np.ndarray | slice) -> "MinedPairs":
        return MinedPairs(self.scores[chosen], self.source[chosen], self.target[chosen])

    def blocks(self) -> Iterator["MinedPairs"]:
        """Yield the pairs in their order, in blocks that fit into memory.

        If there are no pairs, one empty block is yielded.
        """
        for block in row_blocks(len(self)):
            yield self[block]

    def records(self) -> np.ndarray:
        """Return the pairs as a structured array (P,): "score", "source" and "target" of each."""
        records = np.empty(len(self), PAIR)
        records["score"] = self.scores
        records["source"] = self.source
        records["target"] = self.target
        return records

    @classmethod
    def concatenate(cls, blocks: Iterable["MinedPairs"]) -> "MinedPairs":
        """Return the pairs of several blocks (at least one) as one object, in a temporary file."""
        records = concatenate_on_disk(block.records() for block in blocks)
        return cls(records["score"], records["source"], records["target"])


def neighbourhoods(
    source: np.ndarray,
    target: np.ndarray,
    k: int = 4,
    search: Search = mutual_neighbours,
    extra: int = 0,
) -> Neighbours:
    """Find the nearest neighbours of each sentence among the sentences of the other text.

    If a text has fewer than k sentences, k is reduced to their number, with a warning.

    Args:
        source: vectors of the source sentences, (N, D).
        target: vectors of the target sentences, (M, D).
        search: `mutual_neighbours`, or an approximate search with the same arguments.

    Returns:
        Cosines and rows of the k + `extra` nearest neighbours, in both directions. There are fewer
        if one of the texts has fewer sentences.
    """
    fewest = min(len(source), len(target))
    if k > fewest:
        logger.warning(
            "k=%d neighbours, but a text has only %d distinct sentences: k=%d is used",
            k,
            fewest,
            fewest,
        )
    return search(source, target, min(k + extra, fewest))


def nearest_k(neighbours: Neighbours, k: int) -> Neighbours:
    """Keep only the k nearest of the neighbours that were found for each row.

    Returns:
        The k nearest neighbours of each row, in both directions.
    """
    return Neighbours(
        neighbours.forward_scores[:, :k],
        neighbours.forward_indices[:, :k],
        neighbours.backward_scores[:, :k],
        neighbours.backward_indices[:, :k],
    )


def margin_of(
    cosine: np.ndarray, source_mean: np.ndarray, target_mean: np.ndarray, kind: str = "ratio"
) -> np.ndarray:
    """Compute the margin of pairs: how their cosine compares with the sentences' neighbourhoods.

    A sentence that is similar to many others then gets no high score with all of them.

    With b the mean of `source_mean` and `target_mean`, the score is (Artetxe & Schwenk 2019,
    section 3):

    - "ratio": cosine / b, or 0 where b is not positive, because the ratio means nothing there
    - "distance": cosine - b
    - "absolute": the cosine

    The paper's appendix "Scoring Function For BUCC" prints the ratio without the factor ½ in b, and
    φ(x, y) where φ(x, z) is meant.

    >>> margin_of(np.array([0.9]), np.array([0.7]), np.array([0.5])).round(6).tolist()
    [1.5]

    Args:
        source_mean: mean cosine of the source sentence and its k nearest targets. Its shape is that
            of `cosine`, or can be broadcast to it.
        kind: one of `MARGINS`.

    Returns:
        Scores float64, with the shape of `cosine`.
    """
    return MARGINS[kind](np.asarray(cosine, np.float64), (source_mean + target_mean) / 2)


def candidate_pairs(
    neighbours: Neighbours, margin: str = "ratio", retrieval: str = "max"
) -> MinedPairs:
    """Choose the pairs that may be translations, best first.

    The candidate of a sentence is the one of its k neighbours with the best margin. `retrieval`
    says which candidates are kept:

    - "forward": the candidate of every source sentence
    - "backward": the candidate of every target sentence
    - "intersection": the pairs that are candidates in both directions
    - "max": the candidates of both directions, best first, but no sentence twice (Artetxe & Schwenk
      2019, section 3.2, as in LASER)

    Pairs with equal scores are ordered by source row, then by target row. The time is O(n log n) in
    n = (N + M) · k. Memory does not grow with n, because large arrays are in temporary files.

    >>> found = mutual_neighbours(np.eye(3), np.eye(3)[[1, 2, 0]], k=2)
    >>> pairs = candidate_pairs(found)
    >>> pairs.source.tolist(), pairs.target.tolist(), pairs.scores.tolist()
    ([0, 1, 2], [2, 0, 1], [2.0, 2.0, 2.0])

    Args:
        margin: one of `MARGINS`.
        retrieval: "forward", "backward", "intersection" or "max".

    Returns:
        The candidates with their margin scores, best first, in a temporary file.
    """
    # find the best candidate of each sentence
    source_means = _mean_cosines(neighbours.forward_scores)  # (N,)
    target_means = _mean_cosines(neighbours.backward_scores)  # (M,)
    forward = _best_candidates(
        neighbours.forward_scores, neighbours.forward_indices, source_means, target_means, margin
    )
    swapped = _best_candidates(
        neighbours.backward_scores, neighbours.backward_indices, target_means, source_means, margin
    )
    backward = MinedPairs(swapped.scores, source=swapped.target, target=swapped.source)

    # keep those that the retrieval asks for
    if retrieval == "forward":
        candidates = forward.blocks()
    elif retrieval == "backward":
        candidates = backward.blocks()
    elif retrieval == "intersection":
        candidates = _intersection(forward, backward)
    elif retrieval == "max":
        candidates = chain(forward.blocks(), backward.blocks())
    else:
        raise ValueError(f"retrieval={retrieval!r}: choose one of {', '.join(RETRIEVALS)}")

    # sort by descending score, which is ascending by the negated score
    ordered = sort_records(
        MinedPairs(-block.scores, block.source, block.target).records() for block in candidates
    )
    if retrieval == "max":
        ordered = _without_repeated_sentences(ordered, len(forward), len(backward))
    return MinedPairs.concatenate(_blocks_of_sorted(ordered))


def _mean_cosines(scores: np.ndarray) -> np.ndarray:
    """Return the mean of each row of cosines (n, k): (n,) float64, in a temporary file."""
    return concatenate_on_disk(
        scores[block].mean(1, dtype=np.float64) for block in row_blocks(len(scores))
    )


def _best_candidates(
    cosines: np.ndarray,
    indices: np.ndarray,
    own_means: np.ndarray,
    other_means: np.ndarray,
    margin: str,
) -> MinedPairs:
    """Pair each of n rows with the one of its k neighbours that has the best margin.

    Returns:
        n pairs in the order of the rows. Their `source` is this side, their `target` the other one.
    """

    def best_of_each_block() -> Iterator[MinedPairs]:
        for block in row_blocks(len(cosines)):
            neighbours = indices[block]
            scores = margin_of(
                cosines[block], own_means[block, None], other_means[neighbours], margin
            )  # (n, k)
            rows = np.arange(len(scores))
            best = scores.argmax(1)  # (n,)
            yield MinedPairs(scores[rows, best], block.start + rows, neighbours[rows, best])

    return MinedPairs.concatenate(best_of_each_block())


def _intersection(forward: MinedPairs, backward: MinedPairs) -> Iterator[MinedPairs]:
    """Yield the forward candidates whose target has the source as its own candidate."""
    for block in forward.blocks():
        yield block[backward.source[block.target] == block.source]


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


def _blocks_of_sorted(ordered: Iterator[tuple]) -> Iterator[MinedPairs]:
    """Yield blocks of pairs from tuples (negated score, source row, target row).

    Each block fits into memory. Its scores are no longer negated: that was for sorting. The last
    block may be empty.
    """
    while True:
        block = np.fromiter(islice(ordered, disk_arrays.BLOCK_ROWS), PAIR)
        yield MinedPairs(-block["score"], block["source"], block["target"])
        if len(block) < disk_arrays.BLOCK_ROWS:
            return


def score_pairs(
    source: np.ndarray,
    target: np.ndarray,
    source_rows: np.ndarray,
    target_rows: np.ndarray,
    neighbours: Neighbours,
    margin: str = "ratio",
) -> MinedPairs:
    """Score given pairs by their margin over the neighbourhoods in both texts.

    Args:
        source: vectors of the source, (N, D). They need not be normalised.
        target: vectors of the target, (M, D). They need not be normalised.
        source_rows: (P,) source row of each pair.
        target_rows: (P,) target row of each pair.
        margin: one of `MARGINS`.

    Returns:
        The P pairs with their scores, in the given order.
    """
    source_means = _mean_cosines(neighbours.forward_scores)
    target_means = _mean_cosines(neighbours.backward_scores)

    def scored_blocks() -> Iterator[MinedPairs]:
        for block in row_blocks(len(source_rows), VECTOR_BLOCK):
            i = source_rows[block]
            j = target_rows[block]
            products = unit_rows(source[i], "source") * unit_rows(target[j], "target")
            cosine = products.sum(1).numpy()
            yield MinedPairs(margin_of(cosine, source_means[i], target_means[j], margin), i, j)

    return MinedPairs.concatenate(scored_blocks())


def select(
    pairs: MinedPairs, threshold: float | None = None, top_n: int | None = None
) -> MinedPairs:
    """Keep the pairs that score at least `threshold`, and of those the `top_n` best.

    They keep their order. Of pairs with the same score the earlier one counts as better.

    >>> pairs = MinedPairs(np.array([0.1, 0.3, 0.2]), np.arange(3), np.arange(3))
    >>> select(pairs, threshold=0.2).source.tolist(), select(pairs, top_n=1).source.tolist()
    ([1, 2], [1])

    Args:
        pairs: pairs in any order.
        threshold: lowest score of a pair that is kept. None keeps all pairs.
        top_n: largest number of pairs to keep. None keeps all that reach the threshold.
    """
    if threshold is not None:
        good_enough = (block[block.scores >= threshold] for block in pairs.blocks())
        pairs = MinedPairs.concatenate(good_enough)
    if top_n is None or top_n >= len(pairs):
        return pairs

    lowest_score, last_position = _nth_best(pairs, top_n)

    def chosen_blocks() -> Iterator[MinedPairs]:
        for block in row_blocks(len(pairs)):
            scores = pairs.scores[block]
            positions = np.arange(block.start, block.stop)
            is_tied_and_early = (scores == lowest_score) & (positions <= last_position)
            yield pairs[block][(scores > lowest_score) | is_tied_and_early]

    return MinedPairs.concatenate(chosen_blocks())


def _nth_best(pairs: MinedPairs, n: int) -> tuple[float, int]:
    """Return the score of the n-th best pair, and its position in `pairs`, from 0.

    Of pairs with the same score the earlier one counts as better. `n` counts from 1.
    """

    def scores_and_positions() -> Iterator[np.ndarray]:
        for block in row_blocks(len(pairs)):
            positions = np.arange(block.start, block.stop)
            yield MinedPairs(-pairs.scores[block], positions, positions).records()

    negative_score, position, _ = next(islice(sort_records(scores_and_positions()), n - 1, None))
    return -negative_score, position
