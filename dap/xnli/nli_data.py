"""Natural language inference in many languages: find, read and tokenise it, and order it for training (no models).

A folder holds `{train|dev|validation|test}-{xx}.{tsv|jsonl|parquet}`, the first two also as `.gz` or `.xz`: the layout
of XTREME. A line of TSV is premise, hypothesis, label and, if any, the genre; quotes are text. JSON lines and parquet
have the fields `premise`, `hypothesis` and `label`. A label is its name or number, as on the Hub: entailment 0,
neutral 1, contradiction 2; "-" or -1 marks a pair without a gold label, which is skipped and counted.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import ClassLabel, Dataset, Features, Value, get_dataset_config_names, load_dataset
from datasets import config as datasets_config
from datasets.exceptions import DatasetGenerationError
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from dap.errors import UserError
from dap.languages import XNLI_LANGUAGES, base_language
from dap.text import HUB_ID, list_folder, read_sentences
from dap.tokenizers import tokenizer_state

logger = logging.getLogger(__name__)

LABEL = ClassLabel(names=["entailment", "neutral", "contradiction"])
NO_GOLD = -1
ALIASES = {
    "-": str(NO_GOLD),
    "contradictory": "contradiction",
}  # the latter in XNLI's own MNLI files
FEATURES = Features(
    {"premise": Value("string"), "hypothesis": Value("string"), "label": Value("int64")}
)
COLUMNS = tuple(FEATURES)
LAYOUT = "{train|dev|test}-{xx}.{tsv|jsonl|parquet}[.gz|.xz]"
CACHE_VERSION = 1

_FILE = re.compile(
    r"(train|dev|validation|test)-(\w+(?:-\w+)?)\.(?:(?:tsv|jsonl)(?:\.gz|\.xz)?|parquet)"
)
_HUB_SPLITS = {"train": "train", "dev": "validation", "test": "test"}


@dataclass(frozen=True)
class NLISource:
    """Where examples are: a file, or a split of a data set of the Hub (`path` is its id then)."""

    path: str
    config: str | None = None
    split: str | None = None

    def __str__(self) -> str:
        return (
            self.path
            if self.split is None
            else ":".join(filter(None, (self.path, self.config, self.split)))
        )


def find_nli(data: str) -> dict[str, dict[str, NLISource]]:
    """Split ("train", "dev", "test") -> language -> source, of a folder or of a data set of the Hub.

    Languages are those of XNLI, in the order of the paper's table; a file of another one is left out with a warning.

    Raises:
        ValueError: the folder holds no such file, or two for one split and language.
        FileNotFoundError: neither a folder nor the form of a Hub id, or no such data set.
    """
    if Path(data).is_dir():
        found = _find_files(Path(data))
    elif HUB_ID.fullmatch(data) and not Path(data).exists():
        found = _find_configs(data)
    else:
        raise FileNotFoundError(
            f"{data}: no such folder; expected one with files {LAYOUT}, or a Hub dataset id"
        )
    return {
        split: {code: sources[code] for code in XNLI_LANGUAGES if code in sources}
        for split, sources in found.items()
    }


def _find_files(folder: Path) -> dict[str, dict[str, NLISource]]:
    found: dict[str, dict[str, NLISource]] = {split: {} for split in _HUB_SPLITS}
    for path in list_folder(folder):
        if (match := _FILE.fullmatch(path.name)) is None:
            continue
        sources, code = (
            found["dev" if match[1] == "validation" else match[1]],
            _known_code(match[2]),
        )
        if code is None:
            logger.warning(
                "%s is left out: its language is none of XNLI's, %s", path, " ".join(XNLI_LANGUAGES)
            )
        elif code in sources:
            raise UserError(
                f"{sources[code]} and {path} are both {match[1]} of {code!r}: keep one of them"
            )
        else:
            sources[code] = NLISource(str(path))
    if not any(found.values()):
        names = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise UserError(f"{folder}: holds {names}; expected files {LAYOUT}")
    return found


def _find_configs(name: str) -> dict[str, dict[str, NLISource]]:
    try:
        configs = get_dataset_config_names(name)
    except Exception as error:  # offline, no such data set, or one that is a script
        raise FileNotFoundError(
            f"{name}: no such folder, and not to be had from the Hub ({error})"
        ) from error
    codes = {code: config for config in configs if (code := _known_code(config))}
    if not codes:
        raise UserError(
            f"{name} has the configurations {', '.join(configs[:5])}; expected one a language, named by its code"
        )
    return {
        split: {code: NLISource(name, config, hub_split) for code, config in codes.items()}
        for split, hub_split in _HUB_SPLITS.items()
    }


def _known_code(code: str) -> str | None:
    known = base_language(code)
    return known if known in XNLI_LANGUAGES else None


def training_source(
    train_data: str | None, found: dict[str, dict[str, NLISource]], data: str
) -> NLISource:
    """The English training examples: a file, a folder, a Hub id (`id` or `id:config`), or those of the test data.

    Raises:
        ValueError: nothing is given and the test data has no English training split.
        FileNotFoundError: no such file.
    """
    if train_data is not None and Path(train_data).is_file():
        return NLISource(train_data)
    if train_data is not None and not Path(train_data).is_dir():
        if not HUB_ID.fullmatch(train_data):
            raise FileNotFoundError(f"{train_data}: no such file or folder, nor a Hub dataset id")
        name, _, config = train_data.partition(":")
        return NLISource(name, config or None, "train")
    train = (found if train_data is None else find_nli(train_data))["train"]
    if "en" not in train:
        raise UserError(
            f"{train_data or data} holds no train-en file: give English pairs by --train_data"
        )
    return train["en"]


def chosen_languages(
    wanted: Sequence[str] | None, test: Mapping[str, NLISource], data: str
) -> list[str]:
    """The languages to test, in the order of the paper's table: those wanted, or all that have a test set.

    Raises:
        ValueError: one that is not of XNLI, or has no test set, or there is none at all.
    """
    codes = set(test) if wanted is None else {base_language(code) for code in wanted}
    if unknown := sorted(codes - set(XNLI_LANGUAGES)):
        raise UserError(f"--languages {' '.join(unknown)}: XNLI has {' '.join(XNLI_LANGUAGES)}")
    if absent := sorted(codes - set(test)):
        raise UserError(
            f"--languages {' '.join(absent)}: {data} has test sets of {' '.join(test) or 'none'} only"
        )
    if not codes:
        raise UserError(f"{data} holds no test-{{xx}} file of an XNLI language")
    return [code for code in XNLI_LANGUAGES if code in codes]


def load_nli(source: NLISource, limit: int | None = None) -> Dataset:
    """The examples with a gold label, the first `limit` of them, as premise, hypothesis and label (0 to 2).

    Raises:
        ValueError: invalid UTF-8 or JSON, an absent field, an unknown label (names file and line), or no example.
        FileNotFoundError: no such file or data set.
    """
    is_text = source.split is None and not source.path.endswith(".parquet")
    kept, skipped = [], 0
    for place, fields in _lines(source.path) if is_text else _rows(source):
        if lacking := [name for name in COLUMNS if name not in fields]:
            raise UserError(f"{place}: no {' or '.join(lacking)} among {', '.join(fields)}")
        premise, hypothesis, label = (fields[name] for name in COLUMNS)
        if not (isinstance(premise, str) and isinstance(hypothesis, str)):
            raise UserError(
                f"{place}: premise {premise!r} and hypothesis {hypothesis!r}; expected two texts"
            )
        if (number := label_id(label, place)) == NO_GOLD:
            skipped += 1
        elif limit is not None and len(kept) == limit:
            break
        else:
            kept.append((premise, hypothesis, number))
    if skipped:
        logger.warning(
            "%s: %d pairs without a gold label are skipped, %d are kept", source, skipped, len(kept)
        )
    if not kept:
        raise UserError(f"{source}: no examples with a gold label")
    return Dataset.from_dict(dict(zip(COLUMNS, map(list, zip(*kept)))), features=FEATURES)


def _lines(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields of each line with its place; readers of `datasets` tell none, and that of JSON takes "-" for 0."""
    is_json = ".jsonl" in Path(path).suffixes
    for number, line in enumerate(read_sentences(path), 1):
        place, cells = f"{path}, line {number}", line.split("\t")
        if is_json:
            try:
                fields = json.loads(line)
                json.dumps(
                    fields, ensure_ascii=False
                ).encode()  # fails for "\ud800", valid JSON but no text
            except (ValueError, RecursionError) as error:
                raise UserError(f"{place}: invalid JSON: {error}") from error
            if not isinstance(fields, dict):
                raise UserError(
                    f"{place}: no object; expected one with the fields {', '.join(COLUMNS)}"
                )
            yield place, fields
        elif len(cells) not in (3, 4):
            raise UserError(
                f"{place}: {len(cells)} columns; expected premise, hypothesis, label and, if any, the genre"
            )
        elif number > 1 or cells[:3] != list(COLUMNS):  # a header
            yield place, dict(zip(COLUMNS, cells))


def _rows(source: NLISource) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The fields of each row of a parquet file or data set with its place; a `ClassLabel` is given by its name."""
    try:
        if source.split is None:
            dataset = load_dataset("parquet", data_files=source.path, split="train")
        else:
            dataset = load_dataset(source.path, source.config, split=source.split)
    except (pa.ArrowInvalid, DatasetGenerationError) as error:
        raise UserError(f"{source}: not a parquet file ({error})") from error
    except Exception as error:  # offline, or no such data set, configuration or split
        raise FileNotFoundError(f"{source}: not to be had from the Hub ({error})") from error
    names = getattr(dataset.features.get("label"), "names", [])
    for number, row in enumerate(dataset, 1):
        if row.get("label") in range(len(names)):
            row["label"] = names[row["label"]]
        yield f"{source}, row {number}", row


def label_id(label: Any, place: str) -> int:
    """The number of a label given by its name or number; -1 where there is no gold label.

    >>> label_id("contradiction", "a.tsv, line 1"), label_id(1, "a.tsv, line 2"), label_id("-", "a.tsv, line 3")
    (2, 1, -1)

    Raises:
        ValueError: any other label; names `place`.
    """
    try:
        return LABEL.str2int(ALIASES.get(str(label), str(label)))
    except ValueError as error:
        known = ", ".join(f"{name} ({number})" for number, name in enumerate(LABEL.names))
        raise UserError(
            f"{place}: unknown label {label!r}; known are {known}, and - or -1 for a pair without a gold label"
        ) from error


@dataclass
class NLIData:
    """Tokenised examples: English ones to train on, and dev and test sets by language, longest first.

    Attributes:
        digests: a hash of the text of "train", "dev de", "test de", ...
    """

    train: Dataset
    dev: dict[str, Dataset]
    test: dict[str, Dataset]
    digests: dict[str, str]

    @property
    def missing(self) -> list[str]:
        """Languages of XNLI that are not tested."""
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
    """Read and tokenise everything, so that what is wrong with it shows before any training.

    Args:
        max_seq_length, token_types: as in `tokenize_nli`.
        max_train_pairs: take only the first pairs of the training text.
        max_test_pairs: take only the first pairs of each test set.
    """
    texts = {"train": load_nli(train, max_train_pairs)}
    texts |= {f"dev {code}": load_nli(source) for code, source in dev.items()}
    texts |= {f"test {code}": load_nli(source, max_test_pairs) for code, source in test.items()}
    tokens = {
        name: tokenize_nli(text, tokenizer, max_seq_length, token_types, name)
        for name, text in texts.items()
    }
    return NLIData(
        tokens["train"],
        {code: longest_first(tokens[f"dev {code}"]) for code in dev},
        {code: longest_first(tokens[f"test {code}"]) for code in test},
        {name: digest(text) for name, text in texts.items()},
    )


def tokenize_nli(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    token_types: bool,
    name: str,
) -> Dataset:
    """Pairs as the tokenizer joins them, the longer side cut first: `input_ids`, `attention_mask`, `labels`, `length`.

    The result is cached for the same text, tokenizer and length, and in the order of the text.

    Args:
        token_types: add `token_type_ids` where the tokenizer makes them, for encoders that have embeddings of them.
        name: of the text, for the progress bar.
    """
    types = None if token_types else False
    wanted = {"truncation": True, "max_length": max_seq_length, "return_token_type_ids": types}

    def encode(batch: dict[str, list]) -> dict[str, list]:
        tokens = tokenizer(batch["premise"], batch["hypothesis"], **wanted)
        return {
            **tokens,
            "labels": batch["label"],
            "length": [len(ids) for ids in tokens["input_ids"]],
        }

    state = (CACHE_VERSION, digest(dataset), tokenizer_state(tokenizer), wanted)
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
    """Tokenised pairs in the order of their length, so that batches of an evaluation hold next to no padding."""
    return dataset.select(np.argsort(-np.asarray(dataset["length"][:]), kind="stable"))


def digest(dataset: Dataset) -> str:
    """A hash of examples, the same wherever the text lies.

    >>> digest(Dataset.from_dict({"premise": ["It rains."], "hypothesis": ["It is wet."], "label": [0]}))
    '1 pairs, 9fffd2579d99'
    """
    content = json.dumps([dataset[name][:] for name in COLUMNS])
    return f"{len(dataset)} pairs, {hashlib.sha256(content.encode()).hexdigest()[:12]}"


class StepLengthSampler(Sampler[int]):
    """A new order each epoch, in which every step's examples are sorted by length.

    An optimizer step takes `step` examples, those of all processes and accumulated batches. They are drawn at random,
    so the step's gradient is the same in any order, but batches of like lengths need far less padding.
    """

    def __init__(self, lengths: Sequence[int], step: int, seed: int) -> None:
        self.lengths, self.step, self.seed, self.epoch = np.asarray(lengths), step, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.lengths))
        for start in range(0, len(order), self.step):
            rows = order[start : start + self.step]
            yield from rows[np.argsort(-self.lengths[rows], kind="stable")].tolist()
