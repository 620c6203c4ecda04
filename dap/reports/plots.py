"""Pictures of a training's curves, and of accuracy by language before and after; matplotlib draws them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dap.errors import UserError
from dap.reports.paper import DIRECTIONS

CURVES = "curves.svg"  # of a training, in its folder
EVALUATED = {
    "accuracy on dev pairs, %": ["eval_mean_accuracy"],
    "nats a token from the source": ["eval_rtl_source_nats", "eval_bow_source_nats"],
}


def require_drawable(argument: str, path: str | Path) -> None:
    """Raise `UserError` unless the library that draws is installed, and draws such a file."""
    if Path(path).suffix not in (".svg", ".png", ".pdf"):
        raise UserError(
            f"{argument} {path}: give the picture a name that ends in .svg, .png or .pdf"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(f"{argument}: {error}: pip install 'dap-transformers[eval]'") from error


def curves(
    history: Sequence[Mapping[str, float]],
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Panel -> measure -> points (step, value) of a Trainer's `log_history`; one of fewer than 3 points is left out.

    >>> curves([{"step": step, "loss": 9 - step} for step in (1, 2, 3)] + [{"step": 3, "train_loss": 7}])
    {'training loss, nats': {'loss': [(1, 8), (2, 7), (3, 6)]}}
    """
    names = dict.fromkeys(
        name for line in history if "loss" in line for name in line if name.endswith("loss")
    )
    panels = {"training loss, nats": list(names), **EVALUATED}
    found = {
        title: {
            name: [(line["step"], line[name]) for line in history if name in line] for name in names
        }
        for title, names in panels.items()
    }
    found = {
        title: {name: line for name, line in lines.items() if len(line) > 2}
        for title, lines in found.items()
    }
    return {title: lines for title, lines in found.items() if lines}


def plot_curves(history: Sequence[Mapping[str, float]], path: str | Path) -> None:
    """Draws the panels of `curves`, if there are any, as .svg, .png or .pdf."""
    if not (panels := curves(history)):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    for axes, (title, lines) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name, points in lines.items():
            axes.plot(*zip(*points, strict=True), label=name.removeprefix("eval_"))
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path)


def drawable_languages(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The languages of a report with their numbers, as far as these are accuracies of both directions."""
    languages = report.get("languages", {})
    return {
        code: numbers for code, numbers in languages.items() if DIRECTIONS.keys() <= numbers.keys()
    }


def plot_accuracies(reports: Mapping[str, Mapping[str, Any]], path: str | Path) -> None:
    """Draws accuracy by language, a panel a direction, as .svg, .png or .pdf.

    Args:
        reports: label, such as "before", -> report of `eval_retrieval.py`; languages that one lacks are left out.

    Raises:
        UserError: no language is in all of them.
    """
    from matplotlib.figure import Figure

    found = {label: drawable_languages(report) for label, report in reports.items()}
    first = next(iter(found.values()))
    codes = [code for code in first if all(code in languages for languages in found.values())]
    if not codes:
        raise UserError(
            f"no language is in all reports to draw ({', '.join(found)}): evaluate on the same text"
        )
    figure = Figure(figsize=(3 + 0.3 * len(codes), 5.4), layout="constrained")
    for axes, (direction, title) in zip(
        figure.subplots(2, 1, sharex=True), DIRECTIONS.items(), strict=True
    ):
        for (label, languages), marker in zip(found.items(), "os^D", strict=False):
            axes.plot(codes, [languages[code][direction] for code in codes], marker, label=label)
        axes.set(title=title, ylabel="accuracy, %")
        axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path)
