"""The leak check finds what comparing every text with every evaluation sentence finds."""

import lzma
import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from dap.data import normalise
from dap.deduplication import normalise_all
from dap.evaluation_sets import read_evaluation
from dap.leaks import GRAM, WIDE_GRAM, LeakIndex

LATIN = "the train leaves station at eight old birds sing over harbour Straße où élève mañana".split()  # noqa: SIM905
WORDS = {
    "latin": LATIN,
    "cyrillic": "поезд отходит от станции в восемь часов старые птицы поют над гаванью".split(),  # noqa: SIM905
    "chinese": list("火车八点钟从站出发老鸟在港口上空歌唱，。"),
    "hindi": "रेलगाड़ी सुबह आठ बजे स्टेशन से चलती है पुराने पक्षी गाते हैं".split(),  # noqa: SIM905
}


def sentences(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        words = WORDS[rng.choice(list(WORDS))]
        made.append(("" if len(words[0]) == 1 else " ").join(rng.choices(words, k=rng.randint(1, 14))))
    return [*made, "", "!?", "ha" * 30, "short"]


def altered(texts: list[str], seed: int) -> list[str]:
    """Near copies: a few characters replaced, taken out or put in."""
    rng = random.Random(seed)
    changed = []
    for text in texts:
        letters = list(text)
        for _ in range(rng.randint(0, 3)):
            if letters:
                place = rng.randrange(len(letters))
                letters[place : place + rng.randint(0, 2)] = rng.choice(["", "x", "站", "ой", "A b"])
        changed.append("".join(letters))
    return changed


@cache
def grams(text: str) -> tuple[int, Counter]:
    text = normalise(text)
    wide = 2 * sum(character >= "\u2e80" for character in text) > len(text)
    n = WIDE_GRAM if wide else GRAM
    return n, Counter(text[place : place + n] for place in range(len(text) - n + 1))


def compare(first: str, second: str) -> float:
    (n, one), (m, other) = grams(first), grams(second)
    if one == other and normalise(first) == normalise(second):
        return 1.0
    most = max(one.total(), other.total())
    return (one & other).total() / most if n == m and most else 0.0


@pytest.mark.parametrize("threshold", [None, 0.3, 0.7, 1.0])
def test_equals_comparing_all_with_all(threshold: float | None) -> None:
    evaluation = sentences(150, 0)
    texts = sentences(150, 1) + altered(evaluation, 2)
    index = LeakIndex(evaluation, threshold)
    found = index(normalise_all(texts))
    expected = {}
    for row, text in enumerate(texts):
        best = max(compare(text, sentence) for sentence in evaluation)
        if best == 1.0 and normalise(text) in map(normalise, evaluation) or threshold and best >= threshold - 1e-9:
            expected[row] = best
    assert found.rows.tolist() == list(expected)
    assert found.containment.tolist() == pytest.approx(list(expected.values()))
    for row, sentence, share, equal in zip(found.rows, found.sentences, found.containment, found.equal):
        assert compare(texts[row], evaluation[sentence]) == pytest.approx(share)
        assert equal == (normalise(texts[row]) == normalise(evaluation[sentence]))
    assert found.equal.sum() >= 20
    assert threshold in (None, 1.0) or (~found.equal).sum() >= 20


def test_equal_and_near_texts_of_each_kind() -> None:
    index = LeakIndex(["Look both ways before you cross the road.", "他们在火车站等了八个小时才上车。", "Why?"])
    texts = [
        "LOOK both ways; before you cross the road",
        "Look both ways before you cross a road",
        "Look both ways",
        "他们在火车站等了八个小时才下车",
        "火车",
        "why",
        "Why not?",
    ]
    found = index(normalise_all(texts))
    assert found.rows.tolist() == [0, 1, 3, 5]
    assert found.equal.tolist() == [True, False, False, True]
    assert found.sentences.tolist() == [0, 0, 1, 2]
    assert index(normalise_all([])).rows.tolist() == []


def test_a_saved_index_finds_the_same(tmp_path: Path) -> None:
    evaluation = sentences(80, 0)
    index = LeakIndex(evaluation)
    index.save(tmp_path)
    texts = normalise_all(altered(evaluation, 3))
    loaded = LeakIndex.load(tmp_path)
    assert loaded.sentences == evaluation
    assert loaded(texts).rows.tolist() == index(texts).rows.tolist()
    assert len(index(texts).rows) > 20


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1.1])
def test_a_wrong_threshold_is_named(threshold: float) -> None:
    with pytest.raises(ValueError, match=f"not {threshold}"):
        LeakIndex(["a"], threshold)


def test_evaluation_sets_are_read_from_pairs_and_plain_text(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    (tmp_path / "sets/de-en.tsv").write_text("eins\tone\nzwei\ttwo\n")
    (tmp_path / "sets/zh-en.dev.zh").write_text("zh-1\t三\nzh-2\t四\n")
    (tmp_path / "sets/zh-en.dev.en").write_text("en-1\tthree\n")  # fewer, as in BUCC
    (tmp_path / "sets/xnli.xz").write_bytes(lzma.compress(b"premise\thypothesis\n\none\n"))
    (tmp_path / "plain.txt").write_text("five\n \n")
    expected = {"eins", "zwei", "one", "two", "zh-1", "zh-2", "en-1", "三", "四", "three", "premise", "hypothesis"}
    assert set(read_evaluation([tmp_path / "sets"])) == expected
    found = read_evaluation([tmp_path / "plain.txt", str(tmp_path / "sets/de-en.tsv")])
    assert sorted(found) == ["eins", "five", "one", "two", "zwei"]
    with pytest.raises(FileNotFoundError, match="absent"):
        read_evaluation([tmp_path / "absent"])
