"""Truncated and quantised vectors against plain loops, and the order that they retrieve in."""

import sys

import numpy as np
import pytest

from dap.encoding.precision import reduced, require_reducible
from dap.search import mutual_neighbours


@pytest.fixture
def vectors() -> np.ndarray:
    """300 rows of length 1 in 20 dimensions, which are no whole number of bytes; one dimension does not vary."""
    rows = np.random.default_rng(0).standard_normal((300, 20)).astype(np.float32)
    rows[:, 7] = 0
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_truncated_vectors_have_length_1(vectors: np.ndarray) -> None:
    rows = reduced(3 * vectors, 6)
    for row, vector in zip(rows, vectors.astype(np.float64), strict=True):
        np.testing.assert_allclose(row, vector[:6] / np.sqrt((vector[:6] ** 2).sum()), atol=1e-6)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(reduced(vectors), vectors, atol=1e-6)


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_bits_are_signs_and_retrieve_in_the_order_of_the_hamming_distance(
    vectors: np.ndarray, precision: str
) -> None:
    pytest.importorskip("sentence_transformers")
    seen = reduced(5 * vectors, None, precision)
    np.testing.assert_array_equal(seen, np.where(vectors > 0, 1, -1))
    queries, keys = vectors[:40], vectors[40:]
    found = mutual_neighbours(seen[:40], seen[40:], k=5)
    for query, row_scores, row in zip(
        queries, found.forward_scores, found.forward_indices, strict=True
    ):
        distances = [
            sum((a > 0) != (b > 0) for a, b in zip(query, key, strict=True)) for key in keys
        ]
        assert [distances[i] for i in row] == sorted(distances)[
            :5
        ]  # of equal distances rounding decides
        np.testing.assert_allclose(row_scores, [1 - 2 * distances[i] / 20 for i in row], atol=1e-6)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_a_byte_is_at_most_half_a_step_from_the_value(vectors: np.ndarray, precision: str) -> None:
    pytest.importorskip("sentence_transformers")
    again = reduced(vectors, None, precision)
    lowest, highest = vectors.min(0), vectors.max(0)
    steps = (highest - lowest) / 255
    inside = vectors < highest  # the largest value has a step of its own, which begins there
    assert (np.abs(again - vectors) <= 0.5001 * steps + 1e-7)[inside].all()
    assert (again[:, 7] == 0).all()
    levels = ((again - lowest)[:, 0] / steps[0] - 0.5).round(2)
    assert (
        {0.0, 255.0} <= set(levels.tolist()) <= set(map(float, range(256)))
    )  # bytes, of which all may occur


@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_vectors_are_cut_before_they_are_quantised(vectors: np.ndarray, precision: str) -> None:
    pytest.importorskip("sentence_transformers")
    found = reduced(vectors, 12, precision)
    np.testing.assert_allclose(found, reduced(reduced(vectors, 12), None, precision), atol=1e-6)
    assert found.shape == (300, 12)
    assert not np.allclose(found, reduced(vectors, 12), atol=1e-4)


def test_errors_name_both_values(vectors: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="truncate_dim=21, but the vectors have 20 dimensions"):
        require_reducible(20, 21, "float32")
    with pytest.raises(ValueError, match="truncate_dim=0, .* 1 to 20"):
        reduced(vectors, 0)
    with pytest.raises(ValueError, match="'int4': choose one of float32, int8"):
        reduced(vectors, None, "int4")
    broken = vectors.copy()
    broken[3, 2] = np.nan
    with pytest.raises(ValueError, match="row 3"):
        reduced(broken, 5)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # as where it is not installed
    with pytest.raises(
        ValueError,
        match=r"'int8' needs sentence-transformers: pip install 'dap-transformers\[st\]'",
    ):
        reduced(vectors, None, "int8")
    assert reduced(vectors, 5).shape == (300, 5)
