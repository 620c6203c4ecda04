"""Draw pictures of numbers and arrays with matplotlib. A file's ending is .svg, .png or .pdf.

Legend: `N` source tokens, `M` target tokens, `D` hidden size.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CURVES = "curves.svg"  # file name in a training's output folder
#: Title and unit of a panel of curves -> how the names of its metrics end.
METRICS = {
    ("loss", "nats"): ("loss",),
    ("accuracy on dev pairs", "accuracy, %"): ("mean_accuracy", "mean_pool_accuracy"),
    ("search", "nDCG@10, %"): ("mean_ndcg",),
    ("information from the source", "nats per token"): ("source_nats",),
}
#: Title and unit of a panel -> label of some points -> the points (x, y).
Panels = Mapping[tuple[str, str], Mapping[str, Sequence[tuple[Any, float]]]]
#: States of source tokens (N, D) and of target tokens (M, D).
TokenStates = tuple[np.ndarray, np.ndarray]


def curves(history: Sequence[Mapping[str, float]]) -> Panels:
    """Collect the points (step, value) of a training. Metrics with fewer than 3 are left out.

    A loss on dev pairs has a line of its own.

    >>> history = [{"step": step, "loss": 9 - step} for step in (1, 2, 3)]
    >>> curves(history + [{"step": 3, "train_loss": 7, "eval_loss": 5}])
    {('loss', 'nats'): {'loss': [(1, 8), (2, 7), (3, 6)]}}
    """
    points = defaultdict(list)
    for line in history:
        for name, value in line.items():
            points[name.replace("eval_", "dev ")].append((line["step"], value))

    panels = {}
    for panel, endings in METRICS.items():
        names = [name for name in points if name.endswith(endings) and len(points[name]) > 2]
        if names:
            panels[panel] = {name: points[name] for name in names}
    return panels


def plot_curves(
    history: Sequence[Mapping[str, float]], path: str | Path, kept: int | None = None
) -> None:
    """Draw the `log_history` of a Trainer, with a dotted line at step `kept` unless it is None."""
    panels = curves(history)
    if panels:
        _draw(panels, path, "-", width=4.2 * len(panels), mark=kept)


def plot_accuracies(
    accuracies: Mapping[str, Mapping[str, Mapping[str, float]]], path: str | Path
) -> None:
    """Draw retrieval accuracy "xx-en" and "en-xx", in percent, by name of a model and language."""
    panels = defaultdict(dict)
    for direction in ("xx-en", "en-xx"):
        for name, languages in accuracies.items():
            points = [(code, each[direction]) for code, each in languages.items()]
            panels[direction.replace("-", "→"), "accuracy, %"][name] = points
    _draw(panels, path, "o", width=3 + 0.3 * len(languages), rows=2)


def plot_token_states(
    states: Mapping[str, TokenStates], path: str | Path, names: tuple[str, str]
) -> list[float]:
    """Draw the tokens of both sides in the plane, one panel per model (the paper's Figure 1).

    Each panel has its own `principal_plane`, of source and target tokens together. Its title shows
    the `cloud_distance`, which is returned.
    """
    panels = {}
    distances = [cloud_distance(*clouds) for clouds in states.values()]
    for (title, clouds), distance in zip(states.items(), distances, strict=True):
        points = np.split(principal_plane(np.concatenate(clouds)), [len(clouds[0])])
        text = f"{title}: distance of centres {distance:.2f} × spread"
        panels[text, ""] = dict(zip(names, points, strict=True))
    _draw(panels, path, ".", width=5 * len(panels), aspect="equal")
    return distances


def principal_plane(states: np.ndarray) -> np.ndarray:
    """Project points (N, D) onto their plane of greatest variance (PCA), centred (N, 2)."""
    points = states - states.mean(0)
    _, _, axes = np.linalg.svd(points, full_matrices=False)
    return points @ axes[:2].T


def cloud_distance(source: np.ndarray, target: np.ndarray) -> float:
    """Measure how far apart the centres of two clouds of points are, in units of their spread.

    The spread is the root mean square distance from the own centre, in all D dimensions.

    >>> cloud_distance(np.array([[0.0, 1.0], [0.0, -1.0]]), np.array([[3.0, 1.0], [3.0, -1.0]]))
    3.0
    """
    centres = [side.mean(0, dtype=np.float64) for side in (source, target)]
    residuals = np.concatenate([source - centres[0], target - centres[1]])  # (N + M, D)
    spread = np.linalg.norm(residuals) / len(residuals) ** 0.5
    return float(np.linalg.norm(centres[0] - centres[1]) / spread)


def _draw(
    panels: Panels,
    path: str | Path,
    style: str,
    width: float,
    rows: int = 1,
    mark: float | None = None,
    aspect: str = "auto",
) -> None:
    """Draw panels in one or more rows, with a dotted line at the x value `mark`."""
    from matplotlib.figure import Figure

    figure = Figure((width, 4.2 * rows), layout="constrained")
    all_axes = figure.subplots(rows, len(panels) // rows, squeeze=False).ravel()
    for axes, ((title, unit), lines) in zip(all_axes, panels.items(), strict=True):
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), style, label=label, alpha=0.7, markersize=4)
        if mark is not None:
            axes.axvline(mark, color="grey", linestyle=":")
        axes.set(title=title, ylabel=unit)
        axes.set_aspect(aspect, "datalim")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=2)
    # The legends under the axes can push labels out of the picture.
    figure.savefig(path, bbox_inches="tight", dpi=150)
