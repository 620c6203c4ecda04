"""Reports of several seeds merged into one, and shown beside the paper's numbers.

    python -m dap.reports seed1.json seed2.json seed3.json --output merged.json

Only reports of one protocol, data and settings are merged. Those of bitext mining may be of several language pairs.
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

#: Numbers that say how large the test set is.
COUNTS = ("pairs", "gold")
MEASURES = ("precision", "recall", "f1")
#: Settings that say where the text was, and those that differ between the language pairs of bitext mining.
PLACES = ("data", "bucc")
OF_A_PAIR = ("pair", "text")
SEED_MARK = re.compile(r"seed[-_=]?\d+")

Place = tuple[str, ...]  # keys that lead to a number in a report


def merge_seeds(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """One report of several that differ in the seed alone: mean and sample standard deviation of every number.

    Every number, however deep, becomes {"mean": ..., "sd": ...} (sd None for one report). Whole numbers that are equal
    in all reports stay as they are; those of `COUNTS` have to be. Models count as one if their settings name one
    recipe (`training_record`), or if their names are equal but for a mark such as "seed1".

    Args:
        reports: file name -> what `report` made; the names are for errors.

    Raises:
        ValueError: no reports, or two that differ in protocol, settings, model or form, or are of one and the same
            run. Names both files and both values.
    """
    if not reports:
        raise UserError("no reports to merge: give one file or more")
    (first, one), *others = reports.items()
    for file, other in others:
        _same_question(first, one, file, other)
    _different_runs(reports)
    bodies = {
        file: {key: value for key, value in each.items() if key not in HEAD}
        for file, each in reports.items()
    }
    head = {"protocol": one.get("protocol"), "settings": one.get("settings"), "model": _family(one)}
    head |= {"models": [each["model"] for each in reports.values()], "n": len(reports)}
    head |= {"seeds": [each.get("seed") for each in reports.values()]}
    tail = {"time": timestamp(), "versions": [each.get("versions") for each in reports.values()]}
    return head | _merged(bodies) | tail


def merge_pairs(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`merge_seeds` of bitext mining's reports of several language pairs, whose numbers are kept side by side.

    Reports of anything else, or of one pair, are merged as they are.

    Raises:
        ValueError: as `merge_seeds`; or pairs that differ in more than their text, or in their numbers of seeds.
    """
    by_pair: dict[str | None, dict[str, Mapping[str, Any]]] = {}
    for file, each in reports.items():
        by_pair.setdefault(each.get("settings", {}).get("pair"), {})[file] = each
    if len(by_pair) < 2:
        return merge_seeds(reports)
    merged = [merge_seeds(group) for group in by_pair.values()]
    (first, one), *others = (
        (next(iter(group)), part) for group, part in zip(by_pair.values(), merged)
    )
    for file, other in others:
        _same_question(first, _of_any_pair(one), file, _of_any_pair(other))
        if set(one["seeds"]) != set(other["seeds"]):
            raise UserError(
                f"{first} is of the seeds {one['seeds']}, {file} of {other['seeds']}: give all pairs of each"
            )
    head = {
        key: one[key] for key in ("protocol", "model", "models", "n", "seeds", "time", "versions")
    }
    pairs = {pair: numbers for part in merged for pair, numbers in part["pairs"].items()}
    of_pairs = {key: [part["settings"].get(key) for part in merged] for key in OF_A_PAIR}
    return head | {"settings": one["settings"] | of_pairs, "pairs": pairs}


def _of_any_pair(report: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **report,
        "settings": {
            key: value for key, value in report["settings"].items() if key not in OF_A_PAIR
        },
    }


def _family(one: Mapping[str, Any]) -> str:
    return SEED_MARK.sub("seed*", one["model"])


def _same_question(first: str, one: Mapping[str, Any], file: str, other: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless both reports name the same protocol, settings (data among them), recipe and model."""
    pairs = [("protocol", one.get("protocol"), other.get("protocol"))]
    settings = [each.get("settings", {}) for each in (one, other)]
    names = dict.fromkeys([*settings[0], *settings[1]])
    if settings[0].get("text") is not None and settings[0]["text"] == settings[1].get("text"):
        for place in PLACES:
            names.pop(place, None)  # the same text from another place
    pairs += [(f"settings.{name}", settings[0].get(name), settings[1].get(name)) for name in names]
    if not settings[0].get("recipe"):
        pairs.append(("model", _family(one), _family(other)))
    for name, here, there in pairs:
        if here != there:
            raise UserError(
                f"{first} has {name} {here!r}, {file} has {there!r}: only reports of one protocol, data, settings and "
                "model (but for a mark such as seed1 in its name) can be merged"
            )


def _different_runs(reports: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise `ValueError` where two reports are of one model and seed, or of one recipe and seed: the same model."""
    seen: dict[str, str] = {}
    for file, each in reports.items():
        model = (
            each.get("settings", {}).get("recipe")
            or f"{each['model']} {each.get('revision') or ''}".rstrip()
        )
        run = f"model {model} and seed {each.get('seed')}"
        if run in seen:
            raise UserError(f"{seen[run]} and {file} are of the same {run}; give each run once")
        seen[run] = file


def _merged(values: Mapping[str, Any], place: Place = ()) -> Any:
    """One value of those that each file has at `place` of its report."""
    (first, one), *others = values.items()
    if all(isinstance(value, Mapping) for value in values.values()):
        for file, other in others:
            if differing := one.keys() ^ other.keys():
                name = " ".join([*place, min(differing)])
                raise UserError(
                    f"only one of {first} and {file} has {name!r}: evaluate both on the same"
                )
        return {
            name: _merged({file: value[name] for file, value in values.items()}, (*place, name))
            for name in one
        }
    differing = [(file, other) for file, other in others if other != one]
    if all(is_number(value) for value in values.values()) and place[-1] not in COUNTS:
        if isinstance(one, int) and not differing:
            return one
        return {
            "mean": statistics.fmean(values.values()),
            "sd": statistics.stdev(values.values()) if others else None,
        }
    for file, other in differing:
        raise UserError(
            f"{' '.join(place)}: {first} has {one!r}, {file} has {other!r}: not the same evaluation"
        )
    return one


def is_number(value: Any) -> bool:
    """Whether a value of a report is a number of one run."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def merged_table(merged: Mapping[str, Any]) -> str:
    """Every number of a merged report: a row a place, a column a name, "mean ± sd" in each."""
    rows = [
        (place, {name: _spread(value) for name, value in numbers.items() if is_spread(value)})
        for place, numbers in numbers_of(merged)
    ]
    columns = list(dict.fromkeys(name for _, spreads in rows for name in spreads))
    cells = [
        [" ".join(place) or "all", *map(spreads.get, columns)] for place, spreads in rows if spreads
    ]
    return text_table(["", *columns], cells)


def numbers_of(
    report: Mapping[str, Any], place: Place = ()
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The numbers of a report by their place in it: ("languages", "de") and {"xx-en": 97.8, "pairs": 1000}.

    A number of several seeds is {"mean": ..., "sd": ...}.
    """
    body = {
        name: value
        for name, value in report.items()
        if place or name not in (*HEAD, "models", "seeds", "n")
    }
    if numbers := {
        name: value for name, value in body.items() if is_number(value) or is_spread(value)
    }:
        yield place, numbers
    for name, value in body.items():
        if isinstance(value, Mapping) and name not in numbers:
            yield from numbers_of(value, (*place, name))


def is_spread(value: Any) -> bool:
    """Whether a value of a merged report is a number of several runs."""
    return isinstance(value, Mapping) and set(value) == {"mean", "sd"}


def _spread(value: Mapping[str, float | None]) -> str:
    """Percentages with two decimals, thresholds and losses with four.

    >>> _spread({"mean": 90.5, "sd": 0.25}), _spread({"mean": 1.0625, "sd": None})
    ('90.50 ± 0.25', '1.0625')
    """
    digits = 2 if abs(value["mean"]) >= 10 else 4
    return " ± ".join(f"{number:.{digits}f}" for number in value.values() if number is not None)


def paper_beside(report: Mapping[str, Any]) -> str | None:
    """The numbers, or means, of a report beside the paper's, if it has such numbers: Tatoeba, BUCC or XNLI."""
    means, name = (
        _means(report),
        Path(report["model"]).name + (f" (n={report['n']})" if "n" in report else ""),
    )
    languages = means.get("languages", {})
    is_whole = (
        report["settings"].get("max_pairs") is None
    )  # with fewer pairs there are fewer candidates
    if is_whole and any(group in means.get("averages", {}) for group in TATOEBA_GROUPS):
        return tatoeba_tables(means, name)
    if languages and all("accuracy" in numbers for numbers in languages.values()):
        return xnli_table({code: numbers["accuracy"] for code, numbers in languages.items()}, name)
    split = BUCC_PROTOCOLS.get(report["protocol"].removeprefix("BUCC ").split(":")[0])
    pairs = {
        pair: numbers for pair, numbers in means.get("pairs", {}).items() if pair in BUCC_PAIRS
    }
    if split and pairs:
        return bucc_table(
            {pair: [numbers[key] for key in MEASURES] for pair, numbers in pairs.items()},
            name,
            split,
        )
    return None


def _means(node: Any) -> Any:
    if is_spread(node):
        return node["mean"]
    return (
        {name: _means(value) for name, value in node.items()} if isinstance(node, Mapping) else node
    )


def run(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Merges the reports that the command line `argv` names, prints the tables; returns the merged report.

    Raises:
        ValueError: reports that do not belong together, or a file that is none.
        FileNotFoundError: no such file.
    """
    parser = argparse.ArgumentParser(
        prog="python -m dap.reports", description=__doc__.splitlines()[0]
    )
    parser.add_argument("reports", nargs="+", help="JSON reports of one evaluation, a seed each")
    parser.add_argument("--output", help="JSON file for the merged report")
    arguments = parser.parse_args(argv)
    if repeated := [path for path in arguments.reports if arguments.reports.count(path) > 1]:
        raise UserError(f"{repeated[0]} is given twice: give each report once")
    outputs = {} if arguments.output is None else {"--output": arguments.output}
    with guarded(outputs, inputs=arguments.reports):
        merged = merge_pairs({path: read_report(path) for path in arguments.reports})
        for path in outputs.values():
            write_json(merged, path)
    print(
        f"{merged['model']}: {merged['protocol']}\nmean ± sample standard deviation, n={merged['n']}\n"
    )
    print("\n\n".join(table for table in (merged_table(merged), paper_beside(merged)) if table))
    if arguments.output:
        print(f"written to {arguments.output}")
    return merged


main = command(run)
