"""Read the pairs of a file: one function a format, one check and one audit of the bad lines for all of them.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dap.errors import SHOWN, UserError, loading
from dap.languages import base_language
from dap.text.archives import decode, decode_line, read_lines
from dap.text.find_files import BitextFile, hub_dataset
from dap.text.tmx_po import catalogue_pairs, memory_pairs

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)  # a later pass over the same file has nothing new to say

JUDGE_AFTER = 100_000  # lines
BATCH = 10_000  # rows of a table

#: Columns of the tables: the line from 1 (in TMX the unit, in Parquet and on the Hub the row), and the two sides.
TABLE = pa.schema({"line": pa.int64(), "source": pa.string(), "target": pa.string()})


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
            raise UserError(
                f"max_bad_lines is the share of lines that may be bad, 0 to 1, not {max_bad_lines}"
            )
        self.file, self.limit = file, max_bad_lines
        self.bad = self.lines = 0
        self._first: list[str] = []

    def reject(self, reason: object) -> None:
        """Counts line number `lines` as bad."""
        self.bad += 1
        tell = logger.info
        if self.bad <= SHOWN:
            self._first.append(f"line {self.lines}: {reason}")
            tell = _warn_once
        tell("%s, line %d skipped: %s", self.file, self.lines, str(reason))
        self.judge(max(self.lines, JUDGE_AFTER))

    def judge(self, lines: int) -> None:
        """Raises `ValueError` if there are more bad lines than `lines` lines may have."""
        if self.bad <= self.limit * lines:
            return
        remedy = "Repair the file" + ", or raise max_bad_lines to skip them" * (self.limit > 0)
        quoted = "\n  ".join(self._first + ["…"] * (self.bad > SHOWN))
        raise UserError(
            f"{self.file}: {self.bad} of the first {self.lines} lines are bad, more than max_bad_lines="
            f"{self.limit:g} ({100 * self.limit:g}%) allows:\n  {quoted}\n"
            f"{remedy}."
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
    read, parse = FORMATS[file.format]
    contents, pairs = read(file), 0
    while batch := list(islice(contents, BATCH)):
        lines, sources, targets = columns = [], [], []
        for line, content in batch:
            audit.lines = line
            try:
                source, target = parse(content)
                if not source.strip() or not target.strip():
                    raise UserError(f"empty {'target' if source.strip() else 'source'} side")
            except (ValueError, RecursionError) as error:
                audit.reject(error)
            else:
                lines.append(line)
                sources.append(source)
                targets.append(target)
        pairs += len(lines)
        if lines:
            yield pa.table(columns, schema=TABLE)
    audit.judge(audit.lines)
    if audit.bad:
        _warn_once(
            "%s: %d of %d lines skipped (limit %.3g%%)",
            file,
            audit.bad,
            audit.lines,
            100 * audit.limit,
        )
    if not pairs:
        raise UserError(
            f"{file}: holds no pair of language {file.language!r}; remove the file or fill it"
        )


# One reader a format, which gives what each line holds, and one function that makes a pair of that


def _lines(file: BitextFile) -> Iterator[tuple[int, bytes]]:
    return enumerate(read_lines(file.paths[0]), 1)


def _cells(line: bytes) -> Sequence[str]:
    source, tab, rest = decode_line(line).partition("\t")
    if not tab:
        raise UserError("one column, expected source<TAB>target")
    return source, rest.partition("\t")[0]


def _record(line: bytes) -> Sequence[Any]:
    record = json.loads(decode_line(line))  # Arrow's reader takes all lines of a file or none
    try:
        source, target = record["source"], record["target"]
    except (KeyError, TypeError):
        raise UserError('expected an object {"source": …, "target": …}') from None
    f"{source}{target}".encode()  # fails for "\ud800", valid JSON but no text
    return _texts((source, target))


def _texts(sides: Sequence[Any]) -> Sequence[str]:
    """The sides, if they are text or its bytes."""
    for name, side in zip(("source", "target"), sides):
        if not isinstance(side, str | bytes):
            raise UserError(f"{name} side is {side!r}, expected text")
    return [decode(side) if isinstance(side, bytes) else side for side in sides]


def _two_lines(file: BitextFile) -> Iterator[tuple[int, Sequence[bytes]]]:
    lengths = [sum(1 for _ in read_lines(path)) for path in file.paths]
    if lengths[0] != lengths[1]:
        raise UserError(
            f"the two sides differ in length: {file.paths[0]} has {lengths[0]} lines, {file.paths[1]} has "
            f"{lengths[1]}; line i of one must translate line i of the other"
        )
    return enumerate(zip(*map(read_lines, file.paths), strict=True), 1)


def _parquet_rows(file: BitextFile) -> Iterator[tuple[int, Sequence[bytes | None]]]:
    try:
        with pq.ParquetFile(file.paths[0]) as table:
            names = table.schema_arrow.names
            if [names.count(side) for side in ("source", "target")] != [1, 1]:
                raise UserError(
                    f"{file}: columns are {names}; expected 'source' and 'target', once each: rename them"
                )
            first = 1
            for block in table.iter_batches(BATCH, columns=["source", "target"]):
                sides = [
                    block[side].cast(pa.large_binary()).to_pylist() for side in ("source", "target")
                ]
                yield from enumerate(zip(*sides), first)
                first += len(block)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last of a column's name
        raise UserError(
            f"{file}: damaged or no Parquet file of text ({error}); fetch or write it again"
        ) from error


def _hub_rows(file: BitextFile) -> Iterator[tuple[int, Sequence[Any]]]:
    dataset = hub_dataset(file.paths[0], file.config, file.streaming)
    with loading("rows", file):  # where a stream breaks off the Hub's client raises anything
        columns = dataset.column_names or list(
            next(iter(dataset), {})
        )  # a stream may not know them beforehand
        if "translation" not in columns and not {"source", "target"} <= set(columns):
            raise UserError(
                f"{file}: columns are {columns}; expected 'source' and 'target', or 'translation'"
            )
        swapped = (
            base_language((file.config or "").split("-")[0] or file.language)
            == file.target_language
        )
        for number, record in enumerate(dataset, 1):
            if "translation" in record:
                sides = {base_language(code): text for code, text in record["translation"].items()}
                yield number, (sides.get(file.language), sides.get(file.target_language))
            else:
                pair = record["source"], record["target"]
                yield number, pair[::-1] if swapped else pair


FORMATS: dict[
    str, tuple[Callable[[BitextFile], Iterator[tuple[int, Any]]], Callable[[Any], Iterable[Any]]]
] = {
    "tsv": (_lines, _cells),
    "jsonl": (_lines, _record),
    "moses": (_two_lines, lambda sides: map(decode_line, sides)),
    "parquet": (_parquet_rows, _texts),
    "tmx": (lambda file: memory_pairs(file.paths[0], file.language, file.target_language), tuple),
    "po": (lambda file: catalogue_pairs(file.paths[0]), tuple),
    "hub": (_hub_rows, _texts),
}
