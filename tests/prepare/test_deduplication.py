"""Keys, samples and counts by parts against plain sets and loops."""

from unicodedata import normalize

import numpy as np
import polars as pl
import pytest

from dap_transformers.prepare.deduplication import Admission, count_distinct, pair_keys, sample
from dap_transformers.text_keys import _IGNORED, _LETTERS, normalise_all, ranks


def frame(different: int, count: int = 3500) -> pl.LazyFrame:
    """Return a table of random keys, of which many are equal."""
    rng = np.random.default_rng(0)
    values = rng.integers(0, 2**64, different, np.uint64)
    values[:2] = 0, 2**64 - 1
    return pl.LazyFrame({"row": np.arange(count), "key": values[np.arange(count) % different]})


def normalised(text: str) -> str:
    """Normalise one text character by character."""
    visible = "".join(each for each in text.replace("\n", " ") if not _IGNORED.match(each))
    folded = normalize("NFKC", normalize("NFKC", visible).casefold())
    return "".join(each for each in folded if _LETTERS.match(each)) or folded.strip()


def test_texts_are_normalised_as_by_a_loop_over_characters() -> None:
    texts = ["It's 5 o'clock!", "…", "", " ?! ", "Straße ΣΊΣΥΦΟΣ", "火车，八点。", "ﬁ ½ ⅷ İ"]
    texts += ["रेलगाड़ी", "a\nb\u2028c"]
    texts += ["a" + chr(code) + "B" for code in range(0x1F000) if not 0xD800 <= code < 0xE000]
    assert normalise_all(texts) == [normalised(text) for text in texts]
    assert normalise_all([]) == []


def test_pair_keys_and_ranks_are_random_and_tell_pairs_sides_and_seeds_apart() -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    orders = [keys, ranks(keys, 0), ranks(keys, -1), pair_keys(keys, keys // 2)]
    orders.append(pair_keys(keys // 2, keys))
    assert np.corrcoef(np.stack(orders).astype(float)) == pytest.approx(np.eye(5), abs=0.02)
    assert all(len(np.unique(order)) == len(keys) for order in orders)


@pytest.mark.parametrize("part", [10**9, 700, 64])
def test_counts_by_parts_are_those_of_a_set(part: int) -> None:
    assert count_distinct(frame(1800), "key", part) == 1800
    assert count_distinct(frame(1800).clear(), "key", part) == 0


@pytest.mark.parametrize("size", [None, 0, 333, 10_000])
def test_a_sample_is_that_of_a_loop(size: int | None) -> None:
    keys = frame(600).collect()["key"].to_list()
    expected = [keys.index(key) for key in sorted(set(keys))[:size]]
    assert sample(frame(600), "key", size)["row"].to_list() == expected


@pytest.mark.parametrize("size", [0, 1, 100])
def test_admission_lets_in_all_that_the_sample_needs(size: int) -> None:
    rows = frame(8000, 20_000)
    admit = Admission(size)
    blocks = np.array_split(rows.collect()["key"].to_numpy(), 40)
    admitted = np.concatenate([admit(block) for block in blocks])
    assert admitted[sample(rows, "key", size or None)["row"].to_numpy()].all()
    assert admitted.all() if size == 0 else admitted.sum() < 4000
