"""The two texts that are mined: their distinct sentences, their vectors, and the file of pairs.

A repeated sentence must be mined only once. Otherwise its copies would fill up the neighbourhoods
of other sentences. A text may be larger than memory.

Legend: `N` distinct sentences of a text, `D` dimensions, `P` pairs, `L` lines, `G` gold pairs.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, product
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dap_transformers import disk_arrays
from dap_transformers.disk_arrays import (
    blocks_of,
    concatenate_on_disk,
    map_file,
    row_blocks,
    sort_records,
    temporary_file,
    zeros_on_disk,
)
from dap_transformers.errors import UserError, counted
from dap_transformers.files import compressed_file, plain_suffix
from dap_transformers.languages import is_blank, text_keys
from dap_transformers.text.archives import read_sentences
from dap_transformers.text.formats import BitextFile, read_pairs
from dap_transformers.text.tmx_po import write_memory

#: Vectors of source and target.
Vectors = tuple[np.ndarray, np.ndarray]
#: Pairs that are written at a time, a row group of Parquet.
GROUP_ROWS = 2**16
#: Ending of the name of a translation memory, which needs the languages.
MEMORY = ".tmx"
#: Ends in a Chinese or Japanese character, behind which no blank stands.
NO_BLANK = re.compile("[\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]$")
#: A sentence's key (`text_keys`), and the number of its line, from 1.
KEYED_LINE = np.dtype([("key", np.uint64), ("line", np.int64)])


class DistinctSentences:
    """The distinct sentences of a text, as a sequence in the order of their first lines.

    A line of white space is empty: it holds no sentence. Lines that differ in any character hold
    different sentences. The text and all arrays are in temporary files.

    >>> text = DistinctSentences(["a", " ", "b", "a"])
    >>> list(text), text.rows.tolist(), text.first_line.tolist()
    (['a', 'b'], [0, -1, 1, 0], [1, 3])

    Args:
        lines: the lines of the text. They are read once.
        name: the file's name or another name, for messages.

    Attributes:
        rows: (L,) for each line the number of its sentence, from 0. It is -1 for an empty line.
        first_line: (N,) for each sentence the number of the first line that holds it, from 1.
        distinct: the number of distinct sentences.
    """

    def __init__(self, lines: Iterable[str], name: str | Path = "text") -> None:
        self.name = str(name)
        with temporary_file() as text, temporary_file() as ends:
            keyed_lines = sort_records(_store_lines(lines, text, ends))
            self._text = memoryview(map_file(text, np.uint8))
            self._ends = memoryview(map_file(ends, np.int64))

        # find for each line the first line with the same sentence
        earliest = zeros_on_disk((len(self._ends) - 1,), np.int64)  # (L,), 0 for an empty line
        output = memoryview(earliest)  # single elements are written faster than through numpy
        previous = None
        for key, line in keyed_lines:
            if key != previous:
                previous = key
                first = line
            output[line - 1] = first

        # number the sentences
        self.first_line = concatenate_on_disk(_first_lines(earliest))
        self.rows = concatenate_on_disk(
            np.where(block == 0, -1, np.searchsorted(self.first_line, block))
            for block in blocks_of(earliest)
        )
        self.distinct = len(self)

    def __len__(self) -> int:
        return len(self.first_line)

    def __getitem__(self, row: int) -> str:
        line = int(self.first_line[row])
        return str(self._text[self._ends[line - 1] : self._ends[line]], "utf-8")

    def __str__(self) -> str:
        counts = self.counts()
        lines = counted(counts["lines"], "line")
        left_out = f"{counts['empty']:,} empty, {counts['repeated']:,} repeated"
        return f"{self.name}: {lines}, {left_out}, {counted(counts['distinct'], 'sentence')}"

    def place(self, row: int) -> str:
        """Return the file and the line of a sentence, for messages."""
        return f"{self.name}, line {self.first_line[row]}"

    def counts(self) -> dict[str, Any]:
        """Return the name of the text's file, and its numbers of lines and sentences."""
        empty = sum(int((block < 0).sum()) for block in blocks_of(self.rows))
        return {
            "file": Path(self.name).name,
            "lines": len(self.rows),
            "empty": empty,
            "repeated": len(self.rows) - empty - self.distinct,
            "distinct": self.distinct,
        }


def _store_lines(lines: Iterable[str], text: BinaryIO, ends: BinaryIO) -> Iterator[np.ndarray]:
    """Write all lines to files, and yield blocks of `KEYED_LINE`, without the empty lines."""
    stream = iter(lines)
    size = 0  # bytes of text so far
    ends.write(size.to_bytes(8, "little"))
    for first_line in count(1, disk_arrays.BLOCK_ROWS):
        block = list(islice(stream, disk_arrays.BLOCK_ROWS))
        sentences = ["" if is_blank(line) else line for line in block]
        encoded = [sentence.encode() for sentence in sentences]
        lengths = np.array([len(sentence) for sentence in encoded], np.int64)
        text.writelines(encoded)
        ends.write(size + lengths.cumsum())
        size += int(lengths.sum())

        keyed_lines = np.empty(len(block), KEYED_LINE)
        keyed_lines["key"] = text_keys(sentences)
        keyed_lines["line"] = np.arange(first_line, first_line + len(block))
        yield keyed_lines[lengths > 0]

        if len(block) < disk_arrays.BLOCK_ROWS:
            return


def _first_lines(earliest: np.ndarray) -> Iterator[np.ndarray]:
    """Yield blocks of the numbers, from 1, of the lines that hold a sentence for the first time."""
    for block in row_blocks(len(earliest)):
        lines = np.arange(block.start + 1, block.stop + 1)
        yield lines[earliest[block] == lines]


class GroupedText(DistinctSentences):
    """The distinct groups of 1 to S neighbouring sentences of a text, single sentences first.

    Attributes:
        rows: (L,) for each line the number of the group that is only its sentence.
        groups: (N, S) for each sentence the numbers of the groups that begin with it, by size. N
            counts all sentences. The last groups are shorter, because the text ends.
        lengths: (N,) characters of each sentence.
    """

    def __init__(self, lines: Iterable[str], name: str | Path, largest: int) -> None:
        lines = list(lines)
        self.lines = np.flatnonzero([not is_blank(line) for line in lines])  # (N,) from 0
        sentences = [lines[line] for line in self.lines]
        self.lengths = np.array([len(sentence) for sentence in sentences])
        places = product(range(1, largest + 1), range(len(sentences)))
        super().__init__((joined(sentences[i : i + size]) for size, i in places), name)
        self.groups = self.rows.reshape(largest, -1).T
        self.rows = np.full(len(lines), -1)
        self.rows[self.lines] = self.groups[:, 0]
        self.distinct = len(np.unique(self.groups[:, 0]))

    def place(self, row: int) -> str:
        sentence = (self.first_line[row] - 1) % len(self.lines)
        return f"{self.name}, line {self.lines[sentence] + 1}"


def joined(sentences: Iterable[str]) -> str:
    """Join sentences by blanks, but without one behind Chinese or Japanese characters.

    >>> joined(["Ja.", "Nein."]), joined(["是。", "不。"])
    ('Ja. Nein.', '是。不。')
    """
    text, *others = sentences
    for other in others:
        text += other if NO_BLANK.search(text) else f" {other}"
    return text


@dataclass(frozen=True)
class TextPair:
    """Two texts to mine and, if they are a split of BUCC, their true pairs.

    Attributes:
        source: None if only its vectors are known. The same holds for the target.
        gold: (G, 2) int64, source line and target line of each true pair, from 0. None if unknown.
    """

    source: DistinctSentences | None
    target: DistinctSentences | None
    gold: np.ndarray | None = None

    def sides(self) -> dict[str, DistinctSentences]:
        """Return the texts that are known, by "source" and "target"."""
        sides = {"source": self.source, "target": self.target}
        return {name: text for name, text in sides.items() if text is not None}

    def first_lines(self, pairs: np.ndarray) -> np.ndarray:
        """Turn pairs of distinct sentences into pairs of the first lines that hold them, from 0."""

        def converted_blocks() -> Iterator[np.ndarray]:
            for block in blocks_of(pairs):
                block = block.copy()
                for name, text in self.sides().items():
                    block[name] = text.first_line[block[name]] - 1
                yield block

        return concatenate_on_disk(converted_blocks())

    def table(self, pairs: np.ndarray) -> pa.Table:
        """Return pairs of lines, which count from 0, with their sentences and lines from 1."""
        columns = {"score": pairs["score"].round(6)}
        for name, text in self.sides().items():
            sentences = [text[row] for row in text.rows[pairs[name]].tolist()]
            columns[name] = pa.array(sentences, pa.string())
        for name in ("source", "target"):
            columns[f"{name}_line"] = pairs[name] + 1
        return pa.table(columns)


class TextsInOrder(TextPair):
    """Two texts (`GroupedText`) whose pairs are pairs of groups."""

    def table(self, pairs: np.ndarray) -> pa.Table:
        """Return pairs of groups (`in_order.GROUP`) with their text and their lines, from 1."""
        columns = {"score": pairs["score"].round(6)}
        lines = {}
        for name, text in self.sides().items():
            starts, sizes = pairs[name], pairs[f"{name}s"]
            columns[name] = [text[row] for row in text.groups[starts, sizes - 1].tolist()]
            parts = (text.lines[i : i + size] for i, size in zip(starts, sizes))
            lines[f"{name}_lines"] = [part + 1 for part in parts]
        return pa.table(columns | lines)


# -------------------------------------------------------------------------- from files to vectors


def read_texts(
    source_file: str,
    target_file: str,
    is_parallel: bool = False,
    kind: Callable[..., DistinctSentences] = DistinctSentences,
) -> TextPair:
    """Read two texts with one sentence per line, and equally many lines if `is_parallel`."""
    source = kind(read_sentences(source_file), source_file)
    target = kind(read_sentences(target_file), target_file)
    for text in (source, target):
        if not len(text):
            raise UserError(f"{text.name}: none of its lines holds a sentence")
    if is_parallel and len(source.rows) != len(target.rows):
        raise UserError(
            f"{source_file} has {counted(len(source.rows), 'line')}, {target_file} has "
            f"{len(target.rows)}: line i of one must belong to line i of the other"
        )
    return TextPair(source, target)


def read_known(path: str | Path) -> TextPair:
    """Read known translations, a TSV file with source and target, without repeated pairs."""
    rows = read_pairs(BitextFile("und", (str(path),), "tsv"), max_bad_lines=0.0)
    pairs = dict.fromkeys((row["source"], row["target"]) for row in rows)
    source = DistinctSentences((source for source, _ in pairs), path)
    target = DistinctSentences((target for _, target in pairs), path)
    return TextPair(source, target)


# ------------------------------------------------------------------------------ the file of pairs


def write_pairs(
    pairs: np.ndarray, texts: TextPair, path: str | Path, languages: Sequence[str] = ()
) -> None:
    """Write pairs of lines, which count from 0, as a table in the format that the name says.

    `.parquet`, `.jsonl` and `.tmx` keep every sentence unchanged. All other names give a table with
    tabs, where only a tab in a sentence becomes a space. Quotation marks are text there, as in
    every file that we read. The file is compressed if its name ends in `.gz` or `.xz`.

    Args:
        languages: codes of source and target, for `.tmx`.
    """
    tables = (texts.table(block) for block in blocks_of(pairs, GROUP_ROWS))
    suffix = plain_suffix(path)
    with compressed_file(path) as output:
        if suffix == MEMORY:
            rows = (row for table in tables for row in table.to_pylist())
            write_memory(((row["source"], row["target"]) for row in rows), languages, output)
        else:
            WRITERS.get(suffix, _write_tsv)(tables, output)


def _write_tsv(tables: Iterator[pa.Table], output: BinaryIO) -> None:
    """Write rows of literal text, below a header. Several lines are separated by blanks."""
    first = next(tables)
    output.write("\t".join(first.column_names).encode() + b"\n")
    for table in chain([first], tables):
        for row in table.to_pylist():
            row["score"] = f"{row['score']:.6f}"
            cells = []
            for value in row.values():
                text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
                cells.append(text.replace("\t", " "))
            output.write("\t".join(cells).encode() + b"\n")


def _write_jsonl(tables: Iterator[pa.Table], output: BinaryIO) -> None:
    """Write an object per row, with the columns as its fields."""
    for table in tables:
        for row in table.to_pylist():
            output.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


def _write_parquet(tables: Iterator[pa.Table], output: BinaryIO) -> None:
    """Write a Parquet file, a row group per table."""
    first = next(tables)
    with pq.ParquetWriter(output, first.schema) as writer:
        for table in chain([first], tables):
            writer.write_table(table)


#: Ending of a file's name -> function that writes tables to an open file. Others have tabs.
WRITERS = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
