"""Word links against a reference: error rate, precision and recall."""

from pathlib import Path

import numpy as np
import pytest
from written import write

from dap_transformers.alignment.pharaoh import GoldLinks
from dap_transformers.errors import UserError
from dap_transformers.evaluation.word_links import alignment_quality, read_reference

NONE = np.empty((0, 2), np.int64)


def random_links(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [np.unique(rng.integers(0, 4, size=(size, 2)), axis=0) for size in (5, 0, 7)]


def test_quality_equals_a_plain_loop() -> None:
    links, sure, possible = (random_links(seed) for seed in range(3))
    gold = [GoldLinks(*both) for both in zip(sure, possible)]
    right = correct = 0
    for found, reference in zip(links, gold, strict=True):
        for link in found.tolist():
            right += link in reference.sure.tolist()
            correct += link in [*reference.sure.tolist(), *reference.possible.tolist()]
    found, certain = (sum(map(len, each)) for each in (links, sure))
    expected = [1 - (right + correct) / (found + certain), correct / found, right / certain]
    quality = alignment_quality(links, gold)
    assert list(quality.values()) == pytest.approx(100 * np.array(expected), abs=1e-4)
    assert 0 < quality["recall"] < quality["precision"] < 100


def test_quality_of_no_links() -> None:
    gold = [GoldLinks(np.array([[0, 0], [1, 1], [2, 0]]), NONE)]
    assert alignment_quality([NONE], gold) == {"aer": 100, "precision": 0, "recall": 0}


def test_a_reference_that_does_not_fit_is_named(tmp_path: Path) -> None:
    gold = write(tmp_path / "gold", "1-1\n2-1 1p2\n")
    assert read_reference(gold, 2, first=1)[1].possible.tolist() == [[0, 1]]
    for text, says in (("0-0\n", "1 lines"), ("0p0\n" * 2, "no sure link")):
        with pytest.raises(UserError, match=says):
            read_reference(write(tmp_path / "gold", text), 2)
