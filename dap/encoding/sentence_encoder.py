"""Sentences in, vectors out: sorted by length, batched by tokens, in the order they came.

Legend: `N` sentences, `B` rows of a batch, `S` tokens, `D` hidden size.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from dap.encoding.loading import (
    POOLINGS,
    LibrarySettings,
    NeedsSentenceTransformers,
    hub_commit,
    library_length,
    library_settings,
    load_complete,
    load_config,
    longest_input,
)
from dap.encoding.onednn import fast_linear
from dap.errors import UserError, loading
from dap.tokenizers import load_tokenizer, require_embeddings, require_room
from encoder_dap import computes_some, packed_states, pool, pooled_tokens, takes_packed, use_packing
from modeling_dap import DAPModel

logger = logging.getLogger(__name__)

DEFAULT_MAX_SEQ_LENGTH = 128
#: Sentences tokenised at a time: bounds the memory of the token lists, and is far above any batch.
CHUNK = 100_000
#: On CPU this many tokens fill the matrix products: a batch with padding ends where the length changes then.
FULL_CPU_BATCH = 512


class SentenceEncoder:
    """An encoder with its tokenizer and pooling: `encode(sentences)` gives one float32 vector a sentence.

    Args:
        model: any encoder that returns `last_hidden_state` (B, S, D). In training mode it leaves that while it
            encodes, so that threads are to share one in evaluation mode.
        tokenizer: its tokenizer.
        pooling: "cls" (the paper's) or "mean"; None takes a DAP model's own, and "cls" for others.
        prefix: text put before every sentence, such as "query: ".
        max_seq_length: tokens, special ones included; longer sentences are cut. None: 128, or what the model holds.
        device: where to move the model; None leaves it where it is.
        bf16: run the encoder under bfloat16 autocast; pooling stays float32.
        layer: the hidden layer whose states are pooled, from 0 (embeddings); None takes the last.

    Raises:
        ValueError: an unknown pooling or layer, or a length that leaves no token of the text behind the prefix, or is
            above what the model's position table holds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        pooling: str | None = None,
        prefix: str = "",
        max_seq_length: int | None = None,
        device: str | torch.device | None = None,
        bf16: bool = False,
        layer: int | None = None,
    ) -> None:
        pooling = pooling or getattr(model.config, "pooling", None) or "cls"
        if pooling not in POOLINGS:
            raise UserError(f"pooling={pooling!r}: choose one of {', '.join(POOLINGS)}")
        limit = longest_input(model)
        if max_seq_length is None:
            max_seq_length = min(DEFAULT_MAX_SEQ_LENGTH, limit or DEFAULT_MAX_SEQ_LENGTH)
        if limit is not None and max_seq_length > limit:
            raise UserError(
                f"max_seq_length={max_seq_length} is above the model's {limit} positions: lower it"
            )
        require_room(tokenizer, max_seq_length, prefix)
        self.model = (
            model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
        )
        if device is not None:
            self.model.to(device)
        self.tokenizer, self.pooling, self.prefix = tokenizer, pooling, prefix
        self.max_seq_length, self.bf16, self.layer = max_seq_length, bf16, layer
        if layer is not None and not 0 <= layer <= self.backbone.config.num_hidden_layers:
            last = self.backbone.config.num_hidden_layers
            raise UserError(
                f"layer={layer}: choose one from 0 (the embeddings) to {last} (the model's last)"
            )
        is_known = type(self.backbone).__module__.startswith("transformers.")
        self._computes_some = is_known and computes_some(self.backbone)
        if self._computes_some:
            use_packing(self.backbone)
        self.revision: str | None = None  # the commit of the Hub that it came from

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str,
        pooling: str | None = None,
        prefix: str | None = None,
        max_seq_length: int | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        device: str | torch.device | None = None,
        bf16: bool = False,
        layer: int | None = None,
    ) -> "SentenceEncoder":
        """Load a DAP checkpoint, any checkpoint of `AutoModel`, or a sentence-transformers folder.

        What is left None comes from the checkpoint (a DAP config's pooling, the sentence-transformers files), else:
        pooling "cls" with a warning, no prefix, 128 tokens. A sentence-transformers folder that names no length has
        that library's: what tokenizer and model allow. `device=None` takes CUDA where there is one.

        Raises:
            NeedsSentenceTransformers: the folder has modules beyond what this class does; see `load_encoder`.
            ValueError: the checkpoint lacks weights of the encoder, or an argument does not fit it.
        """
        with loading("sentence-transformers files", name_or_path):
            found = library_settings(name_or_path, revision)
        settings = found or LibrarySettings()
        hub = {
            "revision": revision,
            "trust_remote_code": trust_remote_code,
            "subfolder": settings.subfolder,
        }
        config = load_config(name_or_path, **hub)
        tokenizer = load_tokenizer(name_or_path, **hub)
        require_embeddings(tokenizer, config, name_or_path)
        model = load_complete(name_or_path, config=config, **hub)
        pooling = pooling or getattr(model.config, "pooling", None) or settings.pooling
        if pooling is None:
            pooling = "cls"
            logger.warning(
                "%s does not say how it pools: using 'cls', as in the paper", name_or_path
            )
        if max_seq_length is None and found:
            max_seq_length = library_length(settings.max_seq_length, model, tokenizer)
        prefix = settings.prefix if prefix is None else prefix
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        encoder = cls(model, tokenizer, pooling, prefix, max_seq_length, device, bf16, layer)
        encoder.revision = hub_commit(name_or_path, revision)
        return encoder

    def encode(
        self, sentences: Sequence[str], token_budget: int = 4096, progress: bool = False
    ) -> np.ndarray:
        """The sentences' vectors, (N, D) float32 in input order, not normalised.

        Equal sentences are encoded once. The result does not depend on `token_budget`, the most tokens a batch may
        have (padding included), beyond float error. The empty string is a sentence like any other.
        """
        if token_budget < 1:
            raise UserError(f"token_budget={token_budget}: at least 1 token")
        sentences = listed(sentences)
        index = {sentence: i for i, sentence in enumerate(dict.fromkeys(sentences))}
        unique, parts = list(index), [np.empty((0, self.hidden_size), np.float32)]
        with tqdm(
            total=0, desc="encoding", unit=" tokens", unit_scale=True, disable=not progress
        ) as bar:
            for start in range(0, len(unique), CHUNK):
                parts.append(self._encode_chunk(unique[start : start + CHUNK], token_budget, bar))
        return np.concatenate(parts)[[index[sentence] for sentence in sentences]]

    def encode_tokens(self, sentences: Sequence[str], token_budget: int = 4096) -> list[np.ndarray]:
        """Each sentence's token states of the layer, (S_i, D) float32: no special tokens, no padding, no prefix.

        Raises:
            ValueError: the tokenizer is not a fast one, which is needed to tell the prefix's tokens.
        """
        input_ids, spans = self._own_tokens(sentences)
        states: list[np.ndarray] = [np.empty((0, self.hidden_size), np.float32)] * len(spans)
        for rows, ids, mask in self._batches(input_ids, token_budget):
            for row, row_states in zip(rows, self._states(ids, mask).cpu().numpy(), strict=True):
                states[row] = row_states[list(spans[row])]  # (S_i, D)
        return states

    def token_spans(self, sentences: Sequence[str]) -> list[list[tuple[int, int]]]:
        """The characters, first and one after the last, of each sentence's tokens in `encode_tokens`; raises as it."""
        return [list(spans.values()) for spans in self._own_tokens(sentences)[1]]

    def _own_tokens(
        self, sentences: Sequence[str]
    ) -> tuple[list[list[int]], list[dict[int, tuple[int, int]]]]:
        """Token ids of each sentence, and the spans of its own tokens, neither special nor the prefix's, by number."""
        if not self.tokenizer.is_fast:
            raise UserError(
                f"{type(self.tokenizer).__name__} is not a fast tokenizer: token states need one"
            )
        sentences = listed(sentences)
        if not sentences:
            return [], []
        tokens = self._tokenize(
            sentences, return_special_tokens_mask=True, return_offsets_mapping=True
        )
        first, found = len(self.prefix), []
        for special, spans in zip(
            tokens["special_tokens_mask"], tokens["offset_mapping"], strict=True
        ):
            own = [
                number
                for number, (_, end) in enumerate(spans)
                if not special[number] and end > first
            ]
            found.append(
                {
                    number: (max(spans[number][0] - first, 0), spans[number][1] - first)
                    for number in own
                }
            )
        return tokens["input_ids"], found

    @property
    def backbone(self) -> PreTrainedModel:
        """The plain encoder, which of a DAP model is a part."""
        return self.model.encoder if isinstance(self.model, DAPModel) else self.model

    @property
    def hidden_size(self) -> int:
        """`D`, the length of a vector."""
        return self.backbone.config.hidden_size

    def _encode_chunk(self, sentences: list[str], token_budget: int, bar: tqdm) -> np.ndarray:
        input_ids = self._tokenize(sentences)["input_ids"]
        bar.total += sum(map(len, input_ids))  # tokens, not sentences: the longest come first
        result = torch.zeros(len(sentences), self.hidden_size, device=self.model.device)  # (N, D)
        for rows, ids, mask in self._batches(input_ids, token_budget):
            result[torch.tensor(rows, device=result.device)] = self._vectors(ids, mask)
            bar.update(sum(len(input_ids[row]) for row in rows))
        return result.cpu().numpy()

    @property
    def _packs(self) -> bool:
        """Whether sentences are put one behind another, so that nothing is computed for padding."""
        on_cpu = self.model.device.type == "cpu"
        return self._computes_some and self.layer is None and on_cpu and takes_packed(self.backbone)

    def _vectors(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Sentence vectors (B, D)."""
        return pool(self._states(ids, mask, pooled_tokens(mask, self.pooling)), mask, self.pooling)

    def _states(self, ids: Tensor, mask: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Token states (B, S, D) of the layer; those that are not `wanted` (B, S) may be zeros."""
        if self._packs:
            return packed_states(self.backbone, mask, {"input_ids": ids}, wanted).float()
        every = {} if self.layer is None else {"output_hidden_states": True}
        out = self.backbone(input_ids=ids, attention_mask=mask, **every)
        return (
            out.last_hidden_state if self.layer is None else out.hidden_states[self.layer]
        ).float()

    def _tokenize(self, sentences: Sequence[str], **wanted: bool) -> dict[str, list]:
        text = [self.prefix + sentence for sentence in sentences]
        limit = min(
            self.max_seq_length, sys.maxsize
        )  # tokenizers call "no limit" 1e30, and cannot take it
        return self.tokenizer(
            text,
            truncation=True,
            max_length=limit,
            return_attention_mask=False,
            verbose=False,
            **wanted,
        )

    def _batches(
        self, input_ids: list[list[int]], token_budget: int
    ) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yields each batch, longest first, for the model that is ready: row numbers, token ids and mask (B, S)."""
        device = self.model.device
        full = token_budget if self._packs or device.type != "cpu" else FULL_CPU_BATCH
        half = torch.autocast(
            device.type, torch.bfloat16, enabled=self.bf16
        )  # keeps its copies of the weights
        products = nullcontext() if self.bf16 else fast_linear(device)
        with torch.inference_mode(), _eval_mode(self.model), half, products:
            for rows in length_batches([len(ids) for ids in input_ids], token_budget, full):
                yield rows, *self._pad([input_ids[row] for row in rows])

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        width, pad = max(map(len, rows)), self.tokenizer.pad_token_id or 0
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])  # (B, S)
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(width) < lengths[:, None]).long()  # (B, S)
        return ids.to(self.model.device, non_blocking=True), mask.to(
            self.model.device, non_blocking=True
        )


class LibraryEncoder:
    """The same `encode`, done by the sentence-transformers library: for folders with modules such as Dense."""

    pooling = "sentence-transformers modules"
    bf16, layer = False, None

    def __init__(self, model: Any, prefix: str | None = None) -> None:
        self.model, self._prompt = model, prefix
        default = (
            model.prompts.get(model.default_prompt_name, "") if model.default_prompt_name else ""
        )
        self.prefix: str = default if prefix is None else prefix
        self.max_seq_length: int | None = model.max_seq_length
        self.revision: str | None = None

    def encode(
        self, sentences: Sequence[str], token_budget: int = 4096, progress: bool = False
    ) -> np.ndarray:
        """The sentences' vectors, (N, D) float32 in input order; batches of about `token_budget` tokens."""
        rows = max(1, token_budget // 64)
        return self.model.encode(
            listed(sentences), prompt=self._prompt, batch_size=rows, show_progress_bar=progress
        )


def load_encoder(
    name_or_path: str,
    pooling: str | None = None,
    prefix: str | None = None,
    max_seq_length: int | None = None,
    trust_remote_code: bool = False,
    revision: str | None = None,
    bf16: bool = False,
    layer: int | None = None,
) -> SentenceEncoder | LibraryEncoder:
    """`SentenceEncoder.from_pretrained`, or the sentence-transformers library for what that cannot express.

    Raises:
        ValueError: the folder needs the library and it is not installed, or `pooling`, `bf16` or `layer` is given,
            which such a model does not take.
    """
    try:
        return SentenceEncoder.from_pretrained(
            name_or_path,
            pooling,
            prefix,
            max_seq_length,
            trust_remote_code,
            revision,
            bf16=bf16,
            layer=layer,
        )
    except NeedsSentenceTransformers as reason:
        if pooling or bf16 or layer is not None:
            raise UserError(
                f"{reason}; pooling, layer and bf16 cannot be set for it: leave them out"
            ) from reason
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError:
            raise UserError(
                f"{reason}: pip install 'dap-transformers[st]' to evaluate it"
            ) from reason
    with loading("modules", name_or_path):
        model = SentenceTransformer(
            name_or_path, trust_remote_code=trust_remote_code, revision=revision
        )
    model.max_seq_length = max_seq_length or model.max_seq_length
    return LibraryEncoder(model, prefix)


def listed(sentences: Iterable[str]) -> list[str]:
    """The sentences as a list; raises `UserError` for one string, and for what is no text, named by its number."""
    if isinstance(sentences, str):
        raise UserError(f"sentences is the string {sentences[:40]!r}: pass a list of strings")
    sentences = list(sentences)
    for number, sentence in enumerate(sentences):
        if not isinstance(sentence, str):
            raise UserError(
                f"sentences[{number}] is {sentence!r:.40}, no text: leave it out, or give a string"
            )
    return sentences


def length_batches(lengths: Sequence[int], token_budget: int, full: int) -> list[list[int]]:
    """Row numbers in batches, longest sentences first; rows of length 0 are left out.

    A batch holds at most `token_budget` tokens, padding included (a single longer row is a batch of its own), and ends
    where the length changes once it has `full` tokens: with `full` small there is next to no padding.

    >>> length_batches([2, 5, 2, 5, 0, 3], token_budget=10, full=10)
    [[1, 3], [5, 0, 2]]
    >>> length_batches([2, 5, 2, 5, 0, 3], token_budget=10, full=1)
    [[1, 3], [5], [0, 2]]
    """
    batches: list[list[int]] = []
    for row in sorted(
        (row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]
    ):
        width = lengths[batches[-1][0]] if batches else 0
        size = width * len(batches[-1]) if batches else 0  # tokens, padding included
        if size and size + width <= token_budget and (size < full or lengths[row] == width):
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


@contextmanager
def _eval_mode(model: torch.nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
