"""BUCC's files, the best threshold against all thresholds, and repeated sentences."""

from pathlib import Path

import numpy as np
import pytest
from table_encoder import TableEncoder
from written import lines_of, write

from dap_transformers.evaluation.bucc import Bucc, Split, best_threshold, count_gold, score_at
from dap_transformers.mining.margin import PAIR
from dap_transformers.mining.texts import DistinctSentences


def write_split(folder: Path, name: str = "training", **sides: str) -> Path:
    """Write a split of four sentences per side, with two gold pairs.

    Args:
        sides: replace the text of a file, by language or "gold".
    """
    files = {
        "fr": lines_of(f"fr-{i}\tphrase {i}" for i in range(4)),
        "en": lines_of(f"en-{i}\tsentence {i}" for i in range(4)),
        "gold": "fr-1\ten-2\nfr-3\ten-0\n",
    }
    for side, text in (files | sides).items():
        write(folder / f"fr-en.{name}.{side}", text)
    return folder


def test_a_split_is_read_from_its_three_files(tmp_path: Path) -> None:
    write_split(tmp_path, fr="fr-1\ta\tb\nfr-3\t\n")
    (split,) = Bucc([tmp_path / "fr-en"]).texts["fr-en"]
    assert list(split.source) == ["a\tb"]  # a tab is text
    assert list(split.target) == [f"sentence {i}" for i in range(4)]
    assert split.gold.tolist() == [[0, 2], [1, 0]]  # an empty sentence keeps its id


def test_the_protocol_follows_the_splits_that_have_gold_pairs(tmp_path: Path) -> None:
    pair = [tmp_path / "fr-en"]
    write_split(pair[0], "dev")  # as the released scripts rename the sample
    assert Bucc(pair).protocol == "sample"
    for name in ("training", "test"):
        write_split(tmp_path, name)
        assert Bucc(pair).protocol == "training-optimal"
        assert len(Bucc(pair, "sample-threshold-on-training").texts["fr-en"]) == 2
        (tmp_path / f"fr-en.{name}.gold").unlink()  # as of BUCC's own test split
        assert Bucc(pair).protocol == "sample"
    with pytest.raises(FileNotFoundError, match=r"fr-en\.training\.gold"):
        Bucc(pair, "training-optimal")
    write_split(tmp_path)
    (tmp_path / "fr-en.training.fr").rename(tmp_path / "fr-en.training.fr.gz")
    with pytest.raises(FileNotFoundError, match=r"fr-en\.training\.gold with its two texts"):
        Bucc(pair)


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"gold": "fr-1\ten-2\nfr-9\ten-1\n"}, r"fr-en\.training\.gold, line 2: .*fr-9"),
        ({"gold": "fr-1 en-2\n"}, "gold, line 1"),
        ({"fr": "fr-1\ta\nfr-3\tb\nfr-1\tc\n"}, r"training\.fr, line 3: the id fr-1"),
        ({"en": "en-2\ta\nen-0 b\n"}, r"training\.en, line 2: id and sentence"),
        ({"gold": ""}, r"training\.gold is empty"),
        ({"fr": "fr-1\t\nfr-3\t\n"}, r"training\.fr: none of its lines"),
    ],
)
def test_faults_in_the_files_are_named_by_line(files: dict, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        Bucc([write_split(tmp_path, **files) / "fr-en"])


@pytest.mark.parametrize(
    ("scores", "correct", "threshold"),
    [
        ([3.0, 2.0, 1.0], [1, 1, 1], 1.0),  # all of them: there is no next score
        ([3.0, 2.0], [0, 0], 2.5),  # none is right
        ([2.0, 2.0, 1.0, 1.0], [1, 0, 0, 0], 1.5),  # equal scores stay together
        ([1.0 + 2**-52, 1.0], [1, 0], 1.0 + 2**-52),  # no number lies between
    ],
)
def test_thresholds_at_the_ends_and_between_equal_scores(
    scores: list, correct: list, threshold: float
) -> None:
    one = np.ones(len(scores), int)
    gold = max(1, sum(correct))
    assert best_threshold(np.array(scores), one, np.array(correct), gold) == threshold


def test_the_threshold_is_the_best_of_all_thresholds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        count = rng.integers(1, 13)
        scores = rng.choice([0.5, 1.0, 1.25, 1.5, 2.0, rng.random()], count)
        extracted = rng.choice([1, 1, 2, 4], count)
        correct = rng.integers(0, np.minimum(2, extracted) + 1)
        gold = int(max(1, correct.sum() + rng.integers(4)))
        f1 = []
        for threshold in scores:
            kept = scores >= threshold
            f1.append(200 * correct[kept].sum() / (extracted[kept].sum() + gold))
        counts = (scores, extracted, correct, gold)
        assert score_at(best_threshold(*counts), *counts)["f1"] == pytest.approx(max(f1), abs=1e-4)
        assert score_at(9.0, *counts)["precision"] == 0


def test_every_copy_of_a_repeated_sentence_can_be_found() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        source = DistinctSentences([*map(str, rng.integers(0, 8, 14)), ""])
        target = DistinctSentences(map(str, rng.integers(0, 8, 15)))
        is_gold = rng.random((15, 15)) < 0.05
        rows = np.unique(rng.integers(0, min(len(source), len(target)), (2, 6)), axis=1)
        mined = np.empty(rows.shape[1], PAIR)
        mined["source"], mined["target"] = rows
        extracted, correct = count_gold(mined, Split(source, target, np.argwhere(is_gold)))
        for number, (i, j) in enumerate(rows.T):
            copies = is_gold[np.ix_(source.rows == i, target.rows == j)]
            assert (extracted[number], correct[number]) == (copies.size, copies.sum())


def test_a_split_is_mined_and_scored_at_the_threshold_of_the_first(tmp_path: Path) -> None:
    gold = lines_of(f"fr-{i}\ten-{i}" for i in range(3))
    write_split(tmp_path, gold=gold)
    bucc = Bucc([tmp_path / "fr-en"])
    encoder = TableEncoder(np.eye(4))
    numbers = bucc(encoder)
    of_pair = numbers["pairs"]["fr-en"]
    found = [of_pair[name] for name in ("extracted", "correct", "precision", "recall", "f1")]
    assert found == [4, 3, 75, 100, pytest.approx(600 / 7, abs=1e-4)]
    assert bucc.logged(numbers)["fr-en_f1"] == of_pair["f1"]
    assert "85.7" in bucc.table(numbers)
    on_card = {each.name: each.value for each in bucc.metrics(numbers)}
    assert (on_card["recall"], on_card["true pairs"]) == (100, 3)

    write_split(tmp_path, "sample")
    both = Bucc([tmp_path / "fr-en"], "sample-threshold-on-training")(encoder)
    first = both["threshold_split"]["fr-en"]
    assert (first["correct"], first["gold"]) == (0, 2)
    assert both["pairs"]["fr-en"]["threshold"] == first["threshold"]
