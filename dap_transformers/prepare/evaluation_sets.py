"""Read the sentences of evaluation sets, in any form, for the leak check."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dap_transformers.errors import UserError, reading
from dap_transformers.files import plain_suffix
from dap_transformers.prepare.filters import repair
from dap_transformers.text.archives import (
    decoded_lines,
    disk_path,
    list_folder,
    read_sentences,
)
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import FORMATS, read_pairs
from dap_transformers.text_keys import BLANKS, is_blank

#: Formats of parallel text whose lines are read here, so that also Moses sides of different length
#: and JSONL without pairs can be checked.
READ_AS_LINES = {"tsv", "jsonl", "moses"}


def read_evaluation(paths: Sequence[str | Path], target_language: str = "en") -> list[str]:
    """Read the different sentences of evaluation sets, repaired as training text is (`repair`).

    - JSONL: every string in the records is a sentence.
    - Parquet, PO, TMX, archives and Hub datasets: both sides of the pairs that `find_bitext` finds.
    - Any other file is plain text: one sentence per line, or several between tabs, such as XNLI's
      premise and hypothesis.

    The subfolders of folders are not searched. Repeated and blank sentences are left out.
    """
    found: dict[str, None] = {}  # a set that keeps the order
    for path in map(Path, paths):
        texts: list[str] = []
        for file in list_folder(path) if path.is_dir() else [path]:
            texts += _sentences(file, target_language)
        repaired = repair(pl.Series(texts, dtype=pl.String))
        visible = repaired.filter(repaired.str.contains(f"[^{BLANKS}]"))
        if not len(visible):
            hint = "; subfolders are not searched" if path.is_dir() else ""
            raise UserError(f"{path}: no evaluation sentence{hint}")
        found |= dict.fromkeys(visible)
    return list(found)


def _sentences(path: Path, target_language: str) -> Iterator[str]:
    """Yield the sentences of a file or Hub dataset, including blank ones."""
    kind = plain_suffix(path).removeprefix(".")
    is_parallel = kind in {"zip", *FORMATS} - READ_AS_LINES
    if is_parallel or not disk_path(path).is_file():
        for file in itertools.chain(*find_bitext(path, target_language, split=None).values()):
            for pair in read_pairs(file):
                yield from pair.values()
    elif kind == "jsonl":
        for number, line in enumerate(decoded_lines(path), 1):
            if not is_blank(line):
                with reading(f"{path}, line {number}"):
                    yield from _strings(json.loads(line))
    else:
        for line in decoded_lines(path) if kind == "tsv" else read_sentences(path):
            yield from line.split("\t")


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a JSON value, at any depth, without the names of fields."""
    if isinstance(value, str):
        yield value.encode("utf-8", "replace").decode()  # "\\ud800" is valid JSON but no text
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
