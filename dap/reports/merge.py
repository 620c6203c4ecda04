"""Merge the reports of several seeds, and show them beside the paper's numbers.

    python -m dap.reports seed1.json seed2.json seed3.json --output merged.json

All reports must have the same protocol, data and settings. Reports of bitext mining may be about
several language pairs.
"""

import argparse
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dap.commands import command, guarded
from dap.errors import UserError
from dap.file_io import write_json
from dap.reports.paper import (
    BUCC_PAIRS,
    BUCC_PROTOCOLS,
    TATOEBA_GROUPS,
    bucc_table,
    tatoeba_tables,
    xnli_table,
)
from dap.reports.records import HEAD, read_report, timestamp
from dap.reports.rendering import text_table

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
    """Merge reports that differ only in the seed.

    Every number becomes {"mean": ..., "sd": ...}, with the sample standard deviation (None for one
    report). Whole numbers that are equal in all reports stay unchanged.

    Two models count as one if their settings name the same recipe (`training_record`), or if their
    names are equal except for a mark such as "seed1".

    Args:
        reports: file name -> report. The names are for error messages.

    Raises:
        ValueError: no reports, two reports of the same run, or two that differ in protocol,
            settings, model or form.
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
    """Merge bitext mining reports of several seeds and language pairs, which stay side by side.

    Reports of other evaluations, or of only one language pair, are merged by `merge_seeds`.

    Raises:
        ValueError: see `merge_seeds`. Also if the pairs have different settings or seeds.
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
    settings = dict(report["settings"])
    for key in PAIR_SETTINGS:
        settings.pop(key, None)
    return {**report, "settings": settings}


def _name_without_seed(report: Mapping[str, Any]) -> str:
    return SEED_MARK.sub("seed*", report["model"])


def _require_same_evaluation(
    first_file: str, first: Mapping[str, Any], file: str, other: Mapping[str, Any]
) -> None:
    """Raise `ValueError` unless both reports have the same protocol, settings, recipe and model."""
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
    """Raise `ValueError` if two reports are about one model, or about one recipe and seed."""
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
    """Merge the values that the files have at one place of their reports.

    Args:
        values: file name -> value.
        place: keys that lead to the value.
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


def is_number(value: Any) -> bool:
    """Return whether a value of a report is a number of one run."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_spread(value: Any) -> bool:
    """Return whether a value of a merged report is the mean and deviation of several runs."""
    return isinstance(value, Mapping) and set(value) == {"mean", "sd"}


def numbers_of(
    report: Mapping[str, Any], place: Place = ()
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield all numbers of a report with their place.

    An example is `("languages", "de"), {"xx-en": 97.8, "pairs": 1000}`. A number of several seeds
    is {"mean": ..., "sd": ...}.
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
    """Show every number of a merged report as "mean ± sd", one row per place."""
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
    """Format percentages with two decimals, and small numbers such as thresholds with four.

    >>> _spread({"mean": 90.5, "sd": 0.25}), _spread({"mean": 1.0625, "sd": None})
    ('90.50 ± 0.25', '1.0625')
    """
    digits = 2 if abs(value["mean"]) >= 10 else 4
    return " ± ".join(f"{number:.{digits}f}" for number in value.values() if number is not None)


def paper_beside(report: Mapping[str, Any]) -> str | None:
    """Show the numbers of a report, or their means, beside the paper's.

    Returns:
        A table of Tatoeba, BUCC or XNLI, or None if the paper has no such numbers.
    """
    means = _means(report)
    name = Path(report["model"]).name
    if "n" in report:
        name += f" (n={report['n']})"

    has_group = any(group in means.get("averages", {}) for group in TATOEBA_GROUPS)
    is_whole = report["settings"].get("max_pairs") is None  # fewer pairs are an easier task
    if is_whole and has_group:
        return tatoeba_tables(means, name)

    languages = means.get("languages", {})
    if languages and all("accuracy" in numbers for numbers in languages.values()):
        accuracies = {code: numbers["accuracy"] for code, numbers in languages.items()}
        return xnli_table(accuracies, name)

    protocol = report["protocol"].removeprefix("BUCC ").split(":")[0]
    results = {}
    for pair, numbers in means.get("pairs", {}).items():
        if pair in BUCC_PAIRS:
            results[pair] = [numbers[key] for key in MEASURES]
    if protocol in BUCC_PROTOCOLS and results:
        return bucc_table(results, name, BUCC_PROTOCOLS[protocol])
    return None


def _means(node: Any) -> Any:
    if is_spread(node):
        return node["mean"]
    if isinstance(node, Mapping):
        return {name: _means(value) for name, value in node.items()}
    return node


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Merge the reports that the command line names, and print the tables.

    Args:
        argv: the command line. None takes the process's own.

    Returns:
        The merged report.

    Raises:
        ValueError: reports that do not belong together, or a file that is not a report.
        FileNotFoundError: no such file.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dap.reports", description=__doc__.splitlines()[0]
    )
    parser.add_argument("reports", nargs="+", help="JSON reports of one evaluation, one per seed")
    parser.add_argument("--output", help="JSON file for the merged report")
    arguments = parser.parse_args(argv)
    for path in arguments.reports:
        if arguments.reports.count(path) > 1:
            raise UserError(f"{path} is given twice: give each report once")

    outputs = {} if arguments.output is None else {"--output": arguments.output}
    with guarded(outputs, inputs=arguments.reports):
        merged = merge_pairs({path: read_report(path) for path in arguments.reports})
        if arguments.output:
            write_json(merged, arguments.output)

    print(f"{merged['model']}: {merged['protocol']}")
    print(f"mean ± sample standard deviation, n={merged['n']}\n")
    print(merged_table(merged))
    if table := paper_beside(merged):
        print(f"\n{table}")
    if arguments.output:
        print(f"written to {arguments.output}")
    return merged


main = command(run)
