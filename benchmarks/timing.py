"""Shared by all benchmarks: options, contenders that take turns, peak memory and JSON files.

A contender is one of the implementations or settings that a benchmark compares.

Legend: `T` tokens, `D` hidden size, `I` intermediate size.
"""

import argparse
import ctypes
import gc
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from dap_transformers.files import write_json
from dap_transformers.reports import machine, versions

Step = Callable[[], object]
Numbers = dict[str, float]
WALL, CPU = "wall", "cpu"


def machine_parser(description: str, repeats: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark: `--repeats`, `--device` and `--json`.

    The first line of the description is shown by `--help`.
    """
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=repeats, help="turns of each contender")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="file to write")
    return parser


def synchronise(device: str) -> None:
    """Wait until the GPU has finished its work. Do nothing for another device than "cuda"."""
    if device == "cuda":
        torch.cuda.synchronize()


def once(step: Step, device: str) -> Numbers:
    """Run a function once, and measure its time, with the work that it starts on the GPU.

    Returns:
        `WALL` -> wall-clock seconds. `CPU` -> CPU seconds of all threads of this process.
    """
    synchronise(device)
    wall = time.perf_counter()
    cpu = time.process_time()
    step()
    synchronise(device)
    return {WALL: time.perf_counter() - wall, CPU: time.process_time() - cpu}


def in_turn(
    measures: Mapping[str, Callable[[], Numbers]], repeats: int
) -> dict[str, dict[str, Any]]:
    """Measure several contenders `repeats` times, one after the other in each round.

    So a slow minute of the machine does not hit one of them only. Each measurement is printed to
    standard error.

    Args:
        measures: contender -> function that measures it once, and returns name -> number.

    Returns:
        Contender -> the median of each number under its name, and the list of single measurements
        under "runs".
    """
    runs: dict[str, list[Numbers]] = {name: [] for name in measures}
    for _ in range(repeats):
        for name, measure in measures.items():
            numbers = measure()
            runs[name].append(numbers)
            text = ", ".join(f"{key} {value:.5g}" for key, value in numbers.items())
            print(f"{name}: {text}", file=sys.stderr, flush=True)
    found: dict[str, dict[str, Any]] = {}
    for name, part in runs.items():
        found[name] = {"runs": part}
        for key in part[0]:
            found[name][key] = statistics.median(run[key] for run in part)
    return found


def alternate(
    contenders: Mapping[str, Step], repeats: int, device: str, warm_up: int = 1
) -> dict[str, dict[str, Any]]:
    """Time several contenders by `in_turn`, after `warm_up` calls of each that are not timed.

    Returns:
        Contender -> `WALL` and `CPU` (median seconds), and "runs" (the single measurements).
    """
    for step in contenders.values():
        for _ in range(warm_up):
            step()
    measures = {name: partial(once, step, device) for name, step in contenders.items()}
    return in_turn(measures, repeats)


def in_own_process(work: Callable[..., Any], *args: Any) -> Any:
    """Call an importable function in a new process, which starts with our environment variables."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


@contextmanager
def peak_memory(device: str) -> Iterator[dict[str, int]]:
    """Measure the peak memory of a block, above the memory in use before it.

    Args:
        device: "cuda" measures the memory of the GPU, "cpu" that of this process.

    Yields:
        A dictionary that has the peak under "bytes" after the block.
    """
    found: dict[str, int] = {}
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found["bytes"] = torch.cuda.max_memory_allocated() - before
        return
    ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status_bytes("VmRSS")
    yield found
    found["bytes"] = status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    """Return an amount of memory of this process, "VmRSS" (now) or "VmHWM" (the peak), in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", status)[1])


def product_rate(device: str, dtype: torch.dtype = torch.float32) -> float:
    """Measure how fast this machine multiplies square matrices, in 10⁹ operations per second."""
    # the small product loads libraries. The large one would take minutes at less than 20·10⁹
    for size in (512, 4096):
        matrix = torch.rand(size, size, device=device).to(dtype)
        out = torch.empty_like(matrix)
        torch.mm(matrix, matrix, out=out)
        times = once(partial(torch.mm, matrix, matrix, out=out), device)
        rate = 2 * size**3 / times[WALL] / 1e9
        if rate < 20:
            break
    return rate


class LayerProducts:
    """Work to time: the six matrix products of an encoder layer's weights over T tokens.

    A call computes the products of so many layers that it takes about half a second, because a
    single layer is too short to give a steady rate. The constructor measures how many.

    Attributes:
        flops: floating-point operations of a call.
    """

    def __init__(
        self, config: PreTrainedConfig, tokens: int, device: str, dtype: torch.dtype
    ) -> None:
        hidden = config.hidden_size
        inner = config.intermediate_size
        shapes = [(hidden, hidden)] * 4 + [(hidden, inner), (inner, hidden)]
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.states = {
            hidden: torch.randn(tokens, hidden, **options),  # (T, D)
            inner: torch.randn(tokens, inner, **options),  # (T, I)
        }
        self.weights = [torch.randn(shape, **options) for shape in shapes]
        self.layers = 1
        self()
        self.layers = max(1, int(0.5 / once(self, device)[WALL]))
        self.flops = self.layers * 2 * tokens * sum(a * b for a, b in shapes)

    def __call__(self) -> None:
        for _ in range(self.layers):
            for weight in self.weights:
                self.states[len(weight)] @ weight


def save(args: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Write a benchmark's results to the file of `--json`, if it is given.

    Arguments, machine and library versions are added.
    """
    if not args.json:
        return
    arguments = vars(args) | {"json": str(args.json)}
    about = {"arguments": arguments, "machine": machine(), "versions": versions()}
    write_json(about | dict(found), args.json)
