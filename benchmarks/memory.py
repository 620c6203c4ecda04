"""Measure peak memory: of the vocabulary loss, of a training step, and of GradCache.

    python -m benchmarks.memory --tokens 1024 4096 --vocabularies 37000 119547 --json memory.json
    python -m benchmarks.memory --size small --batch_sizes 16 32 64
    python -m benchmarks.memory --size mini --grad_cache 8192 --mini_batch_size 64

On a CPU every point runs in a process of its own. Memory is the peak above the level before the
forward pass, and includes the gradients of the weights. A smaller pass runs first, so that
everything that is loaded once is loaded. The naive loss is
`F.cross_entropy(states @ words.T + bias)`. It is left out where three matrices of tokens ×
vocabulary do not fit into half of the free memory.
"""

import argparse
import math
import os
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.timing import (
    in_own_process,
    in_turn,
    kernel_bytes,
    machine_parser,
    peak_memory,
    save,
)
from benchmarks.workload import (
    OBJECTIVES,
    Workload,
    add_workload_arguments,
    backward,
    cached_backward,
)
from dap_transformers.tables import text_table
from losses_dap import vocabulary_cross_entropy

OURS, NAIVE = "ours", "naive"
MB = 1e6
#: Settings with which glibc returns freed blocks at once, so that fragments do not count.
RETURN_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}


def loss_memory(
    args: argparse.Namespace, contender: str, tokens: int, vocabulary: int
) -> dict[str, int]:
    """Measure the peak memory of the vocabulary loss, forward and backward.

    Args:
        args: the command line.
        contender: `OURS` (`losses_dap.vocabulary_cross_entropy`) or `NAIVE` (the same loss with
            `F.cross_entropy`).
        tokens: number of tokens with a label.
        vocabulary: number of words that the loss compares.

    Returns:
        "bytes" -> peak above the memory before the forward pass, in bytes.
    """

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
    with peak_memory(args.device) as peak:
        run(tokens)
    return peak


def step_memory(args: argparse.Namespace, contender: str, pairs: int) -> dict[str, int]:
    """Measure the peak memory of a training step, forward and backward.

    Args:
        args: the command line.
        contender: key of `OBJECTIVES`, such as "DAP", followed by " cached" for GradCache.
        pairs: number of pairs of the batch.

    Returns:
        "bytes" -> peak above the memory before the forward pass, in bytes.
    """
    objective, _, cached = contender.partition(" ")
    workload = Workload(args, [objective])
    model = workload.models[objective].to(args.device)
    if cached:
        gradients = partial(cached_backward, model, args.mini_batch_size, bf16=args.bf16)
    else:
        gradients = partial(backward, model, bf16=args.bf16)
    batch = workload.batch(pairs)
    gradients(batch=workload.batch(2))
    model.zero_grad(set_to_none=True)
    with peak_memory(args.device) as peak:
        gradients(batch=batch)
    return peak


def points(args: argparse.Namespace) -> list[tuple[str, tuple[int, ...]]]:
    """List what to measure, as the command line says.

    Args:
        args: the command line.

    Returns:
        Tuples of a contender and its size. For a training step they are the objective and (pairs,).
        For the loss they are `OURS` or `NAIVE` and (tokens, vocabulary). `NAIVE` is left out where
        it would need too much memory.
    """
    found: list[tuple[str, tuple[int, ...]]] = []
    for objective in args.objectives:
        if args.grad_cache:
            found.append((objective, (args.mini_batch_size,)))
            found.append((f"{objective} cached", (args.grad_cache,)))
    for pairs in args.batch_sizes:
        for objective in args.objectives:
            found.append((objective, (pairs,)))
    free = (
        torch.cuda.mem_get_info()[0]
        if args.device == "cuda"
        else kernel_bytes("/proc/meminfo", "MemAvailable")
    )
    for size in product(args.tokens, args.vocabularies):
        found.append((OURS, size))
        if 3 * 4 * math.prod(size) < free / 2:
            found.append((NAIVE, size))
    return found


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure everything that `points` lists.

    Args:
        args: the command line.

    Returns:
        A dictionary per measurement: "contender", "sizes", "bytes" (median peak of the repeats),
        and "runs" (the single measurements).
    """
    same_process = args.device == "cuda" or args.same_process
    if not same_process:
        os.environ |= RETURN_MEMORY  # which a process reads when it starts
    measures: dict[tuple[str, tuple[int, ...]], Callable[[], dict[str, float]]] = {}
    for contender, sizes in points(args):
        work = partial(
            loss_memory if contender in (OURS, NAIVE) else step_memory, args, contender, *sizes
        )
        measures[contender, sizes] = work if same_process else partial(in_own_process, work)
    found = in_turn(measures, args.repeats)
    return [
        {"contender": contender, "sizes": sizes, **part}
        for (contender, sizes), part in found.items()
    ]


def tables(found: list[dict[str, Any]]) -> str:
    """Format the result of `compare`: a text table of the losses, and one of the steps, in MB.

    A table without rows is left out.
    """
    steps, losses = [], {}
    for point in found:
        size = f"{point['bytes'] / MB:.0f}"
        if point["contender"] in (OURS, NAIVE):
            losses.setdefault(tuple(point["sizes"]), {})[point["contender"]] = size
        else:
            steps.append([point["contender"], *point["sizes"], size])
    lines = [
        [f"{rows} × {words}", f"{4 * rows * words / MB:.0f}", part.get(NAIVE), part[OURS]]
        for (rows, words), part in losses.items()
    ]
    both = (
        (["tokens × vocabulary", "logits MB", "naive MB", "ours MB"], lines),
        (["step", "pairs", "MB"], steps),
    )
    return "\n\n".join(text_table(header, lines) for header, lines in both if lines)


def main(argv: list[str] | None = None) -> None:
    """Measure memory, print the tables, and write everything to `--json`.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = machine_parser(__doc__, repeats=1)
    add_workload_arguments(parser)
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[], help="of the loss, with labels"
    )
    parser.add_argument(
        "--vocabularies", type=int, nargs="*", default=[37_000, 119_547], help="of the loss"
    )
    parser.add_argument("--hidden", type=int, default=64, help="width of the states in the loss")
    parser.add_argument(
        "--batch_sizes", type=int, nargs="*", default=[], help="pairs of whole steps"
    )
    parser.add_argument(
        "--objectives",
        nargs="+",
        choices=list(OBJECTIVES),
        default=["TR", "DAP"],
        help="objectives of the steps",
    )
    parser.add_argument(
        "--grad_cache", type=int, help="pairs of a step in chunks of --mini_batch_size"
    )
    parser.add_argument(
        "--mini_batch_size",
        type=int,
        default=64,
        help="pairs of a chunk, and of the step beside it",
    )
    parser.add_argument(
        "--same_process", action="store_true", help="all points in this process: less exact"
    )
    args = parser.parse_args(argv)
    found = compare(args)
    print(tables(found))
    save(args, {"points": found})


if __name__ == "__main__":
    main()
