"""What the benchmarks share: contenders that take turns, medians, the machine's matrix rate, and tables.

Legend: `T` tokens, `D` hidden size, `I` intermediate size.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dap.files import write_json
from dap.reports import machine, versions

Step = Callable[[], object]
WALL, CPU = "wall", "cpu"


def add_machine_arguments(parser: argparse.ArgumentParser, repeats: int) -> None:
    """The options that every benchmark has."""
    parser.add_argument("--repeats", type=int, default=repeats, help="times that each contender has its turn")
    parser.add_argument("--threads", type=int, help="of PyTorch (default: OMP_NUM_THREADS, or all cores)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="file to write")


def prepare_machine(args: argparse.Namespace) -> None:
    """Set the threads and the seed."""
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but PyTorch sees no GPU here: leave it out, or run where there is one.")
    torch.manual_seed(0)


def synchronise(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def once(step: Step, device: str) -> dict[str, float]:
    """Wall seconds and CPU seconds of all threads of one step, the GPU's work included in the first."""
    synchronise(device)
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    synchronise(device)
    return {WALL: time.perf_counter() - wall, CPU: time.process_time() - cpu}


def alternate(
    contenders: Mapping[str, Step],
    repeats: int,
    device: str,
    warm_up: int = 1,
    between: Mapping[str, Step] | None = None,
) -> dict[str, dict[str, Any]]:
    """Contender -> medians of `wall` and `cpu` seconds over the repeats, and all single `runs`; they take turns.

    What is `between` has its turn after each of them, so that a rate is known for the same minutes.
    """
    between = between or {}
    for step in [*contenders.values(), *between.values()]:
        for _ in range(warm_up):
            step()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in [*contenders, *between]}
    for number in range(repeats):
        for name, step in contenders.items():
            for turn, work in [(name, step), *between.items()]:
                runs[turn].append(once(work, device))
        show(f"round {number + 1}: " + ", ".join(f"{name} {part[-1][WALL]:.3f} s" for name, part in runs.items()))
    return {name: medians(part) | {"runs": part} for name, part in runs.items()}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """The median of each number over the runs.

    >>> medians([{"wall": 1.0}, {"wall": 9.0}, {"wall": 2.0}])
    {'wall': 2.0}
    """
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def show(line: str) -> None:
    """Progress, apart from the result."""
    print(line, file=sys.stderr, flush=True)


class MatrixWork:
    """The six weight products of one encoder layer over T tokens, forward only: `flops` of them a call.

    A call takes about `seconds`, so that the rate is not that of a moment.
    """

    def __init__(
        self, config: PreTrainedConfig, tokens: int, device: str, dtype: torch.dtype, seconds: float = 0.5
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = [(hidden, hidden)] * 4 + [(hidden, inner), (inner, hidden)]
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.states = {width: torch.randn(tokens, width, **options) for width in (hidden, inner)}  # (T, D), (T, I)
        self.weights = [torch.randn(shape, **options) for shape in shapes]
        self.layers = 1
        self()
        self.layers = max(1, int(seconds / once(self, device)[WALL]))
        self.flops = self.layers * 2 * tokens * sum(a * b for a, b in shapes)

    def __call__(self) -> None:
        for _ in range(self.layers):
            for weight in self.weights:
                self.states[len(weight)] @ weight


def save(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Write what was measured, with the arguments, the machine and the versions, where `--json` says so."""
    if args.json:
        arguments = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        write_json({"arguments": arguments, "machine": machine(), "versions": versions(), **found}, args.json)
