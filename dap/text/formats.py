"""Read the pairs of a file, as Arrow tables: one function a format, one audit of the bad lines for all of them.

Text is taken as it stands: quotes are text, and only a line feed (or CR + LF) ends a line, so that U+2028 or U+0085
inside a sentence do not tear it apart.

A *bad line* has one column, an empty side, a carriage return within, invalid UTF-8 or invalid JSON. Bad lines are
logged, counted and skipped while their share of a file stays within `max_bad_lines`. The share is judged at the end of
the file: one bad line among the first ten says nothing about a file of a million. Reading stops earlier only when
there are more bad lines than the first 100,000 lines (or all lines read so far, if more) may have, as a longer file is
judged from there on.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dap.errors import UserError, loading
from dap.languages import base_language
from dap.text.archives import not_text, not_utf8, read_lines
from dap.text.files import BitextFile, hub_dataset
from dap.text.tmx_po import catalogue_pairs, memory_pairs

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)  # a later pass over the same file has nothing new to say

JUDGE_AFTER = 100_000  # lines
SHOWN = 5  # bad lines quoted in a warning or an error, per file
BATCH = 10_000  # rows of a table before the bad ones are left out

#: Columns of the tables: the two sides, and the line from 1 (in TMX the unit, in Parquet and on the Hub the row).
TABLE = pa.schema({"source": pa.string(), "target": pa.string(), "line": pa.int64()})

Row = tuple[int, Any, Any]  # line, source, target: text, or what a file holds instead, or the error in reading it


@dataclass
class Batch:
    """Some rows of a file as columns.

    Attributes:
        sides: source and target, text or its bytes; null where there is none.
        explain: tells why a row, counted from 0, is no pair, where a side is null, blank or no UTF-8.
        lines: the lines of the rows, None where they follow the batch before one by one.
    """

    sides: Sequence[pa.Array]
    explain: Callable[[int], str | None]
    lines: Sequence[int] | None = None


class LineAudit:
    """Counts the bad lines of one file and raises when they are too many (see the module's docstring).

    Args:
        file: what messages call it.
        max_bad_lines: share of its lines that may be bad (0 to 1); 0 stops at the first one.

    Attributes:
        bad: bad lines so far.
        lines: the number of the last line seen.
    """

    def __init__(self, file: object, max_bad_lines: float) -> None:
        if not 0.0 <= max_bad_lines <= 1.0:
            raise UserError(f"max_bad_lines is the share of lines that may be bad, 0 to 1, not {max_bad_lines}")
        self.file, self.limit = file, max_bad_lines
        self.bad = self.lines = 0
        self._first: list[str] = []

    def reject(self, line: int, reason: object) -> None:
        """Counts line number `line` (from 1) as bad."""
        self.bad, self.lines = self.bad + 1, line
        tell = logger.info
        if self.bad <= SHOWN:
            self._first.append(f"line {line}: {reason}")
            tell = _warn_once
        tell("%s, line %d skipped: %s", self.file, line, str(reason))
        self.judge(max(line, JUDGE_AFTER))

    def judge(self, lines: int) -> None:
        """Raises `ValueError` if there are more bad lines than `lines` lines may have."""
        if self.bad <= self.limit * lines:
            return
        quoted = "\n  ".join(self._first + ["…"] * (self.bad > SHOWN))
        raise UserError(
            f"{self.file}: {self.bad} of the first {self.lines} lines are bad, more than max_bad_lines="
            f"{self.limit:g} ({100 * self.limit:g}%) allows:\n  {quoted}\n"
            f"Repair the file, or raise max_bad_lines to skip them."
        )


def read_pairs(file: BitextFile, max_bad_lines: float = 0.001) -> Iterator[dict[str, str]]:
    """The pairs of one file in its order, as `{"source": …, "target": …}`; arguments and errors as `read_tables`."""
    for table in read_tables(file, LineAudit(file, max_bad_lines)):
        yield from table.drop_columns("line").to_pylist()


def read_tables(file: BitextFile, audit: LineAudit) -> Iterator[pa.Table]:
    """The pairs of one file in its order, as tables with the columns of `TABLE`, of at most `BATCH` rows.

    Raises:
        ValueError: too many bad lines, not a single pair, sides of different length, damaged file, missing columns.
    """
    pairs = 0
    for batch in READERS[file.format](file):
        table = _check(batch, audit)
        pairs += len(table)
        if len(table):
            yield table
    audit.judge(audit.lines)
    if audit.bad:
        _warn_once("%s: %d of %d lines skipped (limit %.3g%%)", file, audit.bad, audit.lines, 100 * audit.limit)
    if not pairs:
        raise UserError(f"{file}: holds no pair of language {file.language!r}; remove the file or fill it")


def _check(batch: Batch, audit: LineAudit) -> pa.Table:
    """The pairs among the rows; the audit counts the others."""
    source, target = map(_decode, batch.sides)
    full = [pc.greater(pc.binary_length(pc.utf8_trim_whitespace(side)), 0) for side in (source, target)]
    clear = pc.fill_null(pc.and_(*full), False)
    lines = np.arange(audit.lines + 1, audit.lines + 1 + len(clear)) if batch.lines is None else batch.lines
    for row in np.flatnonzero(~np.asarray(clear)).tolist():
        audit.reject(int(lines[row]), batch.explain(row))
    audit.lines = int(lines[-1])
    return pa.table([source, target, lines], schema=TABLE).filter(clear)


def _decode(texts: pa.Array) -> pa.Array:
    """Strings; null stands for what is no valid UTF-8."""
    try:
        return texts.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array([None if text and not_utf8(text) else text for text in texts.to_pylist()], pa.string())


def _explain(source: Any, target: Any) -> str | None:
    """Why two sides, text or its bytes, are no pair; None where they are one."""
    for name, side in (("source", source), ("target", target)):
        if isinstance(side, Exception):
            return str(side)
        if isinstance(side, bytes) and (reason := not_utf8(side)):
            return reason
        text = side.decode() if isinstance(side, bytes) else side
        if not isinstance(text, str):
            return f"{name} side is {text!r}, expected text"
        if not text.strip():
            return f"empty {name} side"
    return None


# One function a format


def _batches(rows: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(islice(rows, BATCH)):
        yield batch


def _tsv(file: BitextFile) -> Iterator[Batch]:
    for lines in _batches(read_lines(file.paths[0])):
        cells = pc.split_pattern(_text(lines), "\t", max_splits=2)  # 2 sides, the rest
        cells = pc.list_slice(cells, 0, 2, return_fixed_size_list=True)  # null stands for what is not there
        yield Batch([pc.list_element(cells, 0), pc.list_element(cells, 1)], partial(_explain_line, lines))


def _text(lines: Sequence[bytes]) -> pa.Array:
    """Lines as strings; null stands for what is no text."""
    texts = _decode(pa.array(lines, pa.binary()))
    return pc.if_else(pc.match_substring(texts, "\r"), None, texts)


def _explain_line(lines: Sequence[bytes], row: int) -> str | None:
    if reason := not_text(lines[row]):
        return reason
    cells = lines[row].split(b"\t")
    return _explain(*cells[:2]) if len(cells) > 1 else "one column, expected source<TAB>target"


def _moses(file: BitextFile) -> Iterator[Batch]:
    lengths = [sum(1 for _ in read_lines(path)) for path in file.paths]
    if lengths[0] != lengths[1]:
        raise UserError(
            f"the two sides differ in length: {file.paths[0]} has {lengths[0]} lines, {file.paths[1]} has "
            f"{lengths[1]}; line i of one must translate line i of the other"
        )
    for sides in zip(*(_batches(read_lines(path)) for path in file.paths), strict=True):
        columns = list(map(_text, sides))
        yield Batch(columns, partial(_explain_sides, sides))


def _explain_sides(sides: Sequence[Sequence[bytes]], row: int) -> str | None:
    lines = [side[row] for side in sides]
    return next(filter(None, map(not_text, lines)), None) or _explain(*lines)


def _parquet(file: BitextFile) -> Iterator[Batch]:
    try:
        with pq.ParquetFile(file.paths[0]) as table:
            names = table.schema_arrow.names
            if [names.count(side) for side in ("source", "target")] != [1, 1]:
                raise UserError(f"{file}: columns are {names}; expected 'source' and 'target', once each: rename them")
            for block in table.iter_batches(BATCH, columns=["source", "target"]):
                sides = [block[side].cast(pa.large_binary()) for side in ("source", "target")]
                yield Batch(sides, lambda row, sides=sides: _explain(*(side[row].as_py() for side in sides)))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a column's name
        raise UserError(f"{file}: damaged or no Parquet file of text ({error}); fetch or write it again") from error


def _jsonl(file: BitextFile) -> Iterator[Row]:
    for number, line in enumerate(read_lines(file.paths[0]), 1):  # Arrow's reader takes all lines of a file or none
        try:
            if reason := not_text(line):
                raise UserError(reason)
            record = json.loads(line.decode())
            source, target = record["source"], record["target"]
            f"{source}{target}".encode()  # fails for "\ud800", valid JSON but no text
        except (KeyError, TypeError):
            yield number, UserError('expected an object {"source": …, "target": …}'), None
        except (ValueError, RecursionError) as error:
            yield number, error, None
        else:
            yield number, source, target


def _hub(file: BitextFile) -> Iterator[Row]:
    dataset = hub_dataset(file.paths[0], file.config, file.streaming)
    with loading("rows", file):  # where a stream breaks off the Hub's client raises anything
        columns = dataset.column_names or list(next(iter(dataset), {}))  # a stream may not know them beforehand
        if "translation" not in columns and not {"source", "target"} <= set(columns):
            raise UserError(f"{file}: columns are {columns}; expected 'source' and 'target', or 'translation'")
        swapped = base_language((file.config or "").split("-")[0] or file.language) == file.target_language
        for number, record in enumerate(dataset, 1):
            if "translation" in record:
                sides = {base_language(code): text for code, text in record["translation"].items()}
                yield number, sides.get(file.language), sides.get(file.target_language)
            elif swapped:
                yield number, record["target"], record["source"]
            else:
                yield number, record["source"], record["target"]


def _by_rows(read: Callable[[BitextFile], Iterator[Row]]) -> Callable[[BitextFile], Iterator[Batch]]:
    """A reader of batches, from one that gives row after row."""

    def read_batches(file: BitextFile) -> Iterator[Batch]:
        for rows in _batches(read(file)):
            lines, *sides = zip(*rows)
            texts = [[text if isinstance(text, str) else None for text in side] for side in sides]
            columns = [pa.array(side, pa.string()) for side in texts]
            yield Batch(columns, lambda row, rows=rows: _explain(*rows[row][1:]), lines)

    return read_batches


READERS: dict[str, Callable[[BitextFile], Iterator[Batch]]] = {
    "tsv": _tsv,
    "moses": _moses,
    "parquet": _parquet,
    "jsonl": _by_rows(_jsonl),
    "tmx": _by_rows(lambda file: memory_pairs(file.paths[0], file.language, file.target_language)),
    "po": _by_rows(lambda file: catalogue_pairs(file.paths[0])),
    "hub": _by_rows(_hub),
}
