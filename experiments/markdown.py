"""Documents of Markdown of which a command writes a part and people the rest."""

import re
import textwrap
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from dap.errors import UserError
from dap.reports import markdown_table

MARK = re.compile(r"<!-- (begin|end) ([\w-]+) -->")
Cell = str | int
table = partial(markdown_table, numbers=True)


def paragraph(text: str) -> str:
    """In lines of at most 120 characters."""
    return textwrap.fill(
        " ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False
    )


def filled(text: str, blocks: Mapping[str, str], where: Path) -> tuple[str, list[str]]:
    """The text with its blocks as they should be, and the names of those that were not.

    Args:
        text: has each block's place between `<!-- begin NAME -->` and `<!-- end NAME -->`.
        blocks: name -> what belongs there.
        where: the file, for errors.

    Raises:
        ValueError: marks that are missing, unknown, there twice, or not each begin right before its end.
    """
    marks = MARK.findall(text)
    for mark in (f"<!-- {kind} {name} -->" for name in blocks for kind in ("begin", "end")):
        if (times := text.count(mark)) != 1:
            raise UserError(f"{where} has {mark} {times} times: put it in, or leave one of them")
    if unknown := [name for _, name in marks if name not in blocks]:
        raise UserError(f"{where}: no block is called {unknown[0]}; there are {', '.join(blocks)}")
    for (_, begun), (kind, ended) in zip(marks[::2], marks[1::2], strict=True):
        if kind != "end" or begun != ended:
            raise UserError(
                f"{where}: {kind} {ended} follows the mark of {begun}: let each begin precede its own end"
            )
    stale = []
    for name, block in blocks.items():
        before, begin, rest = text.partition(f"<!-- begin {name} -->")
        found, end, after = rest.partition(f"<!-- end {name} -->")
        wanted = f"\n\n{block}\n\n"
        if found != wanted:
            stale.append(name)
        text = before + begin + wanted + end + after
    return text, stale
