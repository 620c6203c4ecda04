"""How fast and in how much memory `prepare_data.py` works, on text made up with the lengths and repetitions of OPUS.

    python benchmarks/prepare.py --lines 10000000 --num_workers 2
    python benchmarks/prepare.py --lines 10000000 --num_workers 2 --tokenizer ENCODER

The text stays in `--folder` and is used again; 10 million lines are 2.5 GB, and take a minute to make. Options of
`prepare_data.py` can be added.

Memory is that of all processes together, as the kernel tells it twice a second: PSS, where a page that several
share counts once, pages of mapped files included. Between two looks it may have been more.
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
    "de": "abcdefghijklmnoprstuvwzäöü", "fr": "abcdefghijlmnopqrstuvxéèà", "ru": "абвгдежзиклмнопрстуфхцчшыья",
    "ar": "ابتثجحخدذرزسشصضطظعغفقكلمنهوي", "hi": "कखगघचछजटडतदनपबमयरलवशसह", "ka": "აბგდევზთიკლმნოპრსტუფქღყშჩცძწჭხჯჰ",
    "el": "αβγδεζηθικλμνξοπρστυφχψω", "tr": "abcçdefgğhıijklmnoöprsştuüvyz",
}  # fmt: skip
ENGLISH = "abcdefghijklmnoprstuvwy"
CHUNK = 100_000  # lines made at a time
LOOKS = 0.5  # seconds between two looks at the memory


def vocabulary(alphabet: str, rng: np.random.Generator, size: int = 60_000) -> pl.Series:
    letters = np.array(list(alphabet))
    return pl.Series(["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(size)])


def sentences(words: pl.Series, lengths: np.ndarray, rng: np.random.Generator) -> pl.Series:
    """Sentences of so many words each, drawn by Zipf's law."""
    drawn = (len(words) ** rng.random(lengths.sum())).astype(np.int64) - 1
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(offsets, words.gather(drawn).to_arrow().cast(pa.string()))
    return pl.Series(pl.from_arrow(lists)).list.join(" ")


def pairs(
    count: int, words: pl.Series, english: pl.Series, rng: np.random.Generator
) -> pl.DataFrame:
    """13 words a side at the median, 8% repeated lines, 2% with a URL."""
    lengths = np.clip(rng.lognormal(np.log(13), 0.6, count), 1, 120).astype(np.int64)
    other = np.maximum(lengths * rng.uniform(0.8, 1.3, count), 1).astype(np.int64)
    source, target = sentences(words, lengths, rng), sentences(english, other, rng)
    urls = pl.Series(np.where(rng.random(count) < 0.02, " http://a.b", ""))
    rows, again = np.arange(count), rng.random(count) < 0.08
    rows[again] = rng.integers(0, count, again.sum())
    return pl.DataFrame({"source": source + urls, "target": target})[rows]


def make_text(folder: Path, lines: int, files: int = 2) -> None:
    """`files` tables a language."""
    rng = np.random.default_rng(0)
    english = vocabulary(ENGLISH, rng)
    folder.mkdir(parents=True, exist_ok=True)
    of_a_file = lines // (len(ALPHABETS) * files)
    for language, alphabet in ALPHABETS.items():
        words = vocabulary(alphabet, rng)
        for number in range(files):
            with (folder / f"{number}.{language}-en.tsv").open("wb") as file:
                for start in range(0, of_a_file, CHUNK):
                    table = pairs(min(CHUNK, of_a_file - start), words, english, rng)
                    table.write_csv(file, separator="\t", include_header=False, quote_style="never")


def memory(process: psutil.Process) -> float:
    """MB of a process and of its children; of one that has ended, none."""
    with suppress(psutil.NoSuchProcess):
        return process.memory_full_info().pss / 2**20 + sum(map(memory, process.children()))
    return 0.0


def measure(command: list[str]) -> tuple[float, float, float]:
    """Seconds, CPU-seconds and the most memory in MB of a command."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = psutil.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    most, status = 0.0, None
    while status is None:
        most = max(most, memory(process))
        with suppress(psutil.TimeoutExpired):
            status = process.wait(LOOKS)
    if status:
        sys.exit(f"error: {' '.join(command)} ended with status {status}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, cpu, most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dap-benchmark"))
    parser.add_argument("--tokenizer", help="Count its tokens in the filters. Default: words.")
    arguments, more = parser.parse_known_args()
    raw, out = arguments.folder / f"raw-{arguments.lines}", arguments.folder / f"out-{os.getpid()}"
    if not raw.exists():
        unfinished = raw.with_name(f"{out.name}.tmp")  # a folder with its name is whole
        make_text(unfinished, arguments.lines)
        unfinished.rename(raw)
    command = [sys.executable, "prepare_data.py", "--data", str(raw), "--output_dir", str(out)]
    command += ["--num_workers", str(arguments.num_workers), *more]
    load = os.getloadavg()[0]
    seconds, cpu, most = measure(
        command + (["--tokenizer", arguments.tokenizer] if arguments.tokenizer else [])
    )
    report = json.loads((out / "report.json").read_text())
    shutil.rmtree(out)
    read, train = (
        sum(found[name] for found in report["languages"].values()) for name in ("read", "train")
    )
    size = sum(path.stat().st_size for path in raw.iterdir()) / 1e6
    print(f"load before: {load:.1f}; {read:,} pairs, {size:,.0f} MB of text; {train:,} stay")
    print(f"filters count {f'tokens of {arguments.tokenizer}' if arguments.tokenizer else 'words'}")
    print(f"{seconds:.0f} s, {read / seconds:,.0f} pairs/s with {arguments.num_workers} processes")
    print(f"{cpu:.0f} CPU-seconds, {read / cpu:,.0f} pairs each")
    print(f"at most {most:,.0f} MB at a time")


if __name__ == "__main__":
    main()
