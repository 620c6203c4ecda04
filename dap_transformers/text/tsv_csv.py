"""Read TSV and CSV files: their rows, and the columns that hold the texts.

TSV is literal: quotes are text. CSV has commas, semicolons or tabs between its cells, and quotes.
"""

import csv
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from statistics import mode
from typing import NamedTuple

from dap_transformers.errors import UserError, counted, reading
from dap_transformers.files import plain_suffix
from dap_transformers.languages import ISO3, NAMES
from dap_transformers.text.archives import read_lines
from dap_transformers.text.tmx_po import language_in

#: What a column holds, by its name in small letters: the source, the target, the source language of
#: each row, or text of a language.
ROLES = (
    dict.fromkeys(("source", "source_text", "src", "text", "sentence"), "source")
    | dict.fromkeys(("target", "target_text", "tgt", "translation"), "target")
    | dict.fromkeys(("language", "lang", "source_language", "source_lang"), "language")
    | {name.lower(): code for code, name in NAMES.items()}
    | {iso3: code for code, iso3 in ISO3.items()}
    | {code: code for code in NAMES}
)
#: The language of a table that mining has written, because mining does not know it.
UNDETERMINED = "und"
#: Rows or pairs at the start of a file by which it is judged.
JUDGED = 100


class Columns(NamedTuple):
    """The numbers of columns, from 0. `language` holds the source language of each row."""

    source: int = 0
    target: int = 1
    language: int | None = None


#: The cells of a row, the number of cells that it should have, and which of them to take.
Row = tuple[list[str], int, Columns]


def language_of(name: str) -> str | None:
    """Return the code of English or one of the 36 languages, by its code or English name.

    >>> language_of("German"), language_of(" deu"), language_of("text")
    ('de', 'de', None)
    """
    role = ROLES.get(name.strip().lower())
    return role if role in NAMES else None


def find_columns(header: Sequence[str], target: str) -> dict[str, Columns]:
    """Return the columns of the texts for each source language that a first row names.

    The key is "" if the row names the texts, but not their language. The result is empty if the
    row is no header.

    >>> find_columns(["id", "German", "en"], "en")
    {'de': Columns(source=1, target=2, language=None)}
    >>> find_columns(["lang", "text", "English"], "en")
    {'': Columns(source=1, target=2, language=0)}
    """
    places = {ROLES.get(name.strip().lower()): column for column, name in enumerate(header)}
    second = places.pop(target, places.get("target"))
    if second is None:
        return {}
    if "source" in places:
        return {"": Columns(places["source"], second, places.get("language"))}
    found = {role: Columns(column, second) for role, column in places.items() if role in NAMES}
    if len(found) > 1:
        found.pop("id", None)  # numbers of the rows rather than Indonesian
    return found


def table_languages(path: str, target: str, named: set[str]) -> set[str]:
    """Return the source languages of a table. `named` are those of the file name, if any."""
    rows = read_rows(path)
    header = next(rows, [])
    found = find_columns(header, target)
    if "" not in found:
        return set(found) or named
    column = found[""].language
    if column is None:
        return named or ({UNDETERMINED} if header[0] == "score" else set())
    whole = (row for row in rows if len(row) == len(header) and has_text(row))
    return {_row_language(path, row[column]) for row in whole} - {target}


def read_table(path: str, language: str, target: str) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) of the rows of a table in one source language, from 1."""
    rows = enumerate(read_rows(path), 1)
    head = list(islice(rows, JUDGED))
    width = mode([len(cells) for _, cells in head if len(cells) > 1] or [2])
    columns = Columns()
    found = find_columns(head[0][1], target) if head else {}
    if found:
        width = len(head.pop(0)[1])
        columns = found.get(language) or found.get("")
        if columns is None:
            raise UserError(f"{path}: its header names {', '.join(found)}, not {language}")

    place = columns.language
    for number, cells in chain(head, rows):
        is_whole = place is not None and len(cells) == width and has_text(cells)
        if not is_whole or _row_language(path, cells[place]) == language:
            yield number, (cells, width, columns)


def parse_row(row: Row) -> tuple[str, str]:
    """Return (source, target) of a row. Both are empty if the row is blank."""
    cells, width, columns = row
    if not has_text(cells):
        return "", ""
    if len(cells) != width:
        raise UserError(f"{counted(len(cells), 'column')}, expected {width}")
    source, target = cells[columns.source], cells[columns.target]
    if "\r" in source + target:
        raise UserError("carriage return within the line: tr '\\r' ' '")
    return source, target


def has_text(cells: Sequence[str]) -> bool:
    """Tell whether a row is more than blanks, as spreadsheets write at the end."""
    return any(map(str.strip, cells))


def read_rows(path: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a table. Bytes that are not UTF-8 become lone surrogates."""
    lines = (line.decode(errors="surrogateescape") for line in read_lines(path))
    if plain_suffix(path) != ".csv":
        yield from (line.split("\t") for line in lines)
        return
    head = list(islice(lines, JUDGED))
    whole_lines = (f"{line}\n" for line in chain(head, lines))
    with reading(path):  # an open quote would swallow the rest of the file
        yield from csv.reader(whole_lines, delimiter=_delimiter(head), strict=True)


def _delimiter(lines: Sequence[str]) -> str:
    """Return the character that gives most of the first lines as many cells as the first one."""

    def agreement(delimiter: str) -> int:
        widths = [len(cells) for cells in csv.reader(lines, delimiter=delimiter)]
        return widths.count(widths[0]) if widths[:1] > [1] else 0

    return max(",;\t", key=agreement)


def _row_language(path: str, name: str) -> str:
    """Return the language code of a cell. An error names the file."""
    return language_of(name) or language_in(path, name)
