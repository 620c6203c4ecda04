"""Hard negatives for training: one word is inserted, deleted or replaced, the same for a seed."""

import copy

import pytest
import torch
from conftest import synthetic_pairs, tiny_tokenizer
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from dap_transformers.training.negatives import (
    TOKENS_OF_LONGEST_WORD,
    HardNegativeMaker,
    word_starts,
)

TOKENIZER = tiny_tokenizer()


def rows_of(
    targets: list[str],
    length: int = 32,
    prefix: str = "",
    tokenizer: PreTrainedTokenizerFast = TOKENIZER,
) -> list[dict]:
    """Tokenise pairs that have these targets."""
    rows = []
    for number, target in enumerate(targets):
        ids = tokenizer(prefix + target, truncation=True, max_length=length).input_ids
        rows.append({"pair_id": f"de:{number}", "target_input_ids": ids})
    return rows


def tokenizer_of(pieces: list[str], **special: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose ids are the places of the pieces. The first one is unknown text."""
    vocabulary = models.WordLevel({piece: pieces.index(piece) for piece in pieces}, pieces[0])
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(vocabulary), **special)


def english(count: int) -> list[str]:
    return [target for _, target in synthetic_pairs("de", count)]


@pytest.mark.parametrize(
    ("pieces", "starts"),
    [
        (["<s>", "▁a", "b", "▁c"], {1, 3}),
        (["<s>", "Ġa", "b", "Ġc"], {1, 3}),
        (["[CLS]", "a", "##b", "c", "Ġ"], {0, 1, 3, 4}),
    ],
)
def test_words_begin_where_the_vocabulary_marks_it(pieces: list, starts: set) -> None:
    assert word_starts(tokenizer_of(pieces)) == starts


def test_no_copy_differs_by_a_mark_alone() -> None:
    ends = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = tokenizer_of(["[UNK]", "[CLS]", "[SEP]", "a", ",", "–"], **ends)
    maker = HardNegativeMaker(tokenizer, 32, 1.0, 0)
    rows = [{"pair_id": f"de:{n}", "target_input_ids": [3, 4, 3, 5]} for n in range(100)]
    copies = list(filter(None, maker(rows)))
    assert 10 < len(copies) < 90
    assert {copy.count(3) for copy in copies} == {1, 3}


@pytest.mark.parametrize(("length", "prefix"), [(6, ""), (32, ""), (12, "misut ka: ")])
def test_a_copy_differs_by_a_word_and_keeps_the_prefix(length: int, prefix: str) -> None:
    rows = rows_of(english(60), length, prefix)
    copies = HardNegativeMaker(TOKENIZER, length, 1.0, 0, prefix)(rows)
    kept = rows_of([prefix.strip()])[0]["target_input_ids"][:-1]
    assert len(kept) == 1 or prefix
    assert sum(map(bool, copies)) > 50
    for row, changed in zip(rows, copies):
        ids = row["target_input_ids"]
        if changed:
            assert changed != ids
            assert changed[: len(kept)] == kept
            assert changed[-1] == ids[-1]
            assert 3 <= len(changed) <= length
            assert abs(len(changed) - len(ids)) <= TOKENS_OF_LONGEST_WORD


@pytest.mark.parametrize("template", ["$A", "$A </s>", "<s> $A", "<s> <s> $A </s>"])
def test_words_change_at_both_ends_and_special_tokens_never(template: str) -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    ids = {token: TOKENIZER.convert_tokens_to_ids(token) for token in ("<s>", "</s>")}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=template, pair=f"{template} $B", special_tokens=[*ids.items()]
    )
    rows = rows_of(["ban misut"] * 200, tokenizer=tokenizer)
    expected = ["ban", "misut", "ban ban", "misut misut"]
    expected += ["ban ban misut", "ban misut misut", "misut ban misut"]
    copies = HardNegativeMaker(tokenizer, 32, 1.0, 0)(rows)
    found = {tuple(each) for each in copies if each}
    assert found == {tuple(tokenizer(text).input_ids) for text in expected}


def test_copies_depend_only_on_the_seed_and_the_batch() -> None:
    rows = rows_of(english(100))
    make = HardNegativeMaker(TOKENIZER, 32, 0.5, 0)
    copies = make(rows)
    assert 30 < sum(map(bool, copies)) < 70
    make(rows[:7])
    assert make(rows) == HardNegativeMaker(TOKENIZER, 32, 0.5, 0)(rows) == copies
    tensors = [row | {"target_input_ids": torch.tensor(row["target_input_ids"])} for row in rows]
    assert make(tensors) == copies
    assert HardNegativeMaker(TOKENIZER, 32, 0.5, 1)(rows) != copies
    assert make(rows[::-1])[::-1] != copies  # as in another epoch


def test_a_target_without_text_gets_no_copy_and_lends_no_word() -> None:
    doubled = len(rows_of(["misut misut"])[0]["target_input_ids"])
    rows = rows_of(["", "misut"])
    for seed in range(8):
        empty, word = HardNegativeMaker(TOKENIZER, 32, 1.0, seed)(rows)
        assert empty == []
        assert len(word) in (0, doubled)
