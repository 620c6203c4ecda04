"""Margin scores and the choice of pairs against plain loops in float64."""

import logging

import numpy as np
import pytest
from naive import cosines

from dap_transformers.mining.margin import (
    candidate_pairs,
    margin_of,
    neighbourhoods,
    score_pairs,
)
from dap_transformers.mining.texts import DistinctSentences


def vectors(source: int, target: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Rows of any length, around a common direction as sentence vectors are."""
    rows = np.random.default_rng(seed).normal(size=(source + target, 6)) + 1.0
    return rows[:source].astype(np.float32), rows[source:].astype(np.float32)


def naive_margins(source: np.ndarray, target: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and margin of every pair, as Artetxe & Schwenk (2019) write it."""
    similar = cosines(source, target)
    of_source = [sum(sorted(row)[-k:]) / (2 * k) for row in similar]
    of_target = [sum(sorted(column)[-k:]) / (2 * k) for column in similar.T]
    return similar, similar / np.add.outer(of_source, of_target)


def naive_mine(source: np.ndarray, target: np.ndarray, k: int) -> dict:
    similar, scores = naive_margins(source, target, k)

    def best_of(similar: np.ndarray, scores: np.ndarray) -> int:
        near = sorted(range(len(similar)), key=lambda row: -similar[row])[:k]
        return max(near, key=lambda row: scores[row])

    pairs = {(i, best_of(similar[i], scores[i])) for i in range(len(source))}
    pairs |= {(best_of(similar[:, j], scores[:, j]), j) for j in range(len(target))}
    best = {}  # sentence -> pair
    for i, j in sorted(pairs, key=lambda pair: -scores[pair]):
        if ("source", i) not in best and ("target", j) not in best:
            best["source", i] = best["target", j] = (i, j)
    return {pair: scores[pair] for pair in best.values()}


def as_dict(pairs: np.ndarray) -> dict[tuple[int, int], float]:
    return {(i, j): score for score, i, j in pairs.tolist()}


@pytest.mark.parametrize(("rows", "columns", "k"), [(25, 40, 4), (40, 25, 1), (5, 30, 5)])
def test_mining_agrees_with_a_plain_loop(rows: int, columns: int, k: int) -> None:
    for seed in range(5):
        a, b = vectors(rows, columns, seed)
        found = candidate_pairs(neighbourhoods(a, b, k))
        assert as_dict(found) == pytest.approx(naive_mine(a, b, k), abs=1e-5)
        assert (np.diff(found["score"]) <= 0).all()


def test_equal_scores_come_in_the_order_of_the_rows() -> None:
    eye = np.eye(6, dtype=np.float32)
    pairs = candidate_pairs(neighbourhoods(eye, eye[::-1], 2))
    assert pairs["source"].tolist() == list(range(6))


def test_given_pairs_get_the_margin_over_both_texts() -> None:
    a, b = vectors(20, 30)
    rows = [3, 0, 3, 19], [7, 7, 7, 29]
    found = score_pairs(a, b, *map(np.array, rows), neighbourhoods(a, b))
    np.testing.assert_allclose(found, naive_margins(a, b, 4)[1][rows], atol=1e-5)


def test_a_ratio_without_positive_neighbourhoods_is_0() -> None:
    cosine = np.array([0.5, -0.2, 0.0, 0.5])
    mean = np.array([-0.1, -0.3, 0.0, 0.25])
    assert margin_of(cosine, mean, mean).tolist() == [0.0, 0.0, 0.0, 2.0]


def test_more_neighbours_than_sentences_are_as_many_as_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = vectors(3, 10)
    with caplog.at_level(logging.WARNING):
        found = neighbourhoods(a, b, 4)
    assert "only 3 distinct sentences: k=3 is used" in caplog.text
    expected = naive_mine(a, b, 3)
    assert as_dict(candidate_pairs(found)) == pytest.approx(expected, abs=1e-5)


def test_repeated_and_empty_lines_are_counted_and_found_again() -> None:
    text = DistinctSentences(iter(["", "b", "a", "b ", "\t ", "b", "é\u2028ü\x85"]))
    assert list(text) == ["b", "a", "b ", "é\u2028ü\x85"]
    assert text.rows.tolist() == [-1, 0, 1, 2, -1, 0, 3]
    assert [text.place(row) for row in range(4)] == [f"text, line {line}" for line in (2, 3, 4, 7)]
    assert text.counts() == {"file": "text", "lines": 7, "empty": 2, "repeated": 1, "distinct": 4}
