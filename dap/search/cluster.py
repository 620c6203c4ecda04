"""Nearest neighbours by the tasks of a Ray cluster: exact ones equal those of one process."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from dap.cluster import RETRIES
from dap.search.approximate import approximate_neighbours, built_index
from dap.search.plan import BAND, SearchPlan
from dap.search.similarity import Best, Found, Neighbours, mutual_neighbours, require_searchable

#: Tasks begun for each CPU or GPU; what they need is held in memory.
AHEAD = 2

Strips = dict[int, Any]


def cluster_neighbours(
    source: np.ndarray, target: np.ndarray, k: int = 4, index: str | None = None, progress: bool = False
) -> Neighbours:
    """A search with a task for each tile of a `SearchPlan`, on a GPU or else a CPU.

    Other tasks merge what is found. This process takes it at the end of a band of `BAND` tiles' source rows: no more
    is searched again where a node and what it held are lost.

    With an `index`, as of `approximate_neighbours`, tasks build one of each tile's source and target rows, to be
    searched by all tiles of the other side; the number of CPUs changes no result. Both sides' vectors and indexes go
    through the cluster's object store, the target's as a whole. A task needs its two tiles and a block of the search;
    this process needs, beside memory maps, what the result takes. Errors are those of the search.
    """
    import ray

    require_searchable({"source": source, "target": target}, k, min(len(source), len(target)))
    plan = plan_search(len(source), len(target), source.shape[1], index)
    (height, width), kind, count = plan.tile, plan.kind, plan.count
    find = ray.remote(num_returns=2, max_retries=RETRIES, **{f"num_{kind.lower()}s": 1})(_search_tile)
    merge = ray.remote(num_returns=2, max_retries=RETRIES)(_merge)
    build = ray.remote(max_retries=RETRIES)(built_index)
    forward, backward = (Best(len(side), k, torch.device("cpu")).found() for side in (source, target))
    columns = _strips(width, target)
    column_indexes = {start: index and build.remote(keys, index) for start, keys in columns.items()}

    def tiles(top: int, rows: Strips, best: list[Strips], known: list[Strips]) -> Iterator[tuple[int, int, Any, Any]]:
        row_indexes = {start: index and build.remote(queries, index) for start, queries in rows.items()}
        for row, column in _diagonals([*rows], [*columns]):
            sides = rows[row], columns[column], known[0][row], known[1][column]
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


def plan_search(rows: int, columns: int, dimensions: int, index: str | None = None, k: int = 4) -> SearchPlan:
    """The plan of a search on the connected cluster."""
    import ray

    there, nodes = ray.cluster_resources(), sum(node["Alive"] for node in ray.nodes())
    kind = "GPU" if index is None and there.get("GPU") else "CPU"
    store = there.get("object_store_memory", math.inf) / nodes
    return SearchPlan(rows, columns, dimensions, kind, int(there.get(kind, 1)), nodes, store, index, k)


def product_rate(dimensions: int, rows: int) -> float:
    """FLOP/s of an exact search of so many made-up rows, of this process's GPU or of each of its threads."""
    sides = np.random.default_rng(0).standard_normal((2, rows, dimensions), np.float32)
    for source, target in (sides[:, :1], sides):  # the first to get ready
        started = time.perf_counter()
        mutual_neighbours(source, target, 1)
    flops = 2 * rows**2 * dimensions / (1 if torch.cuda.is_available() else torch.get_num_threads())
    return flops / (time.perf_counter() - started)


def _ahead(jobs: Iterable[Any], most: int) -> Iterator[Any]:
    """The jobs in order, `most` of them begun before the first is done."""
    begun: deque[Any] = deque()
    for job in jobs:
        begun.append(job)
        if len(begun) == most:
            yield begun.popleft()
    yield from begun


def _diagonals(rows: Sequence[int], columns: Sequence[int]) -> list[tuple[int, int]]:
    """All pairs of a row and a column, so that pairs near each other share neither: those before tell what is known.

    >>> _diagonals([0, 5], [0, 5, 9])
    [(0, 0), (5, 5), (0, 5), (5, 9), (0, 9), (5, 0)]
    """
    places, longest = product(range(len(rows)), range(len(columns))), max(len(rows), len(columns))
    return [(rows[i], columns[j]) for i, j in sorted(places, key=lambda at: ((at[1] - at[0]) % longest, at))]


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
    """What may be better in a tile than the best known ones of its rows and of its columns, or as good."""
    most = min(k, len(queries), len(keys))
    if index is None:
        above = (np.nextafter(known[0][:, -1], -np.inf) for known in (best, keys_best))
        found = mutual_neighbours(queries, keys, most, above=tuple(above))
    else:
        found = approximate_neighbours(queries, keys, most, index, built=built)
    return (found.forward_scores, found.forward_indices), (found.backward_scores, found.backward_indices)


def _merge(best: Found, found: Found, start: int) -> tuple[Found, int]:
    """The best of the best so far and of what a tile from `start` on has, and how many rows they belong to."""
    scores, indices = np.concatenate([best[0], found[0]], 1), np.concatenate([best[1], start + found[1]], 1)
    order = np.lexsort((indices, -scores))[:, : best[0].shape[1]]  # equal scores by lowest index
    return (np.take_along_axis(scores, order, 1), np.take_along_axis(indices, order, 1)), len(order)
