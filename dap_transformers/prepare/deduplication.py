"""Find equal pairs and draw samples, by 64-bit hashes of the texts, called keys (`languages.py`).

The keys lie in Parquet files. They are processed in ranges of their values, about `RANGE_ROWS` rows
at a time, so that a few hundred MB of memory are enough for any number of pairs.

Shapes: N texts or pairs.
"""

from collections.abc import Iterator

import numpy as np
import polars as pl

from dap_transformers.languages import scramble

#: Rows whose keys are sorted at a time.
RANGE_ROWS = 4_000_000


def pair_keys(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Combine the hashes of source and target to one hash per pair.

    Swapping the two sides gives another hash. All are uint64 (N,).
    """
    salt = np.uint64(0x9E3779B97F4A7C15)
    return scramble(scramble(source ^ salt) ^ target)


class Admission:
    """Filters rows while they are read: drops those that a later `sample` cannot choose.

    The sample takes the `size` rows of smallest rank. The object remembers the smallest ranks
    that it has seen, and admits only rows that may still be among them. Call it with the ranks of
    the next rows.

    Args:
        size: number of rows of the sample. None admits all rows.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.limit = np.uint64(2**64 - 1)  # the largest rank that is admitted
        self._seen = np.empty(0, np.uint64)

    def __call__(self, ranks: np.ndarray) -> np.ndarray:
        """Tell which of the next rows a sample may still need.

        These are the rows whose rank may be among the smallest `size` ranks of all rows so far.
        The ranks are remembered for the next call.

        Args:
            ranks: rank of each row, uint64 (N,).

        Returns:
            bool (N,), True for rows that the sample may need. All are True if `size` is None.
        """
        admitted = ranks <= self.limit
        if self.size is None:
            return admitted

        self._seen = np.concatenate([self._seen, ranks[admitted]])
        if len(self._seen) > 2 * self.size:
            self._seen = np.unique(self._seen)[: self.size]
            if len(self._seen) == self.size:
                self.limit = self._seen[-1]
        return admitted


def count_distinct(rows: pl.LazyFrame, key: str, range_rows: int = RANGE_ROWS) -> int:
    """Return the number of different values in a column of hashes, uint64."""
    count = 0
    for part in _ranges(rows, key, range_rows):
        count += part.select(pl.col(key).n_unique()).collect(engine="streaming").item()
    return count


def repeated(rows: pl.LazyFrame, key: str, range_rows: int = RANGE_ROWS) -> pl.DataFrame:
    """Find the values that occur more than once in a column.

    Returns:
        A table with this column, uint64: each such value once, in no particular order.
    """
    found = [rows.select(key).head(0).collect()]
    for part in _ranges(rows, key, range_rows):
        counts = part.group_by(key).len()
        several = counts.filter(pl.col("len") > 1).select(key)
        found.append(several.collect(engine="streaming"))
    return pl.concat(found)


def sample(
    rows: pl.LazyFrame, key: str, size: int | None, range_rows: int = RANGE_ROWS
) -> pl.DataFrame:
    """Choose the rows with the smallest values in a column, one row for each value.

    Of rows with the same value, the first one (by `row`) is kept. If the column holds random
    ranks, this draws a sample without duplicates.

    Args:
        rows: a table of any size. The column `row` numbers its rows.
        key: name of the column, which holds hashes or ranks, uint64.
        size: largest number of rows to choose. None chooses the first row of each value.

    Returns:
        The chosen rows with all their columns, in ascending order of the column.
    """
    chosen = [rows.head(0).collect()]
    missing = size
    for part in _ranges(rows, key, range_rows):
        if missing == 0:
            break
        ordered = part.collect(engine="streaming").sort(key, "row")
        first = ordered.unique(key, keep="first", maintain_order=True)
        if missing is not None:
            first = first.head(missing)
            missing -= len(first)
        chosen.append(first)
    return pl.concat(chosen)


def _ranges(rows: pl.LazyFrame, key: str, range_rows: int) -> Iterator[pl.LazyFrame]:
    """Yield parts of a table, each with about `range_rows` rows, split by the values of a column.

    All rows with the same value are in the same part. The part with the smallest values comes
    first. Hashes are spread evenly over all values of uint64, so ranges of the same width hold
    about the same number of rows.
    """
    total = rows.select(pl.len()).collect().item()
    count = -(-total // range_rows)
    for number in range(count):
        first = (2**64 * number) // count
        last = (2**64 * (number + 1)) // count - 1
        lower, upper = pl.lit(first, pl.UInt64), pl.lit(last, pl.UInt64)
        yield rows.filter(pl.col(key).is_between(lower, upper))
