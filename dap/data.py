"""From pairs of text to batches: dev split, tokenisation, language mix, collation (no models).

Shapes: B pairs, S tokens. The order is: `corpus.load_bitext` → `split_validation` (or `drop_targets`) →
`tokenize_bitext` → `mix_languages` → `BitextCollator`. Everything takes map-style and streaming datasets unless it
says otherwise. Streams that are tokenised have no end, so that all processes draw equal numbers of full batches.
"""

import copy
import hashlib
import json
import logging
import operator
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
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
from tokenizers import Tokenizer
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MIXES = ("natural", "uniform", "temperature")
DEV_DIVISOR = 10  # a dev set is at most a tenth of its language
SHUFFLE_BUFFER = 4000  # pairs a language
SHORTEST = 3  # tokens: CLS, one of text, SEP
ENCODED_AT_ONCE = 1000  # sentences
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
            _filtered(dataset, held, language)
            if streamed
            else heads[language].select(_kept(keys[language], held, language))
        )
    return train, dev


def drop_targets(datasets: Bitext, targets: Iterable[str]) -> dict[str, Any]:
    """Training sets without the pairs whose target is among `targets`, such as those of a dev set of its own.

    Targets are compared by `normalise`. Map-style datasets get the column `row` (the row before) where they lose
    pairs, and the number dropped is logged; streams are filtered on the fly.

    Raises:
        ValueError: nothing of a language is left to train on; of a stream this is known after its first pass.
    """
    held = {normalise(text) for text in targets}
    left: dict[str, Any] = {}
    for language, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            left[language] = _filtered(dataset, held, language)
            continue
        rows = _kept([normalise(text) for text in dataset["target"][:]], held, language)
        left[language] = dataset if len(rows) == len(dataset) else _numbered(dataset).select(rows)
        if dropped := len(dataset) - len(rows):
            logger.info("%s: %d of %d pairs dropped, their targets are dev targets", language, dropped, len(dataset))
    return left


def _filtered(stream: IterableDataset, held: set[str], language: str) -> IterableDataset:
    columns = [name for name in ("target", "row") if name in stream.column_names]
    return stream.filter(_Unseen(held, language), input_columns=columns)


def _numbered(dataset: Dataset) -> Dataset:
    return dataset if "row" in dataset.column_names else dataset.add_column("row", np.arange(len(dataset)))


def _head(dataset: Dataset | IterableDataset, pairs: int) -> Dataset:
    """All of a map-style dataset with its rows numbered; of a stream the first pairs, in memory."""
    if isinstance(dataset, Dataset):
        return _numbered(dataset)
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
        raise _nothing_left(f"all {len(keys)} pairs", language)
    return rows


def _nothing_left(pairs: str, language: str) -> ValueError:
    return ValueError(
        f"{language}: {pairs} have a target sentence that a dev set holds out, so nothing is left "
        f"to train on; hold out fewer pairs (dev_pairs, or the dev data given), or leave {language} out"
    )


@dataclass
class _Unseen:
    """Whether a target sentence is not held out; raises when a stream comes round and all were.

    An endless stream of which nothing is left would keep its reader waiting for ever.
    """

    held: set[str]
    language: str
    first: str | None = None  # row
    passed: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Unseen":
        return _Unseen(self.held, self.language)  # `datasets` would hold a copy of the set for each language

    def __call__(self, target: str, row: str | None = None) -> bool:
        if self.passed:
            return normalise(target) not in self.held
        if row is not None and row == self.first:
            raise _nothing_left("all pairs of a stream", self.language)
        self.first = self.first if self.first is not None else row
        self.passed = normalise(target) not in self.held
        return self.passed


# Tokens


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
        raise ValueError(f"shuffle_buffer must be 0 (the order of the files) or more pairs, not {shuffle_buffer}")
    state, backend = _tokenizer_state(tokenizer), _backend(tokenizer, max_seq_length)
    tokenized: dict[str, Any] = {}
    for language, dataset in datasets.items():
        if streaming != isinstance(dataset, IterableDataset):
            raise ValueError(f"{language}: streaming={streaming}, but the dataset is a {type(dataset).__name__}")
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
        raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer; load it with AutoTokenizer")
    if not SHORTEST <= max_seq_length <= tokenizer.model_max_length:
        raise ValueError(
            f"max_seq_length={max_seq_length} must be at least {SHORTEST} and at most the tokenizer's "
            f"model_max_length={tokenizer.model_max_length}, the positions the model knows"
        )


def _tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of what the tokenizer does, free of the truncation and padding that earlier calls left in it."""
    return hashlib.sha256(_backend(tokenizer).to_str().encode()).hexdigest()


def _backend(tokenizer: PreTrainedTokenizerBase, max_seq_length: int | None = None) -> Tokenizer:
    """A copy that does what a call of the tokenizer would, and that nothing else can change."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    if max_seq_length is not None:
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
            raise ValueError(
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
        raise ValueError(f"{path}: not written by prepare_data.py --target_vocabulary ({error!r})") from error
    if size != len(tokenizer) or not ids or not 0 <= ids[0] <= ids[-1] < size:
        raise ValueError(
            f"{path} is for the {size} ids of {content.get('tokenizer')}, the tokenizer here has {len(tokenizer)}: "
            "run prepare_data.py --target_vocabulary with it"
        )
    return ids


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

    Streaming: the languages, each of which starts again after its last pair, are interleaved at random by the seed, in
    the shares of `mix_weights`, without end: the training must have `max_steps`. Every process draws the same number
    of full batches, whatever files it was dealt, and draws the same from step n on when it skips n batches. A share of
    the files is dealt to each process (and worker) where every language has as many files; else all processes read
    all files and train on their share of the pairs. `uniform` needs no sizes.

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
    if mix == "uniform":
        sizes = dict.fromkeys(tokenized, 1)
    if sizes is None:
        raise ValueError(
            f"a streamed {mix} mix needs the sizes of the languages: count them (corpus.count_pairs reads the files "
            f"once), choose the uniform mix, or do not stream"
        )
    if missing := tokenized.keys() - sizes.keys():
        raise ValueError(f"sizes lacks {sorted(missing)}; give the number of pairs of every language")
    weights = mix_weights([sizes[language] for language in tokenized], mix, alpha)
    streams = [stream.repeat(None) for stream in tokenized.values()]  # tokenised text has no end anyway
    return interleave_datasets(streams, probabilities=weights.tolist(), seed=seed)


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
