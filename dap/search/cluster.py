"""Nearest neighbours by the tasks of a Ray cluster: exact ones equal those of one process."""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from dap.cluster import RETRIES
from dap.search.similarity import Best, Neighbours, Search, mutual_neighbours, require_searchable

#: Rows of each side in a task.
TILES = {"CPU": 16384, "GPU": 131072}
WIDEST = 8  # times as many where the sides are long: the wider, the less is merged where the command runs
TASKS = 16  # for each CPU or GPU, at least, where tiles are wider
#: Tasks begun for each CPU or GPU; what they need is held in memory.
AHEAD = 2


def cluster_neighbours(
    source: np.ndarray, target: np.ndarray, k: int = 4, search: Search = mutual_neighbours, progress: bool = False
) -> Neighbours:
    """A search with a task for each tile of `tile_rows` source × target rows, on a GPU or else a CPU.

    An approximate search builds its indexes in every task, of that tile; the number of CPUs changes no result. Both
    sides' vectors go through the cluster's object store, the target's as a whole. A task needs its two tiles and a
    block of the search; this process needs, beside memory maps, what the result takes.

    Raises:
        ValueError: as the search.
    """
    import ray

    require_searchable({"source": source, "target": target}, k, min(len(source), len(target)))
    exact = search is mutual_neighbours
    kind, count, height, width = _tiles(len(source), len(target), exact)
    task = ray.remote(max_retries=RETRIES, **{f"num_{kind.lower()}s": 1})(_search_tile)
    forward, backward = (Best(len(side), k, torch.device("cpu")) for side in (source, target))
    columns = {start: ray.put(np.array(target[start : start + width])) for start in range(0, len(target), width)}

    def tiles() -> Iterator[tuple[int, int, Any]]:
        for row in range(0, len(source), height):
            rows, worst = ray.put(np.array(source[row : row + height])), forward.scores[row : row + height, -1]
            for column, keys in columns.items():
                above = worst.numpy(), backward.scores[column : column + width, -1].numpy()
                find = partial(search, above=above) if exact else search  # no more than can be among the best
                yield row, column, task.remote(find, rows, keys, k)

    bar = tqdm(total=len(source) * len(target), desc="nearest neighbours", unit=" pairs", unit_scale=True,
               disable=not progress)  # fmt: skip
    with bar:
        for row, column, job in _ahead(tiles(), AHEAD * count):
            found = ray.get(job)
            forward.merge(row, found.forward_scores, column + found.forward_indices)  # in the order of the columns
            backward.merge(column, found.backward_scores, row + found.backward_indices)
            bar.update(len(found.forward_scores) * len(found.backward_scores))
    return Neighbours(*forward.found(), *backward.found())


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


def _search_tile(search: Search, queries: np.ndarray, keys: np.ndarray, k: int) -> Neighbours:
    return search(queries, keys, min(k, len(queries), len(keys)))
