"""What the result files of a study say: numbers by run and seed, their means and spreads, and what is missing.

A study is a recipe and the JSON files that `experiments.run` wrote for it. All numbers are in percent unless they say
otherwise; a spread is the standard deviation of the sample (n - 1), and one seed has none.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dap.reports import (
    BUCC_PAIRS,
    DIRECTIONS,
    PAPER_BUCC,
    PAPER_TATOEBA,
    PAPER_XNLI,
    TATOEBA_GROUPS,
)
from experiments.recipes import Recipe, Run

HARD = "hard_negatives/mean/error"
DRAWS = 5_000  # of a bootstrap
LARGEST = TATOEBA_GROUPS[-1]
DEV = "eval_mean_accuracy"  # retrieval on held-out pairs of the training text, both directions
#: What runs are called, in the order of the tables.
START = "encoder as it is"  # a run at learning rate 0
LABELS = {
    "tr": "TR",
    "tr+tlm": "TR+TLM",
    "tr+rtl": "DAP",
    "tr+bow": "TR+BOW",
    "tr+rtl+bow": "DAP+BOW",
}
EDITS = "+edits"  # of those with targets of which a word is changed
ORDER = [START, *LABELS.values(), *(label + EDITS for label in LABELS.values())]
ALIGNMENT = (
    "pool xx-en",
    "pool en-xx",
    "sentence xx-en",
    "sentence en-xx",
    "precision",
    "recall",
    "AER",
)


@dataclass(frozen=True)
class Measure:
    """A number of an outcome: the mean of what stands at `paths` of its evaluations, or of `dev`.

    Attributes:
        label: its name in tables.
        paths: keys from the outside to the inside, with `/` between them.
        paper: the paper's model -> its number, None where it prints none.
        by_language: path to the number of a language, with `*` in place of its code; empty where there is none.
    """

    label: str
    paths: tuple[str, ...]
    lower_is_better: bool = False
    paper: Mapping[str, float | None] = field(default_factory=dict)
    by_language: str = ""


@dataclass(frozen=True)
class Outcome:
    """One result file: a model trained with one seed, and what was measured of it."""

    recipe: str
    run: str
    seed: int
    learning_rate: float
    content: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """Steps of the model that was measured; none at learning rate 0, which is the encoder as it is."""
        return self.content["train"]["model_step"] if self.learning_rate else 0

    @property
    def pairs_a_step(self) -> int:
        return self.content["record"]["pairs a step"]

    def value(self, measure: Measure) -> float | None:
        """The number, or None where it was not measured."""
        numbers = {**self.content["evaluations"], "dev": self.content.get("dev", {})}
        found = [_at(numbers, path) for path in measure.paths]
        return None if None in found else statistics.fmean(found)

    def languages(self, measure: Measure) -> dict[str, float]:
        """Language code -> its number; empty where there is none by language."""
        folder, _, rest = measure.by_language.partition("/*/")
        parts = (_at(self.content["evaluations"], folder) if folder else None) or {}
        found = {code: _at(part, rest) for code, part in parts.items() if code != "mean"}
        return {code: value for code, value in found.items() if value is not None}


def _at(tree: Any, path: str) -> Any:
    for key in path.split("/"):
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return tree


# --------------------------------------------------------------------------------------------------- spreads


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds; `sd` is None for one seed."""

    mean: float
    sd: float | None
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """Of one value or more; None of none.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, sd=1.4142135623730951, count=2)
    """
    found = list(values)
    if not found:
        return None
    return Spread(
        statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else None, len(found)
    )


def pooled_sd(spreads: Sequence[Spread]) -> float:
    """The standard deviation within groups of several values, each weighed by its n - 1.

    >>> pooled_sd([Spread(0.0, 1.0, 2), Spread(9.0, 7.0, 2)])
    5.0
    """
    freedom = sum(each.count - 1 for each in spreads)
    return math.sqrt(sum((each.count - 1) * each.sd**2 for each in spreads) / freedom)


def clear_best(spreads: Mapping[str, Spread | None], lower_is_better: bool = False) -> str | None:
    """The run whose mean is ahead of the next by more than twice their pooled standard deviation, or None.

    Both must have three seeds that differ: two may be close by chance, and equal ones are at a floor or ceiling.

    >>> clear_best({"a": Spread(5.5, 1.0, 3), "b": Spread(3.0, 1.0, 3)})
    'a'
    """
    present = [(name, each) for name, each in spreads.items() if each is not None]
    ranked = sorted(present, key=lambda item: item[1].mean, reverse=not lower_is_better)
    if len(ranked) < 2:
        return None
    (name, best), (_, following) = ranked[:2]
    if min(best.count, following.count) < 3 or not (best.sd and following.sd):
        return None
    return name if abs(best.mean - following.mean) > 2 * pooled_sd([best, following]) else None


def interval(differences: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Where 95% of the means lie when seeds (rows) and languages (columns) are drawn anew: a bootstrap over both.

    A language drawn anew brings all its sentences, which makes this wider than a bootstrap over sentences.

    >>> interval([[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    (1.0, 1.0)
    """
    grid, draw = np.asarray(differences), np.random.default_rng(0)  # (S, L)
    rows, columns = (draw.integers(count, size=(DRAWS, count)) for count in grid.shape)
    means = grid[rows[:, :, None], columns[:, None, :]].mean((1, 2))  # (DRAWS,)
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    return low, high


# --------------------------------------------------------------------------------------------------- studies


@dataclass(frozen=True)
class Study:
    """A recipe and its outcomes so far."""

    recipe: Recipe
    outcomes: tuple[Outcome, ...]

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def is_ablation(self) -> bool:
        """Whether its runs are changes to `base`, alone."""
        return "base" in self.recipe.runs

    @property
    def is_comparison(self) -> bool:
        """Whether it evaluates models of different objectives; a recipe may also be for learning rates alone."""
        return not self.is_ablation and any(run.evaluate for run in self.recipe.runs.values())

    def main_runs(self) -> dict[str, str]:
        """Label -> run, of those that see the same number of pairs: the encoder as it is, TR, TR+TLM, DAP."""
        return self._labelled(
            [name for name, run in self.recipe.runs.items() if run.same_time_as is None]
        )

    def same_time_runs(self) -> dict[str, dict[str, str]]:
        """A run -> label -> run, of those that take its time and itself."""
        whose = dict.fromkeys(
            run.same_time_as for run in self.recipe.runs.values() if run.same_time_as is not None
        )
        same = {
            one: [name for name, run in self.recipe.runs.items() if run.same_time_as == one]
            for one in whose
        }
        return {one: self._labelled([one, *names]) for one, names in same.items()}

    def _labelled(self, names: Iterable[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in names:
            label = label_of(self.recipe.runs[name])
            found[name if label in found else label] = name
        return dict(
            sorted(
                found.items(),
                key=lambda item: ORDER.index(item[0]) if item[0] in ORDER else len(ORDER),
            )
        )

    def find(self, run: str, rate: float, seed: int) -> Outcome | None:
        """The outcome of one training; None if it has not ended."""
        wanted = (run, rate, seed)
        return next(
            (each for each in self.outcomes if (each.run, each.learning_rate, each.seed) == wanted),
            None,
        )

    def dev(self, run: Run, rate: float) -> float | None:
        """What chooses learning rates: accuracy on held-out pairs with a run's first seed; None: not run."""
        found = self.find(run.name, rate, run.seeds[0])
        return found.value(HELD_OUT) if found else None

    def search(self, run: Run) -> dict[float, float | None]:
        """Learning rate -> accuracy on held-out pairs, for a run whose rate is searched."""
        return {rate: self.dev(run, rate) for rate in self.recipe.learning_rates}

    def rate(self, run: Run) -> float | None:
        """The learning rate of a run, as `experiments.run` chooses it; None while the search is not complete."""
        return self.recipe.learning_rate(run, self.dev)

    def final(self, name: str) -> list[Outcome]:
        """A run's outcomes at its chosen learning rate, by seed."""
        run = self.recipe.runs[name]
        rate = self.rate(run)
        found = [] if rate is None else [self.find(name, rate, seed) for seed in run.seeds]
        return [each for each in found if each is not None]

    def values(self, name: str, measure: Measure) -> dict[int, float]:
        """Seed -> number."""
        found = {each.seed: each.value(measure) for each in self.final(name)}
        return {seed: value for seed, value in found.items() if value is not None}

    def spread(self, name: str, measure: Measure) -> Spread | None:
        """Mean and standard deviation of a run over its seeds; None where nothing was measured."""
        return spread(self.values(name, measure).values())

    def differences(self, name: str, base: str, measure: Measure) -> dict[int, float]:
        """Seed -> a run minus another, of the seeds that both have."""
        ours, theirs = self.values(name, measure), self.values(base, measure)
        return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}

    def minus_base(self, measure: Measure) -> dict[str, dict[int, float]]:
        """Run -> seed -> its difference to `base`, of the other runs of an ablation."""
        return {
            name: self.differences(name, "base", measure)
            for name in self.recipe.runs
            if name != "base"
        }

    def interval(self, name: str, base: str, measure: Measure) -> tuple[float, float] | None:
        """`interval` of a run minus another; None below two seeds and languages that both have."""
        ours, theirs = (
            {each.seed: each.languages(measure) for each in self.final(run)} for run in (name, base)
        )
        seeds = [
            seed for seed in ours if ours[seed] and ours[seed].keys() == theirs.get(seed, {}).keys()
        ]
        if len(seeds) < 2 or len(ours[seeds[0]]) < 2:
            return None
        return interval(
            [[ours[seed][code] - theirs[seed][code] for code in ours[seed]] for seed in seeds]
        )

    def missing(self) -> dict[str, list[str]]:
        """Run -> which of its trainings and evaluations have no result, of those that lack one."""
        found: dict[str, list[str]] = {}
        for run in self.recipe.runs.values():
            done = {each.seed: each.content["evaluations"] for each in self.final(run.name)}
            left = {"training": [seed for seed in run.seeds if seed not in done]}
            left |= {
                name: [seed for seed, has in done.items() if name not in has]
                for name in run.evaluate
            }
            for what, numbers in left.items():
                if numbers:
                    plural = "s" * (len(numbers) > 1)
                    found.setdefault(run.name, []).append(
                        f"{what} of seed{plural} {', '.join(map(str, numbers))}"
                    )
        return found


def label_of(run: Run) -> str:
    """What a run is called: by its objective and changed copies, or as the encoder that it starts from."""
    if run.arguments.get("learning_rate") == 0:
        return START
    label = LABELS.get(run.arguments.get("objective"), run.name)
    return label + EDITS * bool(run.arguments.get("tr_hard_negatives"))


# -------------------------------------------------------------------------------------------------- measures


#: What chose the learning rates; of the text's own domain, and far from 0 where Tatoeba is not.
HELD_OUT = Measure("held-out training pairs", (f"dev/{DEV}",))


def measures(study: Study) -> list[Measure]:
    """What was measured of any of a study's models, in the order of the tables."""
    found = [HELD_OUT]
    for direction, arrow in DIRECTIONS.items():
        for column, group in enumerate(TATOEBA_GROUPS):
            paper = {model: row[direction][column] for model, row in PAPER_TATOEBA.items()}
            path = f"tatoeba/averages/{group}/{direction}"
            by_language = f"tatoeba/languages/*/{direction}" if group == LARGEST else ""
            found.append(
                Measure(f"Tatoeba {arrow}, {group}", (path,), paper=paper, by_language=by_language)
            )
    for name in sorted(study.recipe.evaluate):
        reports = [each.content["evaluations"].get(name) for each in study.outcomes]
        for kind in sorted({kind for report in reports for kind in _at(report, HARD) or ()}):
            label = f"hard negatives of {name}, error" + ("" if kind == "error" else f" by {kind}")
            path, by_language = f"{name}/{HARD}/{kind}", f"{name}/hard_negatives/*/error/{kind}"
            found.append(Measure(label, (path,), lower_is_better=True, by_language=by_language))
    for pair in BUCC_PAIRS:
        for name, column in (("F1", 2), ("precision", 0), ("recall", 1)):
            paper = {model: row[pair][column] for model, row in PAPER_BUCC["sample"].items()}
            found.append(
                Measure(
                    f"BUCC {pair} sample, {name}",
                    (f"bucc/pairs/{pair}/{name.lower()}",),
                    paper=paper,
                )
            )
    xnli = {model: row["average"] for model, row in PAPER_XNLI.items()}
    found.append(Measure("XNLI, mean accuracy", ("xnli/mean/accuracy",), paper=xnli))
    found += [
        _alignment("token retrieval, all words", "pool xx-en", "pool en-xx"),
        _alignment("AER", "AER"),
    ]
    return measured(study, found)


def alignment_measures(study: Study) -> list[Measure]:
    """Everything that `experiments.alignment` measured, each by itself."""
    return measured(study, [_alignment(name, name) for name in ALIGNMENT])


def _alignment(label: str, *names: str) -> Measure:
    return Measure(
        label, tuple(f"alignment/mean/{name}" for name in names), lower_is_better="AER" in names
    )


def measured(study: Study, among: Iterable[Measure]) -> list[Measure]:
    """Those that any of the study's models has."""
    return [
        measure
        for measure in among
        if any(each.value(measure) is not None for each in study.outcomes)
    ]


def headline(study: Study) -> dict[str, Measure]:
    """Short name -> measure, of the few that plots and README show."""
    tatoeba = f"tatoeba/averages/{LARGEST}"
    names = {f"{tatoeba}/xx-en": "Tatoeba xx→en", f"{tatoeba}/en-xx": "en→xx"}
    names |= {f"{each}/{HARD}/error": "hard-negative error" for each in study.recipe.evaluate}
    names |= {
        "bucc/pairs/zh-en/f1": "BUCC zh-en F1",
        "xnli/mean/accuracy": "XNLI",
        "alignment/mean/AER": "AER",
    }
    found = {measure.paths[0]: measure for measure in measures(study)}
    return {short: found[path] for path, short in names.items() if path in found}


def ablated(study: Study) -> list[Measure]:
    """What ablations are compared in."""
    paths = tuple(f"tatoeba/averages/{LARGEST}/{direction}" for direction in DIRECTIONS)
    return measured(
        study, [HELD_OUT, Measure(f"Tatoeba, {LARGEST}, mean of both directions", paths)]
    )
