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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.cost import cost_block
from experiments.markdown import Cell, filled, paragraph, table
from experiments.plots import Picture, digest_of, pictures, save
from experiments.reading import read_studies
from experiments.statistics import (
    LABELS,
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
RULE = """Percent, mean ± standard deviation (n − 1) over the seeds; (n=1) marks what fewer seeds have than the run,
and a single seed has no deviation. **Bold**: the best mean of the trained models, if it is ahead of the next by more
than twice the pooled standard deviation of the two, and both have three seeds or more, not all equal. Differences are
of equal seeds. AER: lower is better."""
PAPER = """The paper's columns are its own numbers, of encoders of base size, 36 languages and 100,000 steps on 8 GPUs;
its BUCC is the training split, and its XNLI is fine-tuned on MultiNLI."""


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


def comparison(study: Study, runs: Mapping[str, str], rows: Sequence[Measure], with_paper: bool = False) -> str:
    """A row a measure, a column a run, DAP minus TR by seed, and the paper's runs in columns of their own."""
    printed = [label for label in runs if label in (START, *LABELS.values())]
    papers = [f"paper, {name}: {' / '.join(map(_short, printed))}" for name in PAPER_ENCODERS if with_paper]
    paired = ["DAP − TR", "by seed"] if {"DAP", "TR"} <= set(runs) else []
    lines = [[title, *cells, *[""] * len(paired + papers)] for title, cells in _training(study, runs).items()]
    for measure in rows:
        line = [measure.label, *_cells(study, runs, measure)]
        line += _paired(study, runs["DAP"], runs["TR"], measure) if paired else []
        lines.append(line + [_printed(name, printed, measure) for name in PAPER_ENCODERS if with_paper])
    return table(["", *runs, *paired, *papers], lines)


def _short(label: str) -> str:
    return "encoder" if label == START else label


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
    """The mean difference of equal seeds, and every one of them."""
    found = study.differences(name, base, measure)
    by_seed = ", ".join(number(Spread(value, None, 1), 1, "+") for value in found.values()) or ABSENT
    return [number(spread(found.values()), len(study.final(name)), "+"), by_seed]


def _printed(encoder: str, runs: Sequence[str], measure: Measure) -> str:
    """The paper's numbers of the same runs, as it prints them."""
    names = [encoder if label == START else f"{encoder}+{label}" for label in runs]
    numbers = [measure.paper.get(name) for name in names]
    return " / ".join(ABSENT if each is None else f"{each:.1f}" for each in numbers) if any(numbers) else ABSENT


def comparison_block(study: Study, images: Mapping[str, str]) -> str:
    """A study's comparison for the same pairs and for the same time, with its plots."""
    if not study.outcomes:
        return NOT_RUN
    rows = measures(study)
    parts = ["**The same number of pairs**", comparison(study, study.main_runs(), rows, with_paper=True)]
    if runs := study.same_time_runs():
        parts += ["**The same time as DAP** (steps by CPU time a step)", comparison(study, runs, rows)]
    parts += [paragraph(f"{RULE} {_size_of_tatoeba(study)} {PAPER}")]
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
        runs = study.main_runs()
        rows = alignment_measures(study)
        if rows:
            parts += [f"**{study.name}**", comparison(study, runs, rows), _alignment_by_language(study, runs)]
    return "\n\n".join([*parts, paragraph(RULE)]) if parts else NOT_RUN


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
    """The main comparisons in a dozen lines, and the commands that make them."""
    compared = [study for study in studies if study.is_comparison]
    columns = list(dict.fromkeys(short for study in compared for short in headline(study)))
    rows = [line for study in compared for line in _readme_rows(study, columns)]
    text = table(["", "seeds", *columns], rows) if rows else NOT_RUN
    sizes = " ".join(f"`{study.name}`: {size}" for study in compared if (size := _size_of_tatoeba(study)))
    note = f"""Percent, mean ± standard deviation over seeds; AER of token alignment: lower is better. {sizes} All
    tables, the paper's numbers beside them, plots, what was not run, and what ENCODER, DATA and LINKS are, is in
    [{docs}]({docs}). A recipe and these tables are made by"""
    commands = """```bash
python -m experiments.run experiments/recipes/e5.yaml --places encoder=ENCODER data=DATA links=LINKS --output_dir runs
python -m experiments.report
```"""
    return f"{text}\n\n{paragraph(note)}\n\n{commands}"


def _readme_rows(study: Study, columns: Sequence[str]) -> list[list[Cell]]:
    shown, rows = headline(study), []
    same_time = {f"{label}, time of DAP": name for label, name in study.same_time_runs().items() if label == "TR"}
    for label, name in {**study.main_runs(), **same_time}.items():
        if outcomes := [each for each in study.final(name) if each.content["evaluations"]]:
            found = [study.spread(name, shown[short]) if short in shown else None for short in columns]
            rows.append([f"{study.name}: {label}", len(outcomes), *(number(each, len(outcomes)) for each in found)])
    return rows


# ------------------------------------------------------------------------------------------------ files


def blocks(studies: Sequence[Study], images: Mapping[str, str]) -> dict[str, str]:
    """Name -> text of every block of docs/reproduction.md."""
    found = {f"comparison-{study.name}": comparison_block(study, images) for study in studies if study.is_comparison}
    return found | {
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


def main(argv: Sequence[str] | None = None) -> None:
    """The command: expected errors end it with status 1 and one message."""
    args = parse(argv)
    try:
        changes = run(args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    if args.check and changes:
        lines = "\n".join(changes)
        sys.exit(f"error: not what the results say:\n{lines}\nrun `python -m experiments.report`")
    print("\n".join(f"written: {each}" for each in changes) or "everything is as the results say")


if __name__ == "__main__":
    main()
