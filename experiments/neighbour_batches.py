"""Train like `train_dap.py`, with batches of pairs whose targets are similar (an idea).

    python -m experiments.neighbour_batches RECIPE.yaml --neighbours 16 ...

TR then has harder negatives. All pairs of an epoch are split into groups of `--neighbours` pairs
with similar targets. A batch is made of random groups. Targets are similar if they share rare
tokens (tf-idf), so no encoder runs, and the groups cost seconds.
"""

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from torch.utils.data import Sampler

import train_dap
from dap_transformers.training.batches import LanguageMixSampler

logger = logging.getLogger(__name__)

#: Size of the vectors that stand for targets.
SIZE = 64
#: Rounds of the search for the direction in which a group of vectors differs most.
POWER_ITERATIONS = 8


def target_vectors(token_ids: Sequence[Sequence[int]], seed: int) -> np.ndarray:
    """Return one vector per target. Targets that share rare tokens get similar vectors.

    Each token id has one random vector. A target's vector is their sum, weighted by inverse
    document frequency and scaled to length 1. Tokens that are in every target have weight 0.

    Args:
        token_ids: ids of N targets.
        seed: seed of the random vectors.

    Returns:
        (N, SIZE) float32.
    """
    lengths = np.array([len(ids) for ids in token_ids])  # (N,)
    all_ids = np.concatenate(token_ids)
    largest = int(all_ids.max()) + 1
    frequencies = np.zeros(largest)
    for ids in token_ids:
        frequencies[np.unique(ids)] += 1
    weights = np.log(len(token_ids) / np.maximum(frequencies, 1))
    random = np.random.default_rng(seed).standard_normal((largest, SIZE), np.float32)
    weighted = random * weights[:, None].astype(np.float32)
    starts = np.cumsum([0, *lengths[:-1]])
    sums = np.add.reduceat(weighted[all_ids], starts)  # (N, SIZE)
    return sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-6)


def groups_of_neighbours(vectors: np.ndarray, size: int, seed: int) -> list[np.ndarray]:
    """Split rows into groups of neighbours.

    All rows are split in two along the direction in which they differ most. This is repeated until
    a part has at most `size` rows. Cuts are at multiples of `size`.

    Args:
        vectors: (N, SIZE) one vector per row.
        size: number of rows of a group.
        seed: seed of the random start directions.

    Returns:
        Row numbers of each group. Every row is in one group. One group may have fewer rows.
    """
    generator = np.random.default_rng(seed)
    groups = []
    waiting = [np.arange(len(vectors))]
    while waiting:
        rows = waiting.pop()
        if len(rows) <= size:
            groups.append(rows)
            continue
        centred = vectors[rows] - vectors[rows].mean(0)
        direction = generator.standard_normal(vectors.shape[1], np.float32)
        for _ in range(POWER_ITERATIONS):
            direction = centred.T @ (centred @ direction)
            direction /= max(np.linalg.norm(direction), 1e-12)
        ordered = rows[np.argsort(centred @ direction, kind="stable")]
        half = -(-len(rows) // size) // 2 * size  # a multiple of `size`
        waiting += [ordered[:half], ordered[half:]]
    return groups


class NeighbourSampler(Sampler[int]):
    """Reorders the rows of another sampler, so that rows with similar targets stand together.

    The groups are made anew in each epoch and come in random order.

    Args:
        sampler: decides which rows an epoch has.
        dataset: tokenised pairs, with the column `target_input_ids`.
        size: number of rows of a group.
    """

    def __init__(self, sampler: LanguageMixSampler, dataset: Dataset, size: int) -> None:
        self.sampler = sampler
        self.dataset = dataset
        self.size = size

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, from 0, whose rows the next iteration draws."""
        self.sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        began = time.process_time()
        rows = np.fromiter(self.sampler, np.int64)
        ids = self.dataset.with_format("numpy")["target_input_ids"][:]
        vectors = target_vectors([ids[row] for row in rows], self.sampler.seed)
        groups = groups_of_neighbours(vectors, self.size, self.sampler.seed)
        np.random.default_rng((self.sampler.seed, self.sampler.epoch)).shuffle(groups)
        seconds = time.process_time() - began
        logger.info("groups of %d neighbours made in %.0f CPU seconds", self.size, seconds)
        for group in groups:
            yield from rows[group].tolist()


def main() -> None:
    """Run `train_dap.py` on this process's command line, with batches of neighbours."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--neighbours", type=int, default=16)
    own, others = parser.parse_known_args()
    sys.argv[1:] = others
    mix_languages = train_dap.mix_languages

    def mix_neighbours(*arguments: Any) -> tuple[Dataset, Sampler]:
        dataset, sampler = mix_languages(*arguments)
        return dataset, NeighbourSampler(sampler, dataset, own.neighbours)

    train_dap.mix_languages = mix_neighbours
    train_dap.main()


if __name__ == "__main__":
    main()
