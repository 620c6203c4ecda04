"""Load parallel text as one dataset per language, from memory-mapped Arrow files or streamed."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from dap_transformers.files import content_digest, whole_file
from dap_transformers.text.archives import disk_path
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import (
    SIDES,
    BitextFile,
    LineAudit,
    hub_dataset,
    read_pairs,
    read_tables,
)

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

#: Part of the name of cache files. Raise it when their content changes.
CACHE_VERSION = 2


def count_pairs(files: Iterable[BitextFile], max_bad_lines: float = 0.001) -> int:
    """Return the number of valid pairs in all files together, by reading the files once."""
    count = 0
    for file in files:
        for table in read_tables(file, LineAudit(file, max_bad_lines)):
            count += len(table)
    return count


def load_bitext(
    paths: str | Path | Sequence[str | Path],
    streaming: bool = False,
    max_bad_lines: float = 0.001,
    target_language: str = "en",
    cache_dir: str | Path | None = None,
) -> dict[str, "Dataset"] | dict[str, "IterableDataset"]:
    """Load one dataset per language, with the columns `source` and `target`.

    If a language has several files, its dataset holds the pairs of one file after the other.
    Streams also have the column `row`, which identifies a pair even after shuffling. It is a
    string: the number of the pair among the valid pairs of its file, from 0. If the language has
    several files, the number of the file comes before it: `"1:20"` is in the second file.

    Args:
        streaming: if False, read everything once into memory-mapped Arrow files, and use these
            again while the paths and the content stay the same. If True, read the files in order
            while the stream is used, so that it can be resumed. A damaged file is then found only
            when its turn comes.
        max_bad_lines: share of a file's lines that may be malformed, 0 to 1. They are skipped.
        cache_dir: folder of the Arrow files. Default: `dap` in `HF_DATASETS_CACHE`.

    Returns:
        Source language code -> dataset. It is an `IterableDataset` if `streaming` is True.
    """
    from datasets import concatenate_datasets
    from datasets import config as datasets_config

    found = find_bitext(paths, target_language)
    if streaming:
        return {language: _stream(files, max_bad_lines) for language, files in found.items()}

    folder = Path(cache_dir or Path(datasets_config.HF_DATASETS_CACHE) / "dap")
    loaded = {}
    for language, files in found.items():
        parts = [_load_cached(file, max_bad_lines, folder) for file in files]
        loaded[language] = concatenate_datasets(parts)
    return loaded


def _stream(files: list[BitextFile], max_bad_lines: float) -> "IterableDataset":
    """Return a stream of the pairs of files, in their order."""
    from datasets import Features, IterableDataset, Value

    LineAudit(files, max_bad_lines)  # refuses a wrong share now, not at the first batch

    shards = []
    for number, file in enumerate(files):
        prefix = f"{number}:" if len(files) > 1 else ""
        shards.append((replace(file, streaming=True), prefix))

    return IterableDataset.from_generator(
        _read_shards,
        features=Features({name: Value("string") for name in (*SIDES, "row")}),
        gen_kwargs={"shards": shards, "max_bad_lines": max_bad_lines},
    )


def _read_shards(
    shards: list[tuple[BitextFile, str]], max_bad_lines: float
) -> Iterator[dict[str, str]]:
    """Yield the pairs of files in order, as `{"source": …, "target": …, "row": …}`."""
    for file, prefix in shards:
        for number, pair in enumerate(read_pairs(file, max_bad_lines)):
            yield {**pair, "row": f"{prefix}{number}"}


def _load_cached(file: BitextFile, max_bad_lines: float, folder: Path) -> "Dataset":
    """Load the pairs of a file as a memory-mapped dataset. Write its Arrow file if it is absent.

    The name of the Arrow file has a hash of everything that decides its content: the arguments and
    the content of the text. So changed text gives another file.
    """
    from datasets import Dataset

    if file.format == "hub":
        state = [hub_dataset(file.paths[0], file.config, False)._fingerprint]
    else:
        state = [content_digest(disk_path(path)) for path in file.paths]
    shaping = repr((CACHE_VERSION, file, max_bad_lines, state))
    key = hashlib.sha256(shaping.encode()).hexdigest()[:16]

    path = folder / f"{file.language}-{file.target_language}-{key}.arrow"
    if not path.exists():
        schema = pa.schema({name: pa.string() for name in SIDES})
        with whole_file(path) as sink, pa.ipc.new_stream(sink, schema) as writer:
            for table in read_tables(file, LineAudit(file, max_bad_lines)):
                writer.write_table(pa.table([table[name] for name in SIDES], schema=schema))
    return Dataset.from_file(str(path))
