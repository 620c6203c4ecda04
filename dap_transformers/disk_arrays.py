"""Arrays in temporary files, for results that may be larger than memory.

The operating system moves the pages of such a file to the disk when it needs their memory. The
files have no name, so each of them disappears together with the last array that uses it.
"""

import heapq
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

#: Rows that are in memory at a time.
BLOCK_ROWS = 2**18
#: Records in memory while sorted runs are merged, over all runs.
MERGE_ROWS = 2**17

_FOLDER: ContextVar[str | Path | None] = ContextVar("folder of temporary files", default=None)


@contextmanager
def temporary_folder(folder: str | Path) -> Iterator[None]:
    """Put temporary files made in the block into this folder: the system's is often too small."""
    before = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(before)


def temporary_file() -> BinaryIO:
    """Open a nameless temporary file, to be written and then mapped by `map_file`."""
    return tempfile.TemporaryFile(dir=_FOLDER.get())


def map_file(file: BinaryIO, dtype: np.dtype | type, row_shape: tuple[int, ...] = ()) -> np.ndarray:
    """Map the content of a temporary file as a writable array (rows, *row_shape).

    It remains valid after the file is closed.
    """
    file.flush()
    row_bytes = np.dtype(dtype).itemsize * int(np.prod(row_shape))
    rows = os.fstat(file.fileno()).st_size // row_bytes
    if rows == 0:  # an empty file cannot be mapped
        return np.empty((0, *row_shape), dtype)
    return np.memmap(file, dtype, "r+", shape=(rows, *row_shape))


def row_blocks(count: int, size: int | None = None) -> Iterator[slice]:
    """Yield slices of `size` or `BLOCK_ROWS` rows. Zero rows give one empty slice, for the dtype.

    >>> list(row_blocks(5, 3)), list(row_blocks(0))
    ([slice(0, 3, None), slice(3, 5, None)], [slice(0, 0, None)])
    """
    size = size or BLOCK_ROWS
    for start in range(0, max(count, 1), size):
        yield slice(start, min(start + size, count))


def blocks_of(array: np.ndarray, size: int | None = None) -> Iterator[np.ndarray]:
    """Yield the array in blocks of `size` or `BLOCK_ROWS` rows, an empty one if it has no rows."""
    for block in row_blocks(len(array), size):
        yield array[block]


def concatenate_on_disk(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenate arrays along their first axis in a temporary file, one of them in memory.

    >>> concatenate_on_disk([np.arange(2), np.arange(3)]).tolist()
    [0, 1, 0, 1, 2]
    """
    with temporary_file() as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)
        return map_file(file, array.dtype, array.shape[1:])


def zeros_on_disk(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Return an array of zeros in a temporary file, whose entries can be changed."""
    rows, *row_shape = shape
    blocks = (np.zeros((block.stop - block.start, *row_shape), dtype) for block in row_blocks(rows))
    return concatenate_on_disk(blocks)


def records_on_disk(records: Iterator[tuple], dtype: np.dtype) -> np.ndarray:
    """Write tuples into a temporary file, and return them as a structured array."""
    with temporary_file() as file:
        while len(block := np.fromiter(islice(records, BLOCK_ROWS), dtype)):
            file.write(block.data)
        return map_file(file, dtype)


def sort_records(blocks: Iterable[np.ndarray]) -> Iterator[tuple]:
    """Sort the records of structured arrays of one dtype, ascending (external merge sort).

    Records are compared by their first field, then the second, and so on. One array is in memory at
    a time. All of them are read before this function returns an iterator over tuples.

    >>> first, second = np.array([(2, 1), (1, 7)], "i8,i8"), np.array([(1, 3)], "i8,i8")
    >>> list(sort_records([first, second]))
    [(1, 3), (1, 7), (2, 1)]
    """
    boundaries = [0]
    with temporary_file() as file:
        for block in blocks:
            last_key_first = [block[name] for name in reversed(block.dtype.names)]
            file.write(block[np.lexsort(last_key_first)].data)
            boundaries.append(boundaries[-1] + len(block))
        records = map_file(file, block.dtype)

    size = max(MERGE_ROWS // len(boundaries), 1)
    runs = [_read_run(records[start:end], size) for start, end in pairwise(boundaries)]
    return heapq.merge(*runs)


def _read_run(run: np.ndarray, size: int) -> Iterator[tuple]:
    """Yield the records of a structured array as tuples, reading `size` records at a time."""
    for block in blocks_of(run, size):
        yield from block.tolist()
