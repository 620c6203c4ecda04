"""Codes, scripts and equal texts of languages; test_paper.py has the groups of languages."""

import polars as pl
import pytest

from dap_transformers.languages import (
    ISO3,
    NAMES,
    SCRIPTS,
    base_language,
)
from dap_transformers.text_keys import BLANKS, is_blank, normalise_all

OTHERS = [("zho", "zh"), ("fas", "fa"), ("FRA", "fr"), ("pt_BR", "pt"), ("iw", "he"), ("dut", "nl")]
#: Codes of other languages keep their first part.
OTHERS += [("xh-ZA", "xh"), (" SRP_Cyrl", "srp"), ("sr@latin", "sr"), ("nb_NO", "no")]
OTHERS += [("nn", "nn"), ("de_DE.UTF-8@euro", "de")]


@pytest.mark.parametrize(("code", "expected"), [(ISO3[code], code) for code in NAMES] + OTHERS)
def test_the_codes_and_locales_of_a_language_lead_to_one_code(code: str, expected: str) -> None:
    assert base_language(code) == base_language(expected) == expected


@pytest.mark.parametrize("text", ["", " \t", "\u200b", "\u00ad\ufeff", "\u3164", "\u2800", "\x1b"])
def test_a_text_that_nobody_sees_is_blank_to_all_readers(text: str) -> None:
    assert is_blank(text)
    assert not is_blank(text + "می\u200cخواهم")
    seen = pl.Series([text, "\U0001f600"]).str.contains(f"[^{BLANKS}]")
    assert seen.to_list() == [False, True]


@pytest.mark.parametrize("code", ["", "english"])
def test_what_is_no_code_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match=f"{code!r} is not a language code"):
        base_language(code)


def test_every_language_has_scripts_that_polars_knows() -> None:
    assert SCRIPTS.keys() == NAMES.keys()
    letters = pl.Series(["a"])
    for script in set().union(*SCRIPTS.values()):
        assert letters.str.contains(rf"\p{{{script}}}").to_list() == [script == "Latin"]


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
    first, second = normalise_all([one, other])
    assert (first == second) is is_same
