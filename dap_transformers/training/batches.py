"""From pairs of text to batches: dev split, tokens, language mix and padding.

A pair passes these steps in order:

1. `dap_transformers.text.load_bitext` reads it, map-style or as a stream.
2. `split_validation` holds out a dev set, or `drop_targets` removes the targets of a given one.
3. `tokenize_bitext` turns both sides into token ids.
4. `LanguageMixSampler` draws it into an epoch, or `mix_streams` into an endless stream.
5. `BitextCollator` pads it with the other pairs of its batch.

Shapes: B pairs of a batch, S tokens of the longest sentence.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
    interleave_datasets,
)
from tokenizers import Tokenizer
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from dap_transformers.errors import UserError
from dap_transformers.languages import normalise_all
from dap_transformers.text_keys import ranks, text_keys
from dap_transformers.tokenizers import plain_backend, require_room

logger = logging.getLogger(__name__)

DEV_DIVISOR = 10  # a dev set has at most a tenth of its language
NORMALISED_AT_ONCE = 100_000  # sentences; more would only take more memory
ROWS_AT_ONCE = 65_536  # rows of an epoch that are Python integers at a time
PAIRS_WITH_BAR = 50_000  # pairs of a language whose tokenisation shows a progress bar
CACHE_VERSION = 2
MIXES = ("natural", "uniform", "temperature")

PairsByLanguage = Mapping[str, Dataset] | Mapping[str, IterableDataset]  # language -> its pairs


# -------------------------------------------------------------------------------------------- split


def split_validation(
    datasets: PairsByLanguage, dev_pairs: int, seed: int
) -> tuple[dict[str, Any], dict[str, Dataset]]:
    """Hold out dev pairs so that no target of a dev set is a target of any training set.

    Targets are compared in the form of `dap_transformers.languages.normalise`. A random order of
    all possible
    texts (`dap_transformers.text_keys.ranks`) decides which targets are held out. Each language
    takes those
    that come first, with one pair for each target. The order is the same for all languages.
    Languages that translate the same English text therefore hold out the same sentences, and the
    training sets lose as few pairs as possible. `prepare-data` chooses its dev sets by the
    same order.

    A language holds out at most a tenth of its pairs. A language with fewer than ten pairs holds
    out none, with a warning. From a stream, only the first 10 * `dev_pairs` pairs can be held
    out.

    Args:
        datasets: pairs by language, map-style or streamed.
        dev_pairs: largest number of pairs per language to hold out. With 0 there are no dev sets,
            and the datasets are returned unchanged.
        seed: seed of the random order.

    Returns:
        The training sets and the dev sets, each by language. Map-style datasets have a new column
        `row`, the row number before the split. Dev sets are always map-style.
    """
    if dev_pairs < 0:
        raise UserError(f"dev_pairs must be 0 (no dev set) or more, not {dev_pairs}")
    if dev_pairs == 0:
        return dict(datasets), {}

    rest: dict[str, Any] = {}
    dev: dict[str, Dataset] = {}
    keys: dict[str, np.ndarray] = {}
    held_out: set[int] = set()
    for language, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            rest[language] = dataset
            beginning = list(dataset.take(DEV_DIVISOR * dev_pairs))
            candidates = Dataset.from_list(beginning, features=dataset.features)
        else:
            rest[language] = candidates = _numbered(dataset)

        keys[language] = _target_keys(candidates)
        rows = _rows_to_hold_out(keys[language], dev_pairs, seed)
        if rows:
            dev[language] = candidates.select(rows)
            held_out.update(keys[language][rows].tolist())
        else:
            logger.warning("%s: too few pairs for a dev set (%d)", language, len(candidates))
    return _without(rest, held_out, keys), dev


def drop_targets(datasets: PairsByLanguage, targets: Iterable[str]) -> dict[str, Any]:
    """Remove the pairs whose target is one of `targets`, such as the targets of a dev set.

    Args:
        datasets: pairs by language, map-style or streamed.
        targets: sentences. They are compared in the form of
        `dap_transformers.languages.normalise`, which
            ignores, for example, case and punctuation.

    Returns:
        The remaining pairs by language. Streams are filtered while they are read. A map-style
        dataset that loses pairs has a new column `row`, the row number before the removal.
    """
    held_out = text_keys(normalise_all(list(targets)))
    keys = {}
    for language, dataset in datasets.items():
        if isinstance(dataset, Dataset):
            keys[language] = _target_keys(dataset)
    return _without(datasets, set(held_out.tolist()), keys)


def _target_keys(dataset: Dataset) -> np.ndarray:
    """Return the hash of each pair's normalised target: uint64 (number of pairs,)."""
    keys = [np.empty(0, np.uint64)]
    for batch in dataset.select_columns("target").iter(NORMALISED_AT_ONCE):
        keys.append(text_keys(normalise_all(batch["target"])))
    return np.concatenate(keys)


def _rows_to_hold_out(keys: np.ndarray, dev_pairs: int, seed: int) -> list[int]:
    """Return the row numbers of the pairs to hold out: those whose targets have the smallest ranks.

    The rank of a target is its place in a random order (`dap_transformers.text_keys.ranks`). Of
    pairs with the
    same target, only the first is chosen.

    Returns:
        Row numbers, in ascending order. Empty if there are fewer than ten rows.
    """
    count = min(dev_pairs, len(keys) // DEV_DIVISOR)
    _, first_rows = np.unique(ranks(keys, seed), return_index=True)  # sorted by rank
    return sorted(first_rows[:count].tolist())


def _without(
    datasets: PairsByLanguage, held_out: set[int], keys: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Remove the pairs whose target is held out.

    Returns:
        The remaining pairs by language. Streams are filtered while they are read. A map-style
        dataset that loses pairs gets a column `row` with the row numbers before.
    """
    left: dict[str, Any] = {}
    known = np.fromiter(held_out, np.uint64, len(held_out))
    for language, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            left[language] = _filtered_stream(dataset, held_out, language)
            continue

        own = keys[language]
        rows = np.flatnonzero(~np.isin(own, known))
        if not len(rows):
            raise _nothing_left(language)
        dropped = len(own) - len(rows)
        if dropped:
            dataset = _numbered(dataset).select(rows)
            logger.info(
                "%s: %d of %d pairs are not trained on, because their targets are in the dev set",
                language,
                dropped,
                len(own),
            )
        left[language] = dataset
    return left


def _filtered_stream(
    dataset: IterableDataset, held_out: set[int], language: str
) -> IterableDataset:
    """Return a stream that skips the pairs whose target is held out.

    Its beginning is read at once, to find at least one pair that is left.
    """
    left = dataset.filter(_IsKept(held_out), input_columns=["target"], batched=True)
    # An endless stream of nothing would keep its reader waiting for ever.
    if not list(left.take(1)):
        raise _nothing_left(language)
    return left


@dataclass(frozen=True)
class _IsKept:
    """Function that tells for each target of a batch whether its pair is kept for training.

    Called with a list of targets, it returns a list of bool. False means that the target, after
    normalising, is held out.

    Attributes:
        held_out: hashes of the targets to remove.
    """

    held_out: set[int]

    def __call__(self, targets: list[str]) -> list[bool]:
        keys = text_keys(normalise_all(targets)).tolist()
        return [key not in self.held_out for key in keys]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_IsKept":
        # It never changes. `datasets` would otherwise copy the set for each language.
        return self


def _numbered(dataset: Dataset) -> Dataset:
    """Return the dataset with a column `row` (0, 1, 2, …), or unchanged if it has such a column."""
    if "row" in dataset.column_names:
        return dataset
    return dataset.add_column("row", np.arange(len(dataset)))


def _nothing_left(language: str) -> UserError:
    """Return the error for a language whose pairs are all held out. The caller raises it."""
    return UserError(
        f"{language}: every target sentence is held out for a dev set, so nothing is left to train "
        f"on. Hold out fewer pairs (--dev_pairs, --validation_data), or leave {language} out."
    )


# ------------------------------------------------------------------------------------------- tokens


def tokenize_bitext(
    datasets: PairsByLanguage,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    prefix: str = "",
) -> dict[str, Any]:
    """Turn both sides of all pairs into token ids.

    The result has the columns

    - `source_input_ids`, `target_input_ids`: ids with the tokenizer's special tokens,
    - `language`: the language code of the source,
    - `pair_id`: the language and the row in the corpus, such as `"de:1234"`. In a stream of
      several files it also has the file: `"de:name:1234"`.

    Map-style results are cached on disk, and used again for the same text, tokenizer, length and
    prefix. The order of the pairs does not change.

    Args:
        datasets: pairs by language, map-style or streamed.
        tokenizer: a fast tokenizer.
        max_seq_length: largest number of tokens of a sentence, with special tokens and prefix. The
            rest is cut off.
        prefix: text to put before every sentence.

    Returns:
        Tokenised pairs by language.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is a slow tokenizer; load it with AutoTokenizer"
        )
    require_room(tokenizer, max_seq_length, prefix)
    backend = cutting_backend(tokenizer, max_seq_length)
    state = hashlib.sha256(backend.to_str().encode()).hexdigest()
    ids = List(Value("int32"))
    text = Value("string")
    features = Features(
        {"source_input_ids": ids, "target_input_ids": ids, "language": text, "pair_id": text}
    )

    tokenized: dict[str, Any] = {}
    for language, dataset in datasets.items():
        options: dict[str, Any] = {"features": features, "remove_columns": dataset.column_names}
        if isinstance(dataset, Dataset):
            # Everything that changes the token ids is in the name of the cached file.
            key = (
                CACHE_VERSION,
                dataset._fingerprint,
                state,
                backend.encode_special_tokens,
                language,
                prefix,
            )
            options["new_fingerprint"] = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
            options["desc"] = f"tokenise {language}"
        encode = _Tokenise(backend, language, prefix)
        with _bar_if_long(dataset):
            tokenized[language] = dataset.map(encode, with_indices=True, batched=True, **options)
    return tokenized


@contextmanager
def _bar_if_long(dataset: Any) -> Iterator[None]:
    """Hide the progress bars of `datasets` within the block, unless there are many pairs.

    Otherwise, text in many languages prints as many bars, and each of them is done at once.
    """
    is_short = isinstance(dataset, Dataset) and len(dataset) < PAIRS_WITH_BAR
    hides = is_short and not are_progress_bars_disabled()
    if hides:
        disable_progress_bars()
    try:
        yield
    finally:
        if hides:
            enable_progress_bars()


def cutting_backend(tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> Tokenizer:
    """Copy a tokenizer's Rust tokenizer, and make the copy cut sentences to a length.

    A copy is needed because each call of the original may change the length that it cuts to.

    Args:
        tokenizer: a fast tokenizer.
        max_seq_length: largest number of tokens of a sentence, with special tokens.
    """
    backend = plain_backend(tokenizer)
    backend.encode_special_tokens = tokenizer.split_special_tokens
    backend.enable_truncation(max_seq_length, direction=tokenizer.truncation_side)
    return backend


@dataclass(frozen=True)
class _Tokenise:
    """Function that tokenises both sides of a batch of pairs, as `datasets.map` calls it.

    It returns the columns of `tokenize_bitext`. The row number of a pair is that of its column
    `row` or, without such a column, its index.

    Attributes:
        tokenizer: the Rust tokenizer, which cuts sentences to their length.
        language: language code of the sources.
        prefix: text to put before every sentence.
    """

    tokenizer: Tokenizer
    language: str
    prefix: str = ""

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        rows = batch.get("row", indices)
        return {
            "source_input_ids": self._encode(batch["source"]),
            "target_input_ids": self._encode(batch["target"]),
            "language": [self.language] * len(rows),
            "pair_id": [f"{self.language}:{row}" for row in rows],
        }

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text with the prefix before it: int32 (tokens,) each."""
        texts = [self.prefix + text for text in texts]
        encodings = self.tokenizer.encode_batch_fast(texts)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Tokenise":
        # It never changes. `datasets` would otherwise copy the vocabulary for each language.
        return self


def tokenize_pairs(
    sources: Sequence[str],
    targets: Sequence[str],
    language: str,
    backend: Tokenizer,
    prefix: str = "",
) -> list[dict[str, Any]]:
    """Tokenise a few pairs, such as dev pairs.

    Args:
        sources: source sentences.
        targets: their translations.
        language: language code of the sources.
        backend: the result of `cutting_backend`. Making it is slow for a large vocabulary, so make
            it once for all languages.
        prefix: text to put before every sentence.

    Returns:
        One dictionary per pair, with the columns of `tokenize_bitext` as keys. The numbers in
        `pair_id` begin with 0, as in "de:0".
    """
    encode = _Tokenise(backend, language, prefix)
    columns = encode({"source": list(sources), "target": list(targets)}, list(range(len(sources))))
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


# ---------------------------------------------------------------------------------------------- mix


def mix_weights(sizes: Sequence[int], mix: str, alpha: float = 0.5) -> np.ndarray:
    """Compute each language's share of the pairs that are drawn for training.

    The share of a language with n pairs is proportional to n^α. The exponent α is 1 for the
    natural mix, 0 for the uniform mix and `alpha` for the temperature mix.

    >>> mix_weights([900, 100], "temperature", 0.5)
    array([0.75, 0.25])

    Args:
        sizes: number of pairs of each language.
        mix: "natural", "uniform" or "temperature".
        alpha: exponent of the temperature mix, 0 to 1. Other mixes ignore it.

    Returns:
        One share per language, float64. They add up to 1.
    """
    if mix not in MIXES:
        raise UserError(f"unknown language mix {mix!r}: give one of {', '.join(MIXES)}")
    if not 0.0 <= alpha <= 1.0:
        raise UserError(f"mix_alpha={alpha}: give 0 (uniform) to 1 (natural)")
    if not len(sizes) or min(sizes) < 1:
        raise UserError(f"every language needs at least one pair; the sizes are {list(sizes)}")
    exponent = {"natural": 1.0, "uniform": 0.0, "temperature": alpha}[mix]
    weights = np.asarray(sizes, dtype=np.float64) ** exponent
    return weights / weights.sum()


class LanguageMixSampler(Sampler[int]):
    """Draws the rows of an epoch from the concatenated datasets of all languages.

    Iterating yields row numbers. An epoch has as many rows as all languages together, in random
    order. Each language gets its share of them (`mix_weights`), rounded to a whole number. No
    pair of a language is repeated before all its pairs have been drawn. This also holds across
    epochs: pairs that epoch 0 leaves out come first in epoch 1.

    The order depends only on the arguments and on `set_epoch`, so a resumed run sees the same
    pairs as a run without a stop.

    Args:
        sizes: number of pairs of each language, in the order of the concatenation.
        mix: "natural", "uniform" or "temperature", as in `mix_weights`.
        alpha: exponent of the temperature mix.
        seed: seed of the order.
    """

    def __init__(self, sizes: Sequence[int], mix: str, alpha: float, seed: int) -> None:
        self.sizes = list(sizes)
        self.seed = seed
        self.epoch = 0

        # Pairs per epoch of each language, rounded so that their sum stays the same.
        exact = mix_weights(sizes, mix, alpha) * sum(sizes)
        self.counts = np.floor(exact).astype(np.int64)
        by_remainder = np.argsort(self.counts - exact, kind="stable")
        missing = sum(sizes) - self.counts.sum()
        self.counts[by_remainder[:missing]] += 1

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, from 0, whose rows the next iteration draws."""
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.sizes)

    def __iter__(self) -> Iterator[int]:
        # Half the memory, where the numbers are small enough.
        small = len(self) <= np.iinfo(np.int32).max
        rows = np.empty(len(self), np.int32 if small else np.int64)
        starts = np.cumsum([0, *self.sizes[:-1]])
        ends = np.cumsum(self.counts)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            rows[end - self.counts[number] : end] = start + self._rows_of(number)
        rng = np.random.default_rng((self.seed, len(self.sizes), self.epoch))
        rng.shuffle(rows)
        # Python's integers take five times the memory of the array's.
        for start in range(0, len(rows), ROWS_AT_ONCE):
            yield from rows[start : start + ROWS_AT_ONCE].tolist()

    def _rows_of(self, number: int) -> np.ndarray:
        """Return the rows that an epoch draws from one language.

        All shuffles of a language's rows form one endless sequence. Each epoch takes the next
        part of it.

        Returns:
            Row numbers within the language's own dataset, from 0.
        """
        size = self.sizes[number]
        count = int(self.counts[number])
        begin = self.epoch * count
        first = begin // size
        last = -(-(begin + count) // size)
        parts = [np.empty(0, dtype=np.int64)]
        for turn in range(first, last):
            rng = np.random.default_rng((self.seed, number, turn))
            parts.append(rng.permutation(size))
        offset = begin - first * size
        return np.concatenate(parts)[offset : offset + count]


def mix_streams(
    streams: Mapping[str, IterableDataset],
    weights: np.ndarray,
    shuffle_buffer: int,
    seed: int,
) -> IterableDataset:
    """Mix the streams of all languages into one stream without end.

    Every language begins again after its last pair, in the same order. All processes therefore
    draw equal numbers of full batches. The order depends only on the arguments, so a resumed run
    that skips the same batches continues exactly.

    Files are dealt out to processes and workers if every language has enough of them. Otherwise
    all processes read all files, and each trains on its share of the pairs.

    Args:
        streams: tokenised pairs by language.
        weights: share of each language, see `mix_weights`.
        shuffle_buffer: pairs per language that are held in memory and shuffled. A pair takes about
            2 kB at 32 tokens. 0 keeps the order of the files.
        seed: seed of the shuffles and of the mix.
    """
    if shuffle_buffer < 0:
        raise UserError(
            f"shuffle_buffer={shuffle_buffer}: give 0 (the order of the files) or more pairs"
        )
    endless = []
    for stream in streams.values():
        if shuffle_buffer:
            stream = stream.shuffle(seed=seed, buffer_size=shuffle_buffer)
        endless.append(stream.repeat(None))
    return interleave_datasets(endless, probabilities=weights.tolist(), seed=seed)


# ------------------------------------------------------------------------------------------ batches


@dataclass
class BitextCollator:
    """Makes tensors of a batch of tokenised pairs. Each side is padded to its longest sentence.

    Called with a list of B rows of `tokenize_bitext`, it returns a dictionary with

    - `source_input_ids`, `source_attention_mask`: int64 (B, S_x),
    - `target_input_ids`, `target_attention_mask`: int64 (B, S_y),
    - `language_ids`: int64 (B,), the position of each source language in `languages`,
    - `pair_ids`: list of B strings,
    - with `teacher`, also `teacher_embeds`: float32 (B, T), the teacher's vectors of the targets,
    - with `negatives`, also `negative_input_ids`, `negative_attention_mask`: int64 (B, S_n). The
      mask of a pair without a negative is all 0.

    A row of a language that is not in `languages` raises `UserError`.

    Attributes:
        pad_token_id: the tokenizer's padding id. None raises `UserError`.
        languages: all source languages of the run.
        negatives: function that returns the token ids of a hard negative for each row, such as
            `HardNegatives`. An empty list stands for no negative. None adds no hard negatives.
        teacher: vectors (N, T) of a teacher. A pair's row of it is in the column `teacher_row`.
            None adds no vectors.
    """

    pad_token_id: int
    languages: Sequence[str]
    negatives: Callable[[Sequence[Mapping[str, Any]]], list[list[int]]] | None = None
    teacher: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.pad_token_id is None:
            raise UserError("the tokenizer has no padding token; set tokenizer.pad_token")
        self._index = {language: number for number, language in enumerate(self.languages)}

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        unknown = {row["language"] for row in rows} - self._index.keys()
        if unknown:
            raise UserError(
                f"languages {sorted(unknown)} are not among the collator's {list(self.languages)}"
            )
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
            numbers = [row["teacher_row"] for row in rows]
            batch["teacher_embeds"] = torch.from_numpy(self.teacher[numbers])  # (B, T)
        batch["pair_ids"] = [row["pair_id"] for row in rows]
        return batch

    def _pad(self, sequences: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """Pad sequences of token ids to the longest one.

        Returns:
            Token ids int64 (B, S) with S of at least 1, and a mask bool (B, S) that is True for
            real tokens.
        """
        lengths = np.array([len(sequence) for sequence in sequences])  # (B,)
        longest = max(1, lengths.max())
        mask = np.arange(longest) < lengths[:, None]  # (B, S)
        ids = np.full(mask.shape, self.pad_token_id, dtype=np.int64)  # (B, S)
        ids[mask] = np.concatenate(sequences)
        return ids, mask
