"""Split, tokens, mix and batches keep their promises: no leak, no loss, the same result for the same seed."""

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

from dap.languages import normalise
from dap.text.corpus import load_bitext
from dap.training.batches import (
    BitextCollator,
    LanguageMixSampler,
    drop_targets,
    interleave_languages,
    split_validation,
    tokenize_bitext,
)
from dap.training.start import target_vocabulary, token_counts


@pytest.fixture(scope="module")
def bitext(bitext_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Dataset]:
    return load_bitext(bitext_dir, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenized(
    bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> dict[str, Dataset]:
    return tokenize_bitext(bitext, tiny_tokenizer, 8)


def made_up(sizes: dict[str, int]) -> dict[str, Dataset]:
    rows = {
        language: [f"{language}:{row}" for row in range(size)] for language, size in sizes.items()
    }
    return {language: Dataset.from_dict({"pair_id": ids}) for language, ids in rows.items()}


def streams(datasets: dict[str, Dataset]) -> dict[str, IterableDataset]:
    return {language: dataset.to_iterable_dataset() for language, dataset in datasets.items()}


def uniform(tokenized: dict[str, IterableDataset], seed: int = 0) -> IterableDataset:
    """One stream in which all languages have the same share."""
    return interleave_languages(tokenized, dict.fromkeys(tokenized, 1), "uniform", 0.5, seed)


def drawn(sampler: LanguageMixSampler, epoch: int = 0) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """A row with lists for arrays."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in row.items()
    }


# Tokens


def test_tokens_are_the_tokenizers_own_one_sentence_at_a_time(
    bitext: dict[str, Dataset],
    tokenized: dict[str, Dataset],
    tiny_tokenizer: PreTrainedTokenizerFast,
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
    text = load_bitext(bitext_dir, streaming=True)
    stream = tokenize_bitext(text, tiny_tokenizer, 8, shuffle_buffer=0)
    for language, dataset in tokenized.items():
        rows = [plain(row) for row in islice(stream[language], 2 * len(dataset))]
        assert rows == 2 * list(dataset)  # without end
    with pytest.raises(ValueError, match="shuffle_buffer must be 0 .*, not -1"):
        tokenize_bitext(text, tiny_tokenizer, 8, shuffle_buffer=-1)


@pytest.mark.parametrize("buffer", [70, 200, 450])
def test_streams_are_shuffled_in_each_pass_anew_and_lose_nothing(
    bitext_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast, buffer: int
) -> None:
    def ids(seed: int, count: int = 1000) -> list[int]:
        text = load_bitext(bitext_dir / "de-en.tsv", streaming=True)
        stream = tokenize_bitext(text, tiny_tokenizer, 8, shuffle_buffer=buffer, seed=seed)["de"]
        return [int(row["pair_id"].removeprefix("de:")) for row in islice(stream, count)]

    order = ids(1)
    assert order == ids(1) != ids(2)
    for start in range(
        0, 1000 - buffer, buffer
    ):  # blocks hold what the files hold there, each pair as often
        block = [number % 200 for number in range(start, start + buffer)]
        assert (
            sorted(order[start : start + buffer]) == sorted(block) != order[start : start + buffer]
        )
    passes = [order[start : start + 200] for start in range(0, 1000, 200)]
    assert passes[0] != passes[1]
    if buffer >= 200:
        assert sorted(passes[0]) == list(range(200))
    uses = np.array(
        [
            [seen.count(row) for row in range(200)]
            for seen in (order[:137], order[:400], order[:777])
        ]
    )
    assert (uses.max(axis=1) - uses.min(axis=1)).max() <= 2


def test_a_tokenised_stream_holds_one_tokenizer_that_others_cannot_change(
    bitext_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    text = load_bitext(bitext_dir, streaming=True)
    mixed = uniform(tokenize_bitext(text, tiny_tokenizer, 8, shuffle_buffer=100))
    tiny_tokenizer(["a b", "c"], truncation=True, max_length=3, padding="max_length")
    for row in islice(mixed, 6):
        language, number = row["pair_id"].split(":")
        text = synthetic_pairs(language)[int(number)][0]
        assert (
            plain(row)["source_input_ids"]
            == tiny_tokenizer(text, truncation=True, max_length=8)["input_ids"]
        )


def test_tokens_come_from_the_cache_whatever_the_tokenizer_did_before(
    bitext: dict[str, Dataset],
    tokenized: dict[str, Dataset],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    tiny_tokenizer(["a b", "c"], truncation=True, max_length=3, padding=True)
    again = tokenize_bitext(bitext, tiny_tokenizer, 8)
    longer = tokenize_bitext(
        bitext, tiny_tokenizer, 65
    )  # the model's table decides, not model_max_length
    assert again["de"].cache_files == tokenized["de"].cache_files != longer["de"].cache_files
    assert max(map(len, longer["de"]["source_input_ids"])) > 8


def test_target_vocabulary_holds_every_label_and_nothing_else(
    tokenized: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    naive = {
        token
        for data in tokenized.values()
        for ids in data["target_input_ids"]
        for token in ids[1:]
    }
    vocabulary = target_vocabulary(tokenized, tiny_tokenizer)
    assert vocabulary == sorted(naive)
    assert tiny_tokenizer.sep_token_id in vocabulary
    few = target_vocabulary({"de": tokenized["de"].select([7])}, tiny_tokenizer)
    assert few == sorted(
        set(tokenized["de"][7]["target_input_ids"][1:])
    )  # rows that are not selected do not count
    with pytest.raises(ValueError, match="the tokens of a stream are unknown"):
        target_vocabulary(streams(tokenized), tiny_tokenizer)


def test_tokens_are_counted_as_by_a_loop(
    tokenized: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    parts = {language: data.select(range(3, 40)) for language, data in tokenized.items()}
    for sides in (("target",), ("source",), ("source", "target")):
        naive = [0] * len(tiny_tokenizer)
        for row in (row for data in parts.values() for row in data):
            for token in (
                token for side in sides for token in row[f"{side}_input_ids"][1:]
            ):  # without CLS
                naive[token] += 1
        assert token_counts(parts, tiny_tokenizer, sides).tolist() == naive


# Split


def leaky(count: int = 300) -> dict[str, Dataset]:
    """Languages that share English sentences, written differently."""
    english = {
        "de": [f"Sentence {row}." for row in range(count)],
        "fr": [f"sentence  {row % 200} !" for row in range(count)],
        "sw": [f"SENTENCE-{row + 150}" for row in range(count)],
    }
    return {
        language: Dataset.from_dict(
            {"source": [f"{language} {row}" for row in range(count)], "target": texts}
        )
        for language, texts in english.items()
    }


def test_the_split_depends_on_the_seed_alone_and_languages_hold_out_the_same_sentences() -> None:
    first, again, other = (split_validation(leaky(), 20, seed)[1] for seed in (1, 1, 2))
    assert first["de"]["row"] == again["de"]["row"] != other["de"]["row"]
    alone = split_validation({"de": leaky()["de"]}, 20, seed=1)[1]["de"]["row"]
    assert alone == first["de"]["row"]  # other languages change nothing
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


def test_small_languages_give_a_tenth(caplog: pytest.LogCaptureFixture) -> None:
    data = leaky()
    data["jv"] = Dataset.from_dict(
        {"source": ["x"] * 57, "target": [f"other {row}" for row in range(57)]}
    )
    data["xx"] = Dataset.from_dict(
        {"source": ["x"] * 9, "target": [f"more {row}" for row in range(9)]}
    )
    train, dev = split_validation(data, 1000, seed=0)
    assert {language: len(split) for language, split in dev.items()} == {
        "de": 30,
        "fr": 30,
        "sw": 30,
        "jv": 5,
    }
    assert (len(train["jv"]), len(train["xx"])) == (52, 9)
    assert "xx: 9 pairs are too few for a dev set" in caplog.text


def test_ids_name_the_row_before_the_split(
    bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    train, dev = split_validation(bitext, 15, seed=3)
    tokenized = tokenize_bitext(train, tiny_tokenizer, 64)
    for text, ids in zip(train["de"], tokenized["de"]):
        row = int(ids["pair_id"].removeprefix("de:"))
        assert bitext["de"][row]["source"] == text["source"]
    assert (
        tokenize_bitext(train, tiny_tokenizer, 64)["de"].cache_files == tokenized["de"].cache_files
    )
    again = tokenize_bitext(split_validation(bitext, 15, seed=3)[0], tiny_tokenizer, 64)
    assert again["de"].cache_files == tokenized["de"].cache_files


def test_streamed_ids_name_the_row_whatever_is_held_out_and_shuffled(
    bitext_dir: Path, bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    train, dev = split_validation(load_bitext(bitext_dir, streaming=True), 10, seed=3)
    assert all(bitext["de"][int(row["row"])]["source"] == row["source"] for row in dev["de"])
    held = {row["target"] for split in dev.values() for row in split}
    stream = tokenize_bitext(train, tiny_tokenizer, 64, shuffle_buffer=50)["de"]
    mapped = tokenize_bitext(drop_targets(bitext, held), tiny_tokenizer, 64)["de"]
    expected = {row["pair_id"]: row for row in mapped}
    rows = [plain(row) for row in islice(stream, 3 * len(mapped))]
    assert {row["pair_id"] for row in rows} == expected.keys()
    assert all(row == expected[row["pair_id"]] for row in rows)


@pytest.mark.parametrize("streaming", [False, True])
def test_dev_targets_are_dropped(streaming: bool, caplog: pytest.LogCaptureFixture) -> None:
    data = leaky()
    given = streams(data) if streaming else data
    with caplog.at_level(logging.INFO, "dap.training.batches"):
        left = drop_targets(given, ["Sentence, 7", "SENTENCE 250!", "elsewhere"])
    for language in data:
        naive = [
            row for row in data[language]["source"] if int(row.split()[1]) not in DROPPED[language]
        ]
        assert [row["source"] for row in left[language]] == naive
    if not streaming:
        assert [left["fr"][6]["row"], left["fr"][7]["row"]] == [6, 8]
        assert "fr: 2 of 300 pairs dropped" in caplog.text
        assert drop_targets(data, ["elsewhere"])["de"] is data["de"]


DROPPED = {"de": {7, 250}, "fr": {7, 207}, "sw": {100}}


def test_nothing_left_is_an_error_and_no_endless_search(
    bitext_dir: Path, bitext: dict[str, Dataset], tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    targets = bitext["de"]["target"][:]
    with pytest.raises(ValueError, match="de: all 200 pairs have a target .* nothing is left"):
        drop_targets(bitext, targets)
    left = drop_targets(load_bitext(bitext_dir, streaming=True), targets)
    mixed = uniform(tokenize_bitext(left, tiny_tokenizer, 8, shuffle_buffer=100))
    with pytest.raises(
        ValueError, match="de: all pairs of a stream have a target .* nothing is left"
    ):
        list(islice(mixed, 50))


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
    times = Counter(names)
    for language in SIZES:  # nothing is repeated before everything has been seen
        uses = [times[f"{language}:{row}"] for row in range(SIZES[language])]
        assert max(uses) - min(uses) <= 1


def test_mix_depends_on_the_seed_alone_and_is_shuffled() -> None:
    first, second, other = (
        drawn(LanguageMixSampler([4000, 1000, 10], "uniform", 0.5, seed)) for seed in (0, 0, 1)
    )
    assert first == second != other
    languages = np.searchsorted([4000, 5000, 5010], first[:300], side="right")
    assert np.bincount(languages, minlength=3).min() > 70


def test_epochs_continue_the_walk_through_each_language() -> None:
    sizes = [400, 100, 7]
    epochs = [drawn(LanguageMixSampler(sizes, "uniform", 0.5, seed=3), epoch) for epoch in range(3)]
    uses = np.bincount(np.concatenate(epochs), minlength=507)
    for rows in (uses[:400], uses[400:500], uses[500:]):
        assert rows.min() >= 1
        assert rows.max() - rows.min() <= 1
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("mix", "shares"),
    [("natural", [400, 100, 10]), ("uniform", [1, 1, 1]), ("temperature", [20, 10, 10**0.5])],
)
def test_streamed_mixes_have_no_end_and_the_shares_of_the_mix(
    mix: str, shares: list[float]
) -> None:
    data = made_up({"aa": 400, "bb": 100, "cc": 10})
    sizes = {language: len(dataset) for language, dataset in data.items()}
    names = [
        row["pair_id"]
        for row in islice(interleave_languages(streams(data), sizes, mix, 0.5, seed=0), 2000)
    ]
    assert set(names) == {name for dataset in data.values() for name in dataset["pair_id"]}
    counts = Counter(name.split(":")[0] for name in names)
    for language, share in zip(data, shares):
        assert counts[language] / 2000 == pytest.approx(share / sum(shares), abs=0.03)
        times = Counter(name for name in names if name.startswith(language)).values()
        assert max(times) - min(times) <= 1


def test_a_streamed_mix_of_real_files_resumes(
    bitext_dir: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    def build() -> IterableDataset:
        train, _ = split_validation(load_bitext(bitext_dir, streaming=True), 10, seed=0)
        tokenized = tokenize_bitext(train, tiny_tokenizer, 16, shuffle_buffer=50, seed=7)
        return uniform(tokenized, seed=7)

    stream, resumed = build(), build()
    rows = iter(stream)
    seen = [next(rows)["pair_id"] for _ in range(723)]  # beyond the first pass
    resumed.load_state_dict(stream.state_dict())
    seen += [row["pair_id"] for row in islice(resumed, 400)]
    assert seen == [row["pair_id"] for row in islice(build(), 1123)]


# Streams over processes and workers

SHARDS = {
    "one": (1, 1),
    "two": (2, 2),
    "three": (3, 3),
    "uneven": (3, 2),
}  # files of German, of French
PAIRS = {"de": 60, "fr": 30}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders in which the pairs of a language are spread over one to three files."""
    folders = {}
    for name, files in SHARDS.items():
        folders[name] = tmp_path_factory.mktemp(name)
        for language, count in zip(PAIRS, files):
            for number in range(count):
                rows = range(number, PAIRS[language], count)
                text = "".join(f"{language}{row}\tsentence {row}\n" for row in rows)
                (folders[name] / f"{number}.{language}-en.tsv").write_text(text)
    return folders


def batches(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    rank: int,
    workers: int,
    split: str = "datasets",
) -> DataLoader:
    """Batches of five pairs of one of two processes, split as `datasets` or as accelerate does."""
    tokenized = tokenize_bitext(
        load_bitext(folder, streaming=True), tokenizer, 16, shuffle_buffer=25, seed=3
    )
    mixed = interleave_languages(tokenized, PAIRS, "natural", 0.5, seed=3)
    if split == "datasets":
        mixed = split_dataset_by_node(mixed, rank, 2)
    loader = DataLoader(
        mixed, batch_size=5, num_workers=workers, collate_fn=BitextCollator(1, ["de", "fr"])
    )
    if split == "accelerate":
        loader = prepare_data_loader(
            loader, num_processes=2, process_index=rank, dispatch_batches=False
        )
    return loader


@pytest.mark.parametrize(
    ("files", "split", "workers"),
    [
        *(("one", "datasets", 2), ("uneven", "datasets", 2), ("two", "datasets", 0)),
        *(("one", "accelerate", 2), ("three", "accelerate", 2)),
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
    first, second = ({pair for batch in part[:4] for pair in batch} for part in drawn)
    assert not first & second
    uses = Counter(pair for part in drawn for batch in part for pair in batch)
    assert len(uses) == 90
    counts = Counter(pair.split(":")[0] for pair in uses.elements())
    assert counts["de"] / counts.total() == pytest.approx(2 / 3, abs=0.08)


@pytest.mark.parametrize(("files", "workers"), [("one", 0), ("uneven", 2)])
def test_skipping_batches_resumes_exactly_beyond_the_first_pass(
    sharded: dict[str, Path], tiny_tokenizer: PreTrainedTokenizerFast, files: str, workers: int
) -> None:
    whole = batches(sharded[files], tiny_tokenizer, 1, workers, "accelerate")
    rest = skip_first_batches(batches(sharded[files], tiny_tokenizer, 1, workers, "accelerate"), 23)
    expected = [batch["pair_ids"] for batch in islice(whole, 33)][23:]
    assert [batch["pair_ids"] for batch in islice(rest, 10)] == expected


@pytest.mark.parametrize(
    ("sizes", "mix", "alpha", "message"),
    [
        (
            [3, 1],
            "flat",
            0.5,
            "unknown language mix 'flat'; it is one of natural, uniform, temperature",
        ),
        ([3, 1], "temperature", -0.1, "not -0.1"),
        ([3, 1], "temperature", 1.5, "not 1.5"),
        ([3, 0], "uniform", 0.5, "at least one pair"),
        ([], "uniform", 0.5, "at least one pair"),
    ],
)
def test_mixes_that_cannot_be_are_refused(
    sizes: list[int], mix: str, alpha: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageMixSampler(sizes, mix, alpha, seed=0)


def test_what_cannot_be_split_tokenised_or_batched_is_refused(
    bitext: dict[str, Dataset],
    tokenized: dict[str, Dataset],
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    train, dev = split_validation(leaky(), 0, seed=0)
    assert (len(train["de"]), dev) == (300, {})
    same = leaky() | {
        "xx": Dataset.from_dict({"source": ["a"] * 30, "target": ["Always the same"] * 30})
    }
    for message, attempt in {
        "not -1": lambda: split_validation(leaky(), -1, seed=0),
        "xx: all 30 pairs": lambda: split_validation(same, 20, seed=0),
        "max_seq_length=2 leaves no token of the text: give 3 or more": lambda: tokenize_bitext(
            bitext, tiny_tokenizer, 2
        ),
        r"languages \['sw'\] are not among": lambda: BitextCollator(1, ["de"])(
            [tokenized["sw"][0]]
        ),
        "no padding token": lambda: BitextCollator(None, ["de"]),
    }.items():
        with pytest.raises(ValueError, match=message):
            attempt()


# Batches


def test_collator_pads_and_nothing_else(tokenized: dict[str, Dataset]) -> None:
    rows = [tokenized[language][row] for row, language in enumerate(["sw", "de", "fr", "sw"])]
    batch = BitextCollator(1, ["de", "fr", "sw"])(rows)
    for side in ("source", "target"):
        ids, mask = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
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
def test_collator_gives_a_mask_of_zeros_to_pairs_without_a_negative(
    copies: list[list[int]], tokenized: dict[str, Dataset]
) -> None:
    rows = tokenized["de"].select(range(4)).to_list()
    batch = BitextCollator(1, ["de"], negatives=lambda given: copies if given == rows else None)(
        rows
    )
    ids, mask = batch["negative_input_ids"], batch["negative_attention_mask"]
    assert ids.shape == mask.shape == (4, max(1, *map(len, copies)))
    assert [row[real.bool()].tolist() for row, real in zip(ids, mask)] == copies
    assert set(ids[mask == 0].tolist()) <= {1}
    assert not [name for name in BitextCollator(1, ["de"])(rows) if name.startswith("negative")]
