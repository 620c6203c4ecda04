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
import json
import logging
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.timing import add_machine_arguments, medians, prepare_machine, save
from dap.reports import text_table
from dap.search import mutual_neighbours

Search = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]


def ours(source: np.ndarray, target: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """One product for both directions."""
    found = mutual_neighbours(source, target, k)
    return found.forward_indices, found.backward_indices


def faiss_flat(source: np.ndarray, target: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """`faiss.IndexFlatIP`, once a direction."""
    import faiss

    found = []
    for queries, keys in ((source, target), (target, source)):
        index = faiss.IndexFlatIP(keys.shape[1])
        index.add(keys)
        found.append(index.search(queries, k)[1])
    return found[0], found[1]


def semantic_search(source: np.ndarray, target: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """`sentence_transformers.util.semantic_search`, once a direction, with its default chunks."""
    from sentence_transformers.util import semantic_search

    sides = torch.from_numpy(source), torch.from_numpy(target)
    hits = (semantic_search(*sides, top_k=k), semantic_search(*sides[::-1], top_k=k))
    forward, backward = (np.array([[hit["corpus_id"] for hit in row] for row in rows]) for rows in hits)
    return forward, backward


CONTENDERS: dict[str, Search] = {"ours": ours, "faiss": faiss_flat, "sentence-transformers": semantic_search}


def sgemm_rate(device: str, size: int = 4096, repeats: int = 3) -> float:
    """GFLOP/s of a float32 matrix product."""
    a, out = torch.rand(size, size, device=device), torch.empty(size, size, device=device)
    torch.mm(a, a, out=out)[0, 0].item()  # waits for a GPU
    started = time.perf_counter()
    for _ in range(repeats):
        torch.mm(a, a, out=out)
    out[0, 0].item()
    return repeats * 2 * size**3 / (time.perf_counter() - started) / 1e9


def measure(contender: str, rows: int, args: argparse.Namespace) -> dict[str, float]:
    """One search in this process: seconds, share of the sgemm rate, memory, and the share of true pairs found."""
    search, rng = CONTENDERS[contender], np.random.default_rng(0)
    small = rng.standard_normal((500, args.dimensions), dtype=np.float32)
    search(small, small, args.k)  # imports, thread pools
    rate = sgemm_rate(args.device)
    before = memory("VmRSS")
    if args.vectors:
        source, target = (np.load(path)[:rows] for path in args.vectors)
    else:
        source = rng.standard_normal((rows, args.dimensions), dtype=np.float32)
        target = source + rng.standard_normal((rows, args.dimensions), dtype=np.float32)
    for side in (source, target):
        side /= np.linalg.norm(side, axis=1, keepdims=True)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    started = time.perf_counter()
    with certificate() as certified:
        forward, backward = search(source, target, args.k)
    seconds = time.perf_counter() - started
    peak = memory("VmHWM")
    rate = (rate + sgemm_rate(args.device)) / 2
    useful = 2 * len(source) * target.size / seconds / 1e9
    own = np.arange(len(source))
    found = float(((forward[:, 0] == own).mean() + (backward[:, 0] == own).mean()) / 2)
    size = source.nbytes + target.nbytes
    return {
        "seconds": seconds,
        "sgemm": rate,
        "share": useful / rate,
        "memory": (peak - before) / size,
        "found": found,
        **{name: certified[name] / certified["pairs"] for name in ("in_float32", "computed") if certified},
    }


@contextmanager
def certificate() -> Iterator[dict[str, int]]:
    """What the last of our searches has said of its pairs; nothing where there was none."""
    numbers: dict[str, int] = {}
    log, handler = logging.getLogger("dap.search.similarity"), logging.Handler()
    handler.emit = lambda record: numbers.update(record.args)
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield numbers
    log.removeHandler(handler)
    log.setLevel(before)


def write_vectors(args: argparse.Namespace) -> None:
    """Encodes random pairs of `--data_dir`, as many as rows, no text of a side twice, into the two `--vectors`."""
    from dap.encoding import SentenceEncoder
    from dap.text import find_bitext, read_pairs

    pairs = [pair for files in find_bitext(args.data_dir).values() for file in files for pair in read_pairs(file)]
    random.Random(0).shuffle(pairs)
    for side in ("source", "target"):
        pairs = list({pair[side]: pair for pair in pairs}.values())
    encoder = SentenceEncoder.from_pretrained(args.model, args.pooling, device=args.device, bf16=args.bf16)
    for side, path in zip(("source", "target"), args.vectors, strict=True):
        np.save(path, encoder.encode([pair[side] for pair in pairs[: max(args.rows)]], progress=True))


def memory(name: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process in bytes."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def environment() -> dict[str, str]:
    """This process's environment, with faiss's OpenBLAS told about AVX-512."""
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    tuned = {"OPENBLAS_CORETYPE": "SKYLAKEX"} if "avx512f" in flags else {}
    return tuned | dict(os.environ)


def run_child(contender: str, rows: int, args: argparse.Namespace) -> dict[str, float]:
    """`measure` in a process of its own."""
    options = {"child": contender, "rows": rows, "dimensions": args.dimensions, "k": args.k, "device": args.device}
    options["threads"] = torch.get_num_threads()
    command = [sys.executable, "-m", "benchmarks.mining", "--vectors", *args.vectors]
    command += [f"--{name}={value}" for name, value in options.items()]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(rows: int, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Contender -> medians over the repeats, which alternate, and all single runs."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in args.contenders}
    for _ in range(args.repeats):
        for name in args.contenders:
            runs[name].append(run_child(name, rows, args))
            print(f"{rows} {name}: {runs[name][-1]}", file=sys.stderr, flush=True)
    return {name: medians(part) | {"runs": part} for name, part in runs.items()}


def table(rows: int, found: dict[str, dict[str, Any]]) -> str:
    """Medians of one size as text."""
    fastest = found.get("ours", next(iter(found.values())))["seconds"]
    lines = [
        [
            name,
            part["seconds"],
            f"{100 * part['share']:.0f}%",
            f"{part['seconds'] / fastest:.2f}",
            f"{part['memory']:.2f}",
            f"{100 * part['found']:.1f}",
            *(f"{100 * part[name]:.2f}" if name in part else "" for name in ("in_float32", "computed")),
        ]
        for name, part in found.items()
    ]
    header = [
        "both directions",
        "seconds",
        "of sgemm",
        "time / ours",
        "memory / matrices",
        "found %",
        "float32 %",
        "one by one %",
    ]
    return f"{rows} × {rows}\n" + text_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Prints a table a size; `--json` keeps everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[20_000, 50_000], help="rows of each side")
    parser.add_argument("--dimensions", type=int, default=768)
    parser.add_argument(
        "--vectors", nargs="*", default=[], help="two .npy files, row i of each the other's; else random"
    )
    parser.add_argument("--model", help="encoder that makes the --vectors first, out of --data_dir")
    parser.add_argument("--pooling", choices=("cls", "mean"), help="of the model (default: its own)")
    parser.add_argument("--bf16", action="store_true", help="it encodes in bfloat16")
    parser.add_argument("--data_dir", nargs="+", help="parallel text: files or folders")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--child", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    add_machine_arguments(parser, repeats=3)
    args = parser.parse_args(argv)
    if args.model and not (args.data_dir and len(args.vectors) == 2):
        parser.error("--model needs --data_dir, and two --vectors to write")
    prepare_machine(args)
    if args.child:
        print(json.dumps(measure(args.child, args.rows[0], args)))
        return
    if args.model:
        write_vectors(args)
    results = {}
    for rows in args.rows:
        results[str(rows)] = compare(rows, args)
        print(table(rows, results[str(rows)]), flush=True)
    save(args, {"rows": results})


if __name__ == "__main__":
    main()
