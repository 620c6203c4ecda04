"""Numbers of a study: values by run and seed, means, spreads, and paired differences.

A study is a recipe and the results of its runs (`study.collect`). All numbers are percentages
unless they say otherwise. A spread is the standard deviation of the sample (n - 1). A single seed
has none.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dap_transformers.evaluation.paper import (
    BUCC_PAIRS,
    DIRECTIONS,
    PAPER_BUCC,
    PAPER_TATOEBA,
    PAPER_XNLI,
    TATOEBA_GROUPS,
)
from study.recipes import Recipe, Run

#: Path of the error with hard negatives, and of its parts, in an evaluation.
HARD = "hard_negatives/mean/error"
LARGEST = TATOEBA_GROUPS[-1]
#: Retrieval accuracy on held-out pairs of the training text, mean of both directions.
DEV = "eval_mean_accuracy"
#: Label of a run at learning rate 0.
START = "start encoder"
#: Objective -> label of the method.
LABELS = {
    "tr": "TR",
    "tr+tlm": "TR+TLM",
    "tr+rtl": "DAP",
    "tr+bow": "TR+BOW",
    "tr+rtl+bow": "DAP+BOW",
}
#: Added to the label of a run that also ranks copies of the target with one word changed.
EDITS = "+edits"
#: Labels of methods in the order of the tables.
ORDER = [START, *LABELS.values(), *(label + EDITS for label in LABELS.values())]
#: Numbers that `study.measure_alignment` reports.
ALIGNMENT = (
    "pool xx-en",
    "pool en-xx",
    "sentence xx-en",
    "sentence en-xx",
    "precision",
    "recall",
    "AER",
)
#: 97.5% quantiles of Student's t for 1, 2, … degrees of freedom.
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
#: Draws of a bootstrap.
DRAWS = 10_000


@dataclass(frozen=True)
class Measure:
    """A quantity that studies compare, such as an accuracy: the mean of the values at `paths`.

    Attributes:
        label: name in tables.
        paths: where the values are in the results of an `Outcome`: keys from the outside to the
            inside, joined by `/`, such as "xnli/mean/accuracy". The first key is the name of an
            evaluation, or "dev" for the held-out text.
        lower_is_better: whether a lower value is better.
        paper: name of a model of the paper -> its value. None where the paper prints none.
        sentences: where the values of the single sentences are. None if they are not known.
    """

    label: str
    paths: tuple[str, ...]
    lower_is_better: bool = False
    paper: Mapping[str, float | None] = field(default_factory=dict)
    sentences: str | None = None


@dataclass(frozen=True)
class Outcome:
    """The result of one run with one seed.

    Attributes:
        run: name in the recipe.
        seed: seed of training.
        learning_rate: peak learning rate.
        steps: training steps of the measured model. 0 for the start encoder.
        pairs_per_step: sentence pairs of a step.
        settings: name -> value of all other settings of the training, the machine and the versions.
        dev: name -> result on held-out pairs of the training text.
        losses: name of a loss -> points (step, value) of the training curve.
        results: name of an evaluation -> its results, as `study.collect` keeps them.
    """

    run: str
    seed: int
    learning_rate: float
    steps: int
    pairs_per_step: int
    settings: Mapping[str, Any]
    dev: Mapping[str, float]
    losses: Mapping[str, Sequence[Sequence[float]]]
    results: Mapping[str, Any]

    def value(self, measure: Measure) -> float | None:
        """Return the mean of the values at a measure's `paths`, or None if one is missing."""
        numbers = {**self.results, "dev": self.dev}
        found = [value_at(numbers, path) for path in measure.paths]
        return None if None in found else statistics.fmean(found)

    def by_sentence(self, measure: Measure) -> list[float] | None:
        """Return the value of a measure for each English sentence, in percent.

        It is a share of the languages, such as those that find the sentence's translation. The mean
        over the sentences is the value of the measure.

        Returns:
            One value per sentence. None if the outcome has no values by sentence.
        """
        counts = value_at(self.results, measure.sentences) if measure.sentences else None
        if counts is None:
            return None
        evaluation = measure.sentences.partition("/")[0]
        languages = self.results[evaluation]["sentences"]["languages"]
        return [100 * count / languages for count in counts]


def value_at(tree: Any, path: str) -> Any:
    """Return a value inside nested dictionaries, or None if there is none.

    Args:
        tree: the dictionaries.
        path: keys from the outside to the inside, joined by `/`.
    """
    for key in path.split("/"):
        if not isinstance(tree, Mapping) or key not in tree:
            return None
        tree = tree[key]
    return tree


# --------------------------------------------------------------------------------------- spreads


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds.

    Attributes:
        mean: mean over the seeds.
        sd: standard deviation of the sample. None for one seed.
        count: number of seeds.
    """

    mean: float
    sd: float | None
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    """Return mean and standard deviation of the values, or None if there are no values.

    >>> spread([1.0, 3.0])
    Spread(mean=2.0, sd=1.4142135623730951, count=2)
    """
    found = list(values)
    if not found:
        return None
    deviation = statistics.stdev(found) if len(found) > 1 else None
    return Spread(statistics.fmean(found), deviation, len(found))


def pooled_sd(spreads: Sequence[Spread]) -> float:
    """Return the pooled standard deviation of several groups.

    It is the root of the mean of their variances, weighted by n - 1. Every group needs a standard
    deviation, so at least two values.

    >>> pooled_sd([Spread(0.0, 1.0, 2), Spread(9.0, 7.0, 2)])
    5.0
    """
    freedom = sum(each.count - 1 for each in spreads)
    squares = sum((each.count - 1) * each.sd**2 for each in spreads)
    return math.sqrt(squares / freedom)


def t_interval(differences: Sequence[float]) -> tuple[float, float] | None:
    """Compute the 95% confidence interval of the mean difference, by a paired t-test over seeds.

    For more than 31 seeds it is a little too wide, because the table of quantiles ends there.

    Args:
        differences: difference between two runs for each seed.

    Returns:
        Lower and upper end. None for fewer than two seeds.

    >>> [round(end, 2) for end in t_interval([1.0, 2.0, 3.0])]
    [-0.48, 4.48]
    """
    found = spread(differences)
    if found is None or found.sd is None:
        return None
    freedom = min(found.count - 1, len(T_QUANTILES))
    width = T_QUANTILES[freedom - 1] * found.sd / math.sqrt(found.count)
    return found.mean - width, found.mean + width


def bootstrap_interval(differences: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Compute the 95% interval of the mean difference, by drawing seeds and sentences.

    Each draw takes as many seeds and as many sentences as there are, with replacement. All seeds
    have the same drawn sentences. With few seeds the interval is too narrow, because three seeds
    cannot show how much seeds differ.

    >>> bootstrap_interval([[1.0, 1.0], [1.0, 1.0]])
    (1.0, 1.0)

    Args:
        differences: for each seed, the difference between two runs for each sentence.

    Returns:
        Lower and upper end.
    """
    values = np.array(differences)  # (seeds, sentences)
    seeds, sentences = values.shape
    generator = np.random.default_rng(0)
    of_seeds = generator.multinomial(seeds, [1 / seeds] * seeds, DRAWS) / seeds
    of_sentences = generator.multinomial(sentences, [1 / sentences] * sentences, DRAWS) / sentences
    means = ((of_seeds @ values) * of_sentences).sum(1)  # (DRAWS,)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


# --------------------------------------------------------------------------------------- studies


@dataclass(frozen=True)
class Study:
    """A recipe, and the outcomes of its trainings so far.

    An outcome is the result of one run with one seed and one learning rate.

    Attributes:
        recipe: what the study trains and evaluates.
        outcomes: results of the trainings that have ended.
        step_seconds: name of a run -> CPU seconds of a training step, as `study.step_cost`
            measured them.
    """

    recipe: Recipe
    outcomes: tuple[Outcome, ...]
    step_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name of the study, which its recipe gives."""
        return self.recipe.name

    @property
    def is_ablation(self) -> bool:
        """Tell whether the study is an ablation, which it is if it has a run called "base".

        Each other run is then compared with `base`. It differs from it in one setting, or in a few
        that belong together.
        """
        return "base" in self.recipe.runs

    @property
    def is_comparison(self) -> bool:
        """Tell whether the study compares methods: it is no ablation, and evaluates some run."""
        has_evaluation = any(run.evaluate for run in self.recipe.runs.values())
        return has_evaluation and not self.is_ablation

    def main_runs(self) -> dict[str, str]:
        """Return label in tables -> name of a run, for the runs without `same_time_as`.

        The others are trained for the CPU time of another run (`same_time_runs`).
        """
        runs = self.recipe.runs.items()
        return self._by_label([name for name, run in runs if run.same_time_as is None])

    def same_time_runs(self) -> dict[str, dict[str, str]]:
        """Group the study's runs that are trained for the CPU time of another run.

        Returns:
            Name of that other run -> (label in tables -> name of a run). The other run itself is
            among the inner names.
        """
        found: dict[str, list[str]] = {}
        for name, run in self.recipe.runs.items():
            if run.same_time_as is not None:
                found.setdefault(run.same_time_as, [run.same_time_as]).append(name)
        return {timed: self._by_label(names) for timed, names in found.items()}

    def _by_label(self, names: Iterable[str]) -> dict[str, str]:
        """Return label in tables -> name of a run, in the order of the tables.

        If two runs have the same label, the name of the second run serves as its label.

        Args:
            names: names of the runs.
        """
        found: dict[str, str] = {}
        for name in names:
            label = label_of(self.recipe.runs[name])
            found[name if label in found else label] = name
        known = {label: found[label] for label in ORDER if label in found}
        return known | found

    def find(self, run: str, rate: float, seed: int) -> Outcome | None:
        """Return the outcome of one training, or None if it has not ended.

        Args:
            run: name of the run.
            rate: learning rate of the training.
            seed: seed of the training.
        """
        for each in self.outcomes:
            if (each.run, each.learning_rate, each.seed) == (run, rate, seed):
                return each
        return None

    def dev(self, run: Run, rate: float) -> float | None:
        """Return the accuracy that chooses learning rates, or None if it is not known yet.

        It is the accuracy on held-out pairs, of the run's first seed at this learning rate.

        Args:
            run: the run.
            rate: learning rate of the training.
        """
        found = self.find(run.name, rate, run.seeds[0])
        return found.value(HELD_OUT) if found else None

    def search(self, run: Run) -> dict[float, float | None]:
        """Return learning rate -> accuracy on held-out pairs, for all rates that the recipe tries.

        The accuracy is in percent. It is None for a training that has not ended.
        """
        return {rate: self.dev(run, rate) for rate in self.recipe.learning_rates}

    def rate(self, run: Run) -> float | None:
        """Return a run's learning rate, or None while the search for it is not complete."""
        return self.recipe.learning_rate(run, self.dev)

    def final(self, name: str) -> list[Outcome]:
        """Return a run's outcomes (results of one seed) at its chosen learning rate.

        They are in the order of the seeds. Seeds whose training has not ended are left out. While
        the learning rate is not known, the list is empty.

        Args:
            name: name of the run.
        """
        run = self.recipe.runs[name]
        rate = self.rate(run)
        if rate is None:
            return []
        found = [self.find(name, rate, seed) for seed in run.seeds]
        return [each for each in found if each is not None]

    def values(self, name: str, measure: Measure) -> dict[int, float]:
        """Return seed -> value of a measure, for a run at its chosen learning rate.

        Seeds without a value are left out.

        Args:
            name: name of the run.
            measure: what was measured.
        """
        found = {each.seed: each.value(measure) for each in self.final(name)}
        return {seed: value for seed, value in found.items() if value is not None}

    def spread(self, name: str, measure: Measure) -> Spread | None:
        """Return mean and standard deviation of a measure over a run's seeds.

        Args:
            name: name of the run.
            measure: what was measured.

        Returns:
            The mean and the deviation. None if no seed of the run has a value.
        """
        return spread(self.values(name, measure).values())

    def differences(self, name: str, base: str, measure: Measure) -> dict[int, float]:
        """Return seed -> difference of two runs in a measure, for the seeds that both have.

        Args:
            name: name of the run.
            base: name of the run that is subtracted.
            measure: what is compared.
        """
        ours = self.values(name, measure)
        theirs = self.values(base, measure)
        return {seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs}

    def sentence_differences(self, name: str, base: str, measure: Measure) -> list[list[float]]:
        """Return the differences of two runs by sentence, a list per seed that both have.

        Args:
            name: name of the run.
            base: name of the run that is subtracted.
            measure: what is compared.

        Returns:
            The differences in percent. An empty list if the measure has no values by sentence.
        """
        theirs = {each.seed: each.by_sentence(measure) for each in self.final(base)}
        found = []
        for each in self.final(name):
            own = each.by_sentence(measure)
            other = theirs.get(each.seed)
            if own is not None and other is not None:
                found.append([one - two for one, two in zip(own, other, strict=True)])
        return found

    def minus_base(self, measure: Measure) -> dict[str, dict[int, float]]:
        """Return name of each run except `base` -> (seed -> its difference from `base`)."""
        names = [name for name in self.recipe.runs if name != "base"]
        return {name: self.differences(name, "base", measure) for name in names}

    def missing(self) -> dict[str, list[str]]:
        """Find the trainings and evaluations of the recipe that were not done yet.

        Returns:
            Name of a run -> texts such as "training, seed 1, 2" or "xnli, seed 0". Complete runs
            are left out.
        """
        found: dict[str, list[str]] = {}
        for run in self.recipe.runs.values():
            done = {each.seed: each.results for each in self.final(run.name)}
            left = {"training": [seed for seed in run.seeds if seed not in done]}
            for name in run.evaluate:
                left[name] = [seed for seed, results in done.items() if name not in results]
            for what, seeds in left.items():
                if seeds:
                    listed = ", ".join(str(seed) for seed in seeds)
                    found.setdefault(run.name, []).append(f"{what}, seed {listed}")
        return found


def label_of(run: Run) -> str:
    """Return what tables call a run, such as "DAP+edits".

    The label is `START` for a run with learning rate 0. Otherwise it depends on the objective, and
    on whether changed copies of the target are ranked. A run with an unknown objective keeps its
    name.
    """
    if run.arguments.get("learning_rate") == 0:
        return START
    label = LABELS.get(run.arguments.get("objective"), run.name)
    return label + EDITS if run.arguments.get("tr_hard_negatives") else label


# -------------------------------------------------------------------------------------- measures


#: Chose the learning rates. Far from 0 even where Tatoeba is not.
HELD_OUT = Measure("held-out training pairs", (f"dev/{DEV}",))


def measures(study: Study) -> list[Measure]:
    """Return all measures that at least one outcome of a study has, in the order of the tables."""
    found = [HELD_OUT, *_tatoeba(), *_pools(study), *_hard_negatives(study), *_bucc()]
    xnli = {model: row[-1] for model, row in PAPER_XNLI.items()}
    found.append(Measure("XNLI, mean accuracy", ("xnli/mean/accuracy",), paper=xnli))
    found.append(_alignment("token retrieval, all words", "pool xx-en", "pool en-xx"))
    found.append(_alignment("AER", "AER"))
    return measured(study, found)


def _tatoeba() -> list[Measure]:
    """Return the measures of retrieval on Tatoeba, one per direction and group of languages."""
    found = []
    for direction, arrow in DIRECTIONS.items():
        for column, group in enumerate(TATOEBA_GROUPS):
            paper = {model: row[direction][column] for model, row in PAPER_TATOEBA.items()}
            path = f"tatoeba/averages/{group}/{direction}"
            found.append(Measure(f"Tatoeba {arrow}, {group}", (path,), paper=paper))
    return found


def _hard_negatives(study: Study) -> list[Measure]:
    """Return the measures of every evaluation that has hard negatives (altered copies, xsim++).

    For each such evaluation these are the error, and its parts by what was found instead: a kind
    of altered copy, such as negation, or another sentence. Kinds that no outcome of the study has
    are left out.
    """
    found = []
    for name in sorted(study.recipe.evaluate):
        kinds: set[str] = set()
        for outcome in study.outcomes:
            kinds.update(value_at(outcome.results, f"{name}/{HARD}") or ())
        for kind in sorted(kinds):
            label = f"hard negatives of {name}, error"
            sentences = f"{name}/sentences/error"
            if kind != "error":
                label += f" by {kind}"
                sentences = None
            path = f"{name}/{HARD}/{kind}"
            found.append(Measure(label, (path,), lower_is_better=True, sentences=sentences))
    return found


def _pools(study: Study) -> list[Measure]:
    """Return the measures of retrieval from the multilingual pool.

    There is one for each evaluation and direction, over the largest group of languages.
    """
    found = []
    for name in sorted(study.recipe.evaluate):
        groups: dict[str, None] = {}
        for outcome in study.outcomes:
            groups |= dict.fromkeys(value_at(outcome.results, f"{name}/averages") or ())
        if not groups:
            continue
        group = max(groups, key=_size_of_group)  # the first of equals: the whole group
        for direction, arrow in DIRECTIONS.items():
            key = f"pool_{direction}"
            label = f"multilingual pool of {name} {arrow}, {group}"
            path = f"{name}/averages/{group}/{key}"
            found.append(Measure(label, (path,), sentences=f"{name}/sentences/{key}"))
    return found


def _size_of_group(name: str) -> int:
    """Return the number of languages of a group, such as 6 for "6 of 36 languages"."""
    return next(int(word) for word in name.split() if word.isdigit())


def _bucc() -> list[Measure]:
    """Return the measures F1, precision and recall of mining, for each language pair of BUCC."""
    found = []
    for number, pair in enumerate(BUCC_PAIRS):
        for name, column in (("F1", 2), ("precision", 0), ("recall", 1)):
            place = 3 * number + column
            paper = {model: row[place] for model, row in PAPER_BUCC["sample"].items()}
            path = f"bucc/pairs/{pair}/{name.lower()}"
            found.append(Measure(f"BUCC {pair} sample, {name}", (path,), paper=paper))
    return found


def alignment_measures(study: Study) -> list[Measure]:
    """Return the measures of word alignment that at least one outcome of a study has."""
    return measured(study, [_alignment(name, name) for name in ALIGNMENT])


def _alignment(label: str, *names: str) -> Measure:
    """Return a measure of word alignment.

    Args:
        label: name in tables.
        names: names of results in `ALIGNMENT`. The measure is their mean.
    """
    paths = tuple(f"alignment/mean/{name}" for name in names)
    return Measure(label, paths, lower_is_better="AER" in names)


def measured(study: Study, among: Iterable[Measure]) -> list[Measure]:
    """Return the given measures that at least one outcome of a study has.

    Args:
        study: the study.
        among: the measures to select from.
    """
    found = []
    for measure in among:
        if any(each.value(measure) is not None for each in study.outcomes):
            found.append(measure)
    return found


def headline(study: Study) -> dict[str, Measure]:
    """Return short name -> measure, for the few measures that figures show.

    Measures that no outcome of the study has are left out.
    """
    names = {
        f"tatoeba/averages/{LARGEST}/xx-en": "Tatoeba xx→en",
        f"tatoeba/averages/{LARGEST}/en-xx": "Tatoeba en→xx",
    }
    for evaluation in study.recipe.evaluate:
        names[f"{evaluation}/{HARD}/error"] = "hard negatives"
    names["bucc/pairs/zh-en/f1"] = "BUCC zh-en"
    names["alignment/mean/AER"] = "word alignment"
    found = {measure.paths[0]: measure for measure in measures(study)}
    return {short: found[path] for path, short in names.items() if path in found}


def ablated(study: Study) -> list[Measure]:
    """Return the measures by which ablations are compared: held-out pairs and Tatoeba.

    Those that no outcome of the study has are left out.
    """
    paths = tuple(f"tatoeba/averages/{LARGEST}/{direction}" for direction in DIRECTIONS)
    tatoeba = Measure(f"Tatoeba, {LARGEST}, mean of both directions", paths)
    return measured(study, [HELD_OUT, tatoeba])
