"""The two texts that are mined: their distinct sentences, their vectors, and the file of pairs.

A repeated sentence must be mined only once. Otherwise its copies would fill up the neighbourhoods
of other sentences. A text may be larger than memory.

Legend: `N` distinct sentences of a text, `D` dimensions, `P` pairs, `L` lines, `G` gold pairs.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dap_transformers import disk_arrays
from dap_transformers.disk_arrays import (
    concatenate_on_disk,
    map_file,
    row_blocks,
    sort_records,
    temporary_file,
    zeros_on_disk,
)
from dap_transformers.encoding.encoder import Encoder
from dap_transformers.encoding.shards import (
    SHARD_SIZE,
    SentenceError,
    embed_to_disk,
    model_fingerprint,
)
from dap_transformers.errors import UserError, counted, joined
from dap_transformers.files import compressed_file, plain_suffix
from dap_transformers.languages import is_blank
from dap_transformers.mining.margin import MinedPairs
from dap_transformers.text.archives import read_sentences

logger = logging.getLogger(__name__)

#: Vectors of source and target.
Vectors = tuple[np.ndarray, np.ndarray]
#: Columns of the file of mined pairs, and their types. Lines count from 1.
SCHEMA = pa.schema(
    {
        "score": pa.float64(),
        "source": pa.string(),
        "target": pa.string(),
        "source_line": pa.int64(),
        "target_line": pa.int64(),
    }
)
#: Endings of formats that are not written.
OTHER_FORMATS = (".csv", ".json", ".arrow", ".xlsx", ".bz2", ".zst", ".zip")
#: Sentences that are tokenised at a time.
TOKENIZED = 10_000
#: Rows of a Parquet row group.
GROUP_ROWS = 2**16
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
        name: the file's name or another name, for messages.

    Attributes:
        rows: (L,) for each line the number of its sentence, from 0. It is -1 for an empty line.
        first_line: (N,) for each sentence the number of the first line that holds it, from 1.
        empty: number of empty lines.
        repeated: number of lines whose sentence is already on an earlier line.
    """

    def __init__(self, lines: Iterable[str], name: str | Path = "text") -> None:
        self.name = str(name)
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

    def __str__(self) -> str:
        lines = counted(len(self.rows), "line")
        sentences = counted(len(self), "sentence")
        return (
            f"{self.name}: {lines}, {self.empty:,} empty, {self.repeated:,} repeated, {sentences}"
        )

    def line(self, number: int) -> str:
        """Return the sentence of a line that is not empty. Its number counts from 0."""
        return self[self.rows[number]]

    def counts(self) -> dict[str, Any]:
        """Return the name of the text's file, and its numbers of lines and sentences."""
        return {
            "file": Path(self.name).name,
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
    """Write all lines to files, and yield blocks of `HASHED_LINE`, without the empty lines."""
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
    """Write for each line (L,) the number, from 1, of the first line with the same hash."""
    output = memoryview(earliest)  # single elements are written faster than through numpy
    previous_hash = None
    for high, low, line in hashed_lines:
        if (high, low) != previous_hash:
            previous_hash = (high, low)
            first = line
        output[line - 1] = first


def _first_lines(earliest: np.ndarray) -> Iterator[np.ndarray]:
    """Yield blocks of the numbers, from 1, of the lines that hold a sentence for the first time."""
    for block in row_blocks(len(earliest)):
        lines = np.arange(block.start + 1, block.stop + 1)
        yield lines[earliest[block] == lines]


def _sentence_numbers(earliest: np.ndarray, first_line: np.ndarray) -> Iterator[np.ndarray]:
    """Yield in blocks the number of each line's sentence, from 0, or -1 for an empty line."""
    for block in row_blocks(len(earliest)):
        lines = earliest[block]
        yield np.where(lines == 0, -1, np.searchsorted(first_line, lines))


@dataclass(frozen=True)
class TextPair:
    """Two texts to mine and, if they are a split of BUCC, their true pairs.

    Attributes:
        gold: (G, 2) int64, source line and target line of each true pair, from 0. None if unknown.
    """

    source: DistinctSentences
    target: DistinctSentences
    gold: np.ndarray | None = None

    def digest(self) -> str:
        """Return the SHA-256 of both texts and their gold pairs, as 64 hexadecimal digits."""
        text = self.source.digest() + self.target.digest()
        gold = b"" if self.gold is None else self.gold.astype("<i8").tobytes()
        return hashlib.sha256(text.encode() + gold).hexdigest()

    def first_lines(self, pairs: MinedPairs) -> MinedPairs:
        """Turn pairs of distinct sentences into pairs of the first lines that hold them, from 0."""

        def converted_blocks() -> Iterator[MinedPairs]:
            for block in pairs.blocks():
                i = self.source.first_line[block.source] - 1
                j = self.target.first_line[block.target] - 1
                yield MinedPairs(block.scores, i, j)

        return MinedPairs.concatenate(converted_blocks())

    def filled_lines(self) -> np.ndarray:
        """Return the numbers, from 0, of the lines that are empty on neither side: (P,)."""

        def filled_blocks() -> Iterator[np.ndarray]:
            for block in row_blocks(len(self.source.rows)):
                is_filled = (self.source.rows[block] >= 0) & (self.target.rows[block] >= 0)
                yield block.start + np.flatnonzero(is_filled)

        return concatenate_on_disk(filled_blocks())


# -------------------------------------------------------------------------- from files to vectors


def read_texts(source_file: str, target_file: str, is_parallel: bool = False) -> TextPair:
    """Read two texts with one sentence per line.

    A warning is logged if they hold the same text.

    Args:
        is_parallel: whether line i of one text belongs to line i of the other. Then both must have
            the same number of lines.
    """
    source, target = (
        DistinctSentences(read_sentences(file), file) for file in (source_file, target_file)
    )
    for text in (source, target):
        if not len(text):
            raise UserError(f"{text.name}: none of its lines holds a sentence")
    if is_parallel and len(source.rows) != len(target.rows):
        raise UserError(
            f"{source_file} has {counted(len(source.rows), 'line')}, {target_file} has "
            f"{len(target.rows)}: line i of one must belong to line i of the other"
        )
    if len(source) == len(target) and source.digest() == target.digest():
        text = "%s and %s hold the same text, so each sentence finds itself"
        logger.warning(text, source_file, target_file)
    return TextPair(source, target)


def read_known(path: str | Path) -> list[tuple[str, str]]:
    """Read known translations, lines `source<TAB>target`, without repeated pairs."""
    pairs: dict[tuple[str, str], None] = {}
    for number, line in enumerate(read_sentences(path), 1):
        columns = line.split("\t")
        if len(columns) < 2 or is_blank(columns[0]) or is_blank(columns[1]):
            raise UserError(f"{path}, line {number}: expected source, tab, target")
        pairs[columns[0], columns[1]] = None
    return list(pairs)


def encode_texts(
    encoder: Encoder,
    texts: Sequence[TextPair],
    folder: str | Path,
    shard_size: int = SHARD_SIZE,
    token_budget: int = 4096,
    progress: bool = False,
) -> list[Vectors]:
    """Encode the distinct sentences of all texts. Vectors of an earlier run are read instead.

    Several processes share the work, and only the first one gets the vectors (N, D). In the others
    they have no rows. A warning tells how many sentences are cut. Sentences that cannot be encoded
    are named only after all texts are tried.

    Args:
        folder: keeps the vectors, in shards of `shard_size` sentences.
        token_budget: most tokens of a batch, padding included.
    """
    fingerprint = model_fingerprint(encoder)
    failed: list[SentenceError] = []

    def encode_side(role: str, text: DistinctSentences) -> np.ndarray | None:
        warn_of_cut_sentences(encoder, text)
        place = Path(folder, f"{role}.{Path(text.name).name}")

        def where(row: int) -> str:
            return f"{text.name}, line {text.first_line[row]}"

        try:
            options = (shard_size, token_budget, progress, where, fingerprint)
            return embed_to_disk(encoder, text, place, *options)
        except SentenceError as error:
            failed.append(error)
            return None

    vectors = []
    for pair in texts:
        source = encode_side("source", pair.source)
        target = encode_side("target", pair.target)
        vectors.append((source, target))
    if failed:
        raise joined(failed)
    return vectors


def encode_known(
    encoder: Encoder,
    pairs: Sequence[tuple[str, str]],
    folder: str | Path,
    shard_size: int = SHARD_SIZE,
    token_budget: int = 4096,
) -> Vectors:
    """Encode K known translations (K, D) as `encode_texts` encodes the texts."""
    source, target = zip(*pairs, strict=True)
    options = (shard_size, token_budget)
    return (
        embed_to_disk(encoder, source, Path(folder, "known-source"), *options),
        embed_to_disk(encoder, target, Path(folder, "known-target"), *options),
    )


def warn_of_cut_sentences(encoder: Encoder, text: DistinctSentences) -> None:
    """Log a warning that says how many sentences have more tokens than the encoder reads."""
    limit = encoder.max_seq_length
    marks = encoder.tokenizer.num_special_tokens_to_add()
    cut = 0
    sentences = (encoder.prefix + sentence for sentence in text)
    while block := list(islice(sentences, TOKENIZED)):
        # Hardly a token has less than a byte, so short sentences need not be tokenised.
        long = [each for each in block if len(each.encode(errors="replace")) + marks > limit]
        if long:
            cut += sum(len(ids) > limit for ids in encoder.tokenizer(long, verbose=False).input_ids)
    if cut:
        message = "%s: %s cut after max_seq_length=%d tokens"
        logger.warning(message, text.name, counted(cut, "sentence"), limit)


# ------------------------------------------------------------------------------ the file of pairs


def require_writable(path: str | Path) -> None:
    """Raise `UserError` for a file name that ends in the name of another format."""
    if str(path).endswith(OTHER_FORMATS):
        raise UserError(
            f"{path}: pairs are written as .tsv, .jsonl (also .gz or .xz) or .parquet; end the "
            "name in one of these"
        )


def write_pairs(pairs: MinedPairs, texts: TextPair, path: str | Path) -> None:
    """Write the pairs as a table with the columns `SCHEMA`, in the format that the name says.

    `.parquet` and `.jsonl` keep every sentence unchanged. All other names give a table with tabs,
    where only a tab in a sentence becomes a space. Quotation marks are text there, as in every file
    that we read.

    Args:
        pairs: pairs of lines, counted from 0. They are written counted from 1.
        path: the file, which is compressed if its name ends in `.gz` or `.xz`.
    """
    with compressed_file(path) as output:
        write = WRITERS.get(plain_suffix(path), _write_tsv)
        write(_rows(pairs, texts), output)


Row = tuple[float, str, str, int, int]  # values of the columns


def _rows(pairs: MinedPairs, texts: TextPair) -> Iterator[Row]:
    """Yield the row of each pair of lines."""
    for block in pairs.blocks():
        columns = block.scores.tolist(), block.source.tolist(), block.target.tolist()
        for score, i, j in zip(*columns, strict=True):
            yield round(score, 6), texts.source.line(i), texts.target.line(j), i + 1, j + 1


def _write_tsv(rows: Iterable[Row], output: BinaryIO) -> None:
    """Write rows of literal text, below a header."""
    output.write("\t".join(SCHEMA.names).encode() + b"\n")
    for score, *sentences, source_line, target_line in rows:
        source, target = (sentence.replace("\t", " ") for sentence in sentences)
        line = f"{score:.6f}\t{source}\t{target}\t{source_line}\t{target_line}\n"
        output.write(line.encode(errors="surrogatepass"))


def _write_jsonl(rows: Iterable[Row], output: BinaryIO) -> None:
    """Write an object per row, with the columns as its fields."""
    for row in rows:
        line = json.dumps(dict(zip(SCHEMA.names, row, strict=True)), ensure_ascii=False)
        output.write(f"{line}\n".encode(errors="surrogatepass"))


def _write_parquet(rows: Iterable[Row], output: BinaryIO) -> None:
    """Write a Parquet file in groups of `GROUP_ROWS` rows."""
    rows = iter(rows)
    with pq.ParquetWriter(output, SCHEMA) as writer:
        while block := list(islice(rows, GROUP_ROWS)):
            columns = [list(column) for column in zip(*block, strict=True)]
            writer.write_table(pa.table(columns, schema=SCHEMA))


#: Ending of a file's name -> function that writes rows to an open file. Others give a table.
WRITERS = {".jsonl": _write_jsonl, ".parquet": _write_parquet}
