"""Format tables as plain text and as Markdown."""

from collections.abc import Sequence
from typing import Any


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
    cells = [list(map(_cell, row)) for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])

    lines = []
    for first, *others in cells:
        aligned = [first.ljust(widths[0])]
        aligned += [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    """Format a cell: a float with one decimal, None as "-", and anything else as text."""
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
        numbers: align all columns except the first to the right, as numbers should be.

    >>> print(markdown_table(["a", "b"], [[1, "x|y"]]))
    | a | b |
    |---|---|
    | 1 | x\\|y |
    """
    rule = ["|---"] * len(header)
    if numbers:
        rule = ["|:--", *["|--:"] * (len(header) - 1)]

    lines = []
    for row in [header, *rows]:
        cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "".join(rule) + "|")
    return "\n".join(lines)


#: Characters of a cell -> how LaTeX writes them.
LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "&": r"\&",
    "%": r"\%",
    "#": r"\#",
    "_": r"\_",
    "±": r"$\pm$",
    "→": r"$\to$",
    "−": "$-$",
    "+": "$+$",
}


def latex_table(header: Sequence[Any], rows: Sequence[Sequence[Any]]) -> str:
    """Format a LaTeX table with the rules of the package booktabs.

    The first column is aligned to the left, the others to the right.

    Args:
        header: names of the columns.
        rows: the cells of each row, one per column. They may be of any type.

    >>> print(latex_table(["K", "F1"], [["1", "90.50 ± 0.25"]]))
    \\begin{tabular}{lr}
    \\toprule
    K & F1 \\\\
    \\midrule
    1 & 90.50 $\\pm$ 0.25 \\\\
    \\bottomrule
    \\end{tabular}
    """
    escapes = str.maketrans(LATEX)
    lines = []
    for row in [header, *rows]:
        cells = [str(cell).translate(escapes) for cell in row]
        lines.append(" & ".join(cells) + r" \\")
    columns = "l" + "r" * (len(header) - 1)
    rule = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule"]
    return "\n".join([*rule, *lines[1:], r"\bottomrule", r"\end{tabular}"])
