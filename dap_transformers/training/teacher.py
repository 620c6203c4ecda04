"""Vectors of a teacher for the objective `distill`: computed once, kept on disk, read by row.

The teacher is any encoder that knows the language of the targets well, or the model itself before
its training. Only the targets are encoded by it, each distinct one once. Every process of a launch
then maps the same file into memory.

Shapes: `N` distinct targets, `T` size of the teacher's vectors.
"""

import logging
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from accelerate.utils import broadcast_object_list
from datasets import Dataset

from dap_transformers.encoding.encoder import SentenceEncoder, tokens_of_a_batch
from dap_transformers.encoding.shards import (
    embed_to_disk,
    hash_of_text,
    model_fingerprint,
    write_vectors,
)
from dap_transformers.files import claimed
from dap_transformers.processes import launched

logger = logging.getLogger(__name__)

#: File with the vectors. A hash of the teacher and the targets takes the star's place.
VECTORS = "targets-*.npy"
#: Column of the training pairs with the row of the target's vector.
ROW = "teacher_row"


def add_teacher(
    teacher: SentenceEncoder,
    text: Mapping[str, Dataset],
    train: Mapping[str, Dataset],
    folder: Path,
) -> tuple[dict[str, Dataset], np.ndarray]:
    """Encode the distinct targets with the teacher, and give each pair the row of its vector.

    Vectors that are in the folder already are not computed again. The processes of a launch share
    the work, and runs may share the folder.

    Args:
        text: training pairs by language, as text.
        train: the same pairs, tokenised, in the same order.

    Returns:
        The tokenised pairs with the column `teacher_row`, and the vectors (N, T), mapped into
        memory.
    """
    row_of: dict[str, int] = {}
    with_rows = {}
    for language, part in text.items():
        rows = [row_of.setdefault(target, len(row_of)) for target in part["target"][:]]
        with_rows[language] = train[language].add_column(ROW, np.array(rows, np.int64))

    fingerprint = model_fingerprint(teacher)
    targets = list(row_of)
    path = folder / VECTORS.replace("*", hash_of_text(fingerprint, targets))
    is_main = launched().is_main_process

    # One process decides for all, because they encode together.
    (is_kept,) = broadcast_object_list([is_main and path.is_file()])
    if is_kept:
        logger.info("the vectors of %d targets are in %s already", len(targets), path)
        return with_rows, np.load(path, mmap_mode="r")

    # Shards of each teacher and text have a folder of their own, because runs may share the place.
    shards = path.with_suffix(".shards")
    with claimed(shards, "distill_dir") if is_main else nullcontext():
        vectors = embed_to_disk(
            teacher,
            targets,
            shards,
            token_budget=tokens_of_a_batch(None),
            progress=is_main,
            fingerprint=fingerprint,
            name="targets by the teacher",
        )
        if is_main:
            write_vectors(vectors, path)
            logger.info("%d targets encoded by the teacher, kept in %s", len(targets), folder)
            shutil.rmtree(shards, ignore_errors=True)
    launched().wait_for_everyone()
    return with_rows, np.load(path, mmap_mode="r")
