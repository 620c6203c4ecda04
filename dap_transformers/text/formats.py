"""Read the pairs of a file. Every format has the same checks and the same count of bad lines.

Only LF or CR LF ends a line, so that U+2028 or U+0085 inside a sentence do not tear it apart.

A *bad line* has one empty side (nothing that a reader sees), too few or too many columns, a
carriage return, invalid UTF-8 or invalid JSON. Two empty sides stand between documents, and are no
fault. Bad lines are logged, counted and skipped as long as their share of the file stays within
`max_bad_lines`. The share is judged at the end of the file, or as soon as there are more bad lines
than a file of 100,000 lines may have.

A new format is one function and one entry in `FORMATS`. All commands then read it:

    def parse_ssv(line: bytes) -> list[str]:
        return decode_line(line).split(" || ")

    FORMATS["ssv"] = Format(read_numbered_lines, parse_ssv)
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dap_transformers.errors import QUOTED_ERRORS, UserError, counted, reading, warn_once
from dap_transformers.files import plain_suffix
from dap_transformers.languages import LANGUAGE_TAG, SCRIPTS, base_language
from dap_transformers.text.archives import decode_line, read_lines
from dap_transformers.text.tmx_po import catalogue_pairs, memory_pairs
from dap_transformers.text.tsv_csv import (
    JUDGED,
    MINED,
    NO_TEXT_SHARE,
    UNDETERMINED,
    Columns,
    is_no_text,
    language_of,
    parse_row,
    read_table,
)
from dap_transformers.text_keys import is_blank

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

#: Lines after which a file may be refused before its end.
JUDGE_AFTER = 100_000
#: Most rows of a table.
BATCH = 10_000
#: Words that hardly any other language has, and how many of them tell that a side is English.
ENGLISH = r"(?i)(?:^|[^\pL])(the|and|with|this|that)(?:$|[^\pL])"
LEAST_ENGLISH = 8
#: Such words per pair of a swapped file, at least.
ENGLISH_SHARE = 1 / 10
SIDES = ("source", "target")
#: Columns of the tables. `line` counts from 1: lines, units of TMX, or rows of Parquet and the Hub.
TABLE = pa.schema({"line": pa.int64(), "source": pa.string(), "target": pa.string()})

#: The number of a line, unit or row, and its content.
Numbered = Iterator[tuple[int, Any]]


@dataclass(frozen=True)
class BitextFile:
    """A file (or two, or a Hub dataset) with the pairs of one source language.

    Attributes:
        paths: one path. For `"moses"`, the source side and the target side. For `"hub"`, the id
            of a dataset and its configuration, `user/name:config`.
        format: a key of `FORMATS`.
        columns: where the texts are in a table.
        streaming: read a Hub dataset without downloading it first.
    """

    language: str
    paths: tuple[str, ...]
    format: str
    target_language: str = "en"
    columns: Columns = Columns()
    streaming: bool = False

    def __str__(self) -> str:
        return " + ".join(self.paths)


@dataclass(frozen=True)
class Format:
    """The two functions that read the pairs of one format.

    Attributes:
        read: takes a file, and yields (number, content) of each line, unit or row. The content may
            have any form, such as a line's bytes.
        parse: takes one content, and returns (source, target). It raises `ValueError` for a bad
            line.
    """

    read: Callable[[BitextFile], Numbered]
    parse: Callable[[Any], Iterable[str]]


class LineAudit:
    """Counts the bad lines of a file and raises an error when there are too many.

    Attributes:
        file: the file, or its name, for messages.
        limit: share of its lines that may be bad, 0 to 1.
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
        if self.bad <= QUOTED_ERRORS:
            self._quoted.append(f"line {self.lines}: {reason}")
            warn_once("%s, line %d skipped: %s", self.file, self.lines, str(reason))
        self.judge(max(self.lines, JUDGE_AFTER))

    def judge(self, lines: int) -> None:
        """Raise `UserError` if more lines are bad so far than `max_bad_lines` allows of `lines`."""
        if self.bad <= self.limit * lines:
            return
        advice = ": a higher limit drops these lines" if self.limit else ""
        raise UserError(
            f"{self.file}: {self.bad} of the first {self.lines} lines are bad, more than "
            f"max_bad_lines={self.limit:g} allows ({'; '.join(self._quoted)}); repair the file"
            f"{advice}"
        )

    def finish(self) -> None:
        """Check the share of bad lines at the end of a file, and log their number."""
        self.judge(self.lines)
        if self.bad:
            text = "%s: %d of %d lines skipped (limit %g)"
            warn_once(text, self.file, self.bad, self.lines, self.limit)


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
                blank = (is_blank(source), is_blank(target))
                if all(blank):
                    continue
                if any(blank):
                    raise UserError(f"empty {SIDES[blank.index(True)]} side")
                (source + target).encode()  # raises for "\ud800", which is valid JSON but no text
            except (ValueError, RecursionError) as error:  # RecursionError: deeply nested JSON
                audit.reject(error)
                continue
            lines.append(line)
            sources.append(source)
            targets.append(target)
        if lines:
            table = pa.table([lines, sources, targets], schema=TABLE)
            if not has_pairs:
                _require_text(file, table[:JUDGED])
                _require_order(file, table[:JUDGED])
            has_pairs = True
            yield table

    audit.finish()
    if not has_pairs:
        raise UserError(f"{file}: holds no pair of language {file.language!r}; remove or fill it")


def _require_text(file: BitextFile, table: pa.Table) -> None:
    """Raise `UserError` if a side of the first pairs is codes, keys or few different values."""
    sides = [table[side].to_pylist() for side in SIDES]
    most = max(2, NO_TEXT_SHARE * (len(table) - 1))  # -1: a header
    codes = [pair for pair in zip(*sides) if all(map(language_of, pair))]
    # a column that a name has told may hold one word in a few rows
    is_guessed = file.format in ("tsv", "csv") and not file.columns.has_header
    few = 2 if is_guessed else 20
    for name, texts, others in zip(SIDES, sides, sides[::-1]):
        no_text = list(filter(is_no_text, texts))
        different, of_others = len(set(texts)), len(set(others))
        has_few_values = of_others > few and different <= max(1, of_others // 20)
        if has_few_values or max(len(no_text), len(codes)) >= most:
            raise UserError(
                f"{file}: the {name} side holds {texts[-1]!r} and the like, no text; keep only the "
                "columns of source and target, name the columns in the first line, or leave out "
                f"language {file.language!r}"
            )


def _require_order(file: BitextFile, table: pa.Table) -> None:
    """Raise `UserError` if the two sides of the first pairs seem to be swapped.

    Each side then has more letters of the other language's scripts. If the target is English, it
    is also enough that the source has three times as many frequent English words as the target.
    """
    first, second = file.language, file.target_language
    source, target = table["source"], table["target"]
    is_swapped = is_in_other_script(source, first) and is_in_other_script(target, second)
    if second == "en" and first != UNDETERMINED:
        least = max(LEAST_ENGLISH, ENGLISH_SHARE * len(table), 3 * _count(target, ENGLISH))
        is_swapped |= _count(source, ENGLISH) >= least
    if is_swapped:
        raise UserError(
            f"{file}: the two sides are swapped: {first} must come first, then {second}"
        )


def is_in_other_script(texts: pa.Array, language: str) -> bool:
    """Tell whether most letters of the first texts are of scripts that a language does not use."""
    texts = texts[:JUDGED]
    code = base_language(language)
    return code in SCRIPTS and 2 * _letters(texts, code) < _letters(texts)


def _letters(texts: pa.Array | pa.ChunkedArray, language: str | None = None) -> int:
    """Return how many letters of a language's scripts, or of all, are in all texts together."""
    scripts = "".join(rf"\p{{{script}}}" for script in SCRIPTS.get(language, ("L",)))
    return _count(texts, f"[{scripts}]")


def _count(texts: pa.Array | pa.ChunkedArray, pattern: str) -> int:
    """Return how many matches of a pattern are in all texts together."""
    return pc.sum(pc.count_substring_regex(texts, pattern), min_count=0).as_py()


# ------------------------------------------------------------------------------ lines of text


def read_numbered_lines(file: BitextFile) -> Numbered:
    """Yield (number, bytes without the line's end) of each line of a file, from 1."""
    return enumerate(read_lines(file.paths[0]), 1)


def is_mined(path: Path) -> bool:
    """Tell by its first fields whether `mine-bitext` wrote a JSONL or Parquet file.

    False for a damaged file, which is refused when it is read.
    """
    with suppress(ValueError, TypeError, OSError, RecursionError):
        if plain_suffix(path) == ".parquet":
            return pq.read_schema(path).names[:3] == MINED
        return [*json.loads(next(read_lines(path), b"{}"))][:3] == MINED
    return False


def read_json_lines(file: BitextFile) -> Numbered:
    """Yield (number, (bytes of the line, file)) of each line of a file, from 1."""
    return ((number, (line, file)) for number, line in read_numbered_lines(file))


def parse_json(content: tuple[bytes, BitextFile]) -> Sequence[str]:
    """Return [source, target] of a line that holds a JSON object, as `sides_of` takes it."""
    line, file = content
    text = decode_line(line)
    return ("", "") if is_blank(text) else texts_of(sides_of(json.loads(text), file))


def sides_of(row: Any, file: BitextFile) -> Sequence[Any]:
    """Return the two texts of a row, from `source` and `target` or from fields named by languages.

    The latter may be inside a field `translation`, as in datasets of the Hub. Both texts are empty
    if mining found no translation, so that the row has no score and an empty side.
    """
    try:
        if "source" in row and "target" in row:
            sides = row["source"], row["target"]
            is_alone = [*row][:3] == MINED and row["score"] is None and not all(sides)
            return ("", "") if is_alone else sides
        texts = row.get("translation", row)
        return [text_in(texts, code) for code in (file.language, file.target_language)]
    except (AttributeError, ValueError, TypeError):
        expected = f"{SIDES} or {file.language, file.target_language}"
        raise ValueError(f"expected fields {expected}, found {str(row)[:99]}") from None


def text_in(texts: Mapping[str, Any], code: str) -> Any:
    """Return the text in the field `code`, or else in the only variant of it, such as `de-AT`.

    Raises:
        ValueError: if there is no such field, or several variants.
    """
    if code in texts:
        return texts[code]
    tags = (name for name in texts if re.fullmatch(LANGUAGE_TAG, name))
    (name,) = [name for name in tags if base_language(name) == code]
    return texts[name]


def parse_fields(content: Sequence[Any]) -> Sequence[str]:
    """Return [source, target] as text, given both, or a row and its file for `sides_of`."""
    first, second = content
    return texts_of(sides_of(first, second) if isinstance(second, BitextFile) else content)


def texts_of(sides: Sequence[Any]) -> Sequence[str]:
    """Return [source, target] as text. Bytes are decoded from UTF-8, and None is empty."""
    texts = []
    for name, side in zip(SIDES, sides):
        side = side.decode() if isinstance(side, bytes) else side or ""
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
    """Yield (number, (source, target)) of each row of a Parquet file with these columns, from 1.

    Of any other file, yield (number, (row, file)). Source and target are bytes that are not decoded
    yet, so that one text of invalid UTF-8 does not stop the whole block. A missing one is None.
    """
    with reading(file), pq.ParquetFile(file.paths[0]) as table:
        first = 1
        names = table.schema_arrow.names
        columns = list(SIDES) if {*SIDES} <= {*names} and names[:3] != MINED else None
        for block in table.iter_batches(BATCH, columns=columns):
            if columns:
                rows = zip(*(block[side].cast(pa.large_binary()).to_pylist() for side in SIDES))
            else:
                rows = ((row, file) for row in block.to_pylist())
            yield from enumerate(rows, first)
            first += len(block)


def hub_dataset(name: str, streaming: bool) -> Union["Dataset", "IterableDataset"]:
    """Load the training split of a Hub dataset, given its name `user/name:config`."""
    from datasets import load_dataset

    dataset, _, config = name.partition(":")
    with reading(f"the training split of {name}"):
        return load_dataset(dataset, config, split="train", streaming=streaming)


def read_hub(file: BitextFile) -> Numbered:
    """Yield (number, (row, file)) of each row of a Hub dataset. Numbers start at 1.

    The columns `source` and `target` are swapped if the configuration names the target language
    first, as `en-de`.
    """
    [name] = file.paths
    dataset = hub_dataset(name, file.streaming)
    first_language = re.search(r":([A-Za-z]{2,3})[-_]", name)
    is_swapped = bool(first_language) and base_language(first_language[1]) == file.target_language

    with reading(f"the rows of {file}"):  # the Hub's client raises any error if a stream breaks off
        for number, row in enumerate(dataset, 1):
            if is_swapped and row.keys() >= {*SIDES}:
                yield number, (row["target"], row["source"])
            else:
                yield number, (row, file)


# ----------------------------------------------------------------------------------- formats


def read_columns(file: BitextFile) -> Numbered:
    """Yield (number, row) of each row of a TSV or CSV file in the file's language."""
    return read_table(file.paths[0], file.columns, (file.language, file.target_language))


def read_tmx(file: BitextFile) -> Numbered:
    """Yield (number of the unit, (source, target)) of each pair in a TMX file."""
    return memory_pairs(file.paths[0], file.language, file.target_language)


#: The formats by their name, which is the extension of a file name that tells both languages.
FORMATS: dict[str, Format] = {
    "tsv": Format(read_columns, parse_row),
    "csv": Format(read_columns, parse_row),
    "jsonl": Format(read_json_lines, parse_json),
    "parquet": Format(read_parquet, parse_fields),
    "moses": Format(read_moses, parse_moses),
    "tmx": Format(read_tmx, tuple),
    "po": Format(lambda file: catalogue_pairs(file.paths[0]), tuple),
    "hub": Format(read_hub, parse_fields),
}
