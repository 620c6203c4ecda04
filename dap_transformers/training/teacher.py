"""Vectors of a teacher for the objective `distill`: computed once, kept on disk, read by row.

The teacher is any encoder that knows the language of the targets well. It encodes only the targets.
Without one, the model as it is before the training is the teacher (the anchor). It encodes both
sides. Each distinct sentence is encoded once. Every process of a launch then maps the same file
into memory.

Shapes: `N` distinct sentences, `T` size of the teacher's vectors.
"""

import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from torch import Tensor
from torch.nn.functional import normalize

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.shards import (
    embed_to_disk,
    hash_of_text,
    model_fingerprint,
    write_vectors,
)
from dap_transformers.files import claimed
from dap_transformers.processes import launched
from dap_transformers.search.exact import unit_rows

logger = logging.getLogger(__name__)

#: File with the vectors. A hash of the teacher and the sentences takes the star's place.
VECTORS = "vectors-*.npy"
#: Columns of the training pairs with the rows of the source's and the target's vector.
ROWS = ("source_teacher_row", "target_teacher_row")
#: Row of a pair that the run does not draw. It is out of range, so reading it fails.
NO_ROW = np.iinfo(np.int64).max
#: Largest number of pairs that a language's shift is estimated from.
SAMPLE = 10_000


class Teacher(NamedTuple):
    """Tells where the sentence vectors of a pair should point.

    Attributes:
        vectors: (N, T) of the sentences, mapped into memory.
        shifts: language -> (T,), added to the normalised vector of a source. Zero if both sides
            share the target's vector.
    """

    vectors: np.ndarray
    shifts: Mapping[str, np.ndarray]

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return the goals (B, 2, T) of B tokenised pairs, of the source and of the target."""
        source, target = ROWS
        numbers = np.array([(row[source], row[target]) for row in rows])  # (B, 2)
        shifts = np.stack([self.shifts[row["language"]] for row in rows])  # (B, T)
        goals = normalize(torch.from_numpy(self.vectors[numbers]), dim=-1)
        goals[:, 0] += torch.from_numpy(shifts)
        return goals


def add_teacher(
    teacher: SentenceEncoder,
    text: Mapping[str, Dataset],
    train: Mapping[str, Dataset],
    folder: Path,
    is_drawn: np.ndarray | None = None,
) -> tuple[dict[str, Dataset], Teacher]:
    """Encode the distinct sentences with the teacher, and give each pair the rows of its vectors.

    Without `is_drawn`, both sides of a pair get the vector of the target. With it, the teacher is
    the anchor. The goal of a target is then its own vector. That of a source is its own vector plus
    the mean of (target - source) in its language, because an encoder may put each language in
    another region. So the goals of sources stay neighbours, near the targets.

    If the folder has the vectors of this teacher for exactly these sentences, they are read. The
    processes of a launch share the work, and runs may share the folder.

    Args:
        text: training pairs by language, as text.
        train: the same pairs, tokenised, in the same order.
        is_drawn: (number of pairs,) whether the run may draw a pair, languages in the order of
            `text`. Other pairs are not encoded, and get `NO_ROW`.

    Returns:
        The tokenised pairs with the columns `ROWS`, and the `Teacher`, which returns the goals of a
        batch.
    """
    sides = ("target" if is_drawn is None else "source", "target")
    row_of: dict[str, int] = {}
    rows = {}
    first = 0
    for language, part in text.items():
        places = range(len(part))
        if is_drawn is not None:
            places = np.flatnonzero(is_drawn[first : first + len(part)])
        first += len(part)
        rows[language] = np.full((2, len(part)), NO_ROW)
        for own, side in zip(rows[language], sides):
            sentences = part[side][:]
            own[places] = [row_of.setdefault(sentences[place], len(row_of)) for place in places]

    vectors = encode_to_disk(teacher, list(row_of), folder)
    with_rows = {}
    shifts = {}
    for language, (source, target) in rows.items():
        with_rows[language] = train[language].add_column(ROWS[0], source)
        with_rows[language] = with_rows[language].add_column(ROWS[1], target)
        drawn = np.flatnonzero(source != NO_ROW)
        drawn = drawn[:: len(drawn) // SAMPLE + 1]
        differences = unit_rows(vectors[target[drawn]]) - unit_rows(vectors[source[drawn]])
        shifts[language] = differences.numpy().sum(0) / max(1, len(drawn))
    return with_rows, Teacher(vectors, shifts)


def encode_to_disk(teacher: SentenceEncoder, sentences: list[str], folder: Path) -> np.ndarray:
    """Return the vectors (N, T) of N sentences, memory-mapped. Encode them if no file is there."""
    fingerprint = model_fingerprint(teacher)
    path = folder / VECTORS.replace("*", hash_of_text(fingerprint, sentences))
    is_main = launched().is_main_process

    # One process decides for all, because they encode together.
    (is_kept,) = broadcast_object_list([is_main and path.is_file()])
    if is_kept:
        logger.info("the vectors of %d sentences are in %s already", len(sentences), path)
        return np.load(path, mmap_mode="r")

    # Shards of each teacher and text have a folder of their own, because runs may share the place.
    shards = path.with_suffix(".shards")
    with claimed(shards, "distill_dir") if is_main else nullcontext():
        vectors = embed_to_disk(
            teacher,
            sentences,
            shards,
            progress=is_main,
            fingerprint=fingerprint,
            name="sentences by the teacher",
        )
        if is_main:
            write_vectors(vectors, path)
            logger.info("%d sentences encoded by the teacher, kept in %s", len(sentences), folder)
            shutil.rmtree(shards, ignore_errors=True)
    launched().wait_for_everyone()
    return np.load(path, mmap_mode="r")
