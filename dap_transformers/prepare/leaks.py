"""Find training texts that equal, or nearly equal, a sentence of the evaluation sets (leaks).

Texts are compared after `dap_transformers.languages.normalise`: letters and digits, case folded.

Two texts are *near* if each contains at least the share `threshold` of the other's character
n-grams, counted with repetitions: |A ∩ B| ≥ threshold · max(|A|, |B|). The length n depends on the
evaluation sentence (`BANDS`):

- Short sentences have a smaller n, because one changed word spoils most of their longer n-grams.
- Sentences mostly in Chinese characters, kana or hangul have a smaller n, because one such
  character says more. A text of this kind is never near to a text of the other kind.
- Texts with fewer than n letters are only compared for equality.

In very short sentences one replaced word spoils most n-grams, so some near copies are not found.

The search is exact. Most texts are ruled out by its first step, because less than the share
`threshold` of their n-grams occurs in any evaluation sentence. A text of T n-grams shares at least
S = ⌈threshold · T⌉ of them with a sentence that it is near to, and misses at most T - S. So of any
T - S + k n-grams, at least k are shared. The search looks up the T - S + k rarest n-grams with
k = `COMMON`, and compares the text only with sentences that hold k of them.

Shapes: N texts, G n-grams.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl

from dap_transformers.files import read_json
from dap_transformers.languages import code_points, normalise_all, text_keys


class Band(NamedTuple):
    """A range of lengths of evaluation sentences, which are compared by n-grams of the same n.

    Attributes:
        is_wide: whether the sentences are mostly Chinese characters, kana or hangul.
        n: letters of an n-gram.
        shortest: smallest number of letters of a sentence.
        longest: largest number of letters of a sentence.
    """

    is_wide: bool
    n: int
    shortest: int
    longest: int


#: With n = 6 for long sentences, most English n-grams would occur in a test set, and the first step
#: of the search would rule out nothing.
BANDS = (
    Band(False, 4, 0, 23),
    Band(False, 5, 24, 47),
    Band(False, 8, 48, 2**31),
    Band(True, 2, 0, 23),
    Band(True, 3, 24, 2**31),
)
#: Rare n-grams that a text must share with a sentence before both are compared in full. A larger
#: number means a few more look-ups, but far fewer comparisons.
COMMON = 4
#: Characters from the CJK blocks on. Hangul and kana are above them.
_WIDE = r"[\x{2E80}-\x{10FFFF}]"
#: Slots in the table of n-grams for each n-gram, at least.
_SPARSITY = 4
_ROUNDING = 1e-9


class LeakIndex:
    """An index of evaluation sentences. Called with texts, it finds those that (nearly) equal one.

    Args:
        sentences: the evaluation sentences, not normalised.
        threshold: two texts are nearly equal if they share at least this share of their character
            n-grams, above 0 and up to 1 (see `containment`). None finds only texts that are equal
            after normalising.
    """

    def __init__(self, sentences: Sequence[str], threshold: float | None = 0.7) -> None:
        letters = normalise_all(sentences)
        measured = _measured(letters, text_keys(letters))
        measured = measured.with_columns(pl.Series("evaluation", sentences, pl.String))
        self._sentences = measured.unique("key", keep="first", maintain_order=True)
        self._bands = []
        if threshold is not None:
            self._bands = [BandIndex(self._sentences, band, threshold) for band in BANDS]

    def __call__(self, letters: Sequence[str], keys: np.ndarray) -> pl.DataFrame:
        """Find the texts that equal or nearly equal an evaluation sentence.

        Args:
            letters: N texts, normalised by `dap_transformers.languages.normalise_all`.
            keys: their hashes (`dap_transformers.languages.text_keys`), uint64 (N,).

        Returns:
            A table with one row for each text that was found, in the order of the texts:

            - `row`: the number of the text, from 0.
            - `evaluation`: the evaluation sentence that is most similar to it, as it was given.
            - `equal`: whether both are equal after normalising.
            - `containment`: the share of n-grams in common (see `containment`), 1 for equal texts.
        """
        texts = _measured(letters, keys)
        equal = texts.join(self._sentences.select("key", "evaluation"), on="key")
        others = texts.join(self._sentences, on="key", how="anti")
        found = [equal.select("row", "evaluation", equal=True, containment=1.0)]
        found += [band.near(others) for band in self._bands]

        best_first = pl.concat(found).sort("containment", descending=True, maintain_order=True)
        best = best_first.unique("row", keep="first", maintain_order=True)
        return best.sort("row")


@lru_cache(maxsize=1)
def load_index(path: Path, changed: int) -> LeakIndex:
    """Build a `LeakIndex` from a file, once per process.

    Args:
        path: a JSON file with the arguments of `LeakIndex`: `sentences` and `threshold`.
        changed: the file's modification time. If it differs from that of the last call, the index
            is built again.
    """
    return LeakIndex(**read_json(path))


def _measured(letters: Sequence[str], keys: np.ndarray) -> pl.DataFrame:
    """Make a table of normalised texts, with the length and script that decide their `Band`.

    Args:
        keys: their hashes, uint64 (N,).

    Returns:
        N rows with the columns `row` (number of the text, from 0), `letters` (the text), `key`
        (its hash), `length` (in characters) and `is_wide` (mostly Chinese characters, kana or
        hangul).
    """
    schema = {"letters": pl.String, "key": pl.UInt64}
    texts = pl.DataFrame({"letters": letters, "key": keys}, schema=schema).with_row_index("row")
    length = pl.col("letters").str.len_chars()
    wide_letters = pl.col("letters").str.count_matches(_WIDE)
    return texts.with_columns(length=length.cast(pl.Int64), is_wide=2 * wide_letters > length)


class BandIndex:
    """An index of the n-grams of all evaluation sentences of one band.

    Args:
        sentences: the evaluation sentences of all bands: a table of `_measured`, with the
            sentences as they were given in the column `evaluation`.
        band: only the sentences of this range of lengths are indexed.
        threshold: two texts are near if they share at least this share of their n-grams (see
            `containment`).
    """

    def __init__(self, sentences: pl.DataFrame, band: Band, threshold: float) -> None:
        self.band = band
        self.threshold = threshold
        in_band = pl.col("length").is_between(band.shortest, band.longest)
        self._sentences = sentences.filter(in_band, is_wide=band.is_wide)

        # Which sentences hold which n-grams. `other_size` is the number of a sentence's n-grams.
        owners, grams = _grams(self._sentences["letters"], band.n)  # (G,), (G,)
        holders = pl.DataFrame({"sentence": owners, "gram": grams})
        self._holders = holders.with_columns(other_size=pl.len().over("sentence")).unique()

        # A table of how many sentences hold an n-gram, by the first bits of its hash. Different
        # n-grams may share a slot, so a count may be too large but not too small.
        bits = max((len(self._holders) * _SPARSITY).bit_length(), 10)
        self._shift = np.uint64(64 - bits)
        slots = self._holders["gram"].to_numpy() >> self._shift
        counts = np.bincount(slots, minlength=1 << bits)
        self._holder_counts = np.minimum(counts, 2**16 - 1).astype(np.uint16)

    def near(self, texts: pl.DataFrame) -> pl.DataFrame:
        """Find the texts that are near to an evaluation sentence of this index.

        Two texts are near if they share at least the share `threshold` of their n-grams (see
        `containment`).

        Args:
            texts: a table of `_measured`.

        Returns:
            A table with the columns that a call of `LeakIndex` returns. `equal` is always False.
            A text that is near to several sentences has several rows.
        """
        n = self.band.n
        smallest = max(self.band.shortest - n + 1, 1) * self.threshold
        largest = max(self.band.longest - n + 1, 1) / self.threshold
        size = pl.col("length") - n + 1  # n-grams of a text
        fits = size.is_between(smallest - _ROUNDING, largest + _ROUNDING)
        texts = texts.filter(fits, is_wide=self.band.is_wide).with_columns(size=size)

        candidates = self._candidates(texts)
        text = texts[candidates["text"]]
        sentence = self._sentences[candidates["sentence"]]
        shares = []
        for one, other in zip(text["letters"], sentence["letters"]):
            shares.append(containment(one, other, n))

        found = text.select("row", sentence["evaluation"], pl.lit(False).alias("equal"))
        found = found.with_columns(pl.Series("containment", shares, pl.Float64))
        return found.filter(pl.col("containment") >= self.threshold - _ROUNDING)

    def _candidates(self, texts: pl.DataFrame) -> pl.DataFrame:
        """Find the pairs of a text and a sentence that must be compared in full.

        Such a pair shares at least `COMMON` of the text's rarest n-grams (see the module's
        docstring), and both have a similar number of n-grams. All near pairs are among the
        candidates.

        Returns:
            A table of pairs. The column `text` has the position of the text in `texts`, and
            `sentence` that of the evaluation sentence in the index.
        """
        owners, grams = _grams(texts["letters"], self.band.n)  # (G,), (G,)
        holder_counts = self._holder_counts[grams >> self._shift]  # (G,)

        # Drop the texts with too many n-grams that no sentence holds.
        known = np.bincount(owners[holder_counts > 0], minlength=len(texts))  # (N,)
        is_hopeful = known >= self._needed(texts["size"]).to_numpy()  # (N,)
        asked = pl.DataFrame({"text": owners, "gram": grams, "holders": holder_counts})
        asked = asked.filter(is_hopeful[owners])

        # Take the rarest n-grams of each text.
        size, other_size = pl.col("size"), pl.col("other_size")
        common = pl.min_horizontal(self._needed(size), COMMON)
        ordered = asked.sort("text", "holders").with_columns(
            size=pl.len().over("text"), place=pl.int_range(pl.len()).over("text")
        )
        rarest = ordered.filter(pl.col("place") < size - self._needed(size) + common)

        # Find the sentences of similar size that hold enough of them.
        larger = pl.max_horizontal(size, other_size)
        has_similar_size = pl.min_horizontal(size, other_size) >= self._needed(larger)
        joined = rarest.join(self._holders, on="gram").filter(has_similar_size)
        shared = joined.group_by("text", "sentence", "size").len()
        return shared.filter(pl.col("len") >= common).sort("text", "sentence")

    def _needed(self, size: pl.Series | pl.Expr) -> pl.Series | pl.Expr:
        """Return how many n-grams two near texts have in common at least: the share `threshold`."""
        return (size * self.threshold - _ROUNDING).ceil()


def _grams(letters: pl.Series, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all n-grams of texts. An n-gram lies within one text.

    Returns:
        For each n-gram, the number of its text, int64 (G,), and its hash, uint64 (G,). Texts with
        fewer than n letters have none.
    """
    codes = code_points("".join(f"{text}\n" for text in letters))
    places = max(len(codes) - n, 0)
    grams = np.zeros(places, np.uint64)
    for first in range(n):
        grams += codes[first : first + places]
        grams *= np.uint64(0x9E3779B97F4A7C15)

    owners = np.repeat(np.arange(len(letters)), letters.str.len_chars() + 1)
    is_within_text = owners[:places] == owners[n:]  # others run into the next text
    return owners[:places][is_within_text], grams[is_within_text]


def containment(text: str, sentence: str, n: int) -> float:
    """Return the share of common character n-grams of two texts, relative to the longer one.

    Repetitions count: |A ∩ B| / max(|A|, |B|), where A and B are the bags of n-grams.

    Args:
        text: a normalised text of n letters or more.
        sentence: another one.
        n: letters of an n-gram.

    Returns:
        A number from 0 to 1.
    """
    one = Counter(text[first : first + n] for first in range(len(text) - n + 1))
    other = Counter(sentence[first : first + n] for first in range(len(sentence) - n + 1))
    return (one & other).total() / max(one.total(), other.total())
