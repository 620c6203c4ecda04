"""Approximate nearest neighbours by cosine with faiss, where exact search takes too long.

A query is a row whose neighbours are wanted. A key is a row that may be a neighbour.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours, `B` rows of a block.
"""

import re
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dap_transformers.errors import reading
from dap_transformers.search.exact import (
    Array,
    Found,
    Neighbours,
    nearest_neighbours,
    require_k,
    unit_rows,
)

#: Rows that are added to an index or searched in it at a time.
BLOCK_ROWS = 4096
#: Most rows that an index is trained on: in all, and per cluster. Faiss itself uses no more per
#: cluster.
TRAINING_ROWS = 1_000_000
ROWS_PER_CLUSTER = 256
#: Rows of each side that are searched exactly to measure the recall.
RECALL_SAMPLE = 1000


def approximate_neighbours(
    source: Array,
    target: Array,
    k: int = 4,
    index: str = "IVF1024,Flat:nprobe=32",
    progress: bool = False,
) -> Neighbours:
    """Find k approximate nearest neighbours of all source rows (N, D) and target rows (M, D).

    The faiss index only chooses the neighbours. Their cosines are computed from the vectors, in
    float32. A row for which the index finds fewer than k is compared with all rows of the other
    side.

    Args:
        index: a string of faiss's index factory (`IVF4096,PQ64`, `HNSW32`, …), and after a colon
            its search parameters (`IVF4096,Flat:nprobe=64`). Without parameters an IVF index visits
            the square root of its number of lists.
    """
    require_k(k, min(len(source), len(target)))
    total = 2 * (len(source) + len(target))
    with tqdm(
        total=total, desc=f"faiss {index}", unit=" rows", unit_scale=True, disable=not progress
    ) as bar:
        forward = _search(source, target, k, index, bar)
        backward = _search(target, source, k, index, bar)
    return Neighbours(forward, backward)


def recall_at_k(approximate: Neighbours, source: Array, target: Array) -> float:
    """Return the share, 0 to 1, of the exact k nearest neighbours that an approximate search found.

    At most `RECALL_SAMPLE` random rows per side are searched exactly, the same ones in every call.

    >>> rows = np.eye(3)
    >>> near = Found(rows[:, :1], np.array([[0], [1], [0]]))
    >>> recall_at_k(Neighbours(near, near), rows, rows) == 2 / 3
    True
    """
    forward = _recall(approximate.forward.indices, source, target)
    backward = _recall(approximate.backward.indices, target, source)
    return (forward + backward) / 2


def _recall(found: np.ndarray, queries: Array, keys: Array) -> float:
    """Return which share of the exact k nearest keys of random queries is in `found` (N, k)."""
    size = min(RECALL_SAMPLE, len(queries))
    sample = np.random.default_rng(0).choice(len(queries), size, replace=False)
    sample.sort()
    _, exact = nearest_neighbours(queries[sample], keys, found.shape[1])  # (size, k)
    is_found = (found[sample][:, :, None] == exact[:, None, :]).any(2)  # (size, k)
    return float(is_found.mean())


def _search(queries: Array, keys: Array, k: int, name: str, bar: tqdm) -> Found:
    """Return cosines (N, k) and rows (N, k) of the keys (M, D) near each query (N, D).

    `name` is the name of the index, as in `approximate_neighbours`.
    """
    index = _build(keys, name, bar)
    scores = np.empty((len(queries), k), np.float32)
    indices = np.empty((len(queries), k), np.int64)
    for start in range(0, len(queries), BLOCK_ROWS):
        end = start + BLOCK_ROWS
        block = unit_rows(queries[start:end]).cpu().numpy()  # (B, D)
        with reading(f"faiss index {name}"):
            found = np.sort(index.search(block, k)[1], axis=1)  # (B, k), -1 if nothing was found

        # compute the cosines exactly, and sort by them
        near = unit_rows(keys[np.maximum(found, 0).ravel()]).cpu().numpy()  # (B·k, D)
        exact = np.einsum("bd,bkd->bk", block, near.reshape(*found.shape, -1))
        order = np.argsort(-exact, axis=1, kind="stable")
        scores[start:end] = np.take_along_axis(exact, order, 1)
        indices[start:end] = np.take_along_axis(found, order, 1)
        bar.update(len(block))

    is_short = (indices < 0).any(1)  # the index has found fewer than k
    if is_short.any():
        scores[is_short], indices[is_short] = nearest_neighbours(queries[is_short], keys, k)
    return Found(scores, indices)


def _build(keys: Array, name: str, bar: tqdm) -> Any:
    """Return the faiss index `name`, trained on a sample of the keys, which holds all of them."""
    factory, _, parameters = name.partition(":")
    if "ht=" not in parameters:
        # "np" skips a slow training step, which only a search by Hamming distance ("ht") needs
        factory = re.sub(r"(?<![A-Z])PQ\d+(x\d+)?(?=,|$)", r"\g<0>np", factory)
    with reading(f"faiss index {name} of {len(keys)} rows"):
        import faiss

        index = faiss.index_factory(keys.shape[1], factory, faiss.METRIC_INNER_PRODUCT)
        lists = getattr(faiss.try_extract_index_ivf(index), "nlist", 0)

        if not index.is_trained:
            step = _training_step(len(keys), factory, lists)
            index.train(unit_rows(keys[::step]).cpu().numpy())

        if lists and not parameters:
            parameters = f"nprobe={max(1, round(lists**0.5))}"
        if parameters:
            faiss.ParameterSpace().set_index_parameters(index, parameters)

        for start in range(0, len(keys), BLOCK_ROWS):
            block = unit_rows(keys[start : start + BLOCK_ROWS]).cpu().numpy()
            index.add(block)
            bar.update(len(block))
    return index


def _training_step(rows: int, factory: str, lists: int) -> int:
    """Return n such that every n-th row trains the index. All rows would take time and memory.

    `lists` is the number of lists of an IVF index, 0 for others.

    >>> _training_step(2**22, "PQ16", 0), _training_step(2**22, "IVF1024,Flat", 1024)
    (64, 16)
    >>> _training_step(2**22, "PQ16x12", 0)
    5
    """
    # An IVF index learns the centres of its lists. `PQ16x12` learns 2^12 codes of each part.
    bits = max([8, *map(int, re.findall(r"x(\d+)", factory))])
    clusters = max(lists, 2**bits)
    wanted = min(ROWS_PER_CLUSTER * clusters, TRAINING_ROWS)
    return -(-rows // wanted)
