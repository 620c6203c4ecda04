"""BUCC's files, the best threshold against all thresholds, and repeated sentences."""

import random
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import written
from conftest import REPOSITORY

from dap_transformers.evaluation.bucc import (
    best_threshold,
    count_gold,
    default_protocol,
    find_splits,
    read_gold,
    read_text,
    score_at,
)
from dap_transformers.mining.distinct import DistinctSentences
from dap_transformers.mining.margin import MinedPairs

SHARED = REPOSITORY.parent / "shared" / "data" / "bucc"


def write_split(folder: Path, name: str = "training", pair: str = "fr-en", **sides: str) -> Path:
    """Write a split of four sentences per side, with two gold pairs.

    Args:
        sides: replace the text of a file, by language or "gold".
    """
    first, second = pair.split("-")
    files = {
        first: "".join(f"{first}-{i}\tphrase {i}\n" for i in range(4)),
        second: "".join(f"{second}-{i}\tsentence {i}\n" for i in range(4)),
        "gold": f"{first}-1\t{second}-2\n{first}-3\t{second}-0\n",
    }
    folder.mkdir(exist_ok=True, parents=True)
    for side, text in (files | sides).items():
        (folder / f"{pair}.{name}.{side}").write_text(text, encoding="utf-8")
    return folder


def read(
    folder: Path, protocol: str = "training-optimal", pair: str = "fr-en"
) -> tuple[list[str], list[str], list]:
    split = find_splits(folder, pair, protocol)[-1]
    source_ids: dict[str, int] = {}
    target_ids: dict[str, int] = {}
    source = list(read_text(split.source, source_ids))
    target = list(read_text(split.target, target_ids))
    return source, target, read_gold(split, source_ids, target_ids).tolist()


def test_a_split_is_read_from_its_three_files(tmp_path: Path) -> None:
    source, target, gold = read(write_split(tmp_path, fr="fr-1\ta\tb\nfr-3\t\n"))
    assert source == ["a\tb", ""]  # a tab is text, and an empty sentence keeps its id
    assert target == [f"sentence {i}" for i in range(4)]
    assert gold == [[0, 2], [1, 0]]


def test_files_are_found_in_the_pairs_own_folder_and_compressed(tmp_path: Path) -> None:
    plain = write_split(tmp_path / "fr-en", "dev") / "fr-en.dev.en"
    written.write(plain.with_name("fr-en.dev.en.gz"), plain.read_bytes())
    plain.unlink()
    write_split(tmp_path / "fr-en", "training", "de-en")
    assert len(read(tmp_path, "sample")[1]) == 4


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"gold": "fr-1\ten-2\nfr-9\ten-1\n"},
            r"fr-en\.training\.gold, line 2: fr-9 is no id of .*training\.fr",
        ),
        (
            {"gold": "fr-1\ten-2\nfr-3\ten-9\n"},
            r"gold, line 2: en-9 is no id of .*\.en, nor of the other side",
        ),
        ({"gold": "en-2\tfr-1\n"}, "line 1: en-2 is no id of .*: are the languages swapped"),
        ({"gold": "fr-1 en-2\n"}, "gold, line 1: 'fr-1 en-2' is not two ids"),
        ({"gold": "fr-1\ten-2\nfr-3\ten-0\nfr-1\ten-2\n"}, "gold, line 3: .* is already on line 1"),
        ({"gold": ""}, r"training\.gold is empty"),
        (
            {"fr": "fr-1\ta\nfr-3\tb\nfr-1\tc\n"},
            r"training\.fr, line 3: the id fr-1 is already on line 1",
        ),
        (
            {"en": "en-2\ta\nen-0 b\n"},
            r"training\.en, line 2: 'en-0 b' is not an id, a tab and a sentence",
        ),
        ({"en": "en-2\ta\n\tb\n"}, r"training\.en, line 2"),
    ],
)
def test_faults_in_the_files_are_named_by_line(
    files: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        read(write_split(tmp_path, **files))


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_split(tmp_path)
    for pair, protocol, message in (
        ("fr-en", "training-threshold-on-test", r"has no fr-en\.test\.fr"),
        (
            "fr-en",
            "training-optimal",
            r"has no fr-en\.training\.gold; it has fr-en\.training\.en fr-en\.training\.fr",
        ),
        ("de-en", "training-optimal", r"has no de-en\.training\.de, de-en\.training\.en"),
    ):
        with pytest.raises(FileNotFoundError, match=message):
            find_splits(tmp_path, pair, protocol)
        (tmp_path / "fr-en.training.gold").unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match="it has no such files"):
        find_splits(tmp_path / "absent", "fr-en", "sample")


def test_the_sample_stands_in_for_no_training_split_but_not_for_half_of_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no fr-en\.training\.fr, .* no such files"):
        default_protocol(tmp_path, "fr-en")
    write_split(tmp_path, "dev")
    assert default_protocol(tmp_path, "fr-en") == "sample"
    write_split(tmp_path / "fr-en")
    assert default_protocol(tmp_path, "fr-en") == "training-optimal"
    (tmp_path / "fr-en" / "fr-en.training.gold").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no fr-en\.training\.gold; "):
        default_protocol(tmp_path, "fr-en")


@pytest.mark.parametrize(
    ("pair", "protocol", "message"), [("fren", "sample", "fren"), ("fr-en", "mteb", "mteb")]
)
def test_unknown_pairs_and_protocols(
    pair: str, protocol: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"'{message}'"):
        find_splits(tmp_path, pair, protocol)


def test_an_example_by_hand() -> None:
    # scores 5 and 4 are right, 3 is wrong, 2 is right, 1 is wrong, and one gold pair is not mined
    scores = np.array([2.0, 5.0, 3.0, 1.0, 4.0])
    correct = np.array([1, 1, 0, 0, 1])
    one = np.ones(5, int)
    threshold = best_threshold(scores, one, correct, gold=4)
    # F1 there is 2·3 / (4 + 4), above it 2·2 / (2 + 4), and below it 2·3 / (5 + 4)
    assert threshold == 1.5
    found = score_at(threshold, scores, one, correct, gold=4)
    assert (found.precision, found.recall, found.f1) == (75.0, 75.0, 75.0)
    assert (found.extracted, found.correct, found.gold) == (4, 3, 4)
    assert score_at(9.0, scores, one, correct, 4).f1 == 0.0


@pytest.mark.parametrize(
    ("scores", "correct", "threshold"),
    [
        ([3.0, 2.0, 1.0], [1, 1, 1], 1.0),  # all of them: there is no next score
        ([3.0, 2.0, 1.0], [1, 0, 0], 2.5),
        ([3.0], [1], 3.0),
        ([3.0, 2.0], [0, 0], 2.5),  # none is right
        ([2.0, 2.0, 1.0, 1.0], [1, 0, 0, 0], 1.5),  # equal scores stay together
        ([1.0 + 2**-52, 1.0], [1, 0], 1.0 + 2**-52),  # no number lies between
    ],
)
def test_thresholds_at_the_ends_and_between_equal_scores(
    scores: list[float], correct: list[int], threshold: float
) -> None:
    gold = max(1, sum(correct))
    assert (
        best_threshold(np.array(scores), np.ones(len(scores), int), np.array(correct), gold)
        == threshold
    )


def test_no_pairs_have_no_threshold() -> None:
    with pytest.raises(ValueError, match="no pairs were mined"):
        best_threshold(np.array([]), np.array([]), np.array([]), 3)


def test_the_threshold_is_the_best_of_all_thresholds() -> None:
    rng = random.Random(0)
    for _ in range(300):
        count = rng.randint(1, 12)
        scores = [rng.choice([0.5, 1.0, 1.25, 1.5, 2.0, rng.random()]) for _ in range(count)]
        extracted = [rng.choice([1, 1, 2, 4]) for _ in range(count)]
        correct = [rng.randint(0, min(2, n)) for n in extracted]
        gold = max(1, sum(correct) + rng.randint(0, 3))

        def f1(threshold: float) -> float:
            right = found = 0
            for score, count, gold_count in zip(scores, extracted, correct):  # noqa: B023
                if score >= threshold:
                    found += count
                    right += gold_count
            return 200 * right / (found + gold)  # noqa: B023

        arrays = np.array(scores), np.array(extracted), np.array(correct)
        threshold = best_threshold(*arrays, gold)
        assert score_at(threshold, *arrays, gold).f1 == pytest.approx(f1(threshold))
        assert f1(threshold) == pytest.approx(max(map(f1, [*scores, 3.0])))


def test_every_copy_of_a_repeated_sentence_can_be_found() -> None:
    source = DistinctSentences(["x", "y", "x", ""])
    target = DistinctSentences(["p", "p", "q"])
    mined = MinedPairs(np.array([2.0, 1.5]), np.array([0, 1]), np.array([0, 1]))  # x-p, y-q
    gold = np.array([[2, 1], [0, 0], [1, 2], [3, 2]])  # two copies of x-p, y-q, and an empty line
    extracted, correct = count_gold(mined, gold, source.rows, target.rows)
    assert extracted.tolist() == [4, 1]
    assert correct.tolist() == [2, 1]
    assert count_gold(mined, gold[:0], source.rows, target.rows)[1].tolist() == [0, 0]


def test_judging_agrees_with_sets_of_ids() -> None:
    random_state = np.random.default_rng(0)
    for _ in range(20):
        source = DistinctSentences(map(str, random_state.integers(0, 8, 15)))
        target = DistinctSentences(map(str, random_state.integers(0, 8, 15)))
        gold = np.unique(random_state.integers(0, 15, (9, 2)), axis=0)
        rows = np.unique(
            np.stack(
                [random_state.integers(0, len(source), 6), random_state.integers(0, len(target), 6)]
            ),
            axis=1,
        )
        mined = MinedPairs(np.arange(float(rows.shape[1])), *rows)
        extracted, correct = count_gold(mined, gold, source.rows, target.rows)
        for number, (i, j) in enumerate(rows.T):
            lines = np.flatnonzero(source.rows == i), np.flatnonzero(target.rows == j)
            ids = set(product(*lines))
            assert extracted[number] == len(ids)
            assert correct[number] == len(ids & set(map(tuple, gold)))


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared with BUCC's sample is absent")
def test_the_real_sample_is_read_whole() -> None:
    source, target, gold = read(SHARED, "sample", "zh-en")
    assert (len(source), len(target), len(gold)) == (8624, 13589, 257)
    texts = DistinctSentences(source), DistinctSentences(target)
    rows = np.array(
        [[texts[0].rows[i], texts[1].rows[j]] for i, j in gold]
    ).T  # mined without a fault
    scores = np.linspace(2, 1, len(gold))
    extracted, correct = count_gold(
        MinedPairs(scores, *rows), np.array(gold), texts[0].rows, texts[1].rows
    )
    best = score_at(
        best_threshold(scores, extracted, correct, 257), scores, extracted, correct, 257
    )
    assert (best.precision, best.recall, best.gold) == (100, 100, 257)
