"""Changed copies of English sentences, and the error of preferring one of them."""

import random
from collections import Counter

import numpy as np
import pytest
from naive import cosines

from dap_transformers.evaluation.hard_negatives import (
    ANTONYMS,
    COPIES_PER_KIND,
    COPY_KINDS,
    NAMES,
    NUMBER_WORDS,
    Copy,
    hard_negative_copies,
    hard_negative_errors,
    name_rule,
    negations,
    numbers,
)

NEGATIONS = {
    "He is here.": "He is not here.",
    "It's well done.": "It's not well done.",
    "They have already eaten.": "They have not already eaten.",
    "We love fish.": "We never love fish.",
    "Can I pay?": "Can I not pay?",
    "Does Tom like it?": "Does Tom not like it?",
    "He isn't here.": "He is here.",
    "He won’t come.": "He will come.",
    "Can't you see?": "Can you see?",
    "You cannot go.": "You can go.",
    "CAN'T STOP": "CAN STOP",
    "There is no doubt.": "There is doubt.",
    "Not now.": "Now.",
    "I have never seen it.": "I have seen it.",
    "Sit down.": "Sit up.",
    "Good work": "Bad work",
    "They agreed with it": "They never agreed with it",
}
TEXT = [
    "Tom met Mary in New York on Monday, not in May.",
    "The French president will visit Berlin.",
    "It costs 1,500 dollars.",
    "Three men bought the old house before 1998.",
    "Ice melts in water.",
]


@pytest.mark.parametrize(("text", "changed"), NEGATIONS.items())
def test_a_negation_goes_in_where_there_is_none_and_out_where_there_is_one(
    text: str, changed: str
) -> None:
    copies = list(negations(text))
    assert copies[0] == changed
    assert text not in copies


@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("It is not only nice", ["It is not not only nice"]),
        ("So it is", []),  # a last word is not negated
        # letters that only fold to those of a word are no word
        ("Everybody wants to WİN.", ["Nobody wants to WİN."]),
        ("It was a ſmall boat.", ["It was not a ſmall boat."]),
    ],
)
def test_what_is_no_negation_or_antonym(text: str, copies: list) -> None:
    assert list(negations(text)) == copies


@pytest.mark.parametrize(
    ("text", "places"),
    [("10,000 men", [0]), ("at 2:30", [3, 5]), ("5.75%", [0, 3]), ("0 or 000", [])],
)
def test_of_a_number_its_last_digit_but_zeros_changes(text: str, places: list) -> None:
    for copy, place in zip(numbers(text), places, strict=True):
        assert copy[place] != text[place]
        assert copy[place] in "123456789"
        assert copy[:place] + text[place] + copy[place + 1 :] == text


def test_ordinals_and_number_words_stay_what_they_are() -> None:
    assert all(copy[5:7] == "th" for copy in numbers("the 1st"))
    (copy,) = numbers("Twenty men")
    assert copy.split()[0].lower() in NUMBER_WORDS.splitlines()[2].split()
    assert copy[0].isupper()
    assert copy != "Twenty men"
    assert list(numbers("often, no one, H2O, x86, ſix")) == []


def test_names_are_swapped_within_their_class() -> None:
    rule = name_rule(TEXT)
    kinds = {"Mary": "one word", "New York": "several words", "Monday": "day", "May": "month"}
    for (own, kind), copy in zip(kinds.items(), rule(TEXT[0]), strict=True):
        before, after = TEXT[0].rsplit(own, 1)
        name = copy.removeprefix(before).removesuffix(after)
        assert name in NAMES[kind].split(", ")
        assert name not in TEXT[0]
    assert len(list(name_rule([*TEXT, "I know Tom."])(TEXT[0]))) == 5  # now Tom is a name
    assert list(rule("The house is old.")) == []
    assert next(rule(TEXT[1])).split()[1] in NAMES["people"].replace("French", "")


def test_copies_differ_from_every_sentence_and_say_otherwise_in_one_place() -> None:
    copies = hard_negative_copies(TEXT)
    assert {copy.kind for copy in copies} == set(COPY_KINDS)
    assert max(Counter((copy.sentence, copy.kind) for copy in copies).values()) <= COPIES_PER_KIND
    assert len(set(copies)) == len(copies)
    assert "Ice melts in water." not in {copy.sentence for copy in copies}
    for copy in copies:
        assert copy.text not in TEXT
        words = set(copy.sentence.split())
        assert len(words) - 2 <= len(words & set(copy.text.split()))
    # each would be the other
    assert hard_negative_copies(["He is here.", "he  is not Here."]) == []


def test_copies_depend_on_the_sentences_and_not_on_their_order() -> None:
    copies = hard_negative_copies(TEXT)
    for seed in range(3):
        shuffled = random.Random(seed).sample(TEXT, len(TEXT))
        assert sorted(hard_negative_copies([*shuffled, *TEXT])) == sorted(copies)
    alone = []  # these sentences have no names of another sentence
    for text in TEXT[2:]:
        alone += hard_negative_copies([text])
    assert alone == [copy for copy in copies if copy.sentence in TEXT[2:]]
    assert copies[-1] == Copy(TEXT[3], "negation", "Three men bought the new house before 1998.")


def test_every_word_of_the_lists_has_another() -> None:
    for pair in ANTONYMS.split():
        one, other = pair.split("/")
        assert one != other
        assert all(list(negations(f"x {word}")) for word in (one, other))
    for line in NUMBER_WORDS.split():
        assert next(numbers(line)) != line


def test_hostile_text_gives_copies_that_differ_or_none() -> None:
    unchanged = ["", " ", "\n", "n't", "你好。", "?" * 99]
    hostile = [*unchanged, "Не 12 человек", "٣ men", "\ud800 not 7", "e\u0301ta 5 not A\u0301nna"]
    hostile += ["1" * 9_999, "A" * 10_000, "Ab " * 3_500, "It is not 7 Tom Anna. " * 500]
    for text in (hostile, [*hostile, *TEXT]):
        copies = hard_negative_copies(text)
        assert all(copy.text != copy.sentence and copy.text not in text for copy in copies)
    assert not {copy.sentence for copy in copies} & set(unchanged)


def naive_errors(
    source: np.ndarray, target: np.ndarray, copies: np.ndarray, kinds: list[str]
) -> dict[str, float]:
    counts = dict.fromkeys(["error", *COPY_KINDS, "other"], 0)
    keys = np.concatenate([copies, target])
    for i, row in enumerate(cosines(source, keys)):
        winner = [*kinds, *range(len(target))][row.argmax()]
        if winner != i:
            counts["error"] += 1
            counts[winner if winner in COPY_KINDS else "other"] += 1
    return {name: 100 * count / len(source) for name, count in counts.items()}


# Copies without noise tie with their sentences, which is an error.
@pytest.mark.parametrize(("count", "noise"), [(100, 0.9), (0, 0.9), (30, 0)])
def test_errors_equal_the_naive_loop(count: int, noise: float) -> None:
    rng = np.random.default_rng(5)
    source = rng.normal(size=(60, 16))
    target = source + noise * rng.normal(size=source.shape)
    copies = target[rng.integers(60, size=count)] + noise * rng.normal(size=(count, 16))
    kinds = list(rng.choice(COPY_KINDS, count))
    errors = hard_negative_errors(source, target, copies, kinds)
    assert errors == pytest.approx(naive_errors(source, target, copies, kinds))
    assert 0 < errors["error"] < 95
