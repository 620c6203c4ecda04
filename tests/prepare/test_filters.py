"""Every filter on hand-made pairs of several scripts, and all of them against a plain loop."""

import random
import unicodedata
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import polars as pl
import pytest
from conftest import tiny_tokenizer

from dap_transformers.languages import CHARACTERS_PER_WORD, SCRIPTS
from dap_transformers.prepare.filters import REASONS, clean, repair, words
from dap_transformers.prepare.options import PrepareOptions

#: Language -> a pair that passes all filters.
GOOD = {
    "de": ("Der Zug fährt um acht Uhr ab.", "The train leaves at eight o'clock."),
    "ar": ("يغادر القطار في الساعة الثامنة صباحا", "The train leaves at eight o'clock."),
    "zh": ("火车八点钟从车站出发。", "The train leaves the station at eight."),
    "th": ("รถไฟออกจากสถานีเวลาแปดโมงเช้า", "The train leaves the station at eight."),
    "hi": ("रेलगाड़ी सुबह आठ बजे चलती है।", "The train leaves at eight o'clock."),
    "ka": ("მატარებელი დილის რვა საათზე გადის.", "The train leaves at eight o'clock."),
    "ja": ("電車は朝の八時に駅を出ます。", "The train leaves the station at eight."),
}


def frame(*pairs: tuple[str, str]) -> pl.DataFrame:
    return pl.DataFrame(pairs, schema=["source", "target"], orient="row")


def lengths(source: int, target: int) -> tuple[str, str]:
    return " ".join(f"s{i}" for i in range(source)), " ".join(f"t{i}" for i in range(target))


QUOTED = ('Wir "sehen" uns OK Tom', "See you OK Tom")
#: (language, pair, options, why it is dropped)
LIMITS = [
    ("de", lengths(3, 4), {"min_tokens": 3}, None),
    ("de", lengths(32, 15), {}, None),
    ("de", lengths(33, 16), {}, "length_ratio"),
    ("de", lengths(20, 9), {"ratio_beyond": 10}, "length_ratio"),
    ("de", lengths(20, 9), {"ratio_beyond": 10, "max_ratio": 3.0}, None),
    ("de", lengths(65, 64), {}, None),
    ("de", lengths(40, 41), {"max_tokens": 39}, "long"),
    ("de", ("a a a a a a b", "a c d e f g"), {}, "shared"),  # one of two different tokens
    ("de", ("a b c d e f", "a b c x y z w"), {"max_shared": 0.6}, None),
    ("de", QUOTED, {"shared_beyond": 5}, None),
    ("ka", GOOD["ka"], {"url_pattern": r"\p{Georgian}"}, "url"),  # as polars writes it
    ("de", GOOD["ka"], {"min_script": 0.0}, None),
    ("xh", GOOD["ka"], {}, None),  # of unknown script
    ("yue", GOOD["zh"], {}, None),
    ("km", ("ខ្ញុំសូមអរគុណអ្នកណាស់", GOOD["de"][1]), {}, None),
]


@pytest.mark.parametrize(("language", "pair", "options", "reason"), LIMITS)
def test_the_limits_are_those_of_the_released_code(
    language: str, pair: tuple, options: dict, reason: str | None
) -> None:
    _, counts = clean(frame(pair), language, PrepareOptions(**options))
    assert [name for name in REASONS if counts[name]] == ([reason] if reason else [])


def test_text_is_repaired() -> None:
    texts = {
        "Cafe\u0301\tund\x00  Tee\u2028bitte ": "Café und Tee bitte",
        "क\u093c": "क\u093c",
        "\ufeffone": "one",
        "می\u200cخواهم": "می\u200cخواهم",
        "\u1112\u1161\u11ab": "한",
        "Å\u2126": "ÅΩ",
        "plain": "plain",
        "&quot;AT&amp;T&#39;s&#xA0;R&D&quot;": '"AT&T\'s R&D"',
        "&kde; &regexp; &amp;lt; a=1&copy=2": "&kde; &regexp; &lt; a=1&copy=2",
        "&#xD83D;&#xDE00; &#99999999; &#1;": "&#xD83D;&#xDE00; &#99999999; &#1;",
    }
    assert repair(pl.Series(list(texts))).to_list() == list(texts.values())
    assert repair(pl.Series(['&quot;OK&quot; "']), strip_quotes=True).to_list() == ["OK"]


def test_other_columns_stay_and_quotes_go_if_wanted() -> None:
    pairs = frame(QUOTED, ("zu kurz", "too short"), QUOTED).with_columns(line=pl.Series([7, 8, 9]))
    options = PrepareOptions(shared_beyond=5, strip_quotes=True)
    kept = ("Wir sehen uns OK Tom", QUOTED[1])
    assert clean(pairs, "de", options)[0].rows() == [(*kept, 7), (*kept, 9)]


# Against a plain loop

SCRIPT_NAMES = {"CJK UNIFIED": "Han", "HIRAGANA": "Hiragana", "KATAKANA LETTER": "Katakana"}


def script_of(character: str) -> str:
    name = unicodedata.name(character)
    for start, script in SCRIPT_NAMES.items():
        if name.startswith(start):
            return script
    return name.split()[0].title()


def naive_words(text: str, language: str) -> tuple[list[str], int]:
    """Return the tokens of a text and the number of its words."""
    if CHARACTERS_PER_WORD.keys().isdisjoint(SCRIPTS[language]):
        tokens = text.split(" ")
        return tokens, len(tokens) if text else 0

    spaced = ""
    for character in text:
        if character in "。，、！":
            spaced += " "
        elif script_of(character) in CHARACTERS_PER_WORD:
            spaced += f" {character} "  # a token by itself
        else:
            spaced += character
    tokens = spaced.split()
    count = sum(1 / CHARACTERS_PER_WORD.get(script_of(token[0]), 1) for token in tokens)
    return tokens, ceil(count - 1e-9)


def naive_foreign(text: str, scripts: Sequence[str]) -> bool:
    letters = [character for character in text if unicodedata.category(character)[0] == "L"]
    native = sum(script_of(letter) in scripts for letter in letters)
    return bool(scripts) and (not letters or native / len(letters) < 0.3)


def naive_reason(language: str, source: str, target: str) -> str | None:
    source_words, source_count = naive_words(source, language)
    target_words, target_count = naive_words(target, "en")
    first, second = set(source_words), set(target_words)
    shortest, longest = sorted([source_count, target_count])
    fails = {
        "empty": not source or not target,
        "url": any(mark in side for mark in ("@", "http") for side in (source, target)),
        "short": shortest <= 3,
        "length_ratio": longest > 32 and longest / max(shortest, 1e-9) > 2,
        "long": shortest > 64,
        "identical": source == target,
        "shared": 0 < len(first & second) >= 0.5 * min(len(first), len(second)),
        "script": naive_foreign(source, SCRIPTS[language]) or naive_foreign(target, SCRIPTS["en"]),
    }
    return next((reason for reason, is_failed in fails.items() if is_failed), None)


TEXT = "the train leaves at 8 we saw old birds 12 http home@ Windows x"
ENGLISH = TEXT.split()
SOURCES = {code: unicodedata.normalize("NFC", source) for code, (source, _) in GOOD.items()}
PIECES = " ".join(SOURCES.values()).split()


def random_pairs(language: str, count: int) -> list[tuple[str, str]]:
    rng = random.Random(language)

    def text(words: list[str]) -> str:
        chosen = rng.choices(words, k=rng.choice([0, 2, 4, 8, 80]))
        chosen += rng.choices(ENGLISH + PIECES, k=rng.randint(0, 2))
        return " ".join(dict.fromkeys(chosen) if rng.random() < 0.5 else chosen)

    pairs = []
    for _ in range(count):
        source, target = text(SOURCES[language].split()), text(ENGLISH[:10])
        pairs.append((target, target) if rng.random() < 0.05 else (source, target))
    return pairs


@pytest.mark.parametrize("language", GOOD)
def test_the_filters_equal_a_plain_loop(language: str) -> None:
    pairs = random_pairs(language, 300)
    expected = [naive_reason(language, *pair) for pair in pairs]
    kept, counts = clean(frame(*pairs), language, PrepareOptions())
    for reason in REASONS:
        assert counts[reason] == expected.count(reason)
    assert kept.rows() == [pair for pair, reason in zip(pairs, expected) if reason is None]
    assert len(set(expected)) >= 6

    sources = [source for source, _ in pairs]
    _, found = words(pl.Series(sources), SCRIPTS[language])
    assert found.to_list() == [naive_words(source, language)[1] for source in sources]


def test_a_tokenizer_counts_instead_of_words(tmp_path: Path) -> None:
    tiny_tokenizer().save_pretrained(tmp_path)
    pair = ("Wortungetüm", "one two three four")
    tokens = len(tiny_tokenizer().encode(pair[0], add_special_tokens=False))
    assert tokens > 1
    for least in (tokens, tokens + 1):
        options = PrepareOptions(min_tokens=least, max_shared=2, tokenizer=str(tmp_path))
        assert clean(frame(pair), "de", options)[1]["short"] == (least > tokens)
