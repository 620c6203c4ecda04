"""Numbers that pictures show."""

from pathlib import Path

import numpy as np
import pytest

from dap_transformers.pictures import plot_token_states, principal_plane


def clouds(shift: float) -> tuple[np.ndarray, np.ndarray]:
    """Two clouds of random points whose centres differ by `shift` in every dimension."""
    rng = np.random.default_rng(0)
    source = rng.normal(size=(120, 8)).astype(np.float32)
    return source, rng.normal(size=(90, 8)).astype(np.float32) + shift


def test_the_distance_of_clouds_is_told_in_their_size(tmp_path: Path) -> None:
    states = {"one": clouds(3.0), "two": clouds(0.1)}
    far, near = plot_token_states(states, tmp_path / "tokens.png", ("de", "en"))
    assert far > 1 > near


def test_the_plane_is_that_of_scikit_learn_up_to_sign() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    states = np.concatenate(clouds(1.0)) * np.arange(1, 9)
    expected = decomposition.PCA(2).fit_transform(states)
    np.testing.assert_allclose(np.abs(principal_plane(states)), np.abs(expected), atol=1e-6)
