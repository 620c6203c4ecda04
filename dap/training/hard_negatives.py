"""Hard negatives to train with: a target with one token put in, left out or replaced, no translation of its source.

There are no word lists and no rules, unlike in the evaluation (`dap/search/hard_negatives.py`): a new token is any of
another target's, so that targets may be of any language.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def edited(ids: Sequence[int], others: Sequence[int], longest: int, rng: random.Random) -> list[int]:
    """The token ids with one, but not the first or last, put in, left out or replaced, given others to take it from.

    Of a copy that would have more than `longest` tokens the last before the separator is left out. There is none, [],
    of ids without a token between the first and the last, or where the token is replaced by itself.

    >>> [edited([0, 5, 6, 7, 2], [8, 9], 32, random.Random(seed)) for seed in (0, 1, 4)]
    [[0, 5, 7, 2], [0, 8, 5, 6, 7, 2], [0, 8, 6, 7, 2]]
    """
    if len(ids) < 3 or not others:
        return []
    place = rng.randrange(1, len(ids) - 1)
    new, end = rng.choice([([rng.choice(others)], place), ([], place + 1), ([rng.choice(others)], place + 1)])
    copy = [*ids[:place], *new, *ids[end:-1]][: longest - 1] + [ids[-1]]
    return [] if copy == list(ids) or len(copy) < 3 else copy


@dataclass(frozen=True)
class HardNegatives:
    """Edited copies of a batch's targets, as token ids.

    They depend on the seed and the batch alone, so that a resumed run has the same; and no two epochs have the same,
    as their batches differ.

    Attributes:
        share: of the pairs, drawn one by one, that are to bring a copy.
        max_seq_length: tokens of the longest copy.
        seed: of what is drawn.
    """

    share: float
    max_seq_length: int
    seed: int

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
        """The ids of each row's copy; none for a pair that is not drawn, or whose target has no token to change."""
        rng = random.Random(f"{self.seed} {' '.join(row['pair_id'] for row in rows)}")
        targets = [list(row["target_input_ids"]) for row in rows]
        return [
            edited(ids, rng.choice(targets)[1:-1], self.max_seq_length, rng) if rng.random() < self.share else []
            for ids in targets
        ]
