"""Measure the pairs per second of the data pipeline, and how long a training step waits for it.

    python -m benchmarks.input_pipeline --batch_size 1024

The pipeline is the one of train_dap.py: tokenised pairs in Arrow files are shuffled, read in
batches, collated, and moved to the device. The pairs are random ids of `--lengths`. With `--step` a
DAP step runs on every batch. The share of time spent waiting for a batch should be close to zero.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from benchmarks.flops import step
from benchmarks.timing import CPU, WALL, in_turn, machine_parser, prepare_machine, save, synchronise
from benchmarks.workload import PAD, Batch, Workload, add_workload_arguments
from dap_transformers.reports.rendering import text_table
from dap_transformers.training.batches import BitextCollator

LANGUAGES = [f"l{number}" for number in range(36)]


def random_pairs(workload: Workload, count: int) -> Dataset:
    """Return random tokenised pairs, in the form of `dap_transformers.training.tokenize_bitext`.

    Args:
        workload: draws the lengths and token ids. It must be on the CPU.
        count: number of pairs.

    Returns:
        A dataset with the columns "language", "pair_id", "source_input_ids" and "target_input_ids".
    """
    batch = workload.batch(count)
    numbers = np.random.default_rng(0).integers(len(LANGUAGES), size=count)
    columns = {
        "language": [LANGUAGES[number] for number in numbers],
        "pair_id": list(map(str, range(count))),
    }
    for side in ("source", "target"):
        rows = batch[f"{side}_input_ids"].int().numpy()  # (B, S)
        lengths = batch[f"{side}_attention_mask"].sum(1)  # (B,)
        columns[f"{side}_input_ids"] = [ids[:length] for ids, length in zip(rows, lengths)]
    return Dataset.from_dict(columns)


def batches(
    dataset: Dataset, collator: BitextCollator, args: argparse.Namespace, workers: int
) -> Iterator[Any]:
    """Yield shuffled batches without end, moved to the device as the Trainer moves them.

    Ids of pairs and languages are left out.

    Args:
        dataset: tokenised pairs.
        collator: makes a batch of pairs.
        args: the command line, which has the batch size and the device.
        workers: number of processes that read batches. 0 reads them in this process.

    Yields:
        Name of a model's input -> tensor.
    """
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
    options |= {"num_workers": workers, "pin_memory": args.device == "cuda", "drop_last": True}
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(
        dataset, args.batch_size, shuffle=True, collate_fn=collator, generator=generator, **options
    )
    if not len(loader):
        raise ValueError(
            f"{len(dataset)} pairs make no batch of {args.batch_size}: give more --pairs"
        )
    while True:
        for batch in loader:
            tensors = {}
            for key, value in batch.items():
                if torch.is_tensor(value) and key != "language_ids":
                    tensors[key] = value.to(args.device, non_blocking=True)
            yield tensors


def run(
    source: Iterator[Batch], count: int, work: Callable[[Batch], None] | None, device: str
) -> dict[str, float]:
    """Read batches from the pipeline, and measure the time.

    Args:
        source: yields the batches.
        count: how many batches to take.
        work: function that does a training step on a batch. None only reads the batches.
        device: where the step runs.

    Returns:
        `WALL` -> wall-clock seconds. `CPU` -> CPU seconds of this process. "waiting" -> wall-clock
        seconds spent waiting for batches.
    """
    started = time.perf_counter()
    cpu = time.process_time()
    waiting = 0.0
    for _ in range(count):
        asked = time.perf_counter()
        batch = next(source)
        waiting += time.perf_counter() - asked
        if work:
            work(batch)
            synchronise(device)
    return {WALL: time.perf_counter() - started, CPU: time.process_time() - cpu, "waiting": waiting}


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the pipeline for each number of workers, without and with a training step.

    Steps are only measured with `--step`.

    Args:
        args: the command line.

    Returns:
        A dictionary per measurement: "workers", "step" (whether steps ran), the medians of the
        numbers that `run` returns, and "runs" (the single measurements).
    """
    workload = Workload(args, ["DAP"])
    dataset = random_pairs(workload, args.pairs)
    workload.to(args.device)
    collator = BitextCollator(workload.special[PAD], LANGUAGES)
    dap_step = partial(step, workload.models["DAP"], workload.losses()["DAP"], bf16=args.bf16)
    found = []
    for work, workers in product([None, dap_step] if args.step else [None], args.workers):
        source = batches(dataset, collator, args, workers)
        run(islice(source, 2), 2, work, args.device)
        name = f"{workers} workers, step {work is not None}"
        measures = {name: partial(run, source, args.batches, work, args.device)}
        medians = in_turn(measures, args.repeats)[name]
        found.append({"workers": workers, "step": work is not None, **medians})
    return found


def table(found: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Format the results as a text table, in pairs per second.

    Args:
        found: result of `compare`.
        args: the command line, which has the number of batches and their size.
    """
    pairs = args.batches * args.batch_size
    lines = []
    for part in found:
        name = "pipeline only"
        waiting = None
        if part["step"]:
            name = "pipeline and step"
            waiting = f"{100 * part['waiting'] / part[WALL]:.2f}%"
        per_second = f"{pairs / part[WALL]:.0f}"
        per_cpu_second = f"{pairs / part[CPU]:.0f}"
        lines.append([name, part["workers"], per_second, per_cpu_second, waiting])
    first = f"{args.batch_size} pairs per batch"
    header = [first, "workers", "pairs / s", "pairs / CPU s of this process", "waiting"]
    return text_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Measure the speed of the pipeline, print a table, and write it to `--json`.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = machine_parser(__doc__, repeats=3)
    add_workload_arguments(parser)
    parser.add_argument("--pairs", type=int, default=20_000, help="number of random pairs")
    parser.add_argument("--batches", type=int, default=50, help="batches per repeat")
    parser.add_argument(
        "--workers", type=int, nargs="+", default=[0, 1], help="worker processes of the loader"
    )
    parser.add_argument("--step", action="store_true", help="also with a DAP step on every batch")
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = compare(args)
    print(table(found, args))
    save(args, {"lines": found})


if __name__ == "__main__":
    main()
