"""The arguments that shape prepared text, the same for the command and for every step."""

from dataclasses import dataclass

import polars as pl

from dap.arguments import arg, require_least
from dap.errors import UserError
from dap.languages import base_language

#: `--recipe release`: the steps of the paper's released code, as defaults that other arguments may replace. Its dev
#: pairs come on top of a million for training, "N/A" is dropped, and no script is checked.
RELEASE = {
    "tokenizer": "bert-base-multilingual-cased",
    "url_pattern": "@|http|^N/A$",
    "shared_beyond": 5,
    "strip_quotes": True,
    "min_script": 0.0,
    "max_corpus_pairs": 1_010_000,
    "max_pairs": 1_010_000,
}


@dataclass
class PrepareOptions:
    """What shapes the prepared text; the filters' defaults are the released code's but for `RELEASE`."""

    target_language: str = arg("en", "Language code of the target side.")
    max_bad_lines: float = arg(0.001, "Share of malformed lines a file may have.")
    url_pattern: str = arg("@|http", "Drop pairs in which this regular expression is found.")
    min_tokens: int = arg(4, "Drop pairs with fewer tokens on a side.")
    max_ratio: float = arg(2.0, "Drop pairs with more tokens on one side for each of the other ...")
    ratio_beyond: int = arg(32, "... where the longer side has more tokens than this.")
    max_tokens: int = arg(64, "Drop pairs with more tokens on both sides.")
    max_shared: float = arg(
        0.5, "Drop pairs where this share of a side's different tokens is in the other; 2: keep."
    )
    shared_beyond: int = arg(0, "... where both sides have more tokens than this.")
    strip_quotes: bool = arg(False, "Take out straight double quotation marks.")
    min_script: float = arg(
        0.3, "Drop pairs with a smaller share of letters in the language's scripts; 0: keep."
    )
    tokenizer: str | None = arg(
        None, "Count its tokens in the filters, as the paper does. Default: words."
    )
    language_identifier: str | None = arg(
        None,
        "module:function that tells the language codes of a list of texts; for languages beyond the 36, as the file "
        "names have them (sr or srp).",
    )
    leak_threshold: float = arg(
        0.7,
        "Share of character n-grams from which texts are near; 0: equal ones alone. With a word replaced, 0.7 finds 6 "
        "of 10 of Tatoeba's English sentences, and 4 of 10 of the shorter Russian and Hindi ones.",
    )
    max_pairs: int = arg(1_000_000, "Most pairs a language, drawn at random; 0: all.")
    max_corpus_pairs: int = arg(
        0, "Most pairs of each corpus of a language, drawn beforehand; 0: all."
    )
    dev_pairs: int = arg(10_000, "Dev pairs a language, at most a tenth; 0: none.")
    seed: int = arg(0, "Of the sample and the dev sets.")
    target_vocabulary: str | None = arg(
        None, "Tokenizer whose ids of the English training side to write as JSON."
    )
    shard_size: int = arg(1_000_000, "Most pairs of a parquet file.")

    def __post_init__(self) -> None:
        self.target_language = base_language(self.target_language)
        try:
            pl.Series([""]).str.contains(self.url_pattern)
        except pl.exceptions.PolarsError as error:
            raise UserError(
                f"--url_pattern {self.url_pattern!r} is no regular expression: {error}"
            ) from error
        for name in ("min_script", "leak_threshold"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"--{name} {getattr(self, name)} is a share, 0 to 1 (0: no check)")
        require_least(self, max_ratio=1, max_shared=1e-9, min_tokens=0, max_tokens=1)
        require_least(self, max_pairs=0, max_corpus_pairs=0, dev_pairs=0, shard_size=1)
