"""Truncated and quantised vectors: sentence-transformers' codes, and the order that they retrieve in."""

import numpy as np
import pytest

from dap.encoding.precision import PRECISIONS, calibrate, dequantize, quantize, reduced, truncate
from dap.search.similarity import nearest_neighbours


@pytest.fixture
def vectors() -> np.ndarray:
    """300 rows of length 1 in 20 dimensions, which are no whole number of bytes; one dimension does not vary."""
    rows = np.random.default_rng(0).standard_normal((300, 20)).astype(np.float32)
    rows[:, 7] = 0
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("calibrated", [False, True])
def test_codes_are_those_of_sentence_transformers(vectors: np.ndarray, precision: str, calibrated: bool) -> None:
    library = pytest.importorskip("sentence_transformers.util.quantization")
    ranges = calibrate(vectors[:100]) if calibrated else None
    codes = quantize(vectors, precision, ranges)
    expected = library.quantize_embeddings(vectors, precision, ranges=ranges)
    assert codes.dtype == expected.dtype
    np.testing.assert_array_equal(codes, expected)
    assert (
        calibrated is False
        or precision not in ("int8", "uint8")
        or {0, 255} <= set((codes.view(np.uint8) ^ 0x80).flat)
    )


def test_truncation_is_sentence_transformers_with_length_1(vectors: np.ndarray) -> None:
    rows = truncate(3 * vectors, 6)
    for row, vector in zip(rows, vectors.astype(np.float64), strict=True):
        np.testing.assert_allclose(row, vector[:6] / np.sqrt((vector[:6] ** 2).sum()), atol=1e-6)
    assert rows.dtype == np.float32
    np.testing.assert_allclose(truncate(vectors, None), vectors, atol=1e-6)


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_bits_retrieve_in_the_order_of_the_hamming_distance(vectors: np.ndarray, precision: str) -> None:
    queries, keys = vectors[:40], vectors[40:]
    seen = [dequantize(quantize(side, precision), precision, 20) for side in (queries, keys)]
    scores, indices = nearest_neighbours(*seen, k=5)
    for query, row_scores, row in zip(queries, scores, indices, strict=True):
        distances = [sum((a > 0) != (b > 0) for a, b in zip(query, key, strict=True)) for key in keys]
        assert [distances[i] for i in row] == sorted(distances)[:5]  # of equal distances rounding decides
        np.testing.assert_allclose(row_scores, [1 - 2 * distances[i] / 20 for i in row], atol=1e-6)


@pytest.mark.parametrize("precision", ["int8", "uint8"])
def test_a_byte_is_at_most_half_a_step_from_the_value(vectors: np.ndarray, precision: str) -> None:
    ranges = calibrate(vectors)
    again = dequantize(quantize(vectors, precision, ranges), precision, 20, ranges)
    steps = (ranges[1] - ranges[0]) / 255
    inside = vectors < ranges[1]  # the largest value has a step of its own, which begins there
    assert (np.abs(again - vectors) <= 0.5001 * steps + 1e-7)[inside].all()
    assert (again[:, 7] == 0).all()
    assert np.abs(again - vectors).max() > 0


def test_reduced_vectors_are_normalised_cut_and_quantised(vectors: np.ndarray) -> None:
    rows = truncate(vectors, 12)
    ranges = calibrate(rows)
    np.testing.assert_array_equal(reduced(5 * vectors, 12, "binary"), np.where(rows > 0, 1, -1))
    expected = dequantize(quantize(rows, "int8", ranges), "int8", 12, ranges)
    np.testing.assert_allclose(reduced(vectors, 12, "int8"), expected)
    np.testing.assert_allclose(reduced(vectors, 12, "int8"), reduced(vectors, 12, "uint8"))
    np.testing.assert_array_equal(reduced(vectors, 12), rows)


def test_errors_name_both_values(vectors: np.ndarray) -> None:
    with pytest.raises(ValueError, match="truncate_dim=21, but the vectors have 20 dimensions"):
        truncate(vectors, 21)
    with pytest.raises(ValueError, match="truncate_dim=0, .* 1 to 20"):
        reduced(vectors, 0)
    with pytest.raises(ValueError, match="'int4': choose one of float32, int8"):
        reduced(vectors, None, "int4")
    with pytest.raises(ValueError, match=r"shape \(2, 12\) for vectors of 20 dimensions"):
        quantize(vectors, "int8", calibrate(vectors[:, :12]))
    with pytest.raises(ValueError, match="int8 codes mean nothing without the ranges"):
        dequantize(quantize(vectors, "int8"), "int8", 20)
    with pytest.raises(ValueError, match="1 vectors have no range"):
        quantize(vectors[:1], "int8")
    broken = vectors.copy()
    broken[3, 2] = np.nan
    with pytest.raises(ValueError, match="NaN"):
        calibrate(broken)
    with pytest.raises(ValueError, match="row 3"):
        truncate(broken, 5)
