"""The plots of docs/reproduction.md, drawn from the numbers of the result files alone.

A plot is first its data, plain lists that say everything it shows, and then an SVG file. The file carries a digest of
the data, by which `experiments.report --check` knows whether it is still the picture of today's results.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.statistics import START, Outcome, Study, ablated, headline, spread

#: Of Okabe and Ito's palette for all kinds of colour vision; line style and marker say the same again.
STYLES = {
    "TR": ("#0072B2", "-", "o"),
    "TR+TLM": ("#E69F00", "--", "s"),
    "DAP": ("#D55E00", "-.", "^"),
}
OTHERS = (
    ("#009E73", ":", "D"),
    ("#CC79A7", "-", "v"),
    ("#56B4E9", "--", "P"),
    ("#000000", ":", "X"),
)
LOSSES = {"tr_loss": "TR loss", "rtl_loss": "RTL loss", "tlm_loss": "TLM loss"}
DIGEST = "data "
SEARCH_CAPTION = "Accuracy on held-out pairs of the training text by learning rate"


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
    made = {"learning-rates": Picture(_present(search_data(studies)), SEARCH_CAPTION, draw_search)}
    for study in studies:
        name = study.name
        if study.is_ablation:
            made[name] = Picture(
                _present(ablation_data(study)), f"{name}: differences to `base`", draw_ablations
            )
        if study.is_comparison:
            losses, numbers = _present(loss_data(study)), _present(comparison_data(study))
            caption = f"{name}: means, standard deviations and every seed"
            made[f"loss-{name}"] = Picture(
                losses, f"{name}: training losses by pairs seen", draw_losses
            )
            made[f"comparison-{name}"] = Picture(numbers, caption, draw_comparison)
    return {f"{name}.svg": picture for name, picture in made.items() if picture.data}


def save(picture: Picture, path: Path) -> None:
    """Draws an SVG file, the same bytes for the same data and matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings = {
        "svg.hashsalt": path.name,
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "font.size": 9,
    }
    with rc_context(settings):
        figure = Figure(layout="constrained")
        picture.draw(figure, picture.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None, "Description": DIGEST + picture.digest}
        figure.savefig(path, format="svg", metadata=metadata)


def is_drawn(picture: Picture, path: Path) -> bool:
    """Whether a file shows the data of today."""
    return path.is_file() and f"<dc:description>{DIGEST}{picture.digest}<" in path.read_text(
        encoding="utf-8"
    )


# ------------------------------------------------------------------------------------------------- data


def _present(tree: Any) -> Any:
    """Data without the parts that are empty."""
    if not isinstance(tree, dict):
        return tree
    parts = {name: _present(part) for name, part in tree.items()}
    return {name: part for name, part in parts.items() if part}


def loss_data(study: Study) -> dict[str, Any]:
    """Loss -> label -> points (pairs seen, mean over the seeds), of the runs that see the same number of pairs."""
    runs = {label: study.final(name) for label, name in study.main_runs().items() if label != START}
    return {
        title: {label: mean_curve(outcomes, key) for label, outcomes in runs.items()}
        for key, title in LOSSES.items()
    }


def mean_curve(outcomes: Iterable[Outcome], key: str) -> list[tuple[int, float]]:
    """(pairs seen, mean over the seeds) at the steps that all of them logged."""
    curves = [
        {
            line["step"] * each.pairs_a_step: line[key]
            for line in each.content["curve"]
            if key in line
        }
        for each in outcomes
    ]
    if not curves:
        return []
    shared = sorted(set(curves[0]).intersection(*curves))
    return [
        (pairs, round(statistics.fmean(curve[pairs] for curve in curves), 4)) for pairs in shared
    ]


def search_data(studies: Sequence[Study]) -> dict[str, Any]:
    """Study -> label -> points (learning rate, accuracy)."""
    found: dict[str, Any] = {}
    for study in studies:
        for label, name in study.main_runs().items():
            if (run := study.recipe.runs[name]).is_searched:
                points = [
                    (rate, round(dev, 4))
                    for rate, dev in study.search(run).items()
                    if dev is not None
                ]
                found.setdefault(study.name, {})[label] = points
    return found


def comparison_data(study: Study) -> dict[str, Any]:
    """Measure -> "same pairs" or "same time" -> label -> the seeds' numbers."""
    main = study.main_runs()
    same_time: dict[str, str] = {}
    for runs in study.same_time_runs().values():
        others = {label: name for label, name in runs.items() if name not in main.values()}
        same_time |= {name if label in same_time else label: name for label, name in others.items()}
    sets = {"same pairs": main, "same time": same_time}
    return {
        measure.label: {
            title: {
                label: list(study.values(name, measure).values()) for label, name in runs.items()
            }
            for title, runs in sets.items()
        }
        for measure in headline(study).values()
    }


def ablation_data(study: Study) -> dict[str, Any]:
    """Measure -> run -> differences to `base` by seed."""
    return {
        measure.label: {
            name: list(each.values()) for name, each in study.minus_base(measure).items()
        }
        for measure in ablated(study)
    }


# ---------------------------------------------------------------------------------------------- drawing


def _style(label: str, position: int) -> tuple[str, str, str]:
    return STYLES.get(label, OTHERS[position % len(OTHERS)])


def _lines(figure: Any, data: Mapping[str, Any], width: float, is_marked: bool) -> dict[str, Any]:
    """A panel of lines for each title -> its axes."""
    figure.set_size_inches(width * len(data), 2.8)
    panels = dict(zip(data, figure.subplots(1, len(data), squeeze=False)[0], strict=True))
    for title, axes in panels.items():
        for position, (label, points) in enumerate(data[title].items()):
            colour, style, marker = _style(label, position)
            marker = marker if is_marked else None
            axes.plot(*zip(*points, strict=True), style, color=colour, marker=marker, label=label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        axes.set_title(title)
    return panels


def draw_losses(figure: Any, data: Mapping[str, Any]) -> None:
    """A panel a loss, logarithmic where it falls to a tenth."""
    from matplotlib.ticker import LogLocator, NullLocator

    for title, axes in _lines(figure, data, 3.4, False).items():
        axes.set_xlabel("pairs seen")
        losses = [loss for points in data[title].values() for _, loss in points]
        if max(losses) > 10 * min(losses) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter("{x:g}")


def draw_search(figure: Any, data: Mapping[str, Any]) -> None:
    """A panel a study."""
    for title, axes in _lines(figure, data, 3.6, True).items():
        rates = sorted({rate for points in data[title].values() for rate, _ in points})
        axes.set(xlabel="learning rate", xscale="log")
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
        is_hollow = title == "same time"
        for position, (label, values) in enumerate(runs.items()):
            if label == START:
                axes.axhline(values[0], color="#777777", linestyle="--", linewidth=1)
                continue
            x, (colour, _, marker), found = len(ticks), _style(label, position), spread(values)
            face = "white" if is_hollow else colour
            axes.errorbar(
                x, found.mean, found.sd, fmt=marker, color=colour, markerfacecolor=face, capsize=3
            )
            axes.plot([x + 0.25] * len(values), values, ".", color=colour, markersize=4, alpha=0.7)
            ticks.append(label + "\n(time)" * is_hollow)
    axes.set_xticks(range(len(ticks)), ticks, fontsize=6.5)
    axes.set_xlim(-0.6, len(ticks) - 0.4)
    axes.grid(axis="y", alpha=0.3)


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
            axes.errorbar(
                found.mean, row, xerr=found.sd, fmt="o", color=colour, markersize=4, capsize=2
            )
        axes.axvline(0, color="#777777", linewidth=1)
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(title, fontsize=8)
        axes.set_xlabel("difference to base, percentage points", fontsize=8)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].invert_yaxis()
