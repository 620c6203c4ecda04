"""The language mix: its shares, no repetition before all was seen, the same order for a seed."""

import numpy as np
import pytest

from dap_transformers.training.mixing import LanguageMixSampler


def drawn(sampler: LanguageMixSampler, epoch: int = 0) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


@pytest.mark.parametrize(
    ("mix", "shares"),
    [("natural", [400, 100, 10]), ("uniform", [1, 1, 1]), ("temperature", [20, 10, 10**0.5])],
)
def test_shares_of_the_mix(mix: str, shares: list) -> None:
    sampler = LanguageMixSampler([400, 100, 10], mix, 0.5, seed=0)
    uses = np.bincount(drawn(sampler), minlength=510)
    assert uses.sum() == len(sampler) == 510
    for of_language, share in zip(np.split(uses, [400, 500]), shares, strict=True):
        assert abs(of_language.sum() - 510 * share / sum(shares)) <= 1
        # Nothing is repeated before everything has been seen.
        assert np.ptp(of_language) <= 1


def test_the_order_depends_on_the_seed_and_each_epoch_goes_on_where_the_last_one_ended() -> None:
    sampler = LanguageMixSampler([400, 100, 7], "uniform", 0.5, seed=3)
    epochs = [drawn(sampler, epoch) for epoch in range(3)]
    uses = np.bincount(np.concatenate(epochs), minlength=507)
    for rows in np.split(uses, [400, 500]):
        assert rows.min() >= 1
        assert np.ptp(rows) <= 1
    languages = np.searchsorted([400, 500], epochs[0][:100], side="right")
    assert np.bincount(languages, minlength=3).min() > 20  # shuffled
    assert epochs[0] == drawn(LanguageMixSampler([400, 100, 7], "uniform", 0.5, seed=3))
    assert epochs[0] != epochs[1]
    assert epochs[0] != drawn(LanguageMixSampler([400, 100, 7], "uniform", 0.5, seed=4))
