"""Recipes: YAML files that say what a study trained and evaluated.

    name: e5
    train: {model_name_or_path: "{encoder}", max_steps: 60}  # arguments that all runs share
    seeds: [0, 1, 2]
    learning_rates: [2.0e-5, 5.0e-5, 1.0e-4]  # searched for every run that gives none
    evaluate: {tatoeba: "eval_retrieval.py --model {model} --output_file {result}"}
    runs:
      tr: {objective: tr}
      dap: {objective: tr+rtl}
      tr-same-time: {like: tr, same_time_as: dap}  # trained for dap's CPU time

- `like` copies another run's arguments, seeds, evaluations and chosen learning rate. What the run
  gives itself comes first.
- `total_time_as` names another run, whose whole training costs the same CPU time. Training the
  heads before the first step is counted in both.
- `seconds` trains a run for so long by the clock, instead of `max_steps`.
- `command` names a script or module that trained instead of train_dap.py.
- `model` names a ready encoder, which was evaluated without training.

The program that ran them is at commit 24dd9e7 (`python -m experiments.run`). Here they only say
what the results are of.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TRAIN = "train_dap.py"
#: Keys of a run that are not arguments of its command.
SPECIAL = ("like", "same_time_as", "total_time_as", "seconds", "seeds", "evaluate", "command")
SPECIAL += ("past", "model")


@dataclass(frozen=True)
class Run:
    """One line of a recipe's `runs`: a model that was trained once per seed.

    Attributes:
        arguments: arguments of the training command, name -> value.
        evaluate: names of the evaluations of the trained model.
        like: name of the run whose settings and learning rate it copies.
        same_time_as: name of the run whose steps cost the same CPU time.
        total_time_as: name of the run whose whole training costs the same CPU time.
        command: script or module that trained.
        model: ready encoder, a folder or Hub id, that was evaluated without training.
    """

    name: str
    arguments: Mapping[str, Any]
    seeds: tuple[int, ...]
    evaluate: tuple[str, ...]
    like: str | None = None
    same_time_as: str | None = None
    total_time_as: str | None = None
    command: str = TRAIN
    model: str | None = None

    @property
    def is_searched(self) -> bool:
        """Tell whether the learning rate of this run was searched among the recipe's rates."""
        is_given = self.like is not None or "learning_rate" in self.arguments
        return not is_given and self.model is None


@dataclass(frozen=True)
class Recipe:
    """The runs of a study and how they were evaluated.

    Attributes:
        evaluate: name of an evaluation -> its command.
        learning_rates: rates that were tried for runs that give none.
    """

    name: str
    runs: Mapping[str, Run]
    evaluate: Mapping[str, str]
    learning_rates: tuple[float, ...]

    def measured_for(self, run: Run) -> Run:
        """Return the run whose cost gave the number of steps of a run with `total_time_as`.

        It is the run itself. If the run is `like` another one with the same `total_time_as`, it is
        that one, so that both took equally many steps.
        """
        other = self.runs[run.like] if run.like is not None else None
        if other is None or other.total_time_as != run.total_time_as:
            return run
        return self.measured_for(other)

    def learning_rate(self, run: Run, score: Callable[[Run, float], float | None]) -> float | None:
        """Return the learning rate of a run: the one it gives, or the rate with the best score.

        A run that is `like` another has the rate of the other run. A ready encoder has 0.

        Args:
            score: returns the score of a run at a rate, higher is better, or None if there is none.

        Returns:
            The learning rate, or None while a score is missing.
        """
        if run.model is not None:
            return 0.0
        if "learning_rate" in run.arguments:
            return float(run.arguments["learning_rate"])
        if run.like is not None:
            return self.learning_rate(self.runs[run.like], score)
        found = {rate: score(run, rate) for rate in self.learning_rates}
        return None if None in found.values() else max(found, key=found.get)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. Its runs have all arguments that they take from other runs."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    runs: dict[str, Run] = {}
    for name, own in content["runs"].items():
        runs[name] = _run(name, own or {}, content, runs)
    rates = tuple(map(float, content.get("learning_rates", ())))
    return Recipe(content.get("name", path.stem), runs, content.get("evaluate", {}), rates)


def _run(name: str, own: dict[str, Any], content: dict[str, Any], before: dict[str, Run]) -> Run:
    """Return the run that some lines of a recipe describe."""
    arguments = {key: value for key, value in own.items() if key not in SPECIAL}
    if "model" in own:
        evaluate = tuple(own.get("evaluate", content["evaluate"]))
        return Run(name, arguments, (0,), evaluate, model=own["model"])

    # What the lines do not give comes from the run that it is `like`, or else from the recipe.
    shared = Run(
        name,
        content.get("train", {}),
        seeds=tuple(content.get("seeds", [0])),
        evaluate=tuple(content.get("evaluate", ())),
    )
    model = before[own["like"]] if "like" in own else shared
    return Run(
        name,
        {**model.arguments, **arguments},
        seeds=tuple(own.get("seeds", model.seeds)),
        evaluate=tuple(own.get("evaluate", model.evaluate)),
        like=own.get("like"),
        same_time_as=own.get("same_time_as"),
        total_time_as=own.get("total_time_as", model.total_time_as),
        command=own.get("command", model.command),
    )
