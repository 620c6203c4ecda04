"""Which pairs are the same and which to keep, by the keys of their texts (`dap.text_keys`).

Keys lie in Parquet files and are gone through in ranges of their value of about `PART` rows, so
that a few hundred MB are enough however many there are.

Shapes: N texts or pairs.
"""

from collections.abc import Iterator

import numpy as np
import polars as pl

from dap.text_keys import scramble

PART = 4_000_000  # rows whose keys are sorted at a time


def pair_keys(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """One key for each pair of keys, which the order of the sides changes: uint64 (N,)."""
    return scramble(scramble(source ^ np.uint64(0x9E3779B97F4A7C15)) ^ target)


class Admission:
    """Turns away, while rows come in, those that cannot be among the `size` of smallest rank; None admits all.

    What it admits holds all rows that `sample` would choose from all that came, and soon little more.
    """

    def __init__(self, size: int | None) -> None:
        self.size, self.limit = size, np.uint64(2**64 - 1)
        self._seen = np.empty(0, np.uint64)

    def __call__(self, ranks: np.ndarray) -> np.ndarray:
        """Whether to admit each row: bool (N,)."""
        admitted = ranks <= self.limit
        if self.size is not None:
            self._seen = np.concatenate([self._seen, ranks[admitted]])
            if len(self._seen) > 2 * self.size:
                self._seen = np.unique(self._seen)[: self.size]
                self.limit = self._seen[-1] if len(self._seen) == self.size else self.limit
        return admitted


# Over the files of a language, or of all


def count_distinct(rows: pl.LazyFrame, key: str, part: int = PART) -> int:
    """The number of different keys in a column of uint64."""
    found = (within.select(pl.col(key).n_unique()) for within in _ranges(rows, key, part))
    return sum(each.collect(engine="streaming").item() for each in found)


def repeated(rows: pl.LazyFrame, key: str, part: int = PART) -> pl.DataFrame:
    """The keys that come more than once in a column of uint64, in no particular order."""
    found = [rows.select(key).head(0)]
    for within in _ranges(rows, key, part):
        found.append(within.group_by(key).len().filter(pl.col("len") > 1).select(key))
    return pl.concat(each.collect(engine="streaming") for each in found)


def sample(rows: pl.LazyFrame, key: str, size: int | None, part: int = PART) -> pl.DataFrame:
    """The first row of each key, and of these the `size` with the smallest keys, in the order of their keys.

    Args:
        rows: with a column `row`, their number, and the key, uint64.
        size: None keeps each key's first row.
    """
    chosen = [rows.head(0).collect()]
    for within in _ranges(rows, key, part):
        left = None if size is None else size - sum(map(len, chosen))
        if left == 0:
            break
        first = (
            within.collect(engine="streaming")
            .sort(key, "row")
            .unique(key, keep="first", maintain_order=True)
        )
        chosen.append(first if left is None else first.head(left))
    return pl.concat(chosen)


def _ranges(rows: pl.LazyFrame, key: str, part: int) -> Iterator[pl.LazyFrame]:
    """The rows in ranges of their key's values, ranges ascending; each takes about `part` rows."""
    count = -(-rows.select(pl.len()).collect().item() // part)
    for number in range(count):
        first, last = (2**64 * number) // count, (2**64 * (number + 1)) // count - 1
        yield rows.filter(pl.col(key).is_between(pl.lit(first, pl.UInt64), pl.lit(last, pl.UInt64)))
