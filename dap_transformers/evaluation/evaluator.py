"""What an evaluator is. Trainer, commands, quickstart and benchmarks call the same objects.

A new evaluator is a class with the members of `Evaluator`.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from dap_transformers.encoding.encoder import Encoder
from dap_transformers.encoding.shards import SharedEncoder
from dap_transformers.tables import text_table

#: Language code -> (source, English) sentences in file order.
PairsByLanguage = Mapping[str, Sequence[tuple[str, str]]]
Numbers = dict[str, Any]


class Evaluator:
    """Measures an encoder. Percentages are from 0 to 100.

    Attributes:
        name: name of its numbers in a report, such as "hard_negatives".
        primary: its main number. A training logs it as `eval_{primary}`, and chooses the best
            checkpoint by it if this is `metric_for_best_model`. Of a number whose name ends in
            "loss", "error" or "aer", less is better.
        protocol: how a report says that it measures. "" if the report's other numbers say it.
    """

    name: str
    primary: str
    protocol = ""

    def __call__(self, encoder: Encoder) -> Numbers:
        """Measure an encoder, and return the numbers of a report."""
        raise NotImplementedError

    def sentences(self) -> Iterable[str]:
        """Return what will be encoded. All evaluators' sentences are encoded in one call."""
        return ()

    def digest(self) -> str:
        """Return a hash that tells whether two reports are about the same text."""
        return digest_of(list(self.sentences()))

    def logged(self, numbers: Numbers) -> dict[str, float]:
        """Return the numbers that a training logs, by name."""
        return numbers

    def table(self, numbers: Numbers) -> str:
        """Format the numbers for the console."""
        return text_table([self.name, ""], list(numbers.items()))


def digest_of(text: Any) -> str:
    """Return 12 hexadecimal digits of a hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(text).encode()).hexdigest()[:12]


def both_sides(pairs: PairsByLanguage) -> Iterator[str]:
    """Yield the sentences of each language: all sources, then all targets."""
    for rows in pairs.values():
        for side in zip(*rows, strict=True):
            yield from side


def evaluate(
    encoder: Encoder,
    evaluators: Sequence[Evaluator],
    token_budget: int = 4096,
    folder: str | Path | None = None,
    progress: bool = False,
) -> dict[str, Numbers]:
    """Measure an encoder with several evaluators, which share its vectors. Return numbers by name.

    All processes of a launch call this. They encode together, and all return the numbers of the
    first one. `folder` keeps the vectors for later runs with the same model and text.
    """
    shared = SharedEncoder(encoder, folder, token_budget, progress)
    shared.encode(list(chain.from_iterable(each.sentences() for each in evaluators)))
    found = {each.name: each(shared) for each in evaluators}
    return broadcast_object_list([found])[0]
