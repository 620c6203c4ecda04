"""Find, read and tokenise natural language inference (NLI) data in many languages.

A folder holds one file per split and language, as XTREME distributes XNLI:

    {train|dev|test}-{xx}.tsv    (also as .tsv.gz or .tsv.xz)

The columns are premise, hypothesis, label and, optionally, genre. A header is allowed. Quotes are
ordinary text. A Hub dataset has a configuration per language.

A label is a name or a number, as on the Hub: entailment 0, neutral 1, contradiction 2. The label
"-" or -1 marks a pair on which the annotators did not agree. Such pairs are skipped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from datasets import ClassLabel, Dataset, load_dataset
from transformers import PreTrainedTokenizerBase

from dap_transformers.errors import UserError, reading, warn_once
from dap_transformers.languages import XNLI_LANGUAGES
from dap_transformers.options import arg, require_least
from dap_transformers.text.archives import decoded_lines
from dap_transformers.text_keys import is_blank
from dap_transformers.training.resume import describe_text

LABEL = ClassLabel(names=["entailment", "neutral", "contradiction"])
NO_GOLD = -1
#: Every way to write a label -> its number.
LABEL_NUMBERS = {
    "entailment": 0,
    "neutral": 1,
    "contradiction": 2,
    "contradictory": 2,  # in the translated MultiNLI files that come with XNLI
    "0": 0,
    "1": 1,
    "2": 2,
    "-": NO_GOLD,
    "-1": NO_GOLD,
}
COLUMNS = ("premise", "hypothesis", "label")

_HUB_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


@dataclass
class TextOptions:
    """Which text a classifier is trained and tested on. The help text of each field says more."""

    data_dir: str = arg(
        "facebook/xnli", "Folder with dev-{xx} and test-{xx} files, or a Hub dataset id."
    )
    train_data: str | None = arg(
        None, "English pairs: file or Hub id (nyu-mll/multi_nli). Default: train-en of data_dir."
    )
    max_seq_length: int = arg(128, "Maximum number of tokens of a pair. Longer pairs are cut.")
    max_train_pairs: int | None = arg(None, "Use only the first pairs of the training data.")

    def __post_init__(self) -> None:
        require_least(self, max_train_pairs=1)


class NLISource(NamedTuple):
    """Where to read one split and language: a TSV file, or part of a Hub dataset.

    Attributes:
        path: path of the file, or id of the Hub dataset.
        config: configuration of the Hub dataset. None for a file, or if there is only one.
        split: split of the Hub dataset, such as "validation". None for a file.
    """

    path: str
    config: str | None = None
    split: str | None = None


@dataclass
class NLIData:
    """All tokenised examples that the fine-tuning runs need, by language code.

    Dev and test sets have the longest examples first. `digests` maps the name of a text, such as
    "test de", to its number of examples and a hash (`describe_text`).
    """

    train: dict[str, Dataset]
    dev: dict[str, Dataset]
    test: dict[str, Dataset]
    digests: dict[str, str]


# ---------------------------------------------------------------------------------------- find it


def find_nli(data: str) -> dict[str, dict[str, NLISource]]:
    """Find NLI examples by split and language, in a folder or in a Hub dataset.

    The languages are in the order of the paper's table. A Hub dataset is assumed to have all.
    """
    found: dict[str, dict[str, NLISource]] = {}
    for split, name in _HUB_SPLITS.items():
        found[split] = {}
        for code in XNLI_LANGUAGES:
            if not Path(data).is_dir():
                found[split][code] = NLISource(data, code, name)
                continue
            files = sorted(map(str, Path(data).glob(f"{split}-{code}.tsv*")))
            if len(files) > 1:
                raise UserError(f"{' and '.join(files)} are of one language: leave one of them")
            if files:
                found[split][code] = NLISource(files[0])
        known = {source.path for source in found[split].values()}
        for path in sorted(Path(data).glob(f"{split}-*.tsv*")):
            if str(path) not in known:
                warn_once("%s is left out: its name has none of XNLI's language codes", path)
    return found


def training_source(
    train_data: str | None, found: Mapping[str, Mapping[str, NLISource]]
) -> NLISource:
    """Choose where to read the English training examples: a file or the id of a Hub dataset.

    None takes `train-en` of the test data.
    """
    if train_data:
        if Path(train_data).is_dir():
            raise UserError(f"{train_data} is a folder: name its file of English pairs")
        return NLISource(train_data, None, None if Path(train_data).is_file() else "train")
    if "en" not in found["train"]:
        raise UserError("there is no train-en file: give English pairs as train_data")
    return found["train"]["en"]


# ---------------------------------------------------------------------------------------- read it


def load_nli(source: NLISource, limit: int | None = None) -> Dataset:
    """Read the examples that have a gold label, the label on which the annotators agreed.

    The columns are `premise`, `hypothesis` and `label` (0 to 2). A label column of a Hub dataset
    may have numbers of its own. The names that they stand for decide. `limit` keeps the first
    examples.
    """
    with reading(f"{source.path} (give premise, hypothesis and label, in a file with tabs)"):
        if source.split is None:
            columns = _read_tsv(source.path)
        else:
            table = load_dataset(source.path, source.config, split=source.split)
            columns = [table[name][:] for name in COLUMNS]
            if names := getattr(table.features["label"], "names", ()):
                columns[-1] = [names[label] if label >= 0 else label for label in columns[-1]]
        numbers = [LABEL_NUMBERS[str(label)] for label in columns[-1]]
        content = dict(zip(COLUMNS, (*columns[:2], numbers), strict=True))
        examples = Dataset.from_dict(content)

    rows = [row for row, number in enumerate(numbers) if number != NO_GOLD]
    if not rows:
        raise UserError(f"{source.path}: no examples with a gold label")
    return examples.select(rows[:limit])


def _read_tsv(path: str) -> list[Sequence[str]]:
    """Return the columns of a TSV file, which may have a header and empty lines."""
    rows = []
    for line in decoded_lines(path):
        if not is_blank(line):
            rows.append(line.split("\t")[: len(COLUMNS)])
    if rows and rows[0][-1] in ("label", "gold_label"):
        header, *rows = rows
        if header[0] not in ("premise", "sentence1"):
            raise UserError(f"{path}: the columns are {header}, not premise, hypothesis, label")
    return list(zip(*rows, strict=True))


def prepare_nli(
    sources: Mapping[str, Mapping[str, NLISource]],
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions,
    token_types: bool = False,
) -> NLIData:
    """Read and tokenise all text before any training, so that errors in it show early."""
    sets: dict[str, dict[str, Dataset]] = {}
    digests = {}
    for split, by_language in sources.items():
        sets[split] = {}
        for code, source in by_language.items():
            text = load_nli(source, options.max_train_pairs if split == "train" else None)
            tokens = tokenize_nli(text, tokenizer, options.max_seq_length, token_types)
            digests[f"{split} {code}"] = describe_text(text, len(text))
            if split != "train":
                tokens = tokens.sort("length", reverse=True)  # batches then need little padding
            sets[split][code] = tokens
    return NLIData(**sets, digests=digests)


def tokenize_nli(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, token_types: bool
) -> Dataset:
    """Tokenise the pairs of `load_nli` in their order.

    `max_seq_length` counts the tokens of a pair. The longer of the two texts is cut first. The
    columns are `input_ids`, `attention_mask`, `labels` and `length` (in tokens), and perhaps
    `token_type_ids`.
    """

    def encode(batch: dict[str, list]) -> dict[str, list]:
        tokens = tokenizer(
            batch["premise"],
            batch["hypothesis"],
            truncation=True,
            max_length=max_seq_length,
            return_token_type_ids=None if token_types else False,  # None: as the tokenizer likes
        )
        lengths = [len(ids) for ids in tokens["input_ids"]]
        return {**tokens, "labels": batch["label"], "length": lengths}

    columns = dataset.column_names
    return dataset.map(encode, batched=True, remove_columns=columns, desc="tokenise")
