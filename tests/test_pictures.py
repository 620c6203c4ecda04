"""Pictures show the numbers they are given, and nothing of them is cut off."""

from pathlib import Path

import numpy as np
import pytest

from dap_transformers.pictures import plot_curves, plot_token_states, principal_plane


def clouds(shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Two clouds of random points whose centres differ by `shift` in every dimension."""
    rng = np.random.default_rng(0)
    source = rng.normal(size=(120, 8)).astype(np.float32)
    return source, rng.normal(size=(90, 8)).astype(np.float32) + shift


def test_the_plane_is_that_of_scikit_learn_up_to_sign() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    states = np.concatenate(clouds(1.0)) * np.arange(1, 9)
    expected = decomposition.PCA(2).fit_transform(states)
    np.testing.assert_allclose(np.abs(principal_plane(states)), np.abs(expected), atol=1e-6)


def test_pictures_have_a_white_border_so_no_label_is_cut_off(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    history = []
    for step in range(0, 110, 10):
        losses = {"loss": 6.8, "tr_loss": 3.3, "rtl_loss": 3.5}
        accuracies = {"eval_mean_accuracy": 12, "eval_mean_pool_accuracy": 4}
        history.append({"step": step, "eval_rtl_source_nats": 0} | losses | accuracies)
    plot_curves(history, tmp_path / "curves.png", kept=70)
    states = {"one": clouds(3.0), "two": clouds(0.1)}
    far, near = plot_token_states(states, tmp_path / "tokens.png", ("de", "en"))
    assert far > 1 > near

    for name in ("curves.png", "tokens.png"):
        pixels = image.imread(tmp_path / name)
        for border in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
            assert (border == 1).all(), name
