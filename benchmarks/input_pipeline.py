"""Pairs a second of the data pipeline alone, and what it takes of a training step.

    python -m benchmarks.input_pipeline --batch_size 1024

The pipeline is that of train_dap.py: tokenised pairs in Arrow files, shuffled, read a batch at a time, collated, and
moved to the device. The pairs are random ids of `--lengths`. With `--step` a DAP step runs on every batch, and what
waits for the next batch counts as starved: its share of the time must be next to nothing.
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
from dap.reports import text_table
from dap.training import BitextCollator

LANGUAGES = [f"l{number}" for number in range(36)]


def random_pairs(workload: Workload, count: int) -> Dataset:
    """Tokenised pairs as `tokenize_bitext` gives them."""
    batch, numbers = (
        workload.batch(count),
        np.random.default_rng(0).integers(len(LANGUAGES), size=count),
    )
    columns = {
        "language": [LANGUAGES[number] for number in numbers],
        "pair_id": list(map(str, range(count))),
    }
    for side in ("source", "target"):
        sides = batch[f"{side}_input_ids"].int().numpy(), batch[f"{side}_attention_mask"].sum(1)
        columns[f"{side}_input_ids"] = [ids[:length] for ids, length in zip(*sides, strict=True)]
    return Dataset.from_dict(columns)


def batches(
    dataset: Dataset, collator: BitextCollator, args: argparse.Namespace, workers: int
) -> Iterator[Any]:
    """Endless shuffled batches on the device, as the Trainer's loader makes them; pair ids are left out."""
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
            tensors = {
                key: value
                for key, value in batch.items()
                if torch.is_tensor(value) and key != "language_ids"
            }
            yield {key: value.to(args.device, non_blocking=True) for key, value in tensors.items()}


def run(
    source: Iterator[Batch], count: int, work: Callable[[Batch], None] | None, device: str
) -> dict[str, float]:
    """Seconds of `count` batches, with a step on each where there is one, and of these those spent waiting."""
    started, cpu, waiting = time.perf_counter(), time.process_time(), 0.0
    for _ in range(count):
        asked = time.perf_counter()
        batch = next(source)
        waiting += time.perf_counter() - asked
        if work:
            work(batch)
            synchronise(device)
    return {WALL: time.perf_counter() - started, CPU: time.process_time() - cpu, "waiting": waiting}


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each number of workers, without and with the step."""
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
        medians = in_turn(
            {name: partial(run, source, args.batches, work, args.device)}, args.repeats
        )[name]
        found.append({"workers": workers, "step": work is not None, **medians})
    return found


def table(found: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Medians as text."""
    pairs = args.batches * args.batch_size
    lines = []
    for part in found:
        name, starved = "pipeline alone", None
        if part["step"]:
            name, starved = "pipeline and step", f"{100 * part['waiting'] / part[WALL]:.2f}%"
        lines.append(
            [
                name,
                part["workers"],
                f"{pairs / part[WALL]:.0f}",
                f"{pairs / part[CPU]:.0f}",
                starved,
            ]
        )
    header = [
        f"{args.batch_size} pairs a batch",
        "workers",
        "pairs / s",
        "pairs / CPU s here",
        "starved",
    ]
    return text_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Prints a table; `--json` keeps everything."""
    parser = machine_parser(__doc__, repeats=3)
    add_workload_arguments(parser)
    parser.add_argument("--pairs", type=int, default=20_000, help="random ones")
    parser.add_argument("--batches", type=int, default=50, help="a repeat")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1], help="of the loader")
    parser.add_argument("--step", action="store_true", help="also with a DAP step on every batch")
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = compare(args)
    print(table(found, args))
    save(args, {"lines": found})


if __name__ == "__main__":
    main()
