"""The language mix: its shares, no repetition before all was seen, the same order for a seed."""

from collections import Counter

import numpy as np
import pytest

from dap_transformers.training.mixing import LanguageMixSampler

SIZES = {"aa": 400, "bb": 100, "cc": 10}
NAMES = [f"{language}:{row}" for language, size in SIZES.items() for row in range(size)]
MIXES = [
    ("natural", 0.5, [400, 100, 10]),
    ("uniform", 0.5, [1, 1, 1]),
    ("temperature", 0.5, [400**0.5, 100**0.5, 10**0.5]),
]


def drawn(sampler: LanguageMixSampler, epoch: int = 0) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize(("mix", "alpha", "shares"), MIXES)
def test_shares_of_the_mix(mix: str, alpha: float, shares: list) -> None:
    sampler = LanguageMixSampler(list(SIZES.values()), mix, alpha, seed=0)
    times = Counter(NAMES[row] for row in drawn(sampler))
    assert times.total() == len(sampler) == 510
    for language, share in zip(SIZES, shares):
        uses = [times[f"{language}:{row}"] for row in range(SIZES[language])]
        assert abs(sum(uses) - 510 * share / sum(shares)) <= 1
        # Nothing is repeated before everything has been seen.
        assert max(uses) - min(uses) <= 1


def test_the_order_depends_on_the_seed_and_each_epoch_goes_on_where_the_last_one_ended() -> None:
    sampler = LanguageMixSampler([400, 100, 7], "uniform", 0.5, seed=3)
    epochs = [drawn(sampler, epoch) for epoch in range(3)]
    uses = np.bincount(np.concatenate(epochs), minlength=507)
    for rows in (uses[:400], uses[400:500], uses[500:]):
        assert rows.min() >= 1
        assert rows.max() - rows.min() <= 1
    languages = np.searchsorted([400, 500], epochs[0][:100], side="right")
    assert np.bincount(languages, minlength=3).min() > 20  # shuffled
    assert epochs[0] == drawn(LanguageMixSampler([400, 100, 7], "uniform", 0.5, seed=3))
    assert epochs[0] != epochs[1]
    assert epochs[0] != drawn(LanguageMixSampler([400, 100, 7], "uniform", 0.5, seed=4))
