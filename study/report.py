"""Write the tables of all studies into study/results/STUDY.md, and draw the figures.

    python -m study.report
    python -m study.report --check

Everything comes from the result files in `study/results/`. `--check` writes nothing and ends
with status 1 if the page or a figure is not what the results say.
"""

import argparse
import statistics
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from dap_transformers.commands.safeguards import command
from dap_transformers.files import read_json
from dap_transformers.tables import markdown_table
from study.cost_table import HEADER, cost_rows
from study.reading import read_studies
from study.recipes import TRAIN
from study.statistics import (
    EDITS,
    ORDER,
    START,
    Measure,
    Spread,
    Study,
    ablated,
    alignment_measures,
    bootstrap_interval,
    label_of,
    measures,
    pooled_sd,
    spread,
    t_interval,
)
from study.study_figures import is_drawn, pictures, save

ROOT = Path(__file__).resolve().parent.parent
PAGE = "study/results/STUDY.md"
FIGURES = "docs/figures"
ABSENT = "–"
NOT_RUN = "Not run yet."
table = partial(markdown_table, numbers=True)
Row = list[str | int]

INTRODUCTION = """# All tables of the study

This page is generated from the result files beside it by `python -m study.report`.
[Does it hold?](../../docs/reproduction.md) says what the numbers mean.

How to read the tables:

- Numbers are percentages: mean ± standard deviation (n − 1) over seeds. A single seed has no
  deviation. `(n=1)` marks a number that fewer seeds have than the run.
- Differences are between equal seeds. They stand by seed, with the 95% interval of their mean by a
  paired t-test over seeds. It is wide, because there are three seeds.
- For errors and AER (alignment error rate), lower is better.
- *Held-out training pairs*: retrieval among 30 pairs of each language, both directions. Those of
  seed 0 chose the learning rates.
- *Hard negatives*: XNLI premises with a copy of each English sentence in which a rule changed one
  word (xsim++). The error is the share of sentences whose nearest neighbour is wrong.
- *BUCC*: the zh-en sample with 257 gold pairs. The threshold is chosen on that sample.
- *Multilingual pool*: share of queries whose translation is nearest, if the other sentences of the
  query's language are candidates as well.
- *XNLI*: fine-tuned on a few thousand pairs, so accuracies are near chance (33) and differ more by
  seed than by method. They only show that the path works.
- *Same time*: the run takes as many steps as the other's CPU time allows. The time of training the
  heads before the run is not included.
"""
#: Study -> what it is.
ABOUT = {
    "warm": "From multilingual-e5-small in 4 bits, with heads trained beforehand on 57,600 pairs.",
    "edits": "The same on another sample of the text. BOW heads trained beforehand. Some runs also "
    "rank copies of the target with one word changed.",
    "tune": "From multilingual-e5-small in 4 bits: the temperature of TR, and copies of the target "
    "with one word changed. Equal CPU time, one seed. Evaluated on text that `total-cost` does not "
    "have: 400 sentences of news (NTREX-128) and 100 Tatoeba pairs per language.",
    "total-cost": "From multilingual-e5-small in 4 bits, at the setting that won in `tune`. Every "
    "seed trains its own heads, and their time counts. News: the first 300 sentences of NTREX-128 "
    "in 4 languages. Tatoeba: the first 60 pairs per language.",
    "large": "From multilingual-e5-small in 4 bits, on one H200, one seed. It uses the test sets "
    "of `long`.",
    "long": "From multilingual-e5-small in 4 bits, two hours of one CPU core, one seed. News: the "
    "first 300 sentences of NTREX-128 in 4 languages. Tatoeba, premises and BUCC: as in `warm`.",
    "e5": "From multilingual-e5-small in 4 bits, with randomly initialised heads.",
    "mini": "From 4 layers of 128, made by masked language modelling on 102,400 pairs.",
    "mini-long": "From the encoder of `mini`, with mean pooling and 7 times as many pairs.",
    "mini-longer": "From the encoder of `mini` after twice the masked language modelling, with "
    "mean pooling. The prediction heads start from its masked-LM head.",
}
#: Results that today's code cannot make again, and numbers of scripts that are gone.
NOTES = """- `warm`, `dap-sampled` drew 4,096 ids of the vocabulary for each RTL loss. The
  option is gone.
- `ablations`, `head-warmup` trained the heads first within the run. The option is gone.
- `ablations`, `release-gather` simulated the gradients of 8 processes of the released code
  (`experiments/release.py` at commit 3d2a6b3).
- `tune` and `total-cost` name commits of a branch that was rebased later. Their code is that of the
  commits from 0744751 to df3ab09, which train these objectives alike.
- The entropy of the target tokens is 6.88 nats for the vocabulary of `e5` and 6.77 for that of
  `mini` (`experiments/unigram.py` at commit 3d2a6b3). It is the RTL loss of a head that knows only
  how frequent tokens are."""


def number(found: Spread | None, seeds: int, sign: str = "") -> str:
    """Format a result over seeds, such as `88.61 ± 0.12`.

    If only some of the run's seeds have the result, their number follows.

    >>> number(Spread(88.613, 0.12, 2), 2), number(Spread(0.5, None, 1), 3, "+")
    ('88.61 ± 0.12', '+0.50 (n=1)')
    >>> number(Spread(-0.001, None, 1), 1, "+")  # no negative zero
    '+0.00'

    Args:
        found: mean and standard deviation of the result. None gives a dash (`ABSENT`).
        seeds: number of seeds of the run.
        sign: "+" also writes the sign of positive means, for differences.
    """
    if found is None:
        return ABSENT
    mean = round(found.mean, 2) + 0.0
    text = f"{mean:{sign}.2f}"
    if found.sd is not None:
        text += f" ± {found.sd:.2f}"
    return text if found.count == seeds else f"{text} (n={found.count})"


def paragraph(text: str) -> str:
    """Return a text as one paragraph, wrapped at 100 characters."""
    words = " ".join(text.split())
    return textwrap.fill(words, 100, break_long_words=False, break_on_hyphens=False)


# ------------------------------------------------------------------------------- main comparisons


def study_section(study: Study, images: Mapping[str, str]) -> str:
    """Return the Markdown section of a study that compares methods, with its tables and figures.

    The tables show the runs with equal pairs, the runs with equal CPU time, the cost of a step, and
    word alignment. A study without outcomes only has a heading and "Not run yet."

    Args:
        study: the study.
        images: file name of a figure -> Markdown that shows it. Figures of other studies are
            ignored.
    """
    heading = f"## {study.name}\n\n{ABOUT.get(study.name, '')}".strip()
    if not study.outcomes:
        return f"{heading}\n\n{NOT_RUN}"
    rows = measures(study)
    runs = study.main_runs()
    methods = {label: name for label, name in runs.items() if label in ORDER}
    others = {label: name for label, name in runs.items() if label not in methods}
    in_total = any(run.total_time_as for run in study.recipe.runs.values())
    if in_total:
        title = "Equal total CPU time, heads included"
    else:
        title = "Equal pairs" if have_equal_pairs(study, methods) else "All methods"
    parts = [heading, f"### {title}", runs_table(study, methods), values_table(study, methods)]
    base = next((label for label in ("TR", "TR" + EDITS) if label in methods), None)
    if base is not None:
        parts += [f"Differences from {base}:", differences_table(study, methods, base, rows)]
        parts.append(bootstrap_table(study, methods, base))
    if in_total:
        parts += ["What the trainings cost:", total_cost_table(study)]
    if others:
        parts += ["### Controls and variants", runs_table(study, others)]
        parts.append(values_table(study, others))
        for label, group in by_base(study, others, methods, base).items():
            parts += [f"Differences from {label}:", differences_table(study, group, label, rows)]
    for timed, same in study.same_time_runs().items():
        parts += [f"### Equal CPU time, that of `{timed}`", runs_table(study, same)]
        base = next(iter(same))
        parts += [f"Differences from {base}:", differences_table(study, same, base, rows)]
    if study.step_seconds:
        parts += ["### CPU seconds of a training step", cost_of_steps(study)]
    if alignment_measures(study):
        parts += ["### Word alignment", alignment_tables(study)]
    names = (f"comparison-{study.name}.svg", f"loss-{study.name}.svg")
    parts += [images[name] for name in names if name in images]
    return "\n\n".join(part for part in parts if part)


def by_base(
    study: Study, others: Mapping[str, str], methods: Mapping[str, str], base: str | None
) -> dict[str, dict[str, str]]:
    """Group controls and variants by the method that they are compared with.

    This is the method whose settings the recipe copies (`like`), or else the base. Runs with less
    than two seeds are left out.

    Args:
        study: the study.
        others: label in tables -> name of a run that is no main method.
        methods: the same for the main methods.
        base: label of the base, such as "TR". None leaves out the runs that copy no method.

    Returns:
        Label of a method -> the runs of its table (label -> name), with the method itself first.
    """
    labels = {name: label for label, name in methods.items()}
    groups: dict[str, dict[str, str]] = {}
    for label, name in others.items():
        compared = labels.get(study.recipe.runs[name].like, base)
        if compared is not None and len(study.final(name)) > 1:
            group = groups.setdefault(compared, {compared: methods[compared]})
            group[label] = name
    return groups


def have_equal_pairs(study: Study, runs: Mapping[str, str]) -> bool:
    """Tell whether all trained runs have seen the same number of pairs.

    Args:
        study: the study.
        runs: label -> name of a run.
    """
    pairs = set()
    for label, name in runs.items():
        if label != START:
            pairs |= {each.steps * each.pairs_per_step for each in study.final(name)}
    return len(pairs) <= 1


def runs_table(study: Study, runs: Mapping[str, str]) -> str:
    """Return a Markdown table with a row per run: seeds, learning rate, steps and pairs.

    Args:
        study: the study.
        runs: label in tables -> name of a run.
    """
    rows: list[Row] = []
    for label, name in runs.items():
        outcomes = study.final(name)
        rate = study.rate(study.recipe.runs[name])
        steps = sorted({each.steps for each in outcomes})
        pairs = sorted({each.steps * each.pairs_per_step for each in outcomes})
        row = [
            label,
            f"`{name}`",
            len(outcomes) or "not run",
            f"{rate:g}" if rate else ABSENT,
            ", ".join(f"{each:,}" for each in steps) or ABSENT,
            ", ".join(f"{each:,}" for each in pairs) or ABSENT,
        ]
        rows.append(row)
    return table(["", "run", "seeds", "learning rate", "steps", "pairs"], rows)


def values_table(study: Study, runs: Mapping[str, str]) -> str:
    """Return a Markdown table of results, with a row per measure and a column per run.

    Measures that no run has are left out.

    Args:
        study: the study.
        runs: label in tables -> name of a run.
    """
    rows: list[Row] = []
    for measure in measures(study):
        cells = []
        for name in runs.values():
            cells.append(number(study.spread(name, measure), len(study.final(name))))
        if any(cell != ABSENT for cell in cells):
            rows.append([measure.label, *cells])
    return table(["", *runs], rows)


def differences_table(
    study: Study, runs: Mapping[str, str], base: str, rows: Sequence[Measure]
) -> str:
    """Return a Markdown table of differences from a base run, with a row per measure.

    Each run has three columns: the mean difference, the difference of each seed, and the 95%
    interval of the mean.

    Args:
        study: the study.
        runs: label in tables -> name of a run. The base run and the start encoder get no columns.
        base: label of the base run.
        rows: the measures. Those without differences are left out.

    Returns:
        The table, or "" if there are no differences yet.
    """
    others = [label for label in runs if label not in (base, START)]
    lines: list[Row] = []
    for measure in rows:
        cells = []
        for label in others:
            cells += difference_cells(study, runs[label], runs[base], measure)
        if any(cell != ABSENT for cell in cells):
            lines.append([measure.label, *cells])
    if not lines:
        return ""
    titles = []
    for label in others:
        titles += [f"{label} − {base}", "by seed", "95%"]
    return table(["", *titles], lines)


def difference_cells(study: Study, name: str, base: str, measure: Measure) -> list[str]:
    """Return three cells: mean difference of the same seeds, difference by seed, 95% interval.

    Args:
        study: the study.
        name: name of the run.
        base: name of the run that is subtracted.
        measure: what is compared.
    """
    found = list(study.differences(name, base, measure).values())
    mean = number(spread(found), len(study.final(name)), "+")
    return [mean, listed(found), listed(t_interval(found) or ())]


def bootstrap_table(study: Study, runs: Mapping[str, str], base: str) -> str:
    """Return Markdown with the 95% intervals of differences from a base run.

    They come from a bootstrap over seeds and sentences (`bootstrap_interval`).

    Args:
        study: the study.
        runs: label in tables -> name of a run.
        base: label of the base run.

    Returns:
        A sentence and a table with a row per measure. "" if no measure has values by sentence.
    """
    others = [label for label in runs if label not in (base, START)]
    lines: list[Row] = []
    for measure in measures(study):
        cells = []
        for label in others:
            found = study.sentence_differences(runs[label], runs[base], measure)
            cells.append(listed(bootstrap_interval(found)) if found else ABSENT)
        if any(cell != ABSENT for cell in cells):
            lines.append([measure.label, *cells])
    if not lines:
        return ""
    titles = [f"{label} − {base}" for label in others]
    note = "95% intervals of the mean difference by a bootstrap that draws seeds and sentences:"
    return f"{note}\n\n{table(['', *titles], lines)}"


def total_cost_table(study: Study) -> str:
    """Return a Markdown table of what each run cost in all: steps, pairs and CPU seconds.

    The cost of training the heads has its own columns and is part of the total. Its CPU seconds
    were measured in each run. The seconds of the other steps come from `study.step_cost`.
    Runs without outcomes or without such a measurement are left out.
    """
    rows: list[Row] = []
    for name, run in study.recipe.runs.items():
        outcomes = study.final(name)
        step = study.step_seconds.get(study.recipe.measured_for(run).name)
        if not outcomes or step is None or label_of(run) == START:
            continue
        heads = [each.settings.get("heads", {}) for each in outcomes]
        seconds = statistics.fmean(each.get("cpu_seconds", 0.0) for each in heads)
        steps = outcomes[0].steps
        row = [
            label_of(run) if run.command == TRAIN else name,
            f"{heads[0].get('steps', 0):,}",
            f"{heads[0].get('pairs', 0):,}",
            f"{seconds:.0f}",
            f"{steps:,}",
            f"{steps * outcomes[0].pairs_per_step:,}",
            f"{steps * step:.0f}",
            f"{seconds + steps * step:.0f}",
        ]
        rows.append(row)
    header = ["", "steps of the heads", "their pairs", "CPU seconds", "steps", "pairs"]
    return table([*header, "CPU seconds", "in all"], rows)


def listed(values: Sequence[float]) -> str:
    """Format numbers with signs, separated by commas. No numbers give a dash (`ABSENT`)."""
    cells = [number(Spread(value, None, 1), 1, "+") for value in values]
    return ", ".join(cells) or ABSENT


def cost_of_steps(study: Study) -> str:
    """Return a Markdown table of the CPU seconds of a training step, and the ratio to run `tr`."""
    rows: list[Row] = []
    base = study.step_seconds.get("tr")
    for name, seconds in study.step_seconds.items():
        ratio = f"{seconds / base:.2f}" if base else ABSENT
        rows.append([f"`{name}`", f"{seconds:.3f}", ratio])
    return table(["", "seconds", "/ TR"], rows)


def alignment_tables(study: Study) -> str:
    """Return a Markdown table of all results of word alignment, and the error rate per language.

    It has a column for each main run with such results.
    """
    rows = alignment_measures(study)
    runs = {}
    for label, name in study.main_runs().items():
        if any(study.spread(name, row) for row in rows):
            runs[label] = name
    codes: set[str] = set()
    for outcome in study.outcomes:
        codes.update(outcome.results.get("alignment", {}).get("languages", {}))
    for code in sorted(codes):
        path = f"alignment/languages/{code}/AER"
        rows.append(Measure(f"AER, {code}", (path,), lower_is_better=True))
    lines: list[Row] = []
    for row in rows:
        cells = [number(study.spread(name, row), len(study.final(name))) for name in runs.values()]
        lines.append([row.label, *cells])
    return table(["", *runs], lines)


def paper_section(studies: Sequence[Study]) -> str:
    """Return a Markdown section with the paper's results, for the studies' measures that it has."""
    papers = {}
    for study in studies:
        if study.is_comparison:
            for measure in measures(study):
                papers[measure.label] = measure.paper
    models = []
    for encoder in ("mBERT", "XLM-R"):
        models += [encoder, f"{encoder}+TR", f"{encoder}+TR+TLM", f"{encoder}+DAP"]
    lines: list[Row] = []
    for label, paper in papers.items():
        numbers = [paper.get(model) for model in models]
        cells = [ABSENT if each is None else f"{each:.1f}" for each in numbers]
        if paper:
            lines.append([label, *cells])
    note = """Encoders of base size, 100,000 steps of 1,024 pairs. The paper calls the BUCC numbers
    those of the training set, but they are possible only for the sample split. Its XNLI models were
    fine-tuned on MultiNLI, ours on a few thousand pairs."""
    return f"## The paper's numbers\n\n{paragraph(note)}\n\n{table(['', *models], lines)}"


# -------------------------------------------------------------------------- searches and ablations


def search_section(studies: Sequence[Study]) -> str:
    """Return a Markdown section with the held-out accuracy of every learning rate tried."""
    note = """Accuracy on held-out pairs of the training text, mean of both directions and all
    languages, first seed. **Bold**: the chosen rate."""
    parts = ["## Learning rates", paragraph(note)]
    for study in studies:
        rows: list[Row] = []
        for label, name in study.main_runs().items():
            run = study.recipe.runs[name]
            if run.is_searched:
                rows.append([label, *search_cells(study.search(run), study.rate(run))])
        if rows:
            rates = [f"{rate:g}" for rate in study.recipe.learning_rates]
            parts += [f"**{study.name}**", table(["", *rates], rows)]
    return "\n\n".join(parts)


def search_cells(found: Mapping[float, float | None], chosen: float | None) -> list[str]:
    """Return a cell per learning rate with its accuracy, in bold for the chosen rate.

    Args:
        found: learning rate -> accuracy in percent, None if the training has not ended.
        chosen: the chosen learning rate. None while the search is not complete.
    """
    cells = []
    for rate, accuracy in found.items():
        cell = ABSENT if accuracy is None else f"{accuracy:.2f}"
        cells.append(f"**{cell}**" if rate == chosen else cell)
    return cells


def ablation_section(study: Study, images: Mapping[str, str]) -> str:
    """Return the Markdown section of a study whose runs each change one setting of its run `base`.

    Args:
        study: the study.
        images: file name of a figure -> Markdown that shows it.
    """
    heading = f"## {study.name}"
    if not study.outcomes:
        return f"{heading}\n\n{NOT_RUN}"
    parts = [heading, paragraph(ablation_note(study)), ablation_table(study)]
    if f"{study.name}.svg" in images:
        parts.append(images[f"{study.name}.svg"])
    return "\n\n".join(parts)


def ablation_note(study: Study) -> str:
    """Return a text on how to read the ablations: how much a single seed varies by chance."""
    deviations = []
    for measure in ablated(study):
        spreads = [spread(each.values()) for each in study.minus_base(measure).values()]
        several = [each for each in spreads if each and each.sd is not None]
        if several:
            deviations.append(f"{pooled_sd(several):.2f} ({measure.label})")
    size = ", ".join(deviations) or "an unknown size"
    return f"""Each run changes one setting of `base`, from the encoder of `mini`. Differences are
    between equal seeds. The difference of a single seed has a standard deviation of {size},
    estimated from the runs with several seeds."""


def ablation_table(study: Study) -> str:
    """Return a Markdown table of an ablation study, with a row per run.

    Each measure has two columns: the value, and the difference from the run `base`. A run is named
    GROUP-VALUE. Only the first row of a group names the group.
    """
    columns = ablated(study)
    rows: list[Row] = []
    before = None
    for name in sorted(study.recipe.runs, key=lambda name: name != "base"):
        group, _, value = name.partition("-")
        seeds = len(study.final(name))
        cells = []
        for measure in columns:
            difference = spread(study.minus_base(measure).get(name, {}).values())
            cells.append(number(study.spread(name, measure), seeds))
            cells.append(number(difference, seeds, "+"))
        rows.append([group if group != before else "", value, seeds or "not run", *cells])
        before = group
    titles = []
    for measure in columns:
        titles += [measure.label, "minus base"]
    return table(["", "", "seeds", *titles], rows)


# ----------------------------------------------------------------------- what was run, and where


def cost_section(path: Path) -> str:
    """Return a Markdown section with our cost of each objective beside the paper's Table 6.

    Args:
        path: file that `python -m benchmarks.flops --json FILE` wrote. If it does not exist, the
            section says "Not run yet."
    """
    heading = "## Cost"
    if not path.is_file():
        return f"{heading}\n\n{NOT_RUN}"
    content = read_json(path)
    arguments = content["arguments"]
    machine = content["machine"]
    note = f"""Forward products of one pair of {arguments["tokens"]} tokens per sentence, encoder of
    size `{arguments["size"]}`. CPU time is that of a step, forward and backward, of
    {arguments["batch_size"]} such pairs on {machine["cpu"]}, {machine["threads"]} thread. The
    paper's latency was measured on 8 V100. Command: `python -m benchmarks.flops --json FILE`."""
    rows = cost_rows(content["pair"], arguments["batch_size"])
    return f"{heading}\n\n{paragraph(note)}\n\n{table(HEADER, rows)}"


def missing_section(studies: Sequence[Study]) -> str:
    """Return a Markdown section that lists what the recipes ask for and no result file has."""
    lines = []
    for study in studies:
        if not study.outcomes:
            lines.append(f"- `{study.name}`: nothing was run")
            continue
        for name, parts in study.missing().items():
            lines.append(f"- `{study.name}`, `{name}`: {'; '.join(parts)}")
    text = "\n".join(lines) or "Everything that the recipes ask for was run."
    return f"## What was not run\n\n{text}"


def machine_section(studies: Sequence[Study]) -> str:
    """Return a Markdown section with the machines, library versions and commits of all results."""
    machines = []
    versions = []
    commits = []
    for study in studies:
        for outcome in study.outcomes:
            settings = outcome.settings
            machines.append(settings["machine"])
            found = settings["versions"].items()
            versions.append(" ".join(f"{name} {version}" for name, version in found))
            commits.append(settings["commit"])
    if not machines:
        return f"## Machine\n\n{NOT_RUN}"
    lines = [
        f"{len(machines)} trainings.",
        f"Machine: {counted(machines)}.",
        f"Versions: {counted(versions)}.",
        f"Commits: {counted(commits)}.",
    ]
    return "## Machine\n\n" + "\n\n".join(lines)


def counted(words: Sequence[str]) -> str:
    """Return a text that lists each distinct text once with its count, the most frequent first.

    The count is left out if all texts are the same. There must be at least one text.

    >>> counted(["a", "b", "b"])
    'b (2), a (1)'
    """
    counts = Counter(words).most_common()
    if len(counts) == 1:
        return counts[0][0]
    return ", ".join(f"{word} ({count})" for word, count in counts)


# ------------------------------------------------------------------------------------------ files


def study_page(studies: Sequence[Study], images: Mapping[str, str], results_dir: Path) -> str:
    """Return the Markdown text of STUDY.md, the page with all tables.

    Args:
        studies: all studies.
        images: file name of a figure -> Markdown that shows it.
        results_dir: folder of the result files, which may have `cost.json`.
    """
    parts = [INTRODUCTION.strip(), "## Where some rows came from", NOTES, paper_section(studies)]
    parts += [study_section(study, images) for study in studies if study.is_comparison]
    parts.append(search_section(studies))
    parts += [ablation_section(study, images) for study in studies if study.is_ablation]
    parts += [cost_section(results_dir / "cost.json"), missing_section(studies)]
    parts.append(machine_section(studies))
    return "\n\n".join(parts) + "\n"


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Write the page and the figures, or with `--check` only compare them with the results.

    With `--check` the process exits with status 1 if something is not as the results say.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="folder laid out like this repository"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with status 1 if it would"
    )
    args = parser.parse_args(argv)
    results = args.root / "study" / "results"
    figures = args.root / FIGURES
    page = args.root / PAGE
    studies = read_studies(args.root / "study" / "recipes", results)
    drawn = pictures(studies)

    images = {}
    for name, picture in drawn.items():
        images[name] = f"![{picture.caption}](../../{FIGURES}/{name})"
    text = study_page(studies, images, results)
    changes = []
    if not page.is_file() or page.read_text(encoding="utf-8") != text:
        changes.append(str(page))
    for name, picture in drawn.items():
        if not is_drawn(picture, figures / name):
            changes.append(str(figures / name))

    if args.check and changes:
        lines = "\n".join(changes)
        sys.exit(f"error: not what the results say:\n{lines}\nrun `python -m study.report`")
    if not args.check:
        page.write_text(text, encoding="utf-8")
        for name, picture in drawn.items():  # all: a digest does not tell how a figure was drawn
            save(picture, figures / name)
    lines = [f"written: {each}" for each in changes]
    print("\n".join(lines) or "everything is as the results say")


if __name__ == "__main__":
    main()
