"""What identifies a text: its letters, and their hash.

The hash of a normalised text is its *key*, 64 bits. Equal texts have equal keys. Different texts
have different keys, apart from rare chance: in 100 million texts, 0.0003 pairs with the same key
are expected.

Shapes: N texts.
"""

import unicodedata
from collections.abc import Sequence
from functools import cache

import numpy as np
import regex
import xxhash

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
#: What can distinguish two words: letters, digits and vowel signs (of Indic and other scripts).
_LETTERS = regex.compile(rf"(?:[\p{{L}}\p{{N}}]|(?![{_OMITTED}])[\p{{Mc}}\p{{Mn}}])+")


def is_blank(text: str) -> bool:
    """Tell whether a text is empty or has only characters that nobody sees (`BLANKS`).

    >>> is_blank(" \u200b\u00ad\ufeff"), is_blank("a\u200db")
    (True, False)
    """
    return _VISIBLE.search(text) is None


def normalise(text: str) -> str:
    """Return only the letters and digits of a text, in one case and width, to compare texts.

    Two texts with the same form count as the same text, for example when the dev set is kept out
    of the training set. Unicode's NFKC makes variants of a character equal. Spaces and punctuation
    are dropped. So are combining accents and the points of Arabic and Hebrew, because many texts
    leave them out. Vowel signs are kept. A text without any letter or digit, such as an emoji,
    keeps its other characters.

    >>> normalise("It's 5 o'clock!"), normalise("Ｗｉｄｅ"), normalise("पी"), normalise("…")
    ('its5oclock', 'wide', 'पी', '...')
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
