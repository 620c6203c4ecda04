"""The plots of docs/reproduction.md, drawn from the numbers of the result files alone.

A plot is first its data, plain lists that say everything it shows, and then an SVG file. The file carries a digest of
the data, by which `experiments.report --check` knows whether it is still the picture of today's results.
"""

import hashlib
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.statistics import START, Measure, Outcome, Study, ablated, headline, spread

#: Of Okabe and Ito's palette for all kinds of colour vision; line style and marker say the same again.
STYLES = {"TR": ("#0072B2", "-", "o"), "TR+TLM": ("#E69F00", "--", "s"), "DAP": ("#D55E00", "-.", "^")}
OTHERS = (("#009E73", ":", "D"), ("#CC79A7", "-", "v"), ("#56B4E9", "--", "P"), ("#000000", ":", "X"))
LOSSES = {"tr_loss": "TR loss", "rtl_loss": "RTL loss", "tlm_loss": "TLM loss"}
DIGEST = "data "


@dataclass(frozen=True)
class Picture:
    """What a plot shows, and how: `draw(figure, data)` fills an empty matplotlib figure."""

    data: Mapping[str, Any]
    caption: str
    draw: Callable[[Any, Mapping[str, Any]], None]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()[:16]


def pictures(studies: Sequence[Study]) -> dict[str, Picture]:
    """File name -> plot, of everything that there are results for."""
    found = {}
    if data := search_data(studies):
        caption = "Accuracy on held-out pairs of the training text by learning rate"
        found["learning-rates.svg"] = Picture(data, caption, draw_search)
    for study in studies:
        if study.is_ablation and (data := ablation_data(study)):
            caption = f"{study.name}: differences to `base`"
            found[f"{study.name}.svg"] = Picture(data, caption, draw_ablations)
        if study.is_comparison and (data := loss_data(study)):
            found[f"loss-{study.name}.svg"] = Picture(
                data, f"{study.name}: training losses by pairs seen", draw_losses
            )
        if study.is_comparison and (data := comparison_data(study)):
            caption = f"{study.name}: means, standard deviations and every seed"
            found[f"comparison-{study.name}.svg"] = Picture(data, caption, draw_comparison)
    return found


def save(picture: Picture, path: Path) -> None:
    """Draws an SVG file, the same bytes for the same data and matplotlib."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = {"svg.hashsalt": path.name, "svg.fonttype": "none", "font.family": "DejaVu Sans", "font.size": 9}
    with rc_context(settings):
        figure = Figure(layout="constrained")
        FigureCanvasSVG(figure)
        picture.draw(figure, picture.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None, "Description": DIGEST + picture.digest}
        figure.savefig(path, format="svg", metadata=metadata)


def digest_of(path: Path) -> str | None:
    """The digest of the data that a file was drawn from; None for no such file or another picture."""
    if not path.is_file():
        return None
    found = re.search(rf"<dc:description>{DIGEST}(\w+)</dc:description>", path.read_text(encoding="utf-8"))
    return found[1] if found else None


# ------------------------------------------------------------------------------------------------- data


def loss_data(study: Study) -> dict[str, Any]:
    """Loss -> label -> points (pairs seen, mean over the seeds), of the runs that see the same number of pairs."""
    found: dict[str, Any] = {}
    for key, title in LOSSES.items():
        for label, name in study.main_runs().items():
            points = [] if label == START else mean_curve(study.final(name), key)
            if points:
                found.setdefault(title, {})[label] = points
    return found


def mean_curve(outcomes: Iterable[Outcome], key: str) -> list[tuple[int, float]]:
    """(pairs seen, mean over the seeds) at the steps that all of them logged."""
    curves = [{line["step"] * each.pairs_a_step: line[key] for line in each.content["curve"] if key in line}
              for each in outcomes]  # fmt: skip
    if not curves:
        return []
    shared = sorted(set(curves[0]).intersection(*curves))
    return [(pairs, round(statistics.fmean(curve[pairs] for curve in curves), 4)) for pairs in shared]


def search_data(studies: Sequence[Study]) -> dict[str, Any]:
    """Study -> label -> points (learning rate, accuracy)."""
    found: dict[str, Any] = {}
    for study in studies:
        for label, name in study.main_runs().items():
            if (run := study.recipe.runs[name]).is_searched:
                points = [(rate, round(dev, 4)) for rate, dev in study.search(run).items() if dev is not None]
                if points:
                    found.setdefault(study.name, {})[label] = points
    return found


def comparison_data(study: Study) -> dict[str, Any]:
    """Measure -> "same pairs" or "same time" -> label -> the seeds' numbers."""
    main = study.main_runs()
    same_time: dict[str, str] = {}
    for runs in study.same_time_runs().values():
        others = {label: name for label, name in runs.items() if name not in main.values()}
        same_time |= {name if label in same_time else label: name for label, name in others.items()}
    found: dict[str, Any] = {}
    for measure in headline(study).values():
        for title, runs in {"same pairs": main, "same time": same_time}.items():
            if values := _values(study, runs, measure):
                found.setdefault(measure.label, {})[title] = values
    return found


def _values(study: Study, runs: Mapping[str, str], measure: Measure) -> dict[str, list[float]]:
    found = {label: list(study.values(name, measure).values()) for label, name in runs.items()}
    return {label: values for label, values in found.items() if values}


def ablation_data(study: Study) -> dict[str, Any]:
    """Measure -> run -> differences to `base` by seed; empty without `base`."""
    if "base" not in study.recipe.runs:
        return {}
    others = [name for name in study.recipe.runs if name != "base"]
    found = {}
    for measure in ablated(study):
        differences = {name: list(study.differences(name, "base", measure).values()) for name in others}
        found[measure.label] = {name: values for name, values in differences.items() if values}
    return {label: runs for label, runs in found.items() if runs}


# ---------------------------------------------------------------------------------------------- drawing


def _style(label: str, position: int) -> tuple[str, str, str]:
    return STYLES.get(label, OTHERS[position % len(OTHERS)])


def _lines(axes: Any, lines: Mapping[str, Sequence[tuple[float, float]]], marked: bool) -> None:
    for position, (label, points) in enumerate(lines.items()):
        colour, style, marker = _style(label, position)
        axes.plot(*zip(*points, strict=True), style, color=colour, marker=marker if marked else None, label=label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def draw_losses(figure: Any, data: Mapping[str, Any]) -> None:
    """A panel a loss, logarithmic where it falls to a tenth."""
    from matplotlib.ticker import LogLocator, NullLocator

    figure.set_size_inches(3.4 * len(data), 2.8)
    for axes, (title, lines) in zip(figure.subplots(1, len(data), squeeze=False)[0], data.items(), strict=True):
        _lines(axes, lines, False)
        axes.set(title=title, xlabel="pairs seen")
        losses = [loss for points in lines.values() for _, loss in points]
        if max(losses) > 10 * min(losses) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter("{x:g}")


def draw_search(figure: Any, data: Mapping[str, Any]) -> None:
    """A panel a study."""
    figure.set_size_inches(3.6 * len(data), 2.8)
    for axes, (title, lines) in zip(figure.subplots(1, len(data), squeeze=False)[0], data.items(), strict=True):
        _lines(axes, lines, True)
        rates = sorted({rate for points in lines.values() for rate, _ in points})
        axes.set(title=title, xlabel="learning rate", xscale="log")
        axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
        axes.set_xticks([], minor=True)
    figure.supylabel("held-out accuracy, %", fontsize=9)


def draw_comparison(figure: Any, data: Mapping[str, Any]) -> None:
    """A panel a measure: means with whiskers of one standard deviation, every seed, the encoder as a dashed line."""
    columns = min(3, len(data))
    rows = -(-len(data) // columns)
    figure.set_size_inches(2.9 * columns, 2.5 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, (title, sets) in zip(panels, data.items(), strict=False):
        _draw_measure(axes, sets)
        axes.set_title(title, fontsize=8.5)
    for axes in panels[len(data) :]:
        axes.remove()


def _draw_measure(axes: Any, sets: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    ticks = []
    for title, runs in sets.items():
        for position, (label, values) in enumerate(runs.items()):
            if label == START:
                axes.axhline(values[0], color="#777777", linestyle="--", linewidth=1)
                continue
            colour, _, marker = _style(label, position)
            _draw_spread(axes, len(ticks), values, colour, marker, title == "same time")
            ticks.append(label + ("\n(time)" if title == "same time" else ""))
    axes.set_xticks(range(len(ticks)), ticks, fontsize=6.5)
    axes.set_xlim(-0.6, len(ticks) - 0.4)
    axes.grid(axis="y", alpha=0.3)


def _draw_spread(axes: Any, x: float, values: Sequence[float], colour: str, marker: str, hollow: bool) -> None:
    found = spread(values)
    face = "white" if hollow else colour
    axes.errorbar(x, found.mean, found.sd, fmt=marker, color=colour, markerfacecolor=face, capsize=3)
    axes.plot([x + 0.25] * len(values), values, ".", color=colour, markersize=4, alpha=0.7)


def draw_ablations(figure: Any, data: Mapping[str, Any]) -> None:
    """A panel a measure, a line a run: mean difference to the base with a whisker of one standard deviation."""
    names = list(dict.fromkeys(name for runs in data.values() for name in runs))
    groups = list(dict.fromkeys(name.partition("-")[0] for name in names))
    figure.set_size_inches(2 + 3.2 * len(data), 1 + 0.22 * len(names))
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    for axes, (title, runs) in zip(panels, data.items(), strict=True):
        for name, values in runs.items():
            found = spread(values)
            colour = ("#0072B2", "#D55E00")[groups.index(name.partition("-")[0]) % 2]
            row = names.index(name)
            axes.errorbar(found.mean, row, xerr=found.sd, fmt="o", color=colour, markersize=4, capsize=2)
        axes.axvline(0, color="#777777", linewidth=1)
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(title, fontsize=8)
        axes.set_xlabel("difference to base, percentage points", fontsize=8)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
