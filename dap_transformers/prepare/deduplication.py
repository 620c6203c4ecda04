"""Find equal pairs and draw samples, by 64-bit hashes of the texts, called keys (`text_keys.py`).

Shapes: N texts or pairs.
"""

import numpy as np
import polars as pl

from dap_transformers.text_keys import scramble

#: Rows whose keys are counted at a time.
PART_ROWS = 4_000_000


def pair_keys(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Combine the hashes of sources and targets, in this order, to one per pair: uint64 (N,)."""
    salt = np.uint64(0x9E3779B97F4A7C15)
    return scramble(scramble(source ^ salt) ^ target)


class Admission:
    """Tells while rows are read which of them a later `sample` may still choose.

    The sample takes the `size` rows of smallest rank. The object remembers the smallest ranks so
    far. If `size` is 0, it admits all rows.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.limit = np.uint64(2**64 - 1)  # the largest rank that is admitted
        self._seen = np.empty(0, np.uint64)

    def __call__(self, ranks: np.ndarray) -> np.ndarray:
        """Tell for the ranks of the next rows, uint64 (N,), whether the rows are admitted: bool."""
        admitted = ranks <= self.limit
        if self.size:
            self._seen = np.concatenate([self._seen, ranks[admitted]])
        if len(self._seen) > 2 * self.size:
            self._seen = np.unique(self._seen)[: self.size]
            if len(self._seen) == self.size:
                self.limit = self._seen[-1]
        return admitted


def count_distinct(rows: pl.LazyFrame, key: str, part_rows: int = PART_ROWS) -> int:
    """Return the number of different values in a column of hashes, uint64.

    They are counted in parts of about `part_rows` rows, so a few hundred MB of memory are enough.
    """
    parts = rows.select(pl.len()).collect().item() // part_rows + 1
    count = 0
    for number in range(parts):
        part = rows.filter(pl.col(key) % parts == number)
        count += part.select(pl.col(key).n_unique()).collect(engine="streaming").item()
    return count


def sample(rows: pl.LazyFrame, key: str, size: int | None) -> pl.DataFrame:
    """Choose the `size` rows with the smallest values in a column, and only one for each value.

    Of rows with the same value, the first one (by `row`) is kept. If the column holds random
    ranks, this draws a sample without duplicates. The result is in the order of the column.
    """
    ordered = rows.sort(key, "row").collect()
    first = ordered.unique(key, keep="first", maintain_order=True)
    return first if size is None else first.head(size)
