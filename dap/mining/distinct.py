"""The distinct sentences of a text: one that is repeated is mined once, and counted once among others' neighbours.

Legend: `N` sentences, `L` lines.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import BinaryIO

import numpy as np

from dap import scratch
from dap.scratch import Folder, in_order, on_disk, opened, parts, zeros

KEY = np.dtype([("high", np.uint64), ("low", np.uint64), ("line", np.int64)])


class DistinctSentences:
    """The distinct sentences of a text in order of first appearance, and the lines that hold them.

    Lines of white space hold no sentence; lines that differ in anything else are different sentences. Text and arrays
    are in unnamed files, so that memory does not grow with the text.

    >>> text = DistinctSentences(["a", " ", "b", "a"])
    >>> list(text), text.rows.tolist(), text.first_line.tolist(), text.empty, text.repeated
    (['a', 'b'], [0, -1, 1, 0], [1, 3], 1, 1)

    Args:
        lines: read once.
        folder: where the files are; None for the system's own place.

    Attributes:
        rows: (L,) number of each line's sentence, -1 for an empty line.
        first_line: (N,) number of the first line that holds each sentence, from 1.
        empty: number of empty lines.
        repeated: number of lines whose sentence an earlier line holds.
    """

    def __init__(self, lines: Iterable[str], folder: Folder = None) -> None:
        with tempfile.TemporaryFile(dir=folder) as text, tempfile.TemporaryFile(dir=folder) as ends:
            sentences = in_order(_keys(lines, text, ends), folder)
            self._text, self._ends = (
                memoryview(opened(*file)) for file in ((text, np.uint8), (ends, np.int64))
            )
        blocks = list(parts(len(self._ends) - 1))
        first = zeros((len(self._ends) - 1,), np.int64, folder)
        _fill_in(first, sentences)
        lines = ((first[block], 1 + np.arange(block.start, block.stop)) for block in blocks)
        self.first_line = on_disk((own[own == earliest] for earliest, own in lines), folder)
        self.rows = on_disk((_rows(self.first_line, first[block]) for block in blocks), folder)
        self.empty = sum(int((self.rows[block] < 0).sum()) for block in blocks)
        self.repeated = len(first) - self.empty - len(self)

    def __len__(self) -> int:
        return len(self.first_line)

    def __getitem__(self, row: int) -> str:
        line = int(self.first_line[row])
        return str(self._text[self._ends[line - 1] : self._ends[line]], errors="surrogatepass")

    def __iter__(self) -> Iterator[str]:
        return (self[row] for row in range(len(self)))

    def counts(self) -> dict[str, int]:
        """What a report says of the text: lines, empty ones, repeated ones, and distinct sentences."""
        return {
            "lines": len(self.rows),
            "empty": self.empty,
            "repeated": self.repeated,
            "distinct": len(self),
        }

    def digest(self) -> str:
        """SHA-256 of the lines in their order; all empty lines are alike."""
        digest = hashlib.sha256(self._text)
        digest.update(self._ends)
        return digest.hexdigest()


def _keys(lines: Iterable[str], text: BinaryIO, ends: BinaryIO) -> Iterator[np.ndarray]:
    """A hash of each sentence and its line, from 1; writes the text without empty lines, and where each line ends."""
    stream, size = iter(lines), 0
    ends.write(size.to_bytes(8, "little"))
    for start in count(1, scratch.ROWS):
        block = [
            line.encode(errors="surrogatepass") if line.strip() else b""
            for line in islice(stream, scratch.ROWS)
        ]
        lengths = np.array([*map(len, block)], np.int64)
        text.writelines(block)
        ends.write(size + lengths.cumsum())
        size += int(lengths.sum())
        keys = np.empty(len(block), KEY)
        hashes = b"".join(hashlib.blake2b(sentence, digest_size=16).digest() for sentence in block)
        keys["high"], keys["low"] = np.frombuffer(hashes, np.uint64).reshape(-1, 2).T
        keys["line"] = np.arange(start, start + len(block))
        yield keys[lengths > 0]
        if len(block) < scratch.ROWS:
            return


def _fill_in(first: np.ndarray, sentences: Iterable[tuple[int, int, int]]) -> None:
    """For each line, from 1, the first that holds its sentence, out of hashes and lines in their order."""
    key, place = None, memoryview(first)
    for *other, line in sentences:
        if other != key:
            key, earliest = other, line
        place[line - 1] = earliest


def _rows(first_line: np.ndarray, lines: np.ndarray) -> np.ndarray:
    """Numbers of the sentences that these lines are the first to hold; -1 for line 0."""
    return np.where(lines == 0, -1, np.searchsorted(first_line, lines))
