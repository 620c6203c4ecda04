"""The validation split: which pairs a dev set holds out, so that no target of it is trained on (no models)."""

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from dap.errors import UserError
from dap.training.data import Bitext

logger = logging.getLogger(__name__)

DEV_DIVISOR = 10  # a dev set is at most a tenth of its language


def normalise(text: str) -> str:
    """The letters and digits of a text, case folded: what two sentences share when one would leak the other.

    A text without a letter or digit stands for itself.

    >>> normalise("It's 5 o'clock!"), normalise("…")
    ('its5oclock', '…')
    """
    return "".join(filter(str.isalnum, text.casefold())) or text.strip()


def split_validation(datasets: Bitext, dev_pairs: int, seed: int) -> tuple[dict[str, Any], dict[str, Dataset]]:
    """Splits by target sentence over all languages: no target of any dev set is a target of any train set.

    Targets are compared by `normalise`. Each language gives the `dev_pairs` pairs whose normalised target has the
    smallest seeded hash, each target once. As the order is the same in all languages, languages that translate the
    same English text hold out the same sentences, and train sets lose as little as can be. A language gives at most
    a tenth of its pairs; one with fewer than ten gives none and is absent from the dev sets.

    Map-style datasets get the column `row` (the row before the split), from which `tokenize_bitext` makes its ids.
    Streaming: dev sets (map-style) come from the first 10 * `dev_pairs` pairs, whose targets are filtered
    out of the rest on the fly.

    Raises:
        ValueError: `dev_pairs` is negative, or nothing of a language is left to train on.
    """
    if dev_pairs < 0:
        raise UserError(f"dev_pairs must be 0 (no dev set) or more, not {dev_pairs}")
    if dev_pairs == 0:
        return dict(datasets), {}
    heads = {language: _head(dataset, DEV_DIVISOR * dev_pairs) for language, dataset in datasets.items()}
    keys = {language: [normalise(text) for text in head["target"][:]] for language, head in heads.items()}
    rows = {language: _held_out(keys[language], dev_pairs, seed) for language in heads}
    held = {keys[language][row] for language in heads for row in rows[language]}
    dev = {language: head.select(rows[language]) for language, head in heads.items() if rows[language]}
    for language in heads.keys() - dev.keys():
        logger.warning("%s: %d pairs are too few for a dev set", language, len(heads[language]))
    train: dict[str, Any] = {}
    for language, dataset in datasets.items():
        streamed = isinstance(dataset, IterableDataset)
        train[language] = (
            _filtered(dataset, held, language)
            if streamed
            else heads[language].select(_kept(keys[language], held, language))
        )
    return train, dev


def drop_targets(datasets: Bitext, targets: Iterable[str]) -> dict[str, Any]:
    """Training sets without the pairs whose target is among `targets`, such as those of a dev set of its own.

    Targets are compared by `normalise`. Map-style datasets get the column `row` (the row before) where they lose
    pairs, and the number dropped is logged; streams are filtered on the fly.

    Raises:
        ValueError: nothing of a language is left to train on; of a stream this is known after its first pass.
    """
    held = {normalise(text) for text in targets}
    left: dict[str, Any] = {}
    for language, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            left[language] = _filtered(dataset, held, language)
            continue
        rows = _kept([normalise(text) for text in dataset["target"][:]], held, language)
        left[language] = dataset if len(rows) == len(dataset) else _numbered(dataset).select(rows)
        if dropped := len(dataset) - len(rows):
            logger.info("%s: %d of %d pairs dropped, their targets are dev targets", language, dropped, len(dataset))
    return left


def _filtered(stream: IterableDataset, held: set[str], language: str) -> IterableDataset:
    columns = [name for name in ("target", "row") if name in stream.column_names]
    return stream.filter(_Unseen(held, language), input_columns=columns)


def _numbered(dataset: Dataset) -> Dataset:
    return dataset if "row" in dataset.column_names else dataset.add_column("row", np.arange(len(dataset)))


def _head(dataset: Dataset | IterableDataset, pairs: int) -> Dataset:
    """All of a map-style dataset with its rows numbered; of a stream the first pairs, in memory."""
    if isinstance(dataset, Dataset):
        return _numbered(dataset)
    return Dataset.from_list(list(dataset.take(pairs)), features=dataset.features)


def _held_out(keys: list[str], dev_pairs: int, seed: int) -> list[int]:
    """Rows of the dev set: the first row of each of the keys whose seeded hash is smallest."""
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    salt = seed.to_bytes(8, "little", signed=True)
    order = sorted(first, key=lambda key: hashlib.blake2b(key.encode(), digest_size=8, salt=salt).digest())
    return sorted(first[key] for key in order[: min(dev_pairs, len(keys) // DEV_DIVISOR)])


def _kept(keys: list[str], held: set[str], language: str) -> list[int]:
    """Rows whose target is not held out."""
    rows = [row for row, key in enumerate(keys) if key not in held]
    if not rows:
        raise _nothing_left(f"all {len(keys)} pairs", language)
    return rows


def _nothing_left(pairs: str, language: str) -> ValueError:
    return ValueError(
        f"{language}: {pairs} have a target sentence that a dev set holds out, so nothing is left "
        f"to train on; hold out fewer pairs (dev_pairs, or the dev data given), or leave {language} out"
    )


@dataclass
class _Unseen:
    """Whether a target sentence is not held out; raises when a stream comes round and all were.

    An endless stream of which nothing is left would keep its reader waiting for ever.
    """

    held: set[str]
    language: str
    first: str | None = None  # row
    passed: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Unseen":
        return _Unseen(self.held, self.language)  # `datasets` would hold a copy of the set for each language

    def __call__(self, target: str, row: str | None = None) -> bool:
        if self.passed:
            return normalise(target) not in self.held
        if row is not None and row == self.first:
            raise _nothing_left("all pairs of a stream", self.language)
        self.first = self.first if self.first is not None else row
        self.passed = normalise(target) not in self.held
        return self.passed
