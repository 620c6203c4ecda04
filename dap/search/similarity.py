"""Exact nearest neighbours by cosine: both directions from one pass of matrix products, in bounded memory.

Of each block of similarities those alone are computed that can be among the k best so far; `screening` finds them.

Legend: `N` source rows (queries), `M` target rows (keys), `D` dimensions, `k` neighbours, `R` × `C` a block of
similarities, `H` of them that are computed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dap.errors import UserError
from dap.search.screening import Screen, whole_float32

logger = logging.getLogger(__name__)

Array = np.ndarray | Tensor
Found = tuple[np.ndarray, np.ndarray]

#: Source × target rows of a block: 8 MiB of float32 on a CPU, 1 GiB on a GPU.
BLOCKS = {"cpu": (1024, 2048), "cuda": (8192, 32768)}
#: Rows that are read at a time where no product is computed.
PART = 256


@dataclass(frozen=True)
class Neighbours:
    """The k nearest neighbours by cosine in both directions, best first, equal scores by lowest index.

    Attributes:
        forward_scores: (N, k) float32, cosine of source row i and its neighbours.
        forward_indices: (N, k) int64, rows of the target.
        backward_scores: (M, k) float32, cosine of target row j and its neighbours.
        backward_indices: (M, k) int64, rows of the source.
    """

    forward_scores: np.ndarray
    forward_indices: np.ndarray
    backward_scores: np.ndarray
    backward_indices: np.ndarray


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
    """The k nearest neighbours of every source row among the target rows, and of every target row among the source's.

    Exact in float32. Tensors are searched on their device, arrays (memory maps too, read block by block) on CUDA where
    there is one. Memory beyond the inputs is a few blocks and what the result takes. A zero row has cosine 0 with
    everything. Where more than a sixteenth of a block's cosines are within rounding of the best, as when most rows are
    repeated, not the first of equal ones may be found: leave repeated rows out where that matters.

    >>> found = mutual_neighbours(np.eye(2), np.array([[0.0, 2.0], [3.0, 0.0], [1.0, 0.0]]), k=1)
    >>> found.forward_indices.tolist(), found.backward_indices.tolist()
    ([[1], [0]], [[1], [0], [0]])

    Args:
        source: (N, D) of any float type, need not be normalised.
        target: (M, D).
        k: 1 to min(N, M).
        progress: show a bar.
        blocks: source and target rows of a block; the default is `BLOCKS`.
        above: cosines (N,) and (M,) that a neighbour of each source and target row has to exceed, as where these rows
            are a part and others have been searched; where fewer than k do, index -1 stands for each that is missing.

    Raises:
        ValueError: wrong shapes, k out of range, or a row that is not finite (side and row are named).
    """
    require_searchable({"source": source, "target": target}, k, min(len(source), len(target)))
    forward, backward = _search(source, target, k, True, progress, blocks, *(above or ()))
    return Neighbours(*forward, *backward)


def nearest_neighbours(
    queries: Array, keys: Array, k: int = 1, blocks: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The k keys of highest cosine for every query, best first; one direction of `mutual_neighbours`, with its errors.

    >>> keys = np.array([[0.0, 1.0], [3.0, 0.0], [1.0, 0.0]])
    >>> scores, indices = nearest_neighbours(np.array([[2.0, 0.0]]), keys, k=2)
    >>> scores.tolist(), indices.tolist()
    ([[1.0, 1.0]], [[1, 2]])

    Args:
        queries: (N, D) numpy or torch.
        keys: (M, D) numpy or torch.
        k: 1 to M.

    Returns:
        scores (N, k) float32 and indices (N, k) int64.
    """
    require_searchable({"queries": queries, "keys": keys}, k, len(keys))
    return _search(queries, keys, k, False, False, blocks)[0]


def nearest(queries: Array, keys: Array) -> np.ndarray:
    """The key of highest cosine for every query, (N,) int64: of equal keys the first, which alone is searched.

    Errors are those of `mutual_neighbours`.

    >>> nearest(np.array([[0.1, 0.7]]), np.array([[1.0, 0.0], [0.2, 0.5], [0.2, 0.5]])).tolist()
    [1]
    """
    group = unit_rows(keys, "keys").unique(dim=0, return_inverse=True)[1]  # (M,)
    first = np.sort(
        np.unique(group.cpu(), return_index=True)[1]
    )  # (U,) rows that equal no earlier one
    return first[nearest_neighbours(queries, keys[first])[1][:, 0]]


def unit_rows(
    array: Array, name: str, start: int = 0, device: torch.device | None = None
) -> Tensor:
    """The rows divided by their length, (N, D) float32; zero rows stay zero.

    Args:
        name: what an error calls the array.
        start: number of the first row, for errors.
        device: where the result is; None: where the array is.

    Raises:
        ValueError: not two-dimensional, or a row with NaN or infinity, named by its number.
    """
    _require_matrix(array, name)
    if isinstance(array, Tensor):
        kind = torch.float64 if array.dtype == torch.float64 else torch.float32
        rows = array.detach().to(device, kind, copy=True, memory_format=torch.contiguous_format)
    else:
        kind = np.float64 if array.dtype.itemsize > 4 else np.float32
        rows = torch.from_numpy(np.array(array, kind, order="C")).to(device)
    largest = torch.maximum(
        rows.amax(1, keepdim=True), -rows.amin(1, keepdim=True)
    )  # (N, 1), NaN where a value is
    bad = (~largest.isfinite()).nonzero()
    if len(bad):
        number = start + int(bad[0, 0])
        raise UserError(
            f"{name}: row {number} (of {len(bad)} such rows) has NaN or infinite values"
        )
    rows = rows.div_(largest.where(largest > 0, 1.0)).float()  # squares cannot overflow now
    length = torch.linalg.vector_norm(rows, dim=1, keepdim=True)  # (N, 1)
    return rows.div_(length.where(length > 0, 1.0))


def _require_matrix(array: Array, name: str) -> None:
    if array.ndim != 2 or array.shape[1] == 0:
        raise UserError(f"{name} has shape {tuple(array.shape)}: expected (rows, dimensions)")


def require_searchable(sides: dict[str, Array], k: int, most: int) -> None:
    """Refuses two sides that cannot be searched, by their names, before a search that may take hours."""
    for name, array in sides.items():
        _require_matrix(array, name)
        for start in range(0, len(array), PART):
            unit_rows(array[start : start + PART], name, start)
    (name, queries), (other, keys) = sides.items()
    if queries.shape[1] != keys.shape[1]:
        raise UserError(
            f"{name} has {queries.shape[1]} dimensions, {other} {keys.shape[1]}: use one encoder for both"
        )
    if not 1 <= k <= most:
        raise UserError(
            f"k={k} with {len(queries)} {name} and {len(keys)} {other} rows: choose 1 to {most}"
        )


def _search(
    queries: Array,
    keys: Array,
    k: int,
    both: bool,
    progress: bool,
    blocks: tuple[int, int] | None,
    above: np.ndarray | None = None,
    keys_above: np.ndarray | None = None,
) -> tuple[Found, Found]:
    """The k best keys of every query and, if `both`, the k best queries of every key."""
    default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = next((side.device for side in (queries, keys) if isinstance(side, Tensor)), default)
    forward = Best(len(queries), k, device, above)
    backward = Best(len(keys) if both else 0, k, device, keys_above)
    height, width = blocks or BLOCKS[device.type]
    total, in_float32, looked = len(queries) * len(keys), 0, 0
    bar = tqdm(
        total=total, desc="nearest neighbours", unit=" pairs", unit_scale=True, disable=not progress
    )
    with bar, whole_float32(device):
        for column in range(0, len(keys), width):
            screen = Screen(unit_rows(keys[column : column + width], "keys", column, device), k)
            for row in range(0, len(queries), height):
                block = unit_rows(queries[row : row + height], "queries", row, device)
                worst = forward.scores[row : row + height, -1]
                key_worst = backward.scores[column : column + width, -1] if both else None
                rows, columns, scores = screen.pairs(block, worst, key_worst)
                forward.take(row + rows, column + columns, scores)
                if both:
                    columns, order = columns.sort(stable=True)
                    backward.take(column + columns, row + rows[order], scores[order])
                looked += len(rows)
                bar.update(len(block) * len(screen.keys))
            in_float32 += screen.in_float32
            del screen  # before the next one is made
    logger.debug(
        "nearest neighbours: of %(pairs)d pairs %(in_float32)d multiplied in float32, %(computed)d one by one",
        {"pairs": total, "in_float32": in_float32, "computed": looked},
    )
    return forward.found(), backward.found()


class Best:
    """The k best keys so far of N queries: `scores` and `indices`, both (N, k), equal scores by lowest index."""

    def __init__(
        self, count: int, k: int, device: torch.device, above: np.ndarray | None = None
    ) -> None:
        self.scores = torch.full((count, k), -torch.inf, device=device)
        if above is not None:
            self.scores[:] = torch.tensor(above, device=device)[:, None]
        self.indices = torch.full((count, k), -1, device=device)

    def take(self, rows: Tensor, indices: Tensor, scores: Tensor) -> None:
        """Takes in cosines (H,) of queries `rows` and keys `indices`, ascending, later ones than those before."""
        better = (
            scores > self.scores[rows, -1]
        )  # earlier keys win a tie, so only more than this counts
        rows, which, counts = rows[better].unique_consecutive(
            return_inverse=True, return_counts=True
        )
        if not len(rows):
            return
        place = (
            torch.arange(len(which), device=rows.device) - (counts.cumsum(0) - counts)[which]
        )  # within its row
        shape = len(rows), int(counts.max())
        found, keys = scores.new_full(shape, -torch.inf), indices.new_zeros(shape)
        found[which, place], keys[which, place] = scores[better], indices[better]
        scores, indices = (
            torch.cat([self.scores[rows], found], 1),
            torch.cat([self.indices[rows], keys], 1),
        )
        scores, order = scores.sort(
            dim=1, descending=True, stable=True
        )  # of equal ones those before stay before
        k = self.scores.shape[1]
        self.scores[rows], self.indices[rows] = scores[:, :k], indices.gather(1, order[:, :k])

    def found(self) -> Found:
        return self.scores.cpu().numpy(), self.indices.cpu().numpy()
