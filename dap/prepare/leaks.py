"""Find training text that equals, or nearly equals, a sentence of the evaluation sets (arrays and text only).

Texts are compared as `dap.languages.normalise` leaves them: letters and digits, case folded. Two texts are *near* when
both hold at least `threshold` of the other's character n-grams, counted with repetitions: |A ∩ B| ≥ threshold ·
max(|A|, |B|). n is that of the evaluation sentence's `BANDS`: smaller for a short one, where a single changed word
spoils most of the longer n-grams, and for one mostly in Chinese characters, kana or hangul, where a character says
more; such a text is never near to one of the other kind. Texts without n letters are compared for equality alone.

Near copies of short sentences are found in part: one replaced word spoils most n-grams of a sentence of a few words.

The search is exact. For most texts the first step ends it: less than `threshold` of their n-grams occur in any
evaluation sentence. A text of T n-grams may miss T - ⌈threshold · T⌉ of them, so k of any T - ⌈threshold · T⌉ + k
lead to the sentence that it is near: the rarest ones are looked up, and what `COMMON` of them lead to is compared.

Shapes: N texts.
"""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from dap.file_io import read_object
from dap.languages import code_points, normalise_all
from dap.text_keys import text_keys


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
COMMON = (
    4  # k, or all that must be shared: more n-grams to look up, but far fewer sentences to compare
)
_WIDE = r"[\x{2E80}-\x{10FFFF}]"  # from the CJK blocks on; hangul and kana are above it, too
_SPARSITY = 4  # places in the table for each n-gram of a sentence, at least
_ROUNDING = 1e-9


class LeakIndex:
    """The evaluation sentences, ready to be looked up.

    Args:
        sentences: as they stand.
        threshold: least containment of near texts, over 0 to 1; None finds equal texts alone.
    """

    def __init__(self, sentences: Sequence[str], threshold: float | None = 0.7) -> None:
        letters = normalise_all(sentences)
        measured = _measured(letters, text_keys(letters)).with_columns(
            pl.Series("evaluation", sentences, pl.String)
        )
        self._sentences = measured.unique("key", keep="first", maintain_order=True)
        self._bands = (
            []
            if threshold is None
            else [BandIndex(self._sentences, band, threshold) for band in BANDS]
        )

    def __call__(self, letters: Sequence[str], keys: np.ndarray) -> pl.DataFrame:
        """The normalised texts, given with their `text_keys`, that are equal or near to a sentence, in their order.

        Returns:
            `row`, the number of the text; `evaluation`, the sentence that it is most like; whether they are `equal` as
            normalised; `containment`, the least share of n-grams that both have of the other, 1 for equal ones.
        """
        texts = _measured(letters, keys)
        same = texts.join(self._sentences.select("key", "evaluation"), on="key")
        others = texts.join(self._sentences, on="key", how="anti")
        found = [same.select("row", "evaluation", equal=True, containment=1.0)]
        found += [band.near(others) for band in self._bands]
        best = pl.concat(found).sort("containment", descending=True, maintain_order=True)
        return best.unique("row", keep="first", maintain_order=True).sort("row")


@lru_cache(maxsize=1)
def load_index(path: Path, changed: int) -> LeakIndex:
    """The index made of a JSON file of what `LeakIndex` takes; a process makes it once for all its files."""
    return LeakIndex(**read_object(path))


def _measured(letters: Sequence[str], keys: np.ndarray) -> pl.DataFrame:
    """Normalised texts with their number, key, length, and whether most of their letters are wide."""
    texts = pl.DataFrame(
        {"letters": letters, "key": keys}, schema={"letters": pl.String, "key": pl.UInt64}
    )
    length, wide = pl.col("letters").str.len_chars(), pl.col("letters").str.count_matches(_WIDE)
    return texts.with_row_index("row").with_columns(
        length=length.cast(pl.Int64), wide=2 * wide > length
    )


class BandIndex:
    """The n-grams of the evaluation sentences of one band; arguments as `LeakIndex` has them."""

    def __init__(self, sentences: pl.DataFrame, band: Band, threshold: float) -> None:
        self.band, self.threshold = band, threshold
        self._sentences = sentences.filter(
            pl.col("length").is_between(band.shortest, band.longest), wide=band.wide
        )
        owners, grams = _grams(self._sentences["letters"], band.n)  # (G,), (G,)
        holders = pl.DataFrame({"sentence": owners, "gram": grams})
        self._holders = holders.with_columns(other_size=pl.len().over("sentence")).unique()
        bits = max((len(self._holders) * _SPARSITY).bit_length(), 10)
        self._shift = np.uint64(64 - bits)
        held = np.bincount(self._holders["gram"].to_numpy() >> self._shift, minlength=1 << bits)
        self._spread = np.minimum(held, 2**16 - 1).astype(
            np.uint16
        )  # sentences with an n-gram, or a few more

    def near(self, texts: pl.DataFrame) -> pl.DataFrame:
        """What `LeakIndex` returns, with a row for each sentence that a text is near to."""
        n = self.band.n
        least, most = (max(length - n + 1, 1) for length in (self.band.shortest, self.band.longest))
        size = pl.col("length") - n + 1
        alike = size.is_between(
            least * self.threshold - _ROUNDING, most / self.threshold + _ROUNDING
        )
        texts = texts.filter(alike, wide=self.band.wide).with_columns(size=size)
        pairs = self._candidates(texts)
        text, sentence = texts[pairs["text"]], self._sentences[pairs["sentence"]]
        shares = [containment(*both, n) for both in zip(text["letters"], sentence["letters"])]
        found = text.select("row", sentence["evaluation"], pl.lit(False).alias("equal"))
        found = found.with_columns(pl.Series("containment", shares, pl.Float64))
        return found.filter(pl.col("containment") >= self.threshold - _ROUNDING)

    def _candidates(self, texts: pl.DataFrame) -> pl.DataFrame:
        """Numbers of texts and sentences of like size where `COMMON` of the text's rarest n-grams are shared."""
        owners, grams = _grams(texts["letters"], self.band.n)  # (G,), (G,)
        spread = self._spread[grams >> self._shift]
        known = np.bincount(owners[spread > 0], minlength=len(texts))  # (N,)
        hopeful = known >= self._needed(texts["size"]).to_numpy()
        asked = pl.DataFrame({"text": owners, "gram": grams, "spread": spread}).filter(
            hopeful[owners]
        )
        size, other_size = pl.col("size"), pl.col("other_size")
        common = pl.min_horizontal(self._needed(size), COMMON)
        ordered = asked.sort("text", "spread").with_columns(
            size=pl.len().over("text"), place=pl.int_range(pl.len()).over("text")
        )
        rarest = ordered.filter(pl.col("place") < size - self._needed(size) + common)
        alike = pl.min_horizontal(size, other_size) >= self._needed(
            pl.max_horizontal(size, other_size)
        )
        shared = (
            rarest.join(self._holders, on="gram")
            .filter(alike)
            .group_by("text", "sentence", "size")
            .len()
        )
        return shared.filter(pl.col("len") >= common).sort("text", "sentence")

    def _needed(self, size: Any) -> Any:
        """n-grams that a near text must share, of so many; a column or an expression of polars."""
        return (size * self.threshold - _ROUNDING).ceil()


def _grams(letters: pl.Series, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of the text and the hash of all n-grams of N texts, in their order: int64, uint64 (G,)."""
    codes = code_points("".join(f"{text}\n" for text in letters))
    places = max(len(codes) - n, 0)
    grams = np.zeros(places, np.uint64)
    for first in range(n):
        grams += codes[first : first + places]
        grams *= np.uint64(0x9E3779B97F4A7C15)
    owners = np.repeat(np.arange(len(letters)), letters.str.len_chars() + 1)
    whole = owners[:places] == owners[n:]  # else it runs into the next text
    return owners[:places][whole], grams[whole]


def containment(text: str, sentence: str, n: int) -> float:
    """The least share of their n-grams that two texts have of each other."""
    one, other = (
        Counter(side[first : first + n] for first in range(len(side) - n + 1))
        for side in (text, sentence)
    )
    return (one & other).total() / max(one.total(), other.total())
