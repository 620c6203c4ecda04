"""Pictures of token states: parallel sentences on the plane (the paper's Figure 1), and who aligns with whom.

Legend: `N` tokens, `S` source tokens, `T` target tokens, `D` hidden size, `L` links.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dap.alignment.word_alignment import align_tokens
from dap.errors import UserError

TokenStates = tuple[np.ndarray, np.ndarray]


def principal_plane(states: np.ndarray) -> np.ndarray:
    """The points projected onto their two directions of greatest variance, (N, D) -> (N, 2) float64, centred.

    The sign is fixed: the coordinate of largest size on each axis is positive, so a figure never flips.

    Raises:
        ValueError: fewer than two points or dimensions.
    """
    points = np.asarray(states, np.float64)
    if points.ndim != 2 or min(points.shape) < 2:
        raise UserError(f"states have shape {points.shape}: a plane needs at least (2, 2)")
    points = points - points.mean(0)
    _, axes = np.linalg.eigh(points.T @ points)  # ascending eigenvalues, (D, D)
    plane = points @ axes[:, :-3:-1]  # (N, 2)
    extremes = plane[np.abs(plane).argmax(0), [0, 1]]
    return plane * np.where(extremes < 0, -1.0, 1.0)


def cloud_distance(source: np.ndarray, target: np.ndarray) -> float:
    """Distance of the two clouds' centroids in units of the spread of the points around their own centroid.

    0: the clouds share their centre; 1: the centres are as far apart as a point is from its own centre (root mean
    square). Measured in all D dimensions, not on the plane.

    >>> cloud_distance(np.array([[0.0, 1.0], [0.0, -1.0]]), np.array([[3.0, 1.0], [3.0, -1.0]]))
    3.0

    Raises:
        ValueError: an empty cloud, or two clouds of a single repeated point, which have no spread.
    """
    clouds = [np.asarray(cloud, np.float64) for cloud in (source, target)]
    if not all(len(cloud) for cloud in clouds):
        raise UserError(f"clouds of {len(source)} and {len(target)} points: both need points")
    centres = [cloud.mean(0) for cloud in clouds]
    residuals = np.concatenate(
        [cloud - centre for cloud, centre in zip(clouds, centres, strict=True)]
    )  # (N, D)
    spread = np.sqrt((residuals**2).sum(1).mean())
    if spread == 0:
        raise UserError(
            "every point of a cloud is the same: there is no spread to measure the distance by"
        )
    return float(np.linalg.norm(centres[0] - centres[1]) / spread)


def plot_token_states(
    before: TokenStates,
    after: TokenStates,
    path: str | Path,
    source_name: str = "source",
    target_name: str = "English",
    titles: tuple[str, str] = ("before", "after"),
) -> tuple[float, float]:
    """Writes a picture of two panels, each with the tokens of both sides on that panel's own principal plane.

    Args:
        before: (source token states (N, D), target token states (M, D)) of one model, such as
            `np.concatenate(encoder.encode_tokens(sentences))` of each side.
        after: the same of the other model.
        path: .png, .pdf or .svg.
        source_name: name of the source side in the legend.
        target_name: name of the target side in the legend.
        titles: of the two panels.

    Returns:
        `cloud_distance` of both panels, which the titles show as well.
    """
    from matplotlib.figure import Figure

    distances = cloud_distance(*before), cloud_distance(*after)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, states, title, distance in zip(
        panels, (before, after), titles, distances, strict=True
    ):
        plane = principal_plane(np.concatenate(states))
        clouds = np.split(plane, [len(states[0])])
        for cloud, name, colour in zip(
            clouds, (source_name, target_name), ("#d1495b", "#2e6f9e"), strict=True
        ):
            axes.scatter(
                *cloud.T,
                s=7,
                alpha=0.55,
                linewidths=0,
                color=colour,
                label=f"{name} ({len(cloud)} tokens)",
            )
        axes.set(title=f"{title}: centres {distance:.2f} spreads apart", xticks=[], yticks=[])
        axes.set_aspect("equal", "datalim")
    panels[0].legend(loc="best", markerscale=2.5, fontsize=9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return distances


def plot_alignment(
    states: Mapping[str, TokenStates],
    source_tokens: Sequence[str],
    target_tokens: Sequence[str],
    path: str | Path,
    font: str | Path | None = None,
) -> dict[str, np.ndarray]:
    """Writes a picture with a heat map a model: the cosines of the tokens, or words, of one sentence pair.

    Tokens that are each other's nearest (`align_tokens`) are marked with a dot. Every panel has its own colour scale.
    matplotlib before 3.11 draws the letters of Arabic unjoined and from left to right.

    Args:
        states: title of the panel -> (source states (S, D), target states (T, D)), each panel of another model.
        source_tokens: S labels, from top to bottom.
        target_tokens: T labels, from left to right.
        path: .png, .pdf or .svg.
        font: a font file; None takes matplotlib's own (DejaVu Sans), which has Latin, Greek, Cyrillic, Arabic, Hebrew.

    Returns:
        title -> links (L, 2).

    Raises:
        ValueError: no panel, another number of states than of labels, or a label with a character that the font lacks.
    """
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties

    _require_labels(states, source_tokens, target_tokens)
    properties = FontProperties(fname=font) if font else FontProperties(family="DejaVu Sans")
    _require_glyphs(properties, [*source_tokens, *target_tokens])
    width, height = (
        1.9 + 0.36 * len(target_tokens),
        1.5 + 0.3 * len(source_tokens),
    )  # inches of a panel
    figure = Figure(figsize=(len(states) * width, height), layout="constrained")
    panels, links = figure.subplots(1, len(states), squeeze=False)[0], {}
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
    """One heat map of `plot_alignment` on matplotlib axes, with its colour bar; returns the links (L, 2)."""
    links, similarity = align_tokens(*states)
    axes.figure.colorbar(axes.imshow(similarity, cmap="Blues"), ax=axes, shrink=0.8)
    columns, rows = links[:, 1], links[:, 0]
    axes.scatter(columns, rows, s=40, color="#d1495b", edgecolors="white", linewidths=0.8)
    axes.set_xticks(
        range(len(target_tokens)), target_tokens, rotation=55, ha="right", rotation_mode="anchor"
    )
    axes.set_yticks(range(len(source_tokens)), source_tokens)
    return links


def _require_labels(
    states: Mapping[str, TokenStates], source_tokens: Sequence[str], target_tokens: Sequence[str]
) -> None:
    if not states:
        raise UserError("there is no panel to draw: give the states of one model or more")
    labels = len(source_tokens), len(target_tokens)
    if not all(labels):
        raise UserError(
            f"{labels[0]} source and {labels[1]} target labels: a picture needs tokens on both sides"
        )
    for title, (source, target) in states.items():
        if (len(source), len(target)) != labels:
            raise UserError(
                f"{title}: {len(source)} and {len(target)} states for {labels[0]} and {labels[1]} labels: "
                "give one label a state"
            )


def _require_glyphs(properties: Any, labels: Sequence[str]) -> None:
    """Raises where the font has no picture of a character, of which matplotlib would draw a box."""
    from matplotlib.font_manager import findfont, get_font

    name = findfont(properties)
    known = get_font(name).get_charmap()
    if missing := sorted(
        {character for label in labels for character in label if ord(character) not in known}
    ):
        raise UserError(
            f"{Path(name).name} has no {' '.join(missing[:8])}: give `font`, a file of a font that has"
        )
