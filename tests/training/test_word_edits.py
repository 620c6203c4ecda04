"""Changed targets to train with: one word put in, left out or replaced, always other ids, the same for a seed."""

import random

import pytest
from conftest import synthetic_pairs
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from dap.training.batches import tokenize_pairs
from dap.training.word_edits import LONGEST, HardNegatives, Word, edited, word_starts


def rows_of(
    tokenizer: PreTrainedTokenizerFast, targets: list[str], length: int = 32, prefix: str = ""
) -> list[dict]:
    return tokenize_pairs(targets, targets, "de", tokenizer, length, prefix)


def one_edit_away(words: list[Word], others: list[Word]) -> list[list[Word]]:
    """All ways to put in, leave out or replace a word."""
    found = []
    for place, own in enumerate(words):
        for middle in ([], *([other] for other in others), *([other, own] for other in others)):
            found.append([*words[:place], *middle, *words[place + 1 :]])
    return found


@pytest.mark.parametrize("words", [[[5]], [[5], [6, 7]], [[5], [6, 7], [5], [8]]])
def test_copies_are_all_that_is_one_edit_away_and_nothing_else(words: list[Word]) -> None:
    others = [[5], [9, 9]]
    copies = [edited(words, others, random.Random(seed)) for seed in range(400)]
    wanted = one_edit_away(words, others)
    assert all(copy in wanted for copy in copies)
    assert all(copy in copies for copy in wanted)


@pytest.mark.parametrize(
    ("pieces", "starts"),
    [
        (["<s>", "▁a", "b", "▁c"], {1, 3}),
        (["<s>", "Ġa", "b", "Ġc"], {1, 3}),
        (["[CLS]", "a", "##b", "c"], {0, 1, 3}),
    ],
)
def test_words_begin_where_the_vocabulary_marks_it(pieces: list[str], starts: set[int]) -> None:
    vocabulary = models.WordLevel(
        {piece: number for number, piece in enumerate(pieces)}, unk_token=pieces[0]
    )
    assert word_starts(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary))) == starts


@pytest.mark.parametrize(("length", "prefix"), [(6, ""), (32, ""), (12, "misut ka: ")])
def test_copies_are_a_word_away_from_their_targets(
    length: int, prefix: str, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = rows_of(
        tiny_tokenizer, [target for _, target in synthetic_pairs("de", 60)], length, prefix
    )
    copies = HardNegatives(tiny_tokenizer, length, 1.0, 0, prefix)(rows)
    kept = rows_of(tiny_tokenizer, [prefix.strip()])[0]["target_input_ids"].tolist()[:-1]
    assert len(kept) == 1 or prefix
    assert sum(map(bool, copies)) > 50
    for row, copy in zip(rows, copies):
        ids = row["target_input_ids"].tolist()
        if copy:
            assert copy != ids
            assert (copy[: len(kept)], copy[-1]) == (kept, ids[-1])
            assert max(3, len(ids) - LONGEST) <= len(copy) <= min(length, len(ids) + LONGEST)


def test_copies_depend_on_seed_and_batch_alone(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(tiny_tokenizer, [target for _, target in synthetic_pairs("de", 100)])
    make = HardNegatives(tiny_tokenizer, 32, 0.5, 0)
    copies = make(rows)
    assert 30 < sum(map(bool, copies)) < 70
    make(rows[:7])
    assert make(rows) == HardNegatives(tiny_tokenizer, 32, 0.5, 0)(rows) == copies
    assert HardNegatives(tiny_tokenizer, 32, 0.5, 1)(rows) != copies
    assert make(rows[::-1])[::-1] != copies  # as of another epoch


def test_a_target_without_text_brings_no_copy_and_lends_no_word(
    tiny_tokenizer: PreTrainedTokenizerFast,
) -> None:
    for seed in range(8):
        empty, word = HardNegatives(tiny_tokenizer, 32, 1.0, seed)(
            rows_of(tiny_tokenizer, ["", "misut"])
        )
        assert empty == []
        assert len(word) in (
            0,
            len(rows_of(tiny_tokenizer, ["misut misut"])[0]["target_input_ids"]),
        )
