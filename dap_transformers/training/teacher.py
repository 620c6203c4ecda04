"""Vectors of a teacher for the objective `distill`: computed once, kept on disk, read by row.

The teacher is any encoder that knows the language of the targets well. It encodes only the targets.
Without one, the model as it is before the training is the teacher (the anchor). It encodes both
sides. Each distinct sentence is encoded once. Every process of a launch then maps the same files
into memory.

Shapes: `N` distinct sentences, `T` size of the teacher's vectors.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import normalize

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.shards import SHARD_SIZE, write_shards
from dap_transformers.processes import launched
from dap_transformers.search.exact import unit_rows

#: Columns of the training pairs with the rows of the source's and the target's vector.
ROWS = ("source_teacher_row", "target_teacher_row")
#: Row of a pair that the run does not draw. It is out of range, so reading it fails.
NO_ROW = np.iinfo(np.int64).max
#: Largest number of pairs that a language's shift is estimated from.
SAMPLE = 10_000


class Teacher(NamedTuple):
    """Tells where the sentence vectors of a pair should point.

    Attributes:
        shards: vectors (n, T) of `SHARD_SIZE` sentences each, mapped into memory. The last shard
            may have fewer.
        shifts: language -> (T,), added to the normalised vector of a source. Zero if both sides
            share the target's vector.
    """

    shards: Sequence[np.ndarray]
    shifts: Mapping[str, np.ndarray]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the goals (B, 2, T) of B tokenised pairs with `ROWS`, first the source's."""
        sides = []
        for name in ROWS:
            sides.append(vectors_of(self.shards, [row[name] for row in rows]))  # (B, T)
        shifts = np.stack([self.shifts[row["language"]] for row in rows])  # (B, T)
        goals = normalize(torch.from_numpy(np.stack(sides, axis=1)), dim=-1)
        goals[:, 0] += torch.from_numpy(shifts)
        return goals


def vectors_of(shards: Sequence[np.ndarray], rows: Sequence[int]) -> np.ndarray:
    """Return the vectors (n, T) of n sentences, given their rows, counted over all shards."""
    return np.stack([shards[row // SHARD_SIZE][row % SHARD_SIZE] for row in rows])


def add_teacher(
    teacher: SentenceEncoder,
    sides: tuple[str, str],
    text: Mapping[str, Dataset],
    train: Mapping[str, Dataset],
    is_drawn: np.ndarray,
    folder: Path,
) -> tuple[dict[str, Dataset], Teacher]:
    """Encode the distinct sentences with the teacher, and give each pair the rows of its vectors.

    With the sides ("target", "target"), both sides of a pair get the vector of the target. With
    ("source", "target"), the goal of a target is its own vector. The goal of a source is its own
    vector plus the mean of (target - source) in its language. So sources keep their places relative
    to each other, and move to the region of the targets. The anchor does so.

    If the folder has the vectors of this teacher for exactly these sentences, they are read. The
    processes of a launch share the work.

    Args:
        sides: whose vectors are the goals of a source and of a target.
        text: training pairs by language, as text.
        train: the same pairs, tokenised, in the same order.
        is_drawn: (number of pairs,) whether the run may draw a pair, languages in the order of
            `text`. Other pairs are not encoded, and get `NO_ROW`.

    Returns:
        The tokenised pairs with the columns `ROWS`, and the `Teacher`, which returns the goals of a
        batch.
    """
    row_of: dict[str, int] = {}
    rows = {}
    first = 0
    for language, part in text.items():
        places = np.flatnonzero(is_drawn[first : first + len(part)])
        first += len(part)
        rows[language] = np.full((2, len(part)), NO_ROW)  # of the source's and the target's vector
        for numbers, side in zip(rows[language], sides):
            sentences = part[side][:]
            numbers[places] = [row_of.setdefault(sentences[place], len(row_of)) for place in places]

    paths = write_shards(
        teacher,
        list(row_of),
        folder,
        progress=launched().is_main_process,
        name="sentences by the teacher",
    )
    shards = [np.load(path, mmap_mode="r") for path in paths]
    with_rows = {}
    shifts = {}
    for language, (source, target) in rows.items():
        with_rows[language] = train[language].add_column(ROWS[0], source)
        with_rows[language] = with_rows[language].add_column(ROWS[1], target)
        drawn = np.flatnonzero(source != NO_ROW)
        drawn = drawn[:: len(drawn) // SAMPLE + 1]
        if len(drawn):
            before, after = (vectors_of(shards, side[drawn]) for side in (source, target))
            differences = unit_rows(after) - unit_rows(before)
            shifts[language] = differences.numpy().sum(0) / len(drawn)
    return with_rows, Teacher(shards, shifts)
