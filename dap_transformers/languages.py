"""Languages, their codes and scripts, and what identifies a text: its letters, and their hash.

The hash of a normalised text is its *key*, 64 bits. Equal texts have equal keys. Different texts
have different keys, apart from rare chance: in 100 million texts, 0.0003 pairs with the same key
are expected.

Shapes: N texts.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np
import regex
import xxhash

from dap_transformers.errors import UserError

#: ISO 639-1 code, ISO 639-3 code as in Tatoeba's file names, English name, and the scripts by the
#: names of Unicode's `Script` property. English, then alphabetical as in the paper's appendix.
_TABLE = """
en eng English    Latin
af afr Afrikaans  Latin
ar ara Arabic     Arabic
bg bul Bulgarian  Cyrillic
bn ben Bengali    Bengali
de deu German     Latin
el ell Greek      Greek
es spa Spanish    Latin
et est Estonian   Latin
eu eus Basque     Latin
fa pes Persian    Arabic
fi fin Finnish    Latin
fr fra French     Latin
he heb Hebrew     Hebrew
hi hin Hindi      Devanagari
hu hun Hungarian  Latin
id ind Indonesian Latin
it ita Italian    Latin
ja jpn Japanese   Han Hiragana Katakana
jv jav Javanese   Latin Javanese
ka kat Georgian   Georgian
kk kaz Kazakh     Cyrillic
ko kor Korean     Hangul Han
ml mal Malayalam  Malayalam
mr mar Marathi    Devanagari
nl nld Dutch      Latin
pt por Portuguese Latin
ru rus Russian    Cyrillic
sw swh Swahili    Latin
ta tam Tamil      Tamil
te tel Telugu     Telugu
th tha Thai       Thai
tl tgl Tagalog    Latin
tr tur Turkish    Latin
ur urd Urdu       Arabic
vi vie Vietnamese Latin
zh cmn Chinese    Han
"""
_ROWS = [line.split() for line in _TABLE.strip().splitlines()]

#: ISO 639-1 -> the ISO 639-3 code in Tatoeba's file names, with English.
ISO3: dict[str, str] = {code: iso3 for code, iso3, *_ in _ROWS}
#: ISO 639-1 -> English name, with English.
NAMES: dict[str, str] = {code: name for code, _, name, *_ in _ROWS}
#: ISO 639-1 -> the Unicode scripts of the language.
SCRIPTS: dict[str, tuple[str, ...]] = {code: tuple(scripts) for code, _, _, *scripts in _ROWS}

#: The 36 languages of XTREME's Tatoeba benchmark (the paper's section 4.3 and appendix).
TATOEBA_36: tuple[str, ...] = tuple(NAMES)[1:]
_FEWER_THAN_1000_PAIRS = {"jv", "ka", "kk", "ml", "sw", "ta", "te", "th"}
#: The languages of Tatoeba with all 1,000 sentence pairs.
TATOEBA_28: tuple[str, ...] = tuple(
    code for code in TATOEBA_36 if code not in _FEWER_THAN_1000_PAIRS
)
#: The languages of XNLI, in the order of the paper's table.
XNLI_LANGUAGES = (
    "en", "fr", "es", "de", "el", "bg", "ru", "tr", "ar", "vi", "th", "zh", "hi", "sw", "ur",
)  # fmt: skip
#: The languages of XNLI without English. The paper's 14-language averages follow from these rows.
TATOEBA_14: tuple[str, ...] = tuple(code for code in TATOEBA_36 if code in XNLI_LANGUAGES)

#: Regions that file names of known corpora write in small letters, by language.
REGIONS = {
    "ar": "ae|eg|ma|sa|sy", "bn": "bd|in", "de": "at|ch|de", "en": "au|ca|gb|in|uk|us",
    "es": "ar|cl|co|es|mx|pe|us", "eu": "es", "fa": "af|ir", "fr": "be|ca|ch|fr", "it": "ch|it",
    "nl": "be|nl", "pt": "ao|br|pt", "sw": "ke|tz", "ta": "in|lk", "ur": "in|pk",
    "zh": "cn|hk|mo|sg|tw|hans|hant",
}  # fmt: skip
_SMALL_REGION = "|".join(f"{code}[-_](?:{regions})" for code, regions in REGIONS.items())
_REGION = r"[-_](?:[A-Z][a-z]{3}|[A-Z]{2}|[0-9]{3})"  # Latn, AT, 419
#: Pattern of a language code with its script and region, such as `pt-br`, `de` and `zho_Hans`.
LANGUAGE_TAG = rf"(?:{_SMALL_REGION}|[a-z]{{2,3}}(?:{_REGION})*)"

#: Script without spaces between words -> characters per English word, rounded from parallel text.
CHARACTERS_PER_WORD: dict[str, float] = {"Han": 1.5, "Hiragana": 3.0, "Katakana": 3.0, "Thai": 5.0}

#: Other codes of these languages: ISO 639-3 of single varieties, ISO 639-2/B, and outdated ones.
_OTHER_CODES = (
    "arb:ar ekk:et fas:fa per:fa fil:tl iw:he in:id jw:jv swa:sw zho:zh chi:zh ger:de fre:fr baq:eu"
)
_TO_ISO1: dict[str, str] = dict(pair.split(":") for pair in _OTHER_CODES.split())
_TO_ISO1 |= {code: code for code in ISO3}
_TO_ISO1 |= {iso3: code for code, iso3 in ISO3.items()}
#: A code with subtags (`zh-Hans-CN`), and an encoding and a modifier as in names of locales
#: (`de_DE.UTF-8@euro`).
_CODE = re.compile(
    r"([A-Za-z]{2,3})(?:[-_][A-Za-z0-9]{1,8})*(?:\.[A-Za-z0-9-]+)?(?:@[A-Za-z0-9]+)?"
)

#: What a reader does not see: white space, control characters, code points that are ignorable by
#: default (soft hyphen, joiners, direction marks, fillers and the like), marks of annotations, the
#: empty Braille cell. Inside of [], for `regex` and for polars.
BLANKS = r"\s\p{Cc}\p{Default_Ignorable_Code_Point}" + "\ufff9-\ufffb\u2800"
_VISIBLE = regex.compile(f"[^{BLANKS}]")
#: Ignorable code points, but not the tags that spell the region of a flag and tell flags apart.
_IGNORED = regex.compile(r"(?V1)[\p{Default_Ignorable_Code_Point}--\U000E0020-\U000E007F]+")
#: Combining classes of the points of Hebrew, Arabic and Syriac, and of accents.
_MARKS = (*range(10, 37), 200, 202, *range(214, 234, 2), 233, 234, 240)
_OMITTED = "".join(rf"\p{{ccc={number}}}" for number in _MARKS)
_LETTERS = regex.compile(rf"(?:[\p{{L}}\p{{N}}]|(?![{_OMITTED}])[\p{{Mc}}\p{{Mn}}])+")


def to_iso1(code: str) -> str:
    """Return the ISO 639-1 code of English or one of the paper's 36 languages, in any spelling.

    >>> to_iso1("deu"), to_iso1("ZH-Hans"), to_iso1("arb_Arab"), to_iso1("eng")
    ('de', 'zh', 'ar', 'en')
    """
    base = base_language(code)
    if base not in NAMES:
        known = " ".join(TATOEBA_36)
        raise UserError(
            f"unknown language code {code!r}: give en or one of {known} (or their ISO 639-3 codes)"
        )
    return base


def base_language(code: str) -> str:
    """Return a language code without region, script, encoding and modifier.

    English and the 36 languages get their ISO 639-1 code. Of any other code, the first part is
    kept. The result has two or three letters, so it can be a part of a file name.

    >>> base_language("EN-us"), base_language("deu_Latn"), base_language("sr@latin")
    ('en', 'de', 'sr')
    """
    match = _CODE.fullmatch(code.strip())
    if not match:
        raise UserError(f"{code[:80]!r} is not a language code: give two or three letters, as 'de'")
    base = match[1].lower()
    return _TO_ISO1.get(base, base)


def language_in(path: object, tag: str) -> str:
    """Return the language code of a tag without region. An error names the file."""
    try:
        return base_language(tag)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def is_letter(character: str) -> bool:
    """Tell whether `normalise` keeps a character, because it can distinguish two words.

    It keeps letters, digits and vowel signs (of Indic and other scripts). It drops combining
    accents and the points of Arabic and Hebrew, because many texts leave them out.

    >>> [is_letter(character) for character in ("ß", "7", "ी", "ื", "-", "\u0301", "\u064b")]
    [True, True, True, True, False, False, False]
    """
    return _LETTERS.fullmatch(character) is not None


def is_blank(text: str) -> bool:
    """Tell whether a text is empty or has only characters that nobody sees (`BLANKS`).

    >>> is_blank(" \u200b\u00ad\ufeff"), is_blank("a\u200db")
    (True, False)
    """
    return _VISIBLE.search(text) is None


def normalise(text: str) -> str:
    """Return only the letters and digits of a text, in one case and width, to compare texts.

    Two texts with the same form count as the same text, for example when the dev set is kept out
    of the training set. Unicode's NFKC makes variants of a character equal. Spaces, punctuation
    and accents that are separate characters are dropped. A text without any letter or digit
    (`is_letter`), such as an emoji, keeps its other characters.

    >>> normalise("It's 5 o'clock!"), normalise("Ｗｉｄｅ"), normalise("…")
    ('its5oclock', 'wide', '...')
    """
    return normalise_all([text])[0]


def normalise_all(texts: Sequence[str]) -> list[str]:
    """Normalise many texts at once, which is much faster than calling `normalise` for each.

    >>> normalise_all(["It's 5 o'clock!", "…"])
    ['its5oclock', '...']
    """
    if not texts:
        return []
    # All texts are filtered as one array of code points, with a line feed after each text.
    joined = "\n".join(text.replace("\n", " ") for text in texts)
    codes = code_points(joined)
    is_ignored = _where(_IGNORED)[codes]
    if is_ignored.any():
        joined = _text_of(codes[~is_ignored])

    # Case folding may take characters apart, so the text is composed before and after it.
    folded = []
    for text in joined.split("\n"):
        composed = unicodedata.normalize("NFKC", text)
        folded.append(unicodedata.normalize("NFKC", composed.casefold()))
    codes = code_points("\n".join(folded))
    letters = _text_of(codes[_where(_LETTERS)[codes] | (codes == ord("\n"))]).split("\n")
    if all(letters):
        return letters
    return [found or text.strip() for found, text in zip(letters, folded)]


def code_points(text: str) -> np.ndarray:
    """Return the Unicode code point of each character of a text, uint32 (characters,)."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _text_of(codes: np.ndarray) -> str:
    """Return the text that has these code points. This is the inverse of `code_points`."""
    return codes.tobytes().decode("utf-32-le", "surrogatepass")


@cache
def _where(pattern: regex.Pattern) -> np.ndarray:
    """Tell for each code point whether a pattern of one or more characters has it: (0x110000,)."""
    found = np.zeros(0x110000, bool)
    for match in pattern.finditer("".join(map(chr, range(len(found))))):
        found[match.start() : match.end()] = True
    return found


def text_keys(letters: Sequence[str]) -> np.ndarray:
    """Return a 64-bit hash of each of N texts, uint64 (N,), to compare them as integers."""
    digest = xxhash.xxh3_64_intdigest
    keys = (digest(text.encode("utf-32-le", "surrogatepass")) for text in letters)
    return np.fromiter(keys, np.uint64, len(letters))


def ranks(keys: np.ndarray, seed: int) -> np.ndarray:
    """Return the rank of each key: its place in a random order of all 64-bit integers.

    The order depends only on the seed, not on files or processes. A dev set or a sample takes the
    texts with the smallest ranks. Keys and ranks are uint64 (N,). Different keys have different
    ranks.
    """
    salt = scramble(np.array([seed % 2**64], np.uint64) ^ np.uint64(0xD1B54A32D192ED03))
    return scramble(keys ^ salt)


def scramble(keys: np.ndarray) -> np.ndarray:
    """Map each uint64 (N,) to another one, so that every bit depends on all bits (SplitMix64).

    Different values stay different.
    """
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
