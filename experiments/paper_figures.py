"""The paper's Figures 1, 3 and 4, drawn from the finished runs of its recipe.

- `figure-1.svg`: token states of 100 Arabic-English pairs, for TR and for DAP.
- `figure-3.svg`: results by `rtl_ratio`, the share of the target's tokens that RTL reconstructs.
- `figure-4.svg`: results by `rtl_layers`, the number of layers of the RTL head.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dap_transformers.alignment.alignment_plots import plot_token_states
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.evaluation.paper import PAPER_DIRECTIONS
from dap_transformers.languages import NAMES
from eval_retrieval import read_languages
from experiments.paper_tables import BASE, TASKS, Found, task_means, variants
from experiments.recipes import Recipe
from experiments.statistics import spread
from experiments.study_figures import STYLES, Picture, save

#: Runs whose token states Figure 1 compares, and the title of each panel.
COMPARED = {"mbert-tr": "TR", BASE: "DAP"}
LANGUAGE = "ar"
PAIRS = 100
LENGTH = 32  # tokens of a sentence, as in the paper's evaluations
#: File name -> option that changes, and label of the axis.
VARIED = {
    "figure-3.svg": ("rtl_ratio", "reconstruction ratio ρ"),
    "figure-4.svg": ("rtl_layers", "layers K of the RTL head"),
}
LABELS = ("accuracy, %", "F1, %", "accuracy, %")


def draw_figures(
    recipe: Recipe, found: Found, models: Mapping[str, Path], folder: Path
) -> list[str]:
    """Draw the figures whose results are there.

    Args:
        recipe: the paper's recipe.
        found: reports of the finished evaluations.
        models: run -> folder of a trained model, for the runs that have one.
        folder: where to write the pictures.

    Returns:
        A line per figure, which says where it is or what it lacks.

    Raises:
        UserError: the recipe has no run that the figures compare.
    """
    lacking = [run for run in COMPARED if run not in recipe.runs]
    if lacking:
        raise UserError(
            f"--figures: the recipe {recipe.name} has no run {lacking[0]}: give "
            "experiments/recipes/paper.yaml, or a recipe with its runs"
        )
    folder.mkdir(parents=True, exist_ok=True)
    lines = [_draw_token_states(recipe, models, folder / "figure-1.svg")]
    for name, (option, label) in VARIED.items():
        data = varied_data(recipe, found, option)
        picture = Picture({"label": label, "tasks": data}, label, draw_varied)
        known = {value for points in data.values() for value in points}
        without = [value for value in variants(recipe, option) if value not in known]
        if not data:
            lines.append(f"{name}: no results yet")
            continue
        save(picture, folder / name)
        note = f", without {option} {', '.join(map(str, without))}" if without else ""
        lines.append(f"{folder / name}{note}")
    return lines


def _draw_token_states(recipe: Recipe, models: Mapping[str, Path], path: Path) -> str:
    """Draw Figure 1, and return a line that says where it is or what it lacks.

    Args:
        recipe: the paper's recipe, with the place of the data.
        models: run -> folder of a trained model.
        path: picture to write.
    """
    lacking = [run for run in COMPARED if run not in models]
    if lacking:
        return f"{path.name}: {lacking[0]} is not trained yet"
    pairs = read_languages([f"{recipe.places['data']}/tatoeba"], [LANGUAGE], PAIRS)[LANGUAGE]
    sides = list(zip(*pairs, strict=True))  # sources, then targets
    states = []
    for run in COMPARED:
        encoder = SentenceEncoder.from_pretrained(str(models[run]), max_seq_length=LENGTH)
        states.append(tuple(np.concatenate(encoder.encode_tokens(side)) for side in sides))
    before, after = states
    titles = tuple(COMPARED.values())
    distances = plot_token_states(before, after, path, NAMES[LANGUAGE], titles=titles)
    measured = ", ".join(f"{title} {each:.2f}" for title, each in zip(titles, distances))
    return f"{path}: centres of both languages are {measured} spreads apart"


def varied_data(recipe: Recipe, found: Found, option: str) -> dict[str, dict[float, list[float]]]:
    """Collect what a figure shows: task -> value of the option -> a result per seed.

    Args:
        recipe: the paper's recipe.
        found: reports of the finished evaluations.
        option: "rtl_ratio" or "rtl_layers".
    """
    data: dict[str, dict[float, list[float]]] = {}
    for value, run in variants(recipe, option).items():
        for reports in found.get(run, {}).values():
            for task, number in zip(TASKS, task_means(reports), strict=True):
                if number is not None:
                    data.setdefault(task, {}).setdefault(value, []).append(number)
    return {task: data[task] for task in TASKS if task in data}


def draw_varied(figure: Any, data: Mapping[str, Any]) -> None:
    """Draw a panel per task: mean, one standard deviation and the value of every seed.

    A dashed line shows the paper's result of the base run.

    Args:
        figure: an empty matplotlib figure.
        data: "label" of the x axis, and "tasks", the result of `varied_data`.
    """
    tasks = data["tasks"]
    colour, line, marker = STYLES["DAP"]
    paper = dict(zip(TASKS, PAPER_DIRECTIONS["source-to-target"], strict=True))
    units = dict(zip(TASKS, LABELS, strict=True))
    figure.set_size_inches(3.2 * len(tasks), 3.0)
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    for axes, (task, points) in zip(panels, tasks.items(), strict=True):
        spreads = [spread(values) for values in points.values()]
        means = [each.mean for each in spreads]
        deviations = [each.sd or 0.0 for each in spreads]
        axes.errorbar(
            list(points), means, yerr=deviations, fmt=line + marker, color=colour, capsize=3
        )
        for value, results in points.items():
            axes.plot([value] * len(results), results, ".", color=colour, markersize=4, alpha=0.7)
        axes.axhline(paper[task], color="#777777", linestyle="--", linewidth=1, label="paper, DAP")
        axes.set(title=task, xlabel=data["label"], ylabel=units[task], xticks=list(points))
        axes.grid(alpha=0.3)
    panels[0].legend(frameon=False, fontsize=8)
