"""Hard negatives to train with: a target with one word put in, left out or replaced, no translation of its source.

There are no word lists and no rules, unlike in the evaluation (`dap/search/xsim.py`): a new word is any of
another target's, so that targets may be of any language; where spaces part no words, some tokens stand for a word.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

#: How the pieces of a vocabulary begin that begin a word, and in one with none of these, those that go on with one.
BEGINS, GOES_ON = ("\u2581", "\u0120"), "##"

#: Tokens of the longest word.
LONGEST = 4

Word = list[int]


def word_starts(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of tokens that begin a word."""
    vocabulary = tokenizer.get_vocab()
    marked = {number for piece, number in vocabulary.items() if piece.startswith(BEGINS)}
    return marked or {
        number for piece, number in vocabulary.items() if not piece.startswith(GOES_ON)
    }


def edited(words: Sequence[Word], others: Sequence[Word], rng: random.Random) -> list[Word]:
    """The words with one put in, left out or replaced, given others to take it from.

    >>> [edited([[5], [6, 7]], [[8, 9]], random.Random(seed)) for seed in (0, 1, 2)]
    [[[5], [8, 9], [6, 7]], [[6, 7]], [[8, 9], [5], [6, 7]]]
    """
    place, new = rng.randrange(len(words)), [rng.choice(others)]
    new, end = rng.choice([(new, place), ([], place + 1), (new, place + 1)])
    return [*words[:place], *new, *words[end:]]


class HardNegatives:
    """Copies of a batch's targets, as token ids, in which a word is changed.

    They depend on the seed and the batch alone, so that a resumed run has the same; and no two epochs have the same,
    as their batches differ.

    Args:
        tokenizer, max_seq_length: what the ids of the targets were made with.
        share: of the pairs, drawn one by one, that are to bring a copy.
        seed: of what is drawn.
        prefix: text before every target, which copies keep.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        max_seq_length: int,
        share: float,
        seed: int,
        prefix: str = "",
    ) -> None:
        self.starts, self.max_seq_length, self.share, self.seed = (
            word_starts(tokenizer),
            max_seq_length,
            share,
            seed,
        )
        self.first = 1 + len(tokenizer(prefix.strip(), add_special_tokens=False).input_ids)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The ids of each row's copy; none for a pair that is not drawn, or whose target has no word to change."""
        rng = random.Random(f"{self.seed} {' '.join(row['pair_id'] for row in rows)}")
        targets = [list(row["target_input_ids"]) for row in rows]
        return [
            self._copy(ids, rng.choice(targets), rng) if rng.random() < self.share else []
            for ids in targets
        ]

    def _copy(self, ids: list[int], other: list[int], rng: random.Random) -> list[int]:
        words, others = self._words(ids), self._words(other)
        if not words or not others:
            return []
        changed = [token for word in edited(words, others, rng) for token in word]
        copy = [*ids[: self.first], *changed][: self.max_seq_length - 1] + ids[-1:]
        return copy if changed and copy != ids else []

    def _words(self, ids: list[int]) -> list[Word]:
        """The tokens between the prefix and the last, by word."""
        words: list[Word] = []
        for token in ids[self.first : -1]:
            if token in self.starts or not words or len(words[-1]) == LONGEST:
                words.append([])
            words[-1].append(token)
        return words
