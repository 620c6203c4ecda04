"""Writes the tables of docs/reproduction.md and README.md, and the plots, from the result files and nothing else.

    python -m experiments.report
    python -m experiments.report --check

What stands between `<!-- begin NAME -->` and `<!-- end NAME -->` is made by this command; everything else is written
by hand and stays as it is. `--check` writes nothing and ends with status 1 where a file does not say what the results
say.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from dap.commands import command
from experiments.cost import cost_block
from experiments.markdown import Cell, filled, paragraph, table
from experiments.plots import is_drawn, pictures, save
from experiments.reading import read_studies
from experiments.statistics import (
    ORDER,
    START,
    Measure,
    Spread,
    Study,
    ablated,
    alignment_measures,
    clear_best,
    headline,
    measures,
    pooled_sd,
    spread,
)

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/reproduction.md"
ABSENT, NOT_RUN = "–", "Not run yet."
AGAINST_TR = ("TR+TLM", "DAP", "TR+BOW", "DAP+BOW", "TR+edits", "TR+BOW+edits")
#: Study -> the runs that README shows, at most six in all.
README_ROWS = {"mini-longer": ("TR", "TR+BOW", "DAP+BOW"), "warm": ("TR", "DAP", "TR+BOW")}


def number(found: Spread | None, seeds: int, sign: str = "") -> str:
    """`88.61 ± 0.12`, marked where fewer seeds have it than the run.

    >>> number(Spread(88.613, 0.12, 2), 2), number(Spread(0.5, None, 1), 3, "+")
    ('88.61 ± 0.12', '+0.50 (n=1)')
    >>> number(Spread(-0.001, None, 1), 1, "+")  # no negative zero
    '+0.00'
    """
    if found is None:
        return ABSENT
    text = f"{round(found.mean, 2) + 0.0:{sign}.2f}" + (
        "" if found.sd is None else f" ± {found.sd:.2f}"
    )
    return text if found.count == seeds else f"{text} (n={found.count})"


# ------------------------------------------------------------------------------------- main comparisons


def comparison(
    study: Study,
    runs: Mapping[str, str],
    rows: Sequence[Measure],
    against_tr: Collection[str] = AGAINST_TR,
    is_headed: bool = True,
) -> str:
    """A row a measure, a column a run, and those of `against_tr` minus TR: mean, by seed, 95% of draws.

    `is_headed`: what the runs' trainings were stands above.
    """
    against = [label for label in runs if label in against_tr and label != "TR" and "TR" in runs]
    paired = [title for label in against for title in (f"{label} − TR", "by seed", "95%")]
    heads = _training(study, runs) if is_headed else {}
    lines: list[list[Cell]] = [
        [title, *cells, *[""] * len(paired)] for title, cells in heads.items()
    ]
    for measure in rows:
        differences = [
            cell for label in against for cell in _paired(study, runs[label], runs["TR"], measure)
        ]
        lines.append([measure.label, *_cells(study, runs, measure), *differences])
    return table(["", *runs, *paired], lines)


def _training(study: Study, runs: Mapping[str, str]) -> dict[str, list[Cell]]:
    """What the columns of a comparison are models of."""
    found = {name: study.final(name) for name in runs.values()}
    steps = [sorted({each.steps for each in outcomes}) for outcomes in found.values()]
    pairs = [
        sorted({each.steps * each.pairs_a_step for each in outcomes}) for outcomes in found.values()
    ]
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
    best = clear_best(
        {label: each for label, each in found.items() if label != START}, measure.lower_is_better
    )
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
    rows = {
        each.label: each.paper
        for study in studies
        if study.is_comparison
        for each in measures(study)
    }
    models = [
        f"{encoder}{more}"
        for encoder in ("mBERT", "XLM-R")
        for more in ("", "+TR", "+TR+TLM", "+DAP")
    ]
    lines = []
    for label, paper in rows.items():
        if paper:
            numbers = [paper.get(model) for model in models]
            cells = [ABSENT if each is None else f"{each:.1f}" for each in numbers]
            lines.append([label.replace(" sample", ""), *cells])
    return table(["", *models], lines) if lines else NOT_RUN


def comparison_block(study: Study, images: Mapping[str, str]) -> str:
    """A study's comparison for the same pairs and for the same time, its other runs, and its plots."""
    if not study.outcomes:
        return NOT_RUN
    rows, runs = measures(study), study.main_runs()
    main = {label: name for label, name in runs.items() if label in ORDER}
    others = {label: name for label, name in runs.items() if label not in main}
    same_pairs = " ".join(["**The same number of pairs.**", _size_of_tatoeba(study)]).strip()
    parts = [same_pairs, comparison(study, main, rows)]
    if others:
        measured = [row for row in rows if any(study.spread(name, row) for name in others.values())]
        parts += ["**Controls and variants.**", comparison(study, others, measured)]
    for whose, runs in study.same_time_runs().items():
        shared = [
            row
            for row in rows
            if sum(study.spread(name, row) is not None for name in runs.values()) > 1
        ]
        parts.append(f"**The same time as `{whose}`**, by CPU time a step.")
        parts.append(comparison(study, runs, shared, runs))
    return "\n\n".join(
        parts + _images(images, f"comparison-{study.name}.svg", f"loss-{study.name}.svg")
    )


def _size_of_tatoeba(study: Study) -> str:
    evaluations = [each.content["evaluations"] for each in study.outcomes]
    settings = [
        each["tatoeba"]["settings"] for each in evaluations if "tatoeba" in each
    ]  # the same of all
    if not settings:
        return ""
    cut = settings[0].get("max_pairs")
    return f"Tatoeba: {f'the first {cut} pairs of each language, which is easier than all' if cut else 'all pairs'}."


def alignment_block(studies: Sequence[Study]) -> str:
    """What `experiments.alignment` measured, all of it and the AER of each language."""
    parts = []
    for study in studies:
        rows, runs = alignment_measures(study), study.main_runs()
        runs = {
            label: name
            for label, name in runs.items()
            if any(study.spread(name, row) for row in rows)
        }
        reports = [each.content["evaluations"].get("alignment", {}) for each in study.outcomes]
        codes = sorted({code for report in reports for code in report.get("languages", {})})
        of_each = [
            Measure(f"AER, {code}", (f"alignment/languages/{code}/AER",), True) for code in codes
        ]
        if rows:
            by_language = table(
                ["", *runs], [[row.label, *_cells(study, runs, row)] for row in of_each]
            )
            parts += [
                f"**{study.name}**",
                comparison(study, runs, rows, is_headed=False),
                by_language,
            ]
    return "\n\n".join(parts) or NOT_RUN


# ------------------------------------------------------------------------------ searches and ablations


def search_block(studies: Sequence[Study], images: Mapping[str, str]) -> str:
    """Held-out accuracy of every rate tried, the chosen one bold."""
    parts = []
    for study in studies:
        rows = []
        for label, name in study.main_runs().items():
            if (run := study.recipe.runs[name]).is_searched:
                found, chosen = study.search(run), study.rate(run)
                cells = {
                    rate: ABSENT if dev is None else f"{dev:.2f}" for rate, dev in found.items()
                }
                rows.append(
                    [
                        label,
                        *(
                            f"**{cell}**" if rate == chosen else cell
                            for rate, cell in cells.items()
                        ),
                    ]
                )
        if rows:
            parts += [
                f"**{study.name}**",
                table(["", *(f"{rate:g}" for rate in study.recipe.learning_rates)], rows),
            ]
    note = f"""Accuracy in percent on held-out pairs of the training text, mean of both directions and all languages,
    first seed. **Bold**: the rate taken, once all of a run's are there; {ABSENT}: not run."""
    return "\n\n".join([*parts, paragraph(note), *_images(images, "learning-rates.svg")])


def ablation_block(studies: Sequence[Study], images: Mapping[str, str]) -> str:
    """Every ablation beside `base`, by group."""
    parts = []
    for study in studies:
        if study.is_ablation and study.outcomes:
            parts += [f"**{study.name}**", ablation_table(study), paragraph(ablation_note(study))]
            parts += _images(images, f"{study.name}.svg")
    return "\n\n".join(parts) or NOT_RUN


def ablation_note(study: Study) -> str:
    """What a difference is worth, as far as the runs with several seeds can tell."""
    deviations = []
    for measure in ablated(study):
        spreads = [spread(each.values()) for each in study.minus_base(measure).values()]
        if several := [each for each in spreads if each and each.sd is not None]:
            freedom = sum(each.count - 1 for each in several)
            degrees = f"{freedom} degree{'s' * (freedom > 1)} of freedom"
            deviations.append(f"{pooled_sd(several):.2f} ({measure.label}; {degrees})")
    return f"""Percent; differences are of equal seeds. By the runs with several seeds, one seed's difference from
    `base` has a standard deviation of {", ".join(deviations) or "unknown size"}."""


def ablation_table(study: Study) -> str:
    """A row a run, whose name is GROUP-VALUE; the group stands on its first row."""
    columns = ablated(study)
    rows, before = [], None
    for name in sorted(study.recipe.runs, key=lambda name: name != "base"):
        group, _, value = name.partition("-")
        seeds, cells = len(study.final(name)), []
        for measure in columns:
            difference = spread(study.minus_base(measure).get(name, {}).values())
            cells += [number(study.spread(name, measure), seeds), number(difference, seeds, "+")]
        rows.append([group if group != before else "", value, seeds or "not run", *cells])
        before = group
    titles = [title for measure in columns for title in (measure.label, "minus base")]
    return table(["", "", "seeds", *titles], rows)


def _images(images: Mapping[str, str], *names: str) -> list[str]:
    return [images[name] for name in names if name in images]


# ------------------------------------------------------------------------------- what was run, and where


def missing_block(studies: Sequence[Study]) -> str:
    """Everything that a recipe asks for and that no result file has."""
    lines = []
    for study in studies:
        if not study.outcomes:
            lines.append(f"- `{study.name}`: nothing of it was run")
        else:
            lines += [
                f"- `{study.name}`, `{name}`: {'; '.join(parts)}"
                for name, parts in study.missing().items()
            ]
    return "\n".join(lines) or "Everything that the recipes ask for was run."


def machine_block(studies: Sequence[Study]) -> str:
    """Machines, versions and commits of all results in one line."""
    contents = [each.content for study in studies for each in study.outcomes]
    if not contents:
        return NOT_RUN
    found = [each["machine"] for each in contents]
    machines = [f"{each['gpu'] or each['cpu']}, threads: {each['threads']}" for each in found]
    versions = [
        " ".join(f"{name} {found}" for name, found in each["versions"].items()) for each in contents
    ]
    commits = [each.get("commit") or "a commit that was not recorded" for each in contents]
    short = [re.sub(r"^([0-9a-f]{7})[0-9a-f]+", r"\1", commit) for commit in commits]
    return f"{len(contents)} trainings. {_counted(machines)}. {_counted(versions)}. From {_counted(short)}."


def _counted(words: Sequence[str]) -> str:
    """Each once, the most frequent first, with its number where there are several.

    >>> _counted(["a", "b", "b"])
    'b (2), a (1)'
    """
    counts = Counter(words).most_common()
    return ", ".join(f"{word} ({count})" if len(counts) > 1 else word for word, count in counts)


def readme_block(studies: Sequence[Study]) -> str:
    """The few rows of `README_ROWS`."""
    compared = [
        study for name in README_ROWS for study in studies if study.name == name and study.outcomes
    ]
    if not compared:
        return NOT_RUN
    columns = list(dict.fromkeys(short for study in compared for short in headline(study)))
    rows = []
    for study in compared:
        shown, runs = headline(study), study.main_runs()
        for label in README_ROWS[study.name]:
            if seeds := len(study.final(runs[label])):
                found = [
                    study.spread(runs[label], shown[short]) if short in shown else None
                    for short in columns
                ]
                rows.append([f"{study.name}: {label}", *(number(each, seeds) for each in found)])
    sizes = {study.name: size for study in compared if (size := _size_of_tatoeba(study))}
    of_each = [f"`{name}`: {size}" for name, size in sizes.items()]
    told = " ".join({*sizes.values()} if len({*sizes.values()}) == 1 else of_each)
    note = f"""Percent, mean ± standard deviation over seeds. {told} All tables and their commands:
    [{DOCS}]({DOCS})."""
    return f"{table(['', *columns], rows)}\n\n{paragraph(note)}"


# ------------------------------------------------------------------------------------------------ files


def documents(
    studies: Sequence[Study], images: Mapping[str, str], results_dir: Path
) -> dict[str, dict[str, str]]:
    """File -> name -> text of every block that is made."""
    compared = [study for study in studies if study.is_comparison]
    made = {f"comparison-{study.name}": comparison_block(study, images) for study in compared} | {
        "paper": paper_block(studies),
        "learning-rates": search_block(studies, images),
        "ablations": ablation_block(studies, images),
        "alignment": alignment_block(compared),
        "missing": missing_block(studies),
        "machine": machine_block(studies),
        "cost": cost_block(results_dir / "cost.json"),
    }
    return {DOCS: made, "README.md": {"results-comparison": readme_block(studies)}}


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: writes what differs from the results, or with `--check` only finds it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="folder laid out as this checkout; default: itself"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with status 1 if it would"
    )
    args = parser.parse_args(argv)
    results, figures = args.root / "experiments" / "results", args.root / "docs" / "figures"
    studies = read_studies(args.root / "experiments" / "recipes", results)
    drawn = pictures(studies)
    images = {name: f"![{picture.caption}](figures/{name})" for name, picture in drawn.items()}
    changes, texts = [], {}
    for path, blocks in (
        (args.root / name, each) for name, each in documents(studies, images, results).items()
    ):
        texts[path], stale = filled(path.read_text(encoding="utf-8"), blocks, path)
        if stale:
            changes.append(f"{path}: {', '.join(stale)}")
    changes += [
        f"{figures / name}: the picture"
        for name, each in drawn.items()
        if not is_drawn(each, figures / name)
    ]
    if args.check and changes:
        lines = "\n".join(changes)
        sys.exit(f"error: not what the results say:\n{lines}\nrun `python -m experiments.report`")
    if not args.check:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        for name, picture in drawn.items():  # all, as the digest does not tell how they were drawn
            save(picture, figures / name)
    print("\n".join(f"written: {each}" for each in changes) or "everything is as the results say")


if __name__ == "__main__":
    main()
