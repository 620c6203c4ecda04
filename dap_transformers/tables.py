"""Format tables as plain text and as Markdown."""

import shutil
from collections.abc import Sequence
from typing import Any

import tabulate

WIDEST = 100  # characters in a line of a plain-text table


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a plain-text table, the first column to the left. Floats get one decimal, None is "-".

    A table that is wider than the terminal, or than 100 characters, gets headings of several lines.
    If it is still too wide, its columns are split among several tables. Each repeats the first one.

    >>> print(text_table(["model", "36"], [["mBERT+DAP", 90.9], ["mine", None]]))
    model        36
    ---------  ----
    mBERT+DAP  90.9
    mine          -
    """
    cells = [[_one_decimal(value) for value in row] for row in rows]
    table = _table(header, cells, "simple")
    if len(header) == 1 or _fits(table):
        return table

    header = [header[0], *(title.replace(" ", "\n") for title in header[1:])]
    tables = []
    end = 1
    while end < len(header):
        start = end
        for end in range(len(header), start, -1):
            part = [[row[0], *row[start:end]] for row in cells]
            table = _table([header[0], *header[start:end]], part, "simple")
            if _fits(table):
                break
        tables.append(table)
    return "\n\n".join(tables)


def _fits(table: str) -> bool:
    """Tell whether a table is as wide as the terminal or less, and at most `WIDEST`."""
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    return max(map(len, table.splitlines())) <= width


def _one_decimal(value: Any) -> str:
    """Format a float with one decimal, None as "-", and anything else as text."""
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def markdown_table(
    header: Sequence[Any], rows: Sequence[Sequence[Any]], numbers: bool = False
) -> str:
    """Format a Markdown table, with `numbers` to the right. Otherwise cells are not padded.

    >>> print(markdown_table(["corpus", "pairs"], [["x|y", "1,000"], ["z", 20]], numbers=True))
    | corpus | pairs |
    |:-------|------:|
    | x\\|y   | 1,000 |
    | z      |    20 |
    """
    cells = [[_markdown_cell(value) for value in row] for row in [header, *rows]]
    return _table(cells[0], cells[1:], "pipe", numbers)


def _markdown_cell(value: Any) -> str:
    """Escape what would end a cell of a Markdown table. tabulate does not."""
    return str(value).replace("|", "\\|").replace("\n", " ")


def _table(
    header: Sequence[Any], rows: Sequence[Sequence[Any]], format: str, numbers: bool = True
) -> str:
    """Format a table with tabulate, which would reformat numbers if it were not told otherwise."""
    sides = None
    if numbers and rows:  # tabulate 0.9 fails to align columns without rows
        sides = ["left", *["right"] * (len(header) - 1)]
    padding = tabulate.MIN_PADDING
    tabulate.MIN_PADDING = 0  # otherwise a heading makes its column wider than itself
    try:
        return tabulate.tabulate(
            rows, header, format, colalign=sides, stralign=None, disable_numparse=True
        )
    finally:
        tabulate.MIN_PADDING = padding
