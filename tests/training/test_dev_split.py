"""The dev split: no target of a dev set is trained on, and the same result for a seed."""

from pathlib import Path

import pytest
from datasets import Dataset

from dap_transformers.text.corpus import load_bitext
from dap_transformers.text_keys import normalise
from dap_transformers.training.dev_split import drop_targets, split_validation


def leaky() -> dict[str, Dataset]:
    """Languages that share English sentences, written differently."""
    english = {
        "de": [f"Sentence {row}." for row in range(300)],
        "fr": [f"sentence  {row % 200} !" for row in range(300)],
        "sw": [f"SENTENCE-{row + 150}" for row in range(300)],
    }
    data = {}
    for language, texts in english.items():
        sources = [f"{language} {row}" for row in range(300)]
        data[language] = Dataset.from_dict({"source": sources, "target": texts})
    return data


def test_dev_sets_depend_only_on_the_seed_and_share_sentences() -> None:
    data = leaky()
    first, again, other = (split_validation(data, 20, seed)[1] for seed in (1, 1, 2))
    without_others = split_validation({"de": data["de"]}, 20, seed=1)[1]
    rows = [dev["de"]["row"][:] for dev in (first, again, without_others, other)]
    assert rows[0] == rows[1] == rows[2] != rows[3]

    # Of the 45 pairs that are held out, many are the same sentences.
    assert len({normalise(text) for split in first.values() for text in split["target"]}) < 30


def test_no_dev_target_is_in_any_train_set() -> None:
    data = leaky()
    train, dev = split_validation(data, 20, seed=1)
    held = {normalise(text) for split in dev.values() for text in split["target"]}
    for language in data:
        left = [row["source"] for row in train[language]]
        naive = [row["source"] for row in data[language] if normalise(row["target"]) not in held]
        assert left == naive
        assert len(set(dev[language]["target"])) == len(dev[language]) == 15
        assert set(dev[language]["source"]) <= set(data[language]["source"])


def test_small_languages_hold_out_a_twentieth(caplog: pytest.LogCaptureFixture) -> None:
    data = leaky()
    for language, size in (("jv", 57), ("xx", 19)):
        targets = [f"{language} {row}" for row in range(size)]
        data[language] = Dataset.from_dict({"source": ["x"] * size, "target": targets})
    train, dev = split_validation(data, 1000, seed=0)
    sizes = {language: len(split) for language, split in dev.items()}
    assert sizes == {"de": 15, "fr": 15, "sw": 15, "jv": 2}
    assert (len(train["jv"]), len(train["xx"])) == (55, 19)
    assert "xx: too few pairs for a dev set (19)" in caplog.text
    assert split_validation(data, 0, seed=0) == (data, {})


def test_a_language_of_which_nothing_is_left_is_refused(bitext_dir: Path) -> None:
    data = load_bitext(bitext_dir)
    with pytest.raises(ValueError, match="^de: .*nothing is left"):
        drop_targets(data, [row["target"] for row in data["de"]])
