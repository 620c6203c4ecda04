"""Read TSV and CSV files: their rows, and the columns that hold the texts.

TSV is literal: quotes are text. CSV has commas, semicolons or tabs between its cells, and quotes.
"""

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import chain, dropwhile, islice
from statistics import mode
from typing import NamedTuple

from dap_transformers.errors import UserError, counted, reading, warn_once
from dap_transformers.files import plain_suffix
from dap_transformers.languages import ISO3, LANGUAGE_TAG, NAMES, language_in
from dap_transformers.text.archives import decode_line, read_lines
from dap_transformers.text_keys import is_blank

#: Roles of columns that hold texts of any language, or the language of each row.
WITHOUT_LANGUAGE = ["source", "source language", "target language"]
#: What a column holds, by the words of its name: one of these roles, or the code of a language.
ROLES = (
    {"source": "source", "text": "source", "sentence": "source"}
    | {"target": "target", "translation": "target", "target language": "target language"}
    | {"source language": "source language", "language": "source language"}
    | {name.lower(): code for code, name in NAMES.items()}
    | {iso3: code for code, iso3 in ISO3.items()}
    | {code: code for code in NAMES}
)
SHORT_WORDS = {"src": "source", "tgt": "target", "trg": "target", "lang": "language"}
#: Words of a name that do not matter beside others, as in "source_text", "German text", "src_de".
FILLERS = ("", "text sentence", "text sentence translation source target")
#: First columns of a table that mining has written.
MINED = ["score", "source", "target"]
#: The language of such a table, because mining does not know it.
UNDETERMINED = "und"
#: Rows or pairs at the start of a file by which it is judged.
JUDGED = 100
#: Share of texts without words that makes a column or a side one of numbers, keys or addresses.
NO_TEXT_SHARE = 0.9
#: Characters of a text by which it is judged.
_JUDGED = 200
#: No text: a number, one ASCII "word" with a digit (2019-05-01, de-000017), an address, or a key
#: (menu.file.open, ERR_NOT_FOUND).
_NO_TEXT = re.compile(
    r"[\W\d]*\d[\W\d]*"
    r"|[A-Za-z0-9_.,:;/+%~#=&?-]*[0-9][A-Za-z0-9_.,:;/+%~#=&?-]*"
    r"|(?:[A-Za-z][A-Za-z+.-]*://|(?i:www)\.|mailto:)\S+"
    r"|[\w-]+(?:\.[\w-]+)+/\S*"
    r"|[A-Za-z0-9-]+(?:[._][A-Za-z0-9-]+)+"
)


class Columns(NamedTuple):
    """The numbers of columns, from 0.

    `languages` are those that hold the source language of each row, or both languages.
    """

    source: int = 0
    target: int = 1
    languages: tuple[int, ...] = ()


#: The cells of a row, the number of cells that it should have, and which of them to take.
Row = tuple[list[str], int, Columns]


def is_no_text(text: str) -> bool:
    """Tell whether a text is a number, a key or an address.

    >>> is_no_text("1.25"), is_no_text("menu.file.open"), is_no_text("Hello")
    (True, True, False)
    """
    return _NO_TEXT.fullmatch(text.strip()[:_JUDGED]) is not None


def role_of(name: str) -> str | None:
    """Return what a column of this name holds, as in `ROLES`. Regions and signs do not matter.

    >>> role_of("# English (US)"), role_of("de-AT"), role_of("target_text"), role_of("texte")
    ('en', 'de', 'target', None)
    """
    if len(name) > _JUDGED:
        return None  # a text
    words = re.findall(r"[^\W_]+", name)
    words = [SHORT_WORDS.get(word.lower(), word) for word in words]
    for fillers in FILLERS:
        kept = [word for word in words if word.lower() not in fillers.split()]
        language = ROLES.get(" ".join(kept[:1]).lower(), "")
        if re.fullmatch(LANGUAGE_TAG, "-".join([language, *kept[1:]])):
            return language
        if role := ROLES.get(" ".join(kept).lower()):
            return role
    return None


@lru_cache
def language_of(name: str) -> str | None:
    """Return the code of English or one of the 36 languages, by its code or English name.

    >>> language_of("German"), language_of(" deu"), language_of("text")
    ('de', 'de', None)
    """
    role = role_of(name)
    return role if role in NAMES else None


def find_columns(path: str, target: str, named: set[str]) -> dict[str, Columns]:
    """Return the columns of the texts for each source language that the first row names.

    The key is "" if the row names the texts, but not their language. The result is empty if the
    row is no header. The first row of a TSV file with two columns may be a pair that looks like
    names, such as "Finnisch" and "Finnish". So it is no error.

    Args:
        named: the source languages that the file name tells, or the one to read.

    Raises:
        UserError: if the row names columns, but not one target and its sources.
    """
    header, roles = _roles(path, {*named, target})
    targets = [role for role in roles if role in (target, "target")]
    others = sorted(role for role in roles if role and role not in targets)
    columns = [roles.index(role) for role in others]
    languages = set(others)
    if len(targets) == 1 and others:
        second = roles.index(targets[0])
        if others == WITHOUT_LANGUAGE[: len(others)]:
            return {"": Columns(columns[0], second, tuple(columns[1:]))}
        is_clear = len(languages) == len(others) and languages.isdisjoint(WITHOUT_LANGUAGE)
        if is_clear and (languages & named or not named):
            return {code: Columns(column, second) for code, column in zip(others, columns)}

    is_pair = plain_suffix(path) == ".tsv" and len(header) == 2 and roles[0] not in targets
    is_likely = named or (targets and others)
    if any(roles) and is_likely and not is_pair:
        shown = ", ".join(f"{name!r} ({role})" for name, role in zip(header, roles) if role)
        pair = f"{min(named, default='de')},{target}"
        raise UserError(
            f"{path}: the first line names {shown}: which is the source and which the target? Call "
            f"these two {pair} and the others differently. If the line is a pair, write {pair} "
            "above it"
        )
    return {}


def _roles(path: str, codes: Collection[str]) -> tuple[list[str], list[str | None]]:
    """Return the first row of a table, and the role of each of its columns.

    Args:
        codes: the languages of the file, which may be others than the 36.
    """
    rows = read_rows(path)
    header = next(rows, [])
    roles = []
    for name in header:
        code = name.strip().lower()
        roles.append(role_of(name) or (code if code in codes else None))
    if "id" not in roles:
        return header, roles

    # A column "id" holds numbers or keys of the rows. It is Indonesian if the file name says so, or
    # if some of its cells have several words.
    is_key = is_no_text if "id" in codes else lambda cell: " " not in cell
    whole = [row for row in islice(rows, JUDGED) if len(row) == len(header)]
    for column, name in enumerate(header):
        if roles[column] == "id" and name.strip().lower().endswith("id"):
            cells = [row[column].strip() for row in whole if row[column].strip()]
            if sum(map(is_key, cells)) >= NO_TEXT_SHARE * len(cells):
                roles[column] = None
    return header, roles


def table_languages(path: str, target: str, named: set[str]) -> set[str]:
    """Return the source languages of a table. `named` are those of the file name, if any.

    If the rows state their languages, a warning counts those of other languages.
    """
    found = find_columns(path, target, named)
    if "" not in found:
        filled = {code for code in found if next(read_table(path, code, target), None)}
        return filled or named
    columns = found[""]
    rows = read_rows(path)
    header = next(rows)
    if header[:3] == MINED:
        named = named or {UNDETERMINED}
    if not columns.languages:
        return named

    whole = (row for row in rows if len(row) == len(header))
    counts = Counter(_stated_languages(path, row, columns) for row in whole)
    sources = set()
    left_out = {}
    for (first, *second), count in counts.items():
        if first != target and second in ([], [target]):
            sources.add(first)
        else:
            left_out["-".join([first, *second])] = count
    if left_out:
        warn_once("%s: rows of other languages are left out: %s", path, str(left_out))
    return sources


def read_table(path: str, language: str, target: str) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) of the rows of a table in one source language.

    The first row of the file has the number 1. Rows that are blank or have a wrong number of cells
    are yielded as well. Rows with an empty side are left out if several columns hold source texts,
    or if `mine-bitext` has written the table, because some texts have no translation.
    """
    found = find_columns(path, target, {language})
    columns = found.get(language) or found.get("", Columns())
    rows = dropwhile(lambda row: not has_text(row[1]), enumerate(_all_rows(path), 1))
    head = list(islice(rows, JUDGED))
    width = mode([len(cells) for _, cells in head if len(cells) > 1] or [2])
    has_gaps = len(found) > 1
    if found:
        header = head.pop(0)[1]
        width = len(header)
        has_gaps |= header[:3] == MINED

    stated = (language, target)[: len(columns.languages)]
    for number, cells in chain(head, rows):
        if (stated or has_gaps) and len(cells) == width and has_text(cells):
            if stated and _stated_languages(path, cells, columns) != stated:
                continue
            if has_gaps and any(is_blank(cells[column]) for column in columns[:2]):
                continue
        yield number, (cells, width, columns)


def parse_row(row: Row) -> tuple[str, str]:
    """Return (source, target) of a row. Both are empty if the row is blank."""
    cells, width, columns = row
    if len(cells) != width:
        if not has_text(cells):
            return "", ""
        raise UserError(f"{counted(len(cells), 'column')}, expected {width}")
    source, target = cells[columns.source], cells[columns.target]
    for text in (source, target):
        if not text.isprintable() and has_text(cells):
            decode_line(text.encode(errors="surrogateescape"))  # raises for a bad line
    return source, target


def read_rows(path: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a table that is not blank.

    Bytes that are not UTF-8 become lone surrogates.
    """
    return filter(has_text, _all_rows(path))


def has_text(cells: Sequence[str]) -> bool:
    """Tell whether a row is more than blanks, as spreadsheets write at the end."""
    return any(map(str.strip, cells))


def _all_rows(path: str) -> Iterator[list[str]]:
    """Yield the cells of each row of a table."""
    lines = (line.decode(errors="surrogateescape") for line in read_lines(path))
    if plain_suffix(path) != ".csv":
        yield from (line.split("\t") for line in lines)
        return
    head = list(islice(lines, JUDGED))
    whole_lines = (f"{line}\n" for line in chain(head, lines))
    with reading(path):  # an open quote would swallow the rest of the file
        delimiter = _delimiter([line for line in head if line.strip()])
        if head and (stated := re.fullmatch('"?sep=(.)"?', head[0])):  # Excel's word for it
            delimiter = stated[1]
            next(whole_lines)
        yield from csv.reader(whole_lines, delimiter=delimiter, strict=True)


def _delimiter(lines: Sequence[str]) -> str:
    """Return the character that gives most of the first lines as many cells as the first one.

    Of several, it is the one that is seldom in text.
    """

    def agreement(delimiter: str) -> int:
        widths = [len(cells) for cells in csv.reader(lines, delimiter=delimiter)]
        return widths.count(widths[0]) if widths[:1] > [1] else 0

    return max("\t;,", key=agreement)


def _stated_languages(path: str, cells: Sequence[str], columns: Columns) -> tuple[str, ...]:
    """Return the codes of the languages that a row states."""
    names = [cells[column] for column in columns.languages]
    return tuple(language_of(name) or language_in(path, name) for name in names)
