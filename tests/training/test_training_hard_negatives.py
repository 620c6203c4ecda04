"""Edited targets to train with: one token from another, always other ids, the same for a seed."""

import random

import pytest
from conftest import synthetic_pairs
from transformers import PreTrainedTokenizerFast

from dap.training.data import tokenize_pairs
from dap.training.hard_negatives import HardNegatives, edited


def one_edit_away(ids: list[int], others: list[int]) -> set[tuple[int, ...]]:
    """All ids with a token put in, left out or replaced between the first and the last."""
    first, *inner, last = ids
    found = set()
    for place in range(len(inner)):
        before, after = inner[:place], inner[place + 1 :]
        for middle in ([], *([other] for other in others), *([other, inner[place]] for other in others)):
            found.add((first, *before, *middle, *after, last))
    return found - {tuple(ids), (first, last)}


@pytest.mark.parametrize("ids", [[0, 5, 2], [0, 5, 6, 2], [0, 5, 6, 5, 7, 2]])
def test_copies_are_all_that_is_one_edit_away_and_nothing_else(ids: list[int]) -> None:
    copies = {tuple(edited(ids, [5, 8], 32, random.Random(seed))) for seed in range(400)}
    assert copies - {()} == one_edit_away(ids, [5, 8])


def test_no_copy_is_too_long_or_its_target() -> None:
    ids = [0, 5, 6, 7, 2]
    for seed in range(200):
        copy = edited(ids, [7, 8], 5, random.Random(seed))
        assert copy != ids
        assert len(copy) <= 5
        assert not copy or (copy[0], copy[-1]) == (0, 2)


@pytest.mark.parametrize(("ids", "others"), [([], [5]), ([0, 2], [5]), ([0, 5, 2], [])])
def test_there_is_no_copy_without_tokens(ids: list[int], others: list[int]) -> None:
    assert edited(ids, others, 32, random.Random(0)) == []


def test_copies_depend_on_seed_and_batch_alone(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    targets = [target for _, target in synthetic_pairs("de", 100)]
    rows = tokenize_pairs(targets, targets, "de", tiny_tokenizer, 32)
    make = HardNegatives(0.5, 32, 0)
    copies = make(rows)
    assert 30 < sum(map(bool, copies)) < 70
    make(rows[:7])
    assert make(rows) == HardNegatives(0.5, 32, 0)(rows) == copies
    assert HardNegatives(0.5, 32, 1)(rows) != copies
    assert make(rows[::-1])[::-1] != copies  # as of another epoch


def test_new_tokens_are_of_other_targets(tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    targets = [target for _, target in synthetic_pairs("de", 40)]
    rows = tokenize_pairs(targets, targets, "de", tiny_tokenizer, 32)
    known = {token for row in rows for token in row["target_input_ids"].tolist()}
    copies = HardNegatives(1.0, 32, 0)(rows)
    assert sum(map(bool, copies)) > 35
    assert {token for copy in copies for token in copy} <= known
