"""Numbers that pictures show."""

from pathlib import Path

import numpy as np
import pytest

from dap_transformers.pictures import plot_token_states, principal_plane


def test_the_distance_of_clouds_is_told_in_their_size(tmp_path: Path) -> None:
    source, target = np.random.default_rng(0).normal(size=(2, 120, 8))
    states = {"one": (source, target + 3), "two": (source, target + 0.1)}
    far, near = plot_token_states(states, tmp_path / "tokens.png", ("de", "en"))
    assert far > 1 > near


def test_the_plane_is_that_of_scikit_learn_up_to_sign() -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    states = np.random.default_rng(0).normal(size=(200, 8)) * np.arange(1, 9)
    expected = decomposition.PCA(2).fit_transform(states)
    np.testing.assert_allclose(np.abs(principal_plane(states)), np.abs(expected), atol=1e-6)
