"""Exact nearest neighbours by cosine, in both directions from one pass and in bounded memory.

A query is a row whose neighbours are wanted. A key is a row that may be a neighbour. Of each block
of the similarity matrix, only those similarities are computed exactly that can be among the k best
so far (`dap_transformers.search.screening`).

Legend: `N` source rows or queries, `M` target rows or keys, `D` dimensions, `k` neighbours, `H`
pairs of a block whose similarity is computed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dap_transformers.errors import UserError
from dap_transformers.search.screening import Screen, whole_float32

logger = logging.getLogger(__name__)

Array = np.ndarray | Tensor
#: Scores (rows, k) and indices (rows, k) of the neighbours found for some rows.
Found = tuple[np.ndarray, np.ndarray]

#: Source rows and target rows of a block: 8 MiB of float32 on a CPU, 1 GiB on a GPU.
BLOCKS = {"cpu": (1024, 2048), "cuda": (8192, 32768)}
#: Rows that are checked at a time before a search.
CHECKED_ROWS = 256


@dataclass(frozen=True)
class Neighbours:
    """The k nearest neighbours by cosine in both directions, best first and ties by index."""

    forward_scores: np.ndarray  # (N, k) float32, cosine of each source row and its neighbours
    forward_indices: np.ndarray  # (N, k) int64, rows of the target
    backward_scores: np.ndarray  # (M, k) float32, cosine of each target row and its neighbours
    backward_indices: np.ndarray  # (M, k) int64, rows of the source


#: Finds the k nearest neighbours of source (N, D) and target (M, D) in both directions.
Search = Callable[[Array, Array, int], Neighbours]


def mutual_neighbours(
    source: Array,
    target: Array,
    k: int = 4,
    progress: bool = False,
    blocks: tuple[int, int] | None = None,
    above: tuple[np.ndarray, np.ndarray] | None = None,
) -> Neighbours:
    """Find the k nearest rows of the other side, for every source row (N, D) and target row (M, D).

    The search is exact in float32. Tensors are searched on their device. Arrays are searched on
    CUDA if there is a GPU. Memory-mapped arrays are read block by block. Beyond the inputs and the
    result it needs the memory of a few blocks. A zero row has cosine 0 with every row.

    Of equal cosines the lowest index comes first, with one exception. If most rows are repeated,
    more than a sixteenth of a block's cosines may be equal within rounding. Then ties may not go to
    the lowest index. Leave repeated rows out if that matters.

    >>> found = mutual_neighbours(np.eye(2), np.array([[0.0, 2.0], [3.0, 0.0], [1.0, 0.0]]), k=1)
    >>> found.forward_indices.tolist(), found.backward_indices.tolist()
    ([[1], [0]], [[1], [0], [0]])

    Args:
        blocks: source rows and target rows of a block. None takes `BLOCKS`.
        above: cosines (N,) and (M,) that the neighbours of each source and target row must exceed.
            Use it if other parts of the data were searched before. A row may then have fewer than k
            neighbours, and the places of missing ones have index -1.
    """
    require_searchable({"source": source, "target": target}, k, min(len(source), len(target)))
    above, target_above = above or (None, None)
    forward, backward = _search(
        source, target, k, progress=progress, blocks=blocks, above=above, keys_above=target_above
    )
    return Neighbours(*forward, *backward)


def nearest_neighbours(
    queries: Array, keys: Array, k: int = 1, blocks: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return cosines (N, k) and rows (N, k) of the k keys (M, D) nearest to each query (N, D).

    This is one direction of `mutual_neighbours`, whose notes on memory and ties apply.

    >>> keys = np.array([[0.0, 1.0], [3.0, 0.0], [1.0, 0.0]])
    >>> scores, indices = nearest_neighbours(np.array([[2.0, 0.0]]), keys, k=2)
    >>> scores.tolist(), indices.tolist()
    ([[1.0, 1.0]], [[1, 2]])
    """
    require_searchable({"queries": queries, "keys": keys}, k, len(keys))
    forward, _ = _search(queries, keys, k, both=False, blocks=blocks)
    return forward


def nearest(queries: Array, keys: Array) -> np.ndarray:
    """Return the row (N,) of the key (M, D) nearest to each query (N, D), the first of equal ones.

    >>> nearest(np.array([[0.1, 0.7]]), np.array([[1.0, 0.0], [0.2, 0.5], [0.2, 0.5]])).tolist()
    [1]
    """
    distinct = np.unique(first_equal_rows(keys, "keys"))  # rows of keys that equal no earlier key
    _, found = nearest_neighbours(queries, keys[distinct])  # (N, 1)
    return distinct[found[:, 0]]


def first_equal_rows(array: Array, name: str = "rows") -> np.ndarray:
    """Return for every row (N, D) the first row (N,) of its direction, which may be the row itself.

    >>> first_equal_rows(np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]])).tolist()
    [0, 1, 0]
    """
    _, group = unit_rows(array, name).unique(dim=0, return_inverse=True)  # (N,)
    _, first_of_group, group = np.unique(group.cpu(), return_index=True, return_inverse=True)
    return first_of_group[group]


def unit_rows(
    array: Array, name: str, start: int = 0, device: torch.device | None = None
) -> Tensor:
    """Divide each row (N, D) by its Euclidean length, in a new float32 tensor. Zero rows stay zero.

    Args:
        start: number that error messages give the first row, if the array is part of a larger one.
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
        number = start + int(bad[0, 0])
        raise UserError(
            f"{name}: row {number} (of {len(bad)} such rows) has NaN or infinite values"
        )

    # divide by it first, so that squares cannot overflow
    rows = rows.div_(largest.where(largest > 0, 1.0)).float()
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)  # (N, 1)
    return rows.div_(length.where(length > 0, 1.0))


def require_searchable(sides: dict[str, Array], k: int, most: int) -> None:
    """Check the named arrays of a search, and that k is 1 to `most`, before hours of search."""
    for name, array in sides.items():
        for start in range(0, len(array), CHECKED_ROWS):
            unit_rows(array[start : start + CHECKED_ROWS], name, start)
    if not 1 <= k <= most:
        raise UserError(f"k={k}, but the texts have {most} rows: choose 1 to {most}")


def _search(
    queries: Array,
    keys: Array,
    k: int,
    both: bool = True,
    progress: bool = False,
    blocks: tuple[int, int] | None = None,
    above: np.ndarray | None = None,
    keys_above: np.ndarray | None = None,
) -> tuple[Found, Found]:
    """Find the k best keys of every query and, if `both`, the k best queries of every key.

    Scores and indices are (N, k), and (M, k) or, unless `both`, (0, k). A missing one has index -1.
    """
    device = _device_of(queries, keys)
    height, width = blocks or BLOCKS[device.type]
    forward = Best(len(queries), k, device, above)
    backward = Best(len(keys) if both else 0, k, device, keys_above)
    total = len(queries) * len(keys)
    in_float32 = 0  # pairs that were multiplied in float32
    computed = 0  # pairs that were computed one by one
    bar = tqdm(
        total=total, desc="nearest neighbours", unit=" pairs", unit_scale=True, disable=not progress
    )
    with bar, whole_float32(device):
        for left in range(0, len(keys), width):
            right = left + width
            screen = Screen(unit_rows(keys[left:right], "keys", left, device), k)
            for top in range(0, len(queries), height):
                bottom = top + height
                block = unit_rows(queries[top:bottom], "queries", top, device)

                # find the pairs that can change the k best so far
                worst = forward.scores[top:bottom, -1]
                key_worst = backward.scores[left:right, -1] if both else None
                rows, columns, scores = screen.pairs(block, worst, key_worst)  # (H,) each

                forward.add(top + rows, left + columns, scores)
                if both:
                    columns, order = columns.sort(stable=True)
                    backward.add(left + columns, top + rows[order], scores[order])
                computed += len(rows)
                bar.update(len(block) * len(screen.keys))
            in_float32 += screen.in_float32
            del screen  # frees its memory before the next one is made
    logger.debug(
        "nearest neighbours: of %(pairs)d pairs %(in_float32)d multiplied in float32, "
        "%(computed)d one by one",
        {"pairs": total, "in_float32": in_float32, "computed": computed},
    )
    return forward.found(), backward.found()


def _device_of(queries: Array, keys: Array) -> torch.device:
    """Return the device of the first tensor of two arrays. Without one, use CUDA if it is there."""
    for side in (queries, keys):
        if isinstance(side, Tensor):
            return side.device
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Best:
    """The k best keys so far of N queries. Of keys with equal scores the first one is kept.

    Attributes:
        scores: (N, k) float32, best first. Without a key it is -inf or the limit `above` (N,).
        indices: (N, k) int64 rows of the keys. Without a key it is -1.
    """

    def __init__(
        self, count: int, k: int, device: torch.device, above: np.ndarray | None = None
    ) -> None:
        self.scores = torch.full((count, k), -torch.inf, device=device)
        if above is not None:
            self.scores[:] = torch.tensor(above, device=device)[:, None]
        self.indices = torch.full((count, k), -1, device=device)

    def add(self, rows: Tensor, indices: Tensor, scores: Tensor) -> None:
        """Add scored pairs to the ones so far, and keep the k best keys of each query.

        Args:
            rows: (H,) number of each pair's query, in ascending order.
            indices: (H,) number of each pair's key. The keys of one query are in ascending order,
                and come after all keys that earlier calls added for it.
            scores: (H,) cosine of each pair.
        """
        # leave out what cannot be among the k best: earlier keys win a tie
        is_better = scores > self.scores[rows, -1]
        rows, which, counts = rows[is_better].unique_consecutive(
            return_inverse=True, return_counts=True
        )  # rows and counts (U,), which (pairs,)
        if not len(rows):
            return

        # write the new pairs of each query side by side
        first_of_row = counts.cumsum(0) - counts  # (U,)
        column = torch.arange(len(which), device=rows.device) - first_of_row[which]
        shape = (len(rows), int(counts.max()))
        new_scores = scores.new_full(shape, -torch.inf)
        new_indices = indices.new_zeros(shape)
        new_scores[which, column] = scores[is_better]
        new_indices[which, column] = indices[is_better]

        # merge them with the old ones, which a stable sort keeps ahead of equal new ones
        k = self.scores.shape[1]
        all_scores = torch.cat([self.scores[rows], new_scores], 1)
        all_indices = torch.cat([self.indices[rows], new_indices], 1)
        all_scores, order = all_scores.sort(dim=1, descending=True, stable=True)
        self.scores[rows] = all_scores[:, :k]
        self.indices[rows] = all_indices.gather(1, order[:, :k])

    def found(self) -> Found:
        """Return scores (N, k) and indices (N, k). The index of a missing key is -1."""
        return self.scores.cpu().numpy(), self.indices.cpu().numpy()
