"""Which texts are the same, and which pairs to keep: normalised keys, a seeded sample, repeated values (arrays only).

Everything is decided by 64-bit keys (xxh3 of what `dap.training.normalise` leaves of a text), so memory does not hold
text. Keys lie in files on disk and are gone through in ranges of their value of about `PART` keys, one range at a
time: a few hundred MB however many there are. That two different texts get the same key by chance is expected
0.0003 times in 100 million pairs.

Shapes: N texts or pairs, C code points.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np
import xxhash

#: Keys that are sorted at a time, at 8 bytes, with an index and a copy of each: about 130 MB.
PART = 4_000_000
_LINE_FEED = 10
_CODE = 4  # bytes of a code point


@dataclass(frozen=True)
class Letters:
    """Normalised texts, one after the other.

    Attributes:
        codes: code points, uint32 (C,).
        bounds: text i is `codes[bounds[i]:bounds[i + 1]]`, int64 (N + 1,).
    """

    codes: np.ndarray
    bounds: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Letters of each text, int64 (N,)."""
        return np.diff(self.bounds)

    def keys(self) -> np.ndarray:
        """xxh3 of each text, uint64 (N,)."""
        content, digest = memoryview(self.codes.tobytes()), xxhash.xxh3_64_intdigest
        spans = pairwise((self.bounds * _CODE).tolist())
        return np.fromiter((digest(content[start:end]) for start, end in spans), np.uint64, len(self.bounds) - 1)

    def texts(self) -> list[str]:
        return [self.codes[start:end].tobytes().decode("utf-32-le") for start, end in pairwise(self.bounds.tolist())]


def normalise_all(texts: Sequence[str]) -> Letters:
    """`dap.training.normalise` of many texts at once: the letters and digits of each, case folded.

    A text without a letter or digit stands for itself.

    >>> normalise_all(["It's 5 o'clock!", "…"]).texts()
    ['its5oclock', '…']
    """
    joined = "\n".join(texts)
    if joined.count("\n") != len(texts) - 1:
        joined = "\n".join(text.replace("\n", " ") for text in texts)
    codes = _codes(joined.casefold())
    codes = codes[_alphanumeric()[codes]]  # line feeds stay, as bounds
    ends = np.append(np.flatnonzero(codes == _LINE_FEED), len(codes))[: len(texts)]
    bounds = np.concatenate([[0], ends - np.arange(len(ends))]).astype(np.int64)
    return _stand_for_themselves(Letters(codes[codes != _LINE_FEED], bounds), texts)


def _stand_for_themselves(letters: Letters, texts: Sequence[str]) -> Letters:
    empty = np.flatnonzero(letters.lengths == 0)
    fillings = [_codes(texts[row].strip()) for row in empty]
    if not fillings:
        return letters
    added = np.zeros(len(texts), np.int64)
    added[empty] = [len(filling) for filling in fillings]
    places = np.repeat(letters.bounds[empty], added[empty])
    codes = np.insert(letters.codes, places, np.concatenate(fillings))
    return Letters(codes, letters.bounds + np.concatenate([[0], np.cumsum(added)]))


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


@cache
def _alphanumeric() -> np.ndarray:
    """Whether each code point is a letter or digit, or the line feed: bool (0x110000,)."""
    table = np.fromiter((chr(code).isalnum() for code in range(0x110000)), bool, 0x110000)
    table[_LINE_FEED] = True
    return table


# Keys


def mix(keys: np.ndarray) -> np.ndarray:
    """A bijection of uint64 whose bits all depend on all (SplitMix64's finaliser)."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))


def pair_keys(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """One key for each pair of keys, which the order of the sides changes: uint64 (N,)."""
    return mix(mix(source ^ np.uint64(0x9E3779B97F4A7C15)) ^ target)


def ranks(keys: np.ndarray, seed: int) -> np.ndarray:
    """Places of keys in the random order of this seed, each key its own: uint64 (N,).

    Equal keys are neighbours in this order, and it depends on neither files nor processes.
    """
    salt = mix(np.array([seed % 2**64], np.uint64) ^ np.uint64(0xD1B54A32D192ED03))
    return mix(keys ^ salt)


# Counting and choosing


def _parts(arrays: Sequence[np.ndarray], part: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Values and positions (over all arrays, in order) of each range of values, ranges ascending."""
    total = sum(map(len, arrays))
    count = -(-total // part)
    for number in range(count):
        first, last = (2**64 * number) // count, (2**64 * (number + 1)) // count - 1
        values, positions, start = [], [], 0
        for array in arrays:
            found = np.flatnonzero((array >= np.uint64(first)) & (array <= np.uint64(last)))
            values.append(array[found])
            positions.append(found + start)
            start += len(array)
        yield np.concatenate(values), np.concatenate(positions)


def count_distinct(arrays: Sequence[np.ndarray], part: int = PART) -> int:
    """The number of different values in uint64 arrays, which may be memory maps."""
    return sum(len(_distinct(values)) for values, _ in _parts(arrays, part))


def _distinct(values: np.ndarray) -> np.ndarray:
    """The different values, ascending; `np.unique` hashes, which takes ten times as long here."""
    ordered = np.sort(values)
    return ordered[np.append(ordered[:1] == ordered[:1], ordered[1:] != ordered[:-1])]


def repeated_values(arrays: Sequence[np.ndarray], part: int = PART) -> np.ndarray:
    """The values that occur more than once in uint64 arrays, ascending."""
    found = [np.empty(0, np.uint64)]
    for values, _ in _parts(arrays, part):
        different, counts = np.unique(values, return_counts=True)
        found.append(different[counts > 1])
    return np.concatenate(found)


def sample(arrays: Sequence[np.ndarray], size: int | None, part: int = PART) -> np.ndarray:
    """Rows to keep: the first one of each rank, and of these the `size` with the smallest rank: bool (N,).

    Args:
        arrays: ranks of all rows in their order.
        size: None keeps each rank's first row.
    """
    kept = np.zeros(sum(map(len, arrays)), dtype=bool)
    left = len(kept) if size is None else size
    for values, positions in _parts(arrays, part):
        if not left:
            break
        _, first = np.unique(values, return_index=True)
        kept[positions[first[:left]]] = True
        left -= min(left, len(first))
    return kept


class Admission:
    """Turns away, while rows come in, those that cannot be among the `size` of smallest rank.

    What it admits holds all rows that `sample` would choose from all that came, and soon little more.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.limit = np.uint64(2**64 - 1)
        self._seen = np.empty(0, np.uint64)

    def __call__(self, ranks: np.ndarray) -> np.ndarray:
        """Whether to admit each row: bool (N,)."""
        admitted = ranks <= self.limit
        if self.size is not None:
            self._seen = np.concatenate([self._seen, ranks[admitted]])
            if len(self._seen) > 2 * self.size:
                self._seen = _distinct(self._seen)[: self.size]
                self.limit = self._seen[-1] if len(self._seen) == self.size else self.limit
        return admitted


def contains(ascending: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Whether each value is in an ascending array, which may be a memory map: bool (N,)."""
    if not len(ascending):
        return np.zeros(len(values), dtype=bool)
    places = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return ascending[places] == values
