"""Blocked nearest neighbours against a naive float64 loop: exactness, ties, bad rows."""

import numpy as np
import pytest
import torch

from dap.similarity import nearest_neighbours


def naive_neighbours(queries: np.ndarray, keys: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine by cosine in float64, sorted by (-score, index)."""
    scores = np.zeros((len(queries), len(keys)))
    for i, query in enumerate(queries.astype(np.float64)):
        for j, key in enumerate(keys.astype(np.float64)):
            lengths = np.linalg.norm(query) * np.linalg.norm(key)
            scores[i, j] = query @ key / lengths if lengths else 0.0
    indices = np.array([sorted(range(len(keys)), key=lambda j: (-row[j], j))[:k] for row in scores])
    return np.take_along_axis(scores, indices, 1), indices


@pytest.mark.parametrize("k", [1, 4, 37])
@pytest.mark.parametrize("blocks", [(1024, 16384), (7, 5), (1, 1), (23, 36)])
def test_equals_the_naive_loop(k: int, blocks: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    queries, keys = rng.normal(size=(23, 16)) * 1e3, rng.normal(size=(37, 16)) * 1e-3
    scores, indices = nearest_neighbours(queries, keys, k, *blocks)
    expected_scores, expected_indices = naive_neighbours(queries, keys, k)
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_allclose(scores, expected_scores, atol=1e-6)
    assert scores.dtype == np.float32
    assert indices.dtype == np.int64


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("key_block", [3, 4, 100])
def test_ties_go_to_the_lowest_index(k: int, key_block: int) -> None:
    signs = np.random.default_rng(1).choice([-1.0, 1.0], size=(40, 4))  # products of halves: exact in float32
    scores, indices = nearest_neighbours(signs[:9], signs, k, 4, key_block)
    expected_scores, expected_indices = naive_neighbours(signs[:9], signs, k)
    np.testing.assert_array_equal(indices, expected_indices)
    np.testing.assert_allclose(scores, expected_scores, atol=1e-6)


def test_repeated_rows_of_real_numbers_go_to_the_lowest_index() -> None:
    rows = np.random.default_rng(2).normal(size=(50, 64)).astype(np.float32)
    _, indices = nearest_neighbours(rows, np.concatenate([rows, rows, rows]), query_block=16, key_block=40)
    np.testing.assert_array_equal(indices[:, 0], np.arange(50))


@pytest.mark.parametrize("k", [1, 2, 5])
def test_repeated_keys_are_listed_by_index_whatever_the_blocks(k: int) -> None:
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(9, 64)).astype(np.float32)
    keys = rows[rng.integers(0, 9, size=41)]
    _, expected = naive_neighbours(rows, keys, k)
    for blocks in [(1024, 16384), (3, 7), (1, 1)]:
        np.testing.assert_array_equal(nearest_neighbours(rows, keys, k, *blocks)[1], expected)


def test_zero_rows_have_cosine_zero() -> None:
    scores, indices = nearest_neighbours(np.zeros((1, 3)), np.array([[-1.0, 0, 0], [0, 0, 0], [5.0, 0, 0]]), k=3)
    np.testing.assert_array_equal(scores, np.zeros((1, 3)))
    np.testing.assert_array_equal(indices, [[0, 1, 2]])


def test_huge_and_tiny_rows_neither_overflow_nor_vanish() -> None:
    rows = np.array([[1.0, 2.0], [2.0, -1.0]], np.float32)
    scores, indices = nearest_neighbours(rows * np.float32(1e38), rows * np.float32(1e-30))
    np.testing.assert_array_equal(indices[:, 0], [0, 1])
    np.testing.assert_allclose(scores, 1, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_torch_tensors_of_any_float_type(dtype: torch.dtype) -> None:
    rows = torch.eye(5, dtype=dtype)
    _, indices = nearest_neighbours(rows.requires_grad_(), rows)
    np.testing.assert_array_equal(indices[:, 0], np.arange(5))


def test_no_queries_give_empty_results() -> None:
    scores, indices = nearest_neighbours(np.zeros((0, 3)), np.eye(3), k=2)
    assert scores.shape == indices.shape == (0, 2)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", ["queries", "keys"])
def test_a_row_that_is_not_finite_is_named(value: float, side: str) -> None:
    arrays = {"queries": np.ones((4, 3)), "keys": np.ones((5, 3))}
    arrays[side][3, 1] = value
    with pytest.raises(ValueError, match=f"{side}: row 3 "):
        nearest_neighbours(**arrays)


@pytest.mark.parametrize(
    ("queries", "keys", "k", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 4)), 1, "3 dimensions, keys 4"),
        (np.ones((2, 3)), np.ones((2, 3)), 3, "k=3 with 2 keys"),
        (np.ones((2, 3)), np.ones((2, 3)), 0, "k=0"),
        (np.ones((2, 3)), np.ones((0, 3)), 1, "k=1 with 0 keys"),
        (np.ones(3), np.ones((2, 3)), 1, r"queries has shape \(3,\)"),
    ],
)
def test_wrong_arguments(queries: np.ndarray, keys: np.ndarray, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nearest_neighbours(queries, keys, k)
