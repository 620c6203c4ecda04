"""Hold out a dev set, so that no target of any dev set is a target of any training set."""

import logging
from collections.abc import Iterable, Mapping

import numpy as np
from datasets import Dataset

from dap_transformers.errors import UserError
from dap_transformers.text_keys import normalise_all, ranks, text_keys

logger = logging.getLogger(__name__)

DEV_DIVISOR = 20  # a dev set has at most a twentieth of its language
NORMALISED_AT_ONCE = 100_000  # sentences; more would only take more memory

Datasets = Mapping[str, Dataset]  # language -> its pairs


def split_validation(
    datasets: Datasets, dev_pairs: int, seed: int
) -> tuple[dict[str, Dataset], dict[str, Dataset]]:
    """Hold out dev pairs so that no target of a dev set is a target of any training set.

    Targets are compared in the form of `text_keys.normalise`. A random order of all possible texts
    (`text_keys.ranks`) decides which targets are held out. Each language takes those that come
    first, with one pair for each target. The order is the same for all languages. Languages that
    translate the same English text therefore hold out the same sentences, and the training sets
    lose as few pairs as possible. `prepare-data` chooses its dev sets by the same order.

    A language holds out at most a twentieth of its pairs. A language with fewer than twenty pairs
    holds out none, with a warning.

    Args:
        datasets: pairs by language.
        dev_pairs: largest number of pairs per language to hold out. With 0 there are no dev sets,
            and the datasets are returned unchanged.

    Returns:
        The training sets and the dev sets, each by language. They have a new column `row`, the row
        number before the split.

    Raises:
        UserError: if no training pair of a language is left.
    """
    if dev_pairs <= 0:
        return dict(datasets), {}

    rest: dict[str, Dataset] = {}
    dev: dict[str, Dataset] = {}
    keys: dict[str, np.ndarray] = {}
    held_out = [np.empty(0, np.uint64)]
    for language, dataset in datasets.items():
        rest[language] = _numbered(dataset)
        keys[language] = _target_keys(dataset)
        rows = _rows_to_hold_out(keys[language], dev_pairs, seed)
        if rows:
            dev[language] = rest[language].select(rows)
            held_out.append(keys[language][rows])
        else:
            logger.warning("%s: too few pairs for a dev set (%d)", language, len(dataset))
    return _without(rest, np.concatenate(held_out), keys), dev


def drop_targets(datasets: Datasets, targets: Iterable[str]) -> dict[str, Dataset]:
    """Remove the pairs whose target is one of `targets`, such as the targets of a dev set.

    Sentences are compared in the form of `text_keys.normalise`, which ignores, for example, case
    and punctuation.

    Returns:
        The remaining pairs by language. A dataset that loses pairs has a new column `row`, the row
        number before the removal.

    Raises:
        UserError: if no pair of a language is left.
    """
    held_out = text_keys(normalise_all(list(targets)))
    keys = {language: _target_keys(dataset) for language, dataset in datasets.items()}
    return _without(datasets, held_out, keys)


def _target_keys(dataset: Dataset) -> np.ndarray:
    """Return the hash of each pair's normalised target: uint64 (number of pairs,)."""
    keys = [np.empty(0, np.uint64)]
    for batch in dataset.select_columns("target").iter(NORMALISED_AT_ONCE):
        keys.append(text_keys(normalise_all(batch["target"])))
    return np.concatenate(keys)


def _rows_to_hold_out(keys: np.ndarray, dev_pairs: int, seed: int) -> list[int]:
    """Return the row numbers of the pairs to hold out: those whose targets have the smallest ranks.

    The rank of a target is its place in a random order (`text_keys.ranks`). Of pairs with the same
    target, only the first is chosen. The rows are in ascending order.
    """
    count = min(dev_pairs, len(keys) // DEV_DIVISOR)
    _, first_rows = np.unique(ranks(keys, seed), return_index=True)  # sorted by rank
    return sorted(first_rows[:count].tolist())


def _without(
    datasets: Datasets, held_out: np.ndarray, keys: Mapping[str, np.ndarray]
) -> dict[str, Dataset]:
    """Remove the pairs whose target has one of the keys `held_out`, as `drop_targets` describes."""
    left: dict[str, Dataset] = {}
    for language, dataset in datasets.items():
        rows = np.flatnonzero(~np.isin(keys[language], held_out))
        if len(rows) < len(dataset):
            dataset = _numbered(dataset).select(rows)
        if not len(rows):
            raise UserError(
                f"{language}: every target sentence is held out for a dev set, so nothing is left "
                f"to train on. Hold out fewer pairs, or leave {language} out."
            )
        left[language] = dataset
    return left


def _numbered(dataset: Dataset) -> Dataset:
    """Return the dataset with a column `row` (0, 1, 2, …), or unchanged if it has such a column."""
    if "row" in dataset.column_names:
        return dataset
    return dataset.add_column("row", np.arange(len(dataset)))
