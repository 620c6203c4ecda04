"""Word links against a reference: error rate, precision and recall."""

from pathlib import Path

import numpy as np
import pytest
from conftest import synthetic_pairs
from written import write

from dap_transformers.alignment.align import align_words
from dap_transformers.alignment.pharaoh import GoldLinks
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.evaluation.word_links import WordLinks, alignment_quality, read_reference

NONE = np.empty((0, 2), np.int64)


def test_quality_equals_a_plain_loop() -> None:
    rng = np.random.default_rng(0)

    def random_links() -> list[np.ndarray]:
        return [np.unique(rng.integers(0, 4, size=(size, 2)), axis=0) for size in (5, 0, 7)]

    links = random_links()
    gold = [GoldLinks(*both) for both in zip(random_links(), random_links(), strict=True)]
    right = correct = found = certain = 0
    for one, reference in zip(links, gold, strict=True):
        sure = reference.sure.tolist()
        found += len(one)
        certain += len(sure)
        for link in one.tolist():
            right += link in sure
            correct += link in sure or link in reference.possible.tolist()
    quality = alignment_quality(links, gold)
    assert quality["precision"] == pytest.approx(100 * correct / found, abs=1e-4)
    assert quality["recall"] == pytest.approx(100 * right / certain, abs=1e-4)
    error = 1 - (right + correct) / (found + certain)
    assert quality["aer"] == pytest.approx(100 * error, abs=1e-4)
    assert 0 < quality["recall"] < quality["precision"] < 100


def test_quality_of_one_kind_of_link_is_one_minus_f1() -> None:
    gold = [GoldLinks(np.array([[0, 0], [1, 1], [2, 0]]), NONE)]
    quality = alignment_quality([np.array([[0, 0], [1, 0]])], gold)
    f1 = 2 * quality["precision"] * quality["recall"] / (quality["precision"] + quality["recall"])
    assert quality["aer"] == pytest.approx(100 - f1, abs=1e-3)
    assert alignment_quality([gold[0].sure], gold)["aer"] == 0
    assert alignment_quality([NONE], gold) == {"aer": 100, "precision": 0, "recall": 0}


def test_the_evaluator_judges_the_links_of_align_words(tiny_bert_dir: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    pairs = synthetic_pairs("de", 7)
    aligned = align_words(encoder, *zip(*pairs, strict=True))
    gold = [GoldLinks(each.links, NONE) for each in aligned]
    assert WordLinks(pairs, gold)(encoder) == {"aer": 0, "precision": 100, "recall": 100}
    assert WordLinks(pairs, gold, method="itermax")(encoder)["recall"] == 100
    gold[2] = GoldLinks(gold[2].sure + [[0, 9]], NONE)
    with pytest.raises(UserError, match="line 3 of the reference"):
        WordLinks(pairs, gold)(encoder)


def test_a_reference_that_does_not_fit_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gold = write(tmp_path / "gold", "1-1\n2-1 1p2\n")
    assert read_reference(gold, 2, first=1)[1].possible.tolist() == [[0, 1]]
    assert not caplog.text
    read_reference(gold, 2)
    assert "has no word 0" in caplog.text
    for text, says in (("0-0\n", "1 lines"), ("0p0\n" * 2, "no sure link")):
        with pytest.raises(UserError, match=says):
            read_reference(write(tmp_path / "gold", text), 2)
