"""Peak memory of the RTL loss over tokens and vocabulary, of a step over the batch, and of GradCache.

    python -m benchmarks.memory --tokens 1024 4096 --vocabularies 37000 119547 --json memory.json
    python -m benchmarks.memory --size small --batch_sizes 16 32 64
    python -m benchmarks.memory --size mini --grad_cache 8192 --mini_batch_size 64

Every point is a process of its own, but on a GPU, which keeps count. Memory is the peak above what there was before
the forward pass, gradients of the weights included, after a smaller pass that loads what is loaded once. The naive
loss is `F.cross_entropy(states @ words.T + bias)`, left out where three matrices of tokens × vocabulary do not
fit into half of what is free.
"""

import argparse
import ctypes
import gc
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.timing import add_machine_arguments, medians, prepare_machine, save, show
from benchmarks.train_step import CachedGradients, Gradients
from benchmarks.workload import OBJECTIVES, Workload, add_workload_arguments
from dap.reports import text_table
from losses_dap import vocabulary_cross_entropy

OURS, NAIVE = "ours", "naive"
MB = 1e6
#: glibc gives freed blocks back at once, so that the peak is what is in use and not what lies in fragments.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


def peak_bytes(work: Callable[[], None], device: str) -> int:
    """Most memory that is in use during the work, above what is in use before it."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        return torch.cuda.max_memory_allocated() - before
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("self", "VmRSS")
    work()
    return status("self", "VmHWM") - before


def status(file: str, name: str) -> int:
    """A number of /proc/self/status, or of /proc/meminfo, in bytes."""
    path = Path("/proc/meminfo") if file == "meminfo" else Path("/proc/self/status")
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", path.read_text())[1])


def loss_memory(contender: str, tokens: int, vocabulary: int, args: argparse.Namespace) -> int:
    """Peak bytes of the vocabulary loss, forward and backward."""

    def run(rows: int) -> None:
        generator = torch.Generator(args.device).manual_seed(0)
        given = [
            torch.randn(*shape, generator=generator, device=args.device, requires_grad=True)
            for shape in ((rows, args.hidden), (vocabulary, args.hidden), (vocabulary,))
        ]
        labels = torch.randint(vocabulary, (rows,), generator=generator, device=args.device)
        if contender == OURS:
            vocabulary_cross_entropy(*given, labels).backward()
        else:
            states, words, bias = given
            F.cross_entropy(states @ words.T + bias, labels, reduction="sum").backward()

    run(8)
    return peak_bytes(lambda: run(tokens), args.device)


def step_memory(contender: str, pairs: int, args: argparse.Namespace) -> int:
    """Peak bytes of the gradients of a batch: the name of an objective, with " cached" by GradCache."""
    objective, _, cached = contender.partition(" ")
    workload = Workload(args, [objective]).to(args.device)
    model = workload.models[objective]
    if cached:
        gradients: Any = CachedGradients(model, args.mini_batch_size, args.bf16)
    else:
        gradients = Gradients(lambda batch: model(**batch).loss, args.bf16)
    batch, first = workload.batch(pairs), workload.batch(2, seed=1)
    gradients(first)
    model.zero_grad(set_to_none=True)
    return peak_bytes(lambda: gradients(batch), args.device)


def points(args: argparse.Namespace) -> Iterator[tuple[str, str, list[int]]]:
    """What to measure: function, contender, sizes."""
    if args.grad_cache:
        for objective in args.objectives:
            yield "step", objective, [args.mini_batch_size]
            yield "step", f"{objective} cached", [args.grad_cache]
    for pairs in args.batch_sizes:
        for objective in args.objectives:
            yield "step", objective, [pairs]
    for tokens in args.tokens:
        for vocabulary in args.vocabularies:
            yield "loss", OURS, [tokens, vocabulary]
            if 3 * 4 * tokens * vocabulary < free_memory(args.device) / 2:
                yield "loss", NAIVE, [tokens, vocabulary]


def free_memory(device: str) -> int:
    """Bytes that nothing uses."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else status("meminfo", "MemAvailable")


def measure(kind: str, contender: str, sizes: list[int], args: argparse.Namespace) -> dict[str, int]:
    """One point in this process."""
    prepare_machine(args)
    return {"bytes": {"loss": loss_memory, "step": step_memory}[kind](contender, *sizes, args)}


def in_own_process(*point: Any) -> dict[str, int]:
    """`measure` in a process of its own."""
    os.environ |= RETURN_MEMORY  # which the process reads when it starts
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, point)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every point with the median of its repeats."""
    run = measure if args.device == "cuda" or args.same_process else in_own_process
    found = []
    for kind, contender, sizes in points(args):
        runs = [run(kind, contender, sizes, args) for _ in range(args.repeats)]
        found.append({"kind": kind, "contender": contender, "sizes": sizes, **medians(runs), "runs": runs})
        show(f"{kind} {contender} {sizes}: {found[-1]['bytes'] / MB:.0f} MB")
    return found


def tables(found: list[dict[str, Any]]) -> str:
    """Losses: a line for tokens and vocabulary. Steps: a line for each."""
    text = []
    losses: dict[tuple[int, int], dict[str, str]] = {}
    for point in found:
        if point["kind"] == "loss":
            losses.setdefault(tuple(point["sizes"]), {})[point["contender"]] = f"{point['bytes'] / MB:.0f}"
    if losses:
        header = ["tokens × vocabulary", "logits MB", "naive MB", "ours MB"]
        lines = [
            [f"{rows} × {words}", f"{4 * rows * words / MB:.0f}", part.get(NAIVE), part[OURS]]
            for (rows, words), part in losses.items()
        ]
        text.append(text_table(header, lines))
    steps = [point for point in found if point["kind"] == "step"]
    if steps:
        lines = [[point["contender"], point["sizes"][0], f"{point['bytes'] / MB:.0f}"] for point in steps]
        text.append(text_table(["step", "pairs", "MB"], lines))
    return "\n\n".join(text)


def main(argv: list[str] | None = None) -> None:
    """Prints tables; `--json` keeps everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_arguments(parser)
    add_machine_arguments(parser, repeats=1)
    parser.add_argument("--tokens", type=int, nargs="*", default=[], help="of the loss, with labels")
    parser.add_argument("--vocabularies", type=int, nargs="*", default=[37_000, 119_547], help="of the loss")
    parser.add_argument("--hidden", type=int, default=64, help="width of the states in the loss")
    parser.add_argument("--batch_sizes", type=int, nargs="*", default=[], help="pairs of whole steps")
    parser.add_argument(
        "--objectives", nargs="+", choices=list(OBJECTIVES), default=["TR", "DAP"], help="of the steps"
    )
    parser.add_argument("--grad_cache", type=int, help="pairs of a step in chunks of --mini_batch_size")
    parser.add_argument("--mini_batch_size", type=int, default=64, help="pairs of a chunk, and of the step beside it")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--same_process", action="store_true", help="all points in this process: less exact")
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = compare(args)
    print(tables(found))
    save(args, {"points": found})


if __name__ == "__main__":
    main()
