"""Read and write the result file of a study, `experiments/results/STUDY.json`.

{"study": "warm",
 "shared": {settings that all runs of the study have in common},
 "step_seconds": {run: CPU seconds of a training step},
 "evaluations": {evaluation: how it was made},
 "runs": [{"run": "tr", "seed": 0, ..., "settings": {those that differ}, "results": {...}}]}
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from dap_transformers.errors import UserError
from dap_transformers.files import read_object
from experiments.recipes import read_recipe
from experiments.statistics import Outcome, Study

KEYS = ("study", "shared", "step_seconds", "evaluations", "runs")


def read_studies(recipes_dir: Path, results_dir: Path) -> list[Study]:
    """Read every recipe of a folder, each with the merged results of its runs.

    Args:
        recipes_dir: folder with a YAML file per study.
        results_dir: folder with a merged result file per study. A study may have none yet. The file
            `cost.json`, which is of no study, is skipped.

    Returns:
        The studies, sorted by name, ablations last. A study without a result file has no outcomes.

    Raises:
        UserError: a result file is damaged, has no recipe, or has a run that its recipe lacks.
    """
    recipes = [read_recipe(path, None) for path in sorted(recipes_dir.glob("*.yaml"))]
    known = {recipe.name for recipe in recipes}
    for path in sorted(results_dir.glob("*.json")):
        if path.stem not in known and path.name != "cost.json":
            raise UserError(f"{path}: no recipe in {recipes_dir} has this name: move it away")

    studies = []
    for recipe in recipes:
        path = results_dir / f"{recipe.name}.json"
        outcomes: list[Outcome] = []
        seconds: dict[str, float] = {}
        if path.is_file():
            outcomes, seconds = read_study_file(path)
        for outcome in outcomes:
            if outcome.run not in recipe.runs:
                raise UserError(f"{path}: the recipe {recipe.name} has no run {outcome.run}")
        studies.append(Study(recipe, tuple(outcomes), seconds))
    return sorted(studies, key=lambda study: (study.is_ablation, study.name))


def read_study_file(path: Path) -> tuple[list[Outcome], dict[str, float]]:
    """Read the merged result file of a study.

    Returns:
        The outcome of each training, and a dictionary: name of a run -> CPU seconds of a training
        step.

    Raises:
        UserError: the file was not written by `experiments.collect`.
    """
    content = read_object(path)
    names = {each.name for each in fields(Outcome)}
    is_whole = set(KEYS) <= content.keys()
    if not is_whole or any(entry.keys() != names for entry in content["runs"]):
        raise UserError(f"{path}: not written by `python -m experiments.collect`; make it anew")
    outcomes = []
    for entry in content["runs"]:
        settings = content["shared"] | entry["settings"]
        outcomes.append(Outcome(**(entry | {"settings": settings})))
    return outcomes, content["step_seconds"]


def read_evaluations(path: Path) -> dict[str, dict[str, Any]]:
    """Read how the models of a study were evaluated, from its merged result file.

    Args:
        path: a file that `read_study_file` has accepted.

    Returns:
        Name of an evaluation -> its protocol and settings.
    """
    return read_object(path)["evaluations"]


def write_study_file(
    path: Path,
    outcomes: Sequence[Outcome],
    step_seconds: Mapping[str, float],
    evaluations: Mapping[str, Any],
) -> None:
    """Write the merged result file of a study, with one training per line.

    Settings that all trainings have in common are written only once.

    Args:
        path: file to write. Its name without suffix is the name of the study. Its folder is made if
            it is missing.
        outcomes: results of the trainings, at least one.
        step_seconds: name of a run -> CPU seconds of a training step.
        evaluations: name of an evaluation -> its protocol and settings.
    """
    shared = common_items([outcome.settings for outcome in outcomes])
    lines = []
    for outcome in outcomes:
        entry = asdict(outcome)
        own = outcome.settings.items()
        entry["settings"] = {key: value for key, value in own if key not in shared}
        lines.append(json.dumps(entry, ensure_ascii=False))
    head = {
        "study": path.stem,
        "shared": shared,
        "step_seconds": step_seconds,
        "evaluations": evaluations,
    }
    text = json.dumps(head, ensure_ascii=False, indent=1).removesuffix("\n}")
    text += ',\n "runs": [\n' + ",\n".join(lines) + "\n ]\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def common_items(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys that have the same value in all mappings (at least one), with this value.

    >>> common_items([{"a": 1, "b": 2}, {"a": 1, "b": 3}])
    {'a': 1}
    """
    first, *others = mappings
    found = {}
    for key, value in first.items():
        if all(key in other and other[key] == value for other in others):
            found[key] = value
    return found
