"""Exact nearest neighbours by cosine: both directions from one pass of matrix products, in bounded memory.

Each block of similarities is computed once. Its maximum over every `GROUP` neighbouring entries says which groups can
hold one of the k best so far; only those are looked at, so the time is that of the matrix product.

Legend: `N` source rows (queries), `M` target rows (keys), `D` dimensions, `Q` × `K` a block of similarities, `R` rows
of a block in the direction searched, `C` its other side, `G` groups, `k` neighbours.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from dap.errors import UserError

Array = np.ndarray | Tensor

#: Source × target rows of a block: 64 MiB of float32 on a CPU, 1 GiB on a GPU.
BLOCKS = {"cpu": (4096, 4096), "cuda": (8192, 32768)}
#: Neighbouring entries of a block that are reduced to their maximum first.
GROUP = 8
#: Rows that are read at a time where no product is computed.
PART = 256
#: Rows whose best keys are brought up to date at a time.
CHUNK = 1024
#: With bfloat16 products this many times k candidates are scored again in float32.
OVERSAMPLING = 4


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


def mutual_neighbours(
    source: Array,
    target: Array,
    k: int = 4,
    bf16: bool = False,
    progress: bool = False,
    blocks: tuple[int, int] | None = None,
) -> Neighbours:
    """The k nearest neighbours of every source row among the target rows, and of every target row among the source's.

    Exact in float32, unless `bf16`. Tensors are searched on their device, arrays (memory maps too, read block by
    block) on CUDA where there is one. Memory beyond the inputs is a few blocks and what the result takes. Equal rows
    tie, although a matrix product may round them differently. A zero row has cosine 0 with everything.

    >>> found = mutual_neighbours(np.eye(2), np.array([[0.0, 2.0], [3.0, 0.0], [1.0, 0.0]]), k=1)
    >>> found.forward_indices.tolist(), found.backward_indices.tolist()
    ([[1], [0]], [[1], [0], [0]])

    Args:
        source: (N, D) of any float type, need not be normalised.
        target: (M, D).
        k: 1 to min(N, M).
        bf16: products in bfloat16; the best `OVERSAMPLING`·k of them are scored again in float32. A neighbour whose
            rank bfloat16 hides below those is missed.
        progress: show a bar.
        blocks: source and target rows of a block; the default is `BLOCKS`.

    Raises:
        ValueError: wrong shapes, k out of range, or a row that is not finite (side and row are named).
    """
    device = _device(source, target)
    source_rows, target_rows = _Rows(source, "source", k, device), _Rows(target, "target", k, device)
    _check(source_rows, target_rows, k, min(len(source_rows), len(target_rows)))
    forward, backward = _search(source_rows, target_rows, k, True, bf16, progress, blocks)
    forward_found = _all_rows(source_rows, target_rows, forward, k)
    return Neighbours(*forward_found, *_all_rows(target_rows, source_rows, backward, k))


def nearest_neighbours(
    queries: Array, keys: Array, k: int = 1, blocks: tuple[int, int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The k keys of highest cosine for every query, best first; one direction of `mutual_neighbours`.

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

    Raises:
        ValueError: as `mutual_neighbours`.
    """
    device = _device(queries, keys)
    query_rows, key_rows = _Rows(queries, "queries", k, device), _Rows(keys, "keys", k, device)
    _check(query_rows, key_rows, k, len(key_rows))
    forward, _ = _search(query_rows, key_rows, k, False, False, False, blocks)
    return _all_rows(query_rows, key_rows, forward, k)


def _device(*arrays: Array) -> torch.device:
    """That of the first tensor; for arrays alone CUDA where there is one."""
    default = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return next((array.device for array in arrays if isinstance(array, Tensor)), default)


def unit_rows(array: Array, name: str, start: int = 0) -> Tensor:
    """The rows divided by their length, (N, D) float32; zero rows stay zero.

    Args:
        name: what an error calls the array.
        start: number of the first row, for errors.

    Raises:
        ValueError: not two-dimensional, or a row with NaN or infinity, named by its number.
    """
    rows = _new_rows(array, name, len(array), array.device if isinstance(array, Tensor) else torch.device("cpu"))
    _read(array, rows)
    _divide(rows, *_lengths(rows, name, start))
    return rows


def _new_rows(array: Array, name: str, count: int, device: torch.device) -> Tensor:
    if array.ndim != 2 or array.shape[1] == 0:
        raise UserError(f"{name} has shape {tuple(array.shape)}: expected (rows, dimensions)")
    return torch.empty(count, array.shape[1], device=device)


def _read(part: Array, rows: Tensor) -> None:
    """Copies the part of an array into `rows`, float32."""
    if isinstance(part, Tensor):
        rows.copy_(part.detach())
    elif rows.device.type == "cpu":
        rows.numpy()[...] = part
    else:
        rows.copy_(torch.from_numpy(np.array(part, np.float32)))


def _lengths(rows: Tensor, name: str, start: int) -> tuple[Tensor, Tensor]:
    """Largest absolute value of each row, and the length of the row divided by it: squares cannot overflow.

    Both are (N, 1), and 1 for a zero row.
    """
    largest = torch.linalg.vector_norm(rows, torch.inf, dim=1, keepdim=True)  # NaN where a value is
    bad = (~largest.isfinite()).nonzero()
    if len(bad):
        number = start + int(bad[0, 0])
        raise UserError(f"{name}: row {number} (of {len(bad)} such rows) has NaN or infinite values")
    largest = torch.where(largest > 0, largest, 1.0)
    length = torch.linalg.vector_norm(rows / largest, dim=1, keepdim=True)
    return largest, torch.where(length > 0, length, 1.0)


def _divide(rows: Tensor, largest: Tensor, length: Tensor) -> None:
    rows.div_(largest).div_(length)


class _Rows:
    """Unit rows of one side, read block by block; equal rows are one *distinct* row, searched once.

    Attributes:
        copies: (U, c) numbers of the rows that equal each distinct row, ascending, c <= k, filled up with `len(self)`.
        member: (N,) which distinct row each row is.
    """

    def __init__(self, array: Array, name: str, k: int, device: torch.device) -> None:
        self.array, self.name, self.device = array, name, device
        hashes = self._measure()
        self.copies, self.member = _copies(self._first_equal_row(hashes), max(k, 1))

    def __len__(self) -> int:
        return len(self.array)

    @property
    def distinct(self) -> int:
        """`U`, the number of distinct rows."""
        return len(self.copies)

    def take(self, rows: Tensor) -> Tensor:
        """Unit rows by their numbers, (…, D)."""
        flat = rows.flatten()
        taken = self.new(len(flat))
        numbers = flat.to(self.array.device) if isinstance(self.array, Tensor) else flat.cpu().numpy()
        _read(self.array[numbers], taken)
        _divide(taken, self.largest[flat], self.length[flat])
        return taken.unflatten(0, rows.shape)

    def new(self, count: int) -> Tensor:
        """Room for so many rows, (count, D)."""
        return _new_rows(self.array, self.name, count, self.device)

    def block(self, start: int, end: int, room: Tensor) -> Tensor:
        """The distinct unit rows `start` to `end`, (end - start, D), in the memory of `room`."""
        rows = room[: end - start]
        if self.distinct == len(self):
            _read(self.array[start:end], rows)
            _divide(rows, self.largest[start:end], self.length[start:end])
            return rows
        for first in range(0, len(rows), PART):  # in parts: what `take` needs comes on top
            numbers = self.copies[start + first : min(start + first + PART, end), 0]
            rows[first : first + PART] = self.take(numbers)
        return rows

    def _measure(self) -> Tensor:
        """Sets `largest` and `length`, (N, 1), and gives a hash of the bits of each unit row, (N,) int64."""
        room = self.new(PART)
        self.largest, self.length = torch.ones(2, len(self), 1, device=self.device)
        hashes = torch.empty(len(self), dtype=torch.long, device=self.device)
        generator = torch.Generator().manual_seed(0)
        factors = torch.randint(-(2**63), 2**63 - 1, (room.shape[1],), generator=generator).to(self.device)
        for start in range(0, len(self), PART):
            part = slice(start, start + PART)
            rows = room[: len(self) - start]
            _read(self.array[part], rows)
            self.largest[part], self.length[part] = _lengths(rows, self.name, start)
            _divide(rows, self.largest[part], self.length[part])
            bits = rows.add_(0.0).view(torch.int32).long()  # -0.0 becomes 0.0
            hashes[part] = bits.mul_(factors).sum(1)  # wraps: exact in any order
        return hashes

    def _first_equal_row(self, hashes: Tensor) -> Tensor:
        """Number of the first row equal to each row, (N,): of equal hash, and compared."""
        own = torch.arange(len(self), device=self.device)
        if not len(self):
            return own
        _, group = hashes.unique(return_inverse=True)
        first = torch.full_like(own, len(self)).scatter_reduce(0, group, own, "amin")[group]
        for part in (first != own).nonzero()[:, 0].split(PART):
            differ = (self.take(part) != self.take(first[part])).any(1)
            first[part[differ]] = part[differ]
        return first


def _check(queries: _Rows, keys: _Rows, k: int, most: int) -> None:
    dimensions = queries.array.shape[1], keys.array.shape[1]
    if dimensions[0] != dimensions[1]:
        raise UserError(
            f"{queries.name} has {dimensions[0]} dimensions, {keys.name} {dimensions[1]}: use one encoder for both"
        )
    if not 1 <= k <= most:
        raise UserError(
            f"k={k} with {len(queries)} {queries.name} and {len(keys)} {keys.name} rows: choose 1 to {most}"
        )


def _copies(first: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`_Rows.copies` and `_Rows.member` from the first equal row of each row, (N,)."""
    order = first.argsort(stable=True)  # copies side by side, each group ascending
    _, group, sizes = first[order].unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(len(first), device=first.device) - (sizes.cumsum(0) - sizes)[group]
    width = min(k, int(sizes.max())) if len(sizes) else 1
    copies = torch.full((len(sizes), width), len(first), device=first.device)
    kept = rank < width
    copies[group[kept], rank[kept]] = order[kept]
    return copies, torch.empty_like(group).scatter_(0, order, group)


class _Best:
    """The best distinct keys so far for every distinct query: `scores` and `indices`, both (U, k') with k' <= k."""

    def __init__(self, queries: _Rows, keys: _Rows, k: int, exact: bool) -> None:
        shape, self.exact = (queries.distinct, min(k, keys.distinct)), exact
        self.scores = torch.full(shape, -torch.inf, device=queries.device)
        self.indices = torch.full(shape, -1, device=queries.device)

    def update(self, block: Tensor, start: int, offset: int, dim: int) -> None:
        """Takes in the similarities of the queries from `start` on and the keys from `offset` on.

        Args:
            block: (R, C) with `dim` 1, the dimension of the keys; (C, R) with `dim` 0.
        """
        if missing := -block.shape[dim] % GROUP:
            padding = (0, missing) if dim else (0, 0, 0, missing)
            block = torch.nn.functional.pad(block, padding, value=-torch.inf)
        groups = block.unflatten(dim, (-1, GROUP))  # (R, G, GROUP) or (G, GROUP, R)
        maxima = groups.amax(dim + 1)  # (R, G) or (G, R)
        maxima = maxima if dim else maxima.T.contiguous()  # (R, G)
        worst = self.scores[start : start + len(maxima), -1]  # earlier keys win a tie, so only more than this counts
        for rows in (maxima.amax(1) > worst).nonzero()[:, 0].split(CHUNK):
            self._update_rows(groups, maxima[rows], rows, start, offset, dim)

    def _update_rows(self, groups: Tensor, maxima: Tensor, rows: Tensor, start: int, offset: int, dim: int) -> None:
        width = self.scores.shape[1]
        best, chosen = maxima.topk(min(width + 1, maxima.shape[1]), dim=1)  # (r, k' + 1)
        chosen = chosen[:, :width].sort(1).values  # (r, k'): they hold the k' best, and every entry above the last one
        found = groups[rows[:, None], chosen] if dim else groups[chosen, :, rows[:, None]]  # (r, k', GROUP)
        numbers = chosen[:, :, None] * GROUP + torch.arange(GROUP, device=rows.device) + offset
        before = self.scores[start + rows], self.indices[start + rows]
        scores, indices = _merge(before, (found.flatten(1), numbers.flatten(1)))
        if self.exact and best.shape[1] > width:  # a group left out may hold the last score at a lower index
            tied = (best[:, width] >= scores[:, -1]).nonzero()[:, 0]
            for part in tied.split(PART // 8):
                whole = groups[rows[part]] if dim else groups[:, :, rows[part]].movedim(2, 0)  # (r, G, GROUP)
                numbers = torch.arange(maxima.shape[1] * GROUP, device=rows.device).expand(len(part), -1) + offset
                earlier = before[0][part], before[1][part]
                scores[part], indices[part] = _merge(earlier, (whole.flatten(1), numbers))
        self.scores[start + rows], self.indices[start + rows] = scores, indices

    def rescore(self, queries: _Rows, keys: _Rows, k: int) -> None:
        """Scores what was found again in float32 and keeps the k best."""
        width, parts = min(k, self.scores.shape[1]), []
        for start in range(0, queries.distinct, PART):
            indices = self.indices[start : start + PART].sort(1).values  # (r, k')
            found = keys.take(keys.copies[indices, 0])  # (r, k', D)
            own = queries.take(queries.copies[start : start + PART, 0])  # (r, D)
            scores = (found @ own[:, :, None])[:, :, 0]  # (r, k')
            parts.append(_merge((scores[:, :0], indices[:, :0]), (scores, indices), width))
        if parts:
            self.scores, self.indices = (torch.cat(part) for part in zip(*parts, strict=True))


def _merge(before: tuple[Tensor, Tensor], found: tuple[Tensor, Tensor], k: int | None = None) -> tuple[Tensor, Tensor]:
    """The k best of two lists of (scores, indices) a row; equal scores keep their order."""
    scores, order = torch.cat([before[0], found[0]], 1).sort(dim=1, descending=True, stable=True)
    k = k or before[0].shape[1]
    return scores[:, :k], torch.cat([before[1], found[1]], 1).gather(1, order[:, :k])


def _search(
    source: _Rows, target: _Rows, k: int, both: bool, bf16: bool, progress: bool, blocks: tuple[int, int] | None
) -> tuple[_Best, _Best]:
    """The best distinct rows for every distinct row, forward and backward (of no use unless `both`)."""
    wanted = k * OVERSAMPLING if bf16 else k
    forward, backward = _Best(source, target, wanted, not bf16), _Best(target, source, wanted, not bf16)
    query_block, key_block = blocks or BLOCKS[source.device.type]
    query_block, key_block = min(query_block, source.distinct), min(key_block, target.distinct)
    query_room, key_room = source.new(query_block), target.new(key_block)
    buffer = torch.empty(query_block * key_block, device=source.device)
    total = source.distinct * target.distinct
    with tqdm(total=total, desc="nearest neighbours", unit=" pairs", unit_scale=True, disable=not progress) as bar:
        for column, keys in _blocks(target, key_block, key_room):
            for row, queries in _blocks(source, query_block, query_room):
                similarity = _product(queries, keys, buffer, bf16)  # (Q, K)
                forward.update(similarity, row, column, dim=1)
                if both:
                    backward.update(similarity, column, row, dim=0)
                bar.update(similarity.numel())
    if bf16:
        forward.rescore(source, target, k)
        if both:
            backward.rescore(target, source, k)
    return forward, backward


def _blocks(rows: _Rows, size: int, room: Tensor) -> Iterator[tuple[int, Tensor]]:
    for start in range(0, rows.distinct, max(size, 1)):
        yield start, rows.block(start, min(start + size, rows.distinct), room)


def _product(queries: Tensor, keys: Tensor, buffer: Tensor, bf16: bool) -> Tensor:
    """All similarities of two blocks, (Q, K) float32, in the memory of `buffer`."""
    similarity = buffer[: len(queries) * len(keys)].view(len(queries), len(keys))
    if bf16:
        return similarity.copy_(queries.bfloat16() @ keys.bfloat16().T)
    return torch.mm(queries, keys.T, out=similarity)


def _all_rows(queries: _Rows, keys: _Rows, best: _Best, k: int) -> tuple[np.ndarray, np.ndarray]:
    """What was found for distinct rows, for all rows and with all copies of the keys: (N, k) scores and indices."""
    parts = [
        _with_copies(scores, keys.copies[indices], k, len(keys))
        for scores, indices in zip(best.scores.split(PART), best.indices.split(PART), strict=True)
    ]
    scores, indices = (torch.cat(part)[queries.member].cpu().numpy() for part in zip(*parts, strict=True))
    return scores, indices


def _with_copies(scores: Tensor, copies: Tensor, k: int, missing: int) -> tuple[Tensor, Tensor]:
    """The k best of (Q, k') scores whose keys have the indices (Q, k', c); `missing` marks a place without a copy."""
    scores = scores[:, :, None].expand_as(copies).masked_fill(copies == missing, -torch.inf).flatten(1)  # (Q, k'·c)
    indices, by_index = copies.flatten(1).sort(dim=1)
    scores, by_score = scores.gather(1, by_index).sort(dim=1, descending=True, stable=True)
    return scores[:, :k], indices.gather(1, by_score[:, :k])
