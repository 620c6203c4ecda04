"""Nearest neighbours in blocks against a naive float64 loop: exactness, ties, bad rows, memory."""

from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from forked import run_python
from naive import cosines
from numpy.testing import assert_allclose, assert_array_equal, assert_equal

from dap_transformers.search import exact, screening
from dap_transformers.search.exact import Neighbours, mutual_neighbours, nearest, nearest_neighbours


@pytest.fixture(autouse=True, params=["float32", "bfloat16"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Multiply in one type, whatever this CPU is faster at."""
    monkeypatch.setattr(exact, "fastest_product", lambda device: request.param)
    return request.param


@pytest.fixture
def use_blocks(monkeypatch: pytest.MonkeyPatch) -> Callable:
    return lambda *blocks: monkeypatch.setitem(exact.BLOCKS, "cpu", blocks)


def naive_neighbours(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Sort all cosines by (-score, index)."""
    indices = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(scores, indices, 1), indices


def assert_naive(source: np.ndarray, target: np.ndarray, k: int) -> Neighbours:
    """Search both directions, and compare them with the naive loop and with one direction."""
    scores = cosines(source, target)
    expected = naive_neighbours(scores, k), naive_neighbours(scores.T, k)
    found = mutual_neighbours(source, target, k)
    for (scores, indices), (naive_scores, naive_indices) in zip(found, expected):
        assert_array_equal(indices, naive_indices)
        assert_allclose(scores, naive_scores, atol=1e-6)
        assert (scores.dtype, indices.dtype) == (np.float32, np.int64)
    assert_equal(nearest_neighbours(source, target, k), found.forward)
    return found


@pytest.mark.parametrize(
    ("rows", "columns", "dimensions", "blocks", "k"),
    [
        (131, 170, 3, (1024, 8192), 1),
        (1100, 1300, 40, (1024, 8192), 16),
        (131, 170, 12, (65, 97), 40),  # blocks of 33 groups, which are filled up
        (131, 170, 8, (50, 33), 1),
        (23, 31, 8, (5, 200), 16),
        (16, 21, 8, (7, 5), 16),
    ],
)
def test_neighbours_are_those_of_the_naive_loop(
    rows: int, columns: int, dimensions: int, blocks: tuple, k: int, use_blocks: Callable
) -> None:
    use_blocks(*blocks)
    rng = np.random.default_rng(5)
    source = rng.normal(size=(rows, dimensions)) * 1e3
    target = rng.normal(size=(columns, dimensions)) * 1e-3
    assert_naive(source, target, k)
    assert nearest_neighbours(source[:0], target, k)[1].shape == (0, k)


@pytest.mark.parametrize(
    ("blocks", "k"), [((1024, 8192), 1), ((33, 40), 16), ((14, 20), 4), ((4, 1), 3)]
)
@pytest.mark.parametrize("dimensions", [4, 16])
def test_ties_go_to_the_lowest_index_in_both_directions(
    blocks: tuple, k: int, dimensions: int, use_blocks: Callable
) -> None:
    use_blocks(*blocks)
    # products of halves or quarters: exact in float32
    rows = 24 if blocks == (4, 1) else 150
    signs = np.random.default_rng(7).choice([-1.0, 1.0], size=(rows, dimensions))
    source = signs[: rows // 2]
    target = signs[rows // 2 :]
    source[7] = target[3] = 0  # a zero row ties with everything
    target[-9:] = target[:9]
    assert_naive(source, target, k)


@pytest.mark.parametrize(
    "layout",
    [
        np.asfortranarray,
        lambda rows: np.repeat(rows, 2, axis=1)[:, ::2],
        lambda rows: torch.from_numpy(rows.T.copy()).T.requires_grad_(),
        lambda rows: torch.from_numpy(rows).half(),
        lambda rows: torch.from_numpy(rows).bfloat16(),
    ],
)
def test_repeated_rows_of_real_numbers_tie_in_any_layout_and_type(layout: Callable) -> None:
    rows = np.random.default_rng(10).normal(size=(65, 384)).astype(np.float32)
    repeated = np.concatenate([rows[::-1], rows, rows, rows])
    keys = layout(repeated[:-3])
    _, indices = nearest_neighbours(rows, keys, 4)
    lines = np.arange(65)
    assert_array_equal(indices[:, :3], np.stack([64 - lines, 65 + lines, 130 + lines], 1))
    assert_array_equal(nearest(rows, keys), lines[::-1])
    assert nearest(np.zeros((1, 384)), keys).tolist() == [0]  # a zero row ties with everything


@pytest.mark.parametrize(("huge", "tiny"), [(np.float32(1e38), np.float32(1e-30)), (1e300, 1e-60)])
@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_huge_and_tiny_rows_neither_overflow_nor_vanish(
    huge: float, tiny: float, make: Callable
) -> None:
    rows = np.array([[1.0, 2.0], [2.0, -1.0]], np.asarray(huge).dtype)
    scores, indices = nearest_neighbours(make(rows * huge), make(rows * tiny))
    assert_array_equal(indices[:, 0], [0, 1])
    assert_allclose(scores, 1, atol=1e-6)


EYE = np.eye(3)


def row_3(value: float) -> np.ndarray:
    rows = np.ones((5, 3))
    rows[3, 1] = value
    return rows


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: nearest_neighbours(row_3(np.nan), EYE), "1 of 5 rows"),
        (lambda: nearest_neighbours(EYE, row_3(np.inf)), "1 of 5 rows"),
        (lambda: mutual_neighbours(row_3(-np.inf), EYE, 1), "1 of 5 rows"),
        (lambda: nearest_neighbours(EYE, EYE, 4), "k=4"),
        (lambda: nearest_neighbours(EYE, EYE, 0), "k=0"),
        (lambda: nearest_neighbours(EYE, EYE[:0]), "k=1"),
        (lambda: mutual_neighbours(EYE, EYE[:2], 3), "k=3.* 1 to 2"),
    ],
)
def test_what_is_refused(call: Callable, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_cosines_are_those_of_float32_whatever_else_multiplies_in_half_precision(
    request: pytest.FixtureRequest,
) -> None:
    source, target = np.random.default_rng(9).normal(size=(2, 150, 64))
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("medium")  # bfloat16 on CPUs that have it
    with torch.autocast("cpu", torch.bfloat16):
        assert_naive(source, target, 3)
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
        assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction


@pytest.mark.parametrize("blocks", [(1024, 8192), (1, 1)])
def test_no_neighbour_is_missed_where_rounding_lowers_its_cosine_most(
    blocks: tuple, use_blocks: Callable
) -> None:
    """Search rows (3, 256) that lose as much as rows can by rounding, and rows that lose nothing.

    The numbers of the second row are just below or above the middle of two bfloat16 numbers. Its
    neighbour has the signs of the rounding errors. So the cosine falls by the length of the errors,
    below that with the zero row, which comes first.
    """
    use_blocks(*blocks)
    middle = (1 + 2**-8) / 16
    rounded = np.tile([middle * (1 - 2**-12), middle * (1 + 2**-12)], 127)
    rounded = np.append(rounded, [2**-6, 0])  # makes the cosine positive
    exact = np.tile([1 / 16, -1 / 16], 128)
    source, target = np.outer([0, 1, -1], rounded), np.outer([0, 1, -1], exact)
    for k in range(1, 4):
        assert_naive(source, target, k)
        assert_naive(target, source, k)


def in_a_corner(spread: float) -> Callable:
    return lambda rng, rows: rng.normal(size=rows.shape[1]) + 2 + spread * rows


#: Turns random rows (N, D) into rows whose cosines are hard to bound.
SHAPES: dict[str, Callable] = {
    "hub": lambda rng, rows: np.where(
        rng.random((len(rows), 1)) < 0.5, rows, rows[0] + 1e-3 * rows
    ),
    "sorted": lambda rng, rows: np.sort(rows, axis=0),
    "opposite": lambda rng, rows: (2 + rows) * np.where(np.arange(len(rows)) < 10, -1, 1)[:, None],
    "one side alike": lambda rng, rows: np.where(
        np.arange(len(rows))[:, None] < 200, rows[0] + 1e-4 * rows, rows
    ),
    "corner of 0.3": in_a_corner(0.3),
    "corner of 1e-5": in_a_corner(1e-5),
}


def hard_rows(shape: str, dimensions: int) -> tuple[np.ndarray, np.ndarray]:
    """Make 200 source rows and 150 target rows."""
    rng = np.random.default_rng(dimensions)
    rows = SHAPES[shape](rng, rng.normal(size=(350, dimensions))).astype(np.float32)
    return rows[:200], rows[200:]


@pytest.mark.parametrize("dimensions", [1, 384])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_neighbour_is_missed_however_hard_rows_are_to_tell_apart(
    shape: str, dimensions: int, use_blocks: Callable
) -> None:
    source, target = hard_rows(shape, dimensions)
    use_blocks(65, 67)
    found = mutual_neighbours(source, target, 4)
    forward = cosines(source, target)
    for (scores, indices), expected in zip(found, (forward, forward.T)):
        best, _ = naive_neighbours(expected, 4)
        chosen = np.take_along_axis(expected, indices, 1)
        assert_allclose(chosen, best, atol=5e-7)
        assert_allclose(scores, best, atol=1e-6)
        assert all(len(set(row)) == 4 for row in indices)


def test_neighbours_are_the_same_bits_whatever_the_blocks_and_the_kind_of_product(
    monkeypatch: pytest.MonkeyPatch, use_blocks: Callable
) -> None:
    source, target = hard_rows("corner of 0.3", 48)
    found = mutual_neighbours(source, target, 4)
    monkeypatch.setattr(exact, "fastest_product", lambda device: "float32")
    for blocks in [(64, 128), (37, 41), (200, 8)]:
        use_blocks(*blocks)
        other = mutual_neighbours(source, target, 4)
        assert_equal(other, found)


def test_few_cosines_are_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch, use_blocks: Callable
) -> None:
    rng = np.random.default_rng(1)
    source = rng.normal(size=(3000, 64)).astype(np.float32) + 1
    target = source[::-1] + 0.5 * rng.normal(size=source.shape)
    compute = Mock(wraps=screening._cosines)
    monkeypatch.setattr(screening, "_cosines", compute)
    use_blocks(512, 1024)
    mutual_neighbours(source, target, 4)
    assert sum(len(call.args[2]) for call in compute.call_args_list) < 0.02 * 3000**2


@pytest.mark.parametrize("kind", ["both"], indirect=True)
def test_memory_beyond_the_inputs_is_a_few_blocks() -> None:
    """Search with both kinds in a process of its own: 8,000 × 6,000 cosines take 183 MiB."""
    code = """
import resource, sys, numpy as np
from dap_transformers.search import exact
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
rows = np.random.default_rng(0).standard_normal((8_000, 8), dtype=np.float32)
exact.mutual_neighbours(rows[:1000], rows[:1000], 2)
before = peak()
exact.BLOCKS["cpu"] = (1024, 1024)
for kind in ("float32", "bfloat16"):
    exact.fastest_product = lambda device: kind
    exact.mutual_neighbours(rows, rows[:6_000], 2)
print(peak() - before)
exact.BLOCKS["cpu"] = (512, 8192)  # all cosines of a block are computed
exact.mutual_neighbours(np.ones((512, 8)), np.ones((8192, 8)), 2)
print(peak() - before)
"""
    of_blocks, of_equal_rows = map(float, run_python(code).split())  # MiB
    assert of_blocks < 60
    assert of_equal_rows < 120


@pytest.mark.parametrize("kind", ["either"], indirect=True)
def test_the_fastest_product_that_a_device_has_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(rows: torch.Tensor, columns: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError("no such product on the backend")

    products = {
        "slow": (torch.float32, lambda rows, columns, out: rows.repeat(9, 1) @ columns.T),
        "fast": (torch.float32, lambda rows, columns, out: rows[:1] @ columns.T),
        "absent": (torch.float32, absent),
    }
    monkeypatch.setattr(screening, "PRODUCTS", products)
    assert screening.fastest_product.__wrapped__(torch.device("cpu")) == "fast"
