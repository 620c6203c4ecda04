"""Find, read and tokenise natural language inference (NLI) data in many languages.

A folder holds one file per split and language, as XTREME distributes XNLI:

    {train|dev|validation|test}-{xx}.{tsv|jsonl|parquet}    (.tsv and .jsonl also as .gz or .xz)

- TSV has the columns premise, hypothesis, label and, optionally, genre. A header is allowed. Quotes
  are ordinary text.
- JSON lines and parquet have the fields `premise`, `hypothesis` and `label`. The field names of
  MultiNLI's own files (`sentence1`, `sentence2`, `gold_label`) also work.
- A label is a name or a number, as on the Hub: entailment 0, neutral 1, contradiction 2. The label
  "-" or -1 marks a pair on which the annotators did not agree. Such pairs are skipped and counted.
"""

import glob
import hashlib
import json
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Value, get_dataset_config_names, load_dataset
from datasets import config as datasets_config
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from dap_transformers.errors import UserError, counted
from dap_transformers.languages import XNLI_LANGUAGES, base_language, is_blank
from dap_transformers.text.archives import list_folder, read_sentences
from dap_transformers.text.find import HUB_ID
from dap_transformers.tokenizers import tokenizer_state

logger = logging.getLogger(__name__)

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
FEATURES = Features(
    {"premise": Value("string"), "hypothesis": Value("string"), "label": Value("int64")}
)
COLUMNS = tuple(FEATURES)
#: Column names of MultiNLI's and XNLI's own JSON files -> ours.
OTHER_COLUMN_NAMES = {"sentence1": "premise", "sentence2": "hypothesis", "gold_label": "label"}
LABEL_HEADERS = ("label", "gold_label")
MOST_COLUMNS = 4  # of a TSV file: those of `COLUMNS`, and the genre
LAYOUT = "{train|dev|test}-{xx}.{tsv|jsonl|parquet}[.gz|.xz]"
CACHE_VERSION = 1

_FILE = re.compile(
    r"(train|dev|validation|test)-(\w+(?:-\w+)?)\.(?:(?:tsv|jsonl)(?:\.gz|\.xz)?|parquet)"
)
_HUB_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


@dataclass(frozen=True)
class NLISource:
    """Where to read the examples of one split and language: a file, or a split of a Hub dataset.

    Attributes:
        path: path of the file, or id of the Hub dataset.
        config: configuration of the Hub dataset, such as the language code. None for a file, or
            for a dataset with one configuration.
        split: split of the Hub dataset, such as "validation". None for a file.
    """

    path: str
    config: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        if self.split is None:
            return self.path
        return ":".join(filter(None, (self.path, self.config, self.split)))


def find_nli(data: str) -> dict[str, dict[str, NLISource]]:
    """Find NLI examples by split and language, in a folder or in a Hub dataset.

    Files of languages that XNLI does not have are left out with a warning.

    Args:
        data: a folder with files such as `test-de.tsv`, or the id of a Hub dataset.

    Returns:
        Split ("train", "dev", "test") -> language code -> where to read. Languages are in the
        order of the paper's table. A split without files is an empty dictionary.
    """
    if Path(data).is_dir():
        found = _find_files(Path(data))
    elif HUB_ID.fullmatch(data) and not Path(data).exists():
        found = _find_configs(data)
    else:
        raise FileNotFoundError(
            f"{data}: no such folder. Give a folder with files {LAYOUT}, or a Hub dataset id"
        )

    ordered = {}
    for split, sources in found.items():
        ordered[split] = {code: sources[code] for code in XNLI_LANGUAGES if code in sources}
    return ordered


def _find_files(folder: Path) -> dict[str, dict[str, NLISource]]:
    """Return split -> language code -> file, for the NLI files of a folder.

    Other files are skipped, those of languages that XNLI does not have with a warning.
    """
    found: dict[str, dict[str, NLISource]] = {"train": {}, "dev": {}, "test": {}}
    for path in list_folder(folder):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue

        split = "dev" if match[1] == "validation" else match[1]
        code = _xnli_code(match[2])
        if code is None:
            known = " ".join(XNLI_LANGUAGES)
            logger.warning("%s is left out: XNLI has only the languages %s", path, known)
        elif code in found[split]:
            other = found[split][code]
            raise UserError(f"{other} and {path} are both {split} of {code!r}: keep one of them")
        else:
            found[split][code] = NLISource(str(path))

    if not any(found.values()):
        names = sorted(path.name for path in folder.iterdir())
        shown = ", ".join(names[:5]) or "nothing"
        raise UserError(f"{folder} holds {shown}: expected files {LAYOUT}")
    return found


def _find_configs(name: str) -> dict[str, dict[str, NLISource]]:
    """Return split -> language code -> source, for a Hub dataset with a configuration per language.

    Configurations of other names or languages are skipped. All three splits are assumed to exist.
    """
    try:
        configs = get_dataset_config_names(name)
    except Exception as error:  # offline, no such dataset, or one that is a script
        raise FileNotFoundError(
            f"{name}: no such folder, and the Hub dataset cannot be loaded ({error})"
        ) from error

    codes = {}
    for config in configs:
        if code := _xnli_code(config):
            codes[code] = config
    if not codes:
        shown = ", ".join(configs[:5])
        raise UserError(
            f"{name} has the configurations {shown}: expected one per language, named by its code"
        )

    found = {}
    for split, hub_split in _HUB_SPLITS.items():
        found[split] = {code: NLISource(name, codes[code], hub_split) for code in codes}
    return found


def _xnli_code(code: str) -> str | None:
    """Return the two-letter code of a language of XNLI. None for any other language or text."""
    try:
        known = base_language(code)
    except UserError:  # other configurations, such as "all_languages"
        return None
    return known if known in XNLI_LANGUAGES else None


def training_source(
    train_data: str | None, found: dict[str, dict[str, NLISource]], data: str
) -> NLISource:
    """Choose where to read the English training examples.

    Args:
        train_data: a file, a folder with a `train-en` file, or a Hub dataset (`id` or
            `id:config`). None takes `train-en` of the test data.
        found: the files of the test data, as `find_nli` returns them.
        data: name of the test data, for error messages.
    """
    if train_data is not None and Path(train_data).is_file():
        return NLISource(train_data)

    if train_data is not None and not Path(train_data).is_dir():
        if not HUB_ID.fullmatch(train_data):
            raise FileNotFoundError(f"{train_data}: no such file or folder, nor a Hub dataset id")
        name, _, config = train_data.partition(":")
        return NLISource(name, config or None, "train")

    if train_data is not None:
        found = find_nli(train_data)
    if "en" not in found["train"]:
        raise UserError(
            f"{train_data or data} holds no train-en file: give English pairs by --train_data"
        )
    return found["train"]["en"]


def chosen_languages(
    wanted: Sequence[str] | None, test: Mapping[str, NLISource], data: str
) -> list[str]:
    """Choose the languages to test: the wanted ones, or all that have a test set.

    Args:
        wanted: language codes of `--languages`. None takes all that have a test set.
        test: language code -> where its test set is.
        data: name of the data, for error messages.

    Returns:
        Language codes in the order of the paper's table.
    """
    codes = set(test) if wanted is None else {base_language(code) for code in wanted}
    if unknown := sorted(codes - set(XNLI_LANGUAGES)):
        raise UserError(f"--languages {' '.join(unknown)}: XNLI has {' '.join(XNLI_LANGUAGES)}")
    if absent := sorted(codes - set(test)):
        present = " ".join(test) or "no language"
        raise UserError(f"--languages {' '.join(absent)}: {data} has test sets only of {present}")
    if not codes:
        raise UserError(f"{data} holds no test-{{xx}} file of an XNLI language")
    return [code for code in XNLI_LANGUAGES if code in codes]


def load_nli(source: NLISource, limit: int | None = None) -> Dataset:
    """Read the examples that have a gold label, the label on which the annotators agreed.

    The number of examples without one is logged as a warning.

    Args:
        source: the file or Hub dataset.
        limit: how many examples to keep, from the first on. None keeps all.

    Returns:
        A dataset with the columns `premise`, `hypothesis` and `label` (0 to 2).
    """
    table = _read(source)
    for name, new_name in OTHER_COLUMN_NAMES.items():
        if name in table.column_names and new_name not in table.column_names:
            table = table.rename_column(name, new_name)
    _check_columns(table, source)

    numbers = _label_numbers(table, source)
    kept = [row for row, number in enumerate(numbers) if number != NO_GOLD]
    if not kept:
        raise UserError(f"{source}: no examples with a gold label")
    if len(kept) < len(numbers):
        skipped = len(numbers) - len(kept)
        logger.warning("%s: skipped %s without a gold label", source, counted(skipped, "pair"))

    chosen = kept[:limit]
    columns = {}
    for name in ("premise", "hypothesis"):
        columns[name] = table[name][chosen]
        for row, text in zip(chosen, columns[name], strict=True):
            if text is None or is_blank(text):
                found = "null" if text is None else "empty"
                raise UserError(f"{source}, row {row + 1}: {name} is {found}, expected text")
    columns["label"] = [numbers[row] for row in chosen]
    return Dataset.from_dict(columns, features=FEATURES)


def _read(source: NLISource) -> Dataset:
    """Read all rows of a file or Hub dataset, unchanged.

    Columns keep their names. Those of a TSV file get ours (`_read_tsv`).
    """
    try:
        if source.split is not None:
            return load_dataset(source.path, source.config, split=source.split)
        suffixes = Path(source.path).suffixes
        if ".jsonl" in suffixes:
            return _read_uncached("json", source.path)
        if ".parquet" in suffixes:
            return _read_uncached("parquet", source.path)
        return _read_tsv(source.path)
    except UserError:
        raise
    except Exception as error:  # datasets, pyarrow and pandas raise a dozen kinds
        cause = error.__cause__ or error
        reason = str(cause) or type(cause).__name__
        if source.split is not None:
            raise FileNotFoundError(
                f"{source}: cannot be loaded from the Hub ({reason})"
            ) from error
        raise UserError(f"{source}: cannot be read ({reason})") from error


def _read_uncached(kind: str, path: str) -> Dataset:
    """Read a file into memory by a reader of `datasets`.

    The cache of `datasets` is not used, because it goes by the time of a file. It would give the
    old text of a file that has changed and kept its time.
    """
    # Windows cannot remove a file that is still mapped into memory.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return load_dataset(
            kind,
            data_files=glob.escape(path),
            split="train",
            cache_dir=folder,
            keep_in_memory=True,
        )


def _read_tsv(path: str) -> Dataset:
    """Read a TSV file, with or without a header, as text columns named by `COLUMNS`.

    Empty lines are left out. A missing cell is empty.
    """
    rows = []
    for number, line in enumerate(read_sentences(path), 1):
        if is_blank(line):
            continue
        cells = line.split("\t")
        if any(cells[MOST_COLUMNS:]):
            raise UserError(
                f"{path}, row {number}: more than {MOST_COLUMNS} columns, expected premise, "
                "hypothesis, label and, optionally, genre"
            )
        missing = [""] * (len(COLUMNS) - len(cells))
        rows.append([*cells, *missing][: len(COLUMNS)])
    if rows and rows[0][-1] in LABEL_HEADERS:
        rows = rows[1:]
    if not rows:
        raise UserError(f"{path}: holds no examples")
    columns = dict(zip(COLUMNS, map(list, zip(*rows)), strict=True))
    return Dataset.from_dict(columns, features=Features(dict.fromkeys(COLUMNS, Value("string"))))


def _check_columns(table: Dataset, source: NLISource) -> None:
    """Raise `UserError` unless there are `premise` and `hypothesis` of text and `label`.

    Labels must be text or integers. `datasets` guesses the types in JSON lines. A column of mixed
    types is refused, because its reader turns the label "-" among numbers into 0.
    """
    for name in COLUMNS:
        if name not in table.column_names:
            raise UserError(f"{source}: no column {name!r} among {', '.join(table.column_names)}")

    for name in COLUMNS:
        feature = table.features[name]
        kind = getattr(feature, "dtype", type(feature).__name__)
        allowed = ["string", "large_string"]
        if name == "label":
            allowed += ["int8", "int32", "int64"]
        if kind not in allowed:
            raise UserError(f"{source}: column {name!r} holds {kind}, expected {allowed[-1]}")


def _label_numbers(table: Dataset, source: NLISource) -> list[int]:
    """Return the label of each row as a number from 0 to 2, or `NO_GOLD` (-1).

    `NO_GOLD` marks rows without a gold label. A `ClassLabel` column holds numbers of its own, and
    the names that they stand for. The names decide.
    """
    names = getattr(table.features["label"], "names", None)
    numbers = []
    for row, label in enumerate(table["label"][:], 1):
        if names and label in range(len(names)):
            label = names[label]
        if str(label) not in LABEL_NUMBERS:
            raise UserError(
                f"{source}, row {row}: unknown label {label!r}, expected entailment (0), "
                "neutral (1), contradiction (2), or - (-1) for a pair without a gold label"
            )
        numbers.append(LABEL_NUMBERS[str(label)])
    return numbers


@dataclass
class NLIData:
    """All tokenised examples that a command needs.

    Attributes:
        train: English examples to train on.
        dev: language code -> dev set, longest examples first.
        test: language code -> test set, longest examples first.
        digests: name of a text ("train", "dev de", "test de", ...) -> its number of examples and a
            hash, as `digest` returns them.
    """

    train: Dataset
    dev: dict[str, Dataset]
    test: dict[str, Dataset]
    digests: dict[str, str]

    @property
    def missing(self) -> list[str]:
        """Return the codes of the XNLI languages that have no test set in this data."""
        return [code for code in XNLI_LANGUAGES if code not in self.test]


def prepare_nli(
    train: NLISource,
    dev: Mapping[str, NLISource],
    test: Mapping[str, NLISource],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int = 128,
    token_types: bool = False,
    max_train_pairs: int | None = None,
    max_test_pairs: int | None = None,
) -> NLIData:
    """Read and tokenise all text before any training, so that errors in it show early.

    Args:
        train: the English training examples.
        dev: language code -> dev examples.
        test: language code -> test examples.
        tokenizer: the encoder's tokenizer.
        max_seq_length: maximum number of tokens of a pair. Longer pairs are cut.
        token_types: add the column `token_type_ids`, for encoders with embeddings of them.
        max_train_pairs: use only this many pairs of the training text, from the first on. None
            uses all.
        max_test_pairs: use only this many pairs of each test set, from the first on. None uses all.

    Returns:
        The tokenised examples of all languages.
    """
    texts = {"train": load_nli(train, max_train_pairs)}
    for code, source in dev.items():
        texts[f"dev {code}"] = load_nli(source)
    for code, source in test.items():
        texts[f"test {code}"] = load_nli(source, max_test_pairs)

    tokens = {}
    for name, text in texts.items():
        tokens[name] = tokenize_nli(text, tokenizer, max_seq_length, token_types, name)

    return NLIData(
        train=tokens["train"],
        dev={code: longest_first(tokens[f"dev {code}"]) for code in dev},
        test={code: longest_first(tokens[f"test {code}"]) for code in test},
        digests={name: digest(text) for name, text in texts.items()},
    )


def tokenize_nli(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    token_types: bool,
    name: str,
) -> Dataset:
    """Tokenise pairs in their order, and cache the result on disk.

    The cached result is used again for the same text, tokenizer and arguments.

    Args:
        dataset: the examples, as `load_nli` returns them.
        tokenizer: the encoder's tokenizer, which joins premise and hypothesis.
        max_seq_length: maximum number of tokens of a pair. The longer of the two texts is cut
            first.
        token_types: add the column `token_type_ids` if the tokenizer makes them. Only encoders
            with embeddings of them need it.
        name: name of the text in the progress bar.

    Returns:
        A dataset with the columns `input_ids`, `attention_mask`, `labels` and `length` (in
        tokens), and perhaps `token_type_ids`.
    """
    options = {
        "truncation": True,
        "max_length": max_seq_length,
        "return_token_type_ids": None if token_types else False,  # None: as the tokenizer likes
    }

    def encode(batch: dict[str, list]) -> dict[str, list]:
        tokens = tokenizer(batch["premise"], batch["hypothesis"], **options)
        lengths = [len(ids) for ids in tokens["input_ids"]]
        return {**tokens, "labels": batch["label"], "length": lengths}

    state = (CACHE_VERSION, digest(dataset), tokenizer_state(tokenizer), options)
    key = hashlib.sha256(repr(state).encode()).hexdigest()[:16]
    folder = Path(datasets_config.HF_DATASETS_CACHE, "dap-nli")
    folder.mkdir(parents=True, exist_ok=True)
    return dataset.map(
        encode,
        batched=True,
        remove_columns=dataset.column_names,
        cache_file_name=str(folder / f"{key}.arrow"),
        new_fingerprint=key,
        desc=f"tokenise {name}",
    )


def longest_first(dataset: Dataset) -> Dataset:
    """Sort tokenised pairs by length, longest first, so that batches need little padding."""
    lengths = np.asarray(dataset["length"][:])
    return dataset.select(np.argsort(-lengths, kind="stable"))


def digest(dataset: Dataset) -> str:
    """Return the number of examples and a hash of their text and labels, in one string.

    The hash depends on the content only, so it is the same if the text comes from another file.

    >>> columns = {"premise": ["It rains."], "hypothesis": ["It is wet."], "label": [0]}
    >>> digest(Dataset.from_dict(columns))
    '1 pairs, 9fffd2579d99'
    """
    content = json.dumps([dataset[name][:] for name in COLUMNS])
    return f"{len(dataset)} pairs, {hashlib.sha256(content.encode()).hexdigest()[:12]}"


class StepLengthSampler(Sampler[int]):
    """Draws a new random order each epoch, and sorts each optimizer step's examples by length.

    Iterating yields row numbers, the longest example of each step first. An optimizer step takes
    `step` examples, over all processes and accumulated batches. Sorting within a step does not
    change its gradient, but batches of similar lengths need far less padding.

    Args:
        lengths: number of tokens of each example.
        step: examples per optimizer step.
        seed: seed of the random order. Together with the epoch it fixes the order.
    """

    def __init__(self, lengths: Sequence[int], step: int, seed: int) -> None:
        self.lengths = np.asarray(lengths)
        self.step = step
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, from 0, whose order the next iteration has."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        order = random.permutation(len(self.lengths))
        for start in range(0, len(order), self.step):
            rows = order[start : start + self.step]
            yield from rows[np.argsort(-self.lengths[rows], kind="stable")].tolist()
