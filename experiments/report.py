"""Writes the tables of docs/reproduction.md and README.md, and the plots, from the result files and nothing else.

    python -m experiments.report
    python -m experiments.report --check

What stands between `<!-- begin NAME -->` and `<!-- end NAME -->` is made by this command; everything else is written
by hand and stays as it is. `--check` writes nothing and ends with status 1 where a file does not say what the results
say.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dap.commands import command
from experiments.cost import cost_block
from experiments.markdown import Cell, filled, paragraph, table
from experiments.plots import Picture, digest_of, pictures, save
from experiments.reading import read_studies
from experiments.statistics import (
    ORDER,
    PAPER_LABELS,
    START,
    Measure,
    Spread,
    Study,
    ablated,
    alignment_measures,
    clear_best,
    headline,
    measures,
    sd_of_differences,
    spread,
)

ROOT = Path(__file__).resolve().parent.parent
ABSENT, NOT_RUN = "–", "Not run yet."
PAPER_ENCODERS = ("mBERT", "XLM-R")
AGAINST_TR = ("DAP", "TR+BOW", "DAP+BOW", "TR+edits", "TR+BOW+edits")
#: Study -> the runs that README shows, at most six in all.
README_ROWS = {"warm": (START, "TR", "DAP", "TR+BOW"), "edits": ("TR", "TR+BOW+edits")}


def number(found: Spread | None, seeds: int, sign: str = "") -> str:
    """`88.61 ± 0.12`, marked where fewer seeds have it than the run.

    >>> number(Spread(88.613, 0.12, 2), 2), number(Spread(0.5, None, 1), 3, "+")
    ('88.61 ± 0.12', '+0.50 (n=1)')
    >>> number(Spread(-0.001, None, 1), 1, "+")  # no negative zero
    '+0.00'
    """
    if found is None:
        return ABSENT
    text = f"{round(found.mean, 2) + 0.0:{sign}.2f}" + ("" if found.sd is None else f" ± {found.sd:.2f}")
    return text if found.count == seeds else f"{text} (n={found.count})"


# ------------------------------------------------------------------------------------- main comparisons


def comparison(
    study: Study,
    runs: Mapping[str, str],
    rows: Sequence[Measure],
    heads: Mapping[str, list[Cell]] | None = None,
    against_tr: Collection[str] = AGAINST_TR,
) -> str:
    """A row a measure, a column a run, and those of `against_tr` minus TR: mean, by seed, 95% of draws.

    `heads` are rows above them.
    """
    against = [label for label in runs if label in against_tr and label != "TR" and "TR" in runs]
    paired = [title for label in against for title in (f"{label} − TR", "by seed", "95%")]
    lines: list[list[Cell]] = [[title, *cells, *[""] * len(paired)] for title, cells in (heads or {}).items()]
    for measure in rows:
        differences = [cell for label in against for cell in _paired(study, runs[label], runs["TR"], measure)]
        lines.append([measure.label, *_cells(study, runs, measure), *differences])
    return table(["", *runs, *paired], lines)


def _training(study: Study, runs: Mapping[str, str]) -> dict[str, list[Cell]]:
    """What the columns of a comparison are models of."""
    found = {name: study.final(name) for name in runs.values()}
    steps = [sorted({each.steps for each in outcomes}) for outcomes in found.values()]
    pairs = [sorted({each.steps * each.pairs_a_step for each in outcomes}) for outcomes in found.values()]
    rates = [study.rate(study.recipe.runs[name]) for name in runs.values()]
    return {
        "seeds": [len(outcomes) or "not run" for outcomes in found.values()],
        "learning rate": [f"{rate:g}" if rate else ABSENT for rate in rates],
        "steps": [", ".join(f"{each:,}" for each in cell) or ABSENT for cell in steps],
        "pairs seen": [", ".join(f"{each:,}" for each in cell) or ABSENT for cell in pairs],
    }


def _cells(study: Study, runs: Mapping[str, str], measure: Measure) -> list[str]:
    """A number a run, the clearly best one bold."""
    found = {label: study.spread(name, measure) for label, name in runs.items()}
    best = clear_best({label: each for label, each in found.items() if label != START}, measure.lower_is_better)
    cells = {label: number(each, len(study.final(runs[label]))) for label, each in found.items()}
    return [f"**{cell}**" if label == best else cell for label, cell in cells.items()]


def _paired(study: Study, name: str, base: str, measure: Measure) -> list[str]:
    """The mean difference of equal seeds, every one of them, and the interval over seeds and languages."""
    found, within = study.differences(name, base, measure), study.interval(name, base, measure)
    by_seed, ends = (
        ", ".join(number(Spread(value, None, 1), 1, "+") for value in values) or ABSENT
        for values in (found.values(), within or ())
    )
    return [number(spread(found.values()), len(study.final(name)), "+"), by_seed, ends]


def paper_block(studies: Sequence[Study]) -> str:
    """The paper's numbers for every measure of the studies that it has."""
    rows = {each.label: each.paper for study in studies if study.is_comparison for each in measures(study)}
    models = [
        name if label == START else f"{name}+{label}"
        for name in PAPER_ENCODERS
        for label in (START, *PAPER_LABELS.values())
    ]
    lines = [
        [label.replace(" sample", ""), *(f"{paper[model]:.1f}" if model in paper else ABSENT for model in models)]
        for label, paper in rows.items()
        if paper
    ]
    return table(["", *models], lines) if lines else NOT_RUN


def comparison_block(study: Study, images: Mapping[str, str]) -> str:
    """A study's comparison for the same pairs and for the same time, its other runs, and its plots."""
    if not study.outcomes:
        return NOT_RUN
    rows, runs = measures(study), study.main_runs()
    main = {label: name for label, name in runs.items() if label in ORDER}
    others = {label: name for label, name in runs.items() if label not in main}
    same_pairs = " ".join(["**The same number of pairs.**", _size_of_tatoeba(study)]).strip()
    parts = [same_pairs, comparison(study, main, rows, _training(study, main))]
    if others:
        measured = [row for row in rows if any(study.spread(name, row) for name in others.values())]
        parts += ["**Controls and variants.**", comparison(study, others, measured, _training(study, others))]
    for whose, runs in study.same_time_runs().items():
        shared = [row for row in rows if sum(study.spread(name, row) is not None for name in runs.values()) > 1]
        parts.append(f"**The same time as `{whose}`**, by CPU time a step.")
        parts.append(comparison(study, runs, shared, _training(study, runs), runs))
    names = [f"{kind}-{study.name}.svg" for kind in ("comparison", "loss")]
    return "\n\n".join(parts + [images[name] for name in names if name in images])


def _size_of_tatoeba(study: Study) -> str:
    reports = [each.content["evaluations"].get("tatoeba") for each in study.outcomes]
    sizes = {report["settings"].get("max_pairs") for report in reports if report}
    if not sizes:
        return ""
    cut = sizes.pop()
    return (
        f"Tatoeba: the first {cut} pairs of each language, which is easier than all." if cut else "Tatoeba: all pairs."
    )


def alignment_block(studies: Sequence[Study]) -> str:
    """What `experiments.alignment` measured, all of it and the AER of each language."""
    parts = []
    for study in studies:
        rows, runs = alignment_measures(study), study.main_runs()
        runs = {label: name for label, name in runs.items() if any(study.spread(name, row) for row in rows)}
        if rows:
            parts += [f"**{study.name}**", comparison(study, runs, rows), _alignment_by_language(study, runs)]
    return "\n\n".join(parts) if parts else NOT_RUN


def _alignment_by_language(study: Study, runs: Mapping[str, str]) -> str:
    reports = [each.content["evaluations"].get("alignment", {}) for each in study.outcomes]
    codes = sorted({code for report in reports for code in report.get("languages", {})})
    rows = [
        Measure(f"AER, {code}", (("alignment", "languages", code, "AER"),), lower_is_better=True) for code in codes
    ]
    return table(["", *runs], [[row.label, *_cells(study, runs, row)] for row in rows])


# ------------------------------------------------------------------------------ searches and ablations


def search_block(studies: Sequence[Study], images: Mapping[str, str]) -> str:
    """Held-out accuracy of every rate tried, the chosen one bold."""
    parts = []
    for study in studies:
        rows = []
        for label, name in study.main_runs().items():
            if (run := study.recipe.runs[name]).is_searched:
                found, chosen = study.search(run), study.rate(run)
                cells = [ABSENT if dev is None else f"{dev:.2f}" for dev in found.values()]
                rows.append(
                    [label, *(f"**{c}**" if rate == chosen else c for rate, c in zip(found, cells, strict=True))]
                )
        if rows:
            parts += [f"**{study.name}**", table(["", *(f"{rate:g}" for rate in study.recipe.learning_rates)], rows)]
    note = f"""Accuracy in percent on held-out pairs of the training text, mean of both directions and all languages,
    first seed. **Bold**: the rate taken, once all of a run's are there; {ABSENT}: not run."""
    return "\n\n".join([*parts, paragraph(note), *(images[name] for name in images if name == "learning-rates.svg")])


def ablation_block(studies: Sequence[Study], images: Mapping[str, str]) -> str:
    """Every ablation beside `base`, by group."""
    parts = []
    for study in studies:
        if study.is_ablation and study.outcomes:
            parts += [f"**{study.name}**", ablation_table(study), paragraph(ablation_note(study))]
            parts += [images[name] for name in images if name == f"{study.name}.svg"]
    return "\n\n".join(parts) or NOT_RUN


def ablation_note(study: Study) -> str:
    """What a difference is worth, as far as the runs with several seeds can tell."""
    note = "Percent; differences are of equal seeds."
    others = [name for name in study.recipe.runs if name != "base" and "base" in study.recipe.runs]
    found = {
        measure.label: sd_of_differences(study.differences(name, "base", measure).values() for name in others)
        for measure in ablated(study)
    }
    deviations = [
        f"{each[0]:.2f} ({label}; {each[1]} degree{'s' * (each[1] > 1)} of freedom)"
        for label, each in found.items()
        if each
    ]
    if not deviations:
        return f"{note} None has a second seed, so that it is not known how much of a difference is chance."
    return f"""{note} By the runs with several seeds, one seed's difference from `base` has a standard deviation of
    {", ".join(deviations)}."""


def ablation_table(study: Study) -> str:
    """A row a run, whose name is GROUP-VALUE; the group stands on its first row."""
    columns, has_base = ablated(study), "base" in study.recipe.runs
    rows, before = [], None
    for name in sorted(study.recipe.runs, key=lambda name: name != "base"):
        group, _, value = name.partition("-")
        seeds, cells = len(study.final(name)), []
        for measure in columns:
            cells.append(number(study.spread(name, measure), seeds))
            if has_base:
                found = spread(study.differences(name, "base", measure).values()) if name != "base" else None
                cells.append(number(found, seeds, "+"))
        rows.append([group if group != before else "", value, seeds or "not run", *cells])
        before = group
    titles = [title for measure in columns for title in (measure.label, "minus base")[: 1 + has_base]]
    return table(["", "", "seeds", *titles], rows)


# ------------------------------------------------------------------------------- what was run, and where


def missing_block(studies: Sequence[Study]) -> str:
    """Everything that a recipe asks for and that no result file has."""
    lines = []
    for study in studies:
        if not study.outcomes:
            lines.append(f"- `{study.name}`: nothing of it was run")
        else:
            lines += [f"- `{study.name}`, `{name}`: {what}" for name, what in study.missing().items()]
    return "\n".join(lines) or "Everything that the recipes ask for was run."


def machine_block(studies: Sequence[Study]) -> str:
    """Machines, versions and commits of all results in one line."""
    contents = [each.content for study in studies for each in study.outcomes]
    if not contents:
        return NOT_RUN
    machines = _counted([_machine(each.get("machine") or {}) for each in contents])
    versions = [
        " ".join(f"{name} {found}" for name, found in (each.get("versions") or {}).items()) for each in contents
    ]
    commits = [_short_commit(each.get("commit")) for each in contents]
    return f"{len(contents)} trainings. {machines}. {_counted(versions)}. From {_counted(commits)}."


def _machine(found: Mapping[str, Any]) -> str:
    return f"{found.get('gpu') or found.get('cpu', 'unknown')}, threads: {found.get('threads', 'unknown')}"


def _short_commit(name: str | None) -> str:
    if name is None:
        return "a commit that was not recorded"
    commit, dash, mark = name.partition("-")
    return commit[:7] + dash + mark


def _counted(words: Sequence[str]) -> str:
    """Each once, the most frequent first, with its number where there are several.

    >>> _counted(["a", "b", "b"])
    'b (2), a (1)'
    """
    counts = Counter(words).most_common()
    return ", ".join(f"{word} ({count})" if len(counts) > 1 else word for word, count in counts)


def readme_block(studies: Sequence[Study], docs: str) -> str:
    """The few rows of `README_ROWS`."""
    by_name = {study.name: study for study in studies if study.outcomes}
    compared = [by_name[name] for name in README_ROWS if name in by_name]
    columns = list(dict.fromkeys(short for study in compared for short in headline(study)))
    rows = [line for study in compared for line in _readme_rows(study, columns)]
    text = table(["", *columns], rows) if rows else NOT_RUN
    sizes = " ".join(f"`{study.name}`: {size}" for study in compared if (size := _size_of_tatoeba(study)))
    note = f"""Percent, mean ± standard deviation over seeds. {sizes} All tables and their commands:
    [{docs}]({docs})."""
    return f"{text}\n\n{paragraph(note)}"


def _readme_rows(study: Study, columns: Sequence[str]) -> list[list[Cell]]:
    shown, runs, rows = headline(study), study.main_runs(), []
    for label in README_ROWS[study.name]:
        if outcomes := study.final(runs[label]):
            found = [study.spread(runs[label], shown[short]) if short in shown else None for short in columns]
            rows.append([f"{study.name}: {label}", *(number(each, len(outcomes)) for each in found)])
    return rows


# ------------------------------------------------------------------------------------------------ files


def blocks(studies: Sequence[Study], images: Mapping[str, str]) -> dict[str, str]:
    """Name -> text of every block of docs/reproduction.md."""
    found = {f"comparison-{study.name}": comparison_block(study, images) for study in studies if study.is_comparison}
    return found | {
        "paper": paper_block(studies),
        "learning-rates": search_block(studies, images),
        "ablations": ablation_block(studies, images),
        "alignment": alignment_block([study for study in studies if study.is_comparison]),
        "missing": missing_block(studies),
        "machine": machine_block(studies),
    }


def stale_pictures(drawn: Mapping[str, Picture], folder: Path) -> list[str]:
    """Names of the plots that are not there, or show other numbers."""
    return [name for name, picture in drawn.items() if digest_of(folder / name) != picture.digest]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    experiments = ROOT / "experiments"
    parser.add_argument("--results_dir", type=Path, default=experiments / "results", help="what experiments.run wrote")
    parser.add_argument("--recipes_dir", type=Path, default=experiments / "recipes", help="what was to be run")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs" / "reproduction.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", help="folder of the plots")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with status 1 if anything would change"
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> list[str]:
    """Writes what differs from the results, or with `--check` only finds it; returns one line a file that differs.

    Raises:
        ValueError: result files, recipes or marks that do not fit.
        OSError: no such document.
    """
    studies = read_studies(args.recipes_dir, args.results_dir)
    drawn = pictures(studies)
    place = os.path.relpath(args.figures, args.docs.parent)
    images = {name: f"![{picture.caption}]({Path(place, name).as_posix()})" for name, picture in drawn.items()}
    link = Path(os.path.relpath(args.docs, args.readme.parent)).as_posix()
    cost = {"cost": cost_block(args.results_dir / "cost.json")}
    made = {
        args.docs: blocks(studies, images) | cost,
        args.readme: {"results-comparison": readme_block(studies, link)},
    }
    found = {path: filled(path.read_text(encoding="utf-8"), each, path) for path, each in made.items()}
    changes = [f"{path}: {', '.join(stale)}" for path, (_, stale) in found.items() if stale]
    redrawn = stale_pictures(drawn, args.figures)
    changes += [f"{args.figures / name}: the picture" for name in redrawn]
    if not args.check:
        for path, (text, stale) in found.items():
            if stale:
                path.write_text(text, encoding="utf-8")
        for name, picture in drawn.items():  # all, as the digest does not tell how they were drawn
            save(picture, args.figures / name)
    return changes


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    args = parse(argv)
    changes = run(args)
    if args.check and changes:
        lines = "\n".join(changes)
        sys.exit(f"error: not what the results say:\n{lines}\nrun `python -m experiments.report`")
    print("\n".join(f"written: {each}" for each in changes) or "everything is as the results say")


if __name__ == "__main__":
    main()
