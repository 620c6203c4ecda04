"""The threshold that mining chooses, and its estimates, on vectors whose pairs are known."""

import json
from collections.abc import Callable

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from naive import cosines
from numpy.testing import assert_allclose, assert_array_equal
from table_encoder import TableEncoder

from dap_transformers.errors import UserError
from dap_transformers.mining.margin import PAIR, neighbourhoods, score_known, score_pairs
from dap_transformers.mining.mine_pairs import MiningOptions, mine, mine_vectors
from dap_transformers.mining.threshold import ScoreModel, remark_on, runner_up_scores


def texts(count: int, common: int, noise: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
    """Vectors of two texts. The first `common` rows of both are translations."""
    random = np.random.default_rng(0)
    source = random.normal(size=(count, 40)) + 0.8
    target = random.normal(size=(count, 40)) + 0.8
    target[:common] = source[:common] + noise * random.normal(size=(common, 40))
    return source.astype(np.float32), target.astype(np.float32)


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_the_estimated_precision_and_the_chosen_threshold_are_close_to_the_truth(
    share: float,
) -> None:
    common = round(share * 600)
    vectors = texts(600, common)
    _, candidates, choice = mine_vectors(vectors, MiningOptions())
    is_true = (candidates["source"] == candidates["target"]) & (candidates["source"] < common)

    def f1(threshold: float) -> float:
        kept = candidates["score"] >= threshold
        return 2 * is_true[kept].sum() / (kept.sum() + common)

    assert f1(choice.threshold) > max(map(f1, candidates["score"])) - 0.03
    for row in choice.table:
        kept = candidates["score"] >= row["threshold"]
        assert row["kept"] == kept.sum()
        assert row["precision"] == pytest.approx(is_true[kept].mean(), abs=0.1)

    wanted = mine_vectors(vectors, MiningOptions(min_precision=0.99))[2]
    assert wanted.precision >= 0.99
    reached = [row["threshold"] for row in wanted.table if row["precision"] >= 0.99]
    assert wanted.threshold == min(reached)  # the lowest one, which keeps the most pairs


def test_texts_without_translations_are_not_given_a_threshold_unless_calibrated() -> None:
    vectors = texts(600, 0)
    for options in (MiningOptions(), MiningOptions(min_precision=0.9)):
        with pytest.raises(UserError, match="no group .* [0-9.]+ keeps 5 pairs, .* 86 pairs"):
            mine_vectors(vectors, options)
    given = mine_vectors(vectors, MiningOptions(threshold=1.1))[2]
    assert given.table == []
    assert "cannot be estimated" in given.remark
    known = texts(60, 60)
    _, candidates, choice = mine_vectors(vectors, MiningOptions(), known=known)
    assert choice.share < 0.03
    assert (candidates["score"] >= choice.threshold).sum() < 15
    few = mine_vectors(texts(600, 12), MiningOptions(), known=known)[2]
    assert "check a few pairs" in few.remark
    sample = ScoreModel(5_000, np.linspace(2, 1, 100), np.repeat([1.0, 0.0], [40, 60]), 9.0, True)
    assert "only about 2,000 of the candidates" in remark_on(sample, None)


def test_a_low_estimate_of_a_chosen_threshold_is_remarked_on() -> None:
    vectors = texts(600, 300, noise=1.3)
    choice = mine_vectors(vectors, MiningOptions())[2]
    assert choice.precision < 0.86
    assert "often wrong by more than 5 points" in choice.remark
    sure = mine_vectors(vectors, MiningOptions(min_precision=0.95))[2]
    given = mine_vectors(vectors, MiningOptions(threshold=choice.threshold))[2]
    known = mine_vectors(vectors, MiningOptions(), known=texts(300, 300, noise=1.3))[2]
    assert [sure.remark, given.remark, known.remark] == ["", "", ""]


def test_known_pairs_score_as_pairs_of_the_texts_do() -> None:
    source, target = texts(50, 20)
    rows = np.arange(20)
    inside = score_known((source[:20], target[:20]), (source, target))
    expected = score_pairs(source, target, rows, rows, neighbourhoods(source, target))
    assert_allclose(inside, expected, atol=1e-5)
    for row in range(3):
        others = np.delete(source, row, 0), np.delete(target, row, 0)
        outside = score_known((source[[row]], target[[row]]), others)
        assert_allclose(outside, expected[[row]], atol=1e-5)


def test_known_pairs_that_mining_would_not_find_do_not_calibrate() -> None:
    vectors = texts(300, 150)
    good = texts(30, 30, noise=0.4)
    wrong = texts(30, 0)
    both = np.concatenate([good[0], wrong[0]]), np.concatenate([good[1], wrong[1]])
    expected = score_known(good, vectors)
    assert len(expected) == 30
    assert_array_equal(score_known(both, vectors), expected)
    with pytest.raises(UserError, match="only 0 of the 30 known translations"):
        mine_vectors(vectors, MiningOptions(), known=wrong)
    given = MiningOptions(threshold=1.1)
    plain = mine_vectors(vectors, given)
    assert mine_vectors(vectors, given, known=wrong)[2] == plain[2]


def test_runner_ups_agree_with_a_loop() -> None:
    source, target = texts(30, 15)
    cosine = cosines(source, target)
    pairs = np.empty(30, PAIR)
    pairs["source"] = pairs["target"] = np.arange(30)
    found = runner_up_scores(pairs, neighbourhoods(source, target, 4, extra=1))
    for row in range(30):
        best = []
        for table in (cosine, cosine.T):
            others = np.delete(table[row], row)
            near = np.argsort(-others)[:4]
            means = np.delete(np.sort(table, axis=0)[-4:].mean(0), row)[near]
            best.append((others[near] / ((others[near].mean() + means) / 2)).max())
        assert found[row] == pytest.approx(max(best), abs=1e-5)


def test_pairs_of_equal_score_count_together() -> None:
    scores = np.repeat([3.0, 2.0, 1.0], [3, 6, 1])
    model = ScoreModel(10, scores, np.repeat([1.0, 0.8, 0.0], [3, 6, 1]), 9.0, calibrated=True)
    # with some of the six pairs, the precision would be 0.95
    assert model.choose(0.95) == {"threshold": 3.0, "kept": 3, "precision": 1.0}
    assert [row["kept"] for row in model.table()] == [3, 9, 10]
    assert [row["precision"] for row in model.table()] == [1.0, 0.8667, 0.78]


def test_the_function_mines_sentences_or_vectors_into_a_table() -> None:
    encoder = TableEncoder(np.array([[1, 0.1], [1, 0.7], [1, 0.69], [1, 0.11]]))
    table = mine(["0", "", "1", "0"], ["2", "3"], encoder, k=1)
    assert json.loads(table.schema.metadata[b"mining"])["threshold"] is None
    assert {table.schema.field(name).type for name in ("source", "target")} == {pa.string()}
    rows = table.drop("score").to_pydict().values()
    assert set(zip(*rows)) == {("0", "3", 1, 2), ("1", "2", 3, 1)}

    rounded = [torch.from_numpy(side).bfloat16() for side in texts(200, 100)]
    for vectors in (texts(200, 100), rounded):
        of_vectors = mine(*vectors)
        assert of_vectors.column_names == ["score", "source_line", "target_line"]
        assert 90 <= len(of_vectors) <= 110


EYE = np.eye(3)
ENCODER = TableEncoder(EYE)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: mine(*texts(200, 100), threshold=9), "no pair scores so high, the best of"),
        (lambda: mine(*texts(10, 10), min_precision=0.9), "too few candidates for an estimate"),
        (lambda: mine(np.array([[1.0, 2], [np.nan, 1]]), np.eye(2)), "source: NaN"),
        (lambda: mine(EYE, EYE, threshold="high"), "give a number.*high"),
        (lambda: mine(EYE, EYE, threshold="nan"), "give a number.*nan"),
        (lambda: mine(EYE, EYE, min_precision=1.5), "min_precision=1.5: give a share"),
        (lambda: mine(EYE, EYE, k=0), "k=0: at least 1"),
        (lambda: mine_vectors([EYE, EYE], MiningOptions(k=1), known=[EYE, EYE]), "k=1 cannot"),
        (lambda: mine(EYE, EYE, min_precision=0.9, threshold=1), "min_precision"),
        (lambda: mine([], ["1"], ENCODER), "source: none of its lines"),
        (lambda: mine("one", ["1"], ENCODER), "is the string"),
        (lambda: mine(pd.DataFrame({"text": ["1"]}), ["1"], ENCODER), "is the table"),
        (lambda: mine(["1", float("nan")], ["1"], ENCODER), "sentence 1 is nan"),
    ],
)
def test_what_is_refused(call: Callable, says: str) -> None:
    with pytest.raises((ValueError, KeyError), match=says):
        call()
