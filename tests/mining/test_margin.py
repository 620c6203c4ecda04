"""Margin scores and the choice of pairs against plain loops in float64."""

import logging
import math
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dap_transformers import disk_arrays
from dap_transformers.disk_arrays import concatenate_on_disk, row_blocks, temporary_folder
from dap_transformers.mining.margin import (
    MARGINS,
    RETRIEVALS,
    MinedPairs,
    candidate_pairs,
    margin_of,
    neighbourhoods,
    score_pairs,
    select,
)
from dap_transformers.mining.texts import DistinctSentences
from dap_transformers.search.exact import Neighbours


def vectors(
    source: int, target: int, seed: int = 0, dimensions: int = 6
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of any length, around a common direction as sentence vectors are."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(source + target, dimensions)) + 1.0
    return rows[:source].astype(np.float32), rows[source:].astype(np.float32)


def cosines(source: np.ndarray, target: np.ndarray) -> list[list[float]]:
    def cosine(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b)) / math.sqrt(
            sum(x * x for x in a) * sum(y * y for y in b)
        )

    table = []
    for a in source.tolist():
        table.append([cosine(a, b) for b in target.tolist()])
    return table


def naive_margins(source: np.ndarray, target: np.ndarray, k: int, margin: str) -> list[list[float]]:
    """The margin of every pair, as Artetxe & Schwenk (2019) write it."""
    similar = cosines(source, target)
    of_source = [sum(sorted(row)[-k:]) / (2 * k) for row in similar]
    of_target = [sum(sorted(column)[-k:]) / (2 * k) for column in zip(*similar)]
    score = {
        "ratio": lambda a, b: a / b,
        "distance": lambda a, b: a - b,
        "absolute": lambda a, b: a,
    }[margin]
    table = []
    for i, row in enumerate(similar):
        table.append([score(s, of_source[i] + of_target[j]) for j, s in enumerate(row)])
    return table


def naive_mine(source: np.ndarray, target: np.ndarray, k: int, margin: str, retrieval: str) -> dict:
    similar = cosines(source, target)
    scores = naive_margins(source, target, k, margin)
    rows = range(len(source))
    columns = range(len(target))
    near = [sorted(columns, key=lambda j: -similar[i][j])[:k] for i in rows]
    near_target = [sorted(rows, key=lambda i: -similar[i][j])[:k] for j in columns]
    forward = {(i, max(near[i], key=lambda j: scores[i][j])) for i in rows}
    backward = {(max(near_target[j], key=lambda i: scores[i][j]), j) for j in columns}
    if retrieval == "max":
        found = set()
        used_rows = set()
        used_columns = set()
        for i, j in sorted(forward | backward, key=lambda pair: -scores[pair[0]][pair[1]]):
            if i not in used_rows and j not in used_columns:
                found.add((i, j))
                used_rows.add(i)
                used_columns.add(j)
    else:
        found = {"forward": forward, "backward": backward, "intersection": forward & backward}[
            retrieval
        ]
    return {(i, j): scores[i][j] for i, j in found}


def as_dict(pairs: MinedPairs) -> dict[tuple[int, int], float]:
    rows = zip(pairs.source.tolist(), pairs.target.tolist())
    return dict(zip(rows, pairs.scores.tolist()))


@pytest.mark.parametrize("retrieval", RETRIEVALS)
@pytest.mark.parametrize("margin", MARGINS)
def test_mining_agrees_with_a_plain_loop(margin: str, retrieval: str) -> None:
    for seed, (source, target, k) in enumerate([(25, 40, 4), (40, 25, 1), (5, 30, 5)]):
        a, b = vectors(source, target, seed)
        found = candidate_pairs(neighbourhoods(a, b, k), margin, retrieval)
        assert as_dict(found) == pytest.approx(naive_mine(a, b, k, margin, retrieval), abs=1e-5)
        assert (np.diff(found.scores) <= 0).all()


def test_equal_scores_come_in_the_order_of_the_rows() -> None:
    pairs = candidate_pairs(
        neighbourhoods(np.eye(6, dtype=np.float32), np.eye(6, dtype=np.float32)[::-1], 2)
    )
    assert pairs.source.tolist() == [0, 1, 2, 3, 4, 5]
    assert pairs.target.tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("margin", MARGINS)
def test_given_pairs_get_the_margin_over_both_texts(
    margin: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dap_transformers.mining.margin.VECTOR_BLOCK", 3)
    a, b = vectors(20, 30)
    source = np.array([3, 0, 3, 19])
    target = np.array([7, 7, 7, 29])
    found = score_pairs(a, b, source, target, neighbourhoods(a, b), margin)
    expected = naive_margins(a, b, 4, margin)
    assert found.scores.tolist() == pytest.approx(
        [expected[i][j] for i, j in zip(source, target)], abs=1e-5
    )
    assert (found.source.tolist(), found.target.tolist()) == (source.tolist(), target.tolist())


def test_a_ratio_without_positive_neighbourhoods_is_0() -> None:
    cosine = np.array([0.5, -0.2, 0.0, 0.5])
    mean = np.array([-0.1, -0.3, 0.0, 0.25])
    assert margin_of(cosine, mean, mean).tolist() == [0.0, 0.0, 0.0, 2.0]
    zeros = np.zeros((3, 4), np.float32)
    assert (
        candidate_pairs(neighbourhoods(zeros, zeros, 2), retrieval="forward").scores.tolist()
        == [0.0] * 3
    )


def test_more_neighbours_than_sentences_are_as_many_as_there_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = vectors(3, 10)
    with caplog.at_level(logging.WARNING):
        found = neighbourhoods(a, b, 4)
    assert "only 3 distinct sentences: k=3 is used" in caplog.text
    assert found.forward_scores.shape == (3, 3)
    assert as_dict(candidate_pairs(found)) == pytest.approx(
        naive_mine(a, b, 3, "ratio", "max"), abs=1e-5
    )


def test_selection_keeps_the_order_and_prefers_earlier_pairs() -> None:
    pairs = MinedPairs(np.array([1.0, 3.0, 2.0, 3.0, 2.0]), np.arange(5), np.arange(5))
    assert select(pairs).source.tolist() == [0, 1, 2, 3, 4]
    assert select(pairs, threshold=2.0).source.tolist() == [1, 2, 3, 4]
    assert select(pairs, top_n=3).source.tolist() == [1, 2, 3]
    assert select(pairs, threshold=2.5, top_n=9).source.tolist() == [1, 3]
    assert len(select(pairs, threshold=4.0)) == 0


def test_repeated_and_empty_lines_are_counted_and_found_again() -> None:
    lines = ["", "b", "a", "b ", "\t ", "b", "é\u2028ü\x85", "b"]
    text = DistinctSentences(iter(lines))
    assert list(text) == ["b", "a", "b ", "é\u2028ü\x85"]
    assert [lines[line - 1] for line in text.first_line] == list(text)
    assert text.rows.tolist() == [-1, 0, 1, 2, -1, 0, 3, 0]
    assert text.counts() == {"file": "text", "lines": 8, "empty": 2, "repeated": 2, "distinct": 4}
    assert all(text[row] == line for row, line in zip(text.rows, lines) if row >= 0)


def test_texts_and_pairs_larger_than_memory_are_those_of_one_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    lines = [" " * int(n) if n < 3 else f"{n} ü" for n in generator.integers(0, 60, 96)]
    source, target = vectors(60, 50)
    neighbours = neighbourhoods(source.round(1), target.round(1), 3)  # rounded: with equal scores

    def outcome() -> list:
        with temporary_folder(tmp_path):
            text = DistinctSentences(iter(lines))
            mined = [candidate_pairs(neighbours, retrieval=retrieval) for retrieval in RETRIEVALS]
            kept = [select(pairs, 0.9, 20) for pairs in mined]
        numbers = []
        for pairs in mined + kept:
            numbers += [pairs.scores.tolist(), pairs.source.tolist(), pairs.target.tolist()]
        return [
            list(text),
            text.rows.tolist(),
            text.first_line.tolist(),
            text.counts(),
            text.digest(),
            numbers,
        ]

    whole = outcome()
    first = {line: lines.index(line) + 1 for line in lines if line.strip()}
    assert whole[2] == list(first.values())
    assert whole[0] == list(first)
    for rows in (7, 32):  # 96 lines are a multiple of 32
        monkeypatch.setattr(disk_arrays, "BLOCK_ROWS", rows)
        monkeypatch.setattr(disk_arrays, "MERGE_ROWS", 30)
        assert outcome() == whole
    assert not list(tmp_path.iterdir())


def test_memory_does_not_grow_with_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_arrays, "BLOCK_ROWS", 2048)
    monkeypatch.setattr(disk_arrays, "MERGE_ROWS", 2048)

    def peak(count: int) -> int:
        tracemalloc.start()
        for name in "ab":
            text = DistinctSentences(f"{name} {row}" for row in range(count))
            assert len(text) == count
        sizes = [block.stop - block.start for block in row_blocks(count)]
        scores = concatenate_on_disk(np.full((size, 2), 0.5, np.float32) for size in sizes)
        random = np.random.default_rng(0)
        rows = concatenate_on_disk(random.integers(0, count, (size, 2)) for size in sizes)
        pairs = select(candidate_pairs(Neighbours(scores, rows, scores, rows)), 0.5, count // 2)
        assert 0 < len(pairs) <= count // 2
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(600)
    assert peak(20_000) < 1.2 * peak(5_000)


@pytest.mark.parametrize("lines", [[], ["", "  "]])
def test_a_text_without_sentences(lines: list[str]) -> None:
    text = DistinctSentences(lines)
    assert list(text) == []
    assert (len(text.rows), text.empty, text.repeated) == (len(lines), len(lines), 0)
