"""The leak check finds what comparing every text with every evaluation sentence finds."""

import json
import random
import unicodedata
from collections import Counter
from functools import cache
from pathlib import Path

import polars as pl
import pytest
from written import write, zip_of

from dap_transformers.errors import UserError
from dap_transformers.prepare.evaluation_sets import read_evaluation
from dap_transformers.prepare.filters import repair
from dap_transformers.prepare.leaks import BANDS, LeakIndex, measured
from dap_transformers.text_keys import normalise

WORDS = {
    "latin": "the train leaves station at eight old birds sing over harbour Straße où élève mañana",
    "cyrillic": "поезд отходит от станции в восемь часов старые птицы поют над гаванью",
    "chinese": "火 车 八 点 钟 从 站 出 发 老 鸟 在 港 口 上 空 歌 唱 ， 。",
    "hindi": "रेलगाड़ी सुबह आठ बजे स्टेशन से चलती है पुराने पक्षी गाते हैं",
}


def sentences(count: int, seed: int) -> list[str]:
    """Make random sentences in several scripts, and a few odd ones."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        script = rng.choice(list(WORDS))
        words = rng.choices(WORDS[script].split(), k=rng.randint(1, 14))
        made.append(("" if script == "chinese" else " ").join(words))
    return [*made, "", "!?", "ha" * 30, "short"]


def altered(texts: list[str], seed: int) -> list[str]:
    """Make near copies: replace, remove or insert a few characters."""
    rng = random.Random(seed)
    changed = []
    for text in texts:
        letters = list(text)
        for _ in range(rng.randint(0, 3)):
            if letters:
                place = rng.randrange(len(letters))
                new = rng.choice(["", "x", "站", "ой", "A b"])
                letters[place : place + rng.randint(0, 2)] = new
        changed.append("".join(letters))
    return changed


@cache
def grams(text: str, n: int) -> Counter:
    return Counter(text[place : place + n] for place in range(len(text) - n + 1))


@cache
def wide(text: str) -> bool:
    return 2 * sum(character >= "\u2e80" for character in text) > len(text)


normalised = cache(normalise)


@cache
def compare(text: str, sentence: str) -> float:
    """Compute the containment of two texts with a plain loop."""
    text, sentence = normalised(text), normalised(sentence)
    if text == sentence:
        return 1.0
    if wide(text) != wide(sentence):
        return 0.0
    for band in BANDS:
        if band.is_wide == wide(sentence) and len(sentence) <= band.longest:
            one, other = grams(text, band.n), grams(sentence, band.n)
            most = max(one.total(), other.total())
            return (one & other).total() / most if most else 0.0
    raise AssertionError("no band")


def find(index: LeakIndex, texts: list[str]) -> pl.DataFrame:
    return index(measured(pl.Series("source", texts)))


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.7, 1.0])
def test_the_index_finds_what_comparing_all_with_all_finds(threshold: float) -> None:
    evaluation = sentences(150, 0)
    texts = sentences(150, 1) + altered(evaluation, 2)
    found = find(LeakIndex(evaluation, threshold), texts)

    expected = {}
    held = set(map(normalise, evaluation))
    for row, text in enumerate(texts):
        best = max(compare(text, sentence) for sentence in evaluation)
        if normalise(text) in held or (threshold and best >= threshold - 1e-9):
            expected[row] = best
    assert found["row"].to_list() == list(expected)
    assert found["containment"].to_list() == pytest.approx(list(expected.values()))
    for row in found.iter_rows(named=True):
        assert compare(row["text"], row["evaluation"]) == pytest.approx(row["containment"])
        assert row["equal"] == (normalise(row["text"]) == normalise(row["evaluation"]))
    assert found["equal"].sum() >= 20
    if threshold in (0.3, 0.7):
        assert (~found["equal"]).sum() >= 20


@pytest.mark.parametrize(
    ("sentence", "text", "is_found"),
    [
        ("Look both ways before you cross the road.", "Look both ways", False),
        ("Why?", "Why not?", False),
        ("He bought a red bicycle yesterday.", "He bought a new bicycle yesterday.", True),
        ("Сегодня я не хочу идти домой.", "Сегодня я не хочу идти назад.", True),
        ("他昨天买了一辆红色的自行车。", "他昨天买了一辆新的自行车。", True),
    ],
)
def test_a_replaced_word_in_a_short_sentence_is_near(
    sentence: str, text: str, is_found: bool
) -> None:
    assert find(LeakIndex([sentence]), [text]).height == is_found


def test_evaluation_sets_are_read_in_every_form(tmp_path: Path) -> None:
    sets = tmp_path / "sets"
    write(sets / "de-en.tsv", "eins\tone\n\u200b\ttwo\n")
    write(sets / "zh-en.dev.zh", "zh-1\t三\nzh-2\t四\n")
    write(sets / "zh-en.dev.en", "en-1\tthree\n")  # fewer, as in BUCC
    write(sets / "xnli.xz", "premise\thypothesis\n\none\n")
    record = {"id": 1, "sentence": "five\tsix", "translations": {"de": ["fünf", None]}}
    write(sets / "flores.jsonl", json.dumps(record) + "\n\n")
    zip_of(
        sets / "a.zip", {"train.de-en.tsv": "sieben\tseven\n", "test/de-en.tsv": "acht\teight\n"}
    )
    texts = (
        "eins one two zh-1 zh-2 en-1 三 四 three premise hypothesis fünf sieben seven acht eight"
    )
    expected = {*texts.split(), "five six"}
    assert sorted(read_evaluation([sets])) == sorted(expected)
    assert set(read_evaluation([sets / "xnli.xz", str(sets / "de-en.tsv")])) < expected
    with pytest.raises(FileNotFoundError, match="absent"):
        read_evaluation([tmp_path / "absent"])
    bucc = write(tmp_path / "bucc" / "fr-en" / "fr-en.dev.fr", "fr-1\tneuf\n").parents[1]
    for path in (write(tmp_path / "a.txt", "\n"), bucc):
        with pytest.raises(UserError, match=f"{path.name}: no evaluation sentence"):
            read_evaluation([sets, path])
    csv = write(tmp_path / "a.csv", "fr,de,en\nun,eins,\ndeux,,two\n")
    assert read_evaluation([csv], "de") == ["un", "eins"]


@pytest.mark.parametrize(
    "text", ["সে আজ সারা\u09dfই বাড়ি যাবে না।", "Die Bäume blühen schöner über dem Fluß."]
)
def test_evaluation_sentences_are_repaired_as_training_text_is(text: str, tmp_path: Path) -> None:
    trained = repair(pl.Series([text])).to_list()
    for form in (text, unicodedata.normalize("NFD", text)):
        assert read_evaluation([write(tmp_path / "a.txt", f"{form}\n\ufeff\n")]) == trained


@pytest.mark.parametrize(
    "name", ["test.csv", "test.parquet", "test.json.gz", "test.jsonl", "a.SGM"]
)
def test_a_file_that_is_neither_lines_nor_pairs_is_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_text("{")
    with pytest.raises(UserError, match=name):
        read_evaluation([path])
