"""Which sentences of two texts translate each other: margin scores over nearest neighbours, and pairs chosen by them.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours, `P` pairs.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from dap import scratch
from dap.errors import UserError
from dap.scratch import Folder, in_order, on_disk, parts, zeros
from dap.search import Neighbours, Search, mutual_neighbours, unit_rows

logger = logging.getLogger(__name__)

MARGINS = ("ratio", "distance", "absolute")
RETRIEVALS = ("max", "intersection", "forward", "backward")
#: Pairs whose vectors are read at a time.
BLOCK = 4096
PAIR = np.dtype([("score", np.float64), ("source", np.int64), ("target", np.int64)])


@dataclass(frozen=True)
class Pairs:
    """Pairs of rows with their margin scores.

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

    def __getitem__(self, chosen: np.ndarray | slice) -> "Pairs":
        return Pairs(self.scores[chosen], self.source[chosen], self.target[chosen])

    def parts(self) -> Iterator["Pairs"]:
        """At least one part, as many pairs as are in memory at a time."""
        return (self[part] for part in parts(len(self)))

    def records(self) -> np.ndarray:
        """(P,) `PAIR`."""
        found = np.empty(len(self), PAIR)
        found["score"], found["source"], found["target"] = self.scores, self.source, self.target
        return found

    @classmethod
    def gathered(cls, several: Iterable["Pairs"], folder: Folder = None) -> "Pairs":
        """The pairs of at least one, in an unnamed file."""
        found = on_disk((pairs.records() for pairs in several), folder)
        return cls(*(found[name] for name in PAIR.names))


def neighbourhoods(
    source: np.ndarray, target: np.ndarray, k: int = 4, search: Search = mutual_neighbours
) -> Neighbours:
    """`mutual_neighbours`, with as many neighbours as there are where a text has fewer than k sentences (a warning).

    Args:
        source: (N, D).
        target: (M, D).
        search: exact unless told otherwise.

    Raises:
        ValueError: k below 1, a text without sentences, or what the search does not take.
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
    return search(source, target, min(k, fewest))


def margin_scores(
    cosine: np.ndarray, source_mean: np.ndarray, target_mean: np.ndarray, margin: str = "ratio"
) -> np.ndarray:
    """The cosine of a pair against the mean b of the mean cosines of both sentences' neighbourhoods.

    "ratio" is cosine / b, "distance" cosine − b, "absolute" the cosine alone (Artetxe & Schwenk 2019, section 3; the
    paper's appendix "Scoring Function For BUCC" prints the ratio without b's factor ½, and φ(x, y) for φ(x, z)).
    Where b is not positive a ratio says nothing: it is 0.

    >>> margin_scores(np.array([0.9]), np.array([0.7]), np.array([0.5]), "ratio").round(6).tolist()
    [1.5]

    Args:
        cosine: any shape.
        source_mean, target_mean: of that shape, the mean cosine of the source's (target's) k neighbours.
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


def _means(neighbours: Neighbours, folder: Folder) -> tuple[np.ndarray, np.ndarray]:
    """Mean cosine of each neighbourhood: (N,) and (M,) float64."""
    both = neighbours.forward_scores, neighbours.backward_scores
    forward, backward = (
        on_disk((scores[part].mean(1, dtype=np.float64) for part in parts(len(scores))), folder)
        for scores in both
    )
    return forward, backward


def mine(
    neighbours: Neighbours, margin: str = "ratio", retrieval: str = "max", folder: Folder = None
) -> Pairs:
    """Candidate pairs, best first. Each sentence's candidate is the one of its k neighbours with the best margin.

    "forward" takes the candidate of every source sentence, "backward" of every target sentence, "intersection" the
    pairs that are both. "max" takes the candidates of both directions, best first, and no sentence twice (Artetxe &
    Schwenk 2019, section 3.2, as in LASER). Of equal scores the lower source row comes first, then the lower target
    row. Time O(n log n) in n = (N + M) · k; memory does not grow with it, as arrays are in unnamed files.

    >>> found = mutual_neighbours(np.eye(3), np.eye(3)[[1, 2, 0]], k=2)
    >>> pairs = mine(found)
    >>> pairs.source.tolist(), pairs.target.tolist(), pairs.scores.tolist()
    ([0, 1, 2], [2, 0, 1], [2.0, 2.0, 2.0])

    Raises:
        ValueError: an unknown margin or retrieval.
    """
    if retrieval not in RETRIEVALS:
        raise UserError(f"retrieval={retrieval!r}: choose one of {', '.join(RETRIEVALS)}")
    means = _means(neighbours, folder)
    from_source = _candidates(
        neighbours.forward_scores, neighbours.forward_indices, *means, margin, folder
    )
    back = _candidates(
        neighbours.backward_scores, neighbours.backward_indices, *means[::-1], margin, folder
    )
    from_target = Pairs(back.scores, back.target, back.source)
    if retrieval == "intersection":
        chosen = (
            part[from_target.source[part.target] == part.source] for part in from_source.parts()
        )
    else:
        sides = {
            "forward": [from_source],
            "backward": [from_target],
            "max": [from_source, from_target],
        }[retrieval]
        chosen = chain.from_iterable(side.parts() for side in sides)
    ordered = in_order(
        (Pairs(-part.scores, part.source, part.target).records() for part in chosen), folder
    )
    if retrieval == "max":
        ordered = _one_pair_a_sentence(ordered, len(from_source), len(from_target), folder)
    return Pairs.gathered(_best_first(ordered), folder)


def _candidates(
    cosine: np.ndarray,
    indices: np.ndarray,
    own: np.ndarray,
    other: np.ndarray,
    margin: str,
    folder: Folder,
) -> Pairs:
    """Each of n rows, as a source, with the best of its k neighbours, by the mean cosines of both sides."""

    def each() -> Iterator[Pairs]:
        for part in parts(len(cosine)):
            scores = margin_scores(
                cosine[part], own[part, None], other[indices[part]], margin
            )  # (n, k)
            best = scores.argmax(1)[:, None]
            found, place = (
                np.take_along_axis(array, best, 1)[:, 0] for array in (scores, indices[part])
            )
            yield Pairs(found, np.arange(part.start, part.stop), place)

    return Pairs.gathered(each(), folder)


def _one_pair_a_sentence(
    ordered: Iterable[tuple], sources: int, targets: int, folder: Folder
) -> Iterator[tuple]:
    """From the first pair on, each whose two sentences are still free."""
    source_taken, target_taken = (
        memoryview(zeros((rows,), np.uint8, folder)) for rows in (sources, targets)
    )
    for pair in ordered:
        _, i, j = pair
        if not (source_taken[i] or target_taken[j]):
            source_taken[i] = target_taken[j] = 1
            yield pair


def _best_first(ordered: Iterator[tuple]) -> Iterator[Pairs]:
    """Pairs of so many records as are in memory at a time; their scores are negative."""
    while True:
        block = np.fromiter(islice(ordered, scratch.ROWS), PAIR)
        yield Pairs(-block["score"], block["source"], block["target"])
        if len(block) < scratch.ROWS:
            return


def score_pairs(
    source: np.ndarray,
    target: np.ndarray,
    source_rows: np.ndarray,
    target_rows: np.ndarray,
    neighbours: Neighbours,
    margin: str = "ratio",
    folder: Folder = None,
) -> Pairs:
    """The margin of given pairs over the neighbourhoods of both texts, in the order given.

    Args:
        source: (N, D), need not be normalised.
        target: (M, D).
        source_rows, target_rows: (P,) rows of the pairs.
    """
    source_mean, target_mean = _means(neighbours, folder)

    def each() -> Iterator[Pairs]:
        for part in parts(len(source_rows), BLOCK):
            i, j = source_rows[part], target_rows[part]
            cosine = (
                (unit_rows(source[i], "source") * unit_rows(target[j], "target")).sum(1).numpy()
            )
            yield Pairs(margin_scores(cosine, source_mean[i], target_mean[j], margin), i, j)

    return Pairs.gathered(each(), folder)


def select(
    pairs: Pairs, threshold: float | None = None, top_n: int | None = None, folder: Folder = None
) -> Pairs:
    """The pairs with a score of at least `threshold`, of them the `top_n` best, in the order they came.

    Equal scores: the earlier pairs are the better ones.

    >>> pairs = Pairs(np.array([0.1, 0.3, 0.2]), np.arange(3), np.arange(3))
    >>> select(pairs, threshold=0.2).source.tolist(), select(pairs, top_n=1).source.tolist()
    ([1, 2], [1])
    """
    if threshold is not None:
        pairs = Pairs.gathered((part[part.scores >= threshold] for part in pairs.parts()), folder)
    if top_n is None or top_n >= len(pairs):
        return pairs
    numbered = ((part, np.arange(part.start, part.stop)) for part in parts(len(pairs)))
    ranked = in_order(
        (Pairs(-pairs.scores[part], at, at).records() for part, at in numbered), folder
    )
    score, last, _ = next(islice(ranked, top_n - 1, None))

    def chosen(part: slice) -> np.ndarray:
        scores, at = -pairs.scores[part], np.arange(part.start, part.stop)
        return (scores < score) | ((scores == score) & (at <= last))

    return Pairs.gathered((pairs[part][chosen(part)] for part in parts(len(pairs))), folder)
