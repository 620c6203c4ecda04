"""The figures of the study, drawn from the result files.

A figure is first its data: plain lists of everything it shows. The SVG file carries a digest of the
data, so that `study.report --check` can tell whether it shows today's results.
"""

import hashlib
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from study.statistics import ORDER, START, Outcome, Study, ablated, headline, spread

#: Method -> colour (Okabe and Ito's palette, for all kinds of colour vision), line and marker.
STYLES = {
    "TR": ("#0072B2", "-", "o"),
    "TR+TLM": ("#E69F00", "--", "s"),
    "DAP": ("#D55E00", "-.", "^"),
    "TR+BOW": ("#009E73", "-", "D"),
    "DAP+BOW": ("#CC79A7", "--", "v"),
    "TR+edits": ("#56B4E9", ":", "P"),
    "TR+BOW+edits": ("#000000", ":", "h"),
}
#: Key of a loss -> title of its panel and label of its y axis.
LOSSES = {
    "tr_loss": ("Translation ranking (TR)", "loss, nats per pair"),
    "rtl_loss": ("Representation translation (RTL)", "loss, nats per token"),
    "bow_loss": ("Bag of words (BOW)", "loss, nats per token"),
}
#: Short name of a measure -> label of its axis.
UNITS = {
    "Tatoeba xx→en": "accuracy, %",
    "Tatoeba en→xx": "accuracy, %",
    "hard negatives": "error, %",
    "BUCC zh-en": "F1, %",
    "word alignment": "AER, %",
}
#: Studies whose comparison, and whose training losses, are drawn.
COMPARED = ("warm", "edits", "mini-longer")
WITH_LOSSES = ("warm", "mini-longer")
#: Methods at most in a panel.
MOST = 7
DIGEST = "data "


@dataclass(frozen=True)
class Picture:
    """A figure that can be drawn.

    Attributes:
        data: everything that the figure shows, as JSON can hold it.
        caption: the text under the figure.
        draw: function that draws the data into a matplotlib figure.
    """

    data: Mapping[str, Any]
    caption: str
    draw: Callable[[Any, Mapping[str, Any]], None]

    @property
    def digest(self) -> str:
        """Return 16 hexadecimal digits of a hash of the data."""
        return hashlib.sha256(json.dumps(self.data, sort_keys=True).encode()).hexdigest()[:16]


def pictures(studies: Sequence[Study]) -> dict[str, Picture]:
    """Return the figures of all studies, by file name. `save` draws them.

    A figure without data is left out.
    """
    made = {}
    for study in studies:
        name = study.name
        if study.is_ablation:
            caption = f"{name}: difference of each run from the base"
            made[f"{name}.svg"] = Picture(ablation_data(study), caption, draw_ablations)
        if name in COMPARED:
            caption = f"{name}: mean, standard deviation and every seed of each method"
            made[f"comparison-{name}.svg"] = Picture(
                comparison_data(study), caption, draw_comparison
            )
        if name in WITH_LOSSES:
            caption = f"{name}: training losses by pairs seen, mean of the seeds"
            made[f"loss-{name}.svg"] = Picture(loss_data(study), caption, draw_losses)
    return {name: picture for name, picture in made.items() if picture.data}


def save(picture: Picture, path: Path) -> None:
    """Draw a figure into an SVG file.

    The same data and matplotlib version give the same bytes.

    Args:
        picture: the figure.
        path: file to write.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings = {
        "svg.hashsalt": path.name,
        "svg.fonttype": "none",
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with rc_context(settings):
        figure = Figure(layout="constrained")
        picture.draw(figure, picture.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Creator": None, "Description": DIGEST + picture.digest}
        figure.savefig(path, format="svg", metadata=metadata)


def is_drawn(picture: Picture, path: Path) -> bool:
    """Tell whether an SVG file exists and shows the data that a figure has now.

    Args:
        picture: the figure.
        path: the file.
    """
    if not path.is_file():
        return False
    mark = f"<dc:description>{DIGEST}{picture.digest}<"
    return mark in path.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------- data


def loss_data(study: Study) -> dict[str, Any]:
    """Collect the training losses that a figure shows.

    Returns:
        Key of a loss -> label of a method -> points (pairs seen, mean loss over the seeds). Methods
        without a style in `STYLES` are left out.
    """
    found: dict[str, Any] = {}
    for label, name in study.main_runs().items():
        if label == START or label not in STYLES:
            continue
        for key in LOSSES:
            points = mean_curve(study.final(name), key)
            if points:
                found.setdefault(key, {})[label] = points
    return {key: found[key] for key in LOSSES if key in found}


def mean_curve(outcomes: Sequence[Outcome], key: str) -> list[tuple[int, float]]:
    """Average a loss over seeds, at the steps that all of them logged.

    Args:
        outcomes: results of one run with several seeds.
        key: key of the loss, such as "tr_loss".

    Returns:
        Points (pairs seen, mean loss). Empty without outcomes.
    """
    curves = []
    for each in outcomes:
        points = each.losses.get(key, [])
        curves.append({int(step) * each.pairs_per_step: loss for step, loss in points})
    if not curves:
        return []
    shared = sorted(set(curves[0]).intersection(*curves))
    return [(pairs, statistics.fmean(curve[pairs] for curve in curves)) for pairs in shared]


def comparison_data(study: Study) -> dict[str, Any]:
    """Collect the results that the figure of a comparison shows.

    The rows are the methods with the same number of pairs, then TR trained for the CPU time of
    other methods.

    Returns:
        Short name of a measure -> label of a row -> {"method": its key in `STYLES`, "values": a
        value per seed}. At most `MOST` rows per measure.
    """
    rows = {}
    for label, name in study.main_runs().items():
        if label in ORDER and label != START:
            rows[label] = (label, name)
    for timed, runs in study.same_time_runs().items():
        name = runs.get("TR")
        labels = [label for label, (_, run) in rows.items() if run == timed]
        if labels and name and name != timed and len(study.final(name)) > 1:
            rows[f"TR, time of {labels[0]}"] = ("TR", name)

    found: dict[str, Any] = {}
    for short, measure in headline(study).items():
        panel = {}
        for row, (label, name) in list(rows.items())[:MOST]:
            values = list(study.values(name, measure).values())
            if values:
                panel[row] = {"method": label, "values": values}
        found[short] = panel
    return found


def ablation_data(study: Study) -> dict[str, Any]:
    """Return label of a measure -> (name of a run -> its differences from `base`, one per seed)."""
    found = {}
    for measure in ablated(study):
        runs = study.minus_base(measure).items()
        found[measure.label] = {name: list(each.values()) for name, each in runs if each}
    return found


# ---------------------------------------------------------------------------------------- drawing


def draw_losses(figure: Any, data: Mapping[str, Any]) -> None:
    """Draw a panel per loss, with a curve per method over the sentence pairs seen.

    The vertical axis is logarithmic if the largest loss is over 10 times the smallest.

    Args:
        figure: an empty matplotlib figure.
        data: result of `loss_data`.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    figure.set_size_inches(3.5 * len(data), 3.2)
    panels = figure.subplots(1, len(data), squeeze=False)[0]
    handles = {}
    for axes, (key, methods) in zip(panels, data.items(), strict=True):
        title, unit = LOSSES[key]
        for label, points in methods.items():
            colour, style, _ = STYLES[label]
            pairs = [point[0] for point in points]
            losses = [point[1] for point in points]
            (handles[label],) = axes.plot(pairs, losses, style, color=colour)
        axes.set(title=title, xlabel="sentence pairs seen", ylabel=unit)
        axes.grid(alpha=0.3)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        values = [loss for points in methods.values() for _, loss in points]
        if max(values) > 10 * min(values) > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter("{x:g}")
    labels = [label for label in STYLES if label in handles]
    lines = [handles[label] for label in labels]
    figure.legend(lines, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def draw_comparison(figure: Any, data: Mapping[str, Any]) -> None:
    """Draw a panel per measure, with a row per method.

    A row shows the mean, one standard deviation and the value of every seed. Hollow markers show TR
    for the CPU time of another method.

    Args:
        figure: an empty matplotlib figure.
        data: result of `comparison_data`.
    """
    rows = list(dict.fromkeys(row for panel in data.values() for row in panel))
    figure.set_size_inches(1.6 + 2.0 * len(data), 0.9 + 0.33 * len(rows))
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    for axes, (title, panel) in zip(panels, data.items(), strict=True):
        for row, entry in panel.items():
            colour, _, marker = STYLES[entry["method"]]
            found = spread(entry["values"])
            place = rows.index(row)
            axes.errorbar(
                found.mean,
                place,
                xerr=found.sd,
                fmt=marker,
                color=colour,
                markerfacecolor="white" if row != entry["method"] else colour,
                capsize=3,
            )
            places = [place + 0.28] * found.count
            axes.plot(entry["values"], places, ".", color=colour, markersize=4, alpha=0.7)
        axes.set(title=title, xlabel=UNITS[title])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.locator_params(axis="x", nbins=4)
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_yticks(range(len(rows)), rows)


def draw_ablations(figure: Any, data: Mapping[str, Any]) -> None:
    """Draw a panel per measure, with a row per run: mean difference and one standard deviation.

    Args:
        figure: an empty matplotlib figure.
        data: result of `ablation_data`.
    """
    names = list(dict.fromkeys(name for runs in data.values() for name in runs))
    groups = list(dict.fromkeys(name.partition("-")[0] for name in names))
    figure.set_size_inches(2 + 3.4 * len(data), 1 + 0.24 * len(names))
    panels = figure.subplots(1, len(data), sharey=True, squeeze=False)[0]
    for axes, (title, runs) in zip(panels, data.items(), strict=True):
        for name, values in runs.items():
            found = spread(values)
            colour = ("#555555", "#0072B2")[groups.index(name.partition("-")[0]) % 2]
            axes.errorbar(
                found.mean,
                names.index(name),
                xerr=found.sd,
                fmt="o",
                color=colour,
                markersize=4,
                capsize=2,
            )
        axes.axvline(0, color="#777777", linewidth=1)
        axes.grid(axis="x", alpha=0.3)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("difference from base, percentage points")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
