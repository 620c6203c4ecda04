"""Show evaluation reports on a model card: as entries of its `model-index`, and as tables."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from dap_transformers.errors import UserError
from dap_transformers.languages import NAMES
from dap_transformers.reports import mean_of, numbers_of
from dap_transformers.tables import markdown_table

#: Key of a number in a report -> (metric on the Hub, name on the card).
METRICS = {
    "xx-en": ("accuracy", "accuracy xx→en"),
    "en-xx": ("accuracy", "accuracy en→xx"),
    "pool_xx-en": ("accuracy", "multilingual pool xx→en"),
    "pool_en-xx": ("accuracy", "multilingual pool en→xx"),
    "accuracy": ("accuracy", "accuracy"),
    "precision": ("precision", "precision"),
    "recall": ("recall", "recall"),
    "f1": ("f1", "F1"),
    "main_score": ("main_score", "main score"),
}
#: Key of a number that is not a metric of the Hub -> name on the card.
OTHER_NAMES = {
    "own_xx-en": "lost to own language xx→en",
    "own_en-xx": "lost to own language en→xx",
    "error": "hard-negative error",
    "number": "by number",
    "negation": "by negation",
    "name": "by name",
    "other": "by another sentence",
}
#: A number that only one kind of evaluation has -> (task on the Hub, its name).
TASKS = {
    "xx-en": ("sentence-similarity", "bitext retrieval"),
    "f1": ("sentence-similarity", "bitext mining"),
    "main_score": ("sentence-similarity", "MTEB"),
    "accuracy": ("text-classification", "natural language inference"),
}
HUB_DATASETS = ("facebook/xnli",)  # default data of an evaluation
#: Number of a report -> what it says about the model, for the first lines of the card.
HEADLINES = {
    "xx-en": "Finds the English translation of {value}% of the sentences ({data}).",
    "en-xx": "Finds the translation of {value}% of the English sentences ({data}).",
    "f1": "Finds translations in two texts with F1 {value}% ({data}).",
    "accuracy": "Classifies {value}% of the sentence pairs correctly ({data}).",
}
LONGEST_TABLE = 8  # rows of a table that is not folded
NOT_SHOWN = ("data", "bucc", "recipe", "text")  # settings that the heading names, and hashes


def _averages_first(report: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """Return the numbers of a report, grouped as in the report, with single languages last.

    Returns:
        (place, numbers by name) of each group. The place is the path of the group in the report,
        such as ("languages", "de").
    """
    return sorted(numbers_of(report), key=lambda found: found[0][:1] == ("languages",))


def eval_results(report: Mapping[str, Any]) -> list[EvalResult]:
    """Turn the metrics of an evaluation report into entries of a card's `model-index`.

    Numbers that are no metrics of the Hub (`METRICS`), such as thresholds, are left out.

    Args:
        report: a report, perhaps merged from several seeds. Its metrics are in percent.

    Returns:
        One entry per metric and language, averages first. For a merged report, its value is the
        mean over the seeds.
    """
    name = dataset_name(report)
    suffix = _shortened(report.get("settings", {}))
    results = []
    for place, numbers in _averages_first(report):
        kind = _kind(numbers)
        if kind is None:
            continue
        task_type, task_name = TASKS[kind]
        for key, value in numbers.items():
            if key not in METRICS:
                continue
            metric, metric_name = METRICS[key]
            result = EvalResult(
                task_type=task_type,
                task_name=task_name,
                dataset_type=name,
                dataset_name=name,
                dataset_config=place[-1] if place else None,
                dataset_split="validation" if place[:1] == ("dev",) else None,
                metric_type=metric,
                metric_name=metric_name + suffix,
                metric_value=mean_of(value),
            )
            results.append(result)
    return results


def _kind(numbers: Mapping[str, Any]) -> str | None:
    """Return the key of `TASKS` that tells what evaluation some numbers come from, None if none.

    MTEB gives an F1 and an accuracy for mining and for classification. Its main score tells them
    apart: for mining it is the F1.
    """
    if "main_score" in numbers and numbers["main_score"] != numbers.get("f1"):
        return "main_score"
    return next((key for key in TASKS if key in numbers), None)


def _shortened(settings: Mapping[str, Any]) -> str:
    """Return how vectors were shortened in an evaluation, such as " (truncate_dim 256)"."""
    parts = []
    for key in ("truncate_dim", "precision"):
        if settings.get(key) not in (None, "float32"):
            parts.append(f"{key} {settings[key]}")
    return f" ({', '.join(parts)})" if parts else ""


def dataset_name(report: Mapping[str, Any]) -> str:
    """Return the name of the data that a report is about, without folders of this machine.

    Several names are joined by commas. If the report names no data, return its protocol.

    >>> dataset_name({"protocol": "retrieval", "settings": {"data": ["/data/tatoeba"]}})
    'tatoeba'
    """
    settings = report.get("settings", {})
    data = settings.get("data") or settings.get("bucc") or report["protocol"]
    paths = [data] if isinstance(data, str) else list(data)
    names = [path if path in HUB_DATASETS else Path(path).name for path in paths]
    return ", ".join(names)


def require_different(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UserError` if two reports give the same metric on the same data.

    A card can show only one value of it.
    """
    seen: set[tuple[str | None, ...]] = set()
    for report in reports:
        found = set()
        for result in eval_results(report):
            place = (result.dataset_name, result.dataset_config, result.dataset_split)
            found.add((*place, result.metric_name))
        if twice := found & seen:
            name = ", ".join(part for part in min(twice, key=str) if part)
            raise UserError(
                f"two reports give {name}: give one of them, or merge reports of several seeds"
            )
        seen |= found


def report_text(report: Mapping[str, Any]) -> str:
    """Format an evaluation report as Markdown: data, protocol, settings, and tables of results.

    Rows with the same columns make a table, so that no cell is empty. Tables of results stand
    before those of counts, and averages before single languages. A table of more than
    `LONGEST_TABLE` rows is folded.
    """
    tables: dict[tuple[str, ...], list[list[str]]] = {}
    units: dict[tuple[str, ...], str] = {}  # what a row of the table is
    for place, numbers in _averages_first(report):
        if place[:1] == ("hard_negatives",) and place[-1] != "error":
            continue  # numbers of pairs and copies
        columns = [name for name in METRICS if name in numbers]
        columns += [name for name in numbers if name not in METRICS]
        row = [_place_name(place), *(_cell(name, numbers[name]) for name in columns)]
        tables.setdefault(tuple(columns), []).append(row)
        units[tuple(columns)] = "languages" if place[:1] == ("languages",) else "rows"

    parts = [f"### {dataset_name(report)}", _measured_text(report)]
    # A stable sort: False comes first.
    for columns in sorted(tables, key=METRICS.keys().isdisjoint):
        rows = tables[columns]
        table = markdown_table(["", *map(_column_name, columns)], rows, numbers=True)
        if len(rows) > LONGEST_TABLE:
            table = folded(f"All {len(rows)} {units[columns]}", table)
        parts.append(table)
    return "\n\n".join(parts)


def _measured_text(report: Mapping[str, Any]) -> str:
    """Say how and when the numbers of a report were measured."""
    protocol = report["protocol"].strip().rstrip(".")
    text = f"{protocol[:1].upper()}{protocol[1:]}."
    if settings := _settings_text(report):
        text += f" Settings: {settings}."
    if date := str(report.get("time", ""))[:10]:
        text += f" Measured on {date}."
    return text


def _column_name(name: str) -> str:
    """Return the name of a table's column, such as "F1" for "f1"."""
    return METRICS[name][1] if name in METRICS else OTHER_NAMES.get(name, name)


def folded(summary: str, text: str) -> str:
    """Hide a Markdown text behind a line that the reader can click."""
    return f"<details>\n<summary>{summary}</summary>\n\n{text}\n\n</details>"


def headlines(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the most important results of each report, one sentence per number.

    A number is the average over the largest group of languages, or the mean over all language
    pairs. Reports without such a number have no sentence.
    """
    found = []
    for report in reports:
        rows = list(numbers_of(report))
        for key, sentence in HEADLINES.items():
            of_task = rows
            if key in TASKS:
                of_task = [row for row in rows if _kind(row[1]) == key]
            result = _average(of_task, key)
            if result is not None:
                value, over = result
                data = f"{dataset_name(report)}, {over}"
                found.append(sentence.format(value=f"{value:.1f}", data=data))
    return found


def _average(
    rows: Sequence[tuple[tuple[str, ...], Mapping[str, Any]]], key: str
) -> tuple[float, str] | None:
    """Return the average of a metric over languages or language pairs.

    Returns:
        The average, and what it is over, such as "36 languages". None if the report has no such
        number.
    """
    values: dict[str, dict[str, float]] = {"averages": {}, "languages": {}, "pairs": {}}
    for place, numbers in rows:
        if key in numbers and place and place[0] in values:
            values[place[0]][place[-1]] = mean_of(numbers[key])

    if averages := values.pop("averages"):
        largest = max(averages, key=_group_size)
        return averages[largest], f"mean of {largest}"
    for unit, singles in values.items():
        if len(singles) == 1:
            ((name, value),) = singles.items()
            return value, name
        if singles:
            mean = sum(singles.values()) / len(singles)
            what = "language pairs" if unit == "pairs" else unit
            return mean, f"mean of {len(singles)} {what}"
    return None


def _group_size(name: str) -> int:
    """Return the number of languages in the name of a group, such as "12 of 36 languages"."""
    number = re.search(r"\d+", name)
    return int(number[0]) if number else 0


def _settings_text(report: Mapping[str, Any]) -> str:
    """List the settings and the seeds of a report in one line, such as "k 4, pooling 'cls'".

    Only texts and numbers are shown. Paths, and the settings in `NOT_SHOWN`, are left out.
    """
    settings = dict(report.get("settings", {}))
    settings["seed"] = report.get("seed")
    shown = []
    for name, value in settings.items():
        is_simple = isinstance(value, (str, int, float))
        is_path = any(separator in str(value) for separator in "/\\")  # Windows has "\\"
        if is_simple and not is_path and name not in NOT_SHOWN:
            shown.append(f"{name} {value!r}")

    # a merged report has a list, with None for a model that names no seed
    seeds = [str(seed) for seed in report.get("seeds", ()) if seed is not None]
    if seeds:
        shown.append(f"seeds {', '.join(seeds)}")
    return ", ".join(shown)


def _place_name(place: Sequence[str]) -> str:
    """Return the name of a table's row, such as "German" for ("languages", "de").

    ("hard_negatives", "de", "error") has the same name. A group or a language pair is named by its
    last key. The name of () is "all".
    """
    if not place:
        return "all"
    if place[0] in ("languages", "hard_negatives"):
        return NAMES.get(place[1], place[1])
    return " ".join(place[1:] if place[0] in ("averages", "pairs") else place)


def _cell(name: str, value: Any) -> str:
    """Format a value of a table: a number, or mean and standard deviation over seeds."""
    digits = 4 if name == "threshold" else 2
    if isinstance(value, Mapping):
        spread = "" if value["sd"] is None else f" ± {value['sd']:.{digits}f}"
        return f"{value['mean']:.{digits}f}{spread}"
    return f"{value:.{digits}f}" if isinstance(value, float) else f"{value:,}"
