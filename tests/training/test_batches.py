"""Token ids equal those of single calls of the tokenizer, and the collator only pads."""

from pathlib import Path

import pytest
import torch
from conftest import tiny_tokenizer
from datasets import Dataset
from transformers import ByT5Tokenizer

from dap_transformers.errors import UserError
from dap_transformers.text.corpus import load_bitext
from dap_transformers.training.batches import BitextCollator, tokenize_bitext
from dap_transformers.training.dev_split import drop_targets, split_validation
from dap_transformers.training.start import target_vocabulary

Datasets = dict[str, Dataset]
TOKENIZER = tiny_tokenizer()


@pytest.fixture(scope="module")
def bitext(bitext_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    return load_bitext(bitext_dir, cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenized(bitext: Datasets) -> Datasets:
    return tokenize_bitext(bitext, TOKENIZER, 8)


def test_tokens_equal_those_of_single_calls_of_the_tokenizer(
    bitext: Datasets, tokenized: Datasets
) -> None:
    for language in bitext:
        for row in (0, 3, 199):
            pair = bitext[language][row]
            ids = tokenized[language][row]
            for side in ("source", "target"):
                naive = TOKENIZER(pair[side], truncation=True, max_length=8).input_ids
                assert ids[f"{side}_input_ids"] == naive
            assert (ids["language"], ids["pair_id"]) == (language, f"{language}:{row}")
    assert max(map(len, tokenized["de"]["source_input_ids"])) == 8


def test_a_slow_tokenizer_gives_the_tokens_of_its_calls(bitext: Datasets) -> None:
    slow = ByT5Tokenizer()
    ids = tokenize_bitext(bitext, slow, 8, "ü ")["de"]["source_input_ids"][:]
    naive = [slow(f"ü {text}").input_ids for text in bitext["de"]["source"]]
    assert ids == [each if len(each) <= 8 else [*each[:7], slow.eos_token_id] for each in naive]


@pytest.mark.parametrize("rows", [{"source": ["Ja", None], "target": ["Yes", "No"]}, {"de": [""]}])
def test_rows_that_are_no_pairs_are_refused_by_language(rows: dict) -> None:
    with pytest.raises(UserError, match="the pairs of 'de'"):
        tokenize_bitext({"de": Dataset.from_dict(rows)}, TOKENIZER, 8)


def test_tokens_do_not_depend_on_calls_of_the_tokenizer_and_are_cached(
    bitext: Datasets, tokenized: Datasets
) -> None:
    TOKENIZER(["a b", "c"], truncation=True, max_length=3, padding="max_length")
    again = tokenize_bitext(bitext, TOKENIZER, 8)
    longer = tokenize_bitext(bitext, TOKENIZER, 65)  # above the tokenizer's own limit, 64
    assert again["de"].cache_files == tokenized["de"].cache_files != longer["de"].cache_files
    assert max(map(len, longer["de"]["source_input_ids"])) > 8


def test_target_vocabulary_holds_every_label_and_nothing_else(tokenized: Datasets) -> None:
    naive = set()
    for data in tokenized.values():
        for ids in data["target_input_ids"]:
            naive.update(ids[1:])
    assert target_vocabulary(tokenized, TOKENIZER) == sorted(naive)
    assert TOKENIZER.sep_token_id in naive


def test_pair_ids_name_the_row_before_the_split(bitext: Datasets) -> None:
    _, dev = split_validation(bitext, 5, seed=3)
    assert all(bitext["de"][row["row"]]["source"] == row["source"] for row in dev["de"])
    held = {row["target"] for split in dev.values() for row in split}
    left = drop_targets(bitext, held)
    mapped = tokenize_bitext(left, TOKENIZER, 64)["de"]
    for text, ids in zip(left["de"], mapped, strict=True):
        row = int(ids["pair_id"].removeprefix("de:"))
        assert bitext["de"][row]["source"] == text["source"]


def test_the_collator_only_pads(tokenized: Datasets) -> None:
    rows = [tokenized[language][row] for row, language in enumerate(["sw", "de", "fr", "sw"])]
    batch = BitextCollator(1, ["de", "fr", "sw"])(rows)
    for side in ("source", "target"):
        ids = [row[f"{side}_input_ids"] for row in rows]
        for name, expected in TOKENIZER.pad({"input_ids": ids}, return_tensors="pt").items():
            assert torch.equal(batch[f"{side}_{name}"], expected)
    assert batch["language_ids"].tolist() == [2, 0, 1, 2]
    assert batch["pair_ids"] == ["sw:0", "de:1", "fr:2", "sw:3"]


@pytest.mark.parametrize("copies", [[[0, 7, 2], [], [0, 2], []], [[], [], [], []]])
def test_a_pair_without_a_negative_has_a_mask_of_zeros(copies: list, tokenized: Datasets) -> None:
    rows = tokenized["de"].select(range(4)).to_list()
    batch = BitextCollator(1, ["de"], lambda given: copies if given == rows else [])(rows)
    ids = batch["negative_input_ids"]
    mask = batch["negative_attention_mask"]
    assert ids.shape == mask.shape == (4, max(1, *map(len, copies)))
    assert [row[real.bool()].tolist() for row, real in zip(ids, mask)] == copies
    assert set(ids[mask == 0].tolist()) <= {1}


def test_a_length_without_room_for_text_is_refused(bitext: Datasets) -> None:
    with pytest.raises(ValueError, match="max_seq_length=4 .*prefix='ka '"):
        tokenize_bitext(bitext, TOKENIZER, 4, "ka ")
