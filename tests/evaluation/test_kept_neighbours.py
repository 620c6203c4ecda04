"""The share of the nearest sentences that a training keeps."""

import numpy as np
import pytest
from naive import cosines

from dap_transformers.evaluation.kept_neighbours import KeptNeighbours


class Table:
    """An encoder of sentences that are numbers: their rows of a matrix."""

    def __init__(self, vectors: np.ndarray) -> None:
        self.vectors = vectors

    def encode(self, sentences: list[str]) -> np.ndarray:
        return self.vectors[[int(each) for each in sentences]]


def test_the_share_is_that_of_a_naive_loop() -> None:
    random = np.random.default_rng(0)
    before = random.normal(size=(60, 8)).astype(np.float32)
    after = before + random.normal(size=(60, 8)).astype(np.float32)
    pairs = {"de": [(str(row), str(row + 30)) for row in range(30)], "sw": [("0", "33")] * 30}

    evaluator = KeptNeighbours(pairs, Table(before))
    assert evaluator(Table(before)) == {"kept_neighbours": 100}
    nearest = []
    for vectors in (before, after):
        table = cosines(vectors[30:], vectors[30:])
        np.fill_diagonal(table, -2)  # without itself
        nearest.append(np.argsort(-table)[:, :10])
    expected = 10 * np.mean([len(set(one) & set(other)) for one, other in zip(*nearest)])
    assert expected < 90
    assert evaluator(Table(after))["kept_neighbours"] == pytest.approx(expected)


def test_few_targets_tell_nothing() -> None:
    few = KeptNeighbours({"de": [("0", "1")] * 30}, Table(np.eye(2)))
    assert few(Table(np.eye(2))) == {}
