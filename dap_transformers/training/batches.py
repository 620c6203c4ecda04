"""From pairs of text to batches: token ids and padding.

A pair passes these steps in order:

1. `dap_transformers.text.corpus.load_bitext` reads it.
2. `split_validation` holds out a dev set, or `drop_targets` removes the targets of a given one.
3. `tokenize_bitext` turns both sides into token ids.
4. `LanguageMixSampler` draws it into an epoch.
5. `BitextCollator` pads it with the other pairs of its batch.

Shapes: B pairs of a batch, S tokens of the longest sentence.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, List, Value, disable_progress_bars
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from dap_transformers.errors import reading
from dap_transformers.tokenizer import cutting, require_room, tokenizer_state
from dap_transformers.training.dev_split import Datasets

CACHE_VERSION = 3


def tokenize_bitext(
    datasets: Datasets,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    prefix: str = "",
) -> dict[str, Dataset]:
    """Turn both sides of all pairs into token ids.

    The result has the columns

    - `source_input_ids`, `target_input_ids`: ids with the tokenizer's special tokens,
    - `language`: the language code of the source,
    - `pair_id`: the language and the row in the corpus, such as `"de:1234"`.

    The results are cached on disk, and used again for the same text, tokenizer, length and
    prefix. The order of the pairs does not change.

    Args:
        datasets: pairs by language.
        max_seq_length: largest number of tokens of a sentence, with special tokens and prefix. The
            rest is cut off.
        prefix: text to put before every sentence.
    """
    require_room(tokenizer, max_seq_length, prefix)
    ids_of = cutting(tokenizer, max_seq_length)
    state = hashlib.sha256(tokenizer_state(tokenizer).encode()).hexdigest()
    ids = List(Value("int32"))
    string = Value("string")
    features = Features(
        {"source_input_ids": ids, "target_input_ids": ids, "language": string, "pair_id": string}
    )

    disable_progress_bars()  # there would be one for each language
    total = sum(map(len, datasets.values()))
    bar = tqdm(total=total, desc="tokenise", unit=" pairs", unit_scale=True, delay=1)
    done = 0

    def encode(texts: list[str]) -> list[np.ndarray]:
        rows = ids_of([prefix + text for text in texts])
        return [np.array(ids, np.int32) for ids in rows]

    def tokenise(batch: dict[str, list], indices: list[int], language: str) -> dict[str, list]:
        rows = batch.get("row", indices)
        bar.update(len(rows))
        return {
            "source_input_ids": encode(batch["source"]),
            "target_input_ids": encode(batch["target"]),
            "language": [language] * len(rows),
            "pair_id": [f"{language}:{row}" for row in rows],
        }

    tokenized: dict[str, Dataset] = {}
    for language, dataset in datasets.items():
        # Everything that changes the token ids is in the name of the cached file.
        key = (
            CACHE_VERSION,
            dataset._fingerprint,
            state,
            tokenizer.split_special_tokens,
            max_seq_length,
            language,
            prefix,
        )
        with reading(f"the pairs of {language!r}"):
            tokenized[language] = dataset.map(
                tokenise,
                fn_kwargs={"language": language},
                with_indices=True,
                batched=True,
                features=features,
                remove_columns=dataset.column_names,
                new_fingerprint=hashlib.sha256(repr(key).encode()).hexdigest()[:16],
            )
        done += len(dataset)
        bar.update(done - bar.n)  # pairs that were cached
    bar.close()
    return tokenized


@dataclass
class BitextCollator:
    """Makes tensors of a batch of tokenised pairs. Each side is padded to its longest sentence.

    Called with a list of B rows of `tokenize_bitext`, it returns a dictionary with

    - `source_input_ids`, `source_attention_mask`: int64 (B, S_x),
    - `target_input_ids`, `target_attention_mask`: int64 (B, S_y),
    - `language_ids`: int64 (B,), the position of each source language in `languages`,
    - `pair_ids`: list of B strings,
    - with `teacher`, also `teacher_embeds`: float32 (B, 2, T), where the vectors of both sides
      should point,
    - with `negatives`, also `negative_input_ids`, `negative_attention_mask`: int64 (B, S_n). The
      mask of a pair without a negative is all 0.

    Attributes:
        pad_token_id: fills up the shorter sentences of a side.
        languages: all source languages of the run.
        negatives: function that returns the token ids of a hard negative for each row, such as
            `HardNegativeMaker`. An empty list stands for no negative. None adds no hard negatives.
        teacher: function that returns `teacher_embeds` of the rows, such as `Teacher`. None adds
            none.
    """

    pad_token_id: int
    languages: Sequence[str]
    negatives: Callable[[Sequence[Mapping[str, Any]]], list[list[int]]] | None = None
    teacher: Callable[[Sequence[Mapping[str, Any]]], Tensor] | None = None

    def __post_init__(self) -> None:
        self._index = {language: number for number, language in enumerate(self.languages)}

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        sides = {
            "source": [row["source_input_ids"] for row in rows],
            "target": [row["target_input_ids"] for row in rows],
        }
        if self.negatives is not None:
            sides["negative"] = self.negatives(rows)

        batch: dict[str, Any] = {}
        for side, sequences in sides.items():
            ids, mask = self._pad(sequences)
            batch[f"{side}_input_ids"] = torch.from_numpy(ids)
            batch[f"{side}_attention_mask"] = torch.from_numpy(mask.astype(np.int64))
        batch["language_ids"] = torch.tensor([self._index[row["language"]] for row in rows])  # (B,)
        if self.teacher is not None:
            batch["teacher_embeds"] = self.teacher(rows)
        batch["pair_ids"] = [row["pair_id"] for row in rows]
        return batch

    def _pad(self, sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Return padded token ids int64 (B, S), S at least 1, and a mask (B, S) of real tokens."""
        lengths = np.array([len(sequence) for sequence in sequences])  # (B,)
        longest = max(1, lengths.max())
        mask = np.arange(longest) < lengths[:, None]  # (B, S)
        ids = np.full(mask.shape, self.pad_token_id, dtype=np.int64)  # (B, S)
        ids[mask] = np.concatenate(sequences)
        return ids, mask
