"""Result files and recipes of a folder as studies, and what speaks against comparing the models in them."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dap.errors import UserError
from dap.file_io import read_object
from experiments.recipes import Run, flags, read_recipe
from experiments.statistics import Outcome, Study

IDENTITY = ("recipe", "run", "seed", "learning_rate")
KEYS = (*IDENTITY, "record", "train", "dev", "curve", "evaluations", "machine", "versions")
#: Settings of an evaluation that may differ between models that are compared: places, and what the model itself is.
FREE = ("recipe", "data", "bucc", "train_data", "pooling")
#: How the names of arguments begin that recipes may have and that cannot change the weights: no record has them.
HARMLESS = (
    "logging_",
    "save_",
    "eval_",
    "report_to",
    "use_cpu",
    "load_best_",
    "metric_for_best_",
    "mini_batch_size",
)
#: Arguments of a training that its record has by another name.
RECORDED = {"total_train_batch_size": "pairs a step"}
#: What a record tells of the seed, and what follows from other arguments, from the text or from where things lie.
OF_THE_SEED = ("seed", "data_seed", "training text", "dev text")
FOLLOWS = (
    "target_vocab_size",
    "rtl_languages",
    "tr_temperature",
    "learning_rate",
    "model_name_or_path",
)


def read_studies(recipes_dir: Path, results_dir: Path) -> list[Study]:
    """Every recipe of a folder with its outcomes, by name, those of ablations last.

    Raises:
        ValueError: a result file that is none, one of a run that no recipe has or has otherwise, or models or
            evaluations of a study that were made in different ways.
    """
    recipes = [read_recipe(path, None) for path in recipes_dir.glob("*.yaml")]
    known = {(recipe.name, name): run for recipe in recipes for name, run in recipe.runs.items()}
    outcomes = read_outcomes(results_dir)
    for path, outcome in outcomes.items():
        if (outcome.recipe, outcome.run) not in known:
            raise UserError(
                f"{path}: no recipe of {recipes_dir} has {outcome.recipe}/{outcome.run}: move it away"
            )
        require_as_told(path, outcome, known[outcome.recipe, outcome.run])
    studies = []
    for recipe in recipes:
        own = {path: outcome for path, outcome in outcomes.items() if outcome.recipe == recipe.name}
        require_alike(own, recipe.runs)
        studies.append(Study(recipe, tuple(own.values())))
    return sorted(studies, key=lambda study: (study.is_ablation, study.name))


def read_outcomes(results_dir: Path) -> dict[Path, Outcome]:
    """Every `RECIPE/RUN-lrRATE/seed-N.json` of a folder, in the order of their names.

    Raises:
        ValueError: a file that is no result, or that of another training than its name says.
    """
    outcomes = {}
    for path in sorted(results_dir.glob("*/*/seed-*.json")):
        content = read_object(path)
        if lacking := [key for key in KEYS if key not in content]:
            raise UserError(
                f"{path} has no {', '.join(lacking)}: it is no result of experiments.run"
            )
        outcome = Outcome(*(content[key] for key in IDENTITY), content)
        place = (
            f"{outcome.recipe}/{outcome.run}-lr{outcome.learning_rate:g}/seed-{outcome.seed}.json"
        )
        if path != results_dir / place:
            raise UserError(f"{path} is the result {place}: move it there, or away")
        outcomes[path] = outcome
    return outcomes


def require_as_told(path: Path, outcome: Outcome, run: Run) -> None:
    """Raises `ValueError` where a result was trained with other arguments than its recipe has by now."""
    own = {
        "learning_rate",
        *(["max_steps"] if run.same_time_as else []),
    }  # which the runner fills in
    told = {RECORDED.get(key, key): value for key, value in run.arguments.items() if key not in own}
    line = outcome.content.get("command") or [run.command]  # not known of the first results
    trained = {**outcome.content["record"], "command": line[0]}
    for key, value in (told | {"command": run.command}).items():
        if isinstance(value, str) and "{" in value:  # a place
            continue
        if key in trained and trained[key] != value:
            raise UserError(
                f"{path}: trained with {key} {trained[key]}, but {run.name} has {value}: train it anew"
            )
        is_told = key in trained or key.startswith(HARMLESS) or len(line) == 1
        given = shlex.join(flags({key: value}))
        if given and not is_told and f" {given} " not in f"{shlex.join(line)} ":
            raise UserError(f"{path}: trained without {given}: train it anew")


def require_alike(outcomes: Mapping[Path, Outcome], runs: Mapping[str, Run]) -> None:
    """Raises `ValueError`, with both files, where models of one study differ in what its recipe does not tell.

    Such as the text of a seed, the weights of an encoder that lay in the same place, a default of another version,
    or how they were evaluated.
    """
    first: dict[tuple[Any, ...], tuple[Path, Any]] = {}
    for path, outcome in outcomes.items():
        for about, value in [*_of_training(outcome, runs[outcome.run]), *_of_evaluations(outcome)]:
            other, theirs = first.setdefault(about, (path, value))
            if value == theirs:
                continue
            what = about[0]
            if isinstance(theirs, dict) and isinstance(value, dict):
                part = min(key for key in theirs | value if theirs.get(key) != value.get(key))
                what, theirs, value = f"{part} of {what}", theirs.get(part), value.get(part)
            values = f"{theirs!r} and {value!r}"
            raise UserError(
                f"{other} and {path} differ in {what} ({values}), which no recipe tells: make one anew"
            )


def _of_training(outcome: Outcome, run: Run) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """(What must be alike among the models that start from the same, from what they start), its value."""
    told = {RECORDED.get(key, key) for key in run.arguments}
    start = (run.arguments.get("model_name_or_path"), run.arguments.get("train_data"))
    for key, value in (
        outcome.content["record"] | {"encoder": outcome.content.get("encoder")}
    ).items():
        if value is not None and key not in told and key not in FOLLOWS:
            yield (key, start, outcome.seed if key in OF_THE_SEED else None), value


def _of_evaluations(outcome: Outcome) -> Iterator[tuple[tuple[str], dict[str, Any]]]:
    """How each evaluation was made, which must be alike in a whole study."""
    for name, report in outcome.content["evaluations"].items():
        made = {"protocol": report.get("protocol")} | report.get("settings", {})
        yield (
            (name,),
            {key: value for key, value in made.items() if key not in FREE and value is not None},
        )
