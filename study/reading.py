"""Read the result file of a study, `study/results/STUDY.json`.

{"study": "warm",
 "shared": {settings that all runs of the study have in common},
 "step_seconds": {run: CPU seconds of a training step},
 "evaluations": {evaluation: how it was made},
 "runs": [{"run": "tr", "seed": 0, ..., "settings": {those that differ}, "results": {...}}]}
"""

from pathlib import Path

from dap_transformers.files import read_json
from study.recipes import read_recipe
from study.statistics import Outcome, Study


def read_studies(recipes_dir: Path, results_dir: Path) -> list[Study]:
    """Read every recipe of a folder, each with the merged results of its runs.

    Returns:
        The studies, sorted by name, ablations last. A study without a result file has no outcomes.
    """
    studies = []
    for recipe_path in sorted(recipes_dir.glob("*.yaml")):
        recipe = read_recipe(recipe_path)
        path = results_dir / f"{recipe.name}.json"
        outcomes, seconds = read_study_file(path) if path.is_file() else ([], {})
        studies.append(Study(recipe, tuple(outcomes), seconds))
    return sorted(studies, key=lambda study: (study.is_ablation, study.name))


def read_study_file(path: Path) -> tuple[list[Outcome], dict[str, float]]:
    """Return the outcome of each training, and the CPU seconds of a training step by run."""
    content = read_json(path)
    outcomes = []
    for entry in content["runs"]:
        settings = content["shared"] | entry["settings"]
        outcomes.append(Outcome(**(entry | {"settings": settings})))
    return outcomes, content["step_seconds"]
