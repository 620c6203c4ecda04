"""Word links in Pharaoh format: one line per sentence pair, such as `0-1 2-0 3-3`.

References mark links that are no mistake, but need not be found, as `2p0`. Lines may begin with the
pair's number and a tab, as in SimAlign's references.

Legend: `L` links.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dap_transformers.errors import reading
from dap_transformers.text.archives import decoded_lines

_LINK = re.compile(r"(\d{1,9})([-p])(\d{1,9})")


@dataclass(frozen=True)
class GoldLinks:
    """The reference links of a sentence pair, (L, 2) int64: pairs of words, from 0.

    `sure` links should be found. Further `possible` ones are no mistakes.
    """

    sure: np.ndarray
    possible: np.ndarray


def format_links(links: np.ndarray) -> str:
    """Format links (L, 2) as a line in Pharaoh format.

    >>> format_links(np.array([[0, 1], [2, 0]]))
    '0-1 2-0'
    """
    return " ".join(f"{source}-{target}" for source, target in links.tolist())


def parse_links(line: str, first: int = 0) -> GoldLinks:
    """Parse a line in Pharaoh format, in which the first word of a sentence is 0 or 1 (`first`).

    >>> parse_links("0-1 2p0").possible.tolist()
    [[2, 0]]
    """
    sure = []
    possible = []
    for link in line.rpartition("\t")[2].split():
        match = _LINK.fullmatch(link)
        if not match:
            raise ValueError(f"{link!r} is no link such as 0-1 or 0p1")
        pair = (int(match[1]) - first, int(match[3]) - first)
        if min(pair) < 0:
            raise ValueError(f"{link!r}: words are counted from {first}")
        (possible if match[2] == "p" else sure).append(pair)
    return GoldLinks(_array(sure), _array(possible))


def read_links(path: str | Path, first: int = 0) -> list[GoldLinks]:
    """Read the links of each line of a file, which may be compressed as `.gz` or `.xz`."""
    found = []
    for number, line in enumerate(decoded_lines(path), 1):
        with reading(f"{path}, line {number}"):
            found.append(parse_links(line, first))
    return found


def _array(links: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return links in ascending order without repetitions, (L, 2) int64."""
    return np.array(sorted(set(links)), np.int64).reshape(-1, 2)
