"""Nearest neighbours in both directions: ours beside faiss and sentence-transformers, as a share of the sgemm rate.

    python -m benchmarks.mining --rows 20000 50000 --repeats 3 --json mining.json
    python -m benchmarks.mining --rows 100000 --vectors xx.npy en.npy --model MODEL --pooling mean --data_dir corpus/

Every measurement is a process of its own; contenders take turns. The share counts one matrix product of all source
with all target rows as the useful work, whatever a contender computes, and divides by the rate of a 4096³ product
measured before and after in the same process. Memory is the peak above what the process had before the two matrices,
in units of the two matrices. faiss gets rows that are normalised already, and on a CPU with AVX-512 the kernels that
its OpenBLAS does not choose by itself (`OPENBLAS_CORETYPE`). Of ours it says which share of the pairs was in blocks
that were multiplied in float32, as no bound of whole numbers closed there, and which was then computed one by one.
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
from dap.reports import text_table
from dap.search import mutual_neighbours

K = 4  # neighbours of a row
Search = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def ours(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One product for both directions."""
    found = mutual_neighbours(source, target, K)
    return found.forward_indices, found.backward_indices


def faiss_flat(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`faiss.IndexFlatIP`, once a direction."""
    import faiss

    found = []
    for queries, keys in ((source, target), (target, source)):
        index = faiss.IndexFlatIP(keys.shape[1])
        index.add(keys)
        found.append(index.search(queries, K)[1])
    return found[0], found[1]


def semantic_search(source: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`sentence_transformers.util.semantic_search`, once a direction, with its default chunks."""
    from sentence_transformers.util import semantic_search

    sides = torch.from_numpy(source), torch.from_numpy(target)
    hits = (semantic_search(*sides, top_k=K), semantic_search(*sides[::-1], top_k=K))
    forward, backward = (
        np.array([[hit["corpus_id"] for hit in row] for row in rows]) for rows in hits
    )
    return forward, backward


CONTENDERS: dict[str, Search] = {
    "ours": ours,
    "faiss": faiss_flat,
    "sentence-transformers": semantic_search,
}


def sgemm_rate(device: str, size: int = 4096, repeats: int = 3) -> float:
    """GFLOP/s of a float32 matrix product."""
    a, out = torch.rand(size, size, device=device), torch.empty(size, size, device=device)
    torch.mm(a, a, out=out)  # loads what is loaded once
    seconds = once(lambda: [torch.mm(a, a, out=out) for _ in range(repeats)], device)[WALL]
    return repeats * 2 * size**3 / seconds / 1e9


def measure(contender: str, rows: int, args: argparse.Namespace) -> dict[str, float]:
    """One search in this process: seconds, share of the sgemm rate, memory, and the share of true pairs found."""
    search, rng = CONTENDERS[contender], np.random.default_rng(0)
    small = rng.standard_normal((500, args.dimensions), dtype=np.float32)
    search(small, small)  # imports, thread pools
    rate = sgemm_rate(args.device)
    if args.vectors:
        source, target = (np.load(path)[:rows] for path in args.vectors)
    else:
        source = rng.standard_normal((rows, args.dimensions), dtype=np.float32)
        target = source + rng.standard_normal((rows, args.dimensions), dtype=np.float32)
    for side in (source, target):
        side /= np.linalg.norm(side, axis=1, keepdims=True)
    with certificate() as certified, peak_memory("cpu") as peak:
        started = time.perf_counter()
        forward, backward = search(source, target)
        seconds = time.perf_counter() - started
    rate = (rate + sgemm_rate(args.device)) / 2
    own = np.arange(len(source))
    return {
        "seconds": seconds,
        "sgemm": rate,
        "share": 2 * len(source) * target.size / seconds / 1e9 / rate,
        "memory": 1 + peak["bytes"] / (source.nbytes + target.nbytes),
        "found": float(((forward[:, 0] == own).mean() + (backward[:, 0] == own).mean()) / 2),
        **{
            name: certified[name] / certified["pairs"]
            for name in ("in_float32", "computed")
            if certified
        },
    }


@contextmanager
def certificate() -> Iterator[dict[str, int]]:
    """What the last of our searches has said of its pairs; nothing where there was none."""
    numbers: dict[str, int] = {}
    handler = logging.Handler()
    handler.emit = lambda record: numbers.update(record.args)
    log = logging.getLogger("dap.search.similarity")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield numbers
    log.setLevel(logging.NOTSET)
    log.removeHandler(handler)


def write_vectors(args: argparse.Namespace) -> None:
    """Encodes random pairs of `--data_dir`, as many as rows, no text of a side twice, into the two `--vectors`."""
    from dap.encoding import SentenceEncoder
    from eval_retrieval import read_languages

    pairs = [pair for rows in read_languages(args.data_dir).values() for pair in rows]
    random.Random(0).shuffle(pairs)
    for side in (0, 1):
        pairs = list({pair[side]: pair for pair in pairs}.values())
    encoder = SentenceEncoder.from_pretrained(
        args.model, args.pooling, device=args.device, bf16=args.bf16
    )
    for side, path in zip(zip(*pairs[: max(args.rows)], strict=True), args.vectors, strict=True):
        np.save(path, encoder.encode(list(side), progress=True))


def table(rows: int, found: dict[str, dict[str, Any]]) -> str:
    """Medians of one size as text."""
    first = found.get("ours", next(iter(found.values())))["seconds"]
    lines = []
    for name, part in found.items():
        numbers = [
            f"{100 * part['share']:.0f}%",
            f"{part['seconds'] / first:.2f}",
            f"{part['memory']:.2f}",
        ]
        certified = [
            f"{100 * part[key]:.2f}" if key in part else "" for key in ("in_float32", "computed")
        ]
        lines.append([name, part["seconds"], *numbers, f"{100 * part['found']:.1f}", *certified])
    header = ["both directions", "seconds", "of sgemm", "time / ours", "memory / matrices"]
    return f"{rows} × {rows}\n" + text_table(
        [*header, "found %", "float32 %", "one by one %"], lines
    )


def main(argv: list[str] | None = None) -> None:
    """Prints a table a size; `--json` keeps everything."""
    parser = machine_parser(__doc__, repeats=3)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[20_000, 50_000], help="rows of each side"
    )
    parser.add_argument("--dimensions", type=int, default=768)
    parser.add_argument(
        "--vectors",
        nargs=2,
        default=[],
        help="two .npy files, row i of each is a pair; else random",
    )
    parser.add_argument("--model", help="encoder that makes the --vectors first, out of --data_dir")
    parser.add_argument(
        "--pooling", choices=("cls", "mean"), help="of the model (default: its own)"
    )
    parser.add_argument("--bf16", action="store_true", help="it encodes in bfloat16")
    parser.add_argument("--data_dir", nargs="+", help="parallel text: files or folders")
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
        os.environ.setdefault(
            "OPENBLAS_CORETYPE", "SKYLAKEX"
        )  # for faiss, in the processes that are to come
    results = {}
    for rows in args.rows:
        steps = {
            name: partial(in_own_process, measure, name, rows, args) for name in args.contenders
        }
        results[str(rows)] = in_turn(steps, args.repeats)
        print(table(rows, results[str(rows)]), flush=True)
    save(args, {"rows": results})


if __name__ == "__main__":
    main()
