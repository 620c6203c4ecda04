"""Pairs a second of the data pipeline alone, and what it takes of a training step.

    python -m benchmarks.pipeline --batch_size 1024
    python -m benchmarks.pipeline --train_data data/train --tokenizer out --size small --step --batch_size 32

The pipeline is that of train_dap.py: tokenised pairs in Arrow files, shuffled, read a batch at a time, collated, and
moved to the device. Without `--train_data` the pairs are random ids of `--lengths`. With `--step` a DAP step runs on
every batch, and what waits for the next batch counts as starved: its share of the time must be next to nothing.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from datasets import Dataset, concatenate_datasets
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from benchmarks.flops import step
from benchmarks.timing import CPU, WALL, add_machine_arguments, medians, prepare_machine, save, show, synchronise
from benchmarks.workload import CLS, PAD, SEP, Workload, add_workload_arguments
from dap.reports import text_table
from dap.text import load_bitext
from dap.training import BitextCollator, tokenize_bitext

LANGUAGES = [f"l{number}" for number in range(36)]


def random_pairs(count: int, lengths: tuple[int, int], words: int, special: dict[str, int]) -> Dataset:
    """Tokenised pairs as `tokenize_bitext` gives them."""
    rng = np.random.default_rng(0)

    def side() -> list[np.ndarray]:
        sizes = rng.integers(lengths[0], lengths[1] + 1, count)
        rows = [rng.integers(max(5, words // 2), words, size, dtype=np.int32) for size in sizes]
        for row in rows:
            row[0], row[-1] = special[CLS], special[SEP]
        return rows

    numbers = rng.integers(len(LANGUAGES), size=count)
    return Dataset.from_dict(
        {
            "source_input_ids": side(),
            "target_input_ids": side(),
            "language": [LANGUAGES[number] for number in numbers],
            "pair_id": [f"{LANGUAGES[number]}:{row}" for row, number in enumerate(numbers)],
        }
    )


def real_pairs(args: argparse.Namespace) -> tuple[Dataset, list[str], int]:
    """Tokenised pairs of `--train_data`, their languages, and the padding id."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    tokenized = tokenize_bitext(load_bitext(args.train_data), tokenizer, args.lengths[1])
    return concatenate_datasets(list(tokenized.values())), sorted(tokenized), tokenizer.pad_token_id


def batches(dataset: Dataset, collator: BitextCollator, args: argparse.Namespace, workers: int) -> Iterator[Any]:
    """Endless shuffled batches on the device, as the Trainer's loader makes them; pair ids are left out."""
    options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
    options |= {"num_workers": workers, "pin_memory": args.device == "cuda", "drop_last": True}
    generator = torch.Generator().manual_seed(0)
    loader = DataLoader(dataset, args.batch_size, shuffle=True, collate_fn=collator, generator=generator, **options)
    if not len(loader):
        raise ValueError(f"{len(dataset)} pairs make no batch of {args.batch_size}: give more --pairs")
    for _ in cycle([None]):
        for batch in loader:
            tensors = {key: value for key, value in batch.items() if torch.is_tensor(value) and key != "language_ids"}
            yield {key: value.to(args.device, non_blocking=True) for key, value in tensors.items()}


def run(
    source: Iterator[Any], count: int, model: torch.nn.Module | None, args: argparse.Namespace
) -> dict[str, float]:
    """Seconds of `count` batches, with a step on each where there is a model, and of these those spent waiting."""
    started, cpu, waiting = time.perf_counter(), time.process_time(), 0.0
    for _ in range(count):
        asked = time.perf_counter()
        batch = next(source)
        waiting += time.perf_counter() - asked
        if model is not None:
            step(model, batch, args.bf16)
            synchronise(args.device)
    return {WALL: time.perf_counter() - started, CPU: time.process_time() - cpu, "waiting": waiting}


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each number of workers, without and with the step."""
    workload = Workload(args, ["DAP"]).to(args.device) if args.step or not args.train_data else None
    if args.train_data:
        dataset, languages, pad = real_pairs(args)
    else:
        languages, pad = LANGUAGES, workload.special[PAD]
        dataset = random_pairs(args.pairs, args.lengths, workload.config.vocab_size, workload.special)
    collator = BitextCollator(pad, languages)
    found = []
    for model in (None, *([workload.models["DAP"]] if args.step else [])):
        for workers in args.workers:
            source = batches(dataset, collator, args, workers)
            run(islice(source, 2), 2, model, args)
            runs = [run(source, args.batches, model, args) for _ in range(args.repeats)]
            found.append({"workers": workers, "step": model is not None, **medians(runs), "runs": runs})
            show(f"{workers} workers, step {model is not None}: {args.batches * args.batch_size} pairs, {found[-1]}")
    return found


def table(found: list[dict[str, Any]], args: argparse.Namespace) -> str:
    """Medians as text."""
    pairs = args.batches * args.batch_size
    lines = [
        [
            "pipeline and step" if part["step"] else "pipeline alone",
            part["workers"],
            f"{pairs / part[WALL]:.0f}",
            f"{pairs / part[CPU]:.0f}",
            f"{100 * part['waiting'] / part[WALL]:.2f}%" if part["step"] else None,
        ]
        for part in found
    ]
    header = [f"{args.batch_size} pairs a batch", "workers", "pairs / s", "pairs / CPU s here", "starved"]
    return text_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Prints a table; `--json` keeps everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_arguments(parser)
    add_machine_arguments(parser, repeats=3)
    parser.add_argument("--train_data", nargs="+", help="parallel text; default: random ids")
    parser.add_argument("--tokenizer", help="for --train_data")
    parser.add_argument("--pairs", type=int, default=20_000, help="random ones")
    parser.add_argument("--batches", type=int, default=50, help="a repeat")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1], help="of the loader")
    parser.add_argument("--step", action="store_true", help="also with a DAP step on every batch")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast in the step")
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = compare(args)
    print(table(found, args))
    save(args, {"lines": found})


if __name__ == "__main__":
    main()
