"""How often each language is drawn: shares, and a sampler."""

from collections.abc import Iterator, Sequence

import numpy as np
from torch.utils.data import Sampler

ROWS_AT_ONCE = 65_536  # rows of an epoch that are Python integers at a time


def mix_weights(sizes: Sequence[int], mix: str, alpha: float = 0.5) -> np.ndarray:
    """Compute each language's share of the pairs that are drawn for training.

    The share of a language with n pairs is proportional to n^α. The exponent α is 1 for the
    natural mix, 0 for the uniform mix and `alpha` for the temperature mix.

    >>> mix_weights([900, 100], "temperature", 0.5)
    array([0.75, 0.25])

    `sizes` are the numbers of pairs. The shares add up to 1.
    """
    exponent = {"natural": 1.0, "uniform": 0.0, "temperature": alpha}[mix]
    weights = np.asarray(sizes, dtype=np.float64) ** exponent
    return weights / weights.sum()


class LanguageMixSampler(Sampler[int]):
    """Draws the rows of an epoch from the concatenated datasets of all languages.

    Iterating yields row numbers. An epoch has as many rows as all languages together, in random
    order. Each language gets its share of them (`mix_weights`), rounded to a whole number. No
    pair of a language is repeated before all its pairs have been drawn. This also holds across
    epochs: pairs that epoch 0 leaves out come first in epoch 1.

    The order depends only on the arguments and on `set_epoch`, so a resumed run sees the same
    pairs as a run without a stop. `sizes` are in the order of the concatenation.
    """

    def __init__(self, sizes: Sequence[int], mix: str, alpha: float, seed: int) -> None:
        self.sizes = list(sizes)
        self.seed = seed
        self.epoch = 0

        # Pairs per epoch of each language, rounded so that their sum stays the same.
        exact = mix_weights(sizes, mix, alpha) * sum(sizes)
        self.counts = np.floor(exact).astype(np.int64)
        by_remainder = np.argsort(self.counts - exact, kind="stable")
        missing = sum(sizes) - self.counts.sum()
        self.counts[by_remainder[:missing]] += 1

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, from 0, whose rows the next iteration draws."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.sizes)

    def __iter__(self) -> Iterator[int]:
        rows = np.empty(len(self), np.int64)
        starts = np.cumsum([0, *self.sizes[:-1]])
        ends = np.cumsum(self.counts)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            rows[end - self.counts[number] : end] = start + self._rows_of(number)
        rng = np.random.default_rng((self.seed, len(self.sizes), self.epoch))
        rng.shuffle(rows)
        # Python's integers take five times the memory of the array's.
        for start in range(0, len(rows), ROWS_AT_ONCE):
            yield from rows[start : start + ROWS_AT_ONCE].tolist()

    def _rows_of(self, number: int) -> np.ndarray:
        """Return the rows that an epoch draws from one language, numbered in its own dataset.

        All shuffles of a language's rows form one endless sequence. Each epoch takes the next part.
        """
        size = self.sizes[number]
        count = int(self.counts[number])
        begin = self.epoch * count
        first = begin // size
        last = -(-(begin + count) // size)
        parts = [np.empty(0, dtype=np.int64)]
        for turn in range(first, last):
            rng = np.random.default_rng((self.seed, number, turn))
            parts.append(rng.permutation(size))
        offset = begin - first * size
        return np.concatenate(parts)[offset : offset + count]
