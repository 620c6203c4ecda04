"""Parallel text written in every format, and read back."""

import csv
import gzip
import json
import lzma
import threading
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset

from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import BitextFile, read_pairs

Pairs = list[tuple[str, str]]

PAIRS = [
    ('"Nein", sagte er. "', 'He said "no'),
    ("eins\u2028zwei\x85drei\x0cvier\x0bfünf\x1c", "one\u2028two\x85three\x0cfour\x0bfive\x1d"),
    ("\u200fשָׁלוֹם\u200e e\u0301", "مرحبا\u0301 \u202bbidi\u202c"),
    ("nul\0byte ''\\t\\n", "a\0b"),
    ("日本語 \U0001f600", " \u00a0padded\u3000"),
    ("null NA None", "nan"),
]
#: A file name of each format. `XX` stands for the language of a Moses side.
NAMES = [
    "de-en.tsv", "de-en.tsv.gz", "deu-eng.tsv.xz", "wiki.v1.de-en.tsv", "de-en.csv", "de-en.jsonl",
    "de-en.jsonl.gz", "de-en.jsonl.xz", "de-en.parquet", "news.XX", "a.de-en.XX.gz",
    "tatoeba.deu-eng.XX.xz", "de-en.txt.zip",
]  # fmt: skip


def lines_of(texts: Iterable[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


def write(path: Path, data: bytes | str) -> Path:
    """Write a file, packed if its name says so, and create its folder."""
    if isinstance(data, str):
        data = data.encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        data = gzip.compress(data)
    elif path.suffix == ".xz":
        data = lzma.compress(data)
    path.write_bytes(data)
    return path


@contextmanager
def serve_folder(folder: Path) -> Iterator[str]:
    """Serve the files of a folder on this machine, and yield the address."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def zip_of(path: Path, members: dict[str, bytes | str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def contents(folder: Path, names: str = "*") -> dict[str, bytes]:
    """Read the files below a folder whose names fit a pattern. The keys are relative paths."""
    paths = [path for path in folder.rglob(names) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def json_rows(path: Path) -> list[dict]:
    """Read the objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_table(path: Path) -> pd.DataFrame:
    """Read a written table, which is literal text."""
    return pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False)


def text_of(pairs: list[tuple[str, ...]]) -> bytes:
    return lines_of(map("\t".join, pairs)).encode()


def json_of(pairs: Pairs) -> bytes:
    """Return one JSON object per line, every other one with escapes."""
    lines = []
    for number, (source, target) in enumerate(pairs):
        record = {"origin": [1, {"a": None}], "target": target, "source": source}
        lines.append(json.dumps(record, ensure_ascii=number % 2 == 0))
    return lines_of(lines).encode()


def write_format(
    folder: Path, name: str, pairs: Pairs, sides: tuple[str, str] = ("de", "en")
) -> BitextFile:
    """Write pairs in the format that the name tells. `XX` is the language of a Moses side."""
    source, target = zip(*pairs)
    texts = dict(zip(sides, map(lines_of, (source, target))))
    path = folder / name
    if "zip" in name:
        inside = {f"OPUS.de-en.{side}": text for side, text in texts.items()}
        zip_of(path, {"README": "x", "LICENSE": "y", "OPUS.de-en.ids": "z", **inside})
    elif "XX" in name:
        for side, text in texts.items():
            path = write(folder / name.replace("XX", side), text)
    elif "parquet" in name:
        columns = {
            "target": pa.array(target, pa.large_string()),
            "source": pa.array(source).dictionary_encode(),
        }
        pq.write_table(pa.table({"origin": range(len(pairs)), **columns}), path)
    elif "csv" in name:
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(pairs)
    else:
        write(path, json_of(pairs) if "json" in name else text_of(pairs))
    ((file,),) = find_bitext(path).values()
    return file


def read(file: BitextFile | Path, max_bad_lines: float = 0.001) -> Pairs:
    """Read the pairs of a file that has only one language."""
    if isinstance(file, Path):
        ((file,),) = find_bitext(file).values()
    return [(pair["source"], pair["target"]) for pair in read_pairs(file, max_bad_lines)]


def folder_text(paths: Path | list[Path]) -> dict[str, str]:
    """Read the pairs of each language, which has one file, without tolerance for bad lines.

    Each pair becomes a line with a tab.
    """
    files = find_bitext(paths).items()
    return {language: text_of(read(file, 0.0)).decode() for language, (file,) in files}


def pairs_of(dataset: Dataset | IterableDataset) -> Pairs:
    return [(row["source"], row["target"]) for row in dataset]


def many(count: int) -> Pairs:
    return [(f"Satz {number}", f"sentence {number}") for number in range(count)]
