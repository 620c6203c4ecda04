"""faiss behind the same interface: exact with a flat index, recall measured, errors named."""

import numpy as np
import pytest
from naive import cosines
from numpy.testing import assert_allclose

from dap_transformers.mining.margin import candidate_pairs
from dap_transformers.search import approximate
from dap_transformers.search.approximate import approximate_neighbours, recall_at_k
from dap_transformers.search.exact import mutual_neighbours

pytest.importorskip("faiss", reason="faiss is an extra: pip install faiss-cpu")


def sides(rows: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    source = rng.standard_normal((rows, 16), dtype=np.float32) * 3
    return source, source + rng.standard_normal((rows, 16), dtype=np.float32)


def test_recall_grows_with_the_lists_that_are_visited_and_is_that_of_a_full_comparison() -> None:
    source, target = sides()
    exact = mutual_neighbours(source, target, 4)
    recalls = []
    for index in ("IVF16,Flat:nprobe=1", "IVF16,Flat:nprobe=4", "Flat"):
        found = approximate_neighbours(source, target, 4, index)
        shares = []
        for one, other in zip(found, exact):
            for a, b in zip(one.indices, other.indices):
                shares.append(len(set(a) & set(b)) / 4)
        full = np.mean(shares)
        assert recall_at_k(found, source, target) == pytest.approx(full)
        recalls.append(full)
    assert recalls[0] < recalls[1] < recalls[2] == 1


# Of few rows, the lists of the index are short. The other index compresses the vectors.
@pytest.mark.parametrize(("rows", "index"), [(40, "IVF16,Flat:nprobe=1"), (1000, "PQ4x4")])
def test_scores_are_true_cosines_of_different_rows(rows: int, index: str) -> None:
    source, target = sides(rows)
    found = approximate_neighbours(source, target, 4, index)
    exact = mutual_neighbours(source, target)
    for (scores, indices), side in zip(found, ((source, target), (target, source))):
        assert all(len(set(row)) == 4 for row in indices.tolist())
        assert_allclose(scores, np.take_along_axis(cosines(*side), indices, 1), atol=1e-5)
        assert (np.diff(scores) <= 0).all()
    # means are of true cosines only, so no margin is inflated
    assert (candidate_pairs(found)["score"] <= candidate_pairs(exact)["score"].max() * 1.5).all()
    assert recall_at_k(found, source, target) < 1


@pytest.mark.parametrize("index", ["IVF16,Nonsense", "IVF16,Flat:probes=3"])
def test_what_faiss_refuses_is_named(index: str) -> None:
    with pytest.raises(ValueError, match=f"^faiss index {index} of 1000 rows: "):
        approximate_neighbours(*sides(), 4, index)


def test_rows_that_are_not_finite_are_refused_where_some_rows_train_the_index_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = sides()
    with pytest.raises(ValueError, match="1 of 1000 rows"):
        approximate_neighbours(target, np.vstack([source[:-1], [np.inf] * 16]), 4, "Flat")
    target[330, 3] = np.nan
    monkeypatch.setattr(approximate, "TRAINING_ROWS", 100)
    monkeypatch.setattr(approximate, "BLOCK_ROWS", 16)
    with pytest.raises(ValueError, match="1 of 100 rows"):
        approximate_neighbours(source, target, 4, "IVF2,Flat")
    target[330, 3] = 0
    found = approximate_neighbours(source, target, 4, "IVF2,Flat:nprobe=2")
    assert recall_at_k(found, source, target) == 1
