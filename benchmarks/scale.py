"""Search, encoding and preparation on a Ray cluster of two nodes of one core, beside one process; and plans.

    python -m benchmarks.scale --model ENCODER --lines 2000000
    python -m benchmarks.scale --memory --rows 1e6 4e6
    python -m benchmarks.scale --plan --rows 1e6 1e8 1e9 --nodes 1 8 64 --product 4e14 --encode 20000 --bandwidth 1e9

Each measured case has a process of its own and gives a digest of its result, which must be the same for as many
threads. Memory is that of the command's process, files aside, for all that it does with two texts of that many
sentences but encoding and search, whose results are made up. A plan's hours are those of `dap.search.SearchPlan`, at
the rates given, and of encoding, which the command's node has to receive.
"""

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np

import prepare_data
from benchmarks.prepare import make_text
from benchmarks.timing import in_own_process, peak_anonymous
from dap.encoding import EncoderArguments
from dap.mining import DistinctSentences, Side, Texts, mine, select, write_pairs
from dap.ray.connection import ClusterArguments, duration
from dap.ray.ray_encoder import load_on
from dap.ray.ray_search import cluster_neighbours
from dap.ray.search_plan import TILES, SearchPlan
from dap.reports import machine, text_table
from dap.scratch import on_disk, parts
from dap.search import Neighbours, mutual_neighbours

#: Nodes of a cluster, or none, and threads.
PLACES = {
    "one process": (0, 1),
    "one process, two threads": (0, 2),
    "one node": (1, 1),
    "two nodes": (2, 1),
}
#: Bytes of a node's object store. A cluster made for tests has 150 MiB, and what has no room there goes to the disk.
STORE = 2**31
# Workers are as urgent as the process that they are beside, and threads that wait do not spin.
os.environ |= {"RAY_worker_niceness": "0", "GOMP_SPINCOUNT": "1000"}

Work = Callable[
    [bool], list[np.ndarray]
]  # the whole, or so little of it that the workers have started


def search(rows: int, args: argparse.Namespace, cluster: ClusterArguments) -> Work:
    generator = np.random.default_rng(0)
    sides = [generator.standard_normal((rows, args.dimensions), np.float32) for _ in range(2)]
    find = cluster_neighbours if cluster.ray else mutual_neighbours
    few = 2 * TILES["CPU"]  # four tiles, so that each node has one
    return lambda whole: list(
        vars(find(*(side if whole else side[:few] for side in sides))).values()
    )


def encoding(count: int, args: argparse.Namespace, cluster: ClusterArguments) -> Work:
    generator = np.random.default_rng(0)
    encoder = load_on(cluster, EncoderArguments(args.model, pooling="mean"))
    words = [" ".join(map(str, generator.integers(0, 9999, 12))) for _ in range(count)]
    return lambda whole: [encoder.encode(words if whole else words[:64])]


def preparation(lines: int, args: argparse.Namespace, cluster: ClusterArguments) -> Work:
    def work(whole: bool) -> list[np.ndarray]:
        text, out = (
            Path(args.folder, "all" if whole else "few"),
            Path(tempfile.mkdtemp(dir=args.folder)),
        )
        command = ["--data", str(text), "--output_dir", str(out)]
        prepare_data.run(command + (["--ray", cluster.ray] if cluster.ray else []))
        return [np.fromfile(path, np.uint8) for path in sorted(out.glob("*/*.parquet"))]

    return work


def measure(job: str, size: int, nodes: int, args: argparse.Namespace) -> tuple[float, str]:
    """Seconds of a job, on a cluster with this number of nodes or, with none, in this process; and its digest."""
    if nodes:
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 1, "object_store_memory": STORE}
        cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
        for _ in range(nodes - 1):
            cluster.add_node(**node)
    arguments = ClusterArguments(cluster.address if nodes else None)
    with arguments.connect():
        work = {"search": search, "encoding": encoding, "preparation": preparation}[job](
            size, args, arguments
        )
        work(False)
        started = time.perf_counter()
        result = work(True)
        seconds = time.perf_counter() - started
    return seconds, hashlib.sha256(
        b"".join(np.ascontiguousarray(each).data for each in result)
    ).hexdigest()


def measured(args: argparse.Namespace) -> str:
    """The table of all jobs in all places, `args.repeats` rounds in turn: the fastest counts."""
    jobs = [("search", rows) for rows in args.rows] + [("encoding", args.sentences)] * bool(
        args.model
    )
    jobs += [("preparation", args.lines)] * bool(args.lines)
    if args.lines:
        make_text(Path(args.folder, "all"), args.lines)
        make_text(Path(args.folder, "few"), 1600)
    found: dict[tuple[str, int], dict[str, list[tuple[float, str]]]] = {
        job: {name: [] for name in PLACES} for job in jobs
    }
    for _, job, (place, (nodes, threads)) in product(range(args.repeats), jobs, PLACES.items()):
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "POLARS_MAX_THREADS"), str(threads))
        found[job][place].append(in_own_process(measure, *job, nodes, args))
    rows = []
    for (job, size), places in found.items():
        alike = [
            place for place, (_, threads) in PLACES.items() if threads == 1
        ]  # others may add in another order
        same = (
            "same"
            if len({digest for place in alike for _, digest in places[place]}) == 1
            else "DIFFERENT"
        )
        fastest = {place: min(runs)[0] for place, runs in places.items()}
        for place, seconds in fastest.items():
            speed = f"{fastest['one process'] / seconds:.2f}"
            rows.append([f"{job}, {size:,}", place, seconds, speed, same if place in alike else ""])
    return text_table(["", "", "seconds", "times one process", "results"], rows)


def bookkeeping(count: int, args: argparse.Namespace) -> int:
    """The most bytes in memory while two texts are read, mined and written."""
    generator, written = np.random.default_rng(0), Path(args.folder, "pairs.tsv")
    with peak_anonymous() as peak:
        sides = [
            Side(
                Path(name),
                DistinctSentences((f"{name} {row}" for row in range(count)), args.folder),
            )
            for name in ("source", "target")
        ]
        scores, rows = (
            [
                on_disk((make(part.stop - part.start) for part in parts(count)), args.folder)
                for _ in sides
            ]
            for make in (
                lambda size: np.sort(generator.random((size, 4), np.float32))[:, ::-1],
                lambda size: generator.integers(0, count, (size, 4)),
            )
        )
        found = mine(Neighbours(scores[0], rows[0], scores[1], rows[1]), folder=args.folder)
        texts = Texts(*sides, folder=args.folder)
        write_pairs(select(texts.first_lines(found), 1, folder=args.folder), texts, written)
    return peak["bytes"]


def planned(args: argparse.Namespace) -> str:
    """What mining N sentences with N takes, by N and number of nodes."""
    rows = []
    for size, nodes in product(args.rows, args.nodes):
        kind = "CPU" if args.index else args.kind
        plan = SearchPlan(
            size, size, args.dimensions, kind, nodes * args.each, nodes, args.store, args.index
        )
        encoding = (
            2 * size * max(1 / args.encode / nodes, args.dimensions * 4 / args.bandwidth)
        )  # made, and received
        parts = plan.seconds(args.product, args.overhead, args.merge, args.bandwidth)
        seconds = (
            encoding,
            parts["products"],
            parts["merging"],
            parts["moving"],
            encoding + parts["search"],
        )
        cost = f"{nodes * seconds[-1] / 3600 * args.price:,.2f}"
        rows.append([f"{size:.0e}", str(nodes), f"{plan.tasks:,}", *map(duration, seconds), cost])
    header = [
        "sentences a side",
        "nodes",
        "tasks",
        "encoding",
        "products",
        "merging",
        "moving",
        "in all",
        "money",
    ]
    return text_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--plan", action="store_true", help="say what it would take, measure nothing"
    )
    parser.add_argument("--memory", action="store_true", help="of the command's process alone")
    parser.add_argument("--rows", type=float, nargs="*", default=[50000], help="sentences a side")
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--model", help="encoder to measure, if any")
    parser.add_argument(
        "--sentences",
        type=int,
        default=4096,
        help="of 12 made-up words, to encode; 1,024 at a time",
    )
    parser.add_argument("--lines", type=int, default=0, help="of made-up text, to prepare")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 8, 64], help="of the plan")
    parser.add_argument(
        "--kind", choices=list(TILES), default="GPU", help="what searches; an --index is for CPUs"
    )
    parser.add_argument("--each", type=int, default=1, help="CPUs or GPUs of a node")
    parser.add_argument(
        "--index", help="plan an approximate search, such as IVF1024,Flat:nprobe=64"
    )
    parser.add_argument(
        "--product", type=float, default=7e10, help="FLOP/s of a CPU's or GPU's products"
    )
    parser.add_argument(
        "--overhead", type=float, default=0.05, help="seconds of a task beside its products"
    )
    parser.add_argument("--encode", type=float, default=100, help="sentences a second of a node")
    parser.add_argument(
        "--merge", type=float, help="rows of found neighbours that a task merges a second"
    )
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes a second of a node")
    parser.add_argument("--store", type=float, default=2e11, help="bytes of a node's object store")
    parser.add_argument("--price", type=float, default=1.0, help="of a node's hour")
    args = parser.parse_args()
    args.rows = [int(each) for each in args.rows]
    with tempfile.TemporaryDirectory() as args.folder:
        if args.memory:
            sizes = [
                [f"{rows:,}", f"{in_own_process(bookkeeping, rows, args) / 1e6:.0f}"]
                for rows in args.rows
            ]
            print(text_table(["sentences a side", "MB"], sizes))
        else:
            print(planned(args) if args.plan else f"{machine()}\n{measured(args)}")


if __name__ == "__main__":
    main()
