"""The two texts that are mined: their sentences, vectors and lines, and pairs of lines as a file.

Legend: `N` sentences of a side, `D` dimensions, `P` pairs, `G` gold pairs.
"""

import gzip
import hashlib
import lzma
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dap.file_io import whole_file
from dap.mining.bucc import MiningScore, best_threshold, judge, score_at
from dap.mining.distinct import DistinctSentences
from dap.mining.margin import Pairs, score_pairs
from dap.scratch import Folder, on_disk, parts
from dap.search import Neighbours

ENDINGS = str.maketrans("\t\r\n", "   ")


@dataclass
class Side:
    """One text: its sentences and, once they are encoded, their vectors (N, D)."""

    path: Path
    text: DistinctSentences
    vectors: np.ndarray | None = None

    def counts(self) -> dict[str, Any]:
        """What a report says of the text: its file, lines and sentences."""
        return {"file": self.path.name} | self.text.counts()

    def at(self, line: int) -> str:
        """The sentence of a line, from 0, with spaces for tabs and line breaks."""
        return self.text[self.text.rows[line]].translate(ENDINGS)


@dataclass
class Texts:
    """What is mined in one go; `gold` (G, 2) has indices of lines, from 0; arrays are in files of the folder."""

    source: Side
    target: Side
    gold: np.ndarray | None = None
    folder: Folder = None

    def digest(self) -> str:
        """SHA-256 of both texts and the gold."""
        gold = b"" if self.gold is None else self.gold.astype("<i8").tobytes()
        return hashlib.sha256(
            (self.source.text.digest() + self.target.text.digest()).encode() + gold
        ).hexdigest()

    def first_lines(self, pairs: Pairs) -> Pairs:
        """Pairs of sentences as pairs of the first lines that hold them, from 0."""
        lines = self.source.text.first_line, self.target.text.first_line
        several = (
            Pairs(part.scores, lines[0][part.source] - 1, lines[1][part.target] - 1)
            for part in pairs.parts()
        )
        return Pairs.gathered(several, self.folder)

    def same_lines(self, neighbours: Neighbours, margin: str) -> Pairs:
        """The scores of the lines that hold a sentence on both sides, in their order."""
        source, target = both = self.source.text.rows, self.target.text.rows
        held = (
            (part.start, (source[part] >= 0) & (target[part] >= 0)) for part in parts(len(source))
        )
        lines = on_disk((start + np.flatnonzero(chosen) for start, chosen in held), self.folder)
        rows = (
            on_disk((side[lines[part]] for part in parts(len(lines))), self.folder) for side in both
        )
        found = score_pairs(
            self.source.vectors, self.target.vectors, *rows, neighbours, margin, self.folder
        )
        return Pairs(found.scores, lines, lines)


def score_splits(mined: Sequence[Pairs], splits: Sequence[Texts]) -> list[MiningScore]:
    """The score of each split's mined pairs of sentences, at the threshold that is best on the first split."""
    scores: list[MiningScore] = []
    for pairs, texts in zip(mined, splits, strict=True):
        counts = judge(
            pairs, texts.gold, texts.source.text.rows, texts.target.text.rows
        )  # 2 × (P,)
        judged = pairs.scores, *counts, len(texts.gold)
        scores.append(score_at(scores[0].threshold if scores else best_threshold(*judged), *judged))
    return scores


def write_pairs(pairs: Pairs, texts: Texts, path: str | Path) -> None:
    """Writes score, source, target and both line numbers, from 1; `.gz` and `.xz` are packed.

    Args:
        pairs: pairs of lines, from 0.

    Raises:
        DiskFullError: no room; what was there before stays.
    """
    packers = {".gz": partial(gzip.open, mode="wb"), ".xz": partial(lzma.open, mode="wb")}
    with whole_file(path) as file, packers.get(Path(path).suffix, nullcontext)(file) as packed:
        for part in pairs.parts():
            for score, i, j in zip(
                part.scores.tolist(), part.source.tolist(), part.target.tolist(), strict=True
            ):
                line = (
                    f"{score:.6f}\t{texts.source.at(i)}\t{texts.target.at(j)}\t{i + 1}\t{j + 1}\n"
                )
                packed.write(line.encode())
