"""Words of sentences, and silver links between the words of measured pairs, made once and kept.

There is no gold word alignment for these languages, so an aligner that sees no model's states makes the reference
(`experiments.silver`): trained on parallel text and on the measured pairs themselves, whose translations it is given,
too. A sure link joins words that the text has at least `MIN_COUNT` times, since an aligner's links of rarer words are
guesses.
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

from dap.errors import UserError
from dap.file_io import read_object, write_json
from dap.text import BitextFile, disk_path, find_bitext, read_pairs
from eval_retrieval import PairsByLanguage
from experiments.silver import ITERATIONS, NO_SOURCE, TENSION, align_words

NO_SPACES = ("ja", "th", "zh")
MIN_COUNT = 3
LONGEST = 30  # words a side of a training pair
SEED = 0


@dataclass(frozen=True)
class AlignedPair:
    """A sentence pair and the links between its words.

    Attributes:
        source, target: the sentences.
        sure, possible: (L, 2), numbers of a source word and a target word; sure links are possible, too.
    """

    source: str
    target: str
    sure: np.ndarray
    possible: np.ndarray


def word_spans(sentence: str) -> list[tuple[int, int]]:
    """First character of each word and the one after its last; every other character but space is a word of its own.

    A word is letters, marks and digits, with apostrophes inside.

    >>> [("Don't go, Müller!")[start:end] for start, end in word_spans("Don't go, Müller!")]
    ["Don't", 'go', ',', 'Müller', '!']
    """
    return [match.span() for match in _word_pattern().finditer(sentence)]


@cache
def _word_pattern() -> re.Pattern[str]:
    """`\\w` has no combining marks, which are parts of words in Arabic and Devanagari."""
    marks = "".join(
        map(chr, (i for i in range(sys.maxunicode) if unicodedata.category(chr(i)).startswith("M")))
    )
    letters = rf"(?:[^\W_]|[{re.escape(marks)}])+"
    return re.compile(rf"{letters}(?:['’]{letters})*|\S")


def lower_words(sentence: str) -> list[str]:
    """The words as an aligner compares them."""
    return [sentence[start:end].lower() for start, end in word_spans(sentence)]


def is_trivial(source: str, target: str) -> bool:
    """Whether a link says nothing about translation: equal words, or one that has no letter and no digit.

    >>> is_trivial("tom", "tom"), is_trivial("haus", "house"), is_trivial(",", "and")
    (True, False, True)
    """
    return source == target or not all(any(map(str.isalnum, word)) for word in (source, target))


def reference(
    pairs: PairsByLanguage, train_data: Sequence[str], wanted: int, training_pairs: int, folder: str
) -> dict[str, list[AlignedPair]]:
    """Language code -> its first `wanted` pairs with silver links, from `folder` where it has those of this text.

    Args:
        pairs: measured text, all of which the aligner is trained on.
        train_data: parallel text, as training takes it; each file is shuffled, those given first are used up first.
        wanted: pairs to link.
        training_pairs: most pairs of `train_data` a language, of at most `LONGEST` words a side.
        folder: where the links are kept.

    Raises:
        ValueError: a language without spaces between words or without training text, or a file that holds no links.
    """
    if refused := [code for code in pairs if code in NO_SPACES]:
        raise UserError(
            f"{' '.join(refused)}: written without spaces between words, which are needed; leave it out"
        )
    found = find_bitext(train_data)
    if absent := [code for code in pairs if code not in found]:
        raise UserError(f"{' '.join(absent)}: {', '.join(train_data)} holds {' '.join(found)} only")
    aligned = {}
    for code, rows in pairs.items():
        path = Path(folder, f"{code}-{_digest(rows, found[code], wanted, training_pairs)}.json")
        if not path.is_file():
            linked = link_pairs(rows, _shuffled(found[code]), wanted, training_pairs)
            links = [
                vars(pair) | {"sure": pair.sure.tolist(), "possible": pair.possible.tolist()}
                for pair in linked
            ]
            write_json({"pairs": links}, path)
        aligned[code] = _read(path)
    return aligned


def link_pairs(
    rows: Sequence[tuple[str, str]],
    text: Iterable[tuple[str, str]],
    wanted: int,
    training_pairs: int,
) -> list[AlignedPair]:
    """The first `wanted` of `rows` with the links of an aligner trained on `rows` and on pairs of `text`.

    Raises:
        ValueError: fewer than `wanted` rows.
    """
    if wanted > len(rows):
        raise UserError(
            f"{wanted} pairs are asked for, the text has {len(rows)}: ask for as many or fewer"
        )
    split = ([lower_words(side) for side in pair] for pair in text)
    short = (sides for sides in split if all(0 < len(side) <= LONGEST for side in sides))
    everything = [
        *([lower_words(side) for side in pair] for pair in rows),
        *islice(short, training_pairs),
    ]
    source, target = zip(*everything, strict=True)
    often = [
        {word for word, n in Counter(chain(*side)).items() if n >= MIN_COUNT}
        for side in (source, target)
    ]
    aligned = []
    for row, (sure, possible) in enumerate(align_words(source, target, wanted)):
        known = [source[row][i] in often[0] and target[row][j] in often[1] for i, j in sure]
        aligned.append(AlignedPair(*rows[row], sure[np.array(known, bool)], possible))
    return aligned


def _shuffled(files: Iterable[BitextFile]) -> Iterator[tuple[str, str]]:
    for file in files:
        pairs = [(pair["source"], pair["target"]) for pair in read_pairs(file)]
        random.Random(SEED).shuffle(pairs)
        yield from pairs


def _digest(
    rows: Sequence[tuple[str, str]], files: Sequence[BitextFile], wanted: int, training_pairs: int
) -> str:
    """Of all that decides about the links; of the training text its files' names and sizes."""
    places = [disk_path(path) for file in files for path in file.paths]
    text = [(path.name, path.stat().st_size if path.is_file() else None) for path in places]
    chosen = [wanted, training_pairs, LONGEST, SEED, MIN_COUNT, ITERATIONS, NO_SOURCE, TENSION]
    return hashlib.sha256(json.dumps([rows, text, chosen]).encode()).hexdigest()[:12]


def _read(path: Path) -> list[AlignedPair]:
    try:
        found = []
        for row in read_object(path)["pairs"]:
            links = (np.array(row[kind], np.int64).reshape(-1, 2) for kind in ("sure", "possible"))
            found.append(AlignedPair(row["source"], row["target"], *links))
        return found
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} does not hold links ({error!r}): delete it") from error
