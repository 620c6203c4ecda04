"""Split, tokens, mix and batches keep their promises: no leak, no loss, the same result for the same seed."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from dap.corpus import find_bitext, load_bitext
from dap.data import (
    BitextCollator,
    LanguageMixSampler,
    mix_indices,
    mix_languages,
    normalise,
    require_mask_token,
    split_validation,
    target_vocabulary,
    tokenize_bitext,
)

SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture
def bitext(bitext_dir: Path, tmp_path: Path) -> dict[str, Dataset]:
    return load_bitext(bitext_dir, cache_dir=tmp_path)


@pytest.fixture
def tokenized(bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast) -> dict[str, Dataset]:
    return tokenize_bitext(bitext, tiny_tokenizer, 8)


def made_up(sizes: dict[str, int]) -> dict[str, Dataset]:
    rows = {language: [f"{language}:{row}" for row in range(size)] for language, size in sizes.items()}
    return {language: Dataset.from_dict({"pair_id": ids}) for language, ids in rows.items()}


def streams(datasets: dict[str, Dataset]) -> dict[str, IterableDataset]:
    return {language: dataset.to_iterable_dataset() for language, dataset in datasets.items()}


# Tokens


def test_tokens_are_the_tokenizers_own_one_sentence_at_a_time(
    bitext: dict[str, Dataset], tokenized: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    for language in bitext:
        for row in (0, 3, 199):
            pair, ids = bitext[language][row], tokenized[language][row]
            for side in ("source", "target"):
                naive = tiny_tokenizer.encode(pair[side], add_special_tokens=False)[:6]
                assert ids[f"{side}_input_ids"] == [0, *naive, 2]
            assert (ids["language"], ids["pair_id"]) == (language, f"{language}:{row}")
    lengths = [len(ids) for ids in tokenized["de"]["source_input_ids"]]
    assert max(lengths) == 8


def test_streaming_gives_the_same_tokens(
    bitext_dir: Path, tokenized: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = tokenize_bitext(load_bitext(bitext_dir, streaming=True), tiny_tokenizer, 8, streaming=True)
    assert all(list(stream[language]) == list(tokenized[language]) for language in tokenized)


def test_tokens_come_from_the_cache_whatever_the_tokenizer_did_before(
    bitext: dict[str, Dataset], tokenized: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    tiny_tokenizer(["a b", "c"], truncation=True, max_length=3, padding=True)
    again = tokenize_bitext(bitext, tiny_tokenizer, 8)
    longer = tokenize_bitext(bitext, tiny_tokenizer, 20)
    assert again["de"].cache_files == tokenized["de"].cache_files != longer["de"].cache_files
    assert max(map(len, longer["de"]["source_input_ids"])) > 8


def test_bad_lengths_tokenizers_and_datasets(
    bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    for length in (65, 2):
        with pytest.raises(ValueError, match=f"max_seq_length={length} must be .* model_max_length=64"):
            tokenize_bitext(bitext, tiny_tokenizer, length)
    with pytest.raises(ValueError, match="streaming=True, but the dataset is a Dataset"):
        tokenize_bitext(bitext, tiny_tokenizer, 16, streaming=True)
    assert require_mask_token(tiny_tokenizer) == tiny_tokenizer.mask_token_id
    maskless = PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match="no mask token"):
        require_mask_token(maskless)


def test_target_vocabulary_holds_every_label_and_nothing_else(
    tokenized: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    naive = {token for data in tokenized.values() for ids in data["target_input_ids"] for token in ids[1:]}
    vocabulary = target_vocabulary(tokenized, tiny_tokenizer)
    assert vocabulary == sorted(naive)
    assert tiny_tokenizer.sep_token_id in vocabulary
    few = target_vocabulary({"de": tokenized["de"].select([7])}, tiny_tokenizer)
    assert few == sorted(set(tokenized["de"][7]["target_input_ids"][1:]))  # rows that are not selected do not count
    with pytest.raises(ValueError, match="de: a stream's target vocabulary"):
        target_vocabulary(streams(tokenized), tiny_tokenizer)


# Split


def leaky(count: int = 300) -> dict[str, Dataset]:
    """Languages that share English sentences, written differently."""
    english = {
        "de": [f"Sentence {row}." for row in range(count)],
        "fr": [f"sentence  {row % 200} !" for row in range(count)],
        "sw": [f"SENTENCE-{row + 150}" for row in range(count)],
    }
    return {
        language: Dataset.from_dict({"source": [f"{language} {row}" for row in range(count)], "target": texts})
        for language, texts in english.items()
    }


@pytest.mark.parametrize("streaming", [False, True])
def test_no_dev_target_is_in_any_train_set(streaming: bool) -> None:
    data = leaky()
    train, dev = split_validation(streams(data) if streaming else data, 20, seed=1)
    held = {normalise(text) for split in dev.values() for text in split["target"]}
    for language in data:
        left = [row["source"] for row in train[language]]
        naive = [row["source"] for row in data[language] if normalise(row["target"]) not in held]
        assert left == naive
        assert len(set(dev[language]["target"])) == len(dev[language]) == 20
        assert set(dev[language]["source"]) <= set(data[language]["source"])


def test_languages_hold_out_the_same_english_sentences() -> None:
    _, dev = split_validation(leaky(), 20, seed=1)
    german, french, swahili = ({normalise(text) for text in dev[language]["target"]} for language in dev)
    assert len(german | french | swahili) < 40


def test_split_depends_on_the_seed_alone() -> None:
    first, second, other = (split_validation(leaky(), 20, seed)[1]["de"]["row"] for seed in (1, 1, 2))
    assert first == second != other
    alone = split_validation({"de": leaky()["de"]}, 20, seed=1)[1]["de"]["row"]
    assert alone == first  # other languages change nothing


def test_small_languages_give_a_tenth(caplog: pytest.LogCaptureFixture) -> None:
    data = leaky()
    data["jv"] = Dataset.from_dict({"source": ["x"] * 57, "target": [f"other {row}" for row in range(57)]})
    data["xx"] = Dataset.from_dict({"source": ["x"] * 9, "target": [f"more {row}" for row in range(9)]})
    train, dev = split_validation(data, 1000, seed=0)
    assert {language: len(split) for language, split in dev.items()} == {"de": 30, "fr": 30, "sw": 30, "jv": 5}
    assert (len(train["jv"]), len(train["xx"])) == (52, 9)
    assert "xx: 9 pairs are too few for a dev set" in caplog.text


def test_split_without_dev_pairs_and_with_bad_ones() -> None:
    train, dev = split_validation(leaky(), 0, seed=0)
    assert (len(train["de"]), dev) == (300, {})
    with pytest.raises(ValueError, match="not -1"):
        split_validation(leaky(), -1, seed=0)
    data = leaky()
    data["xx"] = Dataset.from_dict({"source": ["a"] * 30, "target": ["Always the same"] * 30})
    with pytest.raises(ValueError, match="xx: all 30 pairs"):
        split_validation(data, 20, seed=0)


def test_ids_name_the_row_before_the_split(
    bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    train, dev = split_validation(bitext, 15, seed=3)
    tokenized = tokenize_bitext(train, tiny_tokenizer, 64)
    for text, ids in zip(train["de"], tokenized["de"]):
        row = int(ids["pair_id"].removeprefix("de:"))
        assert bitext["de"][row]["source"] == text["source"]
    assert tokenize_bitext(train, tiny_tokenizer, 64)["de"].cache_files == tokenized["de"].cache_files
    again = tokenize_bitext(split_validation(bitext, 15, seed=3)[0], tiny_tokenizer, 64)
    assert again["de"].cache_files == tokenized["de"].cache_files


# Mix

SIZES = {"aa": 4000, "bb": 1000, "cc": 10}


@pytest.mark.parametrize(
    ("mix", "alpha", "shares"),
    [
        ("natural", 0.5, [4000, 1000, 10]),
        ("uniform", 0.5, [1, 1, 1]),
        ("temperature", 0.5, [4000**0.5, 1000**0.5, 10**0.5]),
        ("temperature", 1.0, [4000, 1000, 10]),
        ("temperature", 0.0, [1, 1, 1]),
    ],
)
def test_shares_of_the_mix(mix: str, alpha: float, shares: list[float]) -> None:
    mixed = mix_languages(made_up(SIZES), mix, alpha, seed=0)
    assert len(mixed) == 5010
    counts = Counter(name.split(":")[0] for name in mixed["pair_id"])
    for language, share in zip(SIZES, shares):
        assert abs(counts[language] - 5010 * share / sum(shares)) <= 1
    times = Counter(mixed["pair_id"])
    for language in SIZES:  # nothing is repeated before everything has been seen
        uses = [times[f"{language}:{row}"] for row in range(SIZES[language])]
        assert max(uses) - min(uses) <= 1


def test_mix_depends_on_the_seed_alone_and_is_shuffled() -> None:
    first, second, other = (mix_languages(made_up(SIZES), "uniform", 0.5, seed)["pair_id"] for seed in (0, 0, 1))
    assert list(first) == list(second) != list(other)
    languages = [name.split(":")[0] for name in first[:300]]
    assert min(Counter(languages).values()) > 70


def test_epochs_continue_the_walk_through_each_language() -> None:
    sizes = [400, 100, 7]
    epochs = [mix_indices(sizes, "uniform", 0.5, seed=3, epoch=epoch) for epoch in range(3)]
    uses = np.bincount(np.concatenate(epochs), minlength=507)
    for rows in (uses[:400], uses[400:500], uses[500:]):
        assert rows.min() >= 1
        assert rows.max() - rows.min() <= 1
    assert not np.array_equal(epochs[0], epochs[1])


def test_sampler_follows_the_epoch_of_a_prepared_loader() -> None:
    data = mix_languages(made_up(SIZES), "natural", 0.5, seed=0)
    loader = DataLoader(data, batch_size=50, sampler=LanguageMixSampler(list(SIZES.values()), "uniform", 0.5, seed=5))
    loader = Accelerator().prepare(loader)
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        names = [name for batch in loader for name in batch["pair_id"]]
        expected = data[mix_indices(list(SIZES.values()), "uniform", 0.5, seed=5, epoch=epoch)]["pair_id"]
        assert names == list(expected)


def test_streamed_mixes() -> None:
    data = made_up({"aa": 400, "bb": 100, "cc": 10})
    sizes = {language: len(dataset) for language, dataset in data.items()}
    everything = sorted(name for dataset in data.values() for name in dataset["pair_id"])
    for known in (None, sizes):
        natural = mix_languages(streams(data), "natural", 0.5, seed=0, sizes=known)
        assert sorted(row["pair_id"] for row in natural) == everything
    uniform = [row["pair_id"] for row in mix_languages(streams(data), "uniform", 0.5, seed=0)]
    assert set(uniform) == set(everything)
    assert min(Counter(name.split(":")[0] for name in uniform).values()) > 330
    warm = mix_languages(streams(data), "temperature", 0.5, seed=0, sizes=sizes)
    counts = Counter(row["pair_id"].split(":")[0] for row in warm)
    assert counts["aa"] / counts["bb"] == pytest.approx(2, rel=0.3)
    with pytest.raises(ValueError, match="needs the sizes"):
        mix_languages(streams(data), "temperature", 0.5, seed=0)
    with pytest.raises(ValueError, match=r"sizes lacks \['cc'\]"):
        mix_languages(streams(data), "natural", 0.5, seed=0, sizes={"aa": 1, "bb": 1})


@pytest.mark.parametrize("mix", ["natural", "uniform"])
def test_a_streamed_mix_of_real_files_resumes(
    bitext_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, mix: str
) -> None:
    def build() -> IterableDataset:
        train, _ = split_validation(load_bitext(bitext_dir, streaming=True), 10, seed=0)
        return mix_languages(tokenize_bitext(train, tiny_tokenizer, 16, streaming=True), mix, 0.5, seed=7)

    stream, resumed = build(), build()
    rows = iter(stream)
    seen = [next(rows) for _ in range(123)]
    resumed.load_state_dict(stream.state_dict())
    assert seen + list(resumed) == list(build())


def test_unknown_mix_and_alpha() -> None:
    with pytest.raises(ValueError, match="unknown language mix 'flat'; it is one of natural, uniform, temperature"):
        mix_languages(made_up(SIZES), "flat", 0.5, seed=0)
    for alpha in (-0.1, 1.5):
        with pytest.raises(ValueError, match=f"not {alpha}"):
            mix_languages(made_up(SIZES), "temperature", alpha, seed=0)
    with pytest.raises(ValueError, match="no language to mix"):
        mix_languages({}, "natural", 0.5, seed=0)
    with pytest.raises(ValueError, match="at least one pair"):
        mix_indices([3, 0], "uniform", 0.5, seed=0)


# Batches


@pytest.mark.parametrize("multiple", [None, 8])
def test_collator_pads_and_nothing_else(tokenized: dict[str, Dataset], multiple: int | None) -> None:
    rows = [tokenized[language][row] for row, language in enumerate(["sw", "de", "fr", "sw"])]
    batch = BitextCollator(1, ["de", "fr", "sw"], multiple)(rows)
    for side in ("source", "target"):
        ids, mask = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
        longest = max(len(row[f"{side}_input_ids"]) for row in rows)
        assert ids.shape == mask.shape == (4, longest if multiple is None else -(-longest // 8) * 8)
        assert ids.dtype == mask.dtype == torch.int64
        for row, tokens, real in zip(rows, ids, mask):
            assert tokens[real.bool()].tolist() == row[f"{side}_input_ids"]
            assert real.tolist() == sorted(real.tolist(), reverse=True)
            assert set(tokens[~real.bool()].tolist()) <= {1}
    assert batch["language_ids"].tolist() == [2, 0, 1, 2]
    assert batch["pair_ids"] == ["sw:0", "de:1", "fr:2", "sw:3"]


def test_collator_refuses_unknown_languages_and_no_padding(tokenized: dict[str, Dataset]) -> None:
    with pytest.raises(ValueError, match=r"languages \['sw'\] are not among"):
        BitextCollator(1, ["de"])([tokenized["sw"][0]])
    with pytest.raises(ValueError, match="no padding token"):
        BitextCollator(None, ["de"])


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the real data of ../shared")
def test_real_data_goes_all_the_way(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    paths = [SHARED / f"data/train/{language}-en.tsv.xz" for language in ("jv", "af")]
    data = load_bitext(paths, cache_dir=tmp_path)
    train, dev = split_validation(data, 200, seed=0)
    assert [len(split) for split in dev.values()] == [200, 200]
    mixed = mix_languages(tokenize_bitext(train, tiny_tokenizer, 32), "temperature", 0.5, seed=0)
    loader = DataLoader(mixed, batch_size=64, collate_fn=BitextCollator(1, list(find_bitext(paths))))
    batch = next(iter(loader))
    assert batch["source_input_ids"].shape[0] == 64
    assert set(batch["language_ids"].tolist()) == {0, 1}
