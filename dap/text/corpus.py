"""Load parallel text as datasets, one a language: cached in Arrow files and memory mapped, or streamed."""

import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets
from datasets import config as datasets_config

from dap.file_io import whole_file
from dap.text.archives import disk_path
from dap.text.find_files import BitextFile, find_bitext, hub_dataset
from dap.text.formats import LineAudit, read_pairs, read_tables

FEATURES = Features({"source": Value("string"), "target": Value("string")})
STREAM_FEATURES = Features({**FEATURES, "row": Value("string")})
CACHE_VERSION = 1


def count_pairs(files: Iterable[BitextFile], max_bad_lines: float = 0.001) -> int:
    """The number of pairs in these files, by reading them once."""
    return sum(
        len(table) for file in files for table in read_tables(file, LineAudit(file, max_bad_lines))
    )


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
        language: concatenate_datasets(
            [_load_cached(file, max_bad_lines, folder) for file in files]
        )
        for language, files in found.items()
    }


def _stream(files: list[BitextFile], max_bad_lines: float) -> IterableDataset:
    """A stream whose rows begin with nothing for one file, else with the file's name below what all share."""
    LineAudit(files, max_bad_lines)  # a wrong limit is found now, not at the first batch
    folders = [os.path.dirname(file.paths[0]) for file in files if file.format != "hub"]
    shared = os.path.commonpath(folders) if folders else ""
    names = [
        f"{file if file.format == 'hub' else os.path.relpath(file.paths[0], shared)}:"
        for file in files
    ]
    shards = [
        (replace(file, streaming=True), name if len(files) > 1 else "")
        for file, name in zip(files, names)
    ]
    arguments = {"shards": shards, "max_bad_lines": max_bad_lines}
    return IterableDataset.from_generator(_read_all, features=STREAM_FEATURES, gen_kwargs=arguments)


def _read_all(
    shards: list[tuple[BitextFile, str]], max_bad_lines: float
) -> Iterator[dict[str, str]]:
    for file, name in shards:
        for number, pair in enumerate(read_pairs(file, max_bad_lines)):
            yield {**pair, "row": f"{name}{number}"}


def _load_cached(file: BitextFile, max_bad_lines: float, folder: Path) -> Dataset:
    """The pairs in an Arrow file, whose name changes with the file's state and with all that shapes what is read."""
    if file.format == "hub":
        state: list[Any] = [hub_dataset(file.paths[0], file.config, False)._fingerprint]
    else:
        state = [
            (stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, map(disk_path, file.paths))
        ]
    key = hashlib.sha256(repr((CACHE_VERSION, file, max_bad_lines, state)).encode()).hexdigest()[
        :16
    ]
    path = folder / f"{file.language}-{file.target_language}-{key}.arrow"
    if not path.exists():
        schema = FEATURES.arrow_schema
        with whole_file(path) as sink, pa.ipc.new_stream(sink, schema) as writer:
            for table in read_tables(file, LineAudit(file, max_bad_lines)):
                writer.write_table(pa.table([table["source"], table["target"]], schema=schema))
    return Dataset.from_file(str(path))
