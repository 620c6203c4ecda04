"""What the benchmarks share: options, contenders that take turns, processes of their own, memory, and JSON.

Legend: `T` tokens, `D` hidden size, `I` intermediate size.
"""

import argparse
import ctypes
import gc
import multiprocessing
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dap.file_io import write_json
from dap.reports import machine, versions

Step = Callable[[], object]
Numbers = dict[str, float]
WALL, CPU = "wall", "cpu"


def machine_parser(description: str, repeats: int) -> argparse.ArgumentParser:
    """The options that every benchmark has, and the first line of its description."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, default=repeats, help="times that each contender has its turn"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser


def prepare_machine(args: argparse.Namespace) -> None:
    """Look for the GPU, and set the seed."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "--device cuda, but PyTorch sees no GPU here: leave it out, or run where there is one."
        )
    torch.manual_seed(0)


def synchronise(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def once(step: Step, device: str) -> Numbers:
    """Wall seconds and CPU seconds of all threads of one step, the GPU's work included in the first."""
    synchronise(device)
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    synchronise(device)
    return {WALL: time.perf_counter() - wall, CPU: time.process_time() - cpu}


def in_turn(
    measures: Mapping[str, Callable[[], Numbers]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Contender -> the median of each number that it gives, and all single `runs`; they take turns."""
    runs: dict[str, list[Numbers]] = {name: [] for name in measures}
    for _, (name, measure) in product(range(repeats), measures.items()):
        runs[name].append(measure())
        show(f"{name}: " + ", ".join(f"{key} {value:.5g}" for key, value in runs[name][-1].items()))
    return {
        name: {key: statistics.median(run[key] for run in part) for key in part[0]} | {"runs": part}
        for name, part in runs.items()
    }


def alternate(
    contenders: Mapping[str, Step], repeats: int, device: str, warm_up: int = 1
) -> dict[str, dict[str, Any]]:
    """`in_turn` of the seconds that each takes `once`, after some steps of each that are not counted."""
    for step in contenders.values():
        for _ in range(warm_up):
            step()
    return in_turn(
        {name: partial(once, step, device) for name, step in contenders.items()}, repeats
    )


def in_own_process(work: Callable[..., Any], *args: Any) -> Any:
    """What a function gives in a new process, which reads the environment as it is now."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


@contextmanager
def peak_memory(device: str) -> Iterator[dict[str, int]]:
    """At its end, the most `bytes` that were in use within, above what was in use before."""
    found: dict[str, int] = {}
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found["bytes"] = torch.cuda.max_memory_allocated() - before
        return
    ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = kernel_bytes("/proc/self/status", "VmRSS")
    yield found
    found["bytes"] = kernel_bytes("/proc/self/status", "VmHWM") - before


@contextmanager
def peak_anonymous() -> Iterator[dict[str, int]]:
    """At its end, the most `bytes` of memory without files that were seen within, above what was in use before."""
    found, over = {"bytes": 0}, threading.Event()
    before = kernel_bytes("/proc/self/status", "RssAnon")

    def watch() -> None:
        while not over.wait(0.01):
            found["bytes"] = max(
                found["bytes"], kernel_bytes("/proc/self/status", "RssAnon") - before
            )

    watching = threading.Thread(target=watch)
    watching.start()
    yield found
    over.set()
    watching.join()


def kernel_bytes(file: str, name: str) -> int:
    """The kB that a file of /proc tells under a name, in bytes."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path(file).read_text())[1])


def show(line: str) -> None:
    """Progress, apart from the result."""
    print(line, file=sys.stderr, flush=True)


class MatrixWork:
    """The six weight products of one encoder layer over T tokens, forward only: `flops` of them a call.

    A call takes about `seconds`, so that the rate is not that of a moment.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        tokens: int,
        device: str,
        dtype: torch.dtype,
        seconds: float = 0.5,
    ) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = [(hidden, hidden)] * 4 + [(hidden, inner), (inner, hidden)]
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.states = {
            width: torch.randn(tokens, width, **options) for width in (hidden, inner)
        }  # (T, D), (T, I)
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
        arguments = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()
        }
        write_json(
            {"arguments": arguments, "machine": machine(), "versions": versions(), **found},
            args.json,
        )
