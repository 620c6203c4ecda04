"""Read files of parallel text fast, as Arrow tables, whole or block by block (no models, no tokenizers).

Rows that are clear at first sight are split as whole columns; the others go through the parsers of `formats`, so
that both ways of reading give the same pairs and complaints.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pa_json

from dap.text.archives import line_blocks
from dap.text.blocks import Block
from dap.text.formats import (
    BLOCK,
    READERS,
    BitextFile,
    LineAudit,
    Row,
    check_lengths,
    finish_file,
    parquet_columns,
    parse_rows,
)

LINE_FEED, TAB = 10, 9  # ASCII

SIDES = pa.schema({"source": pa.string(), "target": pa.string()})
#: Of the tables that `read_tables` gives.
TABLE = SIDES.append(pa.field("line", pa.int64()))


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
    pairs = 0
    for table in audited_tables(file, audit, rows):
        pairs += len(table)
        yield table
    finish_file(file, audit, pairs)


def audited_tables(
    file: BitextFile, audit: LineAudit, rows: int = 100_000, block: Block | None = None
) -> Iterator[pa.Table]:
    """The tables of `read_tables`, of a file or of one block of it; the verdict over bad lines is left to the caller.

    Raises:
        ValueError: as `read_pairs`; `audit` has seen more bad lines than there may be.
    """
    if file.format in _COLUMNS:
        tables = _fast_tables(file, audit, block)
    else:
        read, parse = READERS[file.format]
        tables = _slow_tables(parse_rows(read(file), parse, audit))
    for table in tables:
        for start in range(0, len(table), rows):
            yield table.slice(start, rows)


def _slow_tables(pairs: Iterator[tuple[int, str, str]]) -> Iterator[pa.Table]:
    while block := list(islice(pairs, BLOCK)):
        lines, sources, targets = zip(*block)
        yield pa.table([sources, targets, lines], schema=TABLE)


def _fast_tables(file: BitextFile, audit: LineAudit, block: Block | None) -> Iterator[pa.Table]:
    parse = READERS[file.format][1]
    number = block.first if block else 0  # rows before
    for part in _COLUMNS[file.format](file, block):
        table, odd = _clear_rows(part, number)
        rest = ((number + 1 + int(i), part.row(int(i))) for i in odd)
        others = _slow_tables(parse_rows(rest, parse, audit))  # gives pairs only where no row was clear
        table = pa.concat_tables([table, *others])
        number += len(part.clear)
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


def _lines(file: BitextFile, side: int, block: Block | None) -> Iterator[bytes]:
    if block is None:
        return line_blocks(file.paths[side])
    return line_blocks(file.paths[side], block.spans[side], block.first)


def _tsv_columns(file: BitextFile, part: Block | None) -> Iterator[_Rows]:
    for block in _lines(file, 0, part):
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


def _json_columns(file: BitextFile, part: Block | None) -> Iterator[_Rows]:
    for block in _lines(file, 0, part):
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


def _moses_columns(file: BitextFile, part: Block | None) -> Iterator[_Rows]:
    readers = [_line_arrays(_lines(file, side, part)) for side in (0, 1)]
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
    check_lengths(file, *(count + sum(map(len, reader)) for count, reader in zip(counts, readers)))


def _line_arrays(blocks: Iterator[bytes]) -> Iterator[pa.Array]:
    for block in blocks:
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == LINE_FEED)
        cuts = np.stack([np.append(0, ends[:-1] + 1), ends], axis=1)  # a line, its line feed
        yield _slices(block, np.append(cuts.ravel(), len(block))).take(pa.array(np.arange(0, 2 * len(ends), 2)))


def _parquet_sides(file: BitextFile, part: Block | None) -> Iterator[_Rows]:
    for sides in parquet_columns(file, part and range(*part.spans[0])):
        text = all(pa.types.is_large_binary(side.type) for side in sides)
        clear = _valid(sides[0]) & _valid(sides[1]) if text else np.zeros(len(sides[0]), bool)
        yield _Rows(sides, clear, _pair_of(sides))


_COLUMNS: dict[str, Callable[[BitextFile, Block | None], Iterator[_Rows]]] = {
    "tsv": _tsv_columns,
    "jsonl": _json_columns,
    "moses": _moses_columns,
    "parquet": _parquet_sides,
}
