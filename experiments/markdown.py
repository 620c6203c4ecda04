"""Documents of Markdown of which a command writes a part and people the rest."""

import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dap.errors import UserError
from dap.reports import markdown_table

MARK = re.compile(r"<!-- (begin|end) ([\w-]+) -->")
Cell = str | int
table = partial(markdown_table, numbers=True)


def paragraph(text: str) -> str:
    """In lines of at most 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


def require_marks(text: str, names: Sequence[str], where: Path) -> None:
    """Raises `ValueError` for a mark that is missing, unknown, there twice, or without its counterpart."""
    opened, seen = None, []
    for mark in MARK.finditer(text):
        kind, name = mark.groups()
        if name not in names:
            raise UserError(f"{where}: no block is called {name}; there are {', '.join(names)}")
        if opened != (None if kind == "begin" else name):
            raise UserError(f"{where}: {mark[0]} follows {f'<!-- begin {opened} -->' if opened else 'no such begin'}")
        if kind == "begin" and name in seen:
            raise UserError(f"{where}: {mark[0]} is there twice: leave one")
        opened = name if kind == "begin" else None
        seen.append(name)
    if opened:
        raise UserError(f"{where}: <!-- begin {opened} --> has no <!-- end {opened} -->: put it in")
    if lacking := [name for name in names if name not in seen]:
        raise UserError(f"{where} has no <!-- begin {lacking[0]} --> and <!-- end {lacking[0]} -->: put them in")


def filled(text: str, blocks: Mapping[str, str], where: Path) -> tuple[str, list[str]]:
    """The text with its blocks as they should be, and the names of those that were not.

    Args:
        text: has each block's place between `<!-- begin NAME -->` and `<!-- end NAME -->`.
        blocks: name -> what belongs there.
        where: the file, for errors.

    Raises:
        ValueError: as `require_marks`.
    """
    require_marks(text, list(blocks), where)
    stale = []
    for name, block in blocks.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        found, _, after = rest.partition(end)
        wanted = f"\n\n{block}\n\n"
        if found != wanted:
            stale.append(name)
        text = before + begin + wanted + end + after
    return text, stale
