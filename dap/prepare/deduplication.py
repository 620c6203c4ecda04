"""Find equal pairs and draw samples, by 64-bit keys of the texts (`dap.text_keys`).

The keys lie in Parquet files. They are processed in ranges of their values, about `RANGE_ROWS` rows
at a time, so that a few hundred MB of memory are enough for any number of pairs.

Shapes: N texts or pairs.
"""

from collections.abc import Iterator

import numpy as np
import polars as pl

from dap.text_keys import scramble

#: Rows whose keys are sorted at a time.
RANGE_ROWS = 4_000_000


def pair_keys(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Compute a key for each pair. Swapping the two sides gives another key.

    Args:
        source: keys of the source texts, uint64 (N,).
        target: keys of the target texts, uint64 (N,).

    Returns:
        uint64 (N,).
    """
    salt = np.uint64(0x9E3779B97F4A7C15)
    return scramble(scramble(source ^ salt) ^ target)


class Admission:
    """Drops rows while they come in, if they cannot be among the `size` rows of smallest rank.

    The admitted rows contain all rows that `sample` would choose, and not many more.

    Args:
        size: rows of the sample. None admits all rows.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.limit = np.uint64(2**64 - 1)  # the largest rank that is admitted
        self._seen = np.empty(0, np.uint64)

    def __call__(self, ranks: np.ndarray) -> np.ndarray:
        """Tell which rows to admit.

        Args:
            ranks: uint64 (N,).

        Returns:
            bool (N,).
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
    """Count the different keys in a column.

    Args:
        rows: any number of rows.
        key: a column of uint64.
        range_rows: rows to process at a time.
    """
    count = 0
    for part in _ranges(rows, key, range_rows):
        count += part.select(pl.col(key).n_unique()).collect(engine="streaming").item()
    return count


def repeated(rows: pl.LazyFrame, key: str, range_rows: int = RANGE_ROWS) -> pl.DataFrame:
    """Return the keys that occur more than once in a column, in no particular order.

    Args:
        rows: any number of rows.
        key: a column of uint64.
        range_rows: rows to process at a time.
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
    """Choose the first row of each key, and of these the rows with the smallest keys.

    Args:
        rows: any number of rows. The column `row` numbers them.
        key: a column of uint64.
        size: rows to choose. None chooses the first row of each key.
        range_rows: rows to process at a time.

    Returns:
        The chosen rows in the order of their keys.
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
    """Split the rows into ascending ranges of their key, each of about `range_rows` rows.

    Keys are spread evenly over all values of uint64, so ranges of equal width hold about equally
    many.
    """
    total = rows.select(pl.len()).collect().item()
    count = -(-total // range_rows)
    for number in range(count):
        first = (2**64 * number) // count
        last = (2**64 * (number + 1)) // count - 1
        lower, upper = pl.lit(first, pl.UInt64), pl.lit(last, pl.UInt64)
        yield rows.filter(pl.col(key).is_between(lower, upper))
