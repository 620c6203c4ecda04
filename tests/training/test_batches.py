"""Dev split, tokens, language mix and batches: no leak, no loss, the same result for a seed."""

import logging
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from accelerate.data_loader import prepare_data_loader
from conftest import synthetic_pairs
from datasets import Dataset, IterableDataset, concatenate_datasets
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from dap_transformers.languages import normalise
from dap_transformers.text.corpus import load_bitext
from dap_transformers.training.batches import BitextCollator, tokenize_bitext
from dap_transformers.training.dev_split import drop_targets, split_validation
from dap_transformers.training.mixing import LanguageMixSampler, mix_streams, mix_weights
from dap_transformers.training.start import target_vocabulary


@pytest.fixture(scope="module")
def bitext(bitext_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    return load_bitext(bitext_dir, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenized(
    bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> dict[str, Dataset]:
    return tokenize_bitext(bitext, tiny_tokenizer, 8)


def made_up(sizes: dict[str, int]) -> dict[str, Dataset]:
    """Datasets of these sizes that have only pair ids."""
    datasets = {}
    for language, size in sizes.items():
        ids = [f"{language}:{row}" for row in range(size)]
        datasets[language] = Dataset.from_dict({"pair_id": ids})
    return datasets


def streams(datasets: dict[str, Dataset]) -> dict[str, IterableDataset]:
    return {language: dataset.to_iterable_dataset() for language, dataset in datasets.items()}


def mixed_evenly(
    tokenized: dict[str, IterableDataset], shuffle_buffer: int = 0, seed: int = 0
) -> IterableDataset:
    """One stream in which all languages have the same share."""
    weights = np.full(len(tokenized), 1 / len(tokenized))
    return mix_streams(tokenized, weights, shuffle_buffer, seed)


def drawn(sampler: LanguageMixSampler, epoch: int = 0) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """The row with lists instead of arrays."""
    found = {}
    for name, value in row.items():
        found[name] = value.tolist() if isinstance(value, np.ndarray) else value
    return found


# Tokens


def test_tokens_equal_those_of_single_calls_of_the_tokenizer(
    bitext: dict[str, Dataset],
    tokenized: dict[str, Dataset],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    for language in bitext:
        for row in (0, 3, 199):
            pair = bitext[language][row]
            ids = tokenized[language][row]
            for side in ("source", "target"):
                naive = tiny_tokenizer.encode(pair[side], add_special_tokens=False)[:6]
                assert ids[f"{side}_input_ids"] == [0, *naive, 2]
            assert (ids["language"], ids["pair_id"]) == (language, f"{language}:{row}")
    lengths = [len(ids) for ids in tokenized["de"]["source_input_ids"]]
    assert max(lengths) == 8


def test_a_stream_has_the_same_tokens(
    bitext_dir: Path, tokenized: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = load_bitext(bitext_dir, streaming=True)
    stream = tokenize_bitext(text, tiny_tokenizer, 8)
    for language, dataset in tokenized.items():
        assert [plain(row) for row in stream[language]] == list(dataset)


def test_a_tokenised_stream_is_independent_of_later_calls_of_the_tokenizer(
    bitext_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = load_bitext(bitext_dir, streaming=True)
    mixed = mixed_evenly(tokenize_bitext(text, tiny_tokenizer, 8), shuffle_buffer=100)
    tiny_tokenizer(["a b", "c"], truncation=True, max_length=3, padding="max_length")
    for row in islice(mixed, 6):
        language, number = row["pair_id"].split(":")
        source, _ = synthetic_pairs(language)[int(number)]
        expected = tiny_tokenizer(source, truncation=True, max_length=8)["input_ids"]
        assert plain(row)["source_input_ids"] == expected


def test_tokens_are_cached_for_the_text_and_the_length(
    bitext: dict[str, Dataset],
    tokenized: dict[str, Dataset],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    # An earlier call of the tokenizer makes no difference.
    tiny_tokenizer(["a b", "c"], truncation=True, max_length=3, padding=True)
    again = tokenize_bitext(bitext, tiny_tokenizer, 8)
    # Nor does the tokenizer's model_max_length, 64.
    longer = tokenize_bitext(bitext, tiny_tokenizer, 65)
    assert again["de"].cache_files == tokenized["de"].cache_files != longer["de"].cache_files
    assert max(map(len, longer["de"]["source_input_ids"])) > 8


def test_target_vocabulary_holds_every_label_and_nothing_else(
    tokenized: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    naive = set()
    for data in tokenized.values():
        for ids in data["target_input_ids"]:
            naive.update(ids[1:])
    vocabulary = target_vocabulary(tokenized, tiny_tokenizer)
    assert vocabulary == sorted(naive)
    assert tiny_tokenizer.sep_token_id in vocabulary

    # Rows that are not selected do not count.
    few = target_vocabulary({"de": tokenized["de"].select([7])}, tiny_tokenizer)
    assert few == sorted(set(tokenized["de"][7]["target_input_ids"][1:]))


# Split


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
    first = split_validation(leaky(), 20, 1)[1]
    again = split_validation(leaky(), 20, 1)[1]
    other = split_validation(leaky(), 20, 2)[1]
    assert first["de"]["row"][:] == again["de"]["row"][:] != other["de"]["row"][:]

    # Other languages change nothing.
    without_others = split_validation({"de": leaky()["de"]}, 20, seed=1)[1]
    assert without_others["de"]["row"][:] == first["de"]["row"][:]

    # Of the 60 pairs that are held out, many are the same sentences.
    assert len({normalise(text) for split in first.values() for text in split["target"]}) < 40


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


def test_small_languages_hold_out_a_tenth(caplog: pytest.LogCaptureFixture) -> None:
    data = leaky()
    for language, size in (("jv", 57), ("xx", 9)):
        targets = [f"{language} {row}" for row in range(size)]
        data[language] = Dataset.from_dict({"source": ["x"] * size, "target": targets})
    train, dev = split_validation(data, 1000, seed=0)
    sizes = {language: len(split) for language, split in dev.items()}
    assert sizes == {"de": 30, "fr": 30, "sw": 30, "jv": 5}
    assert (len(train["jv"]), len(train["xx"])) == (52, 9)
    assert "xx: too few pairs for a dev set (9)" in caplog.text


def test_pair_ids_name_the_row_before_the_split(
    bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    train, dev = split_validation(bitext, 15, seed=3)
    tokenized = tokenize_bitext(train, tiny_tokenizer, 64)
    for text, ids in zip(train["de"], tokenized["de"]):
        row = int(ids["pair_id"].removeprefix("de:"))
        assert bitext["de"][row]["source"] == text["source"]

    # A second run finds the tokens in the cache.
    again, _ = split_validation(bitext, 15, seed=3)
    files = tokenize_bitext(again, tiny_tokenizer, 64)["de"].cache_files
    assert files == tokenized["de"].cache_files


def test_pair_ids_of_a_stream_name_the_row_before_split_and_shuffle(
    bitext_dir: Path, bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    train, dev = split_validation(load_bitext(bitext_dir, streaming=True), 10, seed=3)
    assert all(bitext["de"][int(row["row"])]["source"] == row["source"] for row in dev["de"])
    held = {row["target"] for split in dev.values() for row in split}
    tokenized = tokenize_bitext(train, tiny_tokenizer, 64)
    stream = mixed_evenly({"de": tokenized["de"]}, shuffle_buffer=50)
    mapped = tokenize_bitext(drop_targets(bitext, held), tiny_tokenizer, 64)["de"]
    expected = {row["pair_id"]: row for row in mapped}
    rows = [plain(row) for row in islice(stream, 3 * len(mapped))]
    assert {row["pair_id"] for row in rows} == expected.keys()
    assert all(row == expected[row["pair_id"]] for row in rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_targets_of_a_given_dev_set_are_dropped(
    streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    dropped = {"de": {7, 250}, "fr": {7, 207}, "sw": {100}}  # rows
    data = leaky()
    given = streams(data) if streaming else data
    with caplog.at_level(logging.INFO, "dap_transformers.training.dev_split"):
        left = drop_targets(given, ["Sentence, 7", "SENTENCE 250!", "elsewhere"])
    for language in data:
        sources = data[language]["source"][:]
        naive = [text for text in sources if int(text.split()[1]) not in dropped[language]]
        assert [row["source"] for row in left[language]] == naive
    if not streaming:
        assert left["fr"]["row"][6:8] == [6, 8]
        assert "fr: 2 of 300 pairs are not trained on" in caplog.text
        assert drop_targets(data, ["elsewhere"])["de"] is data["de"]


def test_a_language_of_which_nothing_is_left_is_refused(
    bitext_dir: Path, bitext: dict[str, Dataset]
) -> None:
    targets = bitext["de"]["target"][:]
    for given in (bitext, load_bitext(bitext_dir, streaming=True)):
        with pytest.raises(ValueError, match="^de: .*nothing is left"):
            drop_targets(given, targets)


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
    sampler = LanguageMixSampler(list(SIZES.values()), mix, alpha, seed=0)
    names = concatenate_datasets(list(made_up(SIZES).values()))[drawn(sampler)]["pair_id"]
    assert len(names) == len(sampler) == 5010
    counts = Counter(name.split(":")[0] for name in names)
    for language, share in zip(SIZES, shares):
        assert abs(counts[language] - 5010 * share / sum(shares)) <= 1

    # Nothing is repeated before everything has been seen.
    times = Counter(names)
    for language in SIZES:
        uses = [times[f"{language}:{row}"] for row in range(SIZES[language])]
        assert max(uses) - min(uses) <= 1


def test_the_mix_is_shuffled_and_depends_only_on_the_seed() -> None:
    sizes = [4000, 1000, 10]
    first = drawn(LanguageMixSampler(sizes, "uniform", 0.5, 0))
    second = drawn(LanguageMixSampler(sizes, "uniform", 0.5, 0))
    other = drawn(LanguageMixSampler(sizes, "uniform", 0.5, 1))
    assert first == second != other
    languages = np.searchsorted([4000, 5000, 5010], first[:300], side="right")
    assert np.bincount(languages, minlength=3).min() > 70


def test_an_epoch_begins_with_the_pairs_that_the_last_one_left_out() -> None:
    sizes = [400, 100, 7]
    epochs = [drawn(LanguageMixSampler(sizes, "uniform", 0.5, seed=3), epoch) for epoch in range(3)]
    uses = np.bincount(np.concatenate(epochs), minlength=507)
    for rows in (uses[:400], uses[400:500], uses[500:]):
        assert rows.min() >= 1
        assert rows.max() - rows.min() <= 1
    assert epochs[0] != epochs[1]


# Streams

PAIRS = {"de": 60, "fr": 30}


@pytest.mark.parametrize("mix", ["natural", "uniform", "temperature"])
def test_a_mixed_stream_has_no_end_and_the_shares_of_the_mix(mix: str) -> None:
    data = made_up({"aa": 400, "bb": 100, "cc": 10})
    weights = mix_weights([400, 100, 10], mix, 0.5)
    stream = mix_streams(streams(data), weights, shuffle_buffer=0, seed=0)
    names = [row["pair_id"] for row in islice(stream, 2000)]
    assert set(names) == {name for dataset in data.values() for name in dataset["pair_id"]}
    counts = Counter(name.split(":")[0] for name in names)
    for language, weight in zip(data, weights):
        assert counts[language] / 2000 == pytest.approx(weight, abs=0.03)
        # No pair comes again before the other pairs of its language.
        times = Counter(name for name in names if name.startswith(language)).values()
        assert max(times) - min(times) <= 1


@pytest.mark.parametrize("buffer", [70, 450])
def test_a_stream_is_shuffled_by_the_seed_and_each_pass_is_complete(
    bitext_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, buffer: int
) -> None:
    def rows(seed: int) -> list[int]:
        text = load_bitext(bitext_dir / "de-en.tsv", streaming=True)
        stream = mixed_evenly(tokenize_bitext(text, tiny_tokenizer, 8), buffer, seed)
        return [int(row["pair_id"].removeprefix("de:")) for row in islice(stream, 600)]

    order = rows(seed=1)
    assert order == rows(seed=1) != rows(seed=2)
    for start in (0, 200, 400):
        one_pass = order[start : start + 200]
        assert sorted(one_pass) == list(range(200)) != one_pass


# Streams over processes and workers

#: Number of German and French files.
FILES = {"one": (1, 1), "two": (2, 2), "three": (3, 3), "uneven": (3, 2)}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders in which the pairs of a language are spread over one to three files."""
    folders = {}
    for name, counts in FILES.items():
        folder = tmp_path_factory.mktemp(name)
        for language, count in zip(PAIRS, counts):
            for number in range(count):
                rows = range(number, PAIRS[language], count)
                text = "".join(f"{language} {row}\tsentence {row}\n" for row in rows)
                (folder / f"{number}.{language}-en.tsv").write_text(text)
        folders[name] = folder
    return folders


def batches(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    rank: int,
    workers: int,
    split: str,
) -> DataLoader:
    """Batches of five pairs for one of two processes, split as `datasets` or as accelerate does."""
    tokenized = tokenize_bitext(load_bitext(folder, streaming=True), tokenizer, 16)
    weights = mix_weights(list(PAIRS.values()), "natural")
    mixed = mix_streams(tokenized, weights, shuffle_buffer=25, seed=3)
    if split == "datasets":
        mixed = split_dataset_by_node(mixed, rank, 2)
    collator = BitextCollator(1, ["de", "fr"])
    loader = DataLoader(mixed, batch_size=5, num_workers=workers, collate_fn=collator)
    if split == "accelerate":
        loader = prepare_data_loader(
            loader, num_processes=2, process_index=rank, dispatch_batches=False
        )
    return loader


@pytest.mark.parametrize(
    ("files", "split", "workers"),
    [
        ("one", "datasets", 2),
        ("uneven", "datasets", 2),
        ("two", "datasets", 0),
        ("one", "accelerate", 2),
        ("three", "accelerate", 2),
    ],
)
def test_processes_draw_full_batches_of_different_pairs_without_end(
    sharded: dict[str, Path],
    tiny_tokenizer: PreTrainedTokenizerFast,
    files: str,
    split: str,
    workers: int,
) -> None:
    drawn = []
    for rank in range(2):
        loader = batches(sharded[files], tiny_tokenizer, rank, workers, split)
        drawn.append([batch["pair_ids"] for batch in islice(loader, 4 * 90 // 10)])
    assert {len(batch) for batch in drawn[0] + drawn[1]} == {5}
    assert [len(part) for part in drawn] == [36, 36]

    first = {pair for batch in drawn[0][:4] for pair in batch}
    second = {pair for batch in drawn[1][:4] for pair in batch}
    assert not first & second
    uses = Counter(pair for part in drawn for batch in part for pair in batch)
    assert len(uses) == 90
    counts = Counter(pair.split(":")[0] for pair in uses.elements())
    assert counts["de"] / counts.total() == pytest.approx(2 / 3, abs=0.08)


@pytest.mark.parametrize(("files", "workers"), [("one", 0), ("uneven", 2)])
def test_a_stream_resumes_exactly_by_skipping_batches(
    sharded: dict[str, Path], tiny_tokenizer: PreTrainedTokenizerFast, files: str, workers: int
) -> None:
    whole = batches(sharded[files], tiny_tokenizer, 1, workers, "accelerate")
    again = batches(sharded[files], tiny_tokenizer, 1, workers, "accelerate")
    rest = skip_first_batches(again, 23)  # beyond the first pass
    expected = [batch["pair_ids"] for batch in islice(whole, 33)][23:]
    assert [batch["pair_ids"] for batch in islice(rest, 10)] == expected


# Batches


def test_the_collator_only_pads(tokenized: dict[str, Dataset]) -> None:
    rows = [tokenized[language][row] for row, language in enumerate(["sw", "de", "fr", "sw"])]
    batch = BitextCollator(1, ["de", "fr", "sw"])(rows)
    for side in ("source", "target"):
        ids = batch[f"{side}_input_ids"]
        mask = batch[f"{side}_attention_mask"]
        longest = max(len(row[f"{side}_input_ids"]) for row in rows)
        assert ids.shape == mask.shape == (4, longest)
        assert ids.dtype == mask.dtype == torch.int64
        for row, tokens, real in zip(rows, ids, mask):
            assert tokens[real.bool()].tolist() == row[f"{side}_input_ids"]
            assert real.tolist() == sorted(real.tolist(), reverse=True)
            assert set(tokens[~real.bool()].tolist()) <= {1}
    assert batch["language_ids"].tolist() == [2, 0, 1, 2]
    assert batch["pair_ids"] == ["sw:0", "de:1", "fr:2", "sw:3"]


@pytest.mark.parametrize("copies", [[[0, 7, 2], [], [0, 2], []], [[], [], [], []]])
def test_a_pair_without_a_negative_has_a_mask_of_zeros(
    copies: list[list[int]], tokenized: dict[str, Dataset]
) -> None:
    rows = tokenized["de"].select(range(4)).to_list()

    def negatives(given: list[dict]) -> list[list[int]]:
        assert given == rows
        return copies

    batch = BitextCollator(1, ["de"], negatives)(rows)
    ids = batch["negative_input_ids"]
    mask = batch["negative_attention_mask"]
    assert ids.shape == mask.shape == (4, max(1, *map(len, copies)))
    assert [row[real.bool()].tolist() for row, real in zip(ids, mask)] == copies
    assert set(ids[mask == 0].tolist()) <= {1}
    assert not [name for name in BitextCollator(1, ["de"])(rows) if name.startswith("negative")]


def test_impossible_splits_lengths_and_batches_are_refused(
    bitext: dict[str, Dataset],
    tokenized: dict[str, Dataset],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    train, dev = split_validation(leaky(), 0, seed=0)
    assert (len(train["de"]), dev) == (300, {})
    repeated = Dataset.from_dict({"source": ["a"] * 30, "target": ["Always the same"] * 30})
    with pytest.raises(ValueError, match="^xx: .*nothing is left"):
        split_validation(leaky() | {"xx": repeated}, 20, seed=0)
    with pytest.raises(ValueError, match="max_seq_length=2"):
        tokenize_bitext(bitext, tiny_tokenizer, 2)
    with pytest.raises(ValueError, match="sw"):
        BitextCollator(1, ["de"])([tokenized["sw"][0]])
    with pytest.raises(ValueError, match="no padding token"):
        BitextCollator(None, ["de"])
