"""Nearest-neighbour search on a Ray cluster. An exact search gives the result of one process.

The search is cut into tiles. A tile compares a strip of source rows with a strip of target rows, in
one task of Ray. The vectors of a strip lie in Ray's object store, the memory that a node shares
among its processes. This process merges the neighbours that the tasks find, so a lost node costs
only the tiles that run there.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours, `n` and `m` rows of a
tile.
"""

from itertools import pairwise
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dap_transformers.ray.connection import RETRIES
from dap_transformers.search.exact import (
    Found,
    Neighbours,
    mutual_neighbours,
    require_k,
)

#: Rows of each side of a tile, by the device that searches it.
TILES = {"CPU": 32_768, "GPU": 524_288}
#: Tasks per CPU or GPU that are started at the same time. The node fetches the data of the second
#: one while the first one runs.
AHEAD = 2


def cluster_neighbours(
    source: np.ndarray,
    target: np.ndarray,
    k: int = 4,
    progress: bool = False,
) -> Neighbours:
    """Find the k nearest neighbours of all source (N, D) and target rows (M, D), on the cluster.

    The search is exact, and runs on GPUs if the cluster has any.

    The object store holds the vectors of the whole target, and of the source strips whose tiles
    run. A task needs the memory of its two strips and of one block of the search.
    """
    import ray

    require_k(k, min(len(source), len(target)))
    resources = ray.cluster_resources()
    kind = "GPU" if resources.get("GPU") else "CPU"
    at_once = AHEAD * max(1, int(resources.get(kind, 1)))

    # With GPUs, Ray would start a new process for each tile.
    options = {f"num_{kind.lower()}s": 1, "max_retries": RETRIES, "max_calls": 0}
    search_tile = ray.remote(**options)(lambda *tile: mutual_neighbours(*tile, k))
    forward = _nothing_found(len(source), k)
    backward = _nothing_found(len(target), k)
    rows_of, columns_of = (_strips(len(side), TILES[kind], k) for side in (source, target))
    strips = [(columns, ray.put(np.array(target[columns]))) for columns in columns_of]
    running: dict[Any, tuple[slice, slice]] = {}  # reference to a tile's result -> its place

    def merge_next() -> None:
        (ended,), _ = ray.wait([*running])
        rows, columns = running.pop(ended)
        found = ray.get(ended)
        _merge(forward, rows, found.forward, columns.start)
        _merge(backward, columns, found.backward, rows.start)
        bar.update()

    tasks = len(rows_of) * len(columns_of)
    with tqdm(total=tasks, desc="nearest neighbours", unit=" tasks", disable=not progress) as bar:
        for rows in rows_of:
            queries = ray.put(np.array(source[rows]))
            for columns, keys in strips:
                if len(running) == at_once:
                    merge_next()
                running[search_tile.remote(queries, keys)] = rows, columns
        while running:
            merge_next()
    return Neighbours(forward, backward)


def _strips(rows: int, height: int, k: int) -> list[slice]:
    """Divide rows evenly into slices of at most `height` rows, or more if k rows need it.

    Each slice has at least k rows. There must be as many.
    """
    count = min(-(-rows // height), rows // k)
    edges = [rows * number // count for number in range(count + 1)]
    return [slice(*each) for each in pairwise(edges)]


def _nothing_found(rows: int, k: int) -> Found:
    """Return the scores -inf and the indices -1, (rows, k) each, which stand for none yet."""
    return Found(np.full((rows, k), -np.inf, np.float32), np.full((rows, k), -1, np.int64))


def _merge(best: Found, rows: slice, found: Found, first: int) -> None:
    """Merge what a tile found (n, k) into the best of some rows, ties by index.

    `first` is the number of the tile's first key.
    """
    scores = np.concatenate([best.scores[rows], found.scores], 1)
    indices = np.concatenate([best.indices[rows], found.indices + first], 1)
    order = np.lexsort((indices, -scores))[:, : best.scores.shape[1]]
    best.scores[rows] = np.take_along_axis(scores, order, 1)
    best.indices[rows] = np.take_along_axis(indices, order, 1)
