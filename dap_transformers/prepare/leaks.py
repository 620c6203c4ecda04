"""Find training texts that equal, or nearly equal, a sentence of the evaluation sets (leaks).

Texts are compared after `dap_transformers.text_keys.normalise`: letters and digits, case folded.

Two texts are *near* if each contains at least the share `threshold` of the other's character
n-grams, counted with repetitions: |A ∩ B| ≥ threshold · max(|A|, |B|). Evaluation sentences with
few letters, or mostly in Chinese characters, kana or hangul (wide script), have a smaller n
(`BANDS`), because one changed word spoils more of their n-grams. A text in wide script is never
near to one in another script. Texts with fewer than n letters are only compared for equality.

The search is exact, but it compares few texts in full. It uses that a text of T n-grams shares at
least S = ⌈threshold · T⌉ of them with a sentence that it is near to. For T = 20 and a threshold of
0.7, S is 14:

1. If fewer than 14 of the 20 n-grams occur in any evaluation sentence, the text is near to none.
   This rules out most texts.
2. If all 20 occur, at most 6 of them are not shared. So of the 10 n-grams that occur in the fewest
   sentences, at least 10 - 6 = 4 (`COMMON`) are shared. Only sentences that hold 4 of these 10 are
   compared in full.

Shapes: N texts, G n-grams.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import polars as pl

from dap_transformers.text_keys import code_points, normalise_all, text_keys


class Band(NamedTuple):
    """Evaluation sentences of `shortest` to `longest` letters, which are compared by n-grams.

    `is_wide` tells whether they are mostly Chinese characters, kana or hangul.
    """

    is_wide: bool
    n: int
    shortest: int
    longest: int


#: Long sentences have n = 8. With 6, most English n-grams would occur in a test set, and the first
#: step of the search would rule out nothing.
BANDS = (
    Band(False, 4, 0, 23),
    Band(False, 5, 24, 47),
    Band(False, 8, 48, 2**31),
    Band(True, 2, 0, 23),
    Band(True, 3, 24, 2**31),
)
#: Rare n-grams that a text must share with a sentence before both are compared in full, 4 in the
#: example. A larger number means a few more look-ups, but far fewer comparisons.
COMMON = 4
#: Characters from the CJK blocks on. Hangul and kana are above them.
_WIDE = r"[\x{2E80}-\x{10FFFF}]"
_ROUNDING = 1e-9


class LeakIndex:
    """An index of evaluation sentences. Called with texts, it finds those that (nearly) equal one.

    Args:
        sentences: the evaluation sentences, not normalised.
        threshold: the least share of n-grams that near texts have in common, up to 1. With 0 only
            texts are found that are equal after normalising.
    """

    def __init__(self, sentences: Sequence[str], threshold: float = 0.7) -> None:
        table = measured(pl.Series("evaluation", sentences, pl.String))
        self._sentences = table.unique("key", keep="first", maintain_order=True)
        self._bands = []
        if threshold:
            self._bands = [BandIndex(self._sentences, band, threshold) for band in BANDS]

    def __call__(self, texts: pl.DataFrame) -> pl.DataFrame:
        """Find the texts of a table of `measured` that equal or nearly equal a sentence.

        Their rows are returned in order, with the most similar sentence (`evaluation`), whether
        both are `equal` after normalising, and their `containment`, which is 1 for equal texts.
        """
        sentences = self._sentences.select("key", evaluation="text")
        equal = texts.join(sentences, on="key").with_columns(equal=True, containment=1.0)
        others = texts.join(sentences, on="key", how="anti")
        found = [equal, *(band.near(others) for band in self._bands)]

        best_first = pl.concat(found).sort("containment", descending=True, maintain_order=True)
        return best_first.unique("row", keep="first", maintain_order=True).sort("row")


#: Builds a `LeakIndex`, once per process.
load_index = lru_cache(maxsize=1)(LeakIndex)


def measured(texts: pl.Series) -> pl.DataFrame:
    """Make a table of N texts with their letters, a hash of these, and what decides their `Band`.

    `row` is the number of the text, and `side` the name of the series.
    """
    letters = normalise_all(texts.to_list())
    column = pl.Series(letters, dtype=pl.String)
    table = pl.DataFrame({"text": texts, "letters": column, "key": text_keys(letters)})
    length = pl.col("letters").str.len_chars().cast(pl.Int64)
    wide_letters = pl.col("letters").str.count_matches(_WIDE)
    return table.with_row_index("row").with_columns(
        side=pl.lit(texts.name), length=length, is_wide=2 * wide_letters > length
    )


class BandIndex:
    """An index of the n-grams of those evaluation sentences, a table of `measured`, in a band."""

    def __init__(self, sentences: pl.DataFrame, band: Band, threshold: float) -> None:
        self.band = band
        self.threshold = threshold
        in_band = pl.col("length").is_between(band.shortest, band.longest)
        self._sentences = sentences.filter(in_band, is_wide=band.is_wide)

        #: The different n-grams of each sentence: `gram`, `sentence` (its place), `sentence_size`.
        self._postings = _grams(self._sentences["letters"], band.n).unique()
        self._postings = self._postings.rename({"text": "sentence", "size": "sentence_size"})
        #: In how many sentences an n-gram occurs: `gram`, `frequency`.
        self._frequencies = self._postings.group_by("gram").len("frequency")

    def near(self, texts: pl.DataFrame) -> pl.DataFrame:
        """Return the texts that are near to a sentence of this index, as a `LeakIndex` does.

        A text that is near to several sentences has several rows.
        """
        shortest = self.band.shortest * self.threshold - _ROUNDING
        longest = self.band.longest / self.threshold + _ROUNDING
        fits = pl.col("length").is_between(shortest, longest)
        texts = texts.filter(fits, is_wide=self.band.is_wide)

        candidates = self._candidates(texts)
        text = texts[candidates["text"]]
        sentence = self._sentences[candidates["sentence"]]
        shares = []
        for one, other in zip(text["letters"], sentence["letters"]):
            shares.append(containment(one, other, self.band.n))

        evaluation = sentence["text"].alias("evaluation")
        share = pl.Series("containment", shares, pl.Float64)
        near = text.with_columns(evaluation, pl.lit(False).alias("equal"), share)
        return near.filter(pl.col("containment") >= self.threshold - _ROUNDING)

    def _candidates(self, texts: pl.DataFrame) -> pl.DataFrame:
        """Find the pairs of a text and a sentence that must be compared in full.

        All near pairs are among them, as the docstring of the module shows. The columns `text` and
        `sentence` have the places in `texts` and in the index.
        """
        least = self._least("size")

        # Step 1: the n-grams that occur in sentences, of texts that have enough of these.
        known = _grams(texts["letters"], self.band.n).join(self._frequencies, on="gram")
        known = known.with_columns(unshared=pl.len().over("text") - least)
        known = known.filter(pl.col("unshared") >= 0)

        # Step 2: of these, the rarest n-grams of each text, and the sentences that hold them.
        common = pl.min_horizontal(least, COMMON)
        rank = pl.int_range(pl.len()).over("text")
        rarest = known.sort("text", "frequency").filter(rank < pl.col("unshared") + common)
        found = rarest.join(self._postings, on="gram")
        found = found.filter(
            pl.col("sentence_size") >= least, pl.col("size") >= self._least("sentence_size")
        )
        shared = found.group_by("text", "sentence", "size").len("shared")
        return shared.filter(pl.col("shared") >= common).sort("text", "sentence")

    def _least(self, size: str) -> pl.Expr:
        """Return S for a column of sizes: how many n-grams a near text shares at least."""
        return (pl.col(size) * self.threshold - _ROUNDING).ceil()


def _grams(letters: pl.Series, n: int) -> pl.DataFrame:
    """Return the hashes of the G n-grams of N texts, the numbers of their texts, and their sizes.

    A size is the number of n-grams of a text. Texts with fewer than n letters have none.
    """
    codes = code_points("".join(f"{text}\n" for text in letters))
    places = max(len(codes) - n, 0)
    grams = np.zeros(places, np.uint64)
    for first in range(n):
        grams += codes[first : first + places]
        grams *= np.uint64(0x9E3779B97F4A7C15)

    lengths = letters.str.len_chars().cast(pl.Int64).to_numpy()
    owners = np.repeat(np.arange(len(letters)), lengths + 1)
    is_within_text = owners[:places] == owners[n:]  # others run into the next text
    text = owners[:places][is_within_text]
    size = (lengths - n + 1)[text]
    return pl.DataFrame({"text": text, "gram": grams[is_within_text], "size": size})


def containment(text: str, sentence: str, n: int) -> float:
    """Return the share of common character n-grams of two texts, relative to the longer one.

    Both are normalised and have n letters or more. Repetitions count: |A ∩ B| / max(|A|, |B|),
    where A and B are the bags of n-grams.
    """
    one = Counter(text[first : first + n] for first in range(len(text) - n + 1))
    other = Counter(sentence[first : first + n] for first in range(len(sentence) - n + 1))
    return (one & other).total() / max(one.total(), other.total())
