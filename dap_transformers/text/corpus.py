"""Load parallel text as one dataset per language, from memory-mapped Arrow files."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from dap_transformers.files import content_digest, whole_file
from dap_transformers.text.archives import disk_path
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import (
    TABLE,
    BitextFile,
    LineAudit,
    hub_dataset,
    read_tables,
)

if TYPE_CHECKING:
    from datasets import Dataset

#: Part of the name of cache files. Raise it when their content changes.
CACHE_VERSION = 2


def load_bitext(
    paths: str | Path | Sequence[str | Path],
    max_bad_lines: float = 0.001,
    target_language: str = "en",
    cache_dir: str | Path | None = None,
    split: str = "train",
) -> dict[str, "Dataset"]:
    """Load one dataset per language, with the columns `source` and `target`.

    If a language has several files, its dataset holds the pairs of one file after the other. The
    text is read once into memory-mapped Arrow files, which are used again while the paths and the
    content stay the same.

    Args:
        max_bad_lines: share of a file's lines that may be malformed, 0 to 1. They are skipped.
        cache_dir: folder of the Arrow files. Default: `dap` in `HF_DATASETS_CACHE`.
        split: which files of a folder are read if it has several splits (`find_bitext`).

    Returns:
        Source language code -> dataset.
    """
    from datasets import concatenate_datasets
    from datasets import config as datasets_config

    found = find_bitext(paths, target_language, split)
    folder = Path(cache_dir or Path(datasets_config.HF_DATASETS_CACHE) / "dap")
    loaded = {}
    for language, files in found.items():
        parts = [_load_cached(file, max_bad_lines, folder) for file in files]
        loaded[language] = concatenate_datasets(parts)
    return loaded


def spread_rows(part: "Dataset", most: int) -> "Dataset":
    """Return at most `most` rows of a text, evenly spread."""
    return part.select(np.linspace(0, len(part) - 1, min(len(part), most)).astype(int))


def _load_cached(file: BitextFile, max_bad_lines: float, folder: Path) -> "Dataset":
    """Load the pairs of a file as a memory-mapped dataset. Write its Arrow file if it is absent.

    The name of the Arrow file has a hash of everything that decides its content: the arguments and
    the content of the text. So changed text gives another file.
    """
    from datasets import Dataset

    if file.format == "hub":
        state = [hub_dataset(file.paths[0], streaming=False)._fingerprint]
    else:
        state = [content_digest(disk_path(path)) for path in file.paths]
    shaping = repr((CACHE_VERSION, file, max_bad_lines, state))
    key = hashlib.sha256(shaping.encode()).hexdigest()[:16]

    path = folder / f"{file.language}-{file.target_language}-{key}.arrow"
    if not path.exists():
        with whole_file(path) as sink, pa.ipc.new_stream(sink, TABLE.remove(0)) as writer:
            for table in read_tables(file, LineAudit(file, max_bad_lines)):
                writer.write_table(table.drop_columns("line"))
    return Dataset.from_file(str(path))
