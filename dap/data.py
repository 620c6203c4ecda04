"""From pairs of text to batches: dev split, tokenisation, language mix, collation (no models).

Shapes: B pairs, S tokens. The order is: `corpus.load_bitext` → `split_validation` → `tokenize_bitext` →
`mix_languages` → `BitextCollator`. Everything takes map-style and streaming datasets unless it says otherwise.
"""

import copy
import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import (
    Dataset,
    Features,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
    interleave_datasets,
)
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MIXES = ("natural", "uniform", "temperature")
DEV_DIVISOR = 10  # a dev set is at most a tenth of its language
SHORTEST = 3  # tokens: CLS, one of text, SEP
CACHE_VERSION = 1

Bitext = Mapping[str, Dataset] | Mapping[str, IterableDataset]

# Validation split


def normalise(text: str) -> str:
    """The letters and digits of a text, case folded: what two sentences share when one would leak the other.

    A text without a letter or digit stands for itself.

    >>> normalise("It's 5 o'clock!"), normalise("…")
    ('its5oclock', '…')
    """
    return "".join(filter(str.isalnum, text.casefold())) or text.strip()


def split_validation(datasets: Bitext, dev_pairs: int, seed: int) -> tuple[dict[str, Any], dict[str, Dataset]]:
    """Splits by target sentence over all languages: no target of any dev set is a target of any train set.

    Targets are compared by `normalise`. Each language gives the `dev_pairs` pairs whose normalised target has the
    smallest seeded hash, each target once. As the order is the same in all languages, languages that translate the
    same English text hold out the same sentences, and train sets lose as little as can be. A language gives at most
    a tenth of its pairs; one with fewer than ten gives none and is absent from the dev sets.

    Map-style datasets get the column `row` (the row before the split), from which `tokenize_bitext` makes its ids.
    Streaming: dev sets (map-style) come from the first 10 * `dev_pairs` pairs, whose targets are filtered
    out of the rest on the fly.

    Raises:
        ValueError: `dev_pairs` is negative, or nothing of a language is left to train on.
    """
    if dev_pairs < 0:
        raise ValueError(f"dev_pairs must be 0 (no dev set) or more, not {dev_pairs}")
    if dev_pairs == 0:
        return dict(datasets), {}
    heads = {language: _head(dataset, DEV_DIVISOR * dev_pairs) for language, dataset in datasets.items()}
    keys = {language: [normalise(text) for text in head["target"][:]] for language, head in heads.items()}
    rows = {language: _held_out(keys[language], dev_pairs, seed) for language in heads}
    held = {keys[language][row] for language in heads for row in rows[language]}
    dev = {language: head.select(rows[language]) for language, head in heads.items() if rows[language]}
    for language in heads.keys() - dev.keys():
        logger.warning("%s: %d pairs are too few for a dev set", language, len(heads[language]))
    train: dict[str, Any] = {}
    for language, dataset in datasets.items():
        streamed = isinstance(dataset, IterableDataset)
        train[language] = (
            dataset.filter(_Unseen(held), input_columns="target")
            if streamed
            else heads[language].select(_kept(keys[language], held, language))
        )
    return train, dev


def _head(dataset: Dataset | IterableDataset, pairs: int) -> Dataset:
    """All of a map-style dataset with its rows numbered; of a stream the first pairs, in memory."""
    if isinstance(dataset, Dataset):
        return dataset if "row" in dataset.column_names else dataset.add_column("row", np.arange(len(dataset)))
    return Dataset.from_list(list(dataset.take(pairs)), features=dataset.features)


def _held_out(keys: list[str], dev_pairs: int, seed: int) -> list[int]:
    """Rows of the dev set: the first row of each of the keys whose seeded hash is smallest."""
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    salt = seed.to_bytes(8, "little", signed=True)
    order = sorted(first, key=lambda key: hashlib.blake2b(key.encode(), digest_size=8, salt=salt).digest())
    return sorted(first[key] for key in order[: min(dev_pairs, len(keys) // DEV_DIVISOR)])


def _kept(keys: list[str], held: set[str], language: str) -> list[int]:
    """Rows whose target is not held out."""
    rows = [row for row, key in enumerate(keys) if key not in held]
    if not rows:
        raise ValueError(
            f"{language}: all {len(keys)} pairs have a target sentence that a dev set holds out, so nothing is left "
            f"to train on; lower dev_pairs, or leave {language} out"
        )
    return rows


@dataclass
class _Unseen:
    """Whether a target sentence is not held out."""

    held: set[str]

    def __call__(self, target: str) -> bool:
        return normalise(target) not in self.held


# Tokens


def require_mask_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the mask token, which the RTL and TLM objectives cannot do without.

    Raises:
        ValueError: the tokenizer has none.
    """
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no mask token, which objectives tr+rtl and tr+tlm need; "
            f"add one (tokenizer.add_special_tokens({{'mask_token': '<mask>'}})), or train with the objective tr"
        )
    return tokenizer.mask_token_id


def tokenize_bitext(
    datasets: Bitext, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, streaming: bool = False
) -> dict[str, Any]:
    """Token ids of both sides, with the tokenizer's special tokens and cut to `max_seq_length` tokens in all.

    Columns: `source_input_ids`, `target_input_ids` (lists of int), `language` (str), `pair_id` (`"de:1234"`: the row
    in the loaded corpus, from 0; in a stream, the position in that process's and worker's stream). Map-style results
    are cached beside the text, for the same text, tokenizer and length.

    Raises:
        ValueError: no fast tokenizer, a length outside 3 to `tokenizer.model_max_length`, or `streaming` does not fit
            the datasets.
    """
    _check_tokenizer(tokenizer, max_seq_length)
    state = _tokenizer_state(tokenizer)
    tokenized: dict[str, Any] = {}
    for language, dataset in datasets.items():
        if streaming != isinstance(dataset, IterableDataset):
            raise ValueError(f"{language}: streaming={streaming}, but the dataset is a {type(dataset).__name__}")
        settings: dict[str, Any] = {"features": _features(), "remove_columns": dataset.column_names}
        if not streaming:
            key = repr((CACHE_VERSION, dataset._fingerprint, state, max_seq_length, language))
            settings["new_fingerprint"] = hashlib.sha256(key.encode()).hexdigest()[:16]
            settings["desc"] = f"tokenise {language}"
        encode = _Tokenise(tokenizer, max_seq_length, language)
        tokenized[language] = dataset.map(encode, with_indices=True, batched=True, **settings)
    return tokenized


def _check_tokenizer(tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> None:
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer; load it with AutoTokenizer")
    if not SHORTEST <= max_seq_length <= tokenizer.model_max_length:
        raise ValueError(
            f"max_seq_length={max_seq_length} must be at least {SHORTEST} and at most the tokenizer's "
            f"model_max_length={tokenizer.model_max_length}, the positions the model knows"
        )


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what the tokenizer does, free of the truncation and padding that earlier calls left in it."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    return hashlib.sha256(backend.to_str().encode()).hexdigest()


def _features() -> Features:
    ids = List(Value("int32"))
    return Features(
        {"source_input_ids": ids, "target_input_ids": ids, "language": Value("string"), "pair_id": Value("string")}
    )


@dataclass
class _Tokenise:
    """Tokenises both sides of a batch of pairs in one call."""

    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int
    language: str

    def __call__(self, batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        texts = list(batch["source"]) + list(batch["target"])
        ids = self.tokenizer(
            texts,
            truncation=True,
            max_length=self.max_seq_length,
            return_attention_mask=False,
            return_token_type_ids=False,
        )["input_ids"]
        rows = batch.get("row", indices)
        return {
            "source_input_ids": ids[: len(rows)],
            "target_input_ids": ids[len(rows) :],
            "language": [self.language] * len(rows),
            "pair_id": [f"{self.language}:{row}" for row in rows],
        }


def target_vocabulary(datasets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Sorted ids that occur on the target sides of tokenised pairs, SEP included, CLS and padding left out.

    These are the ids that RTL predicts, so its softmax need not run over any other.

    Raises:
        ValueError: the datasets stream: their vocabulary is known only after a whole pass.
    """
    seen = np.zeros(len(tokenizer), dtype=bool)  # (V,)
    for language, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                f"{language}: a stream's target vocabulary is unknown before it ends; take it from a map-style "
                f"sample, or train on the whole vocabulary"
            )
        for batch in dataset.select_columns(["target_input_ids"]).with_format("arrow").iter(100_000):
            seen[batch["target_input_ids"].combine_chunks().flatten().to_numpy()] = True
    for token in {tokenizer.cls_token_id, tokenizer.pad_token_id} - {tokenizer.sep_token_id, None}:
        seen[token] = False
    return np.flatnonzero(seen).tolist()


# Language mix


def mix_weights(sizes: Sequence[int], mix: str, alpha: float = 0.5) -> np.ndarray:
    """Share of each language in the mix: p ∝ n^α with α = 1 (natural), 0 (uniform) or `alpha` (temperature).

    >>> mix_weights([900, 100], "temperature", 0.5)
    array([0.75, 0.25])

    Raises:
        ValueError: unknown mix, `alpha` outside 0..1, no or empty languages.
    """
    _check_mix(mix, alpha)
    if not len(sizes) or min(sizes) < 1:
        raise ValueError(f"every language needs at least one pair; the sizes are {list(sizes)}")
    exponent = {"natural": 1.0, "uniform": 0.0, "temperature": alpha}[mix]
    weights = np.asarray(sizes, dtype=np.float64) ** exponent
    return weights / weights.sum()


def _check_mix(mix: str, alpha: float) -> None:
    if mix not in MIXES:
        raise ValueError(f"unknown language mix {mix!r}; it is one of {', '.join(MIXES)}")
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"the mix's alpha must lie in 0 (uniform) to 1 (natural), not {alpha}")


def mix_indices(sizes: Sequence[int], mix: str, alpha: float, seed: int, epoch: int = 0) -> np.ndarray:
    """Rows of the concatenated languages that make up one epoch, shuffled: int64 (N,), N the sum of sizes.

    Language l gets its share of N to the nearest integer (largest remainder). Its pairs are walked through in shuffled
    order, without repeating one before all have been seen, and the walk goes on over epochs: what epoch 0 leaves out
    comes first in epoch 1. The result depends on the arguments alone.
    """
    counts = _apportion(mix_weights(sizes, mix, alpha), sum(sizes))
    starts = np.cumsum([0, *sizes[:-1]])
    walks = [
        start + _walk(size, int(count), epoch * int(count), (seed, number))
        for number, (start, size, count) in enumerate(zip(starts, sizes, counts, strict=True))
    ]
    return np.random.default_rng((seed, len(sizes), epoch)).permutation(np.concatenate(walks))


def _apportion(weights: np.ndarray, total: int) -> np.ndarray:
    """Integers that add up to `total`, in proportion to the weights, by largest remainder."""
    exact = weights * total
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: total - counts.sum()]] += 1
    return counts


def _walk(size: int, count: int, offset: int, seed: tuple[int, int]) -> np.ndarray:
    """Positions `offset` to `offset + count` of an endless row of shuffles of 0..size-1."""
    first, last = offset // size, -(-(offset + count) // size)
    rounds = [np.random.default_rng((*seed, number)).permutation(size) for number in range(first, last)]
    return np.concatenate([*rounds, np.empty(0, dtype=np.int64)])[offset - first * size :][:count]


class LanguageMixSampler(Sampler[int]):
    """Draws `mix_indices` anew each epoch, over the natural mix of the same languages.

    For trainers that call `set_epoch` (accelerate does), so that pairs left out of one epoch come in the next and
    a resumed run sees what the uninterrupted one would have seen.
    """

    def __init__(self, sizes: Sequence[int], mix: str, alpha: float, seed: int) -> None:
        mix_weights(sizes, mix, alpha)
        self.sizes, self.mix, self.alpha, self.seed, self.epoch = list(sizes), mix, alpha, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.sizes)

    def __iter__(self) -> Iterator[int]:
        return iter(mix_indices(self.sizes, self.mix, self.alpha, self.seed, self.epoch).tolist())


def mix_languages(
    tokenized: Mapping[str, Any], mix: str, alpha: float, seed: int, sizes: Mapping[str, int] | None = None
) -> Dataset | IterableDataset:
    """One dataset of all languages, mixed as named in `MIXES`.

    Map-style: `natural` is the concatenation, for the trainer to shuffle; the others select from it the rows of
    `mix_indices` for epoch 0, as many as there are pairs. Each epoch of a stock trainer shuffles that selection;
    `LanguageMixSampler` over the natural mix selects anew each epoch.

    Streaming: languages are interleaved by the seed. `uniform` needs no sizes; small languages start again until each
    has ended once. `natural` sees each pair once an epoch, evenly over languages until the small ones end, or in
    proportion to `sizes` where these are given. `temperature` needs `sizes`.

    Args:
        sizes: pairs a language, such as `corpus.count_pairs` tells; for streaming only.

    Raises:
        ValueError: unknown mix, `alpha` outside 0..1, no languages, or sizes that are missing.
    """
    _check_mix(mix, alpha)
    if not tokenized:
        raise ValueError("there is no language to mix; load parallel text first")
    datasets = list(tokenized.values())
    if isinstance(datasets[0], IterableDataset):
        return _interleave(tokenized, mix, alpha, seed, sizes)
    together = concatenate_datasets(datasets)
    if mix == "natural":
        return together
    return together.select(mix_indices([len(dataset) for dataset in datasets], mix, alpha, seed))


def _interleave(
    tokenized: Mapping[str, IterableDataset], mix: str, alpha: float, seed: int, sizes: Mapping[str, int] | None
) -> IterableDataset:
    if mix != "uniform" and sizes is not None and (missing := tokenized.keys() - sizes.keys()):
        raise ValueError(f"sizes lacks {sorted(missing)}; give the number of pairs of every language")
    if mix == "temperature" and sizes is None:
        raise ValueError("a streamed temperature mix needs the sizes of the languages: give them, or do not stream")
    known = [1] * len(tokenized) if mix == "uniform" or sizes is None else [sizes[language] for language in tokenized]
    return interleave_datasets(
        list(tokenized.values()),
        probabilities=mix_weights(known, mix, alpha).tolist(),
        seed=seed,
        stopping_strategy="all_exhausted_without_replacement" if mix == "natural" else "all_exhausted",
    )


# Batches


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
            raise ValueError("the tokenizer has no padding token; set tokenizer.pad_token")
        self._index = {language: number for number, language in enumerate(self.languages)}

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if unknown := {row["language"] for row in rows} - self._index.keys():
            raise ValueError(f"languages {sorted(unknown)} are not among the collator's {list(self.languages)}")
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
