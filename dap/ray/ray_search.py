"""Nearest neighbours by the tasks of a Ray cluster: exact ones equal those of one process."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from dap.progress import Progress, bar_of
from dap.ray.connection import RETRIES
from dap.ray.search_plan import BAND, SearchPlan
from dap.scratch import Folder, zeros
from dap.search.approximate import approximate_neighbours, built_index
from dap.search.similarity import Found, Neighbours, mutual_neighbours, require_searchable

#: Tasks of each CPU or GPU, begun before the first is done; what they need is held in memory.
AHEAD = 2

Strips = dict[int, Any]


def cluster_neighbours(
    source: np.ndarray,
    target: np.ndarray,
    k: int = 4,
    index: str | None = None,
    progress: Progress = False,
    folder: Folder = None,
) -> Neighbours:
    """A search with a task for each tile of a `SearchPlan`, on a GPU or else a CPU.

    A task goes on from the best that others have found for its rows and columns. This process takes these at the end
    of a band of `BAND` tiles' source rows: no more is searched again where a node and what it held are lost.

    With an `index`, as of `approximate_neighbours`, tasks build one of each tile's source and target rows, to be
    searched by all tiles of the other side; the number of CPUs changes no result. Both sides' vectors and indexes go
    through the cluster's object store, the target's as a whole. A task needs its two tiles and a block of the search;
    this process needs one tile's rows: the result is in unnamed files of the folder. Errors are those of the search.
    """
    import ray

    require_searchable({"source": source, "target": target}, k, min(len(source), len(target)))
    plan = plan_search(len(source), len(target), source.shape[1], index)
    height, width = plan.tile
    needs = {f"num_{plan.kind.lower()}s": 1, "num_returns": 2, "max_retries": RETRIES}
    find = ray.remote(**needs)(lambda *tile: _search_tile(k, index, *tile))
    forward, backward = (
        [zeros((len(side), k), kind, folder) for kind in (np.float32, np.int64)]
        for side in (source, target)
    )
    columns = _Side(0, _strips(width, target), index)
    with bar_of(
        progress, total=len(source) * len(target), desc="nearest neighbours", unit=" pairs"
    ) as bar:
        for top in range(0, len(source), BAND * height):
            queries, *mine = (each[top : top + BAND * height] for each in (source, *forward))
            rows = _Side(top, _strips(height, queries), index)
            columns.found = (
                {start: [best] for start, best in _strips(width, *backward).items()} if top else {}
            )
            for row, column in _tiles(find, rows, columns, _places(plan.kind)):
                bar.update(min(height, len(queries) - row) * min(width, len(target) - column))
            rows.take(mine, k)
            columns.take(backward, k)
    return Neighbours(*forward, *backward)


def plan_search(
    rows: int, columns: int, dimensions: int, index: str | None = None, k: int = 4
) -> SearchPlan:
    """The plan of a search on the connected cluster."""
    import ray

    there, nodes = ray.cluster_resources(), sum(node["Alive"] for node in ray.nodes())
    kind = "GPU" if index is None and there.get("GPU") else "CPU"
    store = there.get("object_store_memory", math.inf) / nodes
    return SearchPlan(
        rows, columns, dimensions, kind, int(there.get(kind, 1)), nodes, store, index, k
    )


def product_rate(dimensions: int, rows: int) -> float:
    """FLOP/s of an exact search of so many made-up rows, of this process's GPU or of each of its threads."""
    sides = np.random.default_rng(0).standard_normal((2, rows, dimensions), np.float32)
    for source, target in (sides[:, :1], sides):  # the first to get ready
        started = time.perf_counter()
        mutual_neighbours(source, target, 1)
    flops = 2 * rows**2 * dimensions / (1 if torch.cuda.is_available() else torch.get_num_threads())
    return flops / (time.perf_counter() - started)


def _places(kind: str) -> list[str | None]:
    """The node of each CPU or GPU that there is; None where all are still to come."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        node["NodeID"] for node in alive for _ in range(int(node["Resources"].get(kind, 0)))
    ] or [None]


def _at(place: str | None) -> dict[str, Any]:
    """Has a task wait at a node, which meanwhile fetches what it needs; elsewhere where the node is lost."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return {"scheduling_strategy": place and NodeAffinitySchedulingStrategy(place, soft=True)}


class _Side:
    """Strips of one side in the object store, by the number of the first row of each, counted from that of `first`.

    Attributes:
        vectors: (rows, D) of each strip.
        indexes: what `built_index` makes of each, None without an index.
        found: pieces of what is found for each, every one of other tiles.
    """

    def __init__(self, first: int, vectors: Strips, index: str | None) -> None:
        import ray

        build = ray.remote(max_retries=RETRIES)(built_index)
        self.first, self.vectors, self.found = first, vectors, {}
        self.indexes = {
            start: index and build.remote(strip, index) for start, strip in vectors.items()
        }

    def keep(self, start: int, piece: Any) -> None:
        self.found.setdefault(start, []).append(piece)

    def take(self, arrays: Sequence[np.ndarray], k: int) -> None:
        """Writes the best of all strips into two arrays."""
        import ray

        for start, pieces in self.found.items():
            for array, best in zip(arrays, _merged(ray.get(pieces), k), strict=True):
                array[start : start + len(best)] = best


def _tiles(
    find: Any, rows: _Side, columns: _Side, places: Sequence[str | None]
) -> Iterator[tuple[int, int]]:
    """Searches all tiles by a remote function, and yields those that are done.

    A tile takes what is found for its rows and columns and gives back what it adds to. Where there are strips enough
    for all places to be at work, it may wait for the tile before it of the same row or column.
    """
    many = min(len(rows.vectors), len(columns.vectors)) >= AHEAD * len(places)

    def keep(row: int, column: int, found: Sequence[Any]) -> None:
        rows.keep(row, found[0])
        columns.keep(column, found[1])

    def begin(row: int, column: int, place: str | None) -> list[Any]:
        sides = (
            rows.vectors[row],
            columns.vectors[column],
            rows.indexes[row],
            columns.indexes[column],
        )
        mine, theirs = rows.found.pop(row, []), columns.found.pop(column, [])
        starts = columns.first + column, rows.first + row
        found = find.options(**_at(place)).remote(starts, *sides, len(mine), *mine, *theirs)
        if many:
            keep(row, column, found)
        return found

    for tile, found in _ahead(begin, _diagonals([*rows.vectors], [*columns.vectors]), places):
        if not many:
            keep(*tile, found)
        yield tile


def _ahead(
    begin: Callable[..., list[Any]], jobs: Iterable[tuple], places: Sequence[str | None]
) -> Iterator[tuple[tuple, list[Any]]]:
    """Begins jobs, `AHEAD` at a place before its first is done; yields those that are done, with what they return."""
    import ray

    waiting, free, begun = deque(jobs), deque(AHEAD * [*places]), {}
    while waiting or begun:
        while waiting and free:
            job, place = waiting.popleft(), free.popleft()
            found = begin(*job, place)
            begun[found[0]] = job, place, found
        (done,), _ = ray.wait([*begun], fetch_local=False)
        job, place, found = begun.pop(done)
        free.append(place)
        yield job, found


def _diagonals(rows: Sequence[int], columns: Sequence[int]) -> list[tuple[int, int]]:
    """All pairs of a row and a column, so that pairs near each other share neither: those before tell what is known.

    >>> _diagonals([0, 5], [0, 5, 9])
    [(0, 0), (5, 5), (0, 5), (5, 9), (0, 9), (5, 0)]
    """
    places, longest = product(range(len(rows)), range(len(columns))), max(len(rows), len(columns))
    return [
        (rows[i], columns[j])
        for i, j in sorted(places, key=lambda at: ((at[1] - at[0]) % longest, at))
    ]


def _nothing_found(rows: int, k: int) -> Found:
    """Scores and indices (rows, k) before a search."""
    return np.full((rows, k), -np.inf, np.float32), np.full((rows, k), -1)


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
    starts: tuple[int, int],
    queries: np.ndarray,
    keys: np.ndarray,
    row_index: np.ndarray | None,
    column_index: np.ndarray | None,
    count: int,
    *pieces: Found,
) -> tuple[Found, Found]:
    """The best of a tile and of what others have found, for its rows and for its columns.

    Args:
        starts: numbers of the tile's first column and first row.
        count: how many of the pieces are for its rows.
    """
    sides = (len(queries), pieces[:count]), (len(keys), pieces[count:])
    best, keys_best = (
        _merged(some, k) if some else _nothing_found(rows, k) for rows, some in sides
    )
    most = min(k, len(queries), len(keys))
    if index is None:
        above = (np.nextafter(known[0][:, -1], -np.inf) for known in (best, keys_best))
        found = mutual_neighbours(queries, keys, most, above=tuple(above))
    else:
        found = approximate_neighbours(queries, keys, most, index, built=(row_index, column_index))
    forward = found.forward_scores, starts[0] + found.forward_indices
    backward = found.backward_scores, starts[1] + found.backward_indices
    return _merged([best, forward], k), _merged([keys_best, backward], k)


def _merged(pieces: Sequence[Found], k: int) -> Found:
    """The k best of different tiles, for the same rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scores, indices = (
        torch.from_numpy(np.concatenate(arrays, 1)).to(device)
        for arrays in zip(*pieces, strict=True)
    )
    order = indices.argsort(dim=1)  # equal scores by lowest index
    order = order.gather(
        1, scores.gather(1, order).argsort(dim=1, descending=True, stable=True)[:, :k]
    )
    return scores.gather(1, order).cpu().numpy(), indices.gather(1, order).cpu().numpy()
