"""Format tables as plain text and as Markdown."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a plain-text table with aligned columns.

    The first column is aligned to the left, the others to the right. Floats get one decimal, and
    None becomes "-".

    >>> print(text_table(["model", "36"], [["mBERT+DAP", 90.9], ["mine", None]]))
    model        36
    ---------  ----
    mBERT+DAP  90.9
    mine          -

    Args:
        header: names of the columns.
        rows: the cells of each row, one per column.
    """
    cells = [[_one_decimal(value) for value in row] for row in rows]
    return _table(header, cells, "simple")


def _one_decimal(value: Any) -> str:
    """Format a float with one decimal, None as "-", and anything else as text."""
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def markdown_table(
    header: Sequence[Any], rows: Sequence[Sequence[Any]], numbers: bool = False
) -> str:
    """Format a Markdown table. Bars in cells are escaped, and line breaks become spaces.

    Args:
        header: names of the columns.
        rows: the cells of each row, one per column. They may be of any type.
        numbers: align all columns except the first to the right, as numbers should be. Otherwise
            cells are not padded, because some may be long.

    >>> print(markdown_table(["corpus", "pairs"], [["x|y", "1,000"], ["z", 20]], numbers=True))
    | corpus   |   pairs |
    |:---------|--------:|
    | x\\|y     |   1,000 |
    | z        |      20 |
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
    return tabulate(rows, header, format, colalign=sides, stralign=None, disable_numparse=True)
