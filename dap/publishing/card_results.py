"""Reports of evaluations on a model card: entries of its `model-index`, and tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from dap.errors import UserError
from dap.languages import NAMES
from dap.reports import is_spread, markdown_table, numbers_of

#: Key of a number in a report -> its metric on the Hub, and how the card names it.
METRICS = {
    "xx-en": ("accuracy", "accuracy xx→en"),
    "en-xx": ("accuracy", "accuracy en→xx"),
    "accuracy": ("accuracy", "accuracy"),
    "precision": ("precision", "precision"),
    "recall": ("recall", "recall"),
    "f1": ("f1", "F1"),
}
#: The metric that tells what was measured -> task of the Hub, and its name.
TASKS = {
    "xx-en": ("sentence-similarity", "bitext retrieval"),
    "f1": ("sentence-similarity", "bitext mining"),
    "accuracy": ("text-classification", "natural language inference"),
}
HUB_DATASETS = ("facebook/xnli",)  # what an evaluation takes where it is given no data
NOT_SHOWN = ("data", "bucc", "recipe")  # settings that the heading names, or a digest


def _averages_first(report: Mapping[str, Any]) -> list[tuple[tuple[str, ...], dict[str, Any]]]:
    """The numbers of a report, those of single languages last."""
    return sorted(numbers_of(report), key=lambda found: found[0][:1] == ("languages",))


def eval_results(report: Mapping[str, Any]) -> list[EvalResult]:
    """A report as entries of a `model-index`, percent as in the report; numbers that are no metrics are left out."""
    settings, name = report.get("settings", {}), dataset_name(report)
    short = [
        key for key in ("truncate_dim", "precision") if settings.get(key) not in (None, "float32")
    ]
    cut = (
        f" ({', '.join(f'{key} {settings[key]}' for key in short)})" if short else ""
    )  # not of the whole vectors
    results = []
    for place, numbers in _averages_first(report):
        task = next((task for key, task in TASKS.items() if key in numbers), None)
        for key in (key for key in numbers if key in METRICS and task):
            result = EvalResult(
                task_type=task[0],
                task_name=task[1],
                dataset_type=name,
                dataset_name=name,
                dataset_config=place[-1] if place else None,
                dataset_split="validation" if place[:1] == ("dev",) else None,
                metric_type=METRICS[key][0],
                metric_name=METRICS[key][1] + cut,
                metric_value=numbers[key]["mean"] if is_spread(numbers[key]) else numbers[key],
            )
            results.append(result)
    return results


def dataset_name(report: Mapping[str, Any]) -> str:
    """What a report was measured on: the last part of each path or Hub id, which look alike; never a whole path.

    >>> dataset_name({"protocol": "retrieval", "settings": {"data": ["/data/tatoeba"]}})
    'tatoeba'
    """
    settings = report.get("settings", {})
    data = settings.get("data") or settings.get("bucc") or report["protocol"]
    paths = [data] if isinstance(data, str) else list(data)
    return ", ".join(path if path in HUB_DATASETS else Path(path).name for path in paths)


def require_different(reports: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` where two reports give one metric of one data set: a card can say only one of them."""
    seen: set[tuple[str | None, ...]] = set()
    for report in reports:
        found = {
            (r.dataset_name, r.dataset_config, r.dataset_split, r.metric_name)
            for r in eval_results(report)
        }
        if twice := found & seen:
            name = ", ".join(part for part in min(twice, key=str) if part)
            raise UserError(
                f"two reports give {name}: give one of them, or merge those of several seeds."
            )
        seen |= found


def report_text(report: Mapping[str, Any]) -> str:
    """Every number of a report, in percent where the report is, below its protocol and settings."""
    rows = _averages_first(report)
    found = dict.fromkeys(name for _, numbers in rows for name in numbers)
    columns = [name for name in METRICS if name in found] + [
        name for name in found if name not in METRICS
    ]
    header = ["", *(METRICS.get(name, ("", name))[1] for name in columns)]
    cells = [
        [_place(place), *(_cell(numbers.get(name)) for name in columns)] for place, numbers in rows
    ]
    settings = {
        **report.get("settings", {}),
        "seed": report.get("seed"),
        "seeds": report.get("seeds"),
    }
    said = [
        f"{name} {value!r}"
        for name, value in settings.items()
        if name not in NOT_SHOWN
        and isinstance(value, (str, int, float))
        and "/" not in str(value)  # no path
    ]
    text = f"{report['protocol'].strip().rstrip('.')}. {'; '.join(said)}.".strip()
    if time := str(report.get("time", ""))[:10]:
        text += f" Measured on {time}."
    return f"### {dataset_name(report)}\n\n{text}\n\n{markdown_table(header, cells)}"


def _place(place: Sequence[str]) -> str:
    if not place:
        return "all"
    if place[0] == "languages":
        return NAMES.get(place[-1], place[-1])
    return " ".join(place[1:] if place[0] in ("averages", "pairs") else place)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return f"{value['mean']:.2f}" + ("" if value["sd"] is None else f" ± {value['sd']:.2f}")
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
