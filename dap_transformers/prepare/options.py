"""The options of `prepare-data`: which text, and what shapes it."""

from dataclasses import dataclass, field

from dap_transformers.languages import base_language
from dap_transformers.options import arg, require_least

#: Options that do not change the cleaned files.
OF_SELECTION = ("dev_pairs", "shard_size")
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
    """The options that shape the text: filters, samples and dev sets.

    The defaults are those of the paper's released code, except for the options in `RELEASE`.
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
    shard_size: int = arg(1_000_000, "Most pairs per Parquet file.")

    def __post_init__(self) -> None:
        self.target_language = base_language(self.target_language)
        require_least(self, max_pairs=0, max_corpus_pairs=0, dev_pairs=0, leak_threshold=0)
        require_least(self, shard_size=1)
        if self.leak_threshold > 1:
            raise ValueError(f"leak_threshold={self.leak_threshold}: a share, at most 1")


@dataclass
class RawText:
    """The text to prepare, and where to write the result."""

    output_dir: str = field(
        metadata={"help": "Folder to write train/, dev/, README.md and report.json into."}
    )
    data: list[str] = arg([], "Files, folders or a Hub dataset id, as train-dap takes them.")
    opus: list[str] = arg(
        [], "Corpora to download from OPUS, such as 'Europarl UNPC'. 'all': the paper's six."
    )
    languages: list[str] = arg(
        [], "Source languages. Default: all that are found; with --opus, the 36."
    )
    download_dir: str = arg("raw", "Folder for the files from OPUS.")
    recipe: str | None = arg(
        None,
        "'release': the data steps of the paper's released code; see docs/data.md.",
        choices=["release"],
    )
    licences: str | None = arg(
        None, "JSON file for the data card: origin, as the card names it -> its licence."
    )
    evaluation_data: list[str] = arg(
        [],
        "Evaluation sets, for the leak check: parallel text, or plain text with one sentence per "
        "line, or several between tabs. The leaks are listed in leaks.jsonl.",
    )
    num_workers: int = arg(
        1, "Processes that share the files. The result does not depend on their number."
    )
    ray: str | None = arg(
        None,
        "Share the files among a Ray cluster instead: its address (auto or HOST:PORT), or 'local'. "
        "All nodes need the same folders.",
    )
    overwrite: bool = arg(False, "Replace the result of a finished run in output_dir.")

    def inputs(self, options: PrepareOptions) -> list[str]:
        """Return the files and folders that a run reads. Ids of the Hub are among them."""
        given = [self.licences, options.tokenizer]
        return [*self.data, *self.evaluation_data, *filter(None, given)]
