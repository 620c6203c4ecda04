"""Read the pairs of a file. Every format has the same checks and the same count of bad lines.

Text is taken literally. Quotes are text, and only LF or CR LF ends a line, so that U+2028 or U+0085
inside a sentence do not tear it apart.

A *bad line* has only one column, more or fewer columns than most lines, or an empty side (nothing
that a reader sees). Or it has a carriage return, invalid UTF-8 or invalid JSON.
Bad lines are logged, counted and skipped as long as their share of the file stays within
`max_bad_lines`. The share is judged at the end of the file, because one bad line among the first
ten says nothing about a file of a million lines. Reading stops earlier only if there are more bad
lines than a file of 100,000 lines may have. After that many lines, the lines read so far count.

A new format is one function and one entry in `FORMATS`. All commands then read it:

    def parse_csv(line: bytes) -> list[str]:
        return decode_line(line).split(";")

    FORMATS["csv"] = Format(read_numbered_lines, parse_csv)
"""

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import pyarrow as pa
import pyarrow.parquet as pq

from dap_transformers.errors import SHOWN, UserError, counted, reading
from dap_transformers.languages import base_language, is_blank
from dap_transformers.text.archives import decode_line, read_lines
from dap_transformers.text.tmx_po import catalogue_pairs, memory_pairs

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)
_warn_once = cache(logger.warning)  # a second pass over a file repeats no warning

#: Lines after which a file may be refused before its end.
JUDGE_AFTER = 100_000
#: Most rows of a table.
BATCH = 10_000
SIDES = ("source", "target")
#: Lines at the start of a TSV file by which its columns are judged, and the share of them without
#: text that makes a column one of numbers, ids or addresses.
JUDGED_LINES = 100
NO_TEXT_SHARE = 0.9
#: Characters of a cell that are judged.
_JUDGED = 200
#: A cell without text: a number, one ASCII "word" with a digit (2019-05-01, de-000017), an address.
_NO_TEXT = re.compile(
    r"[\W\d]*\d[\W\d]*"
    r"|[A-Za-z0-9_.,:;/+%~#=&?-]*[0-9][A-Za-z0-9_.,:;/+%~#=&?-]*"
    r"|(?:[A-Za-z][A-Za-z+.-]*://|(?i:www)\.|mailto:)\S+"
    r"|[\w-]+(?:\.[\w-]+)+/\S*"
)
#: First line of a table that mining has written. Its sentences are in the second and third column.
MINED_HEADER = b"score\tsource\ttarget\tsource_line\ttarget_line"

#: Columns of the tables. `line` counts from 1: lines, units of TMX, or rows of Parquet and the Hub.
TABLE = pa.schema({"line": pa.int64(), "source": pa.string(), "target": pa.string()})

#: The number of a line, unit or row, and its content.
Numbered = Iterator[tuple[int, Any]]


@dataclass(frozen=True)
class BitextFile:
    """A file (or two, or a Hub dataset) with the pairs of one source language.

    Attributes:
        language: ISO 639-1 for the 36 known languages, otherwise the code as given.
        paths: one path. For `"moses"`, the source side and the target side. For `"hub"`, the id
            of a dataset.
        format: a key of `FORMATS`.
        config: the configuration of a Hub dataset. None for files.
        streaming: read a Hub dataset without downloading it first.
    """

    language: str
    paths: tuple[str, ...]
    format: str
    target_language: str = "en"
    config: str | None = None
    streaming: bool = False

    def __str__(self) -> str:
        name = " + ".join(self.paths)
        return f"{name}:{self.config}" if self.config else name


class TSVLine(NamedTuple):
    """A line of a TSV file, with what must be known of the file to parse it.

    Attributes:
        content: the line's bytes, without its end.
        count: number of columns that most of the file's first lines have, at least 2.
        first: index of the source's column, from 0. The target's column follows it.
    """

    content: bytes
    count: int
    first: int


@dataclass(frozen=True)
class Format:
    """The two functions that read the pairs of one file format.

    Attributes:
        read: takes a file, and yields (number, content) of each line, unit or row. The content may
            have any form, such as a line's bytes.
        parse: takes one content, and returns (source, target). It raises `ValueError` for a bad
            line.
        languages_in_name: True if the file name tells both languages, as `de-en.tsv` does.
    """

    read: Callable[[BitextFile], Numbered]
    parse: Callable[[Any], Iterable[str]]
    languages_in_name: bool = True


class LineAudit:
    """Counts the bad lines of a file and raises an error when there are too many.

    Args:
        file: the file, or its name, for messages.
        max_bad_lines: share of the file's lines that may be bad, 0 to 1.

    Attributes:
        bad: number of bad lines so far.
        lines: number of the last line that was read.
    """

    def __init__(self, file: object, max_bad_lines: float) -> None:
        if not 0.0 <= max_bad_lines <= 1.0:
            raise UserError(f"max_bad_lines={max_bad_lines}: give a share of lines, 0 to 1")
        self.file = file
        self.limit = max_bad_lines
        self.bad = 0
        self.lines = 0
        self._quoted: list[str] = []

    def reject(self, reason: object) -> None:
        """Count the current line of the file as bad. The first ones are logged as warnings."""
        self.bad += 1
        if self.bad <= SHOWN:
            self._quoted.append(f"line {self.lines}: {reason}")
            _warn_once("%s, line %d skipped: %s", self.file, self.lines, str(reason))
        self.judge(max(self.lines, JUDGE_AFTER))

    def judge(self, lines: int) -> None:
        """Raise `UserError` if more lines are bad so far than `max_bad_lines` allows of `lines`."""
        if self.bad <= self.limit * lines:
            return
        raise UserError(
            f"{self.file}: {self.bad} of the first {self.lines} lines are bad, more than "
            f"max_bad_lines={self.limit:g} allows ({'; '.join(self._quoted)}); repair the file, or "
            "allow more"
        )

    def finish(self) -> None:
        """Check the share of bad lines at the end of a file, and log their number."""
        self.judge(self.lines)
        if self.bad:
            percent = 100 * self.limit
            text = "%s: %d of %d lines skipped (limit %.3g%%)"
            _warn_once(text, self.file, self.bad, self.lines, percent)


def read_pairs(file: BitextFile, max_bad_lines: float = 0.001) -> Iterator[dict[str, str]]:
    """Yield the pairs of a file in its order, as `{"source": …, "target": …}`.

    A share of `max_bad_lines` of its lines may be bad, 0 to 1. They are skipped.
    """
    for table in read_tables(file, LineAudit(file, max_bad_lines)):
        yield from table.drop_columns("line").to_pylist()


def read_tables(file: BitextFile, audit: LineAudit) -> Iterator[pa.Table]:
    """Yield the pairs of a file in its order, in tables of at most `BATCH` pairs.

    The columns are `source`, `target` and `line`, the number of the line in the file, from 1. The
    audit counts the bad lines, which are skipped, and decides when there are too many.
    """
    file_format = FORMATS[file.format]
    contents = file_format.read(file)
    has_pairs = False
    while batch := list(islice(contents, BATCH)):
        lines, sources, targets = [], [], []
        for line, content in batch:
            audit.lines = line
            try:
                source, target = file_format.parse(content)
                for name, side in zip(SIDES, (source, target)):
                    if is_blank(side):
                        raise UserError(f"empty {name} side")
            except (ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
                audit.reject(error)
                continue
            lines.append(line)
            sources.append(source)
            targets.append(target)
        if lines:
            has_pairs = True
            yield pa.table([lines, sources, targets], schema=TABLE)

    audit.finish()
    if not has_pairs:
        raise UserError(f"{file}: holds no pair of language {file.language!r}; remove or fill it")


# ------------------------------------------------------------------------------ lines of text


def read_numbered_lines(file: BitextFile) -> Numbered:
    """Yield (number, bytes without the line's end) of each line of a file, from 1."""
    return enumerate(read_lines(file.paths[0]), 1)


def read_tsv(file: BitextFile) -> Iterator[tuple[int, TSVLine]]:
    """Yield (number, `TSVLine`) of each line of a TSV file. Numbers start at 1.

    The header of a table that mining has written is left out.
    """
    lines = read_lines(file.paths[0])
    head = list(islice(lines, JUDGED_LINES))
    is_mined = head[:1] == [MINED_HEADER]
    if is_mined:
        head.pop(0)
    else:
        _require_text(file, head)
    counts = Counter(line.count(b"\t") + 1 for line in head if b"\t" in line)
    count = max(counts, key=counts.__getitem__, default=2)
    for number, line in enumerate(chain(head, lines), 1 + is_mined):
        yield number, TSVLine(line, count, int(is_mined))


def _require_text(file: BitextFile, lines: Sequence[bytes]) -> None:
    """Raise `UserError` if at least 90% of the first or second column's cells hold no text."""
    rows = [line.decode(errors="replace").split("\t") for line in lines]
    for column in (0, 1):
        cells = [row[column].strip()[:_JUDGED] for row in rows if len(row) > column]
        no_text = [cell for cell in cells if _NO_TEXT.fullmatch(cell)]
        is_all = len(no_text) == len(cells)
        is_most = len(no_text) >= max(2, NO_TEXT_SHARE * (len(cells) - 1))  # -1: a header
        if no_text and (is_all or is_most):
            raise UserError(
                f"{file}: column {column + 1} holds numbers or addresses ({no_text[0]!r}), no "
                "text; keep only the columns of source and target: cut -f2,3"
            )


def parse_tsv(line: TSVLine) -> Sequence[str]:
    """Return [source, target] of a line of a TSV file."""
    cells = decode_line(line.content).split("\t")
    if len(cells) != line.count:
        raise UserError(f"{counted(len(cells), 'column')}, expected {line.count}")
    return cells[line.first : line.first + 2]


def parse_json(line: bytes) -> Sequence[str]:
    """Return [source, target] of a line that holds a JSON object with fields of these names."""
    record = json.loads(decode_line(line))
    try:
        sides = record["source"], record["target"]
    except (KeyError, TypeError):
        raise UserError('expected an object {"source": …, "target": …}') from None
    texts = texts_of(sides)
    for text in texts:
        text.encode()  # raises for "\ud800", which is valid JSON but no text
    return texts


def texts_of(sides: Sequence[Any]) -> Sequence[str]:
    """Return [source, target] as text. Bytes are decoded from UTF-8."""
    texts = []
    for name, side in zip(SIDES, sides):
        if isinstance(side, bytes):
            side = side.decode()
        if not isinstance(side, str):
            raise UserError(f"{name} side is {side!r}, expected text")
        texts.append(side)
    return texts


def read_moses(file: BitextFile) -> Numbered:
    """Yield (number, (source line, target line)) of a Moses pair of files, from 1, as bytes."""
    source, target = (sum(1 for _ in read_lines(path)) for path in file.paths)
    if source != target:
        raise UserError(
            f"the two sides differ in length: {file.paths[0]} has {counted(source, 'line')}, "
            f"{file.paths[1]} has {target}; line i of one must translate line i of the other"
        )
    return enumerate(zip(*map(read_lines, file.paths), strict=True), 1)


def parse_moses(lines: Sequence[bytes]) -> Sequence[str]:
    """Return [source, target] of a pair of lines, decoded from UTF-8."""
    return [decode_line(line) for line in lines]


# ------------------------------------------------------------------------------------ tables


def read_parquet(file: BitextFile) -> Numbered:
    """Yield (number, (source, target)) of each row of a Parquet file. Numbers start at 1.

    Texts are bytes that are not decoded yet, so that one text of invalid UTF-8 does not stop the
    reading of the whole block. A missing text is None.
    """
    with reading(file), pq.ParquetFile(file.paths[0]) as table:
        first = 1
        for block in table.iter_batches(BATCH, columns=list(SIDES)):
            texts = [block[side].cast(pa.large_binary()).to_pylist() for side in SIDES]
            yield from enumerate(zip(*texts), first)
            first += len(block)


def hub_dataset(
    dataset: str, config: str | None, streaming: bool
) -> Union["Dataset", "IterableDataset"]:
    """Load the training split of a Hub dataset. Without a `config`, take the default one."""
    from datasets import load_dataset

    with reading(f"the training split of {dataset}" + (f":{config}" if config else "")):
        return load_dataset(dataset, config, split="train", streaming=streaming)


def read_hub(file: BitextFile) -> Numbered:
    """Yield (number, (source, target)) of each row of a Hub dataset. Numbers start at 1.

    Rows have a column `translation` (language code -> text), or the columns `source` and
    `target`. In the second case the two are swapped if the configuration names the target
    language first, as `en-de`. A text that is missing in `translation` is None.
    """
    dataset = hub_dataset(file.paths[0], file.config, file.streaming)
    first_language = re.match(r"([A-Za-z]{2,3})[-_]", file.config or "")
    is_swapped = bool(first_language) and base_language(first_language[1]) == file.target_language
    source, target = reversed(SIDES) if is_swapped else SIDES

    with reading(f"the rows of {file}"):  # the Hub's client raises any error if a stream breaks off
        for number, row in enumerate(dataset, 1):
            if "translation" in row:
                texts = {base_language(code): text for code, text in row["translation"].items()}
                yield number, (texts.get(file.language), texts.get(file.target_language))
            else:
                yield number, (row[source], row[target])


# ----------------------------------------------------------------------------------- formats


def read_tmx(file: BitextFile) -> Numbered:
    """Yield (number of the unit, (source, target)) of each pair in a TMX file."""
    return memory_pairs(file.paths[0], file.language, file.target_language)


def read_po(file: BitextFile) -> Numbered:
    """Yield (line number, (translation, original)) of each translated entry of a PO file."""
    return catalogue_pairs(file.paths[0])


#: The formats by their name. If a file name tells the languages, the format is its extension.
FORMATS: dict[str, Format] = {
    "tsv": Format(read_tsv, parse_tsv),
    "jsonl": Format(read_numbered_lines, parse_json),
    "parquet": Format(read_parquet, texts_of),
    "moses": Format(read_moses, parse_moses, languages_in_name=False),
    "tmx": Format(read_tmx, tuple, languages_in_name=False),
    "po": Format(read_po, tuple, languages_in_name=False),
    "hub": Format(read_hub, texts_of, languages_in_name=False),
}
