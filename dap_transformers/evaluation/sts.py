"""Semantic textual similarity: do cosines order pairs of sentences as people do?

A file has a pair per line: two sentences and their score, separated by tabs. The sentences may be
in two languages. A header is allowed. The file may end in `.gz` or `.xz`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from dap_transformers.encoding.encoder import Encoder
from dap_transformers.errors import UserError, reading
from dap_transformers.evaluation.evaluator import (
    Evaluator,
    Metric,
    Numbers,
    by_name,
    without_lone_mean,
)
from dap_transformers.search.exact import unit_rows
from dap_transformers.text.archives import decoded_lines


class ScoredPair(NamedTuple):
    """Two sentences and how similar people find them."""

    first: str
    second: str
    score: float


@dataclass
class STS(Evaluator):
    """Spearman's rank correlation of cosines and people's scores, times 100.

    Attributes:
        files: tables of two sentences and a score.
    """

    files: Sequence[str | Path]
    name = "sts"
    task = "semantic textual similarity"
    primary = "mean_spearman"
    description = "semantic textual similarity: Spearman's rank correlation of cosines and scores"

    def __post_init__(self) -> None:
        files = by_name(self.files)
        self.pairs = {name: read_scored_pairs(file) for name, file in files.items()}

    def sentences(self) -> Iterator[str]:
        for pairs in self.pairs.values():
            for pair in pairs:
                yield from (pair.first, pair.second)

    def __call__(self, encoder: Encoder) -> Numbers:
        """Return the correlation of each file by its name, and their mean."""
        numbers = {}
        for name, pairs in self.pairs.items():
            firsts, seconds, scores = zip(*pairs, strict=True)
            left = unit_rows(encoder.encode(list(firsts)))  # (N, D)
            right = unit_rows(encoder.encode(list(seconds)))
            cosines = (left * right).sum(1).numpy()  # (N,)
            numbers[name] = 100 * spearman(cosines, np.array(scores))
        return numbers | {"mean": float(np.mean(list(numbers.values())))}

    def logged(self, numbers: Numbers) -> dict[str, float]:
        return {f"{name}_spearman": value for name, value in numbers.items()}

    def metrics(self, numbers: Numbers) -> list[Metric]:
        shown = without_lone_mean(numbers)
        return [Metric("Spearman", value, name, "spearman") for name, value in shown.items()]


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Return the rank correlation of two arrays (N,). Equal values share their mean rank.

    It is 0 if all values of an array are equal.

    >>> spearman(np.array([1.0, 2.0, 9.0]), np.array([0.1, 0.5, 0.4]))
    0.5
    """
    if min(len(set(first)), len(set(second))) == 1:
        return 0.0
    return float(pd.Series(first).rank().corr(pd.Series(second).rank()))


def read_scored_pairs(path: Path) -> list[ScoredPair]:
    """Read the pairs of a file. Their scores must differ."""
    pairs = []
    for number, line in enumerate(decoded_lines(path), 1):
        with reading(f"{path}, line {number}"):
            first, second, score = line.split("\t")
            if number == 1 and not re.search("[0-9]", score):
                continue  # the header
            pairs.append(ScoredPair(first, second, float(score)))
            if not np.isfinite(pairs[-1].score):
                raise ValueError(f"the score is {score}")
    if len({pair.score for pair in pairs}) < 2:
        raise UserError(f"{path} has no two pairs of different scores: there is no correlation")
    return pairs
