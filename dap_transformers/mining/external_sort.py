"""Sort more records than memory holds."""

import heapq
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np

from dap_transformers.disk_arrays import map_file, row_blocks, temporary_file

#: Records in memory while the sorted runs are merged, over all runs.
MERGE_ROWS = 2**17


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
