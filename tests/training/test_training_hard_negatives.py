"""Changed targets to train with: always another text, the same for a seed, by other words than the evaluation's."""

import random
import re
from pathlib import Path

import pytest

from dap.search.hard_negatives import ANTONYMS, NAMES, NUMBER_WORDS, hard_negative_copies
from dap.training.hard_negatives import RULES, SWAPS, UNTOUCHED, perturbed

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
