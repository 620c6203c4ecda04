"""Measure the speed and memory of `prepare-data` on generated text that resembles OPUS.

    python benchmarks/prepare.py --lines 10000000 --num_workers 2
    python benchmarks/prepare.py --lines 10000000 --num_workers 2 --tokenizer ENCODER

The text stays in `--folder` and is used again. 10 million lines take 2.5 GB and a minute to make.
Options of `prepare-data` can be added.

Memory is the sum over all processes, read twice a second. It is the kernel's PSS, which counts a
shared page once and includes mapped files. Peaks between two readings are missed.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pyarrow as pa

REPOSITORY = Path(__file__).resolve().parent.parent
ALPHABETS = {
    "de": "abcdefghijklmnoprstuvwzäöü",
    "fr": "abcdefghijlmnopqrstuvxéèà",
    "ru": "абвгдежзиклмнопрстуфхцчшыья",
    "ar": "ابتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "hi": "कखगघचछजटडतदनपबमयरलवशसह",
    "ka": "აბგდევზთიკლმნოპრსტუფქღყშჩცძწჭხჯჰ",
    "el": "αβγδεζηθικλμνξοπρστυφχψω",
    "tr": "abcçdefgğhıijklmnoöprsştuüvyz",
}
ENGLISH = "abcdefghijklmnoprstuvwy"
CHUNK = 100_000  # lines made at a time
INTERVAL = 0.5  # seconds between two readings of the memory


def vocabulary(alphabet: str, rng: np.random.Generator, size: int = 60_000) -> pl.Series:
    """Make up a vocabulary of random words of 2 to 8 letters.

    Args:
        alphabet: the letters.
        rng: random number generator.
        size: number of words. Some may be equal.

    Returns:
        The words, most frequent words first: `sentences` draws early ones more often.
    """
    letters = np.array(list(alphabet))
    words = []
    for _ in range(size):
        words.append("".join(rng.choice(letters, rng.integers(2, 9))))
    return pl.Series(words)


def sentences(words: pl.Series, lengths: np.ndarray, rng: np.random.Generator) -> pl.Series:
    """Make up sentences whose words are drawn by Zipf's law, so that few words are frequent.

    Args:
        words: the vocabulary, most frequent words first.
        lengths: number of words of each sentence.
        rng: random number generator.

    Returns:
        One sentence per length, with spaces between the words.
    """
    drawn = (len(words) ** rng.random(lengths.sum())).astype(np.int64) - 1
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(offsets, words.gather(drawn).to_arrow().cast(pa.string()))
    return pl.Series(pl.from_arrow(lists)).list.join(" ")


def pairs(
    count: int, words: pl.Series, english: pl.Series, rng: np.random.Generator
) -> pl.DataFrame:
    """Make up sentence pairs with a median of 13 source words.

    8% of the pairs repeat another pair, and 2% have a URL in the source.

    Args:
        count: number of pairs.
        words: vocabulary of the source language.
        english: vocabulary of English.
        rng: random number generator.

    Returns:
        A table with the columns "source" and "target".
    """
    lengths = np.clip(rng.lognormal(np.log(13), 0.6, count), 1, 120).astype(np.int64)
    other = np.maximum(lengths * rng.uniform(0.8, 1.3, count), 1).astype(np.int64)
    source = sentences(words, lengths, rng)
    target = sentences(english, other, rng)
    urls = pl.Series(np.where(rng.random(count) < 0.02, " http://a.b", ""))
    rows = np.arange(count)
    is_repeated = rng.random(count) < 0.08
    rows[is_repeated] = rng.integers(0, count, is_repeated.sum())
    return pl.DataFrame({"source": source + urls, "target": target})[rows]


def make_text(folder: Path, lines: int, files: int = 2) -> None:
    """Write files of generated sentence pairs, one pair per line.

    Args:
        folder: where to write. The files are named like `0.de-en.tsv`.
        lines: number of lines of all files and languages together. A remainder is left out.
        files: number of files per language.
    """
    rng = np.random.default_rng(0)
    english = vocabulary(ENGLISH, rng)
    folder.mkdir(parents=True, exist_ok=True)
    lines_per_file = lines // (len(ALPHABETS) * files)
    for language, alphabet in ALPHABETS.items():
        words = vocabulary(alphabet, rng)
        for number in range(files):
            with (folder / f"{number}.{language}-en.tsv").open("wb") as file:
                for start in range(0, lines_per_file, CHUNK):
                    table = pairs(min(CHUNK, lines_per_file - start), words, english, rng)
                    table.write_csv(file, separator="\t", include_header=False, quote_style="never")


def memory(process: psutil.Process) -> float:
    """Return the memory (PSS) that a process and its descendants use, in MiB. 0 if it has ended."""
    with suppress(psutil.NoSuchProcess):
        own = process.memory_full_info().pss / 2**20
        return own + sum(memory(child) for child in process.children())
    return 0.0


def measure(command: list[str]) -> tuple[float, float, float]:
    """Run a command until it ends, and measure it. If it fails, end this process as well.

    Args:
        command: program and arguments. It runs in the repository's folder, and its output is
            dropped.

    Returns:
        Wall-clock seconds, CPU seconds of all its processes, and peak memory in MiB.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    process = psutil.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    most = 0.0
    status = None
    while status is None:
        most = max(most, memory(process))
        with suppress(psutil.TimeoutExpired):
            status = process.wait(INTERVAL)
    if status:
        sys.exit(f"error: {' '.join(command)} ended with status {status}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, cpu, most


def main() -> None:
    """Make the text if it is not there yet, run `prepare-data`, and print speed and memory.

    Unknown command-line options are passed to `prepare-data`. Its output is deleted.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dap-benchmark"))
    parser.add_argument("--tokenizer", help="its tokens are counted in the filters; default: words")
    arguments, more = parser.parse_known_args()
    raw = arguments.folder / f"raw-{arguments.lines}"
    out = arguments.folder / f"out-{os.getpid()}"
    if not raw.exists():
        unfinished = raw.with_name(f"{out.name}.tmp")  # renamed when it is complete
        make_text(unfinished, arguments.lines)
        unfinished.rename(raw)
    command = [
        sys.executable,
        "-m",
        "dap_transformers.commands.prepare",
        "--data",
        str(raw),
        "--output_dir",
        str(out),
    ]
    command += ["--num_workers", str(arguments.num_workers), *more]
    load = os.getloadavg()[0]
    counted = "words"
    if arguments.tokenizer:
        command += ["--tokenizer", arguments.tokenizer]
        counted = f"tokens of {arguments.tokenizer}"
    seconds, cpu, most = measure(command)
    report = json.loads((out / "report.json").read_text())
    shutil.rmtree(out)
    read = sum(found["read"] for found in report["languages"].values())
    train = sum(found["train"] for found in report["languages"].values())
    size = sum(path.stat().st_size for path in raw.iterdir()) / 1e6
    print(f"load before: {load:.1f}; {read:,} pairs, {size:,.0f} MB of text; {train:,} kept")
    print(f"filters count {counted}")
    print(f"{seconds:.0f} s, {read / seconds:,.0f} pairs/s with {arguments.num_workers} processes")
    print(f"{cpu:.0f} CPU-seconds, {read / cpu:,.0f} pairs per CPU-second")
    print(f"peak memory {most:,.0f} MB")


if __name__ == "__main__":
    main()
