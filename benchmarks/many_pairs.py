"""Measure the memory that a training process needs to split and to order many pairs.

    python -m benchmarks.many_pairs --pairs 4e6 36e6

The pairs are made up, in 36 languages. Each process of a training holds out the dev sets, and draws
the rows of an epoch. Mapped files, which all processes share, do not count.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.timing import in_own_process, peak_anonymous
from dap_transformers.disk_arrays import row_blocks
from dap_transformers.languages import TATOEBA_36
from dap_transformers.reports.rendering import text_table

if TYPE_CHECKING:
    from datasets import Dataset


def memory_of(pairs: int, dev_pairs: int, folder: Path) -> tuple[int, float]:
    """Measure the memory of a process that splits and orders made-up pairs.

    Args:
        pairs: number of pairs of all languages.
        dev_pairs: pairs of each language to hold out.
        folder: where to write the pairs.

    Returns:
        The peak in bytes, without memory-mapped files, and the seconds that it took.
    """
    from dap_transformers.training.batches import LanguageMixSampler, split_validation

    datasets = {}
    for number, language in enumerate(TATOEBA_36):
        path = folder / f"{language}.arrow"
        datasets[language] = made_up_pairs(pairs // len(TATOEBA_36), number, path)
    started = time.perf_counter()
    with peak_anonymous() as peak:
        train, _ = split_validation(datasets, dev_pairs, seed=0)
        sizes = [len(dataset) for dataset in train.values()]
        sampler = LanguageMixSampler(sizes, "natural", alpha=1.0, seed=0)
        drawn = sum(1 for _ in sampler)
    if drawn != sum(sizes):
        raise ValueError(f"an epoch had {drawn} of {sum(sizes)} rows")
    return peak["bytes"], time.perf_counter() - started


def made_up_pairs(count: int, language: int, path: Path) -> "Dataset":
    """Write pairs of short sentences into an Arrow file, and return them as a dataset.

    Args:
        count: number of pairs.
        language: number that makes the sentences of languages different.
        path: file to write.
    """
    from datasets import Dataset

    schema = pa.schema({"source": pa.string(), "target": pa.string()})
    with pa.ipc.new_stream(str(path), schema) as file:
        for block in row_blocks(count):
            numbers = pa.array(np.arange(block.start, block.stop)).cast(pa.string())
            sides = []
            for side in ("source", "target"):
                ending = f" sentences of the {side} side in language number {language}"
                sides.append(pc.binary_join_element_wise(numbers, ending, ""))
            file.write_batch(pa.record_batch(sides, schema))
    return Dataset.from_file(str(path))


def main(argv: list[str] | None = None) -> None:
    """Measure the memory for each number of pairs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=float, nargs="+", default=[4e6], help="training pairs")
    parser.add_argument("--dev_pairs", type=int, default=1000, help="held-out pairs per language")
    args = parser.parse_args(argv)
    rows = []
    for pairs in map(int, args.pairs):
        with tempfile.TemporaryDirectory() as folder:
            used, seconds = in_own_process(memory_of, pairs, args.dev_pairs, Path(folder))
        rows.append([f"{pairs:,}", f"{used / 1e6:.0f}", f"{seconds:.0f}"])
    print(text_table(["pairs", "MB of a process", "seconds"], rows))


if __name__ == "__main__":
    main()
