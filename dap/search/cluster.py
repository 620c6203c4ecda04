"""Nearest neighbours by the tasks of a Ray cluster: exact ones equal those of one process."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from dap.cluster import RETRIES
from dap.search.approximate import approximate_neighbours, built_index
from dap.search.similarity import Best, Found, Neighbours, mutual_neighbours, require_searchable

#: Rows of each side in a task.
TILES = {"CPU": 16384, "GPU": 131072}
WIDEST = 8  # times as many where the sides are long: the wider, the less is merged
TASKS = 16  # for each CPU or GPU, at least, where tiles are wider
#: Tasks begun for each CPU or GPU; what they need is held in memory.
AHEAD = 2
#: Tiles' source rows of a band, whose vectors are in the object store at the same time.
BAND = 16

Strips = dict[int, Any]


def cluster_neighbours(
    source: np.ndarray, target: np.ndarray, k: int = 4, index: str | None = None, progress: bool = False
) -> Neighbours:
    """A search with a task for each tile of `tile_rows` source × target rows, on a GPU or else a CPU.

    Other tasks merge what is found, in the order of the columns and of the rows. This process takes it at the end of
    a band of `BAND` tiles' source rows: no more is searched again where a node and what it held are lost.

    With an `index`, as of `approximate_neighbours`, tasks build one of each tile's source and target rows, to be
    searched by all tiles of the other side; the number of CPUs changes no result. Both sides' vectors and indexes go
    through the cluster's object store, the target's as a whole. A task needs its two tiles and a block of the search;
    this process needs, beside memory maps, what the result takes.

    Raises:
        ValueError: as the search.
    """
    import ray

    require_searchable({"source": source, "target": target}, k, min(len(source), len(target)))
    kind, count, height, width = _tiles(len(source), len(target), index is None)
    find = ray.remote(num_returns=2, max_retries=RETRIES, **{f"num_{kind.lower()}s": 1})(_search_tile)
    merge = ray.remote(num_returns=2, max_retries=RETRIES)(_merge)
    build = ray.remote(max_retries=RETRIES)(built_index)
    forward, backward = (Best(len(side), k, torch.device("cpu")).found() for side in (source, target))
    columns = _strips(width, target)
    column_indexes = {start: index and build.remote(keys, index) for start, keys in columns.items()}

    def tiles(top: int, rows: Strips, best: list[Strips], known: list[Strips]) -> Iterator[tuple[int, int, Any, Any]]:
        row_indexes = {start: index and build.remote(queries, index) for start, queries in rows.items()}
        for (column, keys), (row, queries) in product(columns.items(), rows.items()):
            sides = queries, keys, known[0][row], known[1][column]
            found = find.remote(k, index, *sides, row_indexes[row], column_indexes[column])
            best[0][row], queries_done = merge.remote(best[0][row], found[0], column)
            best[1][column], keys_done = merge.remote(best[1][column], found[1], top + row)
            yield row, column, (best[0][row], best[1][column]), [queries_done, keys_done]

    bar = tqdm(total=len(source) * len(target), desc="nearest neighbours", unit=" pairs", unit_scale=True,
               disable=not progress)  # fmt: skip
    with bar:
        for top in range(0, len(source), BAND * height):
            rows, *mine = (each[top : top + BAND * height] for each in (source, *forward))
            rows, best = _strips(height, rows), [_strips(height, *mine), _strips(width, *backward)]
            known = [strips.copy() for strips in best]  # those that are there
            for row, column, merged, done in _ahead(tiles(top, rows, best, known), AHEAD * count):
                bar.update(math.prod(ray.get(done)))
                known[0][row], known[1][column] = merged
            for arrays, strips in zip((mine, backward), best, strict=True):
                for array, parts in zip(arrays, zip(*ray.get(list(strips.values())), strict=True), strict=True):
                    np.concatenate(parts, out=array)
    return Neighbours(*forward, *backward)


def search_plan(rows: int, columns: int, dimensions: int, exact: bool = True) -> str:
    """What `cluster_neighbours` will do with so many source and target vectors, for the user."""
    kind, count, height, width = _tiles(rows, columns, exact)
    tasks = -(-rows // height) * -(-columns // width)
    memory = (height + width) * dimensions * 4 / 2**20
    return f"{tasks:,} search tasks of at most {memory:,.0f} MiB of vectors on {count} {kind}s"


def tile_rows(kind: str, count: int, rows: int, columns: int) -> int:
    """Rows of each side in a task, at most, by how many CPUs or GPUs there are and what they search.

    >>> tile_rows("GPU", 8, 10**6, 10**6), tile_rows("GPU", 8, 10**8, 10**8)
    (131072, 1048576)
    """
    few = math.isqrt(rows * columns // (TASKS * count))
    return TILES[kind] * min(max(few // TILES[kind], 1), WIDEST)


def _tiles(rows: int, columns: int, exact: bool) -> tuple[str, int, int, int]:
    """What a task needs one of, how many of them the cluster has, and a task's rows of both sides, alike in all tasks.

    Approximate searches are for CPUs, and their tiles as for one: what they find depends on the tile.
    """
    import ray

    there = ray.cluster_resources()
    kind = "GPU" if exact and there.get("GPU") else "CPU"
    count = int(there.get(kind, 1))
    tile = tile_rows(kind, count if exact else 1, rows, columns)
    return kind, count, *(-(-side // -(-side // tile)) for side in (rows, columns))


def _ahead(jobs: Iterable[Any], most: int) -> Iterator[Any]:
    """The jobs in order, `most` of them begun before the first is done."""
    begun: deque[Any] = deque()
    for job in jobs:
        begun.append(job)
        if len(begun) == most:
            yield begun.popleft()
    yield from begun


def _strips(size: int, *arrays: np.ndarray) -> Strips:
    """So many rows of an array, or of two, at a time in the object store, by the number of the first."""
    import ray

    put: Strips = {}
    for start in range(0, len(arrays[0]), size):
        part = [np.array(array[start : start + size]) for array in arrays]
        put[start] = ray.put(part if len(part) > 1 else part[0])
    return put


def _search_tile(
    k: int,
    index: str | None,
    queries: np.ndarray,
    keys: np.ndarray,
    best: Found,
    keys_best: Found,
    *built: np.ndarray | None,
) -> tuple[Found, Found]:
    """What may be better in a tile than the best known ones of its rows and of its columns."""
    most = min(k, len(queries), len(keys))
    if index is None:
        found = mutual_neighbours(queries, keys, most, above=(best[0][:, -1], keys_best[0][:, -1]))
    else:
        found = approximate_neighbours(queries, keys, most, index, built=built)
    return (found.forward_scores, found.forward_indices), (found.backward_scores, found.backward_indices)


def _merge(best: Found, found: Found, start: int) -> tuple[Found, int]:
    """The best of the best so far and of what a tile from `start` on has, and how many rows they belong to."""
    merged = Best(*best[0].shape, torch.device("cpu"))
    merged.merge(0, *best)
    merged.merge(0, found[0], start + found[1])
    return merged.found(), len(best[0])
