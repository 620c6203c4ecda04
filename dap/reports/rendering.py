"""Tables as text and as Markdown."""

from collections.abc import Sequence
from typing import Any


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns: the first to the left, the others to the right; floats with one decimal, None as "-".

    >>> print(text_table(["model", "36"], [["mBERT+DAP", 90.9], ["mine", None]]))
    model        36
    ---------  ----
    mBERT+DAP  90.9
    mine          -
    """
    cells = [[_cell(value) for value in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        ).rstrip()
        for row in [cells[0], ["-" * width for width in widths], *cells[1:]]
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def markdown_table(
    header: Sequence[Any], rows: Sequence[Sequence[Any]], numbers: bool = False
) -> str:
    """A table of Markdown; a bar or a line break in a cell cannot break it.

    Args:
        header: a name a column.
        rows: the cells.
        numbers: sets all columns but the first to the right.

    >>> print(markdown_table(["a", "b"], [[1, "x|y"]]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    rule = ["|:--", *["|--:"] * (len(header) - 1)] if numbers else ["|---"] * len(header)
    cells = [
        [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        for row in [header, *rows]
    ]
    first, *lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([first, "".join(rule) + "|", *lines])
