"""Language codes of the 36 languages of XTREME's Tatoeba benchmark, the paper's groups of them, and letters."""

import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np

from dap.errors import UserError

#: Code -> (Tatoeba's ISO 639-3 file code, English name), alphabetical as in the paper's appendix.
_LANGUAGES: dict[str, tuple[str, str]] = {
    "af": ("afr", "Afrikaans"),
    "ar": ("ara", "Arabic"),
    "bg": ("bul", "Bulgarian"),
    "bn": ("ben", "Bengali"),
    "de": ("deu", "German"),
    "el": ("ell", "Greek"),
    "es": ("spa", "Spanish"),
    "et": ("est", "Estonian"),
    "eu": ("eus", "Basque"),
    "fa": ("pes", "Persian"),
    "fi": ("fin", "Finnish"),
    "fr": ("fra", "French"),
    "he": ("heb", "Hebrew"),
    "hi": ("hin", "Hindi"),
    "hu": ("hun", "Hungarian"),
    "id": ("ind", "Indonesian"),
    "it": ("ita", "Italian"),
    "ja": ("jpn", "Japanese"),
    "jv": ("jav", "Javanese"),
    "ka": ("kat", "Georgian"),
    "kk": ("kaz", "Kazakh"),
    "ko": ("kor", "Korean"),
    "ml": ("mal", "Malayalam"),
    "mr": ("mar", "Marathi"),
    "nl": ("nld", "Dutch"),
    "pt": ("por", "Portuguese"),
    "ru": ("rus", "Russian"),
    "sw": ("swh", "Swahili"),
    "ta": ("tam", "Tamil"),
    "te": ("tel", "Telugu"),
    "th": ("tha", "Thai"),
    "tl": ("tgl", "Tagalog"),
    "tr": ("tur", "Turkish"),
    "ur": ("urd", "Urdu"),
    "vi": ("vie", "Vietnamese"),
    "zh": ("cmn", "Chinese"),
}

#: The 36 languages of XTREME's Tatoeba benchmark (the paper's section 4.3 and appendix).
TATOEBA_36: tuple[str, ...] = tuple(_LANGUAGES)
#: The languages that have the full 1,000 sentence pairs.
TATOEBA_28: tuple[str, ...] = tuple(
    c for c in TATOEBA_36 if c not in {"jv", "ka", "kk", "ml", "sw", "ta", "te", "th"}
)
#: The languages of XNLI but English; the appendix's rows reproduce the paper's 14-language averages with them.
TATOEBA_14: tuple[str, ...] = (
    "ar",
    "bg",
    "de",
    "el",
    "es",
    "fr",
    "hi",
    "ru",
    "sw",
    "th",
    "tr",
    "ur",
    "vi",
    "zh",
)
#: The languages of XNLI, in the order of the paper's table.
XNLI_LANGUAGES = (
    "en",
    "fr",
    "es",
    "de",
    "el",
    "bg",
    "ru",
    "tr",
    "ar",
    "vi",
    "th",
    "zh",
    "hi",
    "sw",
    "ur",
)

#: ISO 639-1 -> the ISO 639-3 code in Tatoeba's file names; English, the pivot, is included.
ISO3: dict[str, str] = {"en": "eng"} | {code: iso3 for code, (iso3, _) in _LANGUAGES.items()}
#: ISO 639-1 -> English name; English, the pivot, is included.
NAMES: dict[str, str] = {"en": "English"} | {code: name for code, (_, name) in _LANGUAGES.items()}

_DEVANAGARI, _ARABIC, _LATIN = ("Devanagari",), ("Arabic",), ("Latin",)
#: ISO 639-1 -> the Unicode scripts that the language is written in, as Unicode's `Script` property names them.
SCRIPTS: dict[str, tuple[str, ...]] = dict.fromkeys(NAMES, _LATIN) | {
    "ar": _ARABIC, "bg": ("Cyrillic",), "bn": ("Bengali",), "el": ("Greek",), "fa": _ARABIC, "he": ("Hebrew",),
    "hi": _DEVANAGARI, "ja": ("Han", "Hiragana", "Katakana"), "jv": ("Latin", "Javanese"), "ka": ("Georgian",),
    "kk": ("Cyrillic",), "ko": ("Hangul", "Han"), "ml": ("Malayalam",), "mr": _DEVANAGARI, "ru": ("Cyrillic",),
    "ta": ("Tamil",), "te": ("Telugu",), "th": ("Thai",), "ur": _ARABIC, "zh": ("Han",),
}  # fmt: skip
#: Characters that make one English word in the scripts without spaces between words, rounded from parallel text.
CHARACTERS_PER_WORD: dict[str, float] = {"Han": 1.5, "Hiragana": 3.0, "Katakana": 3.0, "Thai": 5.0}

_OTHER_CODES = {
    "arb": "ar", "ekk": "et", "fas": "fa", "per": "fa", "fil": "tl", "iw": "he", "in": "id",
    "jw": "jv", "swa": "sw", "zho": "zh", "chi": "zh", "ger": "de", "fre": "fr", "baq": "eu",
}  # fmt: skip
_TO_ISO1 = (
    {iso3: code for code, iso3 in ISO3.items()} | _OTHER_CODES | {code: code for code in ISO3}
)


def to_iso1(code: str) -> str:
    """The ISO 639-1 code of a language given by its two- or three-letter code, in any case, with or without a region.

    >>> to_iso1("deu"), to_iso1("ZH-Hans"), to_iso1("arb_Arab"), to_iso1("eng")
    ('de', 'zh', 'ar', 'en')

    Raises:
        ValueError: the code is not one of English and the 36 languages.
    """
    base = base_language(code)
    if base not in NAMES:
        known = " ".join(TATOEBA_36)
        raise UserError(
            f"unknown language code {code!r}; known are en and {known} (or their ISO 639-3)"
        )
    return base


def base_language(code: str) -> str:
    """The language of a code without region and script: ISO 639-1 for English and the 36, else its first part.

    >>> base_language("EN-us"), base_language("deu_Latn"), base_language("cmn"), base_language("xh-ZA")
    ('en', 'de', 'zh', 'xh')
    """
    base = code.strip().lower().replace("_", "-").split("-")[0]
    return _TO_ISO1.get(base, base)


def is_letter(character: str) -> bool:
    """Whether a character tells words apart: a letter, a digit or a vowel sign of Indic and other scripts.

    Accents that stand alone and the points of Arabic and Hebrew, which many texts leave out, do not.

    >>> [is_letter(character) for character in ("ß", "7", "ी", "ื", "-", "\u0301", "\u064b")]
    [True, True, True, True, False, False, False]
    """
    if character.isalnum():
        return True
    kind = unicodedata.combining(
        character
    )  # 10 to 36: points of Hebrew, Arabic and Syriac; from 200 on: accents
    return unicodedata.category(character) in ("Mc", "Mn") and (kind < 10 or 36 < kind < 200)


def normalise(text: str) -> str:
    """Return only the letters and digits of a text (`is_letter`), case folded.

    Two texts that are equal after this count as the same text: one would leak the other into a dev
    or test set. A text without any letter or digit is returned as it stands.

    >>> normalise("It's 5 o'clock!"), normalise("…")
    ('its5oclock', '…')
    """
    return normalise_all([text])[0]


def normalise_all(texts: Sequence[str]) -> list[str]:
    """Normalise many texts at once, which is much faster than calling `normalise` for each.

    >>> normalise_all(["It's 5 o'clock!", "…"])
    ['its5oclock', '…']
    """
    # All texts are filtered as one array of code points, with a line feed after each text.
    joined = "\n".join(text.replace("\n", " ") for text in texts).casefold()
    codes = code_points(joined)
    kept = codes[_is_kept()[codes]]
    letters = kept.tobytes().decode("utf-32-le").split("\n")
    if all(letters):
        return letters
    return [found or text.strip() for found, text in zip(letters, texts)]


def code_points(text: str) -> np.ndarray:
    """Return the code points of a text as uint32."""
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


@cache
def _is_kept() -> np.ndarray:
    """Tell for each code point whether it is a letter, a digit or a line feed: bool (0x110000,)."""
    return np.array([is_letter(chr(code)) or chr(code) == "\n" for code in range(0x110000)])
