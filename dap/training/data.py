"""From pairs of text to batches: tokenisation and collation (no models).

Shapes: B pairs, S tokens. The order is: `corpus.load_bitext` → `splitting.split_validation` (or `drop_targets`) →
`tokenize_bitext` → `mixing.mix_languages` → `BitextCollator`. Everything takes map-style and streaming datasets unless
it says otherwise. Streams that are tokenised have no end, so that all processes draw equal numbers of full batches.
"""

import hashlib
import json
import operator
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from dap.errors import UserError
from dap.tokenizers import plain_backend, tokenizer_state

SHUFFLE_BUFFER = 4000  # pairs a language
SHORTEST = 3  # tokens: CLS, one of text, SEP
ENCODED_AT_ONCE = 1000  # sentences
CACHE_VERSION = 1

Bitext = Mapping[str, Dataset] | Mapping[str, IterableDataset]


def tokenize_bitext(
    datasets: Bitext,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    streaming: bool = False,
    shuffle_buffer: int = SHUFFLE_BUFFER,
    seed: int = 0,
) -> dict[str, Any]:
    """Token ids of both sides, with the tokenizer's special tokens and cut to `max_seq_length` tokens in all.

    Columns: `source_input_ids`, `target_input_ids` (ints), `language` (str), `pair_id` (`"de:1234"`: the row in the
    loaded corpus, from 0; in a stream of several files `"de:name:1234"`). Map-style results are cached beside the
    text, for the same text, tokenizer and length, and are in the text's order.

    Streams start again after their last pair, without end. Blocks of `shuffle_buffer` pairs are shuffled by the seed,
    in every pass anew, but a pair never comes again before the others of its pass and block. The order depends on the
    arguments alone, so a stream resumes exactly.

    Args:
        shuffle_buffer: pairs of a language that a process, or each of its workers, tokenises ahead and holds in
            memory, about 2 kB each at 32 tokens; 0 keeps the order of the files.
        seed: of the shuffle of streams.

    Raises:
        ValueError: no fast tokenizer, a length outside 3 to `tokenizer.model_max_length`, a negative `shuffle_buffer`,
            or `streaming` does not fit the datasets.
    """
    _check_tokenizer(tokenizer, max_seq_length)
    if shuffle_buffer < 0:
        raise UserError(f"shuffle_buffer must be 0 (the order of the files) or more pairs, not {shuffle_buffer}")
    state, backend = tokenizer_state(tokenizer), _backend(tokenizer, max_seq_length)
    tokenized: dict[str, Any] = {}
    for language, dataset in datasets.items():
        if streaming != isinstance(dataset, IterableDataset):
            raise UserError(f"{language}: streaming={streaming}, but the dataset is a {type(dataset).__name__}")
        settings: dict[str, Any] = {"features": _features(), "remove_columns": dataset.column_names}
        if streaming:
            dataset = dataset.repeat(None)
            settings["batch_size"] = shuffle_buffer or ENCODED_AT_ONCE
        else:
            key = repr((CACHE_VERSION, dataset._fingerprint, state, max_seq_length, language))
            settings["new_fingerprint"] = hashlib.sha256(key.encode()).hexdigest()[:16]
            settings["desc"] = f"tokenise {language}"
        encode = _Tokenise(backend, language, seed if streaming and shuffle_buffer else None)
        tokenized[language] = dataset.map(encode, with_indices=True, batched=True, **settings)
    return tokenized


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> None:
    if not tokenizer.is_fast:
        raise UserError(f"{type(tokenizer).__name__} is a slow tokenizer; load it with AutoTokenizer")
    if not SHORTEST <= max_seq_length <= tokenizer.model_max_length:
        raise UserError(
            f"max_seq_length={max_seq_length} must be at least {SHORTEST} and at most the tokenizer's "
            f"model_max_length={tokenizer.model_max_length}, the positions the model knows"
        )


def _backend(tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> Tokenizer:
    """A copy that does what a call of the tokenizer would, and that nothing else can change."""
    backend = plain_backend(tokenizer)
    backend.encode_special_tokens = tokenizer.split_special_tokens
    backend.enable_truncation(max_seq_length, direction=tokenizer.truncation_side)
    return backend


def _features() -> Features:
    ids = List(Value("int32"))
    return Features(
        {"source_input_ids": ids, "target_input_ids": ids, "language": Value("string"), "pair_id": Value("string")}
    )


@dataclass
class _Tokenise:
    """Tokenises both sides of a batch of pairs, in shuffled order where there is a seed."""

    tokenizer: Tokenizer
    language: str
    seed: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Tokenise":
        return self  # never changes; `datasets` would hold a copy of the vocabulary for each language

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = batch.get("row", indices)
        order = range(len(rows)) if self.seed is None else self._shuffled(rows, indices[0])
        return {
            "source_input_ids": self._encode(batch["source"], order),
            "target_input_ids": self._encode(batch["target"], order),
            "language": [self.language] * len(rows),
            "pair_id": [f"{self.language}:{rows[number]}" for number in order],
        }

    def _encode(self, texts: list[str], order: Sequence[int]) -> list[np.ndarray]:
        ids: list[np.ndarray] = []
        for start in range(0, len(order), ENCODED_AT_ONCE):
            part = [texts[number] for number in order[start : start + ENCODED_AT_ONCE]]
            ids += [np.array(encoding.ids, np.int32) for encoding in self.tokenizer.encode_batch_fast(part)]
        return ids

    def _shuffled(self, rows: Sequence[Any], position: int) -> list[int]:
        """An order of the block that begins at `position` of the stream, in which each pass is shuffled for itself.

        A pass ends where a row of it comes again, which it does within a block only if the language is small.
        """
        rng = np.random.default_rng((self.seed, zlib.crc32(self.language.encode()), position))
        order: list[int] = []
        seen: set[Any] = set()
        for row in rows:
            if row in seen:
                order += (rng.permutation(len(seen)) + len(order)).tolist()
                seen = set()
            seen.add(row)
        return order + (rng.permutation(len(seen)) + len(order)).tolist()


def token_counts(
    datasets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase, sides: Sequence[str] = ("target",)
) -> np.ndarray:
    """How often each id occurs on these sides of tokenised pairs, (V,) int64; 0 for CLS and padding, SEP is counted.

    Raises:
        ValueError: the datasets stream: their tokens are known only after a whole pass.
    """
    counts = np.zeros(len(tokenizer), dtype=np.int64)  # (V,)
    for language, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            raise UserError(
                f"{language}: the tokens of a stream are unknown before it ends; take them from a map-style sample, "
                "or do not stream"
            )
        columns = [f"{side}_input_ids" for side in sides]
        for batch in dataset.select_columns(columns).with_format("arrow").iter(100_000):
            for name in columns:
                ids = batch[name].combine_chunks().flatten().to_numpy()
                counts += np.bincount(ids, minlength=len(counts))
    for token in {tokenizer.cls_token_id, tokenizer.pad_token_id} - {tokenizer.sep_token_id, None}:
        counts[token] = 0
    return counts


def target_vocabulary(datasets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Sorted ids that occur on the target sides of tokenised pairs, SEP included, CLS and padding left out.

    These are the ids that RTL predicts, so its softmax need not run over any other.

    Raises:
        ValueError: as `token_counts`.
    """
    return np.flatnonzero(token_counts(datasets, tokenizer)).tolist()


def read_target_vocabulary(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Sorted ids of the file that `prepare_data.py --target_vocabulary` writes.

    Raises:
        ValueError: not such a file, or one of another tokenizer.
        FileNotFoundError: no such file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        size, ids = content["vocab_size"], sorted(set(map(operator.index, content["target_token_ids"])))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not written by prepare_data.py --target_vocabulary ({error!r})") from error
    if size != len(tokenizer) or not ids or not 0 <= ids[0] <= ids[-1] < size:
        raise UserError(
            f"{path} is for the {size} ids of {content.get('tokenizer')}, the tokenizer here has {len(tokenizer)}: "
            "run prepare_data.py --target_vocabulary with it"
        )
    return ids


@dataclass
class BitextCollator:
    """Pads tokenised pairs to the longest of the batch, each side for itself.

    Called with a list of B rows of `tokenize_bitext`, it returns LongTensors `source_input_ids`,
    `source_attention_mask` (B, S_x), `target_input_ids`, `target_attention_mask` (B, S_y), `language_ids` (B,), which
    index `languages`, and the list of str `pair_ids`.

    Attributes:
        pad_token_id: the tokenizer's padding id.
        languages: all languages of the run.
        pad_to_multiple_of: rounds both lengths up; 8 suits GPUs.
    """

    pad_token_id: int
    languages: Sequence[str]
    pad_to_multiple_of: int | None = None

    def __post_init__(self) -> None:
        if self.pad_token_id is None:
            raise UserError("the tokenizer has no padding token; set tokenizer.pad_token")
        self._index = {language: number for number, language in enumerate(self.languages)}

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if unknown := {row["language"] for row in rows} - self._index.keys():
            raise UserError(f"languages {sorted(unknown)} are not among the collator's {list(self.languages)}")
        batch: dict[str, Any] = {}
        for side in ("source", "target"):
            padded = self._pad([row[f"{side}_input_ids"] for row in rows])
            batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"] = padded
        batch["language_ids"] = torch.tensor([self._index[row["language"]] for row in rows])  # (B,)
        batch["pair_ids"] = [row["pair_id"] for row in rows]
        return batch

    def _pad(self, sequences: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and attention mask, both (B, S)."""
        lengths = np.array([len(sequence) for sequence in sequences])  # (B,)
        multiple = self.pad_to_multiple_of or 1
        width = -(-int(lengths.max()) // multiple) * multiple
        mask = np.arange(width) < lengths[:, None]  # (B, S)
        ids = np.full(mask.shape, self.pad_token_id, dtype=np.int64)  # (B, S)
        ids[mask] = np.concatenate(sequences)
        return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))
