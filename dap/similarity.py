"""Exact nearest neighbours by cosine, in blocks of bounded memory.

Legend: `N` queries, `M` keys, `D` dimensions, `Q` × `K` a block of similarities, `k` neighbours.
"""

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray | Tensor


def nearest_neighbours(
    queries: Array, keys: Array, k: int = 1, query_block: int = 1024, key_block: int = 16384
) -> tuple[np.ndarray, np.ndarray]:
    """The k keys of highest cosine for every query, best first; equal scores by lowest index.

    Exact, in float32, on the device of the arrays; memory beyond the inputs' normalised copies is a few times
    `query_block` × `key_block` × 4 bytes. Keys that are equal tie, although a matrix product may round their columns
    differently. A zero vector has cosine 0 with everything.

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
        ValueError: wrong shapes, k out of range, or a row that is not finite (named).
    """
    queries, keys = unit_rows(queries, "queries"), unit_rows(keys, "keys")
    if queries.shape[1] != keys.shape[1]:
        raise ValueError(f"queries have {queries.shape[1]} dimensions, keys {keys.shape[1]}: use one encoder for both")
    if not 1 <= k <= len(keys):
        raise ValueError(f"k={k} with {len(keys)} keys: choose 1 to {len(keys)}")
    copies = _copies(keys, k)  # (U, c)
    distinct = keys if len(copies) == len(keys) else keys[copies[:, 0]]  # (U, D)
    found = []
    for block in queries.split(query_block):
        scores, indices = _search(block, distinct, min(k, len(distinct)), key_block)
        found.append(_with_copies(scores, copies[indices], k, len(keys)))
    scores, indices = (torch.cat(part).cpu().numpy() for part in zip(*found, strict=True))
    return scores, indices


def unit_rows(array: Array, name: str) -> Tensor:
    """The rows divided by their length, (N, D) float32; zero rows stay zero. `name` is what an error calls the array.

    Raises:
        ValueError: not two-dimensional, or a row with NaN or infinity, named by its number.
    """
    rows = torch.as_tensor(array).detach().to(torch.float32)  # (N, D)
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(rows.shape)}: expected (rows, dimensions)")
    bad = (~rows.isfinite()).any(1).nonzero()
    if len(bad):
        raise ValueError(f"{name}: row {bad[0].item()} (of {len(bad)} such rows) has NaN or infinite values")
    rows = rows / rows.abs().amax(1, keepdim=True).clamp_min(
        torch.finfo(torch.float32).tiny
    )  # squares cannot overflow
    return torch.nn.functional.normalize(rows, dim=1)


def _copies(keys: Tensor, k: int) -> Tensor:
    """For each distinct key the indices of its first rows, ascending: (U, c), c <= k, filled up with M."""
    first = _first_equal_row(keys)  # (M,)
    order = first.argsort(stable=True)  # copies side by side, each group ascending
    _, group, sizes = first[order].unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(len(keys), device=keys.device) - (sizes.cumsum(0) - sizes)[group]
    copies = torch.full((len(sizes), min(k, int(sizes.max()))), len(keys), device=keys.device)
    kept = rank < copies.shape[1]
    copies[group[kept], rank[kept]] = order[kept]
    return copies


def _first_equal_row(rows: Tensor) -> Tensor:
    """Index of the first row equal to each row, (M,): found by a 64-bit hash of the bits, then compared."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**63), 2**63 - 1, (rows.shape[1],), generator=generator).to(rows.device)
    bits = rows.view(torch.int32)
    hashes = torch.cat([(part.long() * factors).sum(1) for part in bits.split(4096)])  # wraps: exact in any order
    _, group = hashes.unique(return_inverse=True)
    own = torch.arange(len(rows), device=rows.device)
    first = torch.full_like(own, len(rows)).scatter_reduce(0, group, own, "amin")[group]
    suspects = (first != own).nonzero()[:, 0]
    differ = torch.cat([(rows[part] != rows[first[part]]).any(1) for part in suspects.split(4096)])
    first[suspects[differ]] = suspects[differ]
    return first


def _with_copies(scores: Tensor, copies: Tensor, k: int, missing: int) -> tuple[Tensor, Tensor]:
    """The k best of (Q, k') scores whose keys have the indices (Q, k', c); `missing` marks a place without a copy."""
    scores = scores[:, :, None].expand_as(copies).masked_fill(copies == missing, -torch.inf).flatten(1)  # (Q, k'·c)
    indices, by_index = copies.flatten(1).sort(dim=1)
    scores, by_score = scores.gather(1, by_index).sort(dim=1, descending=True, stable=True)
    return scores[:, :k], indices.gather(1, by_score[:, :k])


def _search(queries: Tensor, keys: Tensor, k: int, key_block: int) -> tuple[Tensor, Tensor]:
    """The k best of all keys for one block of queries: (Q, k) scores and indices."""
    scores = queries.new_empty(len(queries), 0)
    indices = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    for start in range(0, len(keys), key_block):
        similarity = queries @ keys[start : start + key_block].T  # (Q, K)
        block_scores, block_indices = _top_k(similarity, min(k, similarity.shape[1]))
        scores = torch.cat([scores, block_scores], 1)  # earlier keys first, so a stable sort keeps the lowest index
        indices = torch.cat([indices, block_indices + start], 1)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        scores, indices = scores[:, :k], indices.gather(1, order[:, :k])
    return scores, indices


def _top_k(similarity: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk` with ties by lowest index: rows with a tie at the k-th place are sorted in full, which is rare."""
    scores, indices = similarity.topk(k, dim=1)  # (Q, k)
    tied = (similarity >= scores[:, -1:]).sum(1) > k  # (Q,)
    if tied.any():
        tied_scores, tied_indices = similarity[tied].sort(dim=1, descending=True, stable=True)
        scores[tied], indices[tied] = tied_scores[:, :k], tied_indices[:, :k]
    indices, by_index = indices.sort(dim=1)
    scores, by_score = scores.gather(1, by_index).sort(dim=1, descending=True, stable=True)
    return scores, indices.gather(1, by_score)
