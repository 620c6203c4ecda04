"""Token states of parallel sentences on the plane, before and after alignment (the paper's Figure 1)."""

from pathlib import Path

import numpy as np

TokenStates = tuple[np.ndarray, np.ndarray]


def principal_plane(states: np.ndarray) -> np.ndarray:
    """The points projected onto their two directions of greatest variance, (N, D) -> (N, 2) float64, centred.

    The sign is fixed: the coordinate of largest size on each axis is positive, so a figure never flips.

    Raises:
        ValueError: fewer than two points or dimensions.
    """
    points = np.asarray(states, np.float64)
    if points.ndim != 2 or min(points.shape) < 2:
        raise ValueError(f"states have shape {points.shape}: a plane needs at least (2, 2)")
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
        raise ValueError(f"clouds of {len(source)} and {len(target)} points: both need points")
    centres = [cloud.mean(0) for cloud in clouds]
    residuals = np.concatenate([cloud - centre for cloud, centre in zip(clouds, centres, strict=True)])  # (N, D)
    spread = np.sqrt((residuals**2).sum(1).mean())
    if spread == 0:
        raise ValueError("every point of a cloud is the same: there is no spread to measure the distance by")
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
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    distances = cloud_distance(*before), cloud_distance(*after)
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for axes, states, title, distance in zip(panels, (before, after), titles, distances, strict=True):
        plane = principal_plane(np.concatenate(states))
        clouds = np.split(plane, [len(states[0])])
        for cloud, name, colour in zip(clouds, (source_name, target_name), ("#d1495b", "#2e6f9e"), strict=True):
            axes.scatter(*cloud.T, s=7, alpha=0.55, linewidths=0, color=colour, label=f"{name} ({len(cloud)} tokens)")
        axes.set(title=f"{title}: centres {distance:.2f} spreads apart", xticks=[], yticks=[])
        axes.set_aspect("equal", "datalim")
    panels[0].legend(loc="best", markerscale=2.5, fontsize=9)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return distances
