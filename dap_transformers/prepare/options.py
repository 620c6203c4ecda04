"""The arguments that shape prepared text, used by the command and by every step."""

from dataclasses import dataclass

import polars as pl

from dap_transformers.commands.arguments import arg, require_least
from dap_transformers.errors import UserError
from dap_transformers.languages import base_language

#: Defaults of `--recipe release`, the steps of the paper's released code. Its dev pairs are drawn
#: in addition to a million training pairs, pairs with "N/A" are dropped, and no script is checked.
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
    """The options of `prepare-data` that shape the text: filters, samples and dev sets.

    The defaults are those of the paper's released code, except for the options in `RELEASE`,
    which `--recipe release` sets. Each field's help text says what it does. Invalid values raise
    `UserError`.
    """

    target_language: str = arg("en", "Language code of the target side.")
    max_bad_lines: float = arg(0.001, "Share of malformed lines a file may have.")
    url_pattern: str = arg("@|http", "Drop pairs that match this regular expression.")
    min_tokens: int = arg(4, "Drop pairs with fewer tokens on a side.")
    max_ratio: float = arg(
        2.0, "Drop pairs if one side has more than this many times the other's tokens ..."
    )
    ratio_beyond: int = arg(32, "... and the longer side has more tokens than this.")
    max_tokens: int = arg(64, "Drop pairs with more tokens on both sides.")
    max_shared: float = arg(
        0.5,
        "Drop pairs if this share of one side's different tokens also occurs on the other side ... "
        "(2: drop none)",
    )
    shared_beyond: int = arg(0, "... and both sides have more tokens than this.")
    strip_quotes: bool = arg(False, "Remove straight double quotation marks.")
    min_script: float = arg(
        0.3,
        "Drop pairs if a smaller share of a side's letters is in the scripts of its language. "
        "0: keep all.",
    )
    tokenizer: str | None = arg(
        None,
        "Count the tokens of this tokenizer, as the released code does. Default: count words.",
    )
    language_identifier: str | None = arg(
        None,
        "module:function that takes a list of texts and returns a language code for each. For "
        "languages other than the 36, it must return the codes of the file names (sr or srp).",
    )
    min_similarity: float | None = arg(
        None,
        "Drop pairs whose sentence vectors, by --model, have a lower cosine. Choose it by "
        "mine-bitext --score_only --margin absolute on a sample.",
    )
    model: str | None = arg(
        None,
        "Encoder for --min_similarity: a folder, a Hub id, or a .onnx file of ours.",
    )
    leak_threshold: float = arg(
        0.7,
        "Texts are near copies if they share this share of their character n-grams. 0: find only "
        "equal texts. After a word is replaced, 0.7 finds 6 of 10 of Tatoeba's English sentences.",
    )
    max_pairs: int = arg(1_000_000, "Most pairs per language, drawn at random. 0: all.")
    max_corpus_pairs: int = arg(
        0, "Most pairs per corpus of a language, drawn before max_pairs. 0: all."
    )
    dev_pairs: int = arg(10_000, "Dev pairs per language, at most a tenth of its pairs. 0: none.")
    seed: int = arg(0, "Seed of the sample and of the dev sets.")
    target_vocabulary: str | None = arg(
        None, "Tokenizer whose ids in the English training text are written as JSON."
    )
    shard_size: int = arg(1_000_000, "Most pairs per Parquet file.")

    def __post_init__(self) -> None:
        self.target_language = base_language(self.target_language)
        try:
            pl.Series([""]).str.contains(self.url_pattern)
        except pl.exceptions.PolarsError as error:
            raise UserError(
                f"--url_pattern {self.url_pattern!r} is not a regular expression: {error}"
            ) from error
        for name in ("min_script", "leak_threshold"):
            value = getattr(self, name)
            if not 0.0 <= value <= 1.0:
                raise UserError(f"--{name} {value}: give a share, 0 to 1 (0: no check)")
        if (self.min_similarity is None) != (self.model is None):
            given = f"--min_similarity {self.min_similarity}"
            if self.model is not None:
                given = f"--model {self.model}"
            raise UserError(f"{given}: give --min_similarity and --model together")
        if self.min_similarity is not None and not -1.0 <= self.min_similarity <= 1.0:
            raise UserError(f"--min_similarity {self.min_similarity}: give a cosine, -1 to 1")
        require_least(self, max_ratio=1, max_shared=1e-9, min_tokens=0, max_tokens=1)
        require_least(self, max_pairs=0, max_corpus_pairs=0, dev_pairs=0, shard_size=1)
