"""Language groups and codes, compared with the paper's tables and with Tatoeba's files."""

import polars as pl
import pytest

from dap_transformers.languages import (
    BLANKS,
    CHARACTERS_PER_WORD,
    ISO3,
    NAMES,
    SCRIPTS,
    TATOEBA_14,
    TATOEBA_28,
    TATOEBA_36,
    base_language,
    is_blank,
    normalise,
    normalise_all,
    to_iso1,
)


def test_groups_have_the_languages_of_the_paper() -> None:
    assert (len(TATOEBA_14), len(TATOEBA_28), len(TATOEBA_36)) == (14, 28, 36)
    assert " ".join(TATOEBA_14) == "ar bg de el es fr hi ru sw th tr ur vi zh"
    fewer_than_1000 = {"jv", "ka", "kk", "ml", "sw", "ta", "te", "th"}
    assert set(TATOEBA_36) - set(TATOEBA_28) == fewer_than_1000
    assert list(TATOEBA_36) == sorted(TATOEBA_36)


@pytest.mark.parametrize("code", TATOEBA_36)
def test_both_codes_lead_to_the_same_language(code: str) -> None:
    assert to_iso1(code) == to_iso1(ISO3[code]) == to_iso1(ISO3[code].upper()) == code
    assert NAMES[code]


@pytest.mark.parametrize(
    ("code", "expected"),
    [("zho", "zh"), ("fas", "fa"), ("pt_BR", "pt"), ("en", "en"), ("iw", "he")],
)
def test_other_codes_of_a_language_are_known(code: str, expected: str) -> None:
    assert to_iso1(code) == base_language(code) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [("xh-ZA", "xh"), (" SRP_Cyrl", "srp"), ("sr@latin", "sr"), ("de_DE.UTF-8@euro", "de")],
)
def test_another_language_keeps_the_first_part_of_its_code(code: str, expected: str) -> None:
    assert base_language(code) == expected


@pytest.mark.parametrize("text", ["", " \t", "\u200b", "\u00ad\ufeff", "\u3164", "\u2800", "\x1b"])
def test_a_text_that_nobody_sees_is_blank_to_all_readers(text: str) -> None:
    assert is_blank(text)
    assert not is_blank(text + "می\u200cخواهم")
    seen = pl.Series([text, "\U0001f600"]).str.contains(f"[^{BLANKS}]")
    assert seen.to_list() == [False, True]


@pytest.mark.parametrize("code", ["xx", "", "english", "tlh"])
def test_an_unknown_code_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match=f"{code!r}"):
        to_iso1(code)


def test_every_language_has_scripts_that_polars_knows() -> None:
    assert SCRIPTS.keys() == NAMES.keys()
    letters = pl.Series(["a"])
    for script in {script for scripts in SCRIPTS.values() for script in scripts}:
        assert letters.str.contains(rf"\p{{{script}}}").to_list() == [script == "Latin"]


def test_only_scripts_without_spaces_count_characters() -> None:
    languages = {
        code for code, scripts in SCRIPTS.items() if CHARACTERS_PER_WORD.keys() & set(scripts)
    }
    assert languages == {"zh", "ja", "th", "ko"}


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("मैं कल घर गया था", "मैं कल घर गयी थी", False),
        ("คน", "คืน", False),
        ("দিন", "দান", False),
        ("مُحَمَّد", "محمد", True),
        ("שָׁלוֹם", "שלום", True),
        ("ISTANBUL", "İstanbul", True),
        ("Ｗｉｄｅ ｌｅｔｔｅｒｓ", "wide letters", True),
        ("in\u200bvis\u00adible\ufe0f \u3164", "invisible", True),
        ("caf\u00e9", "cafe\u034f\u0301", True),
        ("\u2764\ufe0f", "\u2600\ufe0f", False),  # a heart, the sun
        ("\u2764\ufe0f", "\u2764", True),
        # flags of England and Scotland
        (
            "\U0001f3f4\U000e0067\U000e0062\U000e0065",
            "\U0001f3f4\U000e0067\U000e0062\U000e0073",
            False,
        ),
    ],
)
def test_texts_are_equal_without_case_width_points_and_what_nobody_sees(
    one: str, other: str, is_same: bool
) -> None:
    assert (normalise(one) == normalise(other)) is is_same
    assert normalise_all([one, other]) == [normalise(one), normalise(other)]
