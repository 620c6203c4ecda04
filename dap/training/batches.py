"""From pairs of text to batches: dev split, tokens, language mix and padding (no models).

Shapes: B pairs, S tokens. The order is: `load_bitext` → `split_validation` (or `drop_targets`) → `tokenize_bitext` →
`LanguageMixSampler` (or `interleave_languages` for streams) → `BitextCollator`. What takes a `Bitext` takes map-style
and streaming datasets.
"""

import hashlib
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, List, Value, interleave_datasets
from tokenizers import Tokenizer
from torch.utils.data import Sampler
from transformers import PreTrainedTokenizerBase

from dap.errors import UserError
from dap.languages import normalise, normalise_all
from dap.tokenizers import plain_backend, require_room

logger = logging.getLogger(__name__)

DEV_DIVISOR = 10  # a dev set is at most a tenth of its language
ENCODED_AT_ONCE = 1000  # sentences
CACHE_VERSION = 2
MIXES = ("natural", "uniform", "temperature")

Bitext = Mapping[str, Dataset] | Mapping[str, IterableDataset]  # by language


# ---------------------------------------------------------------------------------------------- split


def split_validation(
    datasets: Bitext, dev_pairs: int, seed: int
) -> tuple[dict[str, Any], dict[str, Dataset]]:
    """Split by target sentence over all languages: no target of any dev set is a target of any train set.

    Targets are compared by `normalise`. Each language gives the `dev_pairs` pairs whose normalised target has the
    smallest seeded hash, each target once. As the order is the same in all languages, languages that translate the
    same English text hold out the same sentences, and train sets lose as little as can be. A language gives at most
    a tenth of its pairs; one with fewer than ten gives none and is absent from the dev sets.

    Map-style datasets get the column `row` (the row before the split), from which `tokenize_bitext` makes its ids.
    The dev sets of streams, which are map-style, come from the first 10 * `dev_pairs` pairs.

    Raises:
        ValueError: `dev_pairs` is negative, or nothing of a language is left to train on.
    """
    if dev_pairs < 0:
        raise UserError(f"dev_pairs must be 0 (no dev set) or more, not {dev_pairs}")
    if dev_pairs == 0:
        return dict(datasets), {}
    rest: dict[str, Any] = {}
    keys: dict[str, list[str]] = {}
    dev: dict[str, Dataset] = {}
    held: set[str] = set()
    for language, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            rest[language] = dataset
            first = Dataset.from_list(
                list(dataset.take(DEV_DIVISOR * dev_pairs)), features=dataset.features
            )
        else:
            rest[language] = first = _numbered(dataset)
        keys[language] = normalise_all(first["target"][:])
        if rows := _held_out(keys[language], dev_pairs, seed):
            dev[language] = first.select(rows)
            held |= {keys[language][row] for row in rows}
        else:
            logger.warning("%s: %d pairs are too few for a dev set", language, len(first))
    return _without(rest, held, keys), dev


def drop_targets(datasets: Bitext, targets: Iterable[str]) -> dict[str, Any]:
    """Training sets without the pairs whose target is among `targets`, such as those of a dev set of its own.

    Targets are compared by `normalise`. Map-style datasets that lose pairs get the column `row` (the row before).

    Raises:
        ValueError: nothing of a language is left to train on; of a stream this is known after its first pass.
    """
    return _without(datasets, set(normalise_all(list(targets))), {})


def _held_out(keys: list[str], dev_pairs: int, seed: int) -> list[int]:
    """Rows of the dev set: the first row of each of the keys whose seeded hash is smallest."""
    first: dict[str, int] = {}
    for row, key in enumerate(keys):
        first.setdefault(key, row)
    salt = seed.to_bytes(8, "little", signed=True)
    order = sorted(
        first, key=lambda key: hashlib.blake2b(key.encode(), digest_size=8, salt=salt).digest()
    )
    return sorted(first[key] for key in order[: min(dev_pairs, len(keys) // DEV_DIVISOR)])


def _without(datasets: Bitext, held: set[str], keys: Mapping[str, list[str]]) -> dict[str, Any]:
    """The datasets without the pairs whose target is held out; `keys` are normalised targets that are known already.

    The number of pairs that a map-style dataset loses is logged; streams are filtered as they are read.
    """
    left: dict[str, Any] = {}
    for language, dataset in datasets.items():
        if isinstance(dataset, IterableDataset):
            columns = [name for name in ("target", "row") if name in dataset.column_names]
            left[language] = dataset.filter(_Unseen(held, language), input_columns=columns)
            continue
        own = keys[language] if keys else normalise_all(dataset["target"][:])
        rows = [row for row, key in enumerate(own) if key not in held]
        if not rows:
            raise _nothing_left(f"all {len(own)} pairs", language)
        if dropped := len(own) - len(rows):
            dataset = _numbered(dataset).select(rows)
            logger.info(
                "%s: %d of %d pairs dropped, their targets are dev targets",
                language,
                dropped,
                len(own),
            )
        left[language] = dataset
    return left


def _numbered(dataset: Dataset) -> Dataset:
    return (
        dataset
        if "row" in dataset.column_names
        else dataset.add_column("row", np.arange(len(dataset)))
    )


def _nothing_left(pairs: str, language: str) -> UserError:
    return UserError(
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
        return _Unseen(
            self.held, self.language
        )  # `datasets` would hold a copy of the set for each language

    def __call__(self, target: str, row: str | None = None) -> bool:
        unseen = normalise(target) not in self.held
        if not self.passed:
            if row is not None and row == self.first:
                raise _nothing_left("all pairs of a stream", self.language)
            self.first = row if self.first is None else self.first
            self.passed = unseen
        return unseen


# --------------------------------------------------------------------------------------------- tokens


def tokenize_bitext(
    datasets: Bitext,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    shuffle_buffer: int = 0,
    seed: int = 0,
    prefix: str = "",
) -> dict[str, Any]:
    """Token ids of both sides, with the tokenizer's special tokens and cut to `max_seq_length` tokens in all.

    Columns: `source_input_ids`, `target_input_ids` (ints), `language` (str), `pair_id` (`"de:1234"`: the row in the
    loaded corpus, from 0; in a stream of several files `"de:name:1234"`). Map-style results are cached beside the
    text, for the same text, tokenizer and length, and are in the text's order.

    Streams start again after their last pair, without end, so that all processes draw equal numbers of full batches.
    Blocks of `shuffle_buffer` pairs are shuffled by the seed, in every pass anew, but a pair never comes again before
    the others of its pass and block. The order depends on the arguments alone, so a stream resumes exactly.

    Args:
        shuffle_buffer: pairs of a streamed language that a process, or each of its workers, tokenises ahead and holds
            in memory, about 2 kB each at 32 tokens; 0 keeps the order of the files.
        seed: of the shuffle of streams.
        prefix: text before every sentence of both sides.

    Raises:
        ValueError: no fast tokenizer, a length that leaves no token of the text, or a negative `shuffle_buffer`.
    """
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is a slow tokenizer; load it with AutoTokenizer"
        )
    require_room(tokenizer, max_seq_length, prefix)
    if shuffle_buffer < 0:
        raise UserError(
            f"shuffle_buffer must be 0 (the order of the files) or more pairs, not {shuffle_buffer}"
        )
    backend = cutting_backend(tokenizer, max_seq_length)
    state = hashlib.sha256(backend.to_str().encode()).hexdigest()
    ids, text = List(Value("int32")), Value("string")
    features = Features(
        {"source_input_ids": ids, "target_input_ids": ids, "language": text, "pair_id": text}
    )
    tokenized: dict[str, Any] = {}
    for language, dataset in datasets.items():
        settings: dict[str, Any] = {"features": features, "remove_columns": dataset.column_names}
        shuffled = None
        if isinstance(dataset, IterableDataset):
            dataset, shuffled = dataset.repeat(None), seed if shuffle_buffer else None
            settings["batch_size"] = shuffle_buffer or ENCODED_AT_ONCE
        else:
            key = repr(
                (
                    CACHE_VERSION,
                    dataset._fingerprint,
                    state,
                    backend.encode_special_tokens,
                    language,
                    prefix,
                )
            )
            settings["new_fingerprint"] = hashlib.sha256(key.encode()).hexdigest()[:16]
            settings["desc"] = f"tokenise {language}"
        encode = _Tokenise(backend, language, shuffled, prefix)
        tokenized[language] = dataset.map(encode, with_indices=True, batched=True, **settings)
    return tokenized


def cutting_backend(tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> Tokenizer:
    """A copy that does what a call of the tokenizer would, whatever earlier calls left in it, and later ones will."""
    backend = plain_backend(tokenizer)
    backend.encode_special_tokens = tokenizer.split_special_tokens
    backend.enable_truncation(max_seq_length, direction=tokenizer.truncation_side)
    return backend


@dataclass
class _Tokenise:
    """Tokenises both sides of a batch of pairs, in shuffled order where there is a seed."""

    tokenizer: Tokenizer
    language: str
    seed: int | None = None
    prefix: str = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Tokenise":
        return (
            self  # never changes; `datasets` would hold a copy of the vocabulary for each language
        )

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
            part = [
                self.prefix + texts[number] for number in order[start : start + ENCODED_AT_ONCE]
            ]
            ids += [
                np.array(encoding.ids, np.int32)
                for encoding in self.tokenizer.encode_batch_fast(part)
            ]
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


def tokenize_pairs(
    sources: Sequence[str],
    targets: Sequence[str],
    language: str,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    prefix: str = "",
) -> list[dict[str, Any]]:
    """A few pairs as rows of `tokenize_bitext`."""
    encode = _Tokenise(cutting_backend(tokenizer, max_seq_length), language, prefix=prefix)
    columns = encode({"source": list(sources), "target": list(targets)}, [*range(len(sources))])
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


# ------------------------------------------------------------------------------------------------ mix


def mix_weights(sizes: Sequence[int], mix: str, alpha: float = 0.5) -> np.ndarray:
    """Share of each language in the mix: p ∝ n^α with α = 1 (natural), 0 (uniform) or `alpha` (temperature).

    >>> mix_weights([900, 100], "temperature", 0.5)
    array([0.75, 0.25])

    Raises:
        ValueError: unknown mix, `alpha` outside 0..1, no or empty languages.
    """
    if mix not in MIXES:
        raise UserError(f"unknown language mix {mix!r}; it is one of {', '.join(MIXES)}")
    if not 0.0 <= alpha <= 1.0:
        raise UserError(f"the mix's alpha must lie in 0 (uniform) to 1 (natural), not {alpha}")
    if not len(sizes) or min(sizes) < 1:
        raise UserError(f"every language needs at least one pair; the sizes are {list(sizes)}")
    exponent = {"natural": 1.0, "uniform": 0.0, "temperature": alpha}[mix]
    weights = np.asarray(sizes, dtype=np.float64) ** exponent
    return weights / weights.sum()


class LanguageMixSampler(Sampler[int]):
    """Draws the rows of the concatenated languages that make up an epoch: as many as there are, shuffled.

    Language l gets its share of them to the nearest integer (largest remainder). Its pairs are walked through in
    shuffled order, without repeating one before all have been seen, and the walk goes on over epochs: what epoch 0
    leaves out comes first in epoch 1. The order depends on the arguments and on `set_epoch` alone, so a resumed run
    sees what the uninterrupted one would have seen.

    Args:
        sizes: pairs of each language.
        mix, alpha: as in `mix_weights`.
    """

    def __init__(self, sizes: Sequence[int], mix: str, alpha: float, seed: int) -> None:
        exact = mix_weights(sizes, mix, alpha) * sum(sizes)
        self.counts = np.floor(exact).astype(np.int64)  # pairs an epoch of each language
        self.counts[
            np.argsort(self.counts - exact, kind="stable")[: sum(sizes) - self.counts.sum()]
        ] += 1
        self.sizes, self.seed, self.epoch = list(sizes), seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return sum(self.sizes)

    def __iter__(self) -> Iterator[int]:
        starts = np.cumsum([0, *self.sizes[:-1]])
        walks = [start + self._walk(number) for number, start in enumerate(starts)]
        order = np.random.default_rng((self.seed, len(self.sizes), self.epoch)).permutation(
            np.concatenate(walks)
        )
        return iter(order.tolist())

    def _walk(self, number: int) -> np.ndarray:
        """The epoch's part of an endless row of shuffles of one language's pairs."""
        size, count = self.sizes[number], int(self.counts[number])
        begin = self.epoch * count
        first, last = begin // size, -(-(begin + count) // size)
        rounds = [
            np.random.default_rng((self.seed, number, turn)).permutation(size)
            for turn in range(first, last)
        ]
        return np.concatenate([*rounds, np.empty(0, dtype=np.int64)])[begin - first * size :][
            :count
        ]


def interleave_languages(
    tokenized: Mapping[str, IterableDataset],
    sizes: Mapping[str, int],
    mix: str,
    alpha: float,
    seed: int,
) -> IterableDataset:
    """One stream without end of all languages, drawn at random by the seed in the shares of `mix_weights`.

    Every process draws the same number of full batches, whatever files it was dealt, and draws the same from step n
    on when it skips n batches. A share of the files is dealt to each process (and worker) where every language has as
    many files; else all processes read all files and train on their share of the pairs.

    Args:
        tokenized: streams by language, each of which starts again after its last pair.
        sizes: pairs a language, as `dap.text.count_pairs` tells them.
    """
    weights = mix_weights([sizes[language] for language in tokenized], mix, alpha)
    streams = [
        stream.repeat(None) for stream in tokenized.values()
    ]  # those of `tokenize_bitext` have no end anyway
    return interleave_datasets(streams, probabilities=weights.tolist(), seed=seed)


# -------------------------------------------------------------------------------------------- batches


@dataclass
class BitextCollator:
    """Pads tokenised pairs to the longest of the batch, each side for itself.

    Called with a list of B rows of `tokenize_bitext`, it returns LongTensors `source_input_ids`,
    `source_attention_mask` (B, S_x), `target_input_ids`, `target_attention_mask` (B, S_y), `language_ids` (B,), which
    index `languages`, and the list of str `pair_ids`. With `negatives` also `negative_input_ids` and
    `negative_attention_mask` (B, S_n), which is 0 throughout for a pair that has none.

    Attributes:
        pad_token_id: the tokenizer's padding id.
        languages: all languages of the run.
        negatives: gives the token ids of each row's changed copy of its target, such as `HardNegatives`.
    """

    pad_token_id: int
    languages: Sequence[str]
    negatives: Callable[[Sequence[Mapping[str, Any]]], list[list[int]]] | None = None

    def __post_init__(self) -> None:
        if self.pad_token_id is None:
            raise UserError("the tokenizer has no padding token; set tokenizer.pad_token")
        self._index = {language: number for number, language in enumerate(self.languages)}

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if unknown := {row["language"] for row in rows} - self._index.keys():
            raise UserError(
                f"languages {sorted(unknown)} are not among the collator's {list(self.languages)}"
            )
        batch: dict[str, Any] = {}
        sides = {side: [row[f"{side}_input_ids"] for row in rows] for side in ("source", "target")}
        if self.negatives is not None:
            sides["negative"] = self.negatives(rows)
        for side, sequences in sides.items():
            lengths = np.array([len(sequence) for sequence in sequences])  # (B,)
            mask = np.arange(max(1, lengths.max())) < lengths[:, None]  # (B, S)
            ids = np.full(mask.shape, self.pad_token_id, dtype=np.int64)  # (B, S)
            ids[mask] = np.concatenate(sequences)
            batch[f"{side}_input_ids"] = torch.from_numpy(ids)
            batch[f"{side}_attention_mask"] = torch.from_numpy(mask.astype(np.int64))
        batch["language_ids"] = torch.tensor([self._index[row["language"]] for row in rows])  # (B,)
        batch["pair_ids"] = [row["pair_id"] for row in rows]
        return batch
