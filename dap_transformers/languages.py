"""Languages: their codes, names and scripts, and the 36 languages of the paper."""

import re

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
#: Lao had none, and is taken as Thai.
CHARACTERS_PER_WORD: dict[str, float] = {
    "Han": 1.5, "Hiragana": 3.0, "Katakana": 3.0, "Thai": 5.0, "Lao": 5.0, "Khmer": 6.0,
    "Myanmar": 7.0,
}  # fmt: skip

#: Letters of scripts without spaces between words, for []: Thai, Lao, Burmese, Khmer, CJK.
UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fff\u3040-\u312f\u31a0-\u31ff\u3400-\u9fff"
    "\uf900-\ufaff\U00020000-\U0003ffff"
)

#: Other codes of these languages: ISO 639-3 of single varieties, ISO 639-2/B, and outdated ones.
#: OPUS calls Bokmål both nb and no.
_OTHER_CODES = (
    "arb:ar ekk:et fas:fa per:fa fil:tl iw:he in:id jw:jv swa:sw zho:zh chi:zh ger:de fre:fr baq:eu"
    " dut:nl geo:ka gre:el nb:no nob:no nor:no"
)
_TO_ISO1: dict[str, str] = dict(pair.split(":") for pair in _OTHER_CODES.split())
_TO_ISO1 |= {code: code for code in ISO3}
_TO_ISO1 |= {iso3: code for code, iso3 in ISO3.items()}
#: A code with subtags (`zh-Hans-CN`), and an encoding and a modifier as in names of locales
#: (`de_DE.UTF-8@euro`).
_CODE = re.compile(
    r"([A-Za-z]{2,3})(?:[-_][A-Za-z0-9]{1,8})*(?:\.[A-Za-z0-9-]+)?(?:@[A-Za-z0-9]+)?"
)


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
