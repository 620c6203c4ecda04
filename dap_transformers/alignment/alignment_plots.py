"""Pictures of token states (the paper's Figure 1) and of word alignments.

Legend: `N` source tokens and `M` target tokens of a cloud, `S` source tokens and `T` target tokens
of a sentence pair, `D` hidden size, `L` links.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dap_transformers.alignment.links import align_tokens
from dap_transformers.errors import UserError

#: States of source tokens and of target tokens.
TokenStates = tuple[np.ndarray, np.ndarray]
SOURCE_COLOUR = "#d1495b"
TARGET_COLOUR = "#2e6f9e"


def principal_plane(states: np.ndarray) -> np.ndarray:
    """Project points onto the plane of their two directions of greatest variance (PCA).

    The result is centred. On each axis the coordinate with the largest absolute value is positive,
    so that the picture of the same states never flips.

    Args:
        states: points (N, D).

    Returns:
        Coordinates (N, 2) float64.
    """
    points = np.asarray(states, np.float64)
    if points.ndim != 2 or min(points.shape) < 2:
        raise UserError(f"states have shape {points.shape}: a plane needs at least (2, 2)")
    points = points - points.mean(0)
    _, axes = np.linalg.eigh(points.T @ points)  # (D, D), by ascending variance
    plane = points @ axes[:, :-3:-1]  # (N, 2), the last two
    extremes = plane[np.abs(plane).argmax(0), [0, 1]]  # (2,)
    return plane * np.where(extremes < 0, -1.0, 1.0)


def cloud_distance(source: np.ndarray, target: np.ndarray) -> float:
    """Measure how far apart the centres of two clouds of points are, in units of their spread.

    The spread is the root mean square distance of a point from its own cloud's centre. 0 means that
    the clouds have the same centre. The distance is measured in all D dimensions, not in the plane.

    >>> cloud_distance(np.array([[0.0, 1.0], [0.0, -1.0]]), np.array([[3.0, 1.0], [3.0, -1.0]]))
    3.0

    Args:
        source: points (N, D) of one cloud.
        target: points (M, D) of the other cloud.

    Returns:
        The distance of the two centres, divided by the spread.
    """
    if not len(source) or not len(target):
        raise UserError(f"clouds of {len(source)} and {len(target)} points: both need points")
    source = np.asarray(source, np.float64)
    target = np.asarray(target, np.float64)
    source_centre = source.mean(0)
    target_centre = target.mean(0)
    residuals = np.concatenate([source - source_centre, target - target_centre])  # (N + M, D)
    spread = np.sqrt((residuals**2).sum(1).mean())
    if spread == 0:
        raise UserError(
            "every point of a cloud is the same: there is no spread to measure the distance by"
        )
    return float(np.linalg.norm(source_centre - target_centre) / spread)


def plot_token_states(
    before: TokenStates,
    after: TokenStates,
    path: str | Path,
    source_name: str = "source",
    target_name: str = "English",
    titles: tuple[str, str] = ("before", "after"),
) -> tuple[float, float]:
    """Write a picture of the tokens of both sides in the plane, for two models side by side.

    Each panel has its own `principal_plane`, of the source and target tokens together.

    Args:
        before: source token states (N, D) and target token states (M, D) of one model, such as
            `np.concatenate(encoder.encode_tokens(sentences))` for each side.
        after: source token states and target token states of the other model.
        path: picture to write: .png, .pdf or .svg. Its folder is made if it is missing.
        source_name: name of the source side in the legend.
        target_name: name of the target side in the legend.
        titles: titles of the two panels.

    Returns:
        `cloud_distance` of source and target tokens, for each of the two models. The titles also
        show it.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = (source_name, target_name)
    distances = (
        _draw_clouds(left, before, titles[0], names),
        _draw_clouds(right, after, titles[1], names),
    )
    left.legend(loc="best", markerscale=2.5, fontsize=9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return distances


def _draw_clouds(axes: Any, states: TokenStates, title: str, names: tuple[str, str]) -> float:
    """Draw the token states of one model as points in a plane, for a panel of `plot_token_states`.

    The plane is the `principal_plane` of source and target tokens together.

    Returns:
        The `cloud_distance` of source and target tokens.
    """
    source, target = states
    plane = principal_plane(np.concatenate(states))  # (N + M, 2)
    source_points, target_points = np.split(plane, [len(source)])
    for points, name, colour in (
        (source_points, names[0], SOURCE_COLOUR),
        (target_points, names[1], TARGET_COLOUR),
    ):
        label = f"{name} ({len(points)} tokens)"
        axes.scatter(*points.T, s=7, alpha=0.55, linewidths=0, color=colour, label=label)
    distance = cloud_distance(source, target)
    axes.set(title=f"{title}: distance of centres {distance:.2f} × spread", xticks=[], yticks=[])
    axes.set_aspect("equal", "datalim")
    return distance


def plot_alignment(
    states: Mapping[str, TokenStates],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    path: str | Path,
    font: str | Path | None = None,
) -> dict[str, np.ndarray]:
    """Write a picture with a heat map per model: cosines of the words of one sentence pair.

    Tokens can be drawn instead of words. A dot marks words that are each other's nearest
    (`align_tokens`). Every panel has its own colour scale. matplotlib before 3.11 draws Arabic
    letters unjoined and from left to right.

    Args:
        states: title of a panel -> source states (S, D) and target states (T, D) of one model.
        source_tokens: S labels, from top to bottom.
        target_tokens: T labels, from left to right.
        path: picture to write: .png, .pdf or .svg. Its folder is made if it is missing.
        font: a font file. None takes matplotlib's DejaVu Sans, which has Latin, Greek, Cyrillic,
            Arabic and Hebrew letters.

    Returns:
        Title of a panel -> the links that its dots show, (L, 2): source row and target row.
    """
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

    _require_labels(states, source_tokens, target_tokens)
    properties = FontProperties(fname=font) if font else FontProperties(family="DejaVu Sans")
    _require_glyphs(properties, [*source_tokens, *target_tokens])

    width = 1.9 + 0.36 * len(target_tokens)  # inches per panel
    height = 1.5 + 0.3 * len(source_tokens)
    figure = Figure(figsize=(len(states) * width, height), layout="constrained")
    panels = figure.subplots(1, len(states), squeeze=False)[0]
    links = {}
    for axes, (title, pair) in zip(panels, states.items(), strict=True):
        links[title] = draw_alignment(axes, pair, source_tokens, target_tokens)
        axes.set_title(title)
        for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
            label.set(fontproperties=properties, fontsize=9, parse_math=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    return links


def draw_alignment(
    axes: Any, states: TokenStates, source_tokens: Sequence[str], target_tokens: Sequence[str]
) -> np.ndarray:
    """Draw the cosines of one sentence pair as a heat map with a colour bar, on matplotlib axes.

    A dot marks words or tokens that are each other's nearest (`align_tokens`). No file is written.

    Args:
        axes: matplotlib axes.
        states: source states (S, D) and target states (T, D).
        source_tokens: S labels, from top to bottom.
        target_tokens: T labels, from left to right.

    Returns:
        The links that the dots show, (L, 2): source row and target row.
    """
    links, similarity = align_tokens(*states)
    axes.figure.colorbar(axes.imshow(similarity, cmap="Blues"), ax=axes, shrink=0.8)
    rows = links[:, 0]
    columns = links[:, 1]
    axes.scatter(columns, rows, s=40, color=SOURCE_COLOUR, edgecolors="white", linewidths=0.8)
    axes.set_xticks(
        range(len(target_tokens)), target_tokens, rotation=55, ha="right", rotation_mode="anchor"
    )
    axes.set_yticks(range(len(source_tokens)), source_tokens)
    return links


def _require_labels(
    states: Mapping[str, TokenStates], source_tokens: Sequence[str], target_tokens: Sequence[str]
) -> None:
    """Raise `UserError` unless there is a panel, and each panel has one state per label.

    Both sides need at least one label.
    """
    if not states:
        raise UserError("there is no panel to draw: give the states of one model or more")
    labels = (len(source_tokens), len(target_tokens))
    if not all(labels):
        raise UserError(
            f"{labels[0]} source and {labels[1]} target labels: a picture needs tokens "
            "on both sides"
        )
    for title, (source, target) in states.items():
        if (len(source), len(target)) != labels:
            raise UserError(
                f"{title}: {len(source)} and {len(target)} states for {labels[0]} and {labels[1]} "
                "labels: give one label per state"
            )


def _require_glyphs(properties: Any, labels: Sequence[str]) -> None:
    """Raise `UserError` if the font lacks a character. matplotlib would only draw a box for it."""
    from matplotlib.font_manager import findfont, get_font

    name = findfont(properties)
    known = get_font(name).get_charmap()
    characters = sorted(set("".join(labels)))
    missing = [character for character in characters if ord(character) not in known]
    if missing:
        raise UserError(
            f"{Path(name).name} has no {' '.join(missing[:8])}: give `font`, a file of a font that "
            "has them"
        )
