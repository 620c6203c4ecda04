"""Draw training curves, and accuracy by language before and after a training, with matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dap_transformers.errors import UserError
from dap_transformers.evaluation.paper import DIRECTIONS

CURVES = "curves.svg"  # file name in a training's output folder
#: Title of a panel -> the evaluation metrics that it shows.
EVALUATED = {
    "accuracy on dev pairs": ["eval_mean_accuracy", "eval_mean_pool_accuracy"],
    "information from the source": ["eval_rtl_source_nats", "eval_bow_source_nats"],
}
#: Title of a panel -> label of its vertical axis.
UNITS = {
    "training loss": "nats",
    "accuracy on dev pairs": "accuracy, %",
    "information from the source": "nats per token",
}
MARKERS = "os^D"  # of matplotlib, one per report


def curves(
    history: Sequence[Mapping[str, float]],
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Collect the points of a training's curves: losses, dev accuracy, and source information.

    Metrics with fewer than 3 points, and panels without metrics, are left out.

    Args:
        history: the `log_history` of a Trainer: a dictionary of metrics and "step" per log.

    Returns:
        Title of a panel -> metric -> points (step, value).

    >>> history = [{"step": step, "loss": 9 - step} for step in (1, 2, 3)]
    >>> curves(history + [{"step": 3, "train_loss": 7}])
    {'training loss': {'loss': [(1, 8), (2, 7), (3, 6)]}}
    """
    losses: dict[str, None] = {}
    for line in history:
        if "loss" in line:
            losses |= dict.fromkeys(name for name in line if name.endswith("loss"))

    panels = {}
    for title, names in {"training loss": list(losses), **EVALUATED}.items():
        lines = {}
        for name in names:
            points = [(line["step"], line[name]) for line in history if name in line]
            if len(points) > 2:
                lines[name] = points
        if lines:
            panels[title] = lines
    return panels


def plot_curves(
    history: Sequence[Mapping[str, float]], path: str | Path, kept: int | None = None
) -> None:
    """Draw the curves of a training. Write no picture if no curve has 3 points.

    Args:
        history: the `log_history` of a Trainer: a dictionary of metrics and "step" per log.
        path: picture to write: .svg, .png or .pdf.
        kept: step of the weights that were kept, which a dotted line marks. None draws no line.
    """
    panels = curves(history)
    if not panels:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (title, lines) in zip(all_axes, panels.items(), strict=True):
        for name, points in lines.items():
            label = name.removeprefix("eval_").replace("_", " ")
            axes.plot(*zip(*points, strict=True), label=label)
        if kept is not None:
            axes.axvline(kept, color="grey", linestyle=":", label="kept step")
        axes.set(title=title, xlabel="step", ylabel=UNITS[title])
        axes.grid(alpha=0.3)
        # below the axes, so that it covers no curve
        axes.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)
    # Legends outside of the axes can push the labels at the border out of the picture.
    figure.savefig(path, bbox_inches="tight")


def drawable_languages(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Select the languages of a report that have a retrieval accuracy in both directions.

    Args:
        report: a report of `eval_retrieval.py`. Any other report gives an empty result.

    Returns:
        Language code -> its numbers in the report.
    """
    languages = {}
    for code, numbers in (report.get("languages") or {}).items():
        if DIRECTIONS.keys() <= numbers.keys():
            languages[code] = numbers
    return languages


def plot_accuracies(reports: Mapping[str, Mapping[str, Any]], path: str | Path) -> None:
    """Draw accuracy by language as .svg, .png or .pdf, one panel per direction.

    Args:
        reports: label, such as "before" -> report of `eval_retrieval.py`. Only languages that all
            reports have are drawn.
        path: picture to write.
    """
    from matplotlib.figure import Figure

    found = {label: drawable_languages(report) for label, report in reports.items()}
    first, *others = found.values()
    codes = list(first)
    for languages in others:
        codes = [code for code in codes if code in languages]
    if not codes:
        labels = ", ".join(found)
        raise UserError(f"no language is in all of the reports {labels}: evaluate on the same text")

    figure = Figure(figsize=(3 + 0.3 * len(codes), 5.4), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for axes, (direction, title) in zip(panels, DIRECTIONS.items(), strict=True):
        for (label, languages), marker in zip(found.items(), MARKERS, strict=False):
            accuracies = [languages[code][direction] for code in codes]
            axes.plot(codes, accuracies, marker, label=label)
        axes.set(title=title, ylabel="accuracy, %")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)
