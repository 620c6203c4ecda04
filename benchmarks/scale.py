"""Search, encoding and preparation on a Ray cluster of two nodes of one core, beside one process; and plans.

    OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 python -m benchmarks.scale --model ENCODER --lines 2000000
    python -m benchmarks.scale --plan --rows 1e6 1e8 1e9 --nodes 1 8 64 --product 4e14 --encode 20000 --bandwidth 1e9

Each measured case has a process of its own and gives a digest of its result, which must be the same. A plan's hours
are those of the encoding, of the products, of every tile's way to every node, and of the merging in the command's
process, at the rates given. The last two go on beside the products.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import prepare_data
from benchmarks.prepare import make_text
from dap.cluster import ClusterArguments
from dap.encoding import EncoderArguments, load_on
from dap.reports import machine, text_table
from dap.search import TILES, cluster_neighbours, mutual_neighbours, tile_rows

PLACES = {"one process": 0, "one node": 1, "two nodes": 2}
os.environ |= {"RAY_worker_niceness": "0"}  # the workers are as urgent as the process that they are beside

Work = Callable[[bool], list[np.ndarray]]  # the whole, or so little of it that the workers have started


def search(args: argparse.Namespace, cluster: ClusterArguments) -> Work:
    generator = np.random.default_rng(0)
    sides = [generator.standard_normal((args.rows[0], args.dimensions), np.float32) for _ in range(2)]
    find = cluster_neighbours if cluster.ray else mutual_neighbours
    few = 2 * TILES["CPU"]  # four tiles, so that each node has one
    return lambda whole: list(vars(find(*(side if whole else side[:few] for side in sides))).values())


def encoding(args: argparse.Namespace, cluster: ClusterArguments) -> Work:
    generator = np.random.default_rng(0)
    encoder = load_on(cluster, EncoderArguments(args.model, pooling="mean"))
    words = [" ".join(map(str, generator.integers(0, 9999, 12))) for _ in range(args.sentences)]
    return lambda whole: [encoder.encode(words if whole else words[:64])]


def preparation(args: argparse.Namespace, cluster: ClusterArguments) -> Work:
    def work(whole: bool) -> list[np.ndarray]:
        text, out = Path(args.folder, "all" if whole else "few"), Path(tempfile.mkdtemp(dir=args.folder))
        command = ["--data", str(text), "--output_dir", str(out)]
        prepare_data.run(command + (["--ray", cluster.ray] if cluster.ray else []))
        return [np.fromfile(path, np.uint8) for path in sorted(out.glob("*/*.parquet"))]

    return work


def measure(job: str, nodes: int, args: argparse.Namespace, file: Path) -> None:
    """Seconds of a job, on a cluster with this number of nodes or, with none, in this process; and its digest."""
    if nodes:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
    arguments = ClusterArguments(cluster.address if nodes else None)
    with arguments.connect():
        work = {"search": search, "encoding": encoding, "preparation": preparation}[job](args, arguments)
        work(False)
        started = time.perf_counter()
        result = work(True)
        seconds = time.perf_counter() - started
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(each).data for each in result)).hexdigest()[:12]
    file.write_text(json.dumps([seconds, digest]))


def measured(args: argparse.Namespace) -> str:
    """The table of all jobs in all places, `args.repeats` rounds in turn: the fastest counts."""
    jobs = ["search"] * bool(args.rows) + ["encoding"] * bool(args.model) + ["preparation"] * bool(args.lines)
    found: dict[tuple[str, str], list[float]] = {}
    digests: dict[str, set[str]] = {job: set() for job in jobs}
    if args.lines:
        make_text(Path(args.folder, "all"), args.lines)
        make_text(Path(args.folder, "few"), 1600)
    for _ in range(args.repeats):
        for job in jobs:
            for place, nodes in PLACES.items():
                file = Path(args.folder, "measured")
                process = multiprocessing.get_context("spawn").Process(target=measure, args=(job, nodes, args, file))
                process.start()
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{job} on {place} ended with {process.exitcode}")
                seconds, digest = json.loads(file.read_text())
                found.setdefault((job, place), []).append(seconds)
                digests[job].add(digest)
    rows = []
    for (job, place), seconds in found.items():
        speed = min(found[job, "one process"]) / min(seconds)
        same = "same" if len(digests[job]) == 1 else "DIFFERENT"
        rows.append([job, place, f"{min(seconds):.1f}", f"{speed:.2f}", same])
    return text_table(["", "", "seconds", "times one process", "results"], rows)


def planned(args: argparse.Namespace) -> str:
    """What mining N sentences with N takes, by N and number of nodes."""
    rows = []
    for size in args.rows:
        for nodes in args.nodes:
            tile = tile_rows("GPU", nodes, size, size)
            tasks = (-(-size // tile)) ** 2
            encoding = 2 * size / args.encode / nodes
            products = 2 * size**2 * args.dimensions / args.product / nodes
            moving = 2 * size * args.dimensions * 4 / args.bandwidth  # to each node at the same time
            merging = 2 * tasks * tile / args.merge
            parts = encoding, products, moving, merging, encoding + max(products, moving, merging)
            hours = [part / 3600 for part in parts]
            cost = nodes * hours[-1] * args.price
            rows.append([f"{size:.0e}", str(nodes), f"{tasks:,}", *(f"{part:.3g}" for part in (*hours, cost))])
    header = ["sentences a side", "nodes", "tasks", "encoding, h", "products", "moving", "merging", "in all", "money"]
    return text_table(header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", action="store_true", help="say what it would take, measure nothing")
    parser.add_argument("--rows", type=float, nargs="*", default=[50000], help="sentences a side")
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--model", help="encoder to measure; none: search alone")
    parser.add_argument("--sentences", type=int, default=4096, help="of 12 made-up words, to encode; 1,024 at a time")
    parser.add_argument("--lines", type=int, default=0, help="of made-up text, to prepare")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 8, 64], help="of the plan")
    parser.add_argument("--product", type=float, default=7e10, help="FLOP/s of a node's products")
    parser.add_argument("--encode", type=float, default=100, help="sentences a second of a node")
    parser.add_argument("--merge", type=float, default=5e6, help="rows of found neighbours merged a second")
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes a second of a node")
    parser.add_argument("--price", type=float, default=1.0, help="of a node's hour")
    args = parser.parse_args()
    args.rows = [int(each) for each in args.rows]
    with tempfile.TemporaryDirectory() as args.folder:
        print(planned(args) if args.plan else f"{machine()}\n{measured(args)}")


if __name__ == "__main__":
    main()
