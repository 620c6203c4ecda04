"""Find translations in two texts, by margin scores over nearest neighbours.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours, `P` pairs.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from dap import disk_arrays
from dap.disk_arrays import concatenate_on_disk, row_blocks, zeros_on_disk
from dap.errors import UserError
from dap.mining.external_sort import sort_records
from dap.search import Neighbours, Search, mutual_neighbours, unit_rows

logger = logging.getLogger(__name__)

MARGINS = ("ratio", "distance", "absolute")
RETRIEVALS = ("max", "intersection", "forward", "backward")
#: Pairs whose vectors are in memory at a time.
VECTOR_BLOCK = 4096
PAIR = np.dtype([("score", np.float64), ("source", np.int64), ("target", np.int64)])


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
        """Yield the pairs in blocks that fit into memory. There is at least one block."""
        for block in row_blocks(len(self)):
            yield self[block]

    def records(self) -> np.ndarray:
        """Return the pairs as one structured array (P,) of dtype `PAIR`."""
        records = np.empty(len(self), PAIR)
        records["score"] = self.scores
        records["source"] = self.source
        records["target"] = self.target
        return records

    @classmethod
    def concatenate(cls, blocks: Iterable["MinedPairs"]) -> "MinedPairs":
        """Concatenate at least one block of pairs in a temporary file."""
        records = concatenate_on_disk(block.records() for block in blocks)
        return cls(records["score"], records["source"], records["target"])


def neighbourhoods(
    source: np.ndarray,
    target: np.ndarray,
    k: int = 4,
    search: Search = mutual_neighbours,
    extra: int = 0,
) -> Neighbours:
    """Find the k nearest neighbours in both directions.

    If a text has fewer than k sentences, k is reduced to their number, with a warning.

    Args:
        source: (N, D).
        target: (M, D).
        k: neighbours of a sentence.
        search: `mutual_neighbours`, or an approximate search with the same arguments.
        extra: more neighbours to find, as far as there are so many.

    Raises:
        ValueError: k is below 1, a text has no sentences, or the search refuses its input.
    """
    if k < 1:
        raise UserError(f"k={k}: at least 1 neighbour")
    for side, rows in (("source", source), ("target", target)):
        if len(rows) == 0:
            raise UserError(f"the {side} text has no sentences: nothing can be mined")
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
    """Return only the k nearest of the neighbours."""
    return Neighbours(
        neighbours.forward_scores[:, :k],
        neighbours.forward_indices[:, :k],
        neighbours.backward_scores[:, :k],
        neighbours.backward_indices[:, :k],
    )


def margin_scores(
    cosine: np.ndarray, source_mean: np.ndarray, target_mean: np.ndarray, margin: str = "ratio"
) -> np.ndarray:
    """Compare the cosine of a pair with the neighbourhoods of its two sentences.

    With b the mean of `source_mean` and `target_mean`, the score is (Artetxe & Schwenk 2019,
    section 3):

    - "ratio": cosine / b, or 0 where b is not positive, because the ratio means nothing there
    - "distance": cosine - b
    - "absolute": the cosine

    The paper's appendix "Scoring Function For BUCC" prints the ratio without the factor ½ in b, and
    φ(x, y) where φ(x, z) is meant.

    >>> margin_scores(np.array([0.9]), np.array([0.7]), np.array([0.5]), "ratio").round(6).tolist()
    [1.5]

    Args:
        cosine: any shape.
        source_mean: same shape, the mean cosine of the source sentence and its k nearest targets.
        target_mean: same shape, the mean cosine of the target sentence and its k nearest sources.
        margin: one of `MARGINS`.
    """
    if margin not in MARGINS:
        raise UserError(f"margin={margin!r}: choose one of {', '.join(MARGINS)}")
    cosine = np.asarray(cosine, np.float64)
    if margin == "absolute":
        return cosine
    mean = (source_mean + target_mean) / 2
    if margin == "distance":
        return cosine - mean
    return np.divide(cosine, mean, out=np.zeros_like(cosine), where=mean > 0)


def candidate_pairs(
    neighbours: Neighbours, margin: str = "ratio", retrieval: str = "max"
) -> MinedPairs:
    """Choose the pairs that may be translations, best first.

    The candidate of a sentence is the one of its k neighbours with the best margin. The retrieval
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

    Raises:
        ValueError: an unknown margin or retrieval.
    """
    if retrieval not in RETRIEVALS:
        raise UserError(f"retrieval={retrieval!r}: choose one of {', '.join(RETRIEVALS)}")

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
    else:
        candidates = chain(forward.blocks(), backward.blocks())

    # sort by descending score, which is ascending by the negated score
    ordered = sort_records(
        MinedPairs(-block.scores, block.source, block.target).records() for block in candidates
    )
    if retrieval == "max":
        ordered = _without_repeated_sentences(ordered, len(forward), len(backward))
    return MinedPairs.concatenate(_blocks_of_sorted(ordered))


def _mean_cosines(scores: np.ndarray) -> np.ndarray:
    """Average the cosines (n, k) of each neighbourhood: (n,) float64."""
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

    The rows are the source of the pairs.

    Args:
        cosines: (n, k), of the rows and their neighbours.
        indices: (n, k), rows of the neighbours on the other side.
        own_means: (n,) mean cosine of each row's neighbourhood.
        other_means: mean cosine of the neighbourhood of each row of the other side.
    """

    def best_of_each_block() -> Iterator[MinedPairs]:
        for block in row_blocks(len(cosines)):
            neighbours = indices[block]
            scores = margin_scores(
                cosines[block], own_means[block, None], other_means[neighbours], margin
            )  # (n, k)
            rows = np.arange(len(scores))
            best = scores.argmax(1)  # (n,)
            yield MinedPairs(scores[rows, best], block.start + rows, neighbours[rows, best])

    return MinedPairs.concatenate(best_of_each_block())


def _intersection(forward: MinedPairs, backward: MinedPairs) -> Iterator[MinedPairs]:
    """Yield the forward candidates whose target has the source as its own candidate.

    Args:
        forward: candidate of each source row, in the order of the source.
        backward: candidate of each target row, in the order of the target.
    """
    for block in forward.blocks():
        yield block[backward.source[block.target] == block.source]


def _without_repeated_sentences(
    ordered: Iterable[tuple], source_count: int, target_count: int
) -> Iterator[tuple]:
    """Yield, in their order, the pairs whose two sentences no earlier pair has taken."""
    source_taken = memoryview(zeros_on_disk((source_count,), np.uint8))
    target_taken = memoryview(zeros_on_disk((target_count,), np.uint8))
    for pair in ordered:
        _, i, j = pair
        if not (source_taken[i] or target_taken[j]):
            source_taken[i] = 1
            target_taken[j] = 1
            yield pair


def _blocks_of_sorted(ordered: Iterator[tuple]) -> Iterator[MinedPairs]:
    """Collect sorted records in blocks that fit into memory, and undo the negated scores."""
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
    """Score given pairs by their margin over the neighbourhoods of both texts, in the given order.

    Args:
        source: (N, D), need not be normalised.
        target: (M, D), need not be normalised.
        source_rows: (P,) source row of each pair.
        target_rows: (P,) target row of each pair.
        neighbours: neighbours of all rows in both directions.
        margin: one of `MARGINS`.
    """
    source_means = _mean_cosines(neighbours.forward_scores)
    target_means = _mean_cosines(neighbours.backward_scores)

    def scored_blocks() -> Iterator[MinedPairs]:
        for block in row_blocks(len(source_rows), VECTOR_BLOCK):
            i = source_rows[block]
            j = target_rows[block]
            products = unit_rows(source[i], "source") * unit_rows(target[j], "target")
            cosine = products.sum(1).numpy()
            yield MinedPairs(margin_scores(cosine, source_means[i], target_means[j], margin), i, j)

    return MinedPairs.concatenate(scored_blocks())


def select(
    pairs: MinedPairs, threshold: float | None = None, top_n: int | None = None
) -> MinedPairs:
    """Keep the pairs that score at least `threshold`, and of those the `top_n` best.

    They keep their order. Of pairs with equal scores the earlier one counts as better.

    >>> pairs = MinedPairs(np.array([0.1, 0.3, 0.2]), np.arange(3), np.arange(3))
    >>> select(pairs, threshold=0.2).source.tolist(), select(pairs, top_n=1).source.tolist()
    ([1, 2], [1])
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
    """Find the n-th best pair. Returns: its score, and its position among the pairs."""

    def scores_and_positions() -> Iterator[np.ndarray]:
        for block in row_blocks(len(pairs)):
            positions = np.arange(block.start, block.stop)
            yield MinedPairs(-pairs.scores[block], positions, positions).records()

    negative_score, position, _ = next(islice(sort_records(scores_and_positions()), n - 1, None))
    return -negative_score, position
