"""Arrays in unnamed files, and an order of more records than memory holds.

The system writes the pages of such a file out when it wants their memory, and the file ends with its last array.
"""

import heapq
import os
import tempfile
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

#: Records that are in memory at a time.
ROWS = 2**18
#: Records that all sorted runs together have in memory.
READ = 2**17

Folder = str | Path | None  # None for the system's own place


def parts(count: int, size: int | None = None) -> Iterator[slice]:
    """So many rows as slices of `ROWS` or of another size, one at least.

    >>> list(parts(5, 3)), list(parts(0))
    ([slice(0, 3, None), slice(3, 5, None)], [slice(0, 0, None)])
    """
    size = size or ROWS
    return (slice(start, min(start + size, count)) for start in range(0, max(count, 1), size))


def on_disk(arrays: Iterable[np.ndarray], folder: Folder = None) -> np.ndarray:
    """One array of the rows of others, of which there is one at least, written as they come; it can be changed.

    >>> on_disk([np.arange(2), np.arange(3)]).tolist()
    [0, 1, 0, 1, 2]
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        for array in arrays:
            file.write(np.ascontiguousarray(array).data)
        return opened(file, array.dtype, array.shape[1:])


def zeros(shape: tuple[int, ...], dtype: type, folder: Folder = None) -> np.ndarray:
    """`numpy.zeros` as `on_disk` makes arrays."""
    return on_disk(
        (np.zeros((part.stop - part.start, *shape[1:]), dtype) for part in parts(shape[0])), folder
    )


def opened(file: BinaryIO, dtype: np.dtype | type, shape: tuple[int, ...] = ()) -> np.ndarray:
    """What was written to a file, as rows of that shape; it stays when the file is closed."""
    file.flush()
    rows = os.fstat(file.fileno()).st_size // (np.dtype(dtype).itemsize * int(np.prod(shape)))
    return (
        np.memmap(file, dtype, "r+", shape=(rows, *shape)) if rows else np.empty((0, *shape), dtype)
    )


def in_order(records: Iterable[np.ndarray], folder: Folder = None) -> Iterator[tuple]:
    """All records of structured arrays as tuples, by their first field, then the next; one array is in memory.

    >>> pairs = np.array([(2, 1), (1, 7)], "i8,i8"), np.array([(1, 3)], "i8,i8")
    >>> list(in_order(pairs))
    [(1, 3), (1, 7), (2, 1)]
    """
    ends = [0]

    def runs() -> Iterator[np.ndarray]:
        for array in records:
            ends.append(ends[-1] + len(array))
            yield array[np.lexsort([array[name] for name in reversed(array.dtype.names)])]

    found = on_disk(runs(), folder)
    size = max(READ // len(ends), 1)
    return heapq.merge(*(_each(found[start:end], size) for start, end in pairwise(ends)))


def _each(run: np.ndarray, size: int) -> Iterator[tuple]:
    """The records as tuples, so many read at a time."""
    for part in parts(len(run), size):
        yield from run[part].tolist()
