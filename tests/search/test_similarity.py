"""Nearest neighbours in blocks against a naive float64 loop: exactness, ties, bad rows, memory."""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from forked import run_python

from dap_transformers.search import screening
from dap_transformers.search.exact import (
    CHECKED_ROWS,
    Neighbours,
    mutual_neighbours,
    nearest,
    nearest_neighbours,
)


def int8_products_are_exact() -> bool:
    """Tell whether this CPU adds int8 products without overflow."""
    numbers = torch.full((32, 768), 127, dtype=torch.int8)
    return bool(torch._int_mm(numbers, numbers.T).eq(768 * 127**2).all())


@pytest.fixture(autouse=True, params=["float32", "rounded"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Screen blocks by float32 or by int8 products, whatever this CPU is faster at.

    The int8 products must have shapes that CUDA takes.
    """
    if request.param == "rounded" and not int8_products_are_exact():
        pytest.skip("this CPU's products of int8 overflow")
    whole_product = torch._int_mm

    def on_cuda(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        assert len(rows) > 16
        assert not any(size % 8 for size in columns.shape)
        return whole_product(rows, columns)

    monkeypatch.setattr(torch, "_int_mm", on_cuda)
    monkeypatch.setattr(screening, "rounding_pays", lambda device: request.param == "rounded")
    return request.param


def naive_neighbours(
    queries: np.ndarray, keys: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """Compute one column of cosines after the other in float64, and sort by (-score, index)."""
    queries = queries.astype(np.float64)
    query_lengths = np.linalg.norm(queries, axis=1)
    scores = np.zeros((len(queries), len(keys)))
    for column, key in enumerate(keys.astype(np.float64)):
        lengths = query_lengths * np.linalg.norm(key)
        products = (queries * key).sum(axis=1)
        scores[:, column] = np.divide(
            products, lengths, out=np.zeros_like(products), where=lengths > 0
        )
    indices = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, indices, 1), indices


def test_repeated_rows_of_real_numbers_go_to_the_lowest_index() -> None:
    rows = np.random.default_rng(2).normal(size=(50, 64)).astype(np.float32)
    keys = np.concatenate([rows[::-1], rows, rows])
    np.testing.assert_array_equal(nearest(rows, keys), np.arange(50)[::-1])
    np.testing.assert_array_equal(nearest(rows, rows[[7, 9, 7, 0, 9, 0]])[[7, 9, 0]], [0, 1, 3])
    keys[:50] = -keys[:50]
    keys[100, :] = keys[50, :] = 0
    assert nearest(np.zeros((1, 64)), keys).tolist() == [0]  # a zero row ties with everything


@pytest.mark.parametrize(("huge", "tiny"), [(np.float32(1e38), np.float32(1e-30)), (1e300, 1e-60)])
@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_huge_and_tiny_rows_neither_overflow_nor_vanish(
    huge: float, tiny: float, kind: Callable
) -> None:
    rows = np.array([[1.0, 2.0], [2.0, -1.0]], np.asarray(huge).dtype)
    scores, indices = nearest_neighbours(kind(rows * huge), kind(rows * tiny))
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


def row_3(value: float) -> np.ndarray:
    rows = np.ones((5, 3))
    rows[3, 1] = value
    return rows


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nearest_neighbours(row_3(np.nan), np.eye(3)), "queries: row 3 "),
        (lambda: nearest_neighbours(np.eye(3), row_3(np.inf)), "keys: row 3 "),
        (lambda: mutual_neighbours(row_3(-np.inf), np.eye(3), 1), "source: row 3 "),
        (lambda: nearest_neighbours(np.eye(2), np.eye(2), 3), "k=3"),
        (lambda: nearest_neighbours(np.eye(2), np.eye(2), 0), "k=0"),
        (lambda: nearest_neighbours(np.eye(2), np.ones((0, 2))), "k=1"),
        (lambda: mutual_neighbours(np.ones((5, 3)), np.ones((2, 3)), 3), "k=3.* 1 to 2"),
    ],
)
def test_what_is_refused(call: Callable, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def both_directions(source: np.ndarray, target: np.ndarray, k: int) -> Neighbours:
    return Neighbours(*naive_neighbours(source, target, k), *naive_neighbours(target, source, k))


def assert_equal_neighbours(found: Neighbours, expected: Neighbours) -> None:
    for name in ("forward", "backward"):
        np.testing.assert_array_equal(
            getattr(found, f"{name}_indices"), getattr(expected, f"{name}_indices")
        )
        scores = getattr(found, f"{name}_scores")
        np.testing.assert_allclose(scores, getattr(expected, f"{name}_scores"), atol=1e-6)
        assert scores.dtype == np.float32


@pytest.mark.parametrize(
    ("rows", "columns", "blocks", "k"),
    [
        (131, 170, None, 1),
        (131, 170, None, 9),
        (131, 170, (64, 96), 4),
        (131, 170, (50, 33), 1),
        (47, 62, (8, 7), 9),
        (47, 62, (5, 200), 9),
        (47, 62, (7, 5), 47),
    ],
)
def test_neighbours_are_those_of_the_naive_loop(
    rows: int, columns: int, blocks: tuple[int, int] | None, k: int
) -> None:
    rng = np.random.default_rng(5)
    source = rng.normal(size=(rows, 8)) * 1e3
    target = rng.normal(size=(columns, 8)) * 1e-3
    found = mutual_neighbours(source, target, k, blocks=blocks)
    assert_equal_neighbours(found, both_directions(source, target, k))
    scores, indices = nearest_neighbours(source, target, k, blocks)
    np.testing.assert_array_equal(indices, found.forward_indices)
    np.testing.assert_array_equal(scores, found.forward_scores)
    assert indices.dtype == np.int64


@pytest.mark.parametrize("has_new_switches", [True, False])
def test_neighbours_are_those_of_float32_whatever_else_multiplies_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, has_new_switches: bool
) -> None:
    if not has_new_switches:  # as before torch 2.9
        monkeypatch.delattr(type(torch.backends.mkldnn), "matmul", raising=False)
    source, target = np.random.default_rng(9).normal(size=(2, 150, 64))
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("medium")  # bfloat16 on CPUs that have it
    with torch.autocast("cpu", torch.bfloat16):
        found = mutual_neighbours(source, target, 3, blocks=(64, 64))
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
    assert_equal_neighbours(found, both_directions(source, target, 3))


@pytest.mark.parametrize(
    "layout", [np.asfortranarray, lambda rows: np.repeat(rows, 2, axis=1)[:, ::2]]
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_equal_rows_tie_in_any_layout(layout: Callable, as_tensor: bool) -> None:
    rows = np.random.default_rng(10).normal(size=(65, 384)).astype(np.float32)
    repeated = np.concatenate([rows, rows, rows, rows])
    keys = layout(repeated[: CHECKED_ROWS + 1])  # the last block that is checked has one row
    keys = torch.from_numpy(np.array(keys).T.copy()).T if as_tensor else keys
    _, indices = nearest_neighbours(rows, keys, 4)
    np.testing.assert_array_equal(indices[:1, :4] % 65, np.zeros((1, 4)))
    np.testing.assert_array_equal(nearest(rows, keys), np.arange(65))


@pytest.mark.parametrize(
    ("blocks", "k"), [(None, 1), ((64, 96), 5), ((33, 40), 30), ((14, 20), 4), ((1, 1), 3)]
)
@pytest.mark.parametrize("dimensions", [4, 16])
def test_ties_go_to_the_lowest_index_in_both_directions(
    blocks: tuple[int, int] | None, k: int, dimensions: int
) -> None:
    # products of halves or quarters: exact in float32
    rows = 60 if blocks == (1, 1) else 300
    signs = np.random.default_rng(7).choice([-1.0, 1.0], size=(rows, dimensions))
    source = signs[: rows // 2]
    target = signs[rows // 2 :]
    source[7] = target[3] = 0  # a zero row ties with everything
    target[-20:] = target[:20]
    expected = both_directions(source, target, k)
    assert_equal_neighbours(mutual_neighbours(source, target, k, blocks=blocks), expected)


@pytest.mark.parametrize("way", ["both"], indirect=True)
def test_memory_beyond_the_inputs_is_a_few_blocks() -> None:
    """Search in both ways in a process of its own: 8,000 × 6,000 similarities take 183 MiB."""
    code = """
import resource, sys, numpy as np
from dap_transformers.search import screening
from dap_transformers.search.exact import mutual_neighbours
rng = np.random.default_rng(0)
rows = rng.standard_normal((8_000, 8), dtype=np.float32)
mutual_neighbours(rows[:1000], rows[:1000], 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for way in sys.argv[1:]:
    screening.rounding_pays = lambda device: way == "rounded"
    mutual_neighbours(rows, rows[:6_000], 2, blocks=(512, 512))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    ways = ["float32", *(["rounded"] if int8_products_are_exact() else [])]
    done = run_python(["-c", code, *ways], dict(os.environ), REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 60, done.stdout  # MiB


def in_a_corner(spread: float) -> Callable:
    return lambda rng, rows: rng.normal(size=rows.shape[1]) + 2 + spread * rows


#: Turns random rows (N, D) into rows whose cosines are hard to bound.
SHAPES: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "spiky": lambda rng, rows: rows * np.where(np.arange(rows.shape[1]) < 2, 1e3, 1),
    "hub": lambda rng, rows: np.where(
        rng.random((len(rows), 1)) < 0.5, rows, rows[0] + 1e-3 * rows
    ),
    "one-hot": lambda rng, rows: np.eye(rows.shape[1])[rng.integers(rows.shape[1], size=len(rows))],
    "Cauchy": lambda rng, rows: rng.standard_cauchy(rows.shape),
    "sorted": lambda rng, rows: np.sort(rows, axis=0),
    "repeated": lambda rng, rows: rows[rng.integers(20, size=len(rows))],
    "scaled": lambda rng, rows: rows * 10 ** rng.uniform(-30, 30, (len(rows), 1)),
    **{f"corner of {spread}": in_a_corner(spread) for spread in (10.0, 0.3, 0.05, 1e-3, 1e-5)},
}


def hard_rows(shape: str, dimensions: int) -> tuple[np.ndarray, np.ndarray]:
    """Make 400 source rows and 300 target rows."""
    rng = np.random.default_rng(dimensions)
    rows = SHAPES[shape](rng, rng.normal(size=(700, dimensions))).astype(np.float32)
    return rows[:400], rows[400:]


@pytest.mark.parametrize("dimensions", [1, 48, 384])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_neighbour_is_missed_however_hard_rows_are_to_tell_apart(
    monkeypatch: pytest.MonkeyPatch, shape: str, dimensions: int
) -> None:
    monkeypatch.setattr(screening, "FEW_PAIRS", 0)
    source, target = hard_rows(shape, dimensions)
    found = mutual_neighbours(source, target, 4, blocks=(64, 128))
    source, target = (rows.astype(np.float64) for rows in (source, target))
    source /= np.linalg.norm(source, axis=1)[:, None]
    target /= np.linalg.norm(target, axis=1)[:, None]
    cosines = source @ target.T
    for matrix, indices, scores in (
        (cosines, found.forward_indices, found.forward_scores),
        (cosines.T, found.backward_indices, found.backward_scores),
    ):
        best = -np.sort(-matrix, axis=1)[:, :4]
        np.testing.assert_allclose(np.take_along_axis(matrix, indices, 1), best, atol=5e-7)
        np.testing.assert_allclose(scores, best, atol=1e-6)
        assert all(len(set(row)) == 4 for row in indices)


def test_scores_are_the_same_bits_whatever_the_blocks(
    monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    source, target = hard_rows("corner of 0.3", 48)
    monkeypatch.setattr(screening, "rounding_pays", lambda device: False)
    whole = mutual_neighbours(source, target, 4)
    monkeypatch.setattr(screening, "rounding_pays", lambda device: way == "rounded")
    for blocks in [(64, 128), (37, 41), (400, 8)]:
        found = mutual_neighbours(source, target, 4, blocks=blocks)
        for name in vars(whole):
            np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))


def test_only_neighbours_above_given_cosines_are_sought() -> None:
    rng = np.random.default_rng(2)
    source = rng.normal(size=(300, 32))
    target = rng.normal(size=(200, 32))
    whole = mutual_neighbours(source, target, 4)
    above = whole.forward_scores[:, 2], whole.backward_scores[:, 0]
    found = mutual_neighbours(source, target, 4, blocks=(64, 128), above=above)
    np.testing.assert_array_equal(found.forward_indices[:, :2], whole.forward_indices[:, :2])
    assert (found.forward_indices[:, 2:] == -1).all()
    assert (found.backward_indices == -1).all()


def logged_counts(
    caplog: pytest.LogCaptureFixture, *arguments: Any, **options: Any
) -> dict[str, int]:
    """Return the numbers that a search logs about its pairs."""
    with caplog.at_level("DEBUG", "dap_transformers.search.exact"):
        mutual_neighbours(*arguments, **options)
    return caplog.records[-1].args


def test_few_pairs_are_computed_one_by_one(caplog: pytest.LogCaptureFixture, way: str) -> None:
    rng = np.random.default_rng(1)
    source = rng.normal(size=(3000, 64)).astype(np.float32) + 1
    target = source[::-1] + 0.5 * rng.normal(size=source.shape)
    found = logged_counts(caplog, source, target, 4, blocks=(512, 1024))
    assert found["pairs"] == 9_000_000
    assert found["computed"] < 0.02 * found["pairs"]
    assert found["in_float32"] == (0 if way == "rounded" else found["pairs"])


def test_blocks_stay_whole_numbers_though_the_first_bounds_do_not_close(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(screening, "FEW_PAIRS", 0)
    source = np.random.default_rng(2).normal(size=(2048, 128))
    target = np.random.default_rng(1).normal(size=(1024, 128))
    found = logged_counts(caplog, source, target, 16, blocks=(256, 1024))
    if way == "float32":
        assert found["in_float32"] == found["pairs"]
    else:
        assert 0 < found["in_float32"] < found["pairs"] / 2


def overflow(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return torch.full((len(rows), len(rows)), 32767)


def absent(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError(
        "Could not run 'aten::_int_mm' with arguments from the 'made up' backend"
    )


@pytest.mark.parametrize("product", [overflow, absent])
def test_whole_numbers_are_left_alone_where_their_products_fail(
    monkeypatch: pytest.MonkeyPatch, product: Callable
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch, "_int_mm", product)
    screening.rounding_pays.cache_clear()
    assert not screening.rounding_pays(torch.device("cpu"))
    screening.rounding_pays.cache_clear()


@pytest.mark.parametrize(("seconds", "pays"), [(1.01, False), (0.99, True)])
def test_whole_numbers_pay_where_the_device_is_done_with_them_in_half_the_time(
    seconds: float, pays: bool
) -> None:
    queue: list[float] = []  # seconds of work that the device still has to do
    now = [0.0]

    def wait() -> None:
        now[0] += sum(queue)
        queue.clear()

    queue.append(5.0)  # work of others
    found = screening.takes_half(
        lambda: queue.append(seconds), lambda: queue.append(2.0), wait, lambda: now[0]
    )
    assert found == pays
