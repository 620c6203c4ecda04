"""Word links against a reference: error rate, precision and recall."""

from pathlib import Path

import numpy as np
import pytest
from written import write

from dap_transformers.alignment.pharaoh import GoldLinks
from dap_transformers.errors import UserError
from dap_transformers.evaluation.word_links import alignment_quality, read_reference

NONE = np.empty((0, 2), np.int64)


def test_quality_is_that_of_tables_of_all_words() -> None:
    tables = np.random.default_rng(0).random((3, 3, 4, 4)) < 0.3
    tables[:, 1] = False  # a sentence without links
    found, sure, possible = tables  # three sentences of four words each
    links = list(map(np.argwhere, found))
    gold = [GoldLinks(*map(np.argwhere, both)) for both in zip(sure, possible)]
    right = (found & sure).sum()
    correct = (found & (sure | possible)).sum()
    error = 1 - (right + correct) / (found.sum() + sure.sum())
    expected = [error, correct / found.sum(), right / sure.sum()]
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
