"""Speed of nearest neighbours in both directions: ours, faiss and sentence-transformers.

    python -m benchmarks.mining --rows 20000 50000 --repeats 3 --json mining.json
    python -m benchmarks.mining --rows 100000 --vectors xx.npy en.npy --model MODEL --data_dir
    corpus/

- Every measurement runs in its own process. The contenders take turns.
- "of sgemm" compares the speed with plain float32 matrix products (sgemm). The useful work is one
  product of all source rows with all target rows, whatever a contender computes. It is divided by
  the rate of a 4096³ product, measured in the same process before and after.
- "Gpairs / s" are the compared pairs of a source row and a target row, in 10⁹ per second. "GB / s"
  is what a product of all pairs would read and write once: both matrices and all similarities, in
  float32. It is the measure for a GPU, whose int8 products are far faster than its memory.
- Memory is the peak above the process's memory before it had the two matrices. Its unit is the size
  of the two matrices.
- faiss gets rows that are already normalised. On a CPU with AVX-512 it also gets kernels that its
  OpenBLAS does not choose by itself (`OPENBLAS_CORETYPE`).
- "float32 %" is the share of pairs in blocks where the int8 bound was of no use
  (`dap_transformers.search.screening`). "one by one %" is the share of pairs whose cosine was then
  computed one by one.
"""

import argparse
import logging
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import (
    WALL,
    in_own_process,
    in_turn,
    machine_parser,
    once,
    peak_memory,
    prepare_machine,
    save,
)
from dap_transformers.search.exact import mutual_neighbours
from dap_transformers.tables import text_table

K = 4  # neighbours of a row

#: Rows of the neighbours of both sides, (N, K) and (M, K).
Indices = tuple[np.ndarray, np.ndarray]
Search = Callable[[np.ndarray, np.ndarray], Indices]


def ours(source: np.ndarray, target: np.ndarray) -> Indices:
    """Search the K nearest neighbours by `mutual_neighbours`, in one pass for both directions.

    Args:
        source: (N, D) float32, rows of length 1.
        target: (M, D) float32, rows of length 1.

    Returns:
        Rows of the nearest targets of each source row, (N, K), and the reverse, (M, K).
    """
    found = mutual_neighbours(source, target, K)
    return found.forward_indices, found.backward_indices


def faiss_flat(source: np.ndarray, target: np.ndarray) -> Indices:
    """Search the K nearest neighbours by `faiss.IndexFlatIP`, once per direction.

    Args:
        source: (N, D) float32, rows of length 1.
        target: (M, D) float32, rows of length 1.

    Returns:
        Rows of the nearest targets of each source row, (N, K), and the reverse, (M, K).
    """
    import faiss

    def search(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        index = faiss.IndexFlatIP(keys.shape[1])
        index.add(keys)
        return index.search(queries, K)[1]

    return search(source, target), search(target, source)


def semantic_search(source: np.ndarray, target: np.ndarray) -> Indices:
    """Search the K nearest neighbours by sentence-transformers' `semantic_search`, per direction.

    Args:
        source: (N, D) float32, rows of length 1.
        target: (M, D) float32, rows of length 1.

    Returns:
        Rows of the nearest targets of each source row, (N, K), and the reverse, (M, K).
    """
    from sentence_transformers.util import semantic_search

    def search(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        rows = semantic_search(torch.from_numpy(queries), torch.from_numpy(keys), top_k=K)
        indices = []
        for row in rows:
            indices.append([hit["corpus_id"] for hit in row])
        return np.array(indices)

    return search(source, target), search(target, source)


CONTENDERS: dict[str, Search] = {
    "ours": ours,
    "faiss": faiss_flat,
    "sentence-transformers": semantic_search,
}


def sgemm_rate(device: str, size: int = 4096, repeats: int = 3) -> float:
    """Measure how fast this machine multiplies square float32 matrices, in GFLOP/s.

    Args:
        device: "cpu" or "cuda".
        size: rows of a matrix.
        repeats: number of products that are timed together.

    Returns:
        10⁹ floating-point operations per second.
    """
    matrix = torch.rand(size, size, device=device)
    out = torch.empty(size, size, device=device)
    torch.mm(matrix, matrix, out=out)  # the first product also loads libraries
    seconds = once(lambda: [torch.mm(matrix, matrix, out=out) for _ in range(repeats)], device)[
        WALL
    ]
    return repeats * 2 * size**3 / seconds / 1e9


def measure(contender: str, rows: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure one search in this process.

    Args:
        contender: key of `CONTENDERS`.
        rows: largest number of rows of each side.
        args: the command line.

    Returns:
        Name of a number -> number:

        - "seconds", "pairs_per_second", "bytes_per_second": time and rates of the search.
        - "sgemm": rate of plain matrix products, in GFLOP/s.
        - "share": rate of the search's useful work, as a share of "sgemm".
        - "memory": peak memory with the two matrices, divided by the size of the two matrices.
        - "found": share of rows whose best neighbour is the row with the same number.
        - "in_float32", "computed": for our search only, share of pairs in blocks that were
          multiplied in float32, and share of pairs that were computed one by one.
    """
    # load libraries and start threads
    search = CONTENDERS[contender]
    small = np.random.default_rng(1).standard_normal((500, args.dimensions), dtype=np.float32)
    search(small, small)

    sgemm_before = sgemm_rate(args.device)
    source, target = made_vectors(rows, args)
    with screening_counts() as counts, peak_memory("cpu") as peak:
        started = time.perf_counter()
        forward, backward = search(source, target)
        seconds = time.perf_counter() - started
    sgemm = (sgemm_before + sgemm_rate(args.device)) / 2

    own = np.arange(len(source))
    found_forward = float((forward[:, 0] == own).mean())
    found_backward = float((backward[:, 0] == own).mean())
    pairs = len(source) * len(target)
    useful_work = 2 * pairs * source.shape[1]  # FLOPs of one product
    numbers = {
        "seconds": seconds,
        "pairs_per_second": pairs / seconds,
        "bytes_per_second": (source.nbytes + target.nbytes + 4 * pairs) / seconds,
        "sgemm": sgemm,
        "share": useful_work / seconds / 1e9 / sgemm,
        "memory": 1 + peak["bytes"] / (source.nbytes + target.nbytes),
        "found": (found_forward + found_backward) / 2,
    }
    if counts:
        numbers["in_float32"] = counts["in_float32"] / counts["pairs"]
        numbers["computed"] = counts["computed"] / counts["pairs"]
    return numbers


def made_vectors(rows: int, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Read the vectors of `--vectors`, or draw random ones.

    Row i of both sides belong together: a random target is its source plus noise. Files must hold
    translations row by row.

    Args:
        rows: largest number of rows per side. A file with fewer rows gives fewer.
        args: the command line.

    Returns:
        Source and target, (rows, D) float32 each, with rows of length 1.
    """
    if args.vectors:
        source, target = (np.load(path)[:rows] for path in args.vectors)
    else:
        rng = np.random.default_rng(0)
        source = rng.standard_normal((rows, args.dimensions), dtype=np.float32)
        target = source + rng.standard_normal((rows, args.dimensions), dtype=np.float32)
    for side in (source, target):
        side /= np.linalg.norm(side, axis=1, keepdims=True)
    return source, target


@contextmanager
def screening_counts() -> Iterator[dict[str, int]]:
    """Collect the numbers that `mutual_neighbours` logs during a block.

    Yields:
        A dictionary that is filled during the block. "pairs" -> number of all pairs. "in_float32"
        -> pairs in blocks that were multiplied in float32. "computed" -> pairs whose cosine was
        computed one by one. It stays empty if the block runs another search only.
    """
    counts: dict[str, int] = {}
    handler = logging.Handler()
    handler.emit = lambda record: counts.update(record.args)
    log = logging.getLogger("dap_transformers.search.exact")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield counts
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)


def write_vectors(args: argparse.Namespace) -> None:
    """Encode random pairs of `--data_dir`, and write their vectors into the files of `--vectors`.

    The first file gets the vectors of the sources, the second those of the translations. No
    sentence of a side is used twice. There are at most as many pairs as the largest of `--rows`.
    """
    from dap_transformers.encoding.encoder import SentenceEncoder
    from dap_transformers.evaluation.retrieval import read_languages
    from dap_transformers.text.find import find_bitext

    pairs = []
    for rows in read_languages(find_bitext(args.data_dir)).values():
        pairs += rows
    random.Random(0).shuffle(pairs)
    for side in (0, 1):
        pairs = list({pair[side]: pair for pair in pairs}.values())
    pairs = pairs[: max(args.rows)]

    encoder = SentenceEncoder.from_pretrained(
        args.model, args.pooling, device=args.device, bf16=args.bf16
    )
    for side, path in enumerate(args.vectors):
        sentences = [pair[side] for pair in pairs]
        np.save(path, encoder.encode(sentences, progress=True))


def table(rows: int, found: dict[str, dict[str, Any]]) -> str:
    """Format the results of all contenders as a text table.

    Args:
        rows: rows of each side.
        found: contender -> medians of the numbers that `measure` returns.
    """
    reference = found.get("ours", next(iter(found.values())))
    lines = []
    for name, numbers in found.items():
        line = [
            name,
            numbers["seconds"],
            f"{numbers['pairs_per_second'] / 1e9:.3f}",
            f"{numbers['bytes_per_second'] / 1e9:.2f}",
            f"{100 * numbers['share']:.0f}%",
            f"{numbers['seconds'] / reference['seconds']:.2f}",
            f"{numbers['memory']:.2f}",
            f"{100 * numbers['found']:.1f}",
        ]
        for key in ("in_float32", "computed"):
            line.append(f"{100 * numbers[key]:.2f}" if key in numbers else "")
        lines.append(line)
    header = [
        "both directions",
        "seconds",
        "Gpairs / s",
        "GB / s",
        "of sgemm",
        "time / ours",
        "memory / matrices",
    ]
    header += ["found %", "float32 %", "one by one %"]
    return f"{rows} × {rows}\n{text_table(header, lines)}"


def main(argv: list[str] | None = None) -> None:
    """Measure all contenders, print a table per number of rows, and write all to `--json`.

    With `--model` the `--vectors` are written first.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = machine_parser(__doc__, repeats=3)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[20_000, 50_000], help="rows of each side"
    )
    parser.add_argument("--dimensions", type=int, default=768, help="dimensions of random vectors")
    parser.add_argument(
        "--vectors",
        nargs=2,
        default=[],
        help="two .npy files with a pair in each row (default: random vectors)",
    )
    parser.add_argument("--model", help="first make the --vectors with this encoder")
    parser.add_argument("--data_dir", nargs="+", help="parallel text for --model: files or folders")
    parser.add_argument(
        "--pooling", choices=("cls", "mean"), help="pooling of --model (default: its own)"
    )
    parser.add_argument("--bf16", action="store_true", help="encode in bfloat16")
    parser.add_argument(
        "--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS)
    )
    args = parser.parse_args(argv)
    if args.model and not (args.data_dir and args.vectors):
        parser.error("--model needs --data_dir, and two --vectors to write")
    prepare_machine(args)
    if args.model:
        write_vectors(args)
    if "avx512f" in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        # for faiss, in the processes that are started from here
        os.environ.setdefault("OPENBLAS_CORETYPE", "SKYLAKEX")

    results = {}
    for rows in args.rows:
        steps = {}
        for name in args.contenders:
            steps[name] = partial(in_own_process, measure, name, rows, args)
        results[str(rows)] = in_turn(steps, args.repeats)
        print(table(rows, results[str(rows)]), flush=True)
    save(args, {"rows": results})


if __name__ == "__main__":
    main()
