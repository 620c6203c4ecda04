"""The language mix: which share of a training each language has, drawn the same by every process (no models)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset, concatenate_datasets, interleave_datasets
from torch.utils.data import Sampler

from dap.errors import UserError

MIXES = ("natural", "uniform", "temperature")


def mix_weights(sizes: Sequence[int], mix: str, alpha: float = 0.5) -> np.ndarray:
    """Share of each language in the mix: p ∝ n^α with α = 1 (natural), 0 (uniform) or `alpha` (temperature).

    >>> mix_weights([900, 100], "temperature", 0.5)
    array([0.75, 0.25])

    Raises:
        ValueError: unknown mix, `alpha` outside 0..1, no or empty languages.
    """
    _check_mix(mix, alpha)
    if not len(sizes) or min(sizes) < 1:
        raise UserError(f"every language needs at least one pair; the sizes are {list(sizes)}")
    exponent = {"natural": 1.0, "uniform": 0.0, "temperature": alpha}[mix]
    weights = np.asarray(sizes, dtype=np.float64) ** exponent
    return weights / weights.sum()


def _check_mix(mix: str, alpha: float) -> None:
    if mix not in MIXES:
        raise UserError(f"unknown language mix {mix!r}; it is one of {', '.join(MIXES)}")
    if not 0.0 <= alpha <= 1.0:
        raise UserError(f"the mix's alpha must lie in 0 (uniform) to 1 (natural), not {alpha}")


def mix_indices(sizes: Sequence[int], mix: str, alpha: float, seed: int, epoch: int = 0) -> np.ndarray:
    """Rows of the concatenated languages that make up one epoch, shuffled: int64 (N,), N the sum of sizes.

    Language l gets its share of N to the nearest integer (largest remainder). Its pairs are walked through in shuffled
    order, without repeating one before all have been seen, and the walk goes on over epochs: what epoch 0 leaves out
    comes first in epoch 1. The result depends on the arguments alone.
    """
    counts = _apportion(mix_weights(sizes, mix, alpha), sum(sizes))
    starts = np.cumsum([0, *sizes[:-1]])
    walks = [
        start + _walk(size, int(count), epoch * int(count), (seed, number))
        for number, (start, size, count) in enumerate(zip(starts, sizes, counts, strict=True))
    ]
    return np.random.default_rng((seed, len(sizes), epoch)).permutation(np.concatenate(walks))


def _apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Integers that add up to `total`, in proportion to the weights, by largest remainder."""
    exact = weights * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def _walk(size: int, count: int, offset: int, seed: tuple[int, int]) -> np.ndarray:
    """Positions `offset` to `offset + count` of an endless row of shuffles of 0..size-1."""
    first, last = offset // size, -(-(offset + count) // size)
    rounds = [np.random.default_rng((*seed, number)).permutation(size) for number in range(first, last)]
    return np.concatenate([*rounds, np.empty(0, dtype=np.int64)])[offset - first * size :][:count]


class LanguageMixSampler(Sampler[int]):
    """Draws `mix_indices` anew each epoch, over the natural mix of the same languages.

    For trainers that call `set_epoch` (accelerate does), so that pairs left out of one epoch come in the next and
    a resumed run sees what the uninterrupted one would have seen.
    """

    def __init__(self, sizes: Sequence[int], mix: str, alpha: float, seed: int) -> None:
        mix_weights(sizes, mix, alpha)
        self.sizes, self.mix, self.alpha, self.seed, self.epoch = list(sizes), mix, alpha, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(mix_indices(self.sizes, self.mix, self.alpha, self.seed, self.epoch).tolist())


def mix_languages(
    tokenized: Mapping[str, Any], mix: str, alpha: float, seed: int, sizes: Mapping[str, int] | None = None
) -> Dataset | IterableDataset:
    """One dataset of all languages, mixed as named in `MIXES`.

    Map-style: `natural` is the concatenation, for the trainer to shuffle; the others select from it the rows of
    `mix_indices` for epoch 0, as many as there are pairs. Each epoch of a stock trainer shuffles that selection;
    `LanguageMixSampler` over the natural mix selects anew each epoch.

    Streaming: the languages, each of which starts again after its last pair, are interleaved at random by the seed, in
    the shares of `mix_weights`, without end: the training must have `max_steps`. Every process draws the same number
    of full batches, whatever files it was dealt, and draws the same from step n on when it skips n batches. A share of
    the files is dealt to each process (and worker) where every language has as many files; else all processes read
    all files and train on their share of the pairs. `uniform` needs no sizes.

    Args:
        sizes: pairs a language, such as `corpus.count_pairs` tells; for streaming only.

    Raises:
        ValueError: unknown mix, `alpha` outside 0..1, no languages, or sizes that are missing.
    """
    _check_mix(mix, alpha)
    if not tokenized:
        raise UserError("there is no language to mix; load parallel text first")
    datasets = list(tokenized.values())
    if isinstance(datasets[0], IterableDataset):
        return _interleave(tokenized, mix, alpha, seed, sizes)
    together = concatenate_datasets(datasets)
    if mix == "natural":
        return together
    return together.select(mix_indices([len(dataset) for dataset in datasets], mix, alpha, seed))


def _interleave(
    tokenized: Mapping[str, IterableDataset], mix: str, alpha: float, seed: int, sizes: Mapping[str, int] | None
) -> IterableDataset:
    if mix == "uniform":
        sizes = dict.fromkeys(tokenized, 1)
    if sizes is None:
        raise UserError(
            f"a streamed {mix} mix needs the sizes of the languages: count them (corpus.count_pairs reads the files "
            f"once), choose the uniform mix, or do not stream"
        )
    if missing := tokenized.keys() - sizes.keys():
        raise UserError(f"sizes lacks {sorted(missing)}; give the number of pairs of every language")
    weights = mix_weights([sizes[language] for language in tokenized], mix, alpha)
    streams = [stream.repeat(None) for stream in tokenized.values()]  # tokenised text has no end anyway
    return interleave_datasets(streams, probabilities=weights.tolist(), seed=seed)
