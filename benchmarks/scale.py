"""Search and encoding on a Ray cluster of two nodes of one core, beside one process with one thread; and plans.

    python -m benchmarks.scale --model ENCODER --rows 50000 --sentences 4000
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
import time
from pathlib import Path

import numpy as np

from dap.cluster import ClusterArguments
from dap.encoding import EncoderArguments, load_on
from dap.reports import machine, text_table
from dap.search import TILES, cluster_neighbours, mutual_neighbours

PLACES = {"one process": 0, "one node": 1, "two nodes": 2}


def measure(job: str, nodes: int, args: argparse.Namespace, file: str) -> None:
    """Seconds of a job, on a cluster with this number of nodes or, with none, in this process; and its digest."""
    if nodes:
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        for _ in range(nodes - 1):
            cluster.add_node(num_cpus=1)
    arguments = ClusterArguments(cluster.address if nodes else None)
    generator = np.random.default_rng(0)
    with arguments.connect():
        if job == "search":
            sides = [generator.standard_normal((args.rows[0], args.dimensions), np.float32) for _ in range(2)]
            search = cluster_neighbours if nodes else mutual_neighbours
            search(*(side[: TILES["CPU"]] for side in sides))  # the workers have started
            started = time.perf_counter()
            found = search(*sides)
            result = [found.forward_scores, found.forward_indices, found.backward_scores, found.backward_indices]
        else:
            encoder = load_on(arguments, EncoderArguments(args.model, pooling="mean"))
            words = [" ".join(map(str, generator.integers(0, 9999, 12))) for _ in range(args.sentences)]
            encoder.encode(words[:64])
            started = time.perf_counter()
            result = [encoder.encode(words)]
        seconds = time.perf_counter() - started
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(each).data for each in result)).hexdigest()[:12]
    Path(file).write_text(json.dumps([seconds, digest]))


def measured(args: argparse.Namespace) -> str:
    """The table of all jobs in all places, `args.repeats` rounds in turn: the fastest counts."""
    jobs = ["search"] * bool(args.rows) + ["encoding"] * bool(args.model)
    found: dict[tuple[str, str], list[float]] = {}
    digests: dict[str, set[str]] = {job: set() for job in jobs}
    for _ in range(args.repeats):
        for job in jobs:
            for place, nodes in PLACES.items():
                file = f"{args.file}.{os.getpid()}"
                process = multiprocessing.get_context("spawn").Process(target=measure, args=(job, nodes, args, file))
                process.start()
                process.join()
                if process.exitcode:
                    raise SystemExit(f"{job} on {place} ended with {process.exitcode}")
                seconds, digest = json.loads(Path(file).read_text())
                Path(file).unlink()
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
        tasks = (-(-size // args.tile)) ** 2
        for nodes in args.nodes:
            encoding = 2 * size / args.encode / nodes
            products = 2 * size**2 * args.dimensions / args.product / nodes
            moving = 2 * size * args.dimensions * 4 / args.bandwidth  # to each node at the same time
            merging = 2 * tasks * args.tile / args.merge
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
    parser.add_argument("--sentences", type=int, default=4000, help="of 12 made-up words, to encode")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--file", default="scale", help="where the processes leave their numbers for a moment")
    parser.add_argument("--nodes", type=int, nargs="*", default=[1, 8, 64], help="of the plan")
    parser.add_argument("--product", type=float, default=7e10, help="FLOP/s of a node's products")
    parser.add_argument("--encode", type=float, default=100, help="sentences a second of a node")
    parser.add_argument("--tile", type=int, default=TILES["GPU"], help="sentences a side of a task")
    parser.add_argument("--merge", type=float, default=5e6, help="rows of found neighbours merged a second")
    parser.add_argument("--bandwidth", type=float, default=1e9, help="bytes a second of a node")
    parser.add_argument("--price", type=float, default=1.0, help="of a node's hour")
    args = parser.parse_args()
    args.rows = [int(each) for each in args.rows]
    print(planned(args) if args.plan else f"{machine()}\n{measured(args)}")


if __name__ == "__main__":
    main()
