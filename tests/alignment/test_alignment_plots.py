"""The plane, the distance and the picture of token states."""

from pathlib import Path

import numpy as np
import pytest

from dap_transformers.alignment.alignment_plots import (
    cloud_distance,
    draw_alignment,
    plot_alignment,
    plot_token_states,
    principal_plane,
)
from dap_transformers.alignment.links import align_tokens


def clouds(shift: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Make two clouds of random points whose centres differ by `shift` in every dimension."""
    rng = np.random.default_rng(seed)
    source = rng.normal(size=(120, 8)).astype(np.float32)
    target = rng.normal(size=(90, 8)).astype(np.float32)
    return source, target + shift


def test_plane_equals_scikit_learns_pca_up_to_sign() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    states = np.concatenate(clouds(1.0)) * np.arange(1, 9)
    expected = decomposition.PCA(2).fit_transform(states.astype(np.float64))
    np.testing.assert_allclose(np.abs(principal_plane(states)), np.abs(expected), atol=1e-6)


def test_plane_keeps_its_sign_when_points_are_permuted_or_the_axes_turned() -> None:
    states = np.concatenate(clouds(1.0)) * np.arange(1, 9)
    plane = principal_plane(states)
    order = np.random.default_rng(1).permutation(len(states))
    np.testing.assert_allclose(principal_plane(states[order]), plane[order], atol=1e-6)
    np.testing.assert_allclose(principal_plane(states[:, ::-1]), plane, atol=1e-6)
    assert (plane.max(0) >= -plane.min(0)).all()


def test_distance_of_shifted_clouds_against_the_formula() -> None:
    source, target = clouds(2.0)
    points = [(cloud - cloud.mean(0)).astype(np.float64) for cloud in (source, target)]
    spread = np.sqrt(sum((cloud**2).sum() for cloud in points) / (len(source) + len(target)))
    expected = np.linalg.norm(source.mean(0) - target.mean(0)) / spread
    assert cloud_distance(source, target) == pytest.approx(expected, rel=1e-5)
    assert cloud_distance(source * 10, target * 10) == pytest.approx(expected, rel=1e-5)
    assert cloud_distance(source, source) == 0


def test_picture_is_written_with_both_distances(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "tokens.png"
    before, after = plot_token_states(clouds(3.0), clouds(0.1), path, "German")
    assert before > 1 > after
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_clouds_without_points_or_spread() -> None:
    with pytest.raises(ValueError, match="clouds of 0 and 3 points"):
        cloud_distance(np.empty((0, 2)), np.ones((3, 2)))
    with pytest.raises(ValueError, match="no spread"):
        cloud_distance(np.zeros((3, 2)), np.ones((3, 2)))
    with pytest.raises(ValueError, match=r"shape \(1, 5\)"):
        principal_plane(np.ones((1, 5)))


def random_states(source: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(source)
    return rng.normal(size=(source, 6)), rng.normal(size=(target, 6))


def test_heat_map_has_a_row_a_source_word_and_a_dot_a_link() -> None:
    figure = pytest.importorskip("matplotlib.figure")
    states = random_states(3, 5)
    axes = figure.Figure().subplots()
    links = draw_alignment(axes, states, list("abc"), list("vwxyz"))
    expected, similarity = align_tokens(*states)
    np.testing.assert_array_equal(links, expected)
    np.testing.assert_array_equal(axes.images[0].get_array(), similarity)
    dots = axes.collections[0].get_offsets()  # x: target, y: source
    np.testing.assert_array_equal(dots, expected[:, ::-1])
    assert [label.get_text() for label in axes.get_yticklabels()] == list("abc")
    assert [label.get_text() for label in axes.get_xticklabels()] == list("vwxyz")


def test_heat_maps_of_two_models_are_written_in_one_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    states = {"TR": random_states(3, 4), "DAP": random_states(3, 4)}
    path = tmp_path / "new" / "pair.png"
    links = plot_alignment(states, ["كتاب", "$a_b$", "ş"], list("wxyz"), path)
    assert list(links) == ["TR", "DAP"]
    assert path.read_bytes().startswith(b"\x89PNG")
    assert 5_000 < path.stat().st_size < 200_000


def test_heat_map_refuses_labels_that_do_not_fit_or_would_be_boxes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    states = random_states(2, 1)
    path = tmp_path / "pair.png"
    with pytest.raises(ValueError, match="DejaVuSans.ttf has no 学 校: give `font`"):
        plot_alignment({"TR": states}, ["学校", "a"], ["b"], path)
    with pytest.raises(ValueError, match="TR: 2 and 1 states for 1 and 1 labels"):
        plot_alignment({"TR": states}, ["a"], ["b"], path)
    with pytest.raises(ValueError, match="0 source and 1 target labels"):
        plot_alignment({"TR": states}, [], ["b"], path)
    with pytest.raises(ValueError, match="no panel"):
        plot_alignment({}, ["a"], ["b"], path)
    assert not path.exists()
