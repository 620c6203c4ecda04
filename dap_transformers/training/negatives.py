"""Hard negatives for training: copies of a target with one word inserted, deleted or replaced.

Such a copy is no translation of its source any more, but looks almost like one.

There are no word lists and no language rules, unlike in `evaluation/hard_negatives.py`. A new word
comes from another target of the batch, so targets may be in any language. In languages that write
no spaces, up to `TOKENS_OF_LONGEST_WORD` tokens count as a word.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from encoder_dap import special_tokens

#: Most vocabularies mark tokens that begin a word (SentencePiece and byte-level BPE).
BEGINS = ("\u2581", "\u0120")

#: The others (WordPiece) mark tokens that continue a word.
CONTINUES = "##"

#: Tokens of the longest word.
TOKENS_OF_LONGEST_WORD = 4

Word = list[int]  # token ids


def word_starts(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids of the tokens that begin a word."""
    vocabulary = tokenizer.get_vocab()
    marked = {number for piece, number in vocabulary.items() if piece.startswith(BEGINS)}
    others = {number for piece, number in vocabulary.items() if not piece.startswith(CONTINUES)}
    # A vocabulary of the other kind may have a few such pieces, such as the Maltese letter Ġ.
    return marked if len(marked) > len(vocabulary) - len(others) else others


def change_a_word(words: Sequence[Word], others: Sequence[Word], rng: random.Random) -> list[Word]:
    """Return a copy of a sentence with one random word inserted, deleted or replaced.

    A new word is drawn from `others`. Both lists have at least one word.

    >>> [change_a_word([[5], [6, 7]], [[8, 9]], random.Random(seed)) for seed in (0, 1, 2)]
    [[[5], [8, 9], [6, 7]], [[6, 7]], [[8, 9], [5], [6, 7]]]
    """
    place = rng.randrange(len(words))
    new = [rng.choice(others)]
    insertion = (new, place)
    deletion = ([], place + 1)
    replacement = (new, place + 1)
    middle, end = rng.choice([insertion, deletion, replacement])
    return [*words[:place], *middle, *words[end:]]


class HardNegativeMaker:
    """Makes copies of a batch's targets, as token ids, in which one word is changed.

    Call it with the tokenised pairs of a batch. The copies depend only on the seed and the batch,
    so a resumed run has the same ones. Two epochs have different copies, because their batches
    differ.

    Args:
        max_seq_length: largest number of tokens of a target and of its copy.
        share: share of the pairs that get a copy, 0 to 1. Each pair is drawn independently.
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
        self.starts = word_starts(tokenizer)
        #: Tokens with a letter or digit. A copy that differs in others is still a translation.
        self.spoken = set()
        for piece, number in tokenizer.get_vocab().items():
            text = tokenizer.convert_tokens_to_string([piece])
            if any(map(str.isalnum, text)) or "\ufffd" in text:  # a part of a letter
                self.spoken.add(number)
        self.max_seq_length = max_seq_length
        self.share = share
        self.seed = seed
        special = special_tokens(tokenizer)
        self.after = special["special_tokens_after"]
        # The first token after special tokens and the prefix.
        of_prefix = tokenizer(prefix.strip(), add_special_tokens=False).input_ids
        self.first = special["special_tokens_before"] + len(of_prefix)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """Return for each tokenised pair the token ids of its copy.

        The list is empty if the pair was not drawn, or if no changed copy could be made, for
        example of a target without words.
        """
        ids_of_pairs = " ".join(row["pair_id"] for row in rows)
        rng = random.Random(f"{self.seed} {ids_of_pairs}")
        targets = [list(map(int, row["target_input_ids"])) for row in rows]  # also of tensors
        copies = []
        for ids in targets:
            if rng.random() < self.share:
                copies.append(self._copy(ids, rng.choice(targets), rng))
            else:
                copies.append([])
        return copies

    def _copy(self, ids: list[int], other: list[int], rng: random.Random) -> list[int]:
        """Copy a target with one changed word. The list is empty if only marks would differ."""
        words = self._words(ids)
        others = self._words(other)
        if not words or not others:
            return []
        changed = [token for word in change_a_word(words, others, rng) for token in word]
        end = ids[len(ids) - self.after :]
        copy = [*ids[: self.first], *changed][: self.max_seq_length - self.after] + end
        is_other = self._spoken_in(copy) != self._spoken_in(ids)
        return copy if changed and is_other else []

    def _spoken_in(self, ids: list[int]) -> list[int]:
        """Return the tokens that have a letter or digit."""
        return [token for token in ids if token in self.spoken]

    def _words(self, ids: list[int]) -> list[Word]:
        """Group the tokens of a target into words, without the prefix and special tokens."""
        words: list[Word] = []
        for token in ids[self.first : len(ids) - self.after]:
            if token in self.starts or not words or len(words[-1]) == TOKENS_OF_LONGEST_WORD:
                words.append([])
            words[-1].append(token)
        return words
