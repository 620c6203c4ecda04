"""The distinct sentences of a text, which may be larger than memory.

A repeated sentence must be mined only once. Otherwise its copies would fill up the neighbourhoods
of other sentences.

Legend: `N` distinct sentences, `L` lines.
"""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import BinaryIO

import numpy as np

from dap_transformers import disk_arrays
from dap_transformers.disk_arrays import (
    concatenate_on_disk,
    map_file,
    row_blocks,
    temporary_file,
    zeros_on_disk,
)
from dap_transformers.languages import is_blank
from dap_transformers.mining.external_sort import sort_records

#: A sentence's hash in two halves, and the number of its line, from 1.
HASHED_LINE = np.dtype([("high", np.uint64), ("low", np.uint64), ("line", np.int64)])


class DistinctSentences:
    """The distinct sentences of a text, as a sequence in the order of their first lines.

    A line of white space is empty: it holds no sentence. Lines that differ in any character hold
    different sentences. The text and all arrays are in temporary files.

    >>> text = DistinctSentences(["a", " ", "b", "a"])
    >>> list(text), text.rows.tolist(), text.first_line.tolist(), text.empty, text.repeated
    (['a', 'b'], [0, -1, 1, 0], [1, 3], 1, 1)

    Args:
        lines: the lines of the text. They are read once.

    Attributes:
        rows: (L,) for each line the number of its sentence, from 0. It is -1 for an empty line.
        first_line: (N,) for each sentence the number of the first line that holds it, from 1.
        empty: number of empty lines.
        repeated: number of lines whose sentence is already on an earlier line.
    """

    def __init__(self, lines: Iterable[str]) -> None:
        # write the text, and sort the hashes of its sentences
        with temporary_file() as text, temporary_file() as ends:
            hashed_lines = sort_records(_store_lines(lines, text, ends))
            self._text = memoryview(map_file(text, np.uint8))
            self._ends = memoryview(map_file(ends, np.int64))

        # find for each line the first line with the same sentence
        line_count = len(self._ends) - 1
        earliest = zeros_on_disk((line_count,), np.int64)  # (L,), 0 for an empty line
        _fill_in_earliest(earliest, hashed_lines)

        # number the sentences
        self.first_line = concatenate_on_disk(_first_lines(earliest))
        self.rows = concatenate_on_disk(_sentence_numbers(earliest, self.first_line))
        self.empty = sum(int((self.rows[block] < 0).sum()) for block in row_blocks(line_count))
        self.repeated = line_count - self.empty - len(self)

    def __len__(self) -> int:
        return len(self.first_line)

    def __getitem__(self, row: int) -> str:
        line = int(self.first_line[row])
        start = self._ends[line - 1]
        end = self._ends[line]
        return str(self._text[start:end], errors="surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))

    def counts(self) -> dict[str, int]:
        """Return the numbers of lines and sentences of the text.

        Returns:
            "lines" -> all lines. "empty" -> lines of white space. "repeated" -> lines whose
            sentence is already on an earlier line. "distinct" -> distinct sentences.
        """
        return {
            "lines": len(self.rows),
            "empty": self.empty,
            "repeated": self.repeated,
            "distinct": len(self),
        }

    def digest(self) -> str:
        """Return the SHA-256 of the text (all lines, in order) as 64 hexadecimal digits.

        Lines that hold different white space count as equal, because all of them are empty.
        """
        digest = hashlib.sha256(self._text)
        digest.update(self._ends)
        return digest.hexdigest()


def _store_lines(lines: Iterable[str], text: BinaryIO, ends: BinaryIO) -> Iterator[np.ndarray]:
    """Write all lines to files, and yield the hashes of the lines that are not empty.

    Yields:
        For each block of lines, an array with a `HASHED_LINE` record (hash and line number) for
        each line that is not empty.
    """
    stream = iter(lines)
    size = 0  # bytes of text so far
    ends.write(size.to_bytes(8, "little"))
    for first_line in count(1, disk_arrays.BLOCK_ROWS):
        block = list(islice(stream, disk_arrays.BLOCK_ROWS))
        sentences = [_bytes_of(line) for line in block]
        lengths = np.array([len(sentence) for sentence in sentences], np.int64)
        text.writelines(sentences)
        ends.write(size + lengths.cumsum())
        size += int(lengths.sum())

        hashes = [hashlib.blake2b(sentence, digest_size=16).digest() for sentence in sentences]
        halves = np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 2)
        hashed_lines = np.empty(len(block), HASHED_LINE)
        hashed_lines["high"] = halves[:, 0]
        hashed_lines["low"] = halves[:, 1]
        hashed_lines["line"] = np.arange(first_line, first_line + len(block))
        yield hashed_lines[lengths > 0]

        if len(block) < disk_arrays.BLOCK_ROWS:
            return


def _bytes_of(line: str) -> bytes:
    """Return the sentence of a line in UTF-8. It is b"" for a line without visible characters."""
    return b"" if is_blank(line) else line.encode(errors="surrogatepass")


def _fill_in_earliest(earliest: np.ndarray, hashed_lines: Iterable[tuple[int, int, int]]) -> None:
    """Write for each line the number, from 1, of the first line with the same hash.

    Args:
        earliest: (L,) int64, all 0. It gets the numbers. Empty lines keep 0.
    """
    output = memoryview(earliest)  # single elements are written faster than through numpy
    previous_hash = None
    for high, low, line in hashed_lines:
        if (high, low) != previous_hash:
            previous_hash = (high, low)
            first = line
        output[line - 1] = first


def _first_lines(earliest: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the numbers, from 1, of the lines that hold a sentence for the first time.

    Args:
        earliest: (L,) for each line the number, from 1, of the first line with the same sentence.
            It is 0 for an empty line.

    Yields:
        One int64 array for each block of lines, in ascending order.
    """
    for block in row_blocks(len(earliest)):
        lines = np.arange(block.start + 1, block.stop + 1)
        yield lines[earliest[block] == lines]


def _sentence_numbers(earliest: np.ndarray, first_line: np.ndarray) -> Iterator[np.ndarray]:
    """Yield for each line the number of its sentence, from 0, or -1 for an empty line.

    Args:
        earliest: (L,) for each line the number, from 1, of the first line with the same sentence.
            It is 0 for an empty line.
        first_line: (N,) for each sentence the number of its first line, from 1.

    Yields:
        One int64 array for each block of lines.
    """
    for block in row_blocks(len(earliest)):
        lines = earliest[block]
        yield np.where(lines == 0, -1, np.searchsorted(first_line, lines))
