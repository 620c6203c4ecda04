"""Keys, samples and counts by parts against plain sets and loops."""

from itertools import pairwise
from unicodedata import normalize

import numpy as np
import polars as pl
import pytest
import xxhash

from dap_transformers.languages import _is_ignored, is_letter, normalise_all, ranks, text_keys
from dap_transformers.prepare.deduplication import (
    Admission,
    count_distinct,
    pair_keys,
    repeated,
    sample,
)

IGNORED = _is_ignored()


def random_keys(count: int, different: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 2**64, different, np.uint64)[rng.integers(0, different, count)]


def normalised(text: str) -> str:
    """Normalise one text character by character."""
    visible = "".join(each for each in text.replace("\n", " ") if not IGNORED[ord(each)])
    folded = normalize("NFKC", normalize("NFKC", visible).casefold())
    return "".join(each for each in folded if is_letter(each)) or folded.strip()


def test_texts_are_normalised_as_by_a_loop_over_characters() -> None:
    texts = [
        "It's 5 o'clock!",
        "…",
        "",
        " ?! ",
        "Straße ΣΊΣΥΦΟΣ",
        "火车，八点。",
        "रेलगाड़ी",
        "a\nb\u2028c",
        "ﬁ ½ ⅷ İ",
        "x" * 999,
    ]
    assert normalise_all(texts) == [normalised(text) for text in texts]
    assert normalise_all([]) == []
    alone = ["a" + chr(code) + "B" for code in range(0x1F000) if not 0xD800 <= code < 0xE000]
    assert normalise_all(alone) == [normalised(text) for text in alone]


def test_keys_are_of_the_text_alone() -> None:
    keys = text_keys(normalise_all(["Good day!", "bad", "", "good, DAY", "goodda"]))
    assert keys[0] == keys[3] == text_keys(normalise_all(["gOOdday"]))[0]
    assert len(set(keys.tolist())) == 4
    assert keys[1] == xxhash.xxh3_64_intdigest("bad".encode("utf-32-le"))


def test_pair_keys_tell_pairs_and_sides_apart() -> None:
    rng = np.random.default_rng(0)
    some = rng.integers(0, 50, (2, 20_000)).astype(np.uint64)
    pairs = set(zip(*some.tolist()))
    assert len(np.unique(pair_keys(*some))) == len(pairs) == 2500
    assert pair_keys(*some).tolist() != pair_keys(*some[::-1]).tolist()


def test_ranks_are_a_random_order_of_the_seed() -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    orders = [ranks(keys, seed) for seed in (0, 1, -1)]
    assert all(len(np.unique(order)) == len(keys) for order in orders)
    for order in orders:
        assert np.corrcoef(keys.astype(float), order.astype(float))[0, 1] == pytest.approx(
            0, abs=0.02
        )
        assert np.bincount((order >> np.uint64(60)).astype(int), minlength=16) == pytest.approx(
            6250, rel=0.06
        )
    for first, second in pairwise(orders):
        assert np.corrcoef(first.astype(float), second.astype(float))[0, 1] == pytest.approx(
            0, abs=0.02
        )


def frame(values: np.ndarray) -> pl.LazyFrame:
    return pl.LazyFrame({"row": np.arange(len(values)), "key": values})


@pytest.mark.parametrize("part", [10**9, 700, 64])
def test_counts_by_ranges_are_those_of_a_set(part: int) -> None:
    keys = random_keys(3500, 1800)
    keys[:2] = 0, 2**64 - 1
    assert count_distinct(frame(keys), "key", part) == len(set(keys.tolist()))
    assert count_distinct(frame(keys[:0]), "key", part) == 0


def test_repeated_values_are_those_of_a_loop() -> None:
    values = random_keys(3500, 1800).tolist()
    found = repeated(frame(np.array(values, np.uint64)), "key")["key"].to_list()
    assert sorted(found) == sorted({value for value in values if values.count(value) > 1})


@pytest.mark.parametrize("size", [None, 0, 333, 10_000])
def test_a_sample_is_that_of_a_loop(size: int | None) -> None:
    keys = random_keys(2000, 600)
    values = keys.tolist()
    expected = [values.index(value) for value in sorted(set(values))[:size]]
    assert sample(frame(keys), "key", size)["row"].to_list() == expected


@pytest.mark.parametrize("size", [None, 1, 100])
def test_admission_lets_in_all_that_the_sample_needs(size: int | None) -> None:
    values = random_keys(20_000, 8000)
    admit = Admission(size)
    admitted = np.concatenate([admit(block) for block in np.array_split(values, 40)])
    chosen = sample(frame(values), "key", size)["row"].to_numpy()
    assert admitted[chosen].all()
    assert admitted.sum() == len(values) if size is None else admitted.sum() < 0.2 * len(values)
