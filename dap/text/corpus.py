"""Load parallel text as datasets, one a language: cached in Arrow files and memory mapped, or streamed."""

import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets
from datasets import config as datasets_config

from dap.text.archives import disk_path
from dap.text.files import BitextFile, find_bitext, hub_dataset
from dap.text.formats import LineAudit, read_pairs, read_tables

FEATURES = Features({"source": Value("string"), "target": Value("string")})
STREAM_FEATURES = Features({**FEATURES, "row": Value("string")})
CACHE_VERSION = 1
BATCH = 10_000  # pairs a batch of the cache


def count_pairs(files: Iterable[BitextFile], max_bad_lines: float = 0.001) -> int:
    """The number of pairs in these files, by reading them once."""
    return sum(len(table) for file in files for table in read_tables(file, max_bad_lines))


def load_bitext(
    paths: str | Path | Sequence[str | Path],
    streaming: bool = False,
    max_bad_lines: float = 0.001,
    target_language: str = "en",
    cache_dir: str | Path | None = None,
) -> dict[str, Dataset] | dict[str, IterableDataset]:
    """One dataset a language, columns `source` and `target` (strings); files of one language follow each other.

    Streams have the column `row` (str) too, which names the pair whatever becomes of the stream's order: its number in
    the language's file, from 0, as the row of a map-style dataset; with several files `"name:number"`.

    Args:
        streaming: False reads everything once into Arrow files in `cache_dir`, memory mapped, and reuses them while
            paths, sizes and modification times stay the same. True reads on the fly, in file order, resumable; a bad
            file is then found only when its turn comes.
        max_bad_lines: share of a file's lines that may be bad.
        cache_dir: `dap` in the cache folder of `datasets` (`HF_DATASETS_CACHE`) unless given.

    Raises:
        ValueError, FileNotFoundError: as `find_bitext` and `read_tables`.
    """
    found = find_bitext(paths, target_language)
    if streaming:
        return {language: _stream(files, max_bad_lines) for language, files in found.items()}
    folder = Path(cache_dir or Path(datasets_config.HF_DATASETS_CACHE) / "dap")
    return {
        language: concatenate_datasets([_load_cached(file, max_bad_lines, folder) for file in files])
        for language, files in found.items()
    }


def _stream(files: list[BitextFile], max_bad_lines: float) -> IterableDataset:
    LineAudit("", max_bad_lines)  # a wrong limit is found now, not at the first batch
    shards = [(replace(file, streaming=True), name) for file, name in zip(files, _names(files), strict=True)]
    arguments = {"shards": shards, "max_bad_lines": max_bad_lines}
    return IterableDataset.from_generator(_read_all, features=STREAM_FEATURES, gen_kwargs=arguments)


def _read_all(shards: list[tuple[BitextFile, str]], max_bad_lines: float) -> Iterator[dict[str, str]]:
    for file, name in shards:
        for number, pair in enumerate(read_pairs(file, max_bad_lines)):
            yield {**pair, "row": f"{name}{number}"}


def _names(files: list[BitextFile]) -> list[str]:
    """What precedes the number in the rows of each file: nothing for one file, else its name, below what all share."""
    if len(files) == 1:
        return [""]
    folders = [os.path.dirname(file.paths[0]) for file in files if file.format != "hub"]
    shared = os.path.commonpath(folders) if folders else ""
    return [f"{file if file.format == 'hub' else os.path.relpath(file.paths[0], shared)}:" for file in files]


def _load_cached(file: BitextFile, max_bad_lines: float, folder: Path) -> Dataset:
    """The pairs in an Arrow file, which appears under its name only when it is whole."""
    path = folder / f"{file.language}-{file.target_language}-{_fingerprint(file, max_bad_lines)}.arrow"
    if path.exists():
        return Dataset.from_file(str(path))
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    schema = FEATURES.arrow_schema
    try:
        with pa.OSFile(str(unfinished), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
            for table in read_tables(file, max_bad_lines):
                writer.write_table(pa.table([table["source"], table["target"]], schema=schema), BATCH)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return Dataset.from_file(str(path))


def _fingerprint(file: BitextFile, max_bad_lines: float) -> str:
    """Changes with the path, size or modification time of a file, and with everything that shapes what is read."""
    if file.format == "hub":
        state: list[Any] = [hub_dataset(file.paths[0], file.config, False)._fingerprint]
    else:
        state = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, map(disk_path, file.paths))]
    return hashlib.sha256(repr((CACHE_VERSION, file, max_bad_lines, state)).encode()).hexdigest()[:16]
