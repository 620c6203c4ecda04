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
from itertools import pairwise
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
    """Put all temporary files of this module that are made within the block into one folder.

    This is a context manager. Without it they are in the system's folder (`TMPDIR`), which is
    often too small.

    Args:
        folder: an existing folder.
    """
    before = _FOLDER.set(folder)
    try:
        yield
    finally:
        _FOLDER.reset(before)


def temporary_file() -> BinaryIO:
    """Open a temporary file without a name, to be written and then mapped by `map_file`.

    It disappears when it is closed and no array is mapped from it any more.
    """
    return tempfile.TemporaryFile(dir=_FOLDER.get())


def map_file(file: BinaryIO, dtype: np.dtype | type, row_shape: tuple[int, ...] = ()) -> np.ndarray:
    """Return the content of a temporary file as an array of rows.

    The array can be changed. It remains valid after the file is closed.

    Args:
        file: the file, with all rows written.
        dtype: type of an entry.
        row_shape: shape of a row. () means that each entry is a row.

    Returns:
        An array of shape (rows, *row_shape), mapped from the file.
    """
    file.flush()
    row_bytes = np.dtype(dtype).itemsize * int(np.prod(row_shape))
    rows = os.fstat(file.fileno()).st_size // row_bytes
    if rows == 0:  # an empty file cannot be mapped
        return np.empty((0, *row_shape), dtype)
    return np.memmap(file, dtype, "r+", shape=(rows, *row_shape))


def row_blocks(count: int, size: int | None = None) -> Iterator[slice]:
    """Yield slices that split rows into consecutive blocks, so that only one need be in memory.

    Zero rows give one empty slice. A result that is made block by block then still has a dtype.

    Args:
        count: number of rows.
        size: largest number of rows of a block. Default: `BLOCK_ROWS`.

    >>> list(row_blocks(5, 3)), list(row_blocks(0))
    ([slice(0, 3, None), slice(3, 5, None)], [slice(0, 0, None)])
    """
    size = size or BLOCK_ROWS
    for start in range(0, max(count, 1), size):
        yield slice(start, min(start + size, count))


def concatenate_on_disk(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Concatenate arrays along their first axis in a temporary file.

    If the arrays are yielded one by one, only one of them is in memory at a time.

    >>> concatenate_on_disk([np.arange(2), np.arange(3)]).tolist()
    [0, 1, 0, 1, 2]

    Args:
        arrays: at least one array. All have the same dtype and the same shape except for the
            first axis.

    Returns:
        The result, mapped from the file. Its entries can be changed.
    """
    with temporary_file() as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)
        return map_file(file, array.dtype, array.shape[1:])


def zeros_on_disk(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Return an array of zeros in a temporary file, whose entries can be changed.

    Args:
        shape: shape of the array. The first axis counts its rows.
        dtype: type of an entry.
    """
    rows, *row_shape = shape
    blocks = (np.zeros((block.stop - block.start, *row_shape), dtype) for block in row_blocks(rows))
    return concatenate_on_disk(blocks)


def sort_records(blocks: Iterable[np.ndarray]) -> Iterator[tuple]:
    """Sort the records of several structured arrays in ascending order (external merge sort).

    Each array is sorted in memory and written to a temporary file. Then these sorted runs are
    merged. Records are compared by their first field, records with equal first fields by the
    second, and so on.

    >>> first, second = np.array([(2, 1), (1, 7)], "i8,i8"), np.array([(1, 3)], "i8,i8")
    >>> list(sort_records([first, second]))
    [(1, 3), (1, 7), (2, 1)]

    Args:
        blocks: at least one array, all of one dtype. One array is in memory at a time. All of them
            are read before this function returns.

    Returns:
        An iterator over the records, as tuples.
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
    for block in row_blocks(len(run), size):
        yield from run[block].tolist()
