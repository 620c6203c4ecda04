"""Read TSV and CSV files: their rows, and the columns that hold the texts.

TSV is literal: quotes are text. CSV has commas, semicolons, tabs or `|` between its cells, and
quotes.
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
LONGEST_JUDGED = 200
#: Most characters of a cell in a CSV file. Python's own limit of 131,072 would stop the file.
LONGEST_CELL = 2**31 - 1
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
    """Where the texts of a table are. Columns count from 0.

    Attributes:
        width: number of cells that a row should have.
        languages: the columns with the source language of each row, or with both languages.
        has_header: whether the first line names the columns.
        may_be_empty: whether a row with an empty side is no fault. Of several source languages, and
            of texts that `mine-bitext` has aligned, some sentences have no translation.
    """

    width: int = 2
    source: int = 0
    target: int = 1
    languages: tuple[int, ...] = ()
    has_header: bool = False
    may_be_empty: bool = False


#: The cells of a row, and which of them to take.
Row = tuple[list[str], Columns]


def is_no_text(text: str) -> bool:
    """Tell whether a text is a number, a key or an address.

    >>> is_no_text("1.25"), is_no_text("menu.file.open"), is_no_text("Hello")
    (True, True, False)
    """
    return _NO_TEXT.fullmatch(text.strip()[:LONGEST_JUDGED]) is not None


def role_of(name: str) -> str | None:
    """Return what a column of this name holds, as in `ROLES`. Regions and signs do not matter.

    >>> role_of("# English (US)"), role_of("de-AT"), role_of("target_text"), role_of("texte")
    ('en', 'de', 'target', None)
    """
    if len(name) > LONGEST_JUDGED:
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
    """Return the source languages of a table, and the columns of their texts.

    The first line of a TSV file with two columns may be a pair that looks like names, such as
    "Finnisch" and "Finnish". So it is no error there.

    Args:
        named: the source language that the file name tells, if any.

    Raises:
        UserError: if the first line names columns, but not one target and its sources.
    """
    head = list(islice(read_rows(path), JUDGED))
    header = head[0] if head else []
    roles = _roles(head, {*named, target})
    places = {role: column for column, role in enumerate(roles) if role}
    targets = places.keys() & {target, "target"}
    sources = sorted(places.keys() - targets)
    is_clear = len(targets) == 1 and sources and len(places) == len(roles) - roles.count(None)
    second = places[min(targets)] if is_clear else None

    if is_clear and sources == WITHOUT_LANGUAGE[: len(sources)]:
        first, *stated = (places[role] for role in sources)
        is_mined = header[:3] == MINED
        columns = Columns(len(header), first, second, tuple(stated), True, is_mined)
        if stated:
            named = _stated_sources(path, columns, target)
        elif is_mined:
            named = named or {UNDETERMINED}
        return dict.fromkeys(named, columns)

    if is_clear and named <= set(sources) and not set(sources) & set(WITHOUT_LANGUAGE):
        found = {}
        for code in sources:
            columns = Columns(len(header), places[code], second, (), True, len(sources) > 1)
            rows = read_table(path, columns, (code, target))
            if code in named or any(has_text(cells) for _, (cells, _) in rows):
                found[code] = columns
        return found

    is_pair = plain_suffix(path) == ".tsv" and len(header) == 2 and not {roles[0]} & targets
    is_likely = named or (targets and sources)
    if places and is_likely and not is_pair:
        shown = ", ".join(f"{name!r} ({role})" for name, role in zip(header, roles) if role)
        pair = f"{min(named, default='de')},{target}"
        if target == UNDETERMINED:
            pair = "source,target"
        if "source language" in places:
            pair = "language,source,target"
        raise UserError(
            f"{path}: the first line names {shown}: which is the source and which the target? Name "
            f"the columns {pair}, and all others differently. If the line is no header, add one "
            "above it with these names"
        )
    widths = [len(cells) for cells in head if len(cells) > 1]
    return dict.fromkeys(named, Columns(mode(widths or [2])))


def _roles(head: Sequence[list[str]], codes: Collection[str]) -> list[str | None]:
    """Return the role of each column, or None, by the first rows of a table.

    Args:
        codes: the languages of the file, which may be others than the 36.
    """
    roles = []
    header, *rows = head or [[]]
    for name in header:
        code = name.strip().lower()
        roles.append(role_of(name) or (code if code in codes else None))

    # A column "id" holds numbers or keys of the rows. It is Indonesian if the file name says so, or
    # if some of its cells have several words.
    is_key = is_no_text if "id" in codes else lambda cell: " " not in cell
    for column, name in enumerate(header):
        if roles[column] == "id" and name.strip().lower().endswith("id"):
            whole = (row for row in rows if len(row) == len(header))
            cells = [row[column].strip() for row in whole if row[column].strip()]
            if sum(map(is_key, cells)) >= NO_TEXT_SHARE * len(cells):
                roles[column] = None
    return roles


def _stated_sources(path: str, columns: Columns, target: str) -> set[str]:
    """Return the source languages that the rows state. A warning counts rows of others."""
    rows = read_rows(path)
    next(rows)  # the header
    whole = (row for row in rows if len(row) == columns.width)
    counts = Counter(_stated_languages(path, row, columns) for row in whole)
    sources = set()
    left_out = {}
    for (first, *second), count in counts.items():
        if first not in ("", target) and second in ([], [target]):
            sources.add(first)
        else:
            left_out["-".join(code or "none" for code in (first, *second))] = count
    if left_out:
        warn_once("%s: rows of other languages are left out: %s", path, str(left_out))
    return sources


def read_table(
    path: str, columns: Columns, languages: tuple[str, str]
) -> Iterator[tuple[int, Row]]:
    """Yield (number, row) of the rows of a table in a source and a target language.

    The first line of the file has the number 1. Rows that are blank or have a wrong number of cells
    are yielded as well.
    """
    rows = dropwhile(lambda row: not has_text(row[1]), enumerate(_all_rows(path), 1))
    if columns.has_header:
        next(rows, None)
    stated = languages[: len(columns.languages)]
    number = 0
    for number, cells in rows:
        if (stated or columns.may_be_empty) and len(cells) == columns.width and has_text(cells):
            if stated and _stated_languages(path, cells, columns) != stated:
                continue
            sides = cells[columns.source], cells[columns.target]
            if columns.may_be_empty and any(map(is_blank, sides)):
                continue
        yield number, (cells, columns)
    yield number, ([], columns)  # the last row, so that all rows are counted


def parse_row(row: Row) -> tuple[str, str]:
    """Return (source, target) of a row. Both are empty if the row is blank."""
    cells, columns = row
    if len(cells) != columns.width:
        if not has_text(cells):
            return "", ""
        raise UserError(f"{counted(len(cells), 'column')}, expected {columns.width}")
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
    csv.field_size_limit(LONGEST_CELL)
    with reading(path):  # an open quote would swallow the rest of the file
        delimiter = _delimiter([line for line in head if line.strip()])
        if head and (stated := re.fullmatch('"?sep=(.)"?', head[0])):  # Excel's word for it
            delimiter = stated[1]
            next(whole_lines)
        yield from csv.reader(whole_lines, delimiter=delimiter, strict=True)


def _delimiter(lines: Sequence[str]) -> str:
    """Return the character that gives most of the first lines as many cells as the first one.

    Of several, it is the first of tab, semicolon, comma and `|`.
    """

    def agreement(delimiter: str) -> int:
        widths = [len(cells) for cells in csv.reader(lines, delimiter=delimiter)]
        return widths.count(widths[0]) if widths[:1] > [1] else 0

    return max("\t;,|", key=agreement)


def _stated_languages(path: str, cells: Sequence[str], columns: Columns) -> tuple[str, ...]:
    """Return the codes of the languages that a row states, and "" for an empty cell."""
    names = [cells[column].strip() for column in columns.languages]
    return tuple(name and (language_of(name) or language_in(path, name)) for name in names)
