"""Read files of parallel text in every format: pair by pair, or fast, as Arrow tables (no models, no tokenizers).

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
from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json
import pyarrow.parquet as pq
from datasets import Dataset, IterableDataset, load_dataset

from dap.archives import count_lines, invalid_utf8, line_blocks, open_file, read_lines
from dap.tmx import SNIFFED, base_language, read_entries, read_units

logger = logging.getLogger(__name__)

JUDGE_AFTER = 100_000  # lines
SHOWN = 5  # bad lines quoted in a warning or an error, per file
BLOCK = 10_000  # rows taken at once where a format is read row by row
LINE_FEED, TAB = 10, 9  # ASCII

SIDES = pa.schema({"source": pa.string(), "target": pa.string()})
#: Of the tables that `read_tables` gives.
TABLE = SIDES.append(pa.field("line", pa.int64()))


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

    A `quiet` one warns of none: those of a stream's later passes are known.
    """

    def __init__(self, name: str, max_bad_lines: float, quiet: bool = False) -> None:
        if not 0.0 <= max_bad_lines <= 1.0:
            raise ValueError(f"max_bad_lines is the share of lines that may be bad, 0 to 1, not {max_bad_lines}")
        self.name, self.limit, self.quiet = name, max_bad_lines, quiet
        self.bad = self.lines = 0  # bad ones, and the number of the last one seen
        self.first: list[str] = []

    def reject(self, line: int, reason: object) -> None:
        """Counts line number `line` (from 1) as bad."""
        self.bad += 1
        if self.bad <= SHOWN:
            self.first.append(f"line {line}: {reason}")
        level = logging.DEBUG if self.quiet else logging.WARNING if self.bad <= SHOWN else logging.INFO
        logger.log(level, "%s, line %d skipped: %s", self.name, line, reason)
        if self.bad > self.limit * max(line, JUDGE_AFTER):
            self._stop(line)

    def finish(self, lines: int) -> None:
        """The verdict over the whole file of `lines` lines."""
        if self.bad > self.limit * lines:
            self._stop(lines)
        if self.bad and not self.quiet:
            logger.warning("%s: %d of %d lines skipped (limit %.3g%%)", self.name, self.bad, lines, 100 * self.limit)

    def _stop(self, lines: int) -> None:
        quoted = "\n  ".join(self.first + ["…"] * (self.bad > len(self.first)))
        raise ValueError(
            f"{self.name}: {self.bad} of the first {lines} lines are bad, more than max_bad_lines={self.limit:g} "
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
    rows, parse = _READERS[file.format]
    pairs = 0
    for pair in _parse(rows(file), parse, audit):
        pairs += 1
        yield pair
    _finish(file, audit, pairs)


def _parse(
    rows: Iterable[tuple[int, Row]], parse: Callable[[Row], tuple[str, str]], audit: LineAudit
) -> Iterator[tuple[int, str, str]]:
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


def _finish(file: BitextFile, audit: LineAudit, pairs: int) -> None:
    audit.finish(audit.lines)
    if not pairs:
        raise ValueError(f"{file}: holds no pair of language {file.language!r}; remove the file or fill it")


def _parse_tsv(line: bytes) -> tuple[str, str]:
    cells = line.decode().split("\t", 2)
    if len(cells) < 2:
        raise ValueError("one column, expected source<TAB>target")
    return _both(cells[0], cells[1])


def _parse_json(line: bytes) -> tuple[str, str]:
    try:
        record = json.loads(line.decode())
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not (isinstance(record, dict) and {"source", "target"} <= record.keys()):
        raise ValueError('expected an object {"source": …, "target": …}')
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
    raise ValueError(f"empty {side} side" if isinstance(text, str) else f"{side} side is {text!r}, expected text")


def _line_rows(file: BitextFile) -> Iterator[tuple[int, bytes]]:
    return enumerate(read_lines(file.paths[0]), 1)


def _moses_rows(file: BitextFile) -> Iterator[tuple[int, tuple[bytes, bytes]]]:
    source, target = file.paths
    _check_lengths(file, count_lines(source), count_lines(target))
    return enumerate(zip(read_lines(source), read_lines(target), strict=True), 1)


def _check_lengths(file: BitextFile, source: int, target: int) -> None:
    if source != target:
        raise ValueError(
            f"the two sides differ in length: {file.paths[0]} has {source} lines, {file.paths[1]} has {target}; "
            f"line i of one must translate line i of the other"
        )


def _parquet_rows(file: BitextFile) -> Iterator[tuple[int, tuple[Any, Any]]]:
    blocks = _parquet_columns(file)
    return enumerate((pair for sides in blocks for pair in zip(*(side.to_pylist() for side in sides))), 1)


def _parquet_columns(file: BitextFile) -> Iterator[tuple[pa.Array, pa.Array]]:
    """Both columns, text as its bytes."""
    try:
        with pq.ParquetFile(file.paths[0]) as table:
            names = table.schema_arrow.names
            if not {"source", "target"} <= set(names):
                raise ValueError(f"{file}: columns are {names}; expected 'source' and 'target': rename them")
            for block in table.iter_batches(BLOCK, columns=["source", "target"]):
                yield _as_bytes(block["source"]), _as_bytes(block["target"])
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{file}: damaged or no Parquet file ({error}); fetch or write it again") from error


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
        raise ValueError(f"{file}: columns are {columns}; expected 'source' and 'target', or 'translation'")
    swapped = base_language((file.config or "").split("-")[0] or file.language) == file.target_language
    for number, record in enumerate(dataset, 1):
        if "translation" in record:
            sides = {base_language(code): text for code, text in record["translation"].items()}
            yield number, (sides.get(file.language), sides.get(file.target_language))
        else:
            sides = record["source"], record["target"]
            yield number, sides[::-1] if swapped else sides


_READERS: dict[str, tuple[Callable[[BitextFile], Iterator[tuple[int, Row]]], Callable[[Row], tuple[str, str]]]] = {
    "tsv": (_line_rows, _parse_tsv),
    "jsonl": (_line_rows, _parse_json),
    "moses": (_moses_rows, _parse_sides),
    "parquet": (_parquet_rows, _parse_sides),
    "tmx": (_tmx_rows, _parse_sides),
    "po": (_po_rows, _parse_sides),
    "hub": (_hub_rows, _parse_sides),
}


# As tables


@dataclass
class _Rows:
    """Some rows of a file, n of them, split into whole columns; those with `clear` False are parsed one by one.

    Attributes:
        sides: source and target, strings or bytes, n each; where nothing is clear, they are not looked at.
        clear: (n,) bool: both sides are there, and valid UTF-8.
        row: the i-th one as the format's parser takes it.
    """

    sides: tuple[pa.Array, pa.Array]
    clear: np.ndarray
    row: Callable[[int], Row]


def read_tables(file: BitextFile, max_bad_lines: float = 0.001, rows: int = 100_000) -> Iterator[pa.Table]:
    """The pairs of `read_pairs`, many times as fast: tables of at most `rows` pairs (columns: `TABLE`).

    `line` is the line or row of the file, from 1 (in TMX the number of the unit). Sides of different length are found
    only where the shorter one ends: what was read before is then worth nothing.

    Raises:
        ValueError: as `read_pairs`.
    """
    audit = LineAudit(str(file), max_bad_lines)
    if file.format in _COLUMNS:
        tables = _fast_tables(file, audit)
    else:
        read, parse = _READERS[file.format]
        tables = _slow_tables(_parse(read(file), parse, audit))
    pairs = 0
    for table in tables:
        pairs += len(table)
        for start in range(0, len(table), rows):
            yield table.slice(start, rows)
    _finish(file, audit, pairs)


def _slow_tables(pairs: Iterator[tuple[int, str, str]]) -> Iterator[pa.Table]:
    while block := list(islice(pairs, BLOCK)):
        lines, sources, targets = zip(*block)
        yield pa.table([sources, targets, lines], schema=TABLE)


def _fast_tables(file: BitextFile, audit: LineAudit) -> Iterator[pa.Table]:
    parse = _READERS[file.format][1]
    number = 0  # rows before the block
    for block in _COLUMNS[file.format](file):
        table, odd = _clear_rows(block, number)
        rest = ((number + 1 + int(i), block.row(int(i))) for i in odd)
        table = pa.concat_tables([table, *_slow_tables(_parse(rest, parse, audit))])  # pairs only if no row was clear
        number += len(block.clear)
        audit.lines = number
        yield table


def _clear_rows(block: _Rows, before: int) -> tuple[pa.Table, np.ndarray]:
    """The pairs of the rows that need no parser, and the indices of the others; `before`: rows before the block."""
    clear = np.flatnonzero(block.clear)
    if not len(clear):
        return TABLE.empty_table(), np.arange(len(block.clear))
    sides = [side if len(clear) == len(side) else side.take(pa.array(clear)) for side in block.sides]
    sides = [side.cast(pa.string()) for side in sides]
    blank = [pc.or_(pc.equal(pc.binary_length(side), 0), pc.utf8_is_space(side)) for side in sides]
    full = ~np.asarray(pc.or_(*blank))
    table = pa.table([*sides, pa.array(clear + before + 1)], schema=TABLE)
    if full.all():
        return table, np.flatnonzero(~block.clear)
    return table.filter(pa.array(full)), np.setdiff1d(np.arange(len(block.clear)), clear[full])


def _slices(block: bytes, offsets: np.ndarray) -> pa.Array:
    """The pieces of a block between offsets, as bytes; nothing is copied."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets, np.int32)), pa.py_buffer(block)]
    return pa.Array.from_buffers(pa.binary(), len(offsets) - 1, buffers)


def _valid(texts: pa.Array, whole: bytes | None = None) -> np.ndarray:
    """Which of the texts (bytes) are valid UTF-8; `whole`: the block they are from, valid only if all of them are."""
    try:
        (texts if whole is None else _slices(whole, np.array([0, len(whole)]))).cast(pa.string())
    except pa.ArrowInvalid:
        return np.array([_decodes(text) for text in texts.to_pylist()])
    return np.asarray(texts.is_valid())


def _decodes(text: bytes | None) -> bool:
    try:
        return text is not None and text.decode() is not None
    except UnicodeDecodeError:
        return False


def _tsv_columns(file: BitextFile) -> Iterator[_Rows]:
    for block in line_blocks(file.paths[0]):
        data = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero(data == LINE_FEED)  # (n,)
        starts = np.append(0, ends[:-1] + 1)  # (n,)
        tabs = np.append(np.flatnonzero(data == TAB), [len(data), len(data)])
        index = np.searchsorted(tabs, starts)
        both = tabs[index] < ends
        first = np.minimum(tabs[index], ends)  # of a line without tab: its end
        second = np.minimum(tabs[index + both], ends)
        cuts = np.stack([starts, first, np.minimum(first + 1, ends), second], axis=1)  # source, tab, target, the rest
        cells = _slices(block, np.append(cuts.ravel(), len(data)))
        source, target = (cells.take(pa.array(np.arange(side, 4 * len(ends), 4))) for side in (0, 2))
        lines = _slices(block, np.append(starts, len(data)))
        yield _Rows((source, target), both & _valid(lines, block), _line_of(lines))


def _line_of(lines: pa.Array) -> Callable[[int], bytes]:
    return lambda i: lines[i].as_py().removesuffix(b"\n")


def _pair_of(sides: tuple[pa.Array, pa.Array]) -> Callable[[int], tuple[Any, Any]]:
    return lambda i: (sides[0][i].as_py(), sides[1][i].as_py())


def _json_columns(file: BitextFile) -> Iterator[_Rows]:
    for block in line_blocks(file.paths[0]):
        lines = block.split(b"\n")
        lines.pop()
        sides = tuple(_read_json(block, lines).columns)
        clear = np.asarray(pc.and_(*(side.is_valid() for side in sides)))
        yield _Rows(sides, clear if len(clear) else np.zeros(len(lines), bool), lines.__getitem__)


def _read_json(block: bytes, lines: list[bytes]) -> pa.RecordBatch:
    """One row a line by Arrow's reader; no row at all where it may see something else than Python's parser."""
    nothing = pa.RecordBatch.from_pylist([], schema=SIDES)
    if not all(line[:1] + line[-1:] == b"{}" for line in lines):  # Arrow 26 crashes on a `null`, among others
        return nothing
    options = pa_json.ParseOptions(explicit_schema=SIDES, unexpected_field_behavior="ignore")
    try:
        _slices(block, np.array([0, len(block)])).cast(pa.string())  # UTF-8, which the reader does not check
        reading = pa_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        table = pa_json.read_json(pa.BufferReader(block), reading, options)
    except pa.ArrowException:
        return nothing  # the parser tells which lines are bad
    return table.combine_chunks().to_batches()[0] if len(table) == len(lines) else nothing


def _moses_columns(file: BitextFile) -> Iterator[_Rows]:
    readers = [_line_arrays(path) for path in file.paths]
    waiting = [pa.array([], pa.binary())] * 2
    counts = [0, 0]
    while True:
        for side in (0, 1):
            if not len(waiting[side]):
                waiting[side] = next(readers[side], waiting[side])
                counts[side] += len(waiting[side])
        count = min(map(len, waiting))
        if not count:
            break
        pair = tuple(lines.slice(0, count) for lines in waiting)
        waiting = [lines.slice(count) for lines in waiting]
        yield _Rows(pair, _valid(pair[0]) & _valid(pair[1]), _pair_of(pair))
    _check_lengths(file, *(count + sum(map(len, reader)) for count, reader in zip(counts, readers)))


def _line_arrays(path: str) -> Iterator[pa.Array]:
    for block in line_blocks(path):
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == LINE_FEED)
        cuts = np.stack([np.append(0, ends[:-1] + 1), ends], axis=1)  # a line, its line feed
        yield _slices(block, np.append(cuts.ravel(), len(block))).take(pa.array(np.arange(0, 2 * len(ends), 2)))


def _parquet_sides(file: BitextFile) -> Iterator[_Rows]:
    for sides in _parquet_columns(file):
        text = all(pa.types.is_large_binary(side.type) for side in sides)
        clear = _valid(sides[0]) & _valid(sides[1]) if text else np.zeros(len(sides[0]), bool)
        yield _Rows(sides, clear, _pair_of(sides))


_COLUMNS: dict[str, Callable[[BitextFile], Iterator[_Rows]]] = {
    "tsv": _tsv_columns,
    "jsonl": _json_columns,
    "moses": _moses_columns,
    "parquet": _parquet_sides,
}
