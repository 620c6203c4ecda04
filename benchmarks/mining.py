"""Speed of nearest neighbours in both directions: ours and faiss.

    python -m benchmarks.mining --rows 20000 50000 --repeats 3 --json mining.json

- Every measurement runs in its own process. The contenders take turns.
- "of float32" and "of bfloat16" compare the speed with plain matrix products of this type, whose
  rates in GFLOP/s stand beside. The useful work is one product of all source rows with all target
  rows, whatever a contender computes. The rates are those of a 4096³ product, measured in the same
  process after the search.
- Memory is the peak above the process's memory before it had the two matrices. Its unit is the size
  of the two matrices.
- faiss gets rows that are already normalised. On a CPU with AVX-512 it also gets kernels that its
  OpenBLAS does not choose by itself (`OPENBLAS_CORETYPE`).

Legend: `N` source rows, `M` target rows, `D` dimensions.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import (
    in_own_process,
    in_turn,
    machine_parser,
    peak_memory,
    product_rate,
    save,
)
from dap_transformers.search.exact import mutual_neighbours
from dap_transformers.tables import text_table

K = 4  # neighbours of a row

#: Rows of the neighbours of both sides, (N, K) and (M, K).
Indices = tuple[np.ndarray, np.ndarray]
#: Finds the K nearest of source (N, D) and target (M, D): float32, rows of length 1.
Search = Callable[[np.ndarray, np.ndarray], Indices]


def ours(source: np.ndarray, target: np.ndarray) -> Indices:
    """Search by `mutual_neighbours`, in one pass for both directions."""
    found = mutual_neighbours(source, target, K)
    return found.forward.indices, found.backward.indices


def faiss_flat(source: np.ndarray, target: np.ndarray) -> Indices:
    """Search by `faiss.IndexFlatIP`, once per direction."""
    import faiss

    def search(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        index = faiss.IndexFlatIP(keys.shape[1])
        index.add(keys)
        return index.search(queries, K)[1]

    return search(source, target), search(target, source)


CONTENDERS: dict[str, Search] = {"ours": ours, "faiss": faiss_flat}


def vectors_of(rows: int, args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Read the first rows of the files of `--vectors`, or draw random vectors.

    Row i of both sides belong together: a random target is its source plus noise.

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


def measure(contender: str, rows: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure one search in this process.

    Returns:
        Name of a number -> number:

        - "seconds": time of the search.
        - "float32", "bfloat16": rates of plain matrix products, in GFLOP/s.
        - "flops": rate of the search's useful work, in GFLOP/s.
        - "memory": peak memory with the two matrices, divided by the size of the two matrices.
        - "found": share of rows whose best neighbour is the row with the same number.
    """
    # load libraries and start threads
    search = CONTENDERS[contender]
    small = np.random.default_rng(1).standard_normal((500, args.dimensions), dtype=np.float32)
    search(small, small)

    source, target = vectors_of(rows, args)
    with peak_memory("cpu") as peak:
        started = time.perf_counter()
        forward, backward = search(source, target)
        seconds = time.perf_counter() - started

    own = np.arange(len(source))
    found_forward = (forward[:, 0] == own).mean()
    found_backward = (backward[:, 0] == own).mean()
    useful_work = 2 * len(source) * len(target) * source.shape[1]  # FLOPs of one product
    return {
        "seconds": seconds,
        "flops": useful_work / seconds / 1e9,
        "float32": product_rate(args.device),
        "bfloat16": product_rate(args.device, torch.bfloat16),
        "memory": 1 + peak["bytes"] / (source.nbytes + target.nbytes),
        "found": (found_forward + found_backward) / 2,
    }


def table(rows: int, found: dict[str, dict[str, Any]]) -> str:
    """Format the medians of `measure` of all contenders as a text table."""
    reference = found.get("ours", next(iter(found.values())))
    lines = []
    for name, numbers in found.items():
        line = [
            name,
            numbers["seconds"],
            f"{numbers['seconds'] / reference['seconds']:.2f}",
            f"{numbers['memory']:.2f}",
            f"{numbers['found']:.1%}",
        ]
        for kind in ("float32", "bfloat16"):
            line += [f"{numbers[kind]:.0f}", f"{numbers['flops'] / numbers[kind]:.0%}"]
        lines.append(line)
    header = ["both directions", "seconds", "time / ours", "memory / matrices"]
    header += ["found", "float32", "of float32", "bfloat16", "of bfloat16"]
    return f"{rows} × {rows}\n{text_table(header, lines)}"


def main(argv: list[str] | None = None) -> None:
    """Measure all contenders, print a table per number of rows, and write all to `--json`."""
    parser = machine_parser(__doc__, repeats=3)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[20_000, 50_000], help="rows of each side"
    )
    parser.add_argument("--dimensions", type=int, default=768, help="dimensions of random vectors")
    parser.add_argument(
        "--vectors",
        nargs=2,
        help="two .npy files with a pair in each row (default: random vectors)",
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS)
    )
    args = parser.parse_args(argv)
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
