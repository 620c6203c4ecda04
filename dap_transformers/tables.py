"""Format tables as plain text and as Markdown."""

from collections.abc import Sequence
from typing import Any

from tabulate import tabulate


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Format a plain-text table, the first column to the left. Floats get one decimal, None is "-".

    >>> print(text_table(["model", "36"], [["mBERT+DAP", 90.9], ["mine", None]]))
    model        36
    ---------  ----
    mBERT+DAP  90.9
    mine          -
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
    """Format a Markdown table, with `numbers` to the right. Otherwise cells are not padded.

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
