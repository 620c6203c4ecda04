"""Nearest-neighbour search on a Ray cluster. An exact search gives the result of one process.

The search is cut into tiles. A tile compares a strip of source rows with a strip of target rows, in
one task of Ray.

- The vectors of a strip lie in Ray's object store, the memory that a node shares among its
  processes.
- A task starts from the best neighbours found so far for its rows and returns better ones.
- The source is searched in bands of `BAND` strips. The best neighbours come to the command's
  process after each band, so a lost node never costs more than one band.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from dap_transformers.disk_arrays import zeros_on_disk
from dap_transformers.ray.connection import RETRIES
from dap_transformers.search.approximate import approximate_neighbours, built_index
from dap_transformers.search.exact import (
    Found,
    Neighbours,
    mutual_neighbours,
    require_searchable,
)

#: Rows of each side of a tile, by the device that searches it. `tile_size` may choose wider ones.
TILES = {"CPU": 16384, "GPU": 131072}
#: How many times as wide a tile may be. Wider tiles have fewer results to merge.
WIDEST = 8
#: Tiles are only made wider if each CPU or GPU still gets this many of them.
TILES_PER_DEVICE = 16
#: Strips of source rows whose vectors are in the object store at the same time.
BAND = 16
#: Tasks per CPU or GPU that are started at the same time. The node fetches the data of the second
#: one while the first one runs.
AHEAD = 2

#: First row of each strip -> reference to an object in the object store.
Strips = dict[int, Any]


def cluster_neighbours(
    source: np.ndarray,
    target: np.ndarray,
    k: int = 4,
    index: str | None = None,
    progress: bool = False,
) -> Neighbours:
    """Find the k nearest neighbours of all source (N, D) and target rows (M, D), on the cluster.

    Without an `index` the search is exact and runs on GPUs if the cluster has any. With an `index`
    of faiss it runs on CPUs: each strip of rows gets its own index, in which all rows of the other
    side are searched. The number of CPUs does not change the result.

    The object store holds the vectors of the whole target and of one band of the source. A task
    needs the memory of its two strips and of one block of the search. This process needs the memory
    of one strip. The result is temporary files, mapped into memory.
    """
    import ray

    require_searchable({"source": source, "target": target}, k, min(len(source), len(target)))
    kind, count = search_devices(index)
    # What an index finds depends on the tile, so the tile must not depend on the number of devices.
    height, width = tile_size(len(source), len(target), kind, 1 if index else count)
    tasks = math.ceil(len(source) / height) * math.ceil(len(target) / width)

    options = {f"num_{kind.lower()}s": 1, "num_returns": 2, "max_retries": RETRIES}
    search_tile = ray.remote(**options)(lambda *tile: _search_tile(k, index, *tile))
    forward = _room_for_neighbours(len(source), k)
    backward = _room_for_neighbours(len(target), k)
    columns = _Side(target, 0, width, index)
    with tqdm(total=tasks, desc="nearest neighbours", unit=" tasks", disable=not progress) as bar:
        for top in range(0, len(source), BAND * height):
            band = slice(top, top + BAND * height)
            rows = _Side(source[band], top, height, index)
            if top:
                # The target's rows start from what the bands above have found for them.
                columns.put_found(backward)
            _search_tiles(search_tile, rows, columns, _devices(kind), bar)
            rows.write_best([each[band] for each in forward], k)
            columns.write_best(backward, k)
    return Neighbours(*forward, *backward)


def _room_for_neighbours(rows: int, k: int) -> list[np.ndarray]:
    """Return zeros for scores (rows, k) float32 and indices (rows, k) int64, on disk."""
    return [zeros_on_disk((rows, k), np.float32), zeros_on_disk((rows, k), np.int64)]


def search_devices(index: str | None) -> tuple[str, int]:
    """Return "GPU", or "CPU" for an index or without GPUs, and how many the cluster has."""
    import ray

    resources = ray.cluster_resources()
    kind = "GPU" if index is None and resources.get("GPU") else "CPU"
    return kind, int(resources.get(kind, 1))


def tile_size(rows: int, columns: int, kind: str, count: int) -> tuple[int, int]:
    """Choose how many source rows and target rows a tile compares.

    A side of a tile has `TILES[kind]` rows, and up to `WIDEST` times as many if each device still
    gets `TILES_PER_DEVICE` tiles. These numbers are then lowered so that all tiles are about equal.

    >>> tile_size(10**6, 10**6, "GPU", 8), tile_size(10**8, 10**8, "GPU", 8)
    ((125000, 125000), (1041667, 1041667))
    """
    square = math.isqrt(rows * columns // (TILES_PER_DEVICE * count))
    most = min(max(square, TILES[kind]), WIDEST * TILES[kind])
    strips = math.ceil(rows / most), math.ceil(columns / most)
    return math.ceil(rows / strips[0]), math.ceil(columns / strips[1])


def _devices(kind: str) -> list[Any]:
    """Return Ray's strategy that prefers its node, for each device. [None] if there is none yet."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    devices: list[Any] = []
    for node in ray.nodes():
        if node["Alive"]:
            preferred = NodeAffinitySchedulingStrategy(node["NodeID"], soft=True)
            devices += [preferred] * int(node["Resources"].get(kind, 0))
    return devices or [None]


class _Side:
    """One side of the search, cut into strips, and the neighbours found so far for its rows.

    A strip is named by the number of its first row, counted within the rows given here.

    Attributes:
        first: number of the first of these rows in the whole source or target.
        height: rows of a strip. The last strip may have fewer.
        vectors: strip -> reference to its vectors (height, D) in Ray's object store.
        indexes: strip -> reference to its faiss index, or None.
        found: strip -> references to scores and indices that tasks have found, not merged yet.
    """

    def __init__(self, vectors: np.ndarray, first: int, height: int, index: str | None) -> None:
        import ray

        self.first = first
        self.rows = len(vectors)
        self.height = height
        self.vectors: Strips = {}
        self.indexes: Strips = {}
        self.found: dict[int, list[Any]] = {}
        build = ray.remote(max_retries=RETRIES)(built_index)
        for start in range(0, len(vectors), height):
            self.vectors[start] = ray.put(np.array(vectors[start : start + height]))
            self.indexes[start] = index and build.remote(self.vectors[start], index)

    def add_found(self, start: int, piece: Any) -> None:
        """Add what a task found for the strip that begins at row `start` to `found`."""
        self.found.setdefault(start, []).append(piece)

    def put_found(self, best: Sequence[np.ndarray]) -> None:
        """Put the neighbours of earlier bands into the object store, strip by strip."""
        import ray

        for start in self.vectors:
            strip = slice(start, start + self.height)
            self.add_found(start, ray.put([np.array(array[strip]) for array in best]))

    def write_best(self, arrays: Sequence[np.ndarray], k: int) -> None:
        """Wait for tasks, merge what was found per strip into two arrays, and empty `found`."""
        import ray

        for start, pieces in self.found.items():
            scores, indices = _merge(ray.get(pieces), k)
            arrays[0][start : start + len(scores)] = scores
            arrays[1][start : start + len(scores)] = indices
        self.found = {}


def _search_tiles(
    search_tile: Any, rows: _Side, columns: _Side, devices: Sequence[Any], bar: tqdm
) -> None:
    """Search all tiles, each in a task that starts from what is found so far for its two strips."""

    def start(row: int, column: int, device: Any) -> list[Any]:
        known_rows = rows.found.pop(row, [])
        known_columns = columns.found.pop(column, [])
        return search_tile.options(scheduling_strategy=device).remote(
            (columns.first + column, rows.first + row),
            rows.vectors[row],
            columns.vectors[column],
            rows.indexes[row],
            columns.indexes[column],
            len(known_rows),
            *known_rows,
            *known_columns,
        )

    tiles = _diagonals([*rows.vectors], [*columns.vectors])
    for (row, column), found in _run_ahead(start, tiles, devices):
        rows.add_found(row, found[0])
        columns.add_found(column, found[1])
        bar.update()


def _run_ahead(
    start: Callable[..., list[Any]], jobs: Iterable[tuple], devices: Sequence[Any]
) -> Iterator[tuple[tuple, list[Any]]]:
    """Run `AHEAD` jobs per device: one runs while others wait. Yield arguments and results."""
    import ray

    waiting = deque(jobs)
    free = deque(AHEAD * [*devices])
    running: dict[Any, tuple[tuple, Any, list[Any]]] = {}
    while waiting or running:
        while waiting and free:
            job = waiting.popleft()
            device = free.popleft()
            found = start(*job, device)
            running[found[0]] = job, device, found
        (ended,), _ = ray.wait([*running], fetch_local=False)
        job, device, found = running.pop(ended)
        free.append(device)
        yield job, found


def _diagonals(rows: Sequence[int], columns: Sequence[int]) -> list[tuple[int, int]]:
    """Order the tiles along diagonals, so that neighbouring tasks share no row and do not wait.

    >>> _diagonals([0, 5], [0, 5, 9])
    [(0, 0), (5, 5), (0, 5), (5, 9), (0, 9), (5, 0)]
    """
    longest = max(len(rows), len(columns))
    pairs = []
    for offset in range(longest):
        for number, row in enumerate(rows):
            column = (number + offset) % longest
            if column < len(columns):
                pairs.append((row, columns[column]))
    return pairs


def _search_tile(
    k: int,
    index: str | None,
    starts: tuple[int, int],
    queries: np.ndarray,
    keys: np.ndarray,
    query_index: np.ndarray | None,
    key_index: np.ndarray | None,
    count: int,
    *pieces: Found,
) -> tuple[Found, Found]:
    """Search source rows (queries) in target rows (keys), and merge with what other tiles found.

    Returns scores and indices of the queries' k best keys (n, k), and of the keys' queries (m, k).
    """
    best = _merge([_nothing_found(len(queries), k), *pieces[:count]], k)
    keys_best = _merge([_nothing_found(len(keys), k), *pieces[count:]], k)
    most = min(k, len(queries), len(keys))
    if index is None:
        # Neighbours that are not better than the k-th best so far need no computing. One of an
        # equal score may come first, so the bound is one step lower.
        bounds = [np.nextafter(scores[:, -1], -np.inf) for scores, _ in (best, keys_best)]
        found = mutual_neighbours(queries, keys, most, above=(bounds[0], bounds[1]))
    else:
        found = approximate_neighbours(queries, keys, most, index, built=(query_index, key_index))
    forward = found.forward_scores, starts[0] + found.forward_indices
    backward = found.backward_scores, starts[1] + found.backward_indices
    return _merge([best, forward], k), _merge([keys_best, backward], k)


def _nothing_found(rows: int, k: int) -> Found:
    """Return the scores -inf and the indices -1, (rows, k), which stand for no neighbours."""
    return np.full((rows, k), -np.inf, np.float32), np.full((rows, k), -1)


def _merge(pieces: Sequence[Found], k: int) -> Found:
    """Merge neighbours that tiles found for the same rows. Ties go to the lowest index."""
    scores = np.concatenate([piece[0] for piece in pieces], 1)
    indices = np.concatenate([piece[1] for piece in pieces], 1)
    order = np.lexsort((indices, -scores))[:, :k]
    return np.take_along_axis(scores, order, 1), np.take_along_axis(indices, order, 1)
