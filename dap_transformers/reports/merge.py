"""Merge the reports of several seeds, and show them beside the paper's numbers.

All reports must have the same protocol, data and settings. Reports of bitext mining may be about
several language pairs.
"""

import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dap_transformers.errors import UserError
from dap_transformers.evaluation.paper import (
    BUCC_PAIRS,
    BUCC_PROTOCOLS,
    TATOEBA_GROUPS,
    bucc_table,
    tatoeba_tables,
    xnli_table,
)
from dap_transformers.reports.records import HEAD, is_number, is_spread, timestamp
from dap_transformers.reports.rendering import text_table

#: Numbers that give the size of the test set. They must be equal in all reports.
COUNTS = ("pairs", "gold")
MEASURES = ("precision", "recall", "f1")
#: Settings that only say where the text was.
PLACES = ("data", "bucc")
#: Settings that differ between the language pairs of bitext mining.
PAIR_SETTINGS = ("pair", "text")
SEED_MARK = re.compile(r"seed[-_=]?\d+")

Place = tuple[str, ...]  # keys that lead to a value in a report, such as ("languages", "de")
Reports = Mapping[str, Mapping[str, Any]]  # file name -> report


def merge_seeds(reports: Reports) -> dict[str, Any]:
    """Merge reports of trainings that differ only in the seed.

    Every measured number becomes {"mean": ..., "sd": ...}, with the sample standard deviation
    (None for one report). Whole numbers that are the same in all reports stay unchanged.

    All models must be seeds of one training. They are if their settings have the same recipe, a
    hash of the training's arguments (`training_record`). Otherwise their names must be the same
    except for a mark such as "seed1".

    Args:
        reports: file name -> report. The names are for error messages.

    Returns:
        A report of the same form, with the lists "models", "seeds" and "versions", and the number
        "n" of reports.
    """
    if not reports:
        raise UserError("no reports to merge: give one file or more")

    first_file, *other_files = reports
    first = reports[first_file]
    for file in other_files:
        _require_same_evaluation(first_file, first, file, reports[file])
    _require_different_runs(reports)

    bodies = {}
    for file, report in reports.items():
        bodies[file] = {key: value for key, value in report.items() if key not in HEAD}
    return {
        "protocol": first.get("protocol"),
        "settings": first.get("settings"),
        "model": _name_without_seed(first),
        "models": [each["model"] for each in reports.values()],
        "n": len(reports),
        "seeds": [each.get("seed") for each in reports.values()],
        **_merge_values(bodies),
        "time": timestamp(),
        "versions": [each.get("versions") for each in reports.values()],
    }


def merge_pairs(reports: Reports) -> dict[str, Any]:
    """Merge reports of several seeds, where bitext mining may have several language pairs.

    The reports of each language pair are merged by `merge_seeds`. The results of the language
    pairs stay side by side in one report. If there is only one language pair, or none, all
    reports go to `merge_seeds`.

    Args:
        reports: file name -> report. The names are for error messages.

    Returns:
        The merged report. Its settings have a list of the language pairs.
    """
    by_pair: dict[str | None, dict[str, Mapping[str, Any]]] = {}
    for file, report in reports.items():
        pair = report.get("settings", {}).get("pair")
        by_pair.setdefault(pair, {})[file] = report
    if len(by_pair) < 2:
        return merge_seeds(reports)

    merged = {}  # first file of a language pair -> its merged report
    for group in by_pair.values():
        merged[next(iter(group))] = merge_seeds(group)

    first_file, *other_files = merged
    first = merged[first_file]
    for file in other_files:
        other = merged[file]
        _require_same_evaluation(
            first_file, _without_pair_settings(first), file, _without_pair_settings(other)
        )
        if set(first["seeds"]) != set(other["seeds"]):
            raise UserError(
                f"{first_file} has the seeds {first['seeds']}, {file} has {other['seeds']}: "
                "give the same seeds for every language pair"
            )

    pairs: dict[str, Any] = {}
    settings = dict(first["settings"])
    for each in merged.values():
        pairs |= each["pairs"]
    for key in PAIR_SETTINGS:
        settings[key] = [each["settings"].get(key) for each in merged.values()]

    kept = ("protocol", "model", "models", "n", "seeds", "time", "versions")
    return {key: first[key] for key in kept} | {"settings": settings, "pairs": pairs}


def _without_pair_settings(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a report without the settings that differ between language pairs.

    These are the name of the pair and the digest of its text (`PAIR_SETTINGS`).
    """
    settings = dict(report["settings"])
    for key in PAIR_SETTINGS:
        settings.pop(key, None)
    return {**report, "settings": settings}


def _name_without_seed(report: Mapping[str, Any]) -> str:
    """Return the name of a report's model, with "seed*" instead of a mark such as "seed1"."""
    return SEED_MARK.sub("seed*", report["model"])


def _require_same_evaluation(
    first_file: str, first: Mapping[str, Any], file: str, other: Mapping[str, Any]
) -> None:
    """Raise `UserError` unless two reports have the same protocol, settings and model.

    If the settings have a recipe, equal recipes stand for equal models. Otherwise the models'
    names must be equal except for the seed. If both reports have the same digest of the text, it
    may have been in different folders.
    """
    settings = first.get("settings", {})
    other_settings = other.get("settings", {})

    names = dict.fromkeys([*settings, *other_settings])
    is_same_text = settings.get("text") is not None
    is_same_text = is_same_text and settings["text"] == other_settings.get("text")
    if is_same_text:  # it may be in another folder
        for name in PLACES:
            names.pop(name, None)

    compared = [("protocol", first.get("protocol"), other.get("protocol"))]
    for name in names:
        compared.append((f"settings.{name}", settings.get(name), other_settings.get(name)))
    if not settings.get("recipe"):
        compared.append(("model", _name_without_seed(first), _name_without_seed(other)))

    for name, value, other_value in compared:
        if value != other_value:
            raise UserError(
                f"{first_file} has {name} {value!r}, {file} has {other_value!r}: give reports of "
                "one protocol, data, settings and model (only a mark such as seed1 may differ)"
            )


def _require_different_runs(reports: Reports) -> None:
    """Raise `UserError` if two reports are of the same run, because a run must count only once.

    Reports are of the same run if they have the same seed and the same recipe
    (`training_record`). Without a recipe, the name and revision of the model count instead.
    """
    seen: dict[str, str] = {}
    for file, report in reports.items():
        model = report.get("settings", {}).get("recipe")
        if not model:
            model = f"{report['model']} {report.get('revision') or ''}".rstrip()
        run = f"model {model} and seed {report.get('seed')}"
        if run in seen:
            raise UserError(f"{seen[run]} and {file} have the same {run}: give each run once")
        seen[run] = file


def _merge_values(values: Mapping[str, Any], place: Place = ()) -> Any:
    """Merge the values that several reports have at the same place.

    Returns:
        For measured numbers {"mean": ..., "sd": ...}. For dictionaries a dictionary of merged
        values. Any other value, and a whole number that is the same everywhere, is returned
        unchanged.
    """
    first_file, *other_files = values
    first = values[first_file]

    if all(isinstance(value, Mapping) for value in values.values()):
        for file in other_files:
            if differing := first.keys() ^ values[file].keys():
                name = " ".join([*place, min(differing)])
                raise UserError(
                    f"only one of {first_file} and {file} has {name!r}: evaluate both alike"
                )
        merged = {}
        for name in first:
            inner = {file: value[name] for file, value in values.items()}
            merged[name] = _merge_values(inner, (*place, name))
        return merged

    differing_files = [file for file in other_files if values[file] != first]
    if all(is_number(value) for value in values.values()) and place[-1] not in COUNTS:
        if isinstance(first, int) and not differing_files:
            return first
        mean = statistics.fmean(values.values())
        return {"mean": mean, "sd": statistics.stdev(values.values()) if other_files else None}

    for file in differing_files:
        raise UserError(
            f"{' '.join(place)}: {first_file} has {first!r}, {file} has {values[file]!r}: "
            "give reports of the same evaluation"
        )
    return first


def numbers_of(
    report: Mapping[str, Any], place: Place = ()
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield the numbers of a report, grouped by the dictionary that holds them.

    Keys that describe the run, such as "seconds", are left out.

    Args:
        report: a report, or a part of one.
        place: keys that lead to this part. Leave it out for a whole report.

    Yields:
        The keys that lead to a dictionary, and its numbers by name. An example is
        `("languages", "de"), {"xx-en": 97.8, "pairs": 1000}`. In a merged report, a number is
        {"mean": ..., "sd": ...}.
    """
    hidden = () if place else (*HEAD, "models", "seeds", "n")
    body = {name: value for name, value in report.items() if name not in hidden}

    numbers = {}
    for name, value in body.items():
        if is_number(value) or is_spread(value):
            numbers[name] = value
    if numbers:
        yield place, numbers

    for name, value in body.items():
        if isinstance(value, Mapping) and name not in numbers:
            yield from numbers_of(value, (*place, name))


def merged_table(merged: Mapping[str, Any]) -> str:
    """Format all merged numbers of a report as a text table, with cells such as "90.50 ± 0.25".

    Each row is a dictionary of the report, such as "languages de". Each column is a name of a
    number, such as "xx-en". Numbers that are not merged, such as counts, are left out.

    Args:
        merged: the result of `merge_seeds` or `merge_pairs`.
    """
    rows = {}
    columns: dict[str, None] = {}
    for place, numbers in numbers_of(merged):
        cells = {name: _spread(value) for name, value in numbers.items() if is_spread(value)}
        if cells:
            rows[" ".join(place) or "all"] = cells
            columns |= dict.fromkeys(cells)
    body = [[name, *map(cells.get, columns)] for name, cells in rows.items()]
    return text_table(["", *columns], body)


def _spread(value: Mapping[str, float | None]) -> str:
    """Format a mean and, if it is not None, its standard deviation.

    Means from 10 on are percentages and get two decimals. Smaller ones, such as thresholds of
    mining, get four.

    >>> _spread({"mean": 90.5, "sd": 0.25}), _spread({"mean": 1.0625, "sd": None})
    ('90.50 ± 0.25', '1.0625')
    """
    digits = 2 if abs(value["mean"]) >= 10 else 4
    return " ± ".join(f"{number:.{digits}f}" for number in value.values() if number is not None)


def paper_beside(report: Mapping[str, Any]) -> str | None:
    """Format the results of a report beside the paper's.

    Args:
        report: a report of one seed, or a merged one. Of the latter the means are shown.

    Returns:
        A text table of Tatoeba, BUCC or XNLI. None if the paper has no results to compare with,
        such as for other languages or another protocol.
    """
    means = _means(report)
    name = Path(report["model"]).name
    if "n" in report:
        name += f" (n={report['n']})"

    has_group = any(group in means.get("averages", {}) for group in TATOEBA_GROUPS)
    is_whole = report["settings"].get("max_pairs") is None  # fewer pairs are an easier task
    if is_whole and has_group:
        return tatoeba_tables(means, name)

    languages = means.get("languages") or {}
    if languages and all("accuracy" in numbers for numbers in languages.values()):
        accuracies = {code: numbers["accuracy"] for code, numbers in languages.items()}
        return xnli_table(accuracies, name)

    protocol = report["protocol"].removeprefix("BUCC ").split(":")[0]
    if protocol not in BUCC_PROTOCOLS:
        return None
    results = {}
    for pair, numbers in means["pairs"].items():
        if pair in BUCC_PAIRS:
            results[pair] = [numbers[key] for key in MEASURES]
    if results:
        return bucc_table(results, name, BUCC_PROTOCOLS[protocol])
    return None


def _means(node: Any) -> Any:
    """Return a copy of a report, or a part of it, with means for {"mean": ..., "sd": ...}."""
    if is_spread(node):
        return node["mean"]
    if isinstance(node, Mapping):
        return {name: _means(value) for name, value in node.items()}
    return node
