"""Make parallel text from the ``.po`` translations inside wheels.

The strings are cleaned and de-duplicated. Train and test are split by the English string.
"""

import hashlib
import html
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dap_transformers.languages import ISO3, TATOEBA_36, normalise
from dap_transformers.text.tmx_po import catalogue_pairs

Pair = tuple[str, str]  # (source, English)
Corpus = Mapping[str, Sequence[Pair]]  # language code -> pairs

#: Language -> its locale folders in order of preference. Others prefer ``xx`` to ``xx_YY``.
_LOCALES = {
    "pt": ("pt", "pt_PT", "pt_BR"),
    "zh": ("zh_Hans", "zh_CN", "zh_SG", "cmn", "zh"),
    "tl": ("tl", "fil"),
}
#: Fewest held-out pairs of a language that is tested.
FEWEST_TESTED = 30
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

    Args:
        source: the source text, as `clean` returns it.
        english: the English text, as `clean` returns it.
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


def locale_rank(locale: str, language: str) -> int | None:
    """Return how well a folder of translations suits a language.

    >>> locale_rank("pt_BR", "pt"), locale_rank("he_IL", "he"), locale_rank("zh_Hant", "zh")
    (2, 1, None)

    Args:
        locale: name of the folder, such as "pt_BR".
        language: language code, such as "pt".

    Returns:
        A rank, where 0 is best. None if the folder is of another language, or of a variant that
        is not used.
    """
    if language in _LOCALES:
        return _LOCALES[language].index(locale) if locale in _LOCALES[language] else None
    if locale == language:
        return 0
    return 1 if re.fullmatch(language + "_[A-Z]{2}", locale) else None


def read_wheels(wheels: Iterable[Path], languages: Sequence[str] = TATOEBA_36) -> Corpus:
    """Read the pairs of each language from wheels, without repeated source or English strings.

    Strings are cleaned, and pairs that are not `usable` are dropped. Of several translations of
    an English string, the first one is kept. Preferred locales come first.

    Args:
        wheels: wheel files, which hold ``.po`` files.
        languages: codes of the languages to read.

    Returns:
        Language code -> pairs (source, English). Languages without a pair are left out.
    """
    found: dict[str, dict[str, Pair]] = {language: {} for language in languages}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for language, name in _members(archive, languages):
                for _, pair in catalogue_pairs(f"{wheel}/{name}"):
                    source = clean(pair[0])
                    english = clean(pair[1])
                    if usable(source, english):
                        found[language].setdefault(normalise(english), (source, english))
    corpus: dict[str, dict[str, Pair]] = {
        language: {} for language, pairs in found.items() if pairs
    }
    for language, by_source in corpus.items():
        for pair in found[language].values():
            by_source.setdefault(normalise(pair[0]), pair)
    return {language: list(by_source.values()) for language, by_source in corpus.items()}


def _members(archive: zipfile.ZipFile, languages: Sequence[str]) -> list[tuple[str, str]]:
    """Return (language code, file name) of a wheel's ``.po`` files, preferred locales first."""
    ranked = []
    for name in archive.namelist():
        if match := re.search(r"/locales?/([\w@]+)/LC_MESSAGES/[^/]+\.po$", name):
            for language in languages:
                rank = locale_rank(match[1], language)
                if rank is not None:
                    ranked.append((rank, language, name))
    return [(language, name) for _, language, name in sorted(ranked)]


def split(
    corpus: Corpus, share: float = 0.15, minimum: int = FEWEST_TESTED, maximum: int = 200
) -> tuple[Corpus, Corpus]:
    """Split the pairs of each language into training and test pairs by their English string.

    The hash of the English string decides. So all languages hold out the same strings, and adding
    text never moves a string to the other part. The English side of a test pair occurs in no
    language's training pairs. The other side does not occur in its own language's training pairs.

    Args:
        corpus: language code -> pairs, without repeated strings.
        share: share of English strings that is held out, 0 to 1.
        minimum: a language with fewer held-out pairs has no test, because a single pair would be
            worth too many points. These pairs are not trained on, either.
        maximum: largest number of test pairs per language. Those with the lowest hashes are taken.

    Returns:
        Training pairs, and test pairs, by language code.
    """
    train, test = {}, {}
    for language, pairs in corpus.items():
        train[language] = [pair for pair in pairs if hash_position(pair[1]) >= share]
        held_out = [pair for pair in pairs if hash_position(pair[1]) < share]
        if min(len(held_out), maximum) >= minimum:
            test[language] = sorted(held_out, key=lambda pair: hash_position(pair[1]))[:maximum]
    return train, test


def hash_position(english: str) -> float:
    """Return a pseudo-random number in [0, 1) for an English string, by a hash of its normal form.

    The same string always gives the same number.
    """
    return int.from_bytes(hashlib.sha256(normalise(english).encode()).digest()[:6], "big") / 2**48


def write(train: Corpus, test: Corpus, out: Path) -> None:
    """Write ``out/train/{xx}-en.tsv`` and ``out/test/tatoeba.{iso3}-eng.{iso3|eng}``.

    Line i of a test file translates line i of the other. Older files of these names are removed.

    Args:
        train: language code -> training pairs.
        test: language code -> test pairs.
        out: folder to write into.
    """
    for folder, files in (("train", "*-en.tsv"), ("test", "tatoeba.*")):
        (out / folder).mkdir(parents=True, exist_ok=True)
        for old in (out / folder).glob(files):
            old.unlink()
    for language, pairs in train.items():
        _write_lines(out / "train" / f"{language}-en.tsv", ("\t".join(pair) for pair in pairs))
    for language, pairs in test.items():
        stem = f"tatoeba.{ISO3[language]}-eng"
        _write_lines(out / "test" / f"{stem}.{ISO3[language]}", (source for source, _ in pairs))
        _write_lines(out / "test" / f"{stem}.eng", (english for _, english in pairs))


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a UTF-8 file with these lines, each with a line feed at its end on every system."""
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")


def prepare(wheels: Iterable[Path], out: Path) -> dict[str, tuple[int, int]]:
    """Read the text of wheels, split it, and write training and test files (`write`).

    Args:
        wheels: wheel files, which hold ``.po`` files.
        out: folder to write into.

    Returns:
        Language code -> (number of training pairs, number of test pairs).
    """
    train, test = split(read_wheels(wheels))
    write(train, test, out)
    counts = {}
    for language, pairs in train.items():
        counts[language] = (len(pairs), len(test.get(language, ())))
    return counts
