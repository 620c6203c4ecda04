"""Sentence vectors from any encoder.

`SentenceEncoder` runs the encoder, pools its token states, and applies the modules that a
sentence-transformers folder has behind the pooling. Sentences of similar length share a batch,
which saves most of the padding.

Legend: `N` sentences, `B` rows of a batch, `S` tokens of its longest row, `D` hidden size, `E`
dimensions of a sentence vector, which are `D` without a Dense module.
"""

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from configuration_dap import default_pooling, own_pooling
from dap_transformers.encoding.checkpoint import Checkpoint, longest_input
from dap_transformers.encoding.onednn import fast_linear
from dap_transformers.errors import UserError, reading, warn_once
from dap_transformers.search.exact import unit_rows
from dap_transformers.tokenizer import require_room
from encoder_dap import depends_on_padding, without_decoder
from modeling_dap import DAPModel
from modules_dap import prompt_for
from states_dap import (
    POOLINGS,
    can_skip_tokens,
    packed_states,
    sentence_vectors,
    takes_packed,
    use_packing,
)

logger = logging.getLogger(__name__)

DEFAULT_MAX_SEQ_LENGTH = 128
#: Sentences tokenised at a time. This bounds the memory of the token ids.
CHUNK = 100_000
#: Most tokens of a batch, padding included: as many as fit a CPU's caches, or keep a GPU busy.
TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 32768}
#: Tokens that keep a CPU's matrix products busy. Larger batches would only add padding.
FULL_CPU_BATCH = 512


class Encoder(Protocol):
    """Turns sentences into vectors: a `SentenceEncoder`, or one that is shared or on a cluster."""

    def encode(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """Return the vectors (N, E) of N sentences."""


class TokenPlaces(NamedTuple):
    """Where the tokens of a sentence stand, without special tokens and tokens of the prefix.

    Attributes:
        positions: position of each token in the tokenized row.
        spans: first character of each token in the sentence, and the position after its last one.
        words: number of each token's word, ascending, but not always from 0. Equal numbers mean the
            same word. None if the tokenizer knows no word for the token.
    """

    positions: list[int]
    spans: list[tuple[int, int]]
    words: list[int | None]


class SentenceEncoder:
    """An encoder with its tokenizer and pooling. `encode` returns a float32 vector per sentence.

    During a call, `encode` puts the model into evaluation mode. Afterwards it restores the mode of
    each module, while another thread may still encode. So call `model.eval()` before threads share
    a model.

    Args:
        model: any encoder that returns `last_hidden_state` (B, S, D). Of an encoder-decoder only
            the encoder is used, and of `DAPForPreTraining` only its `dap`.
        pooling: a name in `states_dap.POOLINGS`. None takes a DAP model's own. For other models it
            is the mean, and the last token of a decoder.
        max_seq_length: tokens per sentence, special tokens included. Longer sentences are cut. None
            takes 128, or less if the model has fewer positions.
        device: where to move the model. None leaves it where it is.
        bf16: run the encoder and Dense modules under bfloat16 autocast. Pooling stays in float32.
        after: modules that turn the pooled vectors (B, D) into sentence vectors (B, E). None takes
            a DAP model's own.
        prompts: name -> text to put before a sentence instead of `prefix`, such as "query" (see
            `for_task`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        pooling: str | None = None,
        prefix: str | None = None,
        max_seq_length: int | None = None,
        *,
        device: str | torch.device | None = None,
        bf16: bool = False,
        after: nn.Sequential | None = None,
        prompts: Mapping[str, str] | None = None,
    ) -> None:
        model = getattr(model, "dap", model)
        self.model = without_decoder(model)
        if self.model is not model:
            warn_once("the decoder of a %s is not used", type(model).__name__)
        if device is not None:
            self.model.to(device)
        if after is None:
            after = getattr(model, "after", nn.Sequential())
        self.after = after.to(self.model.device)

        self.tokenizer = tokenizer
        pooling = pooling or own_pooling(model.config)
        self.pooling: str = pooling or default_pooling(model.config)
        self.prefix = prefix or ""
        self.prompts = dict(prompts or {})

        positions = longest_input(model) or math.inf
        if max_seq_length is None:
            max_seq_length = min(DEFAULT_MAX_SEQ_LENGTH, positions)
        if max_seq_length > positions:
            raise UserError(
                f"max_seq_length={max_seq_length} is above the model's {positions} positions: give "
                "less"
            )
        self.max_seq_length = max_seq_length
        require_room(tokenizer, self.max_seq_length, self.prefix)

        self.bf16 = bf16
        backbone = self.backbone
        is_known = type(backbone).__module__.startswith("transformers.")
        if is_known and can_skip_tokens(backbone):
            use_packing(backbone, trains=False)

        #: How many sentences `encode` has cut so far.
        self.cut = 0
        #: Commit of the Hub repository that the model was loaded from, if any.
        self.revision: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Checkpoint,
        pooling: str | None = None,
        prefix: str | None = None,
        max_seq_length: int | None = None,
        *,
        device: str | torch.device | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        bf16: bool = False,
        prompts: Mapping[str, str] | None = None,
    ) -> "SentenceEncoder":
        """Load a DAP checkpoint, any checkpoint of `AutoModel`, or a sentence-transformers folder.

        Of a sentence-transformers folder, the modules Dense and Normalize are applied as well. A
        LoRA adapter is added to the model that it was trained on.

        Example:
            encoder = SentenceEncoder.from_pretrained("user/dap-xlmr")
            vectors = encoder.encode(["Guten Morgen", "Good morning"])  # (2, 768)

        Args:
            name_or_path: folder, Hub id, or a checkpoint whose files were read before.
            pooling: None takes the checkpoint's own. If it has none, a warning says which is used.
            prefix: such as "query: ". None takes the checkpoint's own, or else no prefix. With a
                prefix, the checkpoint's prompts are not used.
            max_seq_length: None takes the length in the sentence-transformers files. Without these
                it is 128, or less if the model has fewer positions.
            device: None takes CUDA if there is any.
            prompts: None takes the checkpoint's own, unless a prefix is given.
        """
        checkpoint = name_or_path
        if not isinstance(checkpoint, Checkpoint):
            hub = {"revision": revision, "trust_remote_code": trust_remote_code}
            checkpoint = Checkpoint.read(name_or_path, **hub)
        name = checkpoint.name
        pooling = pooling or checkpoint.pooling
        if prefix is None:
            prefix = checkpoint.library.prefix
            prompts = checkpoint.library.prompts if prompts is None else prompts
        model, after = checkpoint.load_encoder()
        if max_seq_length is None:
            max_seq_length = checkpoint.library_length(model)
        encoder = cls(
            model,
            checkpoint.tokenizer,
            pooling,
            prefix,
            max_seq_length,
            device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
            bf16=bf16,
            after=after,
            prompts=prompts,
        )
        encoder.revision = checkpoint.commit
        if pooling is None:
            logger.warning("%s does not say how it pools: using %r", name, encoder.pooling)
        with reading(f"{name}: {type(encoder.backbone).__name__} is no text encoder"):
            is_mixed = depends_on_padding(encoder.backbone, encoder._states)
        if is_mixed:
            logger.warning("%s: vectors depend on the sentences that share a batch", name)
        return encoder

    def for_task(self, task: str) -> "SentenceEncoder":
        """Return this encoder with its own prompt for a "query" or a "document" as the prefix.

        Without such a prompt, the prefix stays. A folder of sentence-transformers has both prompts,
        which may be empty.
        """
        other = copy(self)
        other.prefix = prompt_for(task, self.prompts, self.prefix)
        require_room(self.tokenizer, self.max_seq_length, other.prefix)
        return other

    @property
    def backbone(self) -> PreTrainedModel:
        """Return the plain encoder: the one inside a DAP model, or else the model itself."""
        return self.model.encoder if isinstance(self.model, DAPModel) else self.model

    @property
    def hidden_size(self) -> int:
        """Return the number of dimensions D of a token state, and of a vector before `after`."""
        return self.backbone.config.hidden_size

    @property
    def dimensions(self) -> int:
        """Return the number of dimensions E of a sentence vector."""
        widths = [self.hidden_size]
        for module in self.after.modules():
            if isinstance(module, nn.Linear):
                widths.append(module.out_features)
        return widths[-1]

    @staticmethod
    def similarity(first: np.ndarray | Tensor, second: np.ndarray | Tensor) -> NDArray[np.float32]:
        """Return the cosines (N, M) of vectors (N, E) and (M, E). Those of a zero vector are 0."""
        left = unit_rows(first, "the first array")
        right = unit_rows(second, "the second array")
        return (left @ right.to(left.device).T).cpu().numpy()

    # ---------------------------------------------------------------------------- sentence vectors

    def encode(
        self,
        sentences: Sequence[str],
        progress: bool = False,
        normalize: bool = False,
        batch_size: int | None = None,
    ) -> NDArray[np.float32]:
        """Encode N sentences into vectors (N, E), each distinct sentence once.

        Args:
            normalize: divide each vector by its Euclidean length.
            batch_size: number of the longest possible sentences per batch. None takes
                `TOKENS_PER_BATCH`. Beyond rounding, the vectors do not depend on it.
        """
        sentences = listed(sentences)
        distinct = list(dict.fromkeys(sentences))
        parts = [np.empty((0, self.dimensions), np.float32)]
        with tqdm(
            total=0, desc="encoding", unit=" tokens", unit_scale=True, disable=not progress
        ) as bar:
            for start in range(0, len(distinct), CHUNK):
                parts.append(self._encode_chunk(distinct[start : start + CHUNK], batch_size, bar))
        vectors = np.concatenate(parts)  # (distinct sentences, E)
        if normalize:
            vectors = unit_rows(vectors).numpy()
        row_of = {sentence: row for row, sentence in enumerate(distinct)}
        return vectors[[row_of[sentence] for sentence in sentences]]

    def _encode_chunk(
        self, sentences: list[str], batch_size: int | None, bar: tqdm
    ) -> NDArray[np.float32]:
        """Encode at most `CHUNK` distinct sentences, which are tokenised all at once: (N, E)."""
        tokens = self._tokenize(sentences)
        input_ids = tokens["input_ids"]
        for row in tokens.encodings or ():
            was_cut = len(row) == self.max_seq_length and bool(row.overflowing)
            self.cut += was_cut
        # The bar counts tokens, because the longest sentences come first.
        bar.total += sum(map(len, input_ids))
        device = self.model.device
        # A sentence may have no token at all. Its vector stays zero.
        result = torch.zeros(len(sentences), self.dimensions, device=device)  # (N, E)
        dtype = next((each.dtype for each in self.after.parameters()), torch.float32)
        with self._inference():
            for rows, ids, mask in self._batches(input_ids, batch_size):
                # Not `device=device`, which would wait for the GPU.
                places = torch.tensor(rows).to(device, non_blocking=True)
                result[places] = self.after(self._pooled(ids, mask).to(dtype)).float()
                bar.update(sum(len(input_ids[row]) for row in rows))
        return result.cpu().numpy()

    def _pooled(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the pooled vectors (B, D) of a batch, given its token ids and mask (B, S)."""
        if self._packs:
            return sentence_vectors(self.backbone, mask, self.pooling, input_ids=ids).float()
        return POOLINGS[self.pooling].pool(self._states(ids, mask), mask)

    # ------------------------------------------------------------------------------- token states

    def encode_tokens(
        self, sentences: Sequence[str], layer: int | None = None
    ) -> tuple[list[NDArray[np.float32]], list[TokenPlaces]]:
        """Return token states (S_i, D) of each sentence, and their places.

        Special tokens and the prefix are left out. `layer` counts the hidden layers from 0
        (embeddings). None takes the last. The tokenizer must be a fast one.
        """
        last = self.backbone.config.num_hidden_layers
        if layer is not None and not 0 <= layer <= last:
            raise UserError(f"layer={layer}: choose 0 (the embeddings) to {last} (the last layer)")
        sentences = listed(sentences)
        if not sentences:
            return [], []
        input_ids, places = self._own_tokens(sentences)
        states: list[np.ndarray] = [np.empty((0, self.hidden_size), np.float32)] * len(places)
        with self._inference():
            for rows, ids, mask in self._batches(input_ids):
                batch_states = self._states(ids, mask, layer).cpu().numpy()  # (B, S, D)
                for row, row_states in zip(rows, batch_states, strict=True):
                    states[row] = row_states[places[row].positions]  # (S_i, D)
        return states, places

    def _own_tokens(self, sentences: Sequence[str]) -> tuple[list[list[int]], list[TokenPlaces]]:
        """Return the token ids of each sentence with its prefix, and where its own tokens stand."""
        tokens = self._tokenize(
            sentences, return_special_tokens_mask=True, return_offsets_mapping=True
        )
        prefix_end = len(self.prefix)
        found = []
        for row, special in enumerate(tokens["special_tokens_mask"]):
            numbers = tokens.word_ids(row)
            own = TokenPlaces([], [], [])
            for position, (start, end) in enumerate(tokens["offset_mapping"][row]):
                if not special[position] and end > prefix_end:
                    own.positions.append(position)
                    own.spans.append((max(start - prefix_end, 0), end - prefix_end))
                    own.words.append(numbers[position])
            found.append(own)
        return tokens["input_ids"], found

    # ------------------------------------------------------------------- from text to the encoder

    def _tokenize(self, sentences: Sequence[str], **outputs: bool) -> BatchEncoding:
        """Put the prefix before each sentence, tokenize without padding and mask, and cut."""
        text = [self.prefix + sentence for sentence in sentences]
        return self.tokenizer(
            text,
            truncation=True,
            max_length=self.max_seq_length,
            return_attention_mask=False,
            verbose=False,
            **outputs,
        )

    @contextmanager
    def _inference(self) -> Iterator[None]:
        """Run the model in evaluation mode, without gradients, in bfloat16 or fast float32."""
        device = self.model.device
        # One context for all batches: autocast keeps its bfloat16 copies of the weights in it.
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=self.bf16)
        products = nullcontext() if self.bf16 else fast_linear(device)
        training = [module for module in self.model.modules() if module.training]
        self.model.eval()
        try:
            with torch.inference_mode(), autocast, products:
                yield
        finally:
            for module in training:
                module.training = True

    def _batches(
        self, input_ids: list[list[int]], batch_size: int | None = None
    ) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield batches of similar lengths, longest first: row numbers, ids and mask (B, S)."""
        kind = self.model.device.type
        token_budget = TOKENS_PER_BATCH.get(kind, TOKENS_PER_BATCH["cpu"])
        if batch_size is not None:
            token_budget = batch_size * self.max_seq_length
        computes_padding = kind == "cpu" and not self._packs
        full = FULL_CPU_BATCH if computes_padding else token_budget
        lengths = [len(ids) for ids in input_ids]
        for rows in length_batches(lengths, token_budget, full):
            ids, mask = self._pad([input_ids[row] for row in rows])
            yield rows, ids, mask

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Pad rows of token ids on the right, and return ids (B, S) and mask (B, S)."""
        width = max(map(len, rows))
        pad = self.tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])  # (B, S)
        lengths = torch.tensor([len(row) for row in rows])  # (B,)
        mask = (torch.arange(width) < lengths[:, None]).long()  # (B, S)
        device = self.model.device
        return ids.to(device, non_blocking=True), mask.to(device, non_blocking=True)

    @property
    def _packs(self) -> bool:
        """Tell whether rows are put one behind another: on CPUs, for encoders that we know."""
        is_on_cpu = self.model.device.type == "cpu"
        return is_on_cpu and can_skip_tokens(self.backbone) and takes_packed(self.backbone)

    def _states(self, ids: Tensor, mask: Tensor, layer: int | None = None) -> Tensor:
        """Return float32 token states (B, S, D) of a layer, None: the last, given ids and mask."""
        if layer is not None:
            outputs = self.backbone(input_ids=ids, attention_mask=mask, output_hidden_states=True)
            return outputs.hidden_states[layer].float()
        if self._packs:
            return packed_states(self.backbone, mask, {"input_ids": ids}).float()
        return self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state.float()


def listed(sentences: Iterable[str]) -> list[str]:
    """Return sentences as a list.

    Raises:
        UserError: for a single string, a table, or a sentence that is no string.
    """
    if isinstance(sentences, str | Mapping) or getattr(sentences, "ndim", 1) > 1:
        what = "string" if isinstance(sentences, str) else "table"
        raise UserError(f"sentences is the {what} {str(sentences)[:40]!r}: pass a list of strings")
    found = sentences.to_pylist() if hasattr(sentences, "to_pylist") else list(sentences)
    for number, sentence in enumerate(found):
        if not isinstance(sentence, str):
            raise UserError(f"sentence {number} is {sentence!r}: pass a list of strings")
    return found


def length_batches(lengths: Sequence[int], token_budget: int, full: int) -> list[list[int]]:
    """Put rows of similar length into batches, longest rows first. Rows of length 0 are left out.

    A batch holds at most `token_budget` tokens, padding included. Only a single longer row may
    exceed that. A batch that has `full` tokens takes no more rows of another length. A small
    `full` therefore avoids nearly all padding.

    >>> length_batches([2, 5, 2, 5, 0, 3], token_budget=10, full=10)
    [[1, 3], [5, 0, 2]]
    >>> length_batches([2, 5, 2, 5, 0, 3], token_budget=10, full=1)
    [[1, 3], [5], [0, 2]]
    """
    rows = [row for row, length in enumerate(lengths) if length]
    rows.sort(key=lambda row: -lengths[row])
    batches: list[list[int]] = []
    width = 0  # tokens of the longest row of the last batch
    size = 0  # tokens of the last batch, padding included
    for row in rows:
        fits = batches and size + width <= token_budget
        if fits and (size < full or lengths[row] == width):
            batches[-1].append(row)
            size += width
        else:
            batches.append([row])
            width = lengths[row]
            size = width
    return batches
