"""What a search by the tasks of a cluster takes: tiles, operations, bytes and seconds, from sizes and rates alone."""

import math
import re
from dataclasses import dataclass

from dap.search.approximate import ROWS_A_CLUSTER
from dap.search.similarity import BLOCKS

#: Rows of each side in a task, at most.
TILES = {"CPU": 16384, "GPU": 131072}
WIDEST = 8  # times as many where the sides are long: the wider, the less is merged
TASKS = 16  # for each CPU or GPU, at least, where tiles are wider
#: Tiles' source rows of a band, whose vectors are in the object store at the same time.
BAND = 16
NEIGHBOUR = 12  # bytes of a score and an index
#: Rows of found neighbours that a task merges a second; of a GPU assumed.
MERGED = {"CPU": 2.5e6, "GPU": 5e7}
ROUNDS = 10  # of faiss when it trains an index


@dataclass(frozen=True)
class SearchPlan:
    """A search of `rows` × `columns` vectors, a task a tile.

    Approximate searches are for CPUs, and their tiles as for one: what they find depends on the tile.

    Attributes:
        kind: "CPU" or "GPU", of which a task takes one.
        count: how many of them there are.
        nodes: that have them, in equal parts.
        store: bytes of a node's object store.
        index: of faiss; one without lists (IVF) is planned as if it compared all.
        k: neighbours.
    """

    rows: int
    columns: int
    dimensions: int
    kind: str
    count: int
    nodes: int = 1
    store: float = math.inf
    index: str | None = None
    k: int = 4

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a task, alike in all tasks.

        >>> [SearchPlan(size, size, 768, "GPU", 8).tile for size in (10**6, 10**8)]
        [(125000, 125000), (1041667, 1041667)]
        """
        few = math.isqrt(
            self.rows * self.columns // (TASKS * (self.count if self.index is None else 1))
        )
        most = min(max(few, TILES[self.kind]), WIDEST * TILES[self.kind])
        height, width = (-(-side // -(-side // most)) for side in (self.rows, self.columns))
        return height, width

    @property
    def strips(self) -> tuple[int, int]:
        """Tiles one below the other, and beside each other."""
        height, width = self.tile
        return -(-self.rows // height), -(-self.columns // width)

    @property
    def tasks(self) -> int:
        return math.prod(self.strips)

    @property
    def flops(self) -> float:
        """Operations of all products: of every pair, or with an index of lists and of the pairs in those visited."""
        pairs = self.rows * self.columns
        if self.index is None:
            return 2 * pairs * self.dimensions
        lists, probes = visited(self.index)
        (down, across), (height, width) = self.strips, self.tile
        training = sum(
            n * ROUNDS * min(ROWS_A_CLUSTER * lists, size)
            for n, size in ((down, height), (across, width))
        )
        with_lists = lists * (
            self.rows * (across + 1) + self.columns * (down + 1) + training
        )  # 1: when it is added
        return 2 * self.dimensions * (with_lists + 2 * pairs * probes / lists)

    @property
    def memory(self) -> int:
        """Bytes of a task, about: vectors, with an index what came and what is searched, neighbours, and blocks."""
        copies = 1 if self.index is None else 3
        blocks = 3 * 4 * math.prod(BLOCKS["cuda" if self.kind == "GPU" else "cpu"])
        return sum(self.tile) * (copies * self.dimensions * 4 + 2 * self.k * NEIGHBOUR) + blocks

    @property
    def moved(self) -> float:
        """Bytes through the busiest node, the command's: all vectors, and once a band what is found, there and back.

        Where a node's store cannot hold the target, each of its tasks has to fetch its columns.
        """
        row = self.dimensions * 4 * (1 if self.index is None else 2)
        columns = (
            self.columns
            if self.columns * row <= self.store
            else self.tasks / self.nodes * self.tile[1]
        )
        bands = -(-self.strips[0] // BAND)
        return (self.rows + columns) * row + (
            self.rows + (2 * bands - 1) * self.columns
        ) * self.k * NEIGHBOUR

    def seconds(
        self,
        product: float,
        overhead: float = 0.05,
        merge: float | None = None,
        bandwidth: float = 1e9,
    ) -> dict[str, float]:
        """Seconds of products, merging and moving, and of the whole; vectors move while others are compared.

        Args:
            product: FLOP/s of a CPU or GPU.
            overhead: seconds that a task takes beside its products, which count among these.
            merge: rows of found neighbours that a task merges a second; None for those of `MERGED`.
            bandwidth: bytes a second of a node.
        """
        products = (self.flops / product + self.tasks * overhead) / self.count
        merging = self.tasks * sum(self.tile) / (merge or MERGED[self.kind]) / self.count
        moving = self.moved / bandwidth
        whole = max(products + merging, moving)
        return {"products": products, "merging": merging, "moving": moving, "search": whole}


def visited(index: str) -> tuple[int, int]:
    """Lists of a faiss index and how many of them a search visits; 1 and 1 of one without lists.

    >>> visited("IVF1024,Flat:nprobe=32"), visited("IVF4096,PQ64"), visited("HNSW32")
    ((1024, 32), (4096, 64), (1, 1))
    """
    lists, probes = (re.search(pattern, index) for pattern in (r"IVF(\d+)", r"nprobe=(\d+)"))
    count = int(lists[1]) if lists else 1
    return count, int(probes[1]) if probes else max(1, round(count**0.5))
