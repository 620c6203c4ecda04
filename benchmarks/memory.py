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

import psutil
import torch
import torch.nn.functional as F

from benchmarks.timing import (
    in_own_process,
    in_turn,
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

#: Contender, and its size: (tokens, vocabulary) of a loss, (pairs,) of a step.
Point = tuple[str, tuple[int, ...]]


def loss_memory(
    args: argparse.Namespace, contender: str, tokens: int, vocabulary: int
) -> dict[str, int]:
    """Measure the peak memory of the vocabulary loss, forward and backward.

    Args:
        contender: `OURS` (`losses_dap.vocabulary_cross_entropy`) or `NAIVE` (the same loss with
            `F.cross_entropy`).
        tokens: number of tokens with a label.
        vocabulary: number of words that the loss compares.

    Returns:
        "bytes" -> peak above the memory before the forward pass.
    """

    def run(rows: int) -> None:
        torch.manual_seed(0)
        given = []
        for shape in ((rows, args.hidden), (vocabulary, args.hidden), (vocabulary,)):
            given.append(torch.randn(*shape, device=args.device, requires_grad=True))
        labels = torch.randint(vocabulary, (rows,), device=args.device)
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
        contender: key of `OBJECTIVES`, such as "DAP", followed by " cached" for GradCache.

    Returns:
        "bytes" -> peak above the memory before the forward pass.
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
    model.zero_grad()
    with peak_memory(args.device) as peak:
        gradients(batch=batch)
    return peak


def points(args: argparse.Namespace) -> list[Point]:
    """List what to measure. `NAIVE` is left out where it would need too much memory."""
    found: list[Point] = []
    for objective in args.objectives:
        if args.grad_cache:
            found.append((objective, (args.mini_batch_size,)))
            found.append((f"{objective} cached", (args.grad_cache,)))
        for pairs in args.batch_sizes:
            found.append((objective, (pairs,)))
    free = psutil.virtual_memory().available
    if args.device == "cuda":
        free, _ = torch.cuda.mem_get_info()
    for size in product(args.tokens, args.vocabularies):
        found.append((OURS, size))
        if 3 * 4 * math.prod(size) < free / 2:
            found.append((NAIVE, size))
    return found


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure everything that `points` lists.

    Returns:
        A dictionary per measurement: "contender", "sizes", "bytes" (median peak of the repeats),
        and "runs" (the single measurements).
    """
    os.environ |= RETURN_MEMORY  # which a process reads when it starts
    measures: dict[Point, Callable[[], dict[str, float]]] = {}
    for contender, sizes in points(args):
        measure = loss_memory if contender in (OURS, NAIVE) else step_memory
        call = (measure, args, contender, *sizes)
        on_gpu = args.device == "cuda"
        measures[contender, sizes] = partial(*call) if on_gpu else partial(in_own_process, *call)
    found = []
    for (contender, sizes), part in in_turn(measures, args.repeats).items():
        found.append({"contender": contender, "sizes": sizes, **part})
    return found


def table(found: list[dict[str, Any]]) -> str:
    """Format the result of `compare` as a text table in MB."""
    lines = []
    for point in found:
        size = " × ".join(map(str, point["sizes"]))
        lines.append([point["contender"], size, f"{point['bytes'] / MB:.0f}"])
    return text_table(["", "pairs, or tokens × vocabulary", "peak MB"], lines)


def main(argv: list[str] | None = None) -> None:
    """Measure memory, print the table, and write everything to `--json`."""
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
    args = parser.parse_args(argv)
    found = compare(args)
    print(table(found))
    save(args, {"points": found})


if __name__ == "__main__":
    main()
