"""Exact nearest neighbours by cosine, in both directions from one pass and in bounded memory.

A query is a row whose neighbours are wanted. A key is a row that may be a neighbour. Of each block
of the similarity matrix, only those cosines are computed in float32 that can be among the k best so
far (`dap_transformers.search.screening`).

Legend: `N` source rows or queries, `M` target rows or keys, `D` dimensions, `k` neighbours, `H`
pairs of a block whose cosine is computed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dap_transformers.errors import UserError
from dap_transformers.search.screening import (
    GROUP,
    Bounds,
    CentredRows,
    fastest_product,
    ordered,
    whole_float32,
)

Array = np.ndarray | Tensor

#: Source rows and target rows of a block: 24 MiB of bfloat16 on a CPU, 512 MiB on a GPU.
BLOCKS = {"cpu": (1024, 12288), "cuda": (8192, 32768)}
#: Rows whose mean the centre of a side is.
CENTRE_ROWS = 1024
#: Keys are numbered from -1 to this, which with -1 fills 32 bits.
LARGEST_KEY = 2**32 - 2


class Found(NamedTuple):
    """The k nearest keys of each query by cosine, best first and ties by index."""

    scores: np.ndarray  # (N, k) float32, cosine of each query and its neighbours
    indices: np.ndarray  # (N, k) int64, rows of the keys

    def nearest(self, k: int) -> "Found":
        """Return only the k nearest keys of each query."""
        return Found(self.scores[:, :k], self.indices[:, :k])


class Neighbours(NamedTuple):
    """The nearest neighbours in both directions."""

    forward: Found  # of the source rows (N, k), which are rows of the target
    backward: Found  # of the target rows (M, k), which are rows of the source


#: Finds the k nearest neighbours of source (N, D) and target (M, D) in both directions.
NeighbourSearch = Callable[[Array, Array, int], Neighbours]


def mutual_neighbours(
    source: Array,
    target: Array,
    k: int = 4,
    progress: bool = False,
) -> Neighbours:
    """Find the k nearest rows of the other side, for every source row (N, D) and target row (M, D).

    The search is exact in float32. Tensors are searched on their device. Arrays are searched on
    CUDA if there is a GPU. Memory-mapped arrays are read block by block. Beyond the inputs and the
    result it needs the memory of a few blocks. A zero row has cosine 0 with every row.

    Of equal cosines the lowest index comes first. Rows whose cosines hardly differ take long,
    because all of these are computed one by one.

    >>> found = mutual_neighbours(np.eye(2), np.array([[0.0, 2.0], [3.0, 0.0], [1.0, 0.0]]), k=1)
    >>> found.forward.indices.tolist(), found.backward.indices.tolist()
    ([[1], [0]], [[1], [0], [0]])
    """
    require_k(k, min(len(source), len(target)))
    return _search(source, target, k, progress=progress)


def nearest_neighbours(queries: Array, keys: Array, k: int = 1) -> Found:
    """Return cosines (N, k) and rows (N, k) of the k keys (M, D) nearest to each query (N, D).

    This is one direction of `mutual_neighbours`, whose notes on memory and ties apply.

    >>> keys = np.array([[0.0, 1.0], [3.0, 0.0], [1.0, 0.0]])
    >>> scores, indices = nearest_neighbours(np.array([[2.0, 0.0]]), keys, k=2)
    >>> scores.tolist(), indices.tolist()
    ([[1.0, 1.0]], [[1, 2]])
    """
    require_k(k, len(keys))
    return _search(queries, keys, k, both=False).forward


def nearest(queries: Array, keys: Array) -> np.ndarray:
    """Return the row (N,) of the key (M, D) nearest to each query (N, D), the first of equal ones.

    >>> nearest(np.array([[0.1, 0.7]]), np.array([[1.0, 0.0], [0.2, 0.5], [0.2, 0.5]])).tolist()
    [1]
    """
    distinct = np.unique(first_equal_rows(keys))  # rows of keys that equal no earlier key
    _, found = nearest_neighbours(queries, keys[distinct])  # (N, 1)
    return distinct[found[:, 0]]


def first_equal_rows(array: Array) -> np.ndarray:
    """Return for every row (N, D) the first row (N,) of its direction, which may be the row itself.

    >>> first_equal_rows(np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])).tolist()
    [0, 1, 0]
    """
    _, group = unit_rows(array).unique(dim=0, return_inverse=True)  # (N,)
    _, first_of_group, group = np.unique(group.cpu(), return_index=True, return_inverse=True)
    return first_of_group[group]


def unit_rows(array: Array, name: str = "vectors", device: torch.device | None = None) -> Tensor:
    """Divide each row (N, D) by its Euclidean length, in a new float32 tensor. Zero rows stay zero.

    Args:
        name: what error messages call the array.
        device: device of the result. None keeps the array's device, which is the CPU for numpy.
    """
    if isinstance(array, Tensor):
        kind = torch.float64 if array.dtype == torch.float64 else torch.float32
        rows = array.detach().to(device, kind, copy=True, memory_format=torch.contiguous_format)
    else:
        kind = np.float64 if array.dtype.itemsize > 4 else np.float32
        rows = torch.from_numpy(np.array(array, kind, order="C")).to(device)

    # the largest absolute value of each row, (N, 1): NaN if a value is NaN
    largest = torch.maximum(rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True))
    bad = (~largest.isfinite()).nonzero()
    if len(bad):
        raise UserError(f"{name}: {len(bad)} of {len(rows)} rows have NaN or infinite values")

    # divide by it first, so that squares cannot overflow
    rows = rows.div_(largest.where(largest > 0, 1.0)).float()
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)  # (N, 1)
    return rows.div_(length.where(length > 0, 1.0))


def require_k(k: int, most: int) -> None:
    """Raise `UserError` if k is not 1 to `most`."""
    if not 1 <= k <= most:
        raise UserError(f"k={k}, but the texts have {most} rows: choose 1 to {most}")


def _search(
    queries: Array,
    keys: Array,
    k: int,
    both: bool = True,
    progress: bool = False,
) -> Neighbours:
    """Find the k best keys of every query and, if `both`, the k best queries of every key.

    Scores and indices are (N, k), and (M, k) or, unless `both`, (0, k).
    """
    device = _device_of(queries, keys)
    height, width = BLOCKS.get(device.type, BLOCKS["cpu"])
    forward = Best.of(len(queries), k, device)
    backward = Best.of(len(keys) if both else 0, k, device)
    total = len(queries) * len(keys)
    bar = tqdm(
        total=total, desc="nearest neighbours", unit=" pairs", unit_scale=True, disable=not progress
    )
    with bar, whole_float32(device):
        kind = fastest_product(device)
        size = min(height, len(queries)) + GROUP, min(width, len(keys)) + GROUP
        memory = torch.empty(size, dtype=torch.bfloat16, device=device).view(-1)
        centre = _centre(queries, device)
        key_centre = _centre(keys, device)
        for left in range(0, len(keys), width):
            strip = unit_rows(keys[left : left + width], device=device)
            strip = CentredRows(strip, key_centre, centre, kind)
            best_queries = backward.part(left, width)
            for top in range(0, len(queries), height):
                block = unit_rows(queries[top : top + height], device=device)
                block = CentredRows(block, centre, key_centre, kind)
                best_keys = forward.part(top, height)

                worst = best_keys.worst(), best_queries.worst()
                bounds = Bounds(block, strip, *worst, k, centre @ key_centre, kind, memory)
                for rows, columns, cosines in bounds.near_keys():
                    best_keys.add(rows, left + columns, cosines)
                if both:
                    for rows, columns, cosines in bounds.near_queries():
                        best_queries.add(rows, top + columns, cosines)
                bar.update(len(block.rows) * len(strip.rows))
                del bounds  # frees its memory before the next ones are made
            del strip
    return Neighbours(forward.found(), backward.found())


def _centre(array: Array, device: torch.device) -> Tensor:
    """Return the mean (D,) of about `CENTRE_ROWS` unit rows of an array."""
    step = max(1, len(array) // CENTRE_ROWS)
    return unit_rows(array[::step], device=device).mean(0)


def _device_of(queries: Array, keys: Array) -> torch.device:
    """Return the device of the first tensor of two arrays. Without one, use CUDA if it is there."""
    for side in (queries, keys):
        if isinstance(side, Tensor):
            return side.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Best:
    """The k best keys so far of N queries. Of keys with equal scores the lowest is kept.

    Attributes:
        packed: (k, N) int64, best first. The upper half is the score and the lower half the key,
            such that a better neighbour is a larger number.
    """

    packed: Tensor

    @classmethod
    def of(cls, count: int, k: int, device: torch.device) -> "Best":
        """Return no neighbours: key -1 with score -inf."""
        scores = torch.full((k, count), -torch.inf, device=device)
        return cls(_packed(scores, -1))

    def part(self, start: int, count: int) -> "Best":
        """Return the neighbours of some queries as a view: what the view adds is added here."""
        return Best(self.packed[:, start : start + count])

    def worst(self) -> Tensor:
        """Return the k-th best score (N,) of each query."""
        return _unpacked(self.packed[-1])[0]

    def add(self, rows: Tensor, keys: Tensor, scores: Tensor) -> None:
        """Add keys (H,) with their scores (H,) to queries (H,), and keep the k best of each."""
        packed = _packed(scores, keys)
        for _ in self.packed:  # each time, the best new key of every query goes in
            is_better = packed > self.packed[-1, rows]
            rows = rows[is_better]
            packed = packed[is_better]
            if not len(rows):
                break

            # take the best new key of each query, and leave the others for the next time
            new = torch.full_like(self.packed[0], torch.iinfo(torch.int64).min)
            new.scatter_reduce_(0, rows, packed, "amax")
            is_left = packed != new[rows]
            rows = rows[is_left]
            packed = packed[is_left]

            # insert it: a key that it displaces moves one place down
            for place in self.packed:
                lower = torch.minimum(place, new)
                torch.maximum(place, new, out=place)
                new = lower

    def found(self) -> Found:
        """Return scores (N, k) and indices (N, k)."""
        scores, keys = _unpacked(self.packed.T.contiguous())
        return Found(scores.cpu().numpy(), keys.cpu().numpy())


def _packed(scores: Tensor, keys: Tensor | int) -> Tensor:
    """Pack float32 scores and keys into int64. A higher score, then a lower key, is more."""
    bits = ordered((scores + 0.0).view(torch.int32))  # this sum makes 0.0 of -0.0
    return (bits.long() << 32) + (LARGEST_KEY - keys)


def _unpacked(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the float32 scores and the int64 keys of packed numbers."""
    scores = ordered((packed >> 32).int()).view(torch.float32)
    return scores, LARGEST_KEY - (packed & 0xFFFFFFFF)
