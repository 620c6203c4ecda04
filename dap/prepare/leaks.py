"""Find training text that equals, or nearly equals, a sentence of the evaluation sets (arrays and text only).

Texts are compared as `dap.training.normalise` leaves them: letters and digits, case folded. Two texts are *near* when
both hold at least `threshold` of the other's character n-grams, counted with repetitions: |A ∩ B| ≥ threshold ·
max(|A|, |B|). n is that of the evaluation sentence's `BANDS`: smaller for a short one, where a single changed word
spoils most of the longer n-grams, and for one mostly in Chinese characters, kana or hangul, where a character says
more; such a text is never near to one of the other kind. Texts without n letters are compared for equality alone.

Near copies of short sentences are found in part: with one word replaced in each sentence of Tatoeba and a threshold
of 0.7, 610 of 998 English ones (32 letters at the median), 405 of 989 Russian (23) and 365 of 989 Hindi (14). With
n = 8 for all it was 413, 222 and 164.

The search is exact. For most texts the first step ends it: less than `threshold` of their n-grams occur in any
evaluation sentence. A text of T n-grams may miss T - ⌈threshold · T⌉ of them, so k of any T - ⌈threshold · T⌉ + k
lead to the sentence that it is near: the rarest ones are looked up, and what `COMMON` of them lead to is compared.

Shapes: N texts, E evaluation sentences, G n-grams of all texts.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dap.errors import UserError
from dap.files import read_object, write_json
from dap.prepare.deduplication import Letters, mix, normalise_all


class Band(NamedTuple):
    """The evaluation sentences whose n-grams have the same length."""

    wide: bool  # whether they are mostly in Chinese characters, kana or hangul
    n: int  # letters of an n-gram
    shortest: int  # letters of a sentence
    longest: int


#: With n = 6 in long ones, most of English is in a test set's n-grams, and nothing is ruled out early.
BANDS = (
    Band(False, 4, 0, 23),
    Band(False, 5, 24, 47),
    Band(False, 8, 48, 2**31),
    Band(True, 2, 0, 23),
    Band(True, 3, 24, 2**31),
)
COMMON = 4  # k, or all that must be shared: more n-grams to look up, but far fewer sentences to compare
_WIDE = 0x2E80  # first code point of the CJK blocks; hangul and kana are above it, too
_SPARSITY = 16  # bits of the filter for each n-gram
_ROUNDING = 1e-9


_LEAKS = {"row": pl.Int64, "evaluation": pl.String, "equal": pl.Boolean, "containment": pl.Float64}


class LeakIndex:
    """The evaluation sentences, ready to be looked up.

    Args:
        sentences: as they stand.
        threshold: least containment of near texts, over 0 to 1; None finds equal texts alone.
    """

    def __init__(self, sentences: Sequence[str], threshold: float | None = 0.7) -> None:
        if threshold is not None and not 0.0 < threshold <= 1.0:
            raise UserError(f"the leak threshold is a share of n-grams, over 0 to 1, not {threshold}")
        self.sentences, self.threshold = list(sentences), threshold
        letters = normalise_all(self.sentences)
        keys = letters.keys()
        self._order = np.argsort(keys, kind="stable")  # (E,)
        self._keys = keys[self._order]
        self._grams = [] if threshold is None else [GramIndex(letters, band, threshold) for band in BANDS]

    def __call__(self, letters: Letters, keys: np.ndarray | None = None) -> pl.DataFrame:
        """The texts among these that are equal or near to a sentence, in their order.

        Args:
            keys: `letters.keys()`, where they are known.

        Returns:
            `row`, the number of the text; `evaluation`, the sentence that it is most like; whether they are `equal` as
            normalised; `containment`, the least share of n-grams that both have of the other, 1 for equal ones.
        """
        keys = letters.keys() if keys is None else keys
        places, equal = _find(self._keys, keys)  # (N,), (N,)
        found = {row: (int(self._order[places[row]]), 1.0) for row in np.flatnonzero(equal).tolist()}
        kinds = _is_wide(letters)
        for index in self._grams:
            for row, sentence, share in index.near(letters, ~equal & (kinds == index.band.wide)):
                if share > found.get(row, (0, 0.0))[1]:
                    found[row] = sentence, share
        rows = [(row, self.sentences[found[row][0]], bool(equal[row]), found[row][1]) for row in sorted(found)]
        return pl.DataFrame(rows, schema=_LEAKS, orient="row")

    def save(self, path: Path) -> None:
        """Writes what the index is made of."""
        write_json({"sentences": self.sentences, "threshold": self.threshold}, path)

    @staticmethod
    def load(path: Path) -> "LeakIndex":
        """The index that `save` wrote; a process makes it once for all its files."""
        return _load(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _load(path: Path, changed: int) -> LeakIndex:
    return LeakIndex(**read_object(path))


def _find(ascending: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each value stands, or would stand, in an ascending array, and whether it is there: int64, bool (N,)."""
    if not len(ascending):
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    places = np.minimum(np.searchsorted(ascending, values), len(ascending) - 1)
    return places, ascending[places] == values


def _is_wide(letters: Letters) -> np.ndarray:
    """Whether most letters of each text are Chinese characters, kana or hangul: bool (N,)."""
    return 2 * _sums(letters.codes >= _WIDE, letters.bounds) > letters.lengths


def _sums(values: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Sum of the values of each text: int64 (N,)."""
    running = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return np.diff(running[bounds])


class GramIndex:
    """The n-grams of the sentences of one band.

    Args:
        letters: all evaluation sentences.
        threshold: see the module's docstring.
    """

    def __init__(self, letters: Letters, band: Band, threshold: float) -> None:
        self.band, self.n, self.threshold, self._letters = band, band.n, threshold, letters
        n, lengths = band.n, letters.lengths
        here = (lengths >= band.shortest) & (lengths <= band.longest) & (_is_wide(letters) == band.wide)
        self._sizes = np.where(here, np.maximum(lengths - n + 1, 0), 0)  # (E,)
        places, sentences = _places(letters.bounds[:-1], self._sizes)
        grams = _grams(letters.codes, n)[places]
        order = np.argsort(grams, kind="stable")
        grams, sentences = grams[order], sentences[order].astype(np.int32)
        new = np.diff(grams, prepend=~grams[:1]) != 0
        once = new | (np.diff(sentences, prepend=-1) != 0)  # an n-gram twice in a sentence
        self._sentences = sentences[once]  # of one n-gram after the other
        self._grams = grams[new]  # ascending
        self._starts = np.append(np.flatnonzero(new[once]), len(self._sentences))
        self._bits = max(int(len(self._grams) * _SPARSITY).bit_length(), 10)
        self._filter = np.zeros(1 << (self._bits - 3), np.uint8)
        places = self._places_in_filter(self._grams)
        np.bitwise_or.at(self._filter, places >> 3, np.uint8(1) << (places & 7).astype(np.uint8))

    def _places_in_filter(self, grams: np.ndarray) -> np.ndarray:
        return (grams >> np.uint64(64 - self._bits)).astype(np.int64)

    def near(self, letters: Letters, asked: np.ndarray) -> list[tuple[int, int, float]]:
        """(text, sentence, containment) of all near ones among the texts `asked` for, bool (N,)."""
        sizes = np.maximum(letters.lengths - self.n + 1, 0)  # (N,)
        least, most = (max(length - self.n + 1, 1) for length in (self.band.shortest, self.band.longest))
        alike = (sizes >= least * self.threshold - _ROUNDING) & (sizes * self.threshold <= most + _ROUNDING)
        sizes[~asked | ~alike] = 0  # left out: texts that are too short or too long to be near to any sentence
        if not sizes.any() or not len(self._grams):
            return []
        grams = _grams(letters.codes, self.n)
        sizes[self._known(letters, grams) < _needed(sizes, self.threshold)] = 0
        places, rows = _places(letters.bounds[:-1], sizes)
        return self._compare(letters, *self._candidates(rows, grams[places]))

    def _known(self, letters: Letters, grams: np.ndarray) -> np.ndarray:
        """How many n-grams of each text are in the index, or a little more: int64 (N,)."""
        places = self._places_in_filter(grams)
        known = np.zeros(len(letters.codes), dtype=np.uint8)
        known[: len(grams)] = (self._filter[places >> 3] >> (places & 7).astype(np.uint8)) & 1
        for back in range(1, self.n):  # n-grams that run into the next text
            known[np.maximum(letters.bounds[1:] - back, 0)] = 0
        return _sums(known, letters.bounds)

    def _candidates(self, rows: np.ndarray, grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Texts and sentences of like length that share `COMMON` of the text's rarest n-grams.

        Args:
            rows, grams: text of each n-gram, ascending, and the n-gram: (G,).
        """
        place, known = _find(self._grams, grams)
        spread = np.where(known, self._starts[place + 1] - self._starts[place], 0)  # sentences that have the n-gram
        order = np.lexsort((spread, rows))
        rows, place, spread = rows[order], place[order], spread[order]
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        size = np.diff(first, append=len(rows))  # n-grams of each text
        number = np.arange(len(rows)) - np.repeat(first, size)
        needed = _needed(size, self.threshold)
        common = np.minimum(needed, COMMON)
        rarest = number < np.repeat(size - needed + common, size)
        places, which = _places(self._starts[place[rarest]], spread[rarest])
        texts, sentences = rows[rarest][which], self._sentences[places]
        sizes, others = np.repeat(size, size)[rarest][which], self._sizes[sentences]
        alike = np.minimum(sizes, others) >= _needed(np.maximum(sizes, others), self.threshold)
        pairs, shared = np.unique((texts[alike] << 32) | sentences[alike], return_counts=True)
        least = np.repeat(common, size)[np.searchsorted(rows, pairs >> 32)]
        pairs = pairs[shared >= least]
        return pairs >> 32, pairs & 0xFFFFFFFF

    def _compare(self, letters: Letters, texts: np.ndarray, sentences: np.ndarray) -> list[tuple[int, int, float]]:
        found, seen, grams = [], -1, Counter()
        for text, sentence in zip(texts.tolist(), sentences.tolist()):
            if text != seen:
                seen, grams = text, self._bag(letters, text)
            others = self._bag(self._letters, sentence)
            share = (grams & others).total() / max(grams.total(), others.total())
            if share >= self.threshold - _ROUNDING:
                found.append((text, sentence, share))
        return found

    def _bag(self, letters: Letters, row: int) -> Counter:
        return Counter(_grams(letters.codes[letters.bounds[row] : letters.bounds[row + 1]], self.n).tolist())


def _needed(sizes: np.ndarray, threshold: float) -> np.ndarray:
    """n-grams that a near text must share, of so many; 1 at least, so that a text without n-grams has too few."""
    return np.maximum(np.ceil(sizes * threshold - _ROUNDING), 1).astype(np.int64)


def _grams(codes: np.ndarray, n: int) -> np.ndarray:
    """A hash of the n code points from each place on: uint64 (C - n + 1,)."""
    places = max(len(codes) - n + 1, 0)
    grams = np.zeros(places, np.uint64)
    for first in range(n):
        grams *= np.uint64(0x9E3779B97F4A7C15)
        grams += codes[first : first + places]
    return mix(grams)


def _places(starts: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`starts[i], …, starts[i] + sizes[i] - 1` for all i, one after the other, and i for each."""
    rows = np.repeat(np.arange(len(sizes)), sizes)
    before = np.cumsum(sizes) - sizes
    return np.arange(len(rows)) + np.repeat(starts - before, sizes), rows
