"""What an evaluator is. Trainer, commands, quickstart and benchmarks call the same objects.

A new evaluator is a class with the members of `Evaluator`, and two lines in `evaluation_data.py`.
Trainings, `eval-retrieval` and the model card then know it.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from accelerate.utils import broadcast_object_list

from dap_transformers.encoding.encoder import Encoder
from dap_transformers.encoding.shards import SharedEncoder
from dap_transformers.errors import UserError
from dap_transformers.languages import NAMES
from dap_transformers.tables import text_table

#: Language code -> (source, English) sentences in file order.
PairsByLanguage = Mapping[str, Sequence[tuple[str, str]]]
Numbers = dict[str, Any]


class Metric(NamedTuple):
    """A number for the model card.

    Attributes:
        name: such as "accuracy xx→en".
        value: percentages are from 0 to 100.
        place: what it was measured on: a language code, or words such as "36 languages".
        kind: the metric's name on the Hub, such as "accuracy". None leaves it out of the metadata.
    """

    name: str
    value: float
    place: str = ""
    kind: str | None = None


class Evaluator:
    """Measures an encoder. Percentages are from 0 to 100.

    Attributes:
        name: name of its numbers in a report, such as "hard_negatives".
        task: what the model card calls it, such as "bitext retrieval".
        primary: its main number. A training logs it as `eval_{primary}`, and chooses the best
            checkpoint by it if this is `metric_for_best_model`. Of a number whose name ends in
            "loss", "error" or "aer", less is better.
        description: how a report says that it measures. "" if the report's other numbers say it.
    """

    name: str
    task: str
    primary: str
    description = ""

    def __call__(self, encoder: Encoder) -> Numbers:
        """Measure an encoder, and return the numbers of a report."""
        raise NotImplementedError

    def sentences(self) -> Iterable[str]:
        """Return what will be encoded. All evaluators' sentences are encoded in one call."""
        return ()

    def size(self) -> float:
        """Return how many sentences an accuracy or error over all languages is measured on.

        A training computes the standard error from it, to compare evaluations
        (`DAPTrainer.is_worse`).
        """
        return sum(1 for _ in self.sentences())

    def logged(self, numbers: Numbers) -> dict[str, float]:
        """Return the numbers that a training logs, by name."""
        return numbers

    def metrics(self, numbers: Numbers) -> list[Metric]:
        """Return the numbers for the model card."""
        return [Metric(name, value) for name, value in numbers.items()]

    def table(self, numbers: Numbers) -> str:
        """Format the numbers for the console."""
        return console_tables(card_rows(self.task, self.metrics(numbers)))


def data_name(paths: Iterable[str | Path], max_pairs: int | None = None) -> str:
    """Name test data for the model card: the last part of a local path, or the id on the Hub.

    >>> data_name(["/data/tatoeba", "facebook/xnli"], max_pairs=100)
    'tatoeba, facebook/xnli, first 100 pairs per language'
    """
    names = []
    for path in map(Path, paths):
        is_here = path.is_absolute() or path.exists()  # else the id of a Hub dataset
        names.append(Path(os.path.abspath(path)).name if is_here else str(path))
    if max_pairs is not None:
        names.append(f"first {max_pairs} pairs per language")
    return ", ".join(names)


def card_rows(task: str, metrics: Iterable[Metric], data: str = "") -> list[dict[str, Any]]:
    """Return the metrics of a task as a report holds them for the model card.

    Args:
        data: what they were measured on (`data_name`).
    """
    rows = []
    for each in metrics:
        rows.append({"task": task, "data": data} | each._asdict() | {"value": round(each.value, 4)})
    return rows


def console_tables(rows: Iterable[Mapping[str, Any]]) -> str:
    """Format the `card_rows` of a report as plain text."""
    return "\n\n".join(text_table(*table) for table in tables_of(rows).items())


def tables_of(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, ...], list[list[Any]]]:
    """Put the `card_rows` of a report into tables: task and names of the columns -> rows.

    A row has a place and its values. Places with the same metrics share a table.
    """
    places: dict[tuple[str, str], dict[str, float]] = {}
    for each in rows:
        places.setdefault((each["task"], each["place"]), {})[each["name"]] = each["value"]
    tables: dict[tuple[str, ...], list[list[Any]]] = {}
    for (task, place), values in places.items():
        row = [NAMES.get(place, place), *values.values()]
        tables.setdefault((task, *values), []).append(row)
    return tables


def by_name(paths: str | Path | Iterable[str | Path]) -> dict[str, Path]:
    """Return test data by its name: the last part of its path, without .tsv, .gz and .xz."""
    found: dict[str, Path] = {}
    for path in map(Path, [paths] if isinstance(paths, str | Path) else paths):
        name = re.sub(r"(\.tsv)?(\.gz|\.xz)?$", "", path.resolve().name)
        if name in found or name == "mean":
            other = found.get(name, "the average")
            raise UserError(f"{other} and {path} are both called {name}: rename one of them")
        found[name] = path
    return found


def without_lone_mean(numbers: Numbers) -> Numbers:
    """Return the numbers without "mean" if there is only one other."""
    if len(numbers) > 2:
        return numbers
    return {name: value for name, value in numbers.items() if name != "mean"}


def as_pairs(text: Mapping[str, Iterable[Any]]) -> PairsByLanguage:
    """Return language -> pairs, given pairs, or datasets with the columns "source" and "target".

    Raises:
        UserError: if a row is no pair.
    """
    pairs = {}
    for language, rows in text.items():
        if hasattr(rows, "column_names"):
            rows = zip(rows["source"][:], rows["target"][:], strict=True)
        pairs[language] = list(rows)
        for row in pairs[language]:
            if isinstance(row, str | Mapping) or len(row) != 2:
                raise UserError(f"{language}: {row!r} is no pair of a source and a target")
    return pairs


def both_sides(pairs: PairsByLanguage) -> Iterator[str]:
    """Yield the sentences of each language: all sources, then all targets."""
    for rows in pairs.values():
        for side in zip(*rows, strict=True):
            yield from side


def pairs_of_mean(pairs: PairsByLanguage) -> float:
    """Return how many pairs a mean over languages is worth. Languages of few pairs make it less."""
    shares = [1 / len(rows) for rows in pairs.values()]
    return len(shares) ** 2 / sum(shares)


def evaluate(
    encoder: Encoder, evaluators: Sequence[Evaluator], progress: bool = False
) -> dict[str, Numbers]:
    """Measure an encoder with several evaluators, which share its vectors. Return numbers by name.

    All processes of a launch call this. They encode together, and all return the numbers of the
    first one.
    """
    if len({each.name for each in evaluators}) < len(evaluators):
        raise ValueError("two evaluators have the same name: give all data to one of them")
    shared = SharedEncoder(encoder, progress)
    shared.encode(list(chain.from_iterable(each.sentences() for each in evaluators)))
    found = {each.name: each(shared) for each in evaluators}
    return broadcast_object_list([found])[0]
