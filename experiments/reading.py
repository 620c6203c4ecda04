"""Result files and recipes of a folder as studies, and what speaks against comparing the models in them."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dap.errors import UserError
from experiments.recipes import OWN, Run, flags, read_recipe
from experiments.statistics import Outcome, Study

KEYS = ("recipe", "run", "seed", "learning_rate", "record", "train", "dev", "curve", "evaluations")
#: Settings of an evaluation that may differ between models that are compared: places, and what the model itself is.
FREE = ("recipe", "data", "bucc", "train_data", "pooling")
#: How the names of arguments begin that recipes may have and that cannot change the weights: no record has them.
HARMLESS = ("logging_", "save_", "eval_", "report_to", "use_cpu", "load_best_", "metric_for_best_", "mini_batch_size")
#: Arguments of a training that its record has by another name.
RECORDED = {"total_train_batch_size": "pairs a step"}
#: What a record tells of the seed, and what follows from other arguments, from the text or from where things lie.
OF_THE_SEED = ("seed", "data_seed", "training text", "dev text")
FOLLOWS = ("target_vocab_size", "rtl_languages", "tr_temperature", "learning_rate", "model_name_or_path")


def read_studies(recipes_dir: Path, results_dir: Path) -> list[Study]:
    """Every recipe of a folder with its outcomes, by name, those of ablations last.

    Raises:
        ValueError: a result file that is none, one of a run that no recipe has or has otherwise, two of one training,
            or evaluations of a study that were made in different ways.
    """
    recipes = [read_recipe(path, _any_places(path)) for path in sorted(recipes_dir.glob("*.yaml"))]
    outcomes = read_outcomes(results_dir)
    known = {(recipe.name, name): run for recipe in recipes for name, run in recipe.runs.items()}
    for path, outcome in outcomes.items():
        if (outcome.recipe, outcome.run) not in known:
            raise UserError(f"{path}: no recipe of {recipes_dir} has {outcome.recipe}/{outcome.run}: move it away")
        require_as_told(path, outcome, known[outcome.recipe, outcome.run])
    studies = [Study(each, tuple(o for o in outcomes.values() if o.recipe == each.name)) for each in recipes]
    for study in studies:
        own = {path: each for path, each in outcomes.items() if each.recipe == study.name}
        require_alike(own, study.recipe.runs)
        require_comparable(own)
    return sorted(studies, key=lambda study: (study.is_ablation, study.name))


def _any_places(path: Path) -> dict[str, str]:
    """A recipe is read for its runs; its places may stay as they are."""
    names = set(re.findall(r"{(\w+)}", path.read_text(encoding="utf-8"))) - set(OWN)
    return {name: f"{{{name}}}" for name in names}


def read_outcomes(results_dir: Path) -> dict[Path, Outcome]:
    """Every `RECIPE/RUN/seed-N.json` of a folder, in the order of their names.

    Raises:
        ValueError: a file that is not a result, or two of one training.
    """
    found: dict[tuple[Any, ...], Path] = {}
    outcomes = {}
    for path in sorted(results_dir.glob("*/*/seed-*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path} is no JSON: {error}") from error
        if lacking := [key for key in KEYS if key not in content]:
            raise UserError(f"{path} has no {', '.join(lacking)}: it is no result of experiments.run")
        identity = tuple(content[key] for key in KEYS[:4])
        if identity in found:
            raise UserError(f"{path} and {found[identity]} are both of {identity}: move one away")
        found[identity] = path
        outcomes[path] = Outcome(*identity, content)
    return outcomes


def require_as_told(path: Path, outcome: Outcome, run: Run) -> None:
    """Raises `ValueError` where a result was trained with other arguments than its recipe has by now."""
    own = {"learning_rate", *(["max_steps"] if run.same_time_as else [])}  # which the runner fills in
    told = {RECORDED.get(key, key): value for key, value in run.arguments.items()}
    line = outcome.content.get("command") or [run.command]  # not known of the first results
    trained = {**outcome.content["record"], "command": line[0]}
    for key, value in (told | {"command": run.command}).items():
        if key in own or isinstance(value, str) and "{" in value:  # a place
            continue
        if key not in trained and len(line) > 1 and not (key.startswith(HARMLESS) or _has(line, flags({key: value}))):
            raise UserError(f"{path}: trained without {shlex.join(flags({key: value}))}: train it anew")
        if key in trained and trained[key] != value:
            raise UserError(f"{path}: trained with {key} {trained[key]}, but {run.name} has {value}: train it anew")


def _has(line: Sequence[str], part: Sequence[str]) -> bool:
    return any(list(line[start : start + len(part)]) == list(part) for start in range(len(line)))


def require_alike(outcomes: Mapping[Path, Outcome], runs: Mapping[str, Run]) -> None:
    """Raises `ValueError`, with both files, where models of one study differ in what its recipe does not tell.

    Such as the text of a seed, the weights of an encoder that lay in the same place, or a default of another version.
    """
    told = {name: {RECORDED.get(key, key) for key in run.arguments} for name, run in runs.items()}
    first: dict[tuple[Any, ...], tuple[Path, Any]] = {}
    for path, outcome in outcomes.items():
        run = runs[outcome.run]
        start = (run.arguments.get("model_name_or_path"), run.arguments.get("train_data"))
        known = {key: value for key, value in outcome.content["record"].items() if key not in FOLLOWS}
        known["encoder"] = outcome.content.get("encoder")
        for key, value in known.items():
            if value is None or key in told[outcome.run]:
                continue
            about = (key, start, outcome.seed if key in OF_THE_SEED else None)
            other, theirs = first.setdefault(about, (path, value))
            if value != theirs:
                shown = "" if key in OF_THE_SEED else f" ({theirs!r} and {value!r})"
                raise UserError(f"{other} and {path} differ in {key}{shown}, which no recipe tells: train one anew")


def require_comparable(outcomes: Mapping[Path, Outcome]) -> None:
    """Raises `ValueError`, with both files, where an evaluation was made in two ways."""
    first: dict[str, tuple[Path, dict[str, Any]]] = {}
    for path, outcome in outcomes.items():
        for name, report in outcome.content["evaluations"].items():
            made = {"protocol": report.get("protocol")} | report.get("settings", {})
            made = {key: value for key, value in made.items() if key not in FREE}
            other, theirs = first.setdefault(name, (path, made))
            if differing := sorted(key for key in made | theirs if made.get(key) != theirs.get(key)):
                key = differing[0]
                values = f"{key} {theirs.get(key)!r} and {made.get(key)!r}"
                raise UserError(f"{name} of {other} and {path} cannot be compared ({values}): evaluate one anew")
