"""Where a large file of parallel text can be cut, so that processes share it and a kill costs a block (no models).

Plain TSV, JSONL and Moses files are cut between lines, Parquet files between row groups. A compressed text, a
translation memory or a catalogue is read from its start, and stays whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from dap.text.archives import disk_path, open_file, skip_mark
from dap.text.formats import BitextFile, check_lengths, open_parquet

CHUNK = 4 << 20  # bytes counted through at a time
_LINE_FEED = 10


@dataclass(frozen=True)
class Block:
    """Some whole rows of a file.

    Attributes:
        number: its place among the file's blocks.
        first: rows before it.
        rows: rows of the whole file.
        spans: from and to: bytes of each side's file, or row groups of a Parquet file.
    """

    number: int
    first: int
    rows: int
    spans: tuple[tuple[int, int], ...]


def is_cut(file: BitextFile, size: int) -> bool:
    """Whether a file is cut into blocks of about `size` bytes: it is larger, and need not be read from its start."""
    path = Path(file.paths[0])
    plain = all(disk_path(name) == Path(name) and not name.endswith((".gz", ".xz")) for name in file.paths)
    return plain and file.format in ("tsv", "jsonl", "moses", "parquet") and path.stat().st_size > size


def cut(file: BitextFile, size: int) -> list[Block]:
    """The blocks of a file, about `size` bytes of its (source) text each; all text is counted through once.

    Raises:
        ValueError: sides of different length, UTF-16, or a damaged Parquet file.
    """
    if file.format == "parquet":
        starts, rows = _cut_groups(file, size)
        bounds = [starts]
    else:
        starts, rows = _cut_lines(file.paths[0], size)
        bounds = [starts, *(_find_lines(file, path, rows) for path in file.paths[1:])]
    spans = list(zip(*(pairwise(side) for side in bounds)))
    return [Block(number, first, rows[-1], here) for number, (first, here) in enumerate(zip(rows, spans))]


def _cut_lines(path: str, size: int) -> tuple[list[int], list[int]]:
    """Bytes and lines before each block, and before the end."""
    starts, lines, wanted, last, rows = [0], [0], size, 0, 0
    for start, chunk, before in _chunks(path):
        while end := chunk.find(b"\n", max(wanted - 1 - start, 0)) + 1:
            starts.append(start + end)
            lines.append(before + chunk.count(b"\n", 0, end))
            wanted = start + end + size
        last, rows = start + len(chunk), before + chunk.count(b"\n") + (not chunk.endswith(b"\n"))
    if starts[-1] < last:
        starts.append(last)
        lines.append(rows)
    return starts, lines


def _find_lines(file: BitextFile, path: str, lines: Sequence[int]) -> list[int]:
    """Bytes before each of these lines, and before the end; `lines` ascend from 0 to the number that there must be."""
    starts, last, rows = [0], 0, 0
    for start, chunk, before in _chunks(path):
        ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _LINE_FEED)
        while len(starts) < len(lines) - 1 and lines[len(starts)] <= before + len(ends):
            starts.append(start + int(ends[lines[len(starts)] - before - 1]) + 1)
        last, rows = start + len(chunk), before + len(ends) + (not chunk.endswith(b"\n"))
    check_lengths(file, lines[-1], rows)
    return [*starts, last]


def _chunks(path: str) -> Iterator[tuple[int, bytes, int]]:
    """(bytes before, chunk, lines before) of a whole file."""
    read = lines = 0
    with open_file(path) as stream:
        skip_mark(stream, path)
        stream.seek(0)
        while chunk := stream.read(CHUNK):
            yield read, chunk, lines
            read += len(chunk)
            lines += chunk.count(b"\n")


def _cut_groups(file: BitextFile, size: int) -> tuple[list[int], list[int]]:
    """Row groups and rows before each block, and before the end."""
    starts, rows, held, total = [0], [0], 0, 0
    with open_parquet(file) as table:
        groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
    for number, group in enumerate(groups, 1):
        held, total = held + group.total_byte_size, total + group.num_rows
        if held >= size or number == len(groups):
            starts.append(number)
            rows.append(total)
            held = 0
    return starts, rows
