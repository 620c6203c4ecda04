"""Measure the speed and memory of `prepare-data` on generated text that resembles OPUS.

    python -m benchmarks.prepare --lines 10000000 --num_workers 2
    python -m benchmarks.prepare --lines 1000000 --num_workers 2 --tokenizer ENCODER

10 million lines take a minute to make, and 2.5 GB in the folder `TMPDIR`. Options of `prepare-data`
can be added.

Memory is the sum over all processes, read twice a second. It is the kernel's PSS, which counts a
shared page once and includes mapped files. Peaks between two readings are missed.
"""

import argparse
import resource
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pyarrow as pa

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


def vocabulary(alphabet: str, rng: np.random.Generator) -> pl.Series:
    """Make up 60,000 words of 2 to 8 letters, of which some may be equal."""
    letters = np.array(list(alphabet))
    words = []
    for _ in range(60_000):
        words.append("".join(rng.choice(letters, rng.integers(2, 9))))
    return pl.Series(words)


def sentences(words: pl.Series, lengths: np.ndarray, rng: np.random.Generator) -> pl.Series:
    """Make up a sentence of each length, with words by Zipf's law: the first are frequent."""
    drawn = (len(words) ** rng.random(lengths.sum())).astype(np.int64) - 1
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(offsets, words.gather(drawn).to_arrow().cast(pa.string()))
    return pl.Series(pl.from_arrow(lists)).list.join(" ")


def pairs(
    count: int, words: pl.Series, english: pl.Series, rng: np.random.Generator
) -> pl.DataFrame:
    """Make up sentence pairs with a median of 13 source words: columns "source" and "target".

    8% of the pairs repeat another pair, and 2% have a URL in the source.
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


def make_text(folder: Path, lines: int) -> None:
    """Write so many generated pairs, two files per language, such as `0.de-en.tsv`."""
    rng = np.random.default_rng(0)
    english = vocabulary(ENGLISH, rng)
    folder.mkdir()
    lines_per_file = lines // (len(ALPHABETS) * 2)
    for language, alphabet in ALPHABETS.items():
        words = vocabulary(alphabet, rng)
        for number in range(2):
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


def measure(command: list[str]) -> tuple[float, float]:
    """Run a command until it ends. If it fails, end this process as well.

    Returns:
        CPU seconds of all its processes, and peak memory in MiB.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = psutil.Popen(command, stdout=subprocess.DEVNULL)
    most = 0.0
    status = None
    while status is None:
        most = max(most, memory(process))
        with suppress(psutil.TimeoutExpired):
            status = process.wait(0.5)
    if status:
        sys.exit(f"error: {' '.join(command)} ended with status {status}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, most


def main() -> None:
    """Make the text, run `prepare-data`, and print speed and memory.

    Unknown command-line options are passed to `prepare-data`.
    """
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    args, more = parser.parse_known_args()
    command = [sys.executable, "-m", "dap_transformers.commands.prepare"]
    with tempfile.TemporaryDirectory(prefix="dap-prepare-") as folder:
        raw = Path(folder) / "raw"
        make_text(raw, args.lines)
        command += ["--data", str(raw), "--output_dir", f"{folder}/out", *more]
        cpu, most = measure(command)
    print(f"{cpu:.0f} CPU-seconds, {args.lines / cpu:,.0f} pairs per CPU-second")
    print(f"peak memory {most:,.0f} MB")


if __name__ == "__main__":
    main()
