"""Cut sentences into words, and link the words of measured pairs by a statistical aligner.

There is no gold word alignment for these languages. The reference comes from an aligner that sees
no model's states (`experiments.silver`). It is trained on parallel text and on the measured pairs
themselves. A sure link joins words that occur at least `MIN_COUNT` times in the text, because an
aligner can only guess the links of rarer words. The links are made once and kept in a folder.
"""

import hashlib
import json
import random
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path

import numpy as np

from dap_transformers.errors import UserError
from dap_transformers.files import read_object, write_json
from dap_transformers.text.archives import disk_path
from dap_transformers.text.find import find_bitext
from dap_transformers.text.formats import BitextFile, read_pairs
from eval_retrieval import PairsByLanguage
from experiments.silver import ITERATIONS, NO_SOURCE, TENSION, align_words

NO_SPACES = ("ja", "th", "zh")
MIN_COUNT = 3
LONGEST = 30  # most words per side of a training pair
SEED = 0


@dataclass(frozen=True)
class AlignedPair:
    """A sentence pair, and the links between its words that a statistical aligner found.

    Attributes:
        source: the source sentence.
        target: the target sentence.
        sure: (L, 2) links found in both directions, between words that are not rare (`MIN_COUNT`):
            numbers of a source word and a target word, from 0.
        possible: (L, 2) links found in at least one direction, also of rare words.
    """

    source: str
    target: str
    sure: np.ndarray
    possible: np.ndarray


def word_spans(sentence: str) -> list[tuple[int, int]]:
    """Return the positions of a sentence's words.

    A word is a run of letters, combining marks and digits. It may have apostrophes inside. Every
    other character except space is a word by itself.

    >>> [("Don't go, Müller!")[start:end] for start, end in word_spans("Don't go, Müller!")]
    ["Don't", 'go', ',', 'Müller', '!']

    Returns:
        First character of each word, and the character after its last one.
    """
    return [match.span() for match in _word_pattern().finditer(sentence)]


@cache
def _word_pattern() -> re.Pattern[str]:
    """Return the regular expression of a word.

    `\\w` does not match combining marks, which are parts of words in Arabic and Devanagari.
    """
    characters = [chr(i) for i in range(sys.maxunicode)]
    marks = "".join(each for each in characters if unicodedata.category(each).startswith("M"))
    letters = rf"(?:[^\W_]|[{re.escape(marks)}])+"
    return re.compile(rf"{letters}(?:['’]{letters})*|\S")


def lower_words(sentence: str) -> list[str]:
    """Return the words of a sentence in lower case, as the aligner compares them."""
    return [sentence[start:end].lower() for start, end in word_spans(sentence)]


def is_trivial(source: str, target: str) -> bool:
    """Tell whether a link between two words says nothing about translation.

    Such a link joins identical words, or a word that has no letter and no digit.

    >>> is_trivial("tom", "tom"), is_trivial("haus", "house"), is_trivial(",", "and")
    (True, False, True)

    Args:
        source: a source word in lower case.
        target: the target word that it is linked to, in lower case.
    """
    return source == target or not all(any(map(str.isalnum, word)) for word in (source, target))


def reference(
    pairs: PairsByLanguage, train_data: Sequence[str], wanted: int, training_pairs: int, folder: str
) -> dict[str, list[AlignedPair]]:
    """Link the words of the first pairs of each language by a statistical aligner.

    Such links are called silver, because nobody has checked them.

    Args:
        pairs: language code -> sentence pairs to measure on. The aligner is also trained on them.
        train_data: parallel text to train the aligner on, in any form that train_dap.py takes. Each
            file is shuffled. The first one is used up first.
        wanted: number of pairs to link per language.
        training_pairs: largest number of pairs of `train_data` per language.
        folder: folder that keeps the links. If it has links of this text, they are read.

    Returns:
        Language code -> its first `wanted` pairs with links.

    Raises:
        UserError: a language has no spaces between words, no training text or fewer than `wanted`
            pairs, or a kept file is damaged.
    """
    if refused := [code for code in pairs if code in NO_SPACES]:
        raise UserError(f"{' '.join(refused)}: written without spaces between words; leave it out")
    found = find_bitext(train_data)
    if absent := [code for code in pairs if code not in found]:
        raise UserError(f"{' '.join(absent)}: {', '.join(train_data)} holds {' '.join(found)} only")
    aligned = {}
    for code, rows in pairs.items():
        path = Path(folder, f"{code}-{_digest(rows, found[code], wanted, training_pairs)}.json")
        if not path.is_file():
            linked = link_pairs(rows, _shuffled(found[code]), wanted, training_pairs)
            links = []
            for pair in linked:
                lists = {"sure": pair.sure.tolist(), "possible": pair.possible.tolist()}
                links.append(vars(pair) | lists)
            write_json({"pairs": links}, path)
        aligned[code] = _read(path)
    return aligned


def link_pairs(
    rows: Sequence[tuple[str, str]],
    text: Iterable[tuple[str, str]],
    wanted: int,
    training_pairs: int,
) -> list[AlignedPair]:
    """Train an aligner, and link the words of the first `wanted` rows.

    Args:
        rows: sentence pairs to measure on. The aligner is also trained on them.
        text: more pairs to train the aligner on. Pairs with over `LONGEST` words are left out.
        wanted: number of rows to link.
        training_pairs: largest number of pairs of `text`.

    Returns:
        The first `wanted` rows with their links.

    Raises:
        UserError: there are fewer than `wanted` rows.
    """
    if wanted > len(rows):
        raise UserError(f"{wanted} pairs are asked for, the text has {len(rows)}: lower --pairs")
    pairs = [_lower_pair(pair) for pair in rows]
    pairs += islice(_short_pairs(text), training_pairs)
    source = [words for words, _ in pairs]
    target = [words for _, words in pairs]
    frequent_source = _frequent(source)
    frequent_target = _frequent(target)
    aligned = []
    for row, (sure, possible) in enumerate(align_words(source, target, wanted)):
        known = []
        for i, j in sure:
            known.append(source[row][i] in frequent_source and target[row][j] in frequent_target)
        aligned.append(AlignedPair(*rows[row], sure[np.array(known, bool)], possible))
    return aligned


def _lower_pair(pair: tuple[str, str]) -> tuple[list[str], list[str]]:
    """Return the words of both sentences of a pair, in lower case."""
    return lower_words(pair[0]), lower_words(pair[1])


def _short_pairs(text: Iterable[tuple[str, str]]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the lower-case words of the pairs that have 1 to `LONGEST` words on each side.

    Args:
        text: pairs of a source sentence and a target sentence.
    """
    for pair in text:
        source, target = _lower_pair(pair)
        if 0 < len(source) <= LONGEST and 0 < len(target) <= LONGEST:
            yield source, target


def _frequent(sentences: Sequence[Sequence[str]]) -> set[str]:
    """Return the words that occur at least `MIN_COUNT` times in the sentences."""
    counts = Counter(chain(*sentences))
    return {word for word, times in counts.items() if times >= MIN_COUNT}


def _shuffled(files: Iterable[BitextFile]) -> Iterator[tuple[str, str]]:
    """Yield the pairs (source, target) of one file after the other.

    Within a file the order is random, but the same in every call.
    """
    for file in files:
        pairs = [(pair["source"], pair["target"]) for pair in read_pairs(file)]
        random.Random(SEED).shuffle(pairs)
        yield from pairs


def _digest(
    rows: Sequence[tuple[str, str]], files: Sequence[BitextFile], wanted: int, training_pairs: int
) -> str:
    """Return a hash of everything that the links depend on, as a name for their file.

    Training files count by their names and sizes, because reading them would take long.

    Args:
        rows: sentence pairs to measure on.
        files: files to train the aligner on.
        wanted: number of rows to link.
        training_pairs: largest number of training pairs.
    """
    places = [disk_path(path) for file in files for path in file.paths]
    text = [(path.name, path.stat().st_size if path.is_file() else None) for path in places]
    chosen = [wanted, training_pairs, LONGEST, SEED, MIN_COUNT, ITERATIONS, NO_SOURCE, TENSION]
    return hashlib.sha256(json.dumps([rows, text, chosen]).encode()).hexdigest()[:12]


def _read(path: Path) -> list[AlignedPair]:
    """Read a file of sentence pairs with links that `reference` has written.

    Raises:
        UserError: the file is damaged.
    """
    try:
        found = []
        for row in read_object(path)["pairs"]:
            links = (np.array(row[kind], np.int64).reshape(-1, 2) for kind in ("sure", "possible"))
            found.append(AlignedPair(row["source"], row["target"], *links))
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not hold links ({error!r}): delete it") from error
