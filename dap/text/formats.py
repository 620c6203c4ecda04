"""Read files of parallel text in every format, pair by pair (no models, no tokenizers); fast: `dap.text.tables`.

Text is taken as it stands: quotes are text, and only a line feed (or CR + LF) ends a line, so that U+2028 or U+0085
inside a sentence do not tear it apart. In TMX and PO, where a sentence may be wrapped, a line break is a space.

A *bad line* has one column, an empty side, invalid UTF-8 or invalid JSON. Bad lines are logged, counted and skipped
while their share of a file stays within `max_bad_lines`. The share is judged at the end of the file: one bad line
among the first ten says nothing about a file of a million. Reading stops earlier only when there are more bad lines
than the first 100,000 lines (or all lines read so far, if more) may have, as a longer file is judged from there on.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset, load_dataset

from dap.errors import UserError
from dap.text.archives import count_lines, invalid_utf8, open_file, read_lines
from dap.text.tmx import SNIFFED, base_language, read_entries, read_units

logger = logging.getLogger(__name__)

JUDGE_AFTER = 100_000  # lines
SHOWN = 5  # bad lines quoted in a warning or an error, per file
BLOCK = 10_000  # rows taken at once where a format is read row by row


@dataclass(frozen=True)
class BitextFile:
    """Where the pairs of one language are.

    Attributes:
        language: source language, ISO 639-1 where there is such a code among the 36, else the code as given.
        paths: one path; the source side and the target side for `"moses"`; the dataset id for `"hub"`.
        format: `"tsv"`, `"jsonl"`, `"parquet"`, `"moses"`, `"tmx"`, `"po"` or `"hub"`.
        target_language: target language, `"en"` unless asked otherwise.
        config: configuration of a dataset of the Hub.
        streaming: read a dataset of the Hub without downloading it first.
    """

    language: str
    paths: tuple[str, ...]
    format: str
    target_language: str = "en"
    config: str | None = None
    streaming: bool = False

    def __str__(self) -> str:
        return " + ".join(self.paths) + (f":{self.config}" if self.config else "")


class LineAudit:
    """Counts the bad lines of one file and raises when they are too many (see the module's docstring).

    Args:
        name: what messages call the file.
        max_bad_lines: share of its lines that may be bad.
        quiet: warn of none: those of a stream's later passes are known, those of a block are told by `take`.
        lines: lines of the file, where they are known; reading then stops at the first bad line that is one too many.
        elsewhere: bad lines of blocks that are read apart from this.
    """

    def __init__(
        self, name: str, max_bad_lines: float, quiet: bool = False, lines: int | None = None, elsewhere: int = 0
    ) -> None:
        if not 0.0 <= max_bad_lines <= 1.0:
            raise UserError(f"max_bad_lines is the share of lines that may be bad, 0 to 1, not {max_bad_lines}")
        self.name, self.limit, self.quiet = name, max_bad_lines, quiet
        self.bad = self.lines = 0  # bad ones, and the number of the last one seen
        self.first: list[tuple[int, str]] = []
        self._all, self._elsewhere = lines, elsewhere

    def reject(self, line: int, reason: object) -> None:
        """Counts line number `line` (from 1) as bad."""
        self.take(1, [(line, str(reason))])
        bad = self.bad + self._elsewhere
        if bad > self.limit * (self._all or max(line, JUDGE_AFTER)):
            self._stop(bad, f"{self._all}" if self._all else f"first {line}")

    def take(self, bad: int, first: Iterable[tuple[int, str]]) -> None:
        """Counts so many lines as bad, and warns of the first ones, (line, reason) each."""
        for number, (line, reason) in enumerate(first, self.bad + 1):
            if number <= SHOWN:
                self.first.append((line, reason))
            level = logging.DEBUG if self.quiet else logging.WARNING if number <= SHOWN else logging.INFO
            logger.log(level, "%s, line %d skipped: %s", self.name, line, reason)
        self.bad += bad

    def finish(self, lines: int) -> None:
        """The verdict over the whole file of `lines` lines."""
        if self.bad > self.limit * lines:
            self._stop(self.bad, f"first {lines}")
        if self.bad and not self.quiet:
            logger.warning("%s: %d of %d lines skipped (limit %.3g%%)", self.name, self.bad, lines, 100 * self.limit)

    def _stop(self, bad: int, lines: str) -> None:
        shown = [f"line {line}: {reason}" for line, reason in self.first]
        quoted = "\n  ".join(shown + ["…"] * (bad > len(shown)))
        raise UserError(
            f"{self.name}: {bad} of the {lines} lines are bad, more than max_bad_lines={self.limit:g} "
            f"({100 * self.limit:g}%) allows:\n  {quoted}\nRepair the file, or raise max_bad_lines to skip them."
        ) from None


# Pair by pair

Row = Any  # bytes of a line, or the two sides as bytes, text or whatever a file holds in their place


def read_pairs(file: BitextFile, max_bad_lines: float = 0.001) -> Iterator[dict[str, str]]:
    """The pairs of one file in its order, as `{"source": …, "target": …}`.

    Args:
        max_bad_lines: share of the file's lines that may be bad (0 to 1); 0 stops at the first one.

    Raises:
        ValueError: too many bad lines, not a single pair, sides of different length, damaged file, missing columns.
    """
    for _, source, target in numbered_pairs(file, max_bad_lines):
        yield {"source": source, "target": target}


def numbered_pairs(
    file: BitextFile, max_bad_lines: float = 0.001, quiet: bool = False
) -> Iterator[tuple[int, str, str]]:
    """(line, source, target) as `read_pairs`; the line counts from 1, in TMX units, in parquet and on the Hub rows."""
    audit = LineAudit(str(file), max_bad_lines, quiet)
    rows, parse = READERS[file.format]
    pairs = 0
    for pair in parse_rows(rows(file), parse, audit):
        pairs += 1
        yield pair
    finish_file(file, audit, pairs)


def parse_rows(
    rows: Iterable[tuple[int, Row]], parse: Callable[[Row], tuple[str, str]], audit: LineAudit
) -> Iterator[tuple[int, str, str]]:
    """(line, source, target) of the rows that a format's parser takes; the audit counts the others."""
    for number, row in rows:
        audit.lines = number
        try:
            source, target = parse(row)
        except UnicodeDecodeError as error:
            audit.reject(number, f"{invalid_utf8(error)} of the line")
        except ValueError as error:
            audit.reject(number, error)
        else:
            yield number, source, target


def finish_file(file: BitextFile, audit: LineAudit, pairs: int) -> None:
    """The verdict over a file that gave `pairs` pairs; raises `ValueError` for too many bad lines or no pair."""
    audit.finish(audit.lines)
    if not pairs:
        raise UserError(f"{file}: holds no pair of language {file.language!r}; remove the file or fill it")


def _parse_tsv(line: bytes) -> tuple[str, str]:
    cells = line.decode().split("\t", 2)
    if len(cells) < 2:
        raise UserError("one column, expected source<TAB>target")
    return _both(cells[0], cells[1])


def _parse_json(line: bytes) -> tuple[str, str]:
    try:
        record = json.loads(line.decode())
    except RecursionError:
        raise UserError("nested too deeply") from None
    if not (isinstance(record, dict) and {"source", "target"} <= record.keys()):
        raise UserError('expected an object {"source": …, "target": …}')
    source, target = _both(record["source"], record["target"])
    f"{source}{target}".encode()  # "\ud800" is valid JSON but no text: UnicodeEncodeError, a ValueError
    return source, target


def _parse_sides(sides: tuple[Any, Any]) -> tuple[str, str]:
    source, target = (side.decode() if isinstance(side, bytes) else side for side in sides)
    return _both(source, target)


def _both(source: Any, target: Any) -> tuple[str, str]:
    if type(source) is type(target) is str and source and target and not (source.isspace() or target.isspace()):
        return source, target
    side, text = ("target", target) if isinstance(source, str) and source.strip() else ("source", source)
    raise UserError(f"empty {side} side" if isinstance(text, str) else f"{side} side is {text!r}, expected text")


def _line_rows(file: BitextFile) -> Iterator[tuple[int, bytes]]:
    return enumerate(read_lines(file.paths[0]), 1)


def _moses_rows(file: BitextFile) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    source, target = file.paths
    check_lengths(file, count_lines(source), count_lines(target))
    return enumerate(zip(read_lines(source), read_lines(target), strict=True), 1)


def check_lengths(file: BitextFile, source: int, target: int) -> None:
    """Raises `ValueError` where the sides have different numbers of lines."""
    if source != target:
        raise UserError(
            f"the two sides differ in length: {file.paths[0]} has {source} lines, {file.paths[1]} has {target}; "
            f"line i of one must translate line i of the other"
        )


def _parquet_rows(file: BitextFile) -> Iterator[tuple[int, tuple[Any, Any]]]:
    blocks = parquet_columns(file)
    return enumerate((pair for sides in blocks for pair in zip(*(side.to_pylist() for side in sides))), 1)


def parquet_columns(file: BitextFile, groups: Iterable[int] | None = None) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Both columns, of all or some row groups; text as its bytes."""
    with open_parquet(file) as table:
        names = table.schema_arrow.names
        if not {"source", "target"} <= set(names):
            raise UserError(f"{file}: columns are {names}; expected 'source' and 'target': rename them")
        for block in table.iter_batches(BLOCK, row_groups=groups, columns=["source", "target"]):
            yield _as_bytes(block["source"]), _as_bytes(block["target"])


@contextmanager
def open_parquet(file: BitextFile) -> Iterator[pq.ParquetFile]:
    """A Parquet file.

    Raises:
        ValueError: damaged, in the `with` statement or while its block reads.
    """
    try:
        with pq.ParquetFile(file.paths[0]) as table:
            yield table
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{file}: damaged or no Parquet file ({error}); fetch or write it again") from error


def _as_bytes(column: pa.Array) -> pa.Array:
    column = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
    text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    return column.cast(pa.large_binary()) if text else column


def _tmx_rows(file: BitextFile) -> Iterator[tuple[int, tuple[str, str]]]:
    """Every source variant of a unit with every target variant; the log counts those without text."""
    known: set[str] = set()
    late: set[str] = set()
    empty = 0
    with open_file(file.paths[0]) as stream:
        for number, unit in enumerate(read_units(stream, file.paths[0]), 1):
            if number <= SNIFFED:
                known.update(unit)
            elif file.target_language in unit:
                late.update(unit.keys() - known)
            for pair in product(unit.get(file.language, ()), unit.get(file.target_language, ())):
                if all(pair):
                    yield number, pair
                else:
                    empty += 1
    if empty:
        logger.info("%s: %d pairs left out: a segment is empty", file, empty)
    if late:
        _warn_of_late(str(file), ", ".join(sorted(late)))


@cache  # once a file, not once for each of its languages
def _warn_of_late(name: str, languages: str) -> None:
    logger.warning(
        "%s: the languages %s are not read, as its first %d units have none of them: split the file, or move one such "
        "unit to its start",
        name,
        languages,
        SNIFFED,
    )


def _po_rows(file: BitextFile) -> Iterator[tuple[int, tuple[str, str]]]:
    with open_file(file.paths[0]) as stream:
        yield from read_entries(stream, file.paths[0])


def hub_dataset(dataset: str, config: str | None, streaming: bool) -> Dataset | IterableDataset:
    """The training split of a dataset of the Hub."""
    return load_dataset(dataset, config, split="train", streaming=streaming)


def _hub_rows(file: BitextFile) -> Iterator[tuple[int, tuple[Any, Any]]]:
    dataset = hub_dataset(file.paths[0], file.config, file.streaming)
    columns = dataset.column_names or list(next(iter(dataset), {}))  # a stream may not know them beforehand
    if "translation" not in columns and not {"source", "target"} <= set(columns):
        raise UserError(f"{file}: columns are {columns}; expected 'source' and 'target', or 'translation'")
    swapped = base_language((file.config or "").split("-")[0] or file.language) == file.target_language
    for number, record in enumerate(dataset, 1):
        if "translation" in record:
            sides = {base_language(code): text for code, text in record["translation"].items()}
            yield number, (sides.get(file.language), sides.get(file.target_language))
        else:
            sides = record["source"], record["target"]
            yield number, sides[::-1] if swapped else sides


READERS: dict[str, tuple[Callable[[BitextFile], Iterator[tuple[int, Row]]], Callable[[Row], tuple[str, str]]]] = {
    "tsv": (_line_rows, _parse_tsv),
    "jsonl": (_line_rows, _parse_json),
    "moses": (_moses_rows, _parse_sides),
    "parquet": (_parquet_rows, _parse_sides),
    "tmx": (_tmx_rows, _parse_sides),
    "po": (_po_rows, _parse_sides),
    "hub": (_hub_rows, _parse_sides),
}
