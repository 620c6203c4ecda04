"""How fast and in how much memory `prepare_data.py` works, on text made up with the lengths and repetitions of OPUS.

    python benchmarks/prepare.py --lines 10000000 --num_workers 2

Shapes: none.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

REPOSITORY = Path(__file__).resolve().parent.parent
ALPHABETS = {
    "de": "abcdefghijklmnoprstuvwzäöü", "fr": "abcdefghijlmnopqrstuvxéèà", "ru": "абвгдежзиклмнопрстуфхцчшыья",
    "ar": "ابتثجحخدذرزسشصضطظعغفقكلمنهوي", "hi": "कखगघचछजटडतदनपबमयरलवशसह", "ka": "აბგდევზთიკლმნოპრსტუფქღყშჩცძწჭხჯჰ",
    "el": "αβγδεζηθικλμνξοπρστυφχψω", "tr": "abcçdefgğhıijklmnoöprsştuüvyz",
}  # fmt: skip
ENGLISH = "abcdefghijklmnoprstuvwy"
CHUNK = 100_000  # lines made at a time


def vocabulary(alphabet: str, rng: np.random.Generator, size: int = 60_000) -> pl.Series:
    letters = np.array(list(alphabet))
    return pl.Series(["".join(rng.choice(letters, rng.integers(2, 9))) for _ in range(size)])


def sentences(words: pl.Series, lengths: np.ndarray, rng: np.random.Generator) -> pl.Series:
    """Sentences of so many words each, drawn by Zipf's law."""
    drawn = (len(words) ** rng.random(lengths.sum())).astype(np.int64) - 1
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    lists = pa.ListArray.from_arrays(offsets, words.gather(drawn).to_arrow().cast(pa.string()))
    return pl.Series(pl.from_arrow(lists)).list.join(" ")


def make_text(folder: Path, lines: int, files: int = 2) -> None:
    """`files` tables a language: 13 words a side at the median, 8% repeated lines, 2% with a URL."""
    rng = np.random.default_rng(0)
    english = vocabulary(ENGLISH, rng)
    folder.mkdir(parents=True, exist_ok=True)
    for language, alphabet in ALPHABETS.items():
        words = vocabulary(alphabet, rng)
        for number in range(files):
            with (folder / f"{number}.{language}-en.tsv").open("wb") as file:
                left = lines // (len(ALPHABETS) * files)
                while left > 0:
                    count = min(left, CHUNK)
                    lengths = np.clip(rng.lognormal(np.log(13), 0.6, count), 1, 120).astype(np.int64)
                    other = np.maximum(lengths * rng.uniform(0.8, 1.3, count), 1).astype(np.int64)
                    pairs = pl.DataFrame({"s": sentences(words, lengths, rng), "t": sentences(english, other, rng)})
                    pairs = pairs.with_columns(pl.when(pl.Series(rng.random(count) < 0.02)).then(pl.col("s") + " http://a.b")
                                               .otherwise(pl.col("s")).alias("s"))  # fmt: skip
                    rows = np.arange(count)
                    again = rng.random(count) < 0.08
                    rows[again] = rng.integers(0, count, again.sum())
                    file.write(
                        pairs[rows].write_csv(separator="\t", include_header=False, quote_style="never").encode()
                    )
                    left -= count


class Watch(threading.Thread):
    """The most memory that a process and its children have at a time, in MB, shared pages counted once (PSS)."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.most = pid, 0.0
        self.start()

    def run(self) -> None:
        while Path(f"/proc/{self.pid}").exists():
            self.most = max(self.most, sum(map(self._proportional, [self.pid, *self._children(self.pid)])))
            time.sleep(0.2)

    def _children(self, pid: int) -> list[int]:
        try:
            own = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []
        return own + [below for child in own for below in self._children(child)]

    @staticmethod
    def _proportional(pid: int) -> float:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            return 0.0
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def measure(command: list[str]) -> tuple[float, float, float]:
    """Seconds, CPU-seconds and MB at most of a command."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
    watch = Watch(process.pid)
    if process.wait():
        sys.exit(f"error: {' '.join(command)} ended with status {process.returncode}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - started, cpu, watch.most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--num_workers", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dap-benchmark"))
    arguments, more = parser.parse_known_args()
    raw, out = arguments.folder / f"raw-{arguments.lines}", arguments.folder / f"out-{os.getpid()}"
    if not raw.exists():
        unfinished = raw.with_name(f"{out.name}.tmp")  # a folder with its name is whole
        make_text(unfinished, arguments.lines)
        unfinished.rename(raw)
    command = [sys.executable, "prepare_data.py", "--data", str(raw), "--output_dir", str(out)]
    seconds, cpu, memory = measure([*command, "--num_workers", str(arguments.num_workers), *more])
    read = sum(counts["read"] for counts in json.loads((out / "report.json").read_text())["languages"].values())
    load = os.getloadavg()[0]
    print(f"{read:,} pairs, {sum(path.stat().st_size for path in raw.iterdir()) / 1e6:,.0f} MB of text")
    print(f"{seconds:.0f} s, {read / seconds:,.0f} pairs/s with {arguments.num_workers} processes (load {load:.1f})")
    print(f"{cpu:.0f} CPU-seconds, {read / cpu:,.0f} pairs each; at most {memory:,.0f} MB")


if __name__ == "__main__":
    main()
