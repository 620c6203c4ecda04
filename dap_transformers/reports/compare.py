"""Compare the results of several trainings, such as the settings of an ablation.

    python -m dap_transformers.reports --compare K=1:abl/k1-*.json K=2:abl/k2-*.json --format
    markdown

Each group is a name, a colon and files. The files are reports of the seeds of one training, or one
merged report. The first group is the one that the others are compared with.
"""

import csv
import glob
import io
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dap_transformers.errors import UserError
from dap_transformers.reports.merge import merge_pairs, numbers_of
from dap_transformers.reports.records import is_spread, read_report
from dap_transformers.reports.rendering import latex_table, markdown_table, text_table

FORMATS = ("text", "markdown", "latex", "csv")
#: Parts of a report that hold one language each.
SINGLE = ("languages", "hard_negatives", "dev")
#: Numbers of a report that are no result.
NO_RESULTS = ("pairs", "gold", "languages", "seed")

Metric = str  # name of a number with its place, such as "36 languages xx-en"


@dataclass
class Group:
    """The results of the seeds of one training.

    Attributes:
        name: what the tables call it, such as "K=1".
        by_seed: seed -> metric -> value. Empty for a merged report, which has no single seeds.
        means: metric -> mean over the seeds.
        deviations: metric -> sample standard deviation over the seeds, or None for one seed.
        count: number of seeds.
    """

    name: str
    by_seed: dict[Any, dict[Metric, float]] = field(default_factory=dict)
    means: dict[Metric, float] = field(default_factory=dict)
    deviations: dict[Metric, float | None] = field(default_factory=dict)
    count: int = 0


@dataclass(frozen=True)
class Difference:
    """How much a group is above the first group in one metric.

    Attributes:
        by_seed: seed -> difference, for the seeds that both groups have.
        mean: mean of these differences. Without common seeds, the difference of the means.
        deviation: sample standard deviation of the differences. None below two common seeds.
    """

    by_seed: dict[Any, float]
    mean: float
    deviation: float | None


# ---------------------------------------------------------------------------------------- reading


def files_of_groups(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Find the reports of all groups.

    Args:
        arguments: "NAME:PATTERN" each, such as "K=1:abl/k1-*.json". Further files of the group may
            follow as arguments without a name, as the shell makes of a pattern.

    Returns:
        Name of each group -> its files.
    """
    files: dict[str, list[str]] = {}
    name = None
    for argument in arguments:
        head, colon, pattern = argument.partition(":")
        if colon and pattern:
            name = head
        elif name is None:
            raise UserError(f"--compare {argument}: give a name first, such as K=1:{argument}")
        else:
            pattern = argument
        # A file's own name may hold the characters of a pattern.
        found = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern))
        if not found:
            raise FileNotFoundError(f"--compare {argument}: no such file")
        own = files.setdefault(name, [])
        own += [file for file in found if file not in own]
    if len(files) < 2:
        raise UserError("--compare needs two groups or more, such as K=1:a-*.json K=2:b-*.json")
    return files


def read_groups(files: Mapping[str, Sequence[str]], languages: bool = False) -> list[Group]:
    """Read the reports of all groups.

    Args:
        files: name of each group -> its files.
        languages: also take the numbers of single languages.
    """
    groups = []
    measured = {}
    for name, paths in files.items():
        reports = {path: read_report(path, merged=True) for path in paths}
        measured[name] = set()
        for report in reports.values():
            measured[name] |= _protocol_and_texts(report)
        groups.append(_group(name, reports, languages))

    first, *others = measured
    for other in others:
        if measured[other] != measured[first]:
            only = sorted(measured[other] ^ measured[first])
            raise UserError(
                f"{first} and {other} were not measured alike (protocol, hash of the text): "
                f"only one of them has {only[0]!r}; compare results on the same text"
            )
    return groups


def _protocol_and_texts(report: Mapping[str, Any]) -> set[str]:
    """Return the protocol of a report and the hashes of its texts, if it records them."""
    texts = report.get("settings", {}).get("text") or []
    return {report["protocol"], *([texts] if isinstance(texts, str) else texts)}


def _group(name: str, reports: Mapping[str, Mapping[str, Any]], languages: bool) -> Group:
    """Collect the numbers of the reports of one group."""
    merged_files = [path for path, report in reports.items() if "seeds" in report]
    if merged_files and len(reports) > 1:
        raise UserError(f"{merged_files[0]} is a merged report: give it alone for {name}")

    group = Group(name)
    merged = next(iter(reports.values())) if merged_files else merge_pairs(reports)
    group.count = merged["n"]
    for metric, value in _metrics(merged, languages).items():
        if is_spread(value):
            group.means[metric] = value["mean"]
            group.deviations[metric] = value["sd"]
    if not merged_files:
        for path, report in reports.items():
            seed = path if report.get("seed") is None else report["seed"]
            own = group.by_seed.setdefault(seed, {})  # mining has a report per language pair
            own |= _metrics(report, languages)
    return group


def _metrics(report: Mapping[str, Any], languages: bool) -> dict[Metric, Any]:
    """Return the numbers of a report by name, without counts."""
    found = {}
    for place, numbers in numbers_of(report):
        is_single = place[:1] in [(name,) for name in SINGLE] and place[1:2] != ("mean",)
        if is_single and not languages:
            continue
        words = place[1:] if place[:1] in (("averages",), ("pairs",), ("languages",)) else place
        for name, value in numbers.items():
            if name not in NO_RESULTS:
                found[" ".join([*words, name])] = value
    return found


# -------------------------------------------------------------------------------------- comparing


def difference(first: Group, other: Group, metric: Metric) -> Difference:
    """Return how much a group is above the first one, seed by seed where both have the seed.

    Args:
        first: the group to compare with.
        other: the group that is compared.
        metric: name of the number. Both groups must have it.
    """
    by_seed = {}
    for seed, numbers in other.by_seed.items():
        if seed in first.by_seed:
            by_seed[seed] = numbers[metric] - first.by_seed[seed][metric]
    if not by_seed:
        return Difference({}, other.means[metric] - first.means[metric], None)
    values = list(by_seed.values())
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Difference(by_seed, statistics.fmean(values), deviation)


def shared_metrics(groups: Sequence[Group]) -> list[Metric]:
    """Return the names of the numbers that all groups have, in the order of the first group."""
    first, *others = groups
    metrics = list(first.means)
    for group in others:
        metrics = [metric for metric in metrics if metric in group.means]
    if not metrics:
        raise UserError(
            "the groups have no number in common: compare reports of one evaluation, or add "
            "--languages for those of single languages"
        )
    return metrics


# ------------------------------------------------------------------------------------- the tables


def comparison(groups: Sequence[Group], format: str) -> str:
    """Format the means of all groups, and their differences from the first group.

    Numbers have two decimals. "90.50 ± 0.25" is a mean and its sample standard deviation.

    Args:
        groups: two or more groups. The first one is compared with.
        format: one of `FORMATS`. "csv" has one line per group, metric and seed, without rounding.
    """
    metrics = shared_metrics(groups)
    if format == "csv":
        return _csv(groups, metrics)

    first, *others = groups
    means = []
    for group in groups:
        cells = [_cell(group.means[name], group.deviations[name]) for name in metrics]
        means.append([group.name, group.count, *cells])
    tables = [(["mean ± deviation", "seeds", *metrics], means)]

    rows = []
    for group in others:
        found = {name: difference(first, group, name) for name in metrics}
        what = f"{group.name} − {first.name}"
        cells = [_cell(each.mean, each.deviation, sign="+") for each in found.values()]
        rows.append([what, *cells])
        for seed in next(iter(found.values())).by_seed:
            cells = [_cell(each.by_seed[seed], None, sign="+") for each in found.values()]
            rows.append([f"{what}, seed {seed}", *cells])
    tables.append((["difference", *metrics], rows))

    if format == "latex":
        return "\n\n".join(latex_table(header, rows) for header, rows in tables)
    if format == "markdown":
        return "\n\n".join(markdown_table(header, rows, numbers=True) for header, rows in tables)
    return "\n\n".join(text_table(header, rows) for header, rows in tables)


def _cell(mean: float, deviation: float | None, sign: str = "") -> str:
    """Format a mean and its deviation with two decimals.

    Values below 10, such as thresholds, also have two decimals, so that a column is aligned.

    >>> _cell(90.5, 0.25), _cell(1.5, None, sign="+")
    ('90.50 ± 0.25', '+1.50')
    """
    text = f"{mean:{sign}.2f}"
    return text if deviation is None else f"{text} ± {deviation:.2f}"


def _csv(groups: Sequence[Group], metrics: Sequence[Metric]) -> str:
    """Format all values as CSV, for a spreadsheet or for plots.

    Returns:
        Lines with group, metric, seed and value. The seed is "mean" or "deviation" in some lines.
        In lines of a difference the group is "K=2 - K=1".
    """
    first, *others = groups
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["group", "metric", "seed", "value"])
    for group in groups:
        for metric in metrics:
            for seed, numbers in group.by_seed.items():
                writer.writerow([group.name, metric, seed, numbers[metric]])
            writer.writerow([group.name, metric, "mean", group.means[metric]])
            if group.deviations[metric] is not None:
                writer.writerow([group.name, metric, "deviation", group.deviations[metric]])
    for group in others:
        name = f"{group.name} - {first.name}"
        for metric in metrics:
            found = difference(first, group, metric)
            for seed, value in found.by_seed.items():
                writer.writerow([name, metric, seed, value])
            writer.writerow([name, metric, "mean", found.mean])
            if found.deviation is not None:
                writer.writerow([name, metric, "deviation", found.deviation])
    return file.getvalue().rstrip("\n")
