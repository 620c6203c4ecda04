"""Which sentences of two texts translate each other: margin scores over nearest neighbours, and pairs chosen by them.

A sentence that a text repeats is one candidate, and so is counted once among the neighbours of others; empty lines are
none. `DistinctSentences` keeps the way back to the lines.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours, `P` pairs, `L` lines.
"""

import hashlib
import logging
import mmap
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dap.errors import UserError
from dap.search.similarity import Neighbours, Search, mutual_neighbours, unit_rows

logger = logging.getLogger(__name__)

MARGINS = ("ratio", "distance", "absolute")
RETRIEVALS = ("max", "intersection", "forward", "backward")
#: Pairs that are looked at at a time.
BLOCK = 4096


class DistinctSentences:
    """The distinct sentences of a text in order of first appearance, and the lines that hold them.

    Lines of white space hold no sentence; lines that differ in anything else are different sentences. The text is in
    an unnamed file, which ends with the process; in memory are about 150 bytes a sentence while it is read, and
    16 bytes afterwards.

    >>> text = DistinctSentences(["a", " ", "b", "a"])
    >>> list(text), text.rows.tolist(), text.first_line.tolist(), text.empty, text.repeated
    (['a', 'b'], [0, -1, 1, 0], [1, 3], 1, 1)

    Args:
        lines: read once.
        folder: where the file is; None for the system's own place.

    Attributes:
        rows: (L,) number of each line's sentence, -1 for an empty line.
        first_line: (N,) number of the first line that holds each sentence, from 1.
        empty: number of empty lines.
        repeated: number of lines whose sentence an earlier line holds.
    """

    def __init__(self, lines: Iterable[str], folder: str | Path | None = None) -> None:
        with tempfile.TemporaryFile(dir=folder) as file:
            rows, first_line, ends = array("q"), array("q"), array("q", [0])
            seen: dict[bytes, int] = {}
            for number, line in enumerate(lines, 1):
                data = line.encode(errors="surrogatepass")
                key = hashlib.blake2b(data, digest_size=16).digest()
                row = seen.setdefault(key, len(seen)) if line.strip() else -1
                rows.append(row)
                if row == len(first_line):
                    first_line.append(number)
                    ends.append(ends[-1] + len(data))
                    file.write(data)
            file.flush()
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if ends[-1] else b""
        self._ends = ends
        self.rows, self.first_line = np.array(rows, np.int64), np.array(first_line, np.int64)
        self.empty = int((self.rows < 0).sum())
        self.repeated = len(self.rows) - self.empty - len(self)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> str:
        return self._bytes[self._ends[row] : self._ends[row + 1]].decode(errors="surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))

    def counts(self) -> dict[str, int]:
        """What a report says of the text: lines, empty ones, repeated ones, and distinct sentences."""
        return {"lines": len(self.rows), "empty": self.empty, "repeated": self.repeated, "distinct": len(self)}

    def digest(self) -> str:
        """SHA-256 of the lines in their order; all empty lines are alike."""
        digest = hashlib.sha256(self._bytes)
        for part in (np.array([len(self)]), np.array(self._ends), self.rows):
            digest.update(part.astype("<i8").tobytes())
        return digest.hexdigest()


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

    def best_first(self) -> "Pairs":
        """By falling score; equal scores by source row, then target row."""
        return self[np.lexsort((self.target, self.source, -self.scores))]


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
        logger.warning("k=%d neighbours, but a text has only %d distinct sentences: k=%d is used", k, fewest, fewest)
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


def _means(neighbours: Neighbours) -> tuple[np.ndarray, np.ndarray]:
    """Mean cosine of each neighbourhood: (N,) and (M,) float64."""
    return neighbours.forward_scores.mean(1, dtype=np.float64), neighbours.backward_scores.mean(1, dtype=np.float64)


def mine(neighbours: Neighbours, margin: str = "ratio", retrieval: str = "max") -> Pairs:
    """Candidate pairs, best first. Each sentence's candidate is the one of its k neighbours with the best margin.

    "forward" takes the candidate of every source sentence, "backward" of every target sentence, "intersection" the
    pairs that are both. "max" takes the candidates of both directions, best first, and no sentence twice (Artetxe &
    Schwenk 2019, section 3.2, as in LASER). Time O(n log n), memory O(n) in n = (N + M) · k.

    >>> found = mutual_neighbours(np.eye(3), np.eye(3)[[1, 2, 0]], k=2)
    >>> pairs = mine(found)
    >>> pairs.source.tolist(), pairs.target.tolist(), pairs.scores.tolist()
    ([0, 1, 2], [2, 0, 1], [2.0, 2.0, 2.0])

    Raises:
        ValueError: an unknown margin or retrieval.
    """
    if retrieval not in RETRIEVALS:
        raise UserError(f"retrieval={retrieval!r}: choose one of {', '.join(RETRIEVALS)}")
    means = _means(neighbours)
    forward_scores, forward = _best(neighbours.forward_scores, neighbours.forward_indices, *means, margin)
    backward_scores, backward = _best(neighbours.backward_scores, neighbours.backward_indices, *means[::-1], margin)
    from_source = Pairs(forward_scores, np.arange(len(forward)), forward)
    from_target = Pairs(backward_scores, backward, np.arange(len(backward)))
    if retrieval == "forward":
        return from_source.best_first()
    if retrieval == "backward":
        return from_target.best_first()
    if retrieval == "intersection":
        return from_source[backward[forward] == np.arange(len(forward))].best_first()
    columns = ("scores", "source", "target")
    both = (np.concatenate([getattr(pairs, name) for pairs in (from_source, from_target)]) for name in columns)
    return _one_pair_a_sentence(Pairs(*both).best_first(), len(forward), len(backward))


def _best(
    cosine: np.ndarray, indices: np.ndarray, own_mean: np.ndarray, other_mean: np.ndarray, margin: str
) -> tuple[np.ndarray, np.ndarray]:
    """Score and index of the best of each row's k neighbours: (n,) and (n,)."""
    scores = margin_scores(cosine, own_mean[:, None], other_mean[indices], margin)  # (n, k)
    best = scores.argmax(1)[:, None]
    return np.take_along_axis(scores, best, 1)[:, 0], np.take_along_axis(indices, best, 1)[:, 0]


def _one_pair_a_sentence(pairs: Pairs, sources: int, targets: int) -> Pairs:
    """From the first pair on, each whose two sentences are still free."""
    source_taken, target_taken, kept = bytearray(sources), bytearray(targets), bytearray(len(pairs))
    for start in range(0, len(pairs), BLOCK):
        part = pairs[start : start + BLOCK]
        for number, (i, j) in enumerate(zip(part.source.tolist(), part.target.tolist(), strict=True), start):
            if not (source_taken[i] or target_taken[j]):
                source_taken[i] = target_taken[j] = kept[number] = 1
    return pairs[np.frombuffer(kept, bool)]


def score_pairs(
    source: np.ndarray,
    target: np.ndarray,
    source_rows: np.ndarray,
    target_rows: np.ndarray,
    neighbours: Neighbours,
    margin: str = "ratio",
) -> Pairs:
    """The margin of given pairs over the neighbourhoods of both texts, in the order given.

    Args:
        source: (N, D), need not be normalised.
        target: (M, D).
        source_rows, target_rows: (P,) rows of the pairs.
    """
    source_mean, target_mean = _means(neighbours)
    cosine = np.empty(len(source_rows))
    for start in range(0, len(source_rows), BLOCK):
        part = slice(start, start + BLOCK)
        own, other = unit_rows(source[source_rows[part]], "source"), unit_rows(target[target_rows[part]], "target")
        cosine[part] = (own * other).sum(1).numpy()
    scores = margin_scores(cosine, source_mean[source_rows], target_mean[target_rows], margin)
    return Pairs(scores, source_rows, target_rows)


def select(pairs: Pairs, threshold: float | None = None, top_n: int | None = None) -> Pairs:
    """The pairs with a score of at least `threshold`, of them the `top_n` best, in the order they came.

    Equal scores: the earlier pairs are the better ones.

    >>> pairs = Pairs(np.array([0.1, 0.3, 0.2]), np.arange(3), np.arange(3))
    >>> select(pairs, threshold=0.2).source.tolist(), select(pairs, top_n=1).source.tolist()
    ([1, 2], [1])
    """
    if threshold is not None:
        pairs = pairs[pairs.scores >= threshold]
    if top_n is not None:
        pairs = pairs[np.sort(np.argsort(-pairs.scores, kind="stable")[:top_n])]
    return pairs
