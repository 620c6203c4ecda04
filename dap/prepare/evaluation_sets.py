"""Read the sentences of evaluation sets in whatever form they come, for the leak check (no models)."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from dap.errors import UserError
from dap.prepare.filters import repair_texts
from dap.text import disk_path, find_bitext, list_folder, read_pairs, read_sentences

#: What is no text by lines; taken for it, its sentences would never be found.
_NO_LINES = (".csv", ".json", ".xml")


def read_evaluation(paths: Sequence[str | Path]) -> list[str]:
    """Sentences of evaluation sets, repaired as training text is (`filters.repair`), in no particular order.

    Args:
        paths: files, folders and Hub datasets. Of JSONL every string in the records is taken; of Parquet, PO, TMX,
            archives and the Hub the parallel text that `find_bitext` finds; all else is plain text, one sentence a
            line, or several between tabs (such as XNLI's premise and hypothesis). So the sides of Moses pairs may be
            of different length, as BUCC's are.

    Raises:
        ValueError, FileNotFoundError: as `find_bitext`, `read_pairs` and `read_sentences`; a file that is neither
            parallel text nor lines; broken JSON; no sentence at all.
    """
    files = [
        file
        for path in map(Path, paths)
        for file in (list_folder(path) if path.is_dir() else [path])
    ]
    texts = [text for file in files for text in _sentences(file)]
    repaired = repair_texts(pl.Series(texts, dtype=pl.String))
    sentences = repaired.filter(repaired != "").unique(maintain_order=True).to_list()
    if paths and not sentences:
        raise UserError(f"--evaluation_data {' '.join(map(str, paths))} holds no sentence")
    return sentences


def _sentences(path: Path) -> Iterator[str]:
    """The sentences of a file or of a Hub dataset, blank ones included."""
    kind = (path.with_suffix("") if path.suffix in (".gz", ".xz") else path).suffix.lower()
    if kind in _NO_LINES:
        raise UserError(
            f"{path}: {kind} is not read for evaluation sentences; give lines of text, JSONL, or parallel text under "
            "a name that tells its language (de-en.parquet)"
        )
    if kind in (".parquet", ".po", ".tmx", ".zip") or not disk_path(path).is_file():
        for file in (file for files in find_bitext(path).values() for file in files):
            if file.format in ("tsv", "jsonl", "moses"):  # of an archive
                yield from (text for side in file.paths for text in _sentences(Path(side)))
            else:
                yield from (side for pair in read_pairs(file) for side in pair.values())
        return
    for number, line in enumerate(read_sentences(path), 1):
        if kind != ".jsonl":
            yield from line.split("\t")
        elif line.strip():
            try:
                yield from _strings(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise UserError(
                    f"{path}, line {number}: no JSON ({error}); repair the line"
                ) from error


def _strings(value: Any) -> Iterator[str]:
    """All strings in a record, names of its fields left out."""
    if isinstance(value, str):
        yield value.encode("utf-8", "replace").decode()  # "\\ud800" is valid JSON but no text
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
