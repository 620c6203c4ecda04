"""The share of the nearest sentences that a training keeps."""

import numpy as np
import pytest
from naive import cosines
from table_encoder import TableEncoder

from dap_transformers.evaluation.kept_neighbours import KeptNeighbours


def test_the_share_is_that_of_a_naive_loop() -> None:
    random = np.random.default_rng(0)
    before = random.normal(size=(60, 8)).astype(np.float32)
    after = before + random.normal(size=(60, 8)).astype(np.float32)
    pairs = {"de": [(str(row), str(row + 30)) for row in range(30)], "sw": [("0", "33")] * 30}

    evaluator = KeptNeighbours(pairs, TableEncoder(before))
    assert evaluator(TableEncoder(before)) == {"kept_neighbours": 100}
    nearest = []
    for vectors in (before, after):
        table = cosines(vectors[30:], vectors[30:])
        np.fill_diagonal(table, -2)  # without itself
        nearest.append(np.argsort(-table)[:, :10])
    expected = 10 * np.mean([len(set(one) & set(other)) for one, other in zip(*nearest)])
    assert expected < 90
    assert evaluator(TableEncoder(after))["kept_neighbours"] == pytest.approx(expected)


def test_few_targets_tell_nothing() -> None:
    few = KeptNeighbours({"de": [("0", "1")] * 30}, TableEncoder(np.eye(2)))
    assert few(TableEncoder(np.eye(2))) == {}
