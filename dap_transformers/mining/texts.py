"""The two texts that are mined, and the file of mined pairs.

Legend: `N` sentences of a side, `D` dimensions, `P` pairs, `L` lines, `G` gold pairs.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dap_transformers.disk_arrays import concatenate_on_disk, row_blocks
from dap_transformers.errors import UserError
from dap_transformers.files import COMPRESSORS, compressed_file, plain_suffix
from dap_transformers.mining.distinct import DistinctSentences
from dap_transformers.mining.margin import MinedPairs, score_pairs
from dap_transformers.search.exact import Neighbours

#: Columns of the file of mined pairs. Lines count from 1.
COLUMNS = ("score", "source", "target", "source_line", "target_line")
#: Endings of formats that are not written.
OTHER_FORMATS = (".csv", ".json", ".arrow", ".feather", ".xlsx", ".tmx", ".ods", ".xml")
#: Rows of a Parquet row group.
GROUP_ROWS = 2**16
#: Replaces characters that would break the columns and lines of the output.
TO_SPACES = str.maketrans("\t\r\n", "   ")


@dataclass(frozen=True)
class TextSide:
    """One of the two texts.

    Attributes:
        path: file of the text.
        text: its distinct sentences.
    """

    path: Path
    text: DistinctSentences

    def counts(self) -> dict[str, Any]:
        """Return the name of the text's file, and its numbers of lines and sentences.

        The keys are "file", "lines", "empty", "repeated" and "distinct".
        """
        return {"file": self.path.name} | self.text.counts()

    def line(self, number: int) -> str:
        """Return the sentence of the line with this number, counted from 0.

        The line must not be empty.
        """
        return self.text[self.text.rows[number]]


@dataclass(frozen=True)
class MiningTask:
    """Two texts to mine and, if they are a split of BUCC, their true pairs.

    Attributes:
        source: the source text, N sentences.
        target: the target text, M sentences.
        gold: (G, 2) int64, source line and target line of each true pair, from 0. None if unknown.
    """

    source: TextSide
    target: TextSide
    gold: np.ndarray | None = None

    def digest(self) -> str:
        """Return the SHA-256 of both texts and their gold pairs, as 64 hexadecimal digits."""
        text = self.source.text.digest() + self.target.text.digest()
        gold = b"" if self.gold is None else self.gold.astype("<i8").tobytes()
        return hashlib.sha256(text.encode() + gold).hexdigest()

    def first_lines(self, pairs: MinedPairs) -> MinedPairs:
        """Return pairs of lines for pairs of distinct sentences.

        Args:
            pairs: pairs whose `source` and `target` are numbers of distinct sentences, from 0.

        Returns:
            The same pairs and scores, where `source` and `target` are line numbers, from 0: the
            first line that holds each sentence.
        """
        source_lines = self.source.text.first_line
        target_lines = self.target.text.first_line

        def converted_blocks() -> Iterator[MinedPairs]:
            for block in pairs.blocks():
                i = source_lines[block.source] - 1
                j = target_lines[block.target] - 1
                yield MinedPairs(block.scores, i, j)

        return MinedPairs.concatenate(converted_blocks())

    def score_line_by_line(
        self,
        source_vectors: np.ndarray,
        target_vectors: np.ndarray,
        neighbours: Neighbours,
        margin: str,
    ) -> MinedPairs:
        """Score line i of the source with line i of the target, for all lines i.

        Both texts have equally many lines. Lines that are empty on one side are left out.

        Args:
            source_vectors: vectors of the distinct source sentences, (N, D).
            target_vectors: vectors of the distinct target sentences, (M, D).
            neighbours: nearest neighbours of all these sentences in both directions.
            margin: "ratio", "distance" or "absolute"
            (`dap_transformers.mining.margin.margin_scores`).

        Returns:
            Pairs of line numbers, counted from 0, in the order of the lines.
        """
        source_rows = self.source.text.rows  # (L,)
        target_rows = self.target.text.rows  # (L,)

        def filled_lines() -> Iterator[np.ndarray]:
            for block in row_blocks(len(source_rows)):
                is_filled = (source_rows[block] >= 0) & (target_rows[block] >= 0)
                yield block.start + np.flatnonzero(is_filled)

        lines = concatenate_on_disk(filled_lines())  # (P,)
        blocks = list(row_blocks(len(lines)))
        pairs = score_pairs(
            source_vectors,
            target_vectors,
            concatenate_on_disk(source_rows[lines[block]] for block in blocks),
            concatenate_on_disk(target_rows[lines[block]] for block in blocks),
            neighbours,
            margin,
        )
        return MinedPairs(pairs.scores, lines, lines)


def require_writable(path: str) -> None:
    """Check by a file's name that pairs can be written in its format. The file is not opened.

    Args:
        path: the value of `--output`. An unknown ending means a table with tabs.
    """
    name = Path(path)
    if name.suffix in (".bz2", ".zst", ".lz4", ".7z", ".zip"):
        raise UserError(
            f"--output {path}: pairs can only be compressed as .gz or .xz; end the name in .gz, "
            ".xz or .tsv"
        )
    ending = plain_suffix(name)
    is_packed = name.suffix in COMPRESSORS
    if ending in OTHER_FORMATS or (is_packed and ending == ".parquet"):
        raise UserError(
            f"--output {path}: pairs are written as .tsv, .jsonl (both also .gz or .xz) or "
            ".parquet; end the name in one of these"
        )


def write_pairs(pairs: MinedPairs, task: MiningTask, path: str | Path) -> None:
    """Write the pairs as a table with the `COLUMNS`, in the format that the file's name says.

    `.parquet` and `.jsonl` keep every sentence unchanged. All other names give a table with tabs,
    a header and, in fields with quotation marks, the quotes of CSV. There a tab becomes a space.

    Args:
        pairs: pairs of lines, counted from 0. They are written counted from 1.
        task: the texts of these lines.
        path: the file. Tables and JSON lines are compressed if its name ends in `.gz` or `.xz`.
    """
    ending = plain_suffix(path)
    with compressed_file(path) as output:
        if ending == ".parquet":
            _write_parquet(pairs, task, output)
        elif ending in (".jsonl", ".ndjson"):
            for row in _rows(pairs, task):
                line = json.dumps(dict(zip(COLUMNS, row, strict=True)), ensure_ascii=False)
                output.write(f"{line}\n".encode(errors="surrogatepass"))
        else:
            output.write("\t".join(COLUMNS).encode() + b"\n")
            for score, *texts, source_line, target_line in _rows(pairs, task):
                fields = "\t".join(_quoted(text) for text in texts)
                line = f"{score:.6f}\t{fields}\t{source_line}\t{target_line}\n"
                output.write(line.encode(errors="surrogatepass"))


def _rows(pairs: MinedPairs, task: MiningTask) -> Iterator[tuple[float, str, str, int, int]]:
    """Yield the values of the `COLUMNS` for each pair of lines."""
    for block in pairs.blocks():
        columns = block.scores.tolist(), block.source.tolist(), block.target.tolist()
        for score, i, j in zip(*columns, strict=True):
            yield round(score, 6), task.source.line(i), task.target.line(j), i + 1, j + 1


def _quoted(text: str) -> str:
    """Return a text as a field of a table with tabs, so that readers of CSV read it back.

    Only a text with quotation marks gets quotes. Tabs and line ends become spaces.

    >>> print(_quoted('a "b" c'))
    "a ""b"" c"
    """
    text = text.translate(TO_SPACES)
    return '"' + text.replace('"', '""') + '"' if '"' in text else text


def _write_parquet(pairs: MinedPairs, task: MiningTask, output: BinaryIO) -> None:
    """Write pairs of lines as a Parquet file with the `COLUMNS`."""
    types = (pa.float64(), pa.string(), pa.string(), pa.int64(), pa.int64())
    schema = pa.schema(list(zip(COLUMNS, types, strict=True)))
    rows = _rows(pairs, task)
    with pq.ParquetWriter(output, schema) as writer:
        while block := list(islice(rows, GROUP_ROWS)):
            columns = [list(column) for column in zip(*block, strict=True)]
            writer.write_table(pa.table(dict(zip(COLUMNS, columns, strict=True)), schema))
