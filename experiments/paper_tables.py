"""The paper's tables with the results of a recipe's runs on top.

A row of ours is the mean over the seeds of a run. "n" is their number. Where a cell shows a second
number, it is the standard deviation of the sample.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dap_transformers.evaluation.paper import (
    BUCC_HEADINGS,
    BUCC_PAIRS,
    BUCC_PROTOCOLS,
    DIRECTIONS,
    PAPER_BUCC,
    PAPER_COST,
    PAPER_DIRECTIONS,
    PAPER_TATOEBA,
    PAPER_TATOEBA_LANGUAGES,
    PAPER_XNLI,
    TATOEBA_GROUPS,
)
from dap_transformers.languages import NAMES, XNLI_LANGUAGES
from dap_transformers.reports.merge import merge_seeds, merged_table
from dap_transformers.reports.rendering import text_table
from experiments.recipes import Recipe
from experiments.statistics import spread

#: Reports of one seed of a run: name of the evaluation -> its JSON report.
Reports = Mapping[str, Mapping[str, Any]]
#: Reports of a recipe's finished evaluations: run -> seed -> reports.
Found = Mapping[str, Mapping[int, Reports]]
#: Function that returns the numbers of a row for one seed, None where one is missing.
Numbers = Callable[[Reports], list[float | None]]

#: Run of which Table 5, Figure 3 and Figure 4 change one option.
BASE = "mbert-dap"
#: Option that is changed -> its value in the base run, which is the default.
VARIED = {"rtl_direction": "source-to-target", "rtl_ratio": 1.0, "rtl_layers": 2}
#: Value of `rtl_direction` -> the paper's name of it.
DIRECTION_NAMES = {"source-to-target": "xx→en", "target-to-source": "en→xx", "both": "both"}
#: Tasks of Table 5, Figure 3 and Figure 4.
TASKS = ("Tatoeba", "BUCC", "XNLI")


def paper_tables(recipe: Recipe, found: Found) -> list[str]:
    """Format the paper's tables, as far as there are results.

    Args:
        recipe: the recipe of the runs.
        found: reports of the finished evaluations.

    Returns:
        A text per table, with a heading.
    """
    changed = {name for option in VARIED for name in variants(recipe, option).values()}
    main = {run: seeds for run, seeds in found.items() if run == BASE or run not in changed}
    tables = [_tatoeba_averages(main)]
    for split in PAPER_BUCC:
        tables.append(_bucc(main, split))
    tables.append(_xnli(main))
    tables.append(_variants_table("Table 5, directions of RTL", "rtl_direction", recipe, found))
    tables.append(_costs(found))
    for number, direction in enumerate(DIRECTIONS, 7):
        tables.append(_tatoeba_languages(main, direction, f"Table {number}"))
    tables.append(_variants_table("Figure 3, share of tokens", "rtl_ratio", recipe, found))
    tables.append(_variants_table("Figure 4, layers of the head", "rtl_layers", recipe, found))
    tables += _other_tables(found)
    return [table for table in tables if table]


# ---------------------------------------------------------------------------------- what they show


def retrieval(reports: Reports) -> Mapping[str, Any]:
    """Return a seed's report of the evaluation `tatoeba`, or {}.

    A report on the first pairs of each language cannot be compared with the paper.
    """
    report = reports.get("tatoeba", {})
    is_whole = report.get("settings", {}).get("max_pairs") is None
    return report if is_whole else {}


def is_xnli(report: Mapping[str, Any]) -> bool:
    """Tell whether a report is one of XNLI."""
    return "accuracy" in report.get("mean", {})


def bucc_split(report: Mapping[str, Any]) -> str | None:
    """Return the paper's split of BUCC that a report can be compared with, or None."""
    protocol = report.get("protocol", "").removeprefix("BUCC ").split(":")[0]
    return BUCC_PROTOCOLS.get(protocol)


def bucc_rows(reports: Reports, split: str) -> dict[str, list[float]]:
    """Return language pair -> (precision, recall, F1) in percent.

    Args:
        reports: reports of one seed.
        split: key of `PAPER_BUCC`.
    """
    rows = {}
    for report in reports.values():
        if bucc_split(report) == split:
            for pair, numbers in report["pairs"].items():
                rows[pair] = [numbers[key] for key in ("precision", "recall", "f1")]
    return rows


def task_means(reports: Reports) -> list[float | None]:
    """Return the numbers of one seed that Table 5, Figure 3 and Figure 4 show, in percent.

    Returns:
        - Tatoeba: accuracy, mean of both directions, over the largest group of languages.
        - BUCC: mean F1 of the four language pairs on the training split, which the paper calls
          test.
        - XNLI: mean accuracy.
    """
    tatoeba = xnli = None
    averages = retrieval(reports).get("averages", {})
    if averages:
        group = TATOEBA_GROUPS[-1] if TATOEBA_GROUPS[-1] in averages else [*averages][-1]
        tatoeba = statistics.fmean(averages[group][direction] for direction in DIRECTIONS)
    for report in filter(is_xnli, reports.values()):
        xnli = report["mean"]["accuracy"]
    rows = bucc_rows(reports, "training")
    bucc = mean_or_none([rows[pair][2] if pair in rows else None for pair in BUCC_PAIRS])
    return [tatoeba, bucc, xnli]


def variants(recipe: Recipe, option: str) -> dict[Any, str]:
    """Find the runs that differ from the base run in one option only.

    Args:
        recipe: the recipe.
        option: key of `VARIED`.

    Returns:
        Value of the option -> name of the run. Numbers are in ascending order. Empty if the recipe
        has no base run.
    """
    if BASE not in recipe.runs:
        return {}
    found = {VARIED[option]: BASE}
    for name, run in recipe.runs.items():
        arguments = dict(run.arguments)
        value = arguments.pop(option, None)
        if value is not None and arguments == recipe.runs[BASE].arguments:
            found[value] = name
    return found if option == "rtl_direction" else dict(sorted(found.items()))


# --------------------------------------------------------------------------------------- one table


def _tatoeba_averages(found: Found) -> str:
    """Format Table 1, or return an empty text without results."""
    groups = list(TATOEBA_GROUPS)
    for seeds in found.values():
        for reports in seeds.values():
            averages = retrieval(reports).get("averages", {})
            groups += [group for group in averages if group not in groups]
    header = ["Table 1, Tatoeba"]
    for arrow in DIRECTIONS.values():
        header += [f"{arrow} {group.removesuffix(' languages')}" for group in groups]

    def numbers(reports: Reports) -> list[float | None]:
        averages = retrieval(reports).get("averages", {})
        cells = []
        for direction in DIRECTIONS:
            cells += [averages.get(group, {}).get(direction) for group in groups]
        return cells

    paper = {}
    missing = [None] * (len(groups) - len(TATOEBA_GROUPS))
    for model, row in PAPER_TATOEBA.items():
        paper[model] = [*row["xx-en"], *missing, *row["en-xx"], *missing]
    return _table(header, our_rows(found, numbers, deviations=True), paper)


def _bucc(found: Found, split: str) -> str:
    """Format Table 2 or 3, or return an empty text without results.

    Args:
        found: reports of the finished evaluations.
        split: key of `PAPER_BUCC`.
    """
    header = [BUCC_HEADINGS[split]]
    for pair in BUCC_PAIRS:
        header += [f"{pair} P", "R", "F"]
    header.append("average F")

    def numbers(reports: Reports) -> list[float | None]:
        rows = bucc_rows(reports, split)
        cells: list[float | None] = []
        for pair in BUCC_PAIRS:
            cells += rows.get(pair, (None, None, None))
        return [*cells, mean_or_none(cells[2::3])]

    paper = {}
    for model, row in PAPER_BUCC[split].items():
        cells = [number for pair in BUCC_PAIRS for number in row[pair]]
        paper[model] = [*cells, row["average"][2]]
    return _table(header, our_rows(found, numbers), paper)


def _xnli(found: Found) -> str:
    """Format Table 4, or return an empty text without results."""

    def numbers(reports: Reports) -> list[float | None]:
        cells: list[float | None] = [None] * (len(XNLI_LANGUAGES) + 1)
        for report in filter(is_xnli, reports.values()):
            languages = report["languages"]
            cells = [languages.get(code, {}).get("accuracy") for code in XNLI_LANGUAGES]
            cells.append(mean_or_none(cells))
        return cells

    paper = {model: list(row.values()) for model, row in PAPER_XNLI.items()}
    header = ["XNLI (Table 4)", *XNLI_LANGUAGES, "average"]
    return _table(header, our_rows(found, numbers), paper)


def _variants_table(title: str, option: str, recipe: Recipe, found: Found) -> str:
    """Format what an option of RTL changes, or return an empty text without such runs.

    Args:
        title: heading of the first column.
        option: key of `VARIED`.
        recipe: the recipe of the runs.
        found: reports of the finished evaluations.
    """
    runs = variants(recipe, option)
    rows = []
    for value, run in runs.items():
        label = DIRECTION_NAMES.get(value, str(value))
        rows += our_rows({label: found.get(run, {})}, task_means, deviations=True)
    paper = {}
    if option == "rtl_direction":
        paper = {DIRECTION_NAMES[name]: list(row) for name, row in PAPER_DIRECTIONS.items()}
    else:
        paper = {f"{VARIED[option]}": list(PAPER_DIRECTIONS["source-to-target"])}
    return _table([title, *TASKS], rows if len(runs) > 1 else [], paper)


def _costs(found: Found) -> str:
    """Format Table 6 from a report of `benchmarks.flops`, or return an empty text without one."""
    for seeds in found.values():
        for report in seeds.get(0, {}).values():
            if "pair" not in report:
                continue
            arguments = report["arguments"]
            rows = []
            for name, (flops, milliseconds) in PAPER_COST.items():
                cost = report["pair"][name]
                ours = 1000 * cost["wall"] / arguments["batch_size"]
                cells = [f"{cost['flops'] / 1e9:.2f}", flops, f"{ours:.2f}", f"{milliseconds:.2f}"]
                rows.append([name, *cells])
            machine = report["machine"]
            title = f"Table 6, costs ({machine['gpu'] or machine['cpu']}; paper: 8 V100)"
            header = ["", "GFLOPs per pair", "paper", "ms per pair", "paper"]
            return f"{title}\n{text_table(header, rows)}"
    return ""


def _tatoeba_languages(found: Found, direction: str, title: str) -> str:
    """Format Table 7 or 8, with a row per language, or return an empty text without results.

    Args:
        found: reports of the finished evaluations.
        direction: "xx-en" or "en-xx".
        title: heading of the table.
    """
    columns: dict[str, dict[str, float]] = {}
    for run, seeds in found.items():
        by_language: dict[str, list[float]] = {}
        for reports in seeds.values():
            for code, numbers in retrieval(reports).get("languages", {}).items():
                by_language.setdefault(code, []).append(numbers[direction])
        if by_language:
            columns[run] = {code: statistics.fmean(each) for code, each in by_language.items()}
    if not columns:
        return ""

    codes = list(dict.fromkeys(code for column in columns.values() for code in column))
    for model, row in PAPER_TATOEBA_LANGUAGES.items():
        columns[f"paper: {model}"] = row[direction]
    rows = []
    for code in codes:
        rows.append(
            [f"{code} {NAMES.get(code, '')}", *(each.get(code) for each in columns.values())]
        )
    return text_table([f"{title}, Tatoeba {DIRECTIONS[direction]}", *columns], rows)


def _other_tables(found: Found) -> list[str]:
    """Format the numbers of evaluations that the paper does not have."""
    tables = []
    for run, seeds in found.items():
        names = dict.fromkeys(name for reports in seeds.values() for name in reports)
        for name in names:
            own = {f"seed {seed}": each[name] for seed, each in seeds.items() if name in each}
            if not any(is_of_paper(name, report) for report in own.values()):
                tables.append(f"{name}: {run}, n={len(own)}\n{merged_table(merge_seeds(own))}")
    return tables


def is_of_paper(name: str, report: Mapping[str, Any]) -> bool:
    """Tell whether a report is shown in one of the paper's tables.

    Args:
        name: name of the evaluation.
        report: its report.
    """
    is_tatoeba = bool(retrieval({name: report}))
    return is_tatoeba or is_xnli(report) or bucc_split(report) is not None or "pair" in report


# --------------------------------------------------------------------------------------- the rows


def our_rows(
    found: Found, numbers: Numbers, deviations: bool = False
) -> list[list[str | float | None]]:
    """Return a row per run: its name, and the mean of each number over the seeds.

    Runs without any number are left out.

    Args:
        found: reports of the finished evaluations.
        numbers: function that returns the numbers of one seed.
        deviations: also show the standard deviation of each number. Otherwise only the last has it.
    """
    rows = []
    for run, seeds in found.items():
        values = [numbers(reports) for reports in seeds.values()]
        values = [row for row in values if set(row) != {None}]
        if not values:
            continue
        cells: list[str | float | None] = [f"{run} (n={len(values)})"]
        columns = list(zip(*values, strict=True))
        for place, column in enumerate(columns, 1):
            is_last = place == len(columns)
            cells.append(
                _cell([each for each in column if each is not None], deviations or is_last)
            )
        rows.append(cells)
    return rows


def _cell(values: Sequence[float], deviation: bool) -> str | float | None:
    """Return the mean of values, also with their standard deviation, or None without values."""
    found = spread(values)
    if found is None:
        return None
    if deviation and found.sd is not None:
        return f"{found.mean:.1f} ± {found.sd:.1f}"
    return found.mean


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[Any]],
    paper: Mapping[str, Sequence[float | None]],
) -> str:
    """Format a table with our rows on top and the paper's below, or an empty text without ours."""
    if not rows:
        return ""
    printed = [[f"paper: {model}", *numbers] for model, numbers in paper.items()]
    return text_table(header, [*rows, *printed])


def mean_or_none(numbers: Sequence[float | None]) -> float | None:
    """Return the mean, or None if there are no numbers or one of them is None."""
    return None if None in numbers or not numbers else statistics.fmean(numbers)
