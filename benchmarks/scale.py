"""Time search, encoding and preparation on a Ray cluster of one and two nodes, and in one process.

    python -m benchmarks.scale --rows 50000 --model ENCODER --lines 2000000
    python -m benchmarks.scale --memory --rows 1e6 4e6

Each measurement has a process of its own. The table also says whether the results of all places are
the same.

`--memory` measures the memory of a mining command's process instead, without files. The results of
encoding and search are made up, because other processes would compute them.
"""

import argparse
import hashlib
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.prepare import make_text
from benchmarks.timing import in_own_process, peak_anonymous
from dap_transformers.commands import prepare as prepare_data
from dap_transformers.commands.encoder_arguments import EncoderArguments
from dap_transformers.disk_arrays import concatenate_on_disk, row_blocks, temporary_folder
from dap_transformers.mining.distinct import DistinctSentences
from dap_transformers.mining.margin import candidate_pairs, select
from dap_transformers.mining.texts import MiningTask, TextSide, write_pairs
from dap_transformers.ray.connection import ClusterArguments
from dap_transformers.ray.encoder import load_on
from dap_transformers.ray.search import TILES, cluster_neighbours
from dap_transformers.reports.records import machine
from dap_transformers.reports.rendering import text_table
from dap_transformers.search.exact import Neighbours, mutual_neighbours

#: Where a job runs. Name of a place -> nodes of its cluster (0: no cluster) and threads.
PLACES = {
    "one process": (0, 1),
    "one process, two threads": (0, 2),
    "one node": (1, 1),
    "two nodes": (2, 1),
}
#: Lines of the text that starts the workers of a preparation.
FEW_LINES = 1600
#: Bytes of a node's object store. Ray's test cluster has 150 MiB, and writes the rest to disk.
STORE = 2**31
# Workers get the priority of the process that they compete with, and waiting threads do not spin.
os.environ |= {"RAY_worker_niceness": "0", "GOMP_SPINCOUNT": "1000"}

#: Does a job and returns its results. False does a small part of it, so that the workers start.
Job = Callable[[bool], list[np.ndarray]]
#: Seconds and digest of each run, by place.
Runs = dict[str, list[tuple[float, str]]]


def search(rows: int, args: argparse.Namespace, cluster: ClusterArguments) -> Job:
    """Draw random vectors, and return the job of searching their nearest neighbours.

    Args:
        rows: vectors per side.
        args: the command line, which has the number of dimensions.
        cluster: says whether to search on a cluster.

    Returns:
        A function that does the job and returns the arrays of results. It searches all vectors if
        its argument is True, and few of them if it is False, to start the workers.
    """
    generator = np.random.default_rng(0)
    source = generator.standard_normal((rows, args.dimensions), np.float32)
    target = generator.standard_normal((rows, args.dimensions), np.float32)
    find = cluster_neighbours if cluster.ray else mutual_neighbours

    def work(whole: bool) -> list[np.ndarray]:
        count = rows if whole else 2 * TILES["CPU"]  # four tiles, so that each node gets one
        found = find(source[:count], target[:count])
        return list(vars(found).values())

    return work


def encoding(count: int, args: argparse.Namespace, cluster: ClusterArguments) -> Job:
    """Load the encoder, and return the job of encoding random sentences of 12 numbers.

    Args:
        count: number of sentences.
        args: the command line, which names the encoder.
        cluster: says whether to encode on a cluster.

    Returns:
        A function that does the job and returns a list with the vectors. It encodes all sentences
        if its argument is True, and 64 of them if it is False, to start the workers.
    """
    generator = np.random.default_rng(0)
    encoder = load_on(cluster, EncoderArguments(args.model, pooling="mean"))
    sentences = []
    for _ in range(count):
        numbers = generator.integers(0, 9999, 12)
        sentences.append(" ".join(map(str, numbers)))
    return lambda whole: [encoder.encode(sentences if whole else sentences[:64])]


def preparation(lines: int, args: argparse.Namespace, cluster: ClusterArguments) -> Job:
    """Return the job of preparing a made-up text with `prepare-data`.

    Args:
        lines: lines of the text, which must be there already (`text_folder`).
        args: the command line.
        cluster: says whether to prepare on a cluster.

    Returns:
        A function that does the job and returns the bytes of each written file. If its argument is
        False, it prepares a text of `FEW_LINES` instead, to start the workers.
    """

    def work(whole: bool) -> list[np.ndarray]:
        text = text_folder(args, lines if whole else FEW_LINES)
        out = Path(tempfile.mkdtemp(dir=args.folder))
        command = ["--data", str(text), "--output_dir", str(out)]
        if cluster.ray:
            command += ["--ray", cluster.ray]
        prepare_data.run(command)
        return [np.fromfile(path, np.uint8) for path in sorted(out.glob("*/*.parquet"))]

    return work


def text_folder(args: argparse.Namespace, lines: int) -> Path:
    """Return the folder of the made-up text with this number of lines."""
    return Path(args.folder, f"{lines}-lines")


JOBS = {"search": search, "encoding": encoding, "preparation": preparation}


def measure(name: str, size: int, nodes: int, args: argparse.Namespace) -> tuple[float, str]:
    """Time a job on a new cluster, or in this process.

    Args:
        name: key of `JOBS`.
        size: rows, sentences or lines of the job.
        nodes: nodes of the cluster. 0 means this process.
        args: the command line.

    Returns:
        Wall-clock seconds, and a hash of the results. Starting and warming up do not count.
    """
    address = start_cluster(nodes) if nodes else None
    cluster = ClusterArguments(address)
    with cluster.connect():
        work = JOBS[name](size, args, cluster)
        work(False)
        started = time.perf_counter()
        results = work(True)
        seconds = time.perf_counter() - started
    digest = hashlib.sha256()
    for array in results:
        digest.update(np.ascontiguousarray(array).data)
    return seconds, digest.hexdigest()


def start_cluster(nodes: int) -> str:
    """Start a Ray cluster on this machine, whose nodes have one core each, and return its address.

    Args:
        nodes: number of nodes, at least 1.
    """
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": STORE}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(**node)
    return cluster.address


def timed_table(args: argparse.Namespace) -> str:
    """Time all jobs in all `PLACES`, and return a text table of the fastest runs.

    Args:
        args: the command line. Encoding is only timed with `--model`, and preparation only with
            `--lines`, whose text is written into `args.folder` first.
    """
    jobs = [("search", rows) for rows in args.rows]
    if args.model:
        jobs.append(("encoding", args.sentences))
    if args.lines:
        jobs.append(("preparation", args.lines))
        for lines in (args.lines, FEW_LINES):
            make_text(text_folder(args, lines), lines)

    # Places take turns, so that a slow minute of the machine does not hit one of them only.
    runs: dict[tuple[str, int], Runs] = {}
    for job in jobs:
        runs[job] = {place: [] for place in PLACES}
    for _ in range(args.repeats):
        for job in jobs:
            for place, (nodes, threads) in PLACES.items():
                os.environ["OMP_NUM_THREADS"] = str(threads)
                os.environ["POLARS_MAX_THREADS"] = str(threads)
                runs[job][place].append(in_own_process(measure, *job, nodes, args))

    rows = []
    for (name, size), by_place in runs.items():
        rows += job_rows(f"{name}, {size:,}", by_place)
    return text_table(["", "", "seconds", "times one process", "results"], rows)


def job_rows(name: str, runs: Runs) -> list[list]:
    """Return the rows of the table for one job, one row per place.

    Args:
        name: what the table calls the job.
        runs: place -> seconds and hash of the results, for each run.

    Returns:
        Cells of each row: name, place, seconds of the fastest run, how many times as fast as one
        process, and whether the results are "same" or "DIFFERENT". The last cell is empty for a
        place with several threads.
    """
    # Several threads may add numbers in another order, so their results are not compared.
    compared = [place for place, (_, threads) in PLACES.items() if threads == 1]
    digests = set()
    for place in compared:
        digests |= {digest for _, digest in runs[place]}
    verdict = "same" if len(digests) == 1 else "DIFFERENT"

    seconds = {place: min(each)[0] for place, each in runs.items()}
    rows = []
    for place, fastest in seconds.items():
        speed = f"{seconds['one process'] / fastest:.2f}"
        rows.append([name, place, fastest, speed, verdict if place in compared else ""])
    return rows


def mining_memory(count: int, args: argparse.Namespace) -> int:
    """Measure the memory of a mining command's process, with made-up vectors and neighbours.

    Args:
        count: sentences of each of the two texts.
        args: the command line. Files are written into its `folder`.

    Returns:
        Peak in bytes above the memory before, without memory-mapped files.
    """
    generator = np.random.default_rng(0)
    slices = list(row_blocks(count))
    with peak_anonymous() as peak, temporary_folder(args.folder):
        sides, scores, indices = [], [], []
        for name in ("source", "target"):
            sentences = (f"{name} {row}" for row in range(count))
            sides.append(TextSide(Path(name), DistinctSentences(sentences)))
            made = (random_scores(generator, part.stop - part.start) for part in slices)
            scores.append(concatenate_on_disk(made))
            drawn = (generator.integers(0, count, (part.stop - part.start, 4)) for part in slices)
            indices.append(concatenate_on_disk(drawn))
        neighbours = Neighbours(scores[0], indices[0], scores[1], indices[1])
        mined = candidate_pairs(neighbours)
        task = MiningTask(*sides)
        pairs = select(task.first_lines(mined), 1)
        write_pairs(pairs, task, Path(args.folder, "pairs.tsv"))
    return peak["bytes"]


def random_scores(generator: np.random.Generator, rows: int) -> np.ndarray:
    """Return made-up cosines of 4 neighbours per row, (rows, 4) float32, highest first."""
    return np.sort(generator.random((rows, 4), np.float32))[:, ::-1]


def main() -> None:
    """Measure times on clusters and print a table. With `--memory`, measure memory instead."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--rows", type=float, nargs="*", default=[50000], help="sentences per side")
    parser.add_argument("--dimensions", type=int, default=384)
    parser.add_argument("--model", help="encoder to measure; default: do not measure encoding")
    parser.add_argument("--sentences", type=int, default=4096, help="sentences to encode")
    parser.add_argument("--lines", type=int, default=0, help="lines of made-up text to prepare")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    args.rows = [int(rows) for rows in args.rows]
    with tempfile.TemporaryDirectory() as args.folder:
        if not args.memory:
            print(f"{machine()}\n{timed_table(args)}")
            return
        sizes = []
        for rows in args.rows:
            used = in_own_process(mining_memory, rows, args)
            sizes.append([f"{rows:,}", f"{used / 1e6:.0f}"])
        print(text_table(["sentences per side", "MB"], sizes))


if __name__ == "__main__":
    main()
