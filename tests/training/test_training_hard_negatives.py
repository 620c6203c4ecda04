"""Changed targets to train with: always another text, the same for a seed, by other words than the evaluation's."""

import random
import re
from copy import deepcopy
from pathlib import Path

import pytest
from conftest import synthetic_pairs
from transformers import PreTrainedTokenizerFast

from dap.search.hard_negatives import ANTONYMS, NAMES, NUMBER_WORDS, hard_negative_copies
from dap.training.data import tokenize_pairs
from dap.training.hard_negatives import RULES, SWAPS, UNTOUCHED, HardNegatives, perturbed

TATOEBA = Path(__file__).resolve().parents[3] / "shared" / "data" / "tatoeba"
SENTENCES = [
    "Tom met Mary in New York on Monday, not in May.",
    "The French president will visit Berlin, although it rains.",
    "It never costs 1,500 dollars without a reason.",
    "Ice melts in water.",
    "The committee approved the annual budget.",
    "Don't open the window!",
]
WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*")


def changes(text: str, count: int = 60) -> set[str]:
    return {copy for seed in range(count) if (copy := perturbed(text, seed, SENTENCES)) is not None}


@pytest.mark.parametrize("text", SENTENCES)
def test_a_copy_has_other_words_in_another_order_or_fewer(text: str) -> None:
    copies = changes(text)
    assert len(copies) >= 3
    words = [word.lower() for word in WORD.findall(text)]
    assert all([word.lower() for word in WORD.findall(copy)] != words for copy in copies)


def test_each_rule_applies_to_a_sentence_and_leaves_another_as_it_is() -> None:
    text, bare = "While it rains, the annual report of our council is printed.", "Ah 12!"
    for rule in RULES:
        assert rule(text, random.Random(0), SENTENCES) not in (None, text)
        assert rule(bare, random.Random(0), SENTENCES) is None
    assert perturbed(bare, 0, SENTENCES) is None


def test_the_seed_decides() -> None:
    for text in SENTENCES:
        assert [perturbed(text, seed, SENTENCES) for seed in range(9)] == [
            perturbed(text, seed, SENTENCES) for seed in range(9)
        ]
    assert perturbed(SENTENCES[1], "3-7") == perturbed(SENTENCES[1], "3-7")


def test_the_word_lists_are_not_those_of_the_evaluation() -> None:
    theirs = set(re.findall(r"\w+", f"{ANTONYMS} {NUMBER_WORDS} {' '.join(NAMES.values())} not no {UNTOUCHED}"))
    ours = SWAPS.split()
    assert not theirs & set(ours)
    assert len(ours) == len(set(ours))


@pytest.mark.parametrize("text", SENTENCES)
def test_numbers_negations_and_names_stay_and_no_copy_is_one_of_the_evaluation(text: str) -> None:
    kept = re.findall(rf"[0-9]+|not|n't|{'|'.join(UNTOUCHED.split())}|(?<=[a-z] )[A-Z][a-z]+", text)
    for copy in changes(text):
        if len(WORD.findall(copy)) >= len(WORD.findall(text)) - 1:  # no clause is missing
            assert [word for word in kept if word not in copy] == []
    assert not changes(text) & {copy.text for copy in hard_negative_copies(SENTENCES)}


@pytest.mark.parametrize(
    "text", ["", " ", "你好。", "\ud800 word 7 other", "e\u0301ta\u0301it", "1" * 10_000, "long " * 2_000]
)
def test_hostile_text_gives_another_text_or_none(text: str) -> None:
    for seed in range(8):
        assert perturbed(text, seed) != text
        assert perturbed(text, seed, [text, *SENTENCES]) != text


@pytest.mark.skipif(not TATOEBA.is_dir(), reason="../shared with the Tatoeba test set is absent")
@pytest.mark.parametrize("language", ["deu", "fin", "tel"])
def test_nearly_every_real_sentence_can_be_changed(language: str) -> None:
    lines = (TATOEBA / f"tatoeba.{language}-eng.eng").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if len(line.split()) >= 4]
    changed = sum(perturbed(line, 0) is not None for line in lines)
    assert changed > 0.95 * len(lines)


def rows_of(tokenizer: PreTrainedTokenizerFast, targets: list[str], length: int = 32) -> list[dict]:
    rows = tokenize_pairs(targets, targets, "de", tokenizer, length)
    return [row | {"target_input_ids": row["target_input_ids"].tolist()} for row in rows]


@pytest.mark.parametrize("length", [8, 32])
def test_copies_are_ids_as_the_targets_are(length: int, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    targets = [target for _, target in synthetic_pairs("de", 60)]
    rows = rows_of(tiny_tokenizer, targets, length)
    copies = HardNegatives(tiny_tokenizer, length, 1.0, 0)(rows)
    assert sum(map(bool, copies)) > 40
    for row, ids in zip(rows, copies):
        if ids:
            text = tiny_tokenizer.decode(ids, skip_special_tokens=True)
            assert text != tiny_tokenizer.decode(row["target_input_ids"], skip_special_tokens=True)
            assert ids == tiny_tokenizer(text, truncation=True, max_length=length).input_ids != row["target_input_ids"]
            assert len(ids) <= length


def test_copies_depend_on_seed_and_batch_alone(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(tiny_tokenizer, [target for _, target in synthetic_pairs("de", 100)])
    make = HardNegatives(tiny_tokenizer, 32, 0.5, 0)
    copies = make(rows)
    assert 30 < sum(map(bool, copies)) < 70
    make(rows[:7])
    assert make(rows) == HardNegatives(tiny_tokenizer, 32, 0.5, 0)(rows) == copies
    assert HardNegatives(tiny_tokenizer, 32, 0.5, 1)(rows) != copies
    assert make(rows[::-1])[::-1] != copies  # as of another epoch


def test_a_target_that_is_not_its_text_brings_no_copy(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    targets = ["kaban lofin \u4e16 misut neder", "kaban lofin misut neder", ""]
    copies = HardNegatives(tiny_tokenizer, 32, 1.0, 0)(rows_of(tiny_tokenizer, targets))
    assert [bool(ids) for ids in copies] == [False, True, False]
    assert all(HardNegatives(tiny_tokenizer, 32, 1.0, 0)(rows_of(tiny_tokenizer, targets[1:2])))


def test_a_tokenizer_that_makes_no_text_is_refused(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    mute = deepcopy(tiny_tokenizer)
    mute.backend_tokenizer.decoder = None
    with pytest.raises(ValueError, match=r"tr_hard_negatives=0.5: the tokenizer has no decoder"):
        HardNegatives(mute, 32, 0.5, 0)
