"""The encoder inside a DAP model, from any class of Transformers: its states without work on padding, and pooling.

Ships with a checkpoint beside modeling_dap.py. Shapes in the comments: `B` rows, `S` tokens of the longest, `T` real
tokens of all rows, `D` hidden size, `H` heads, `d` size of a head.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging

try:
    from .configuration_dap import DAPConfig
    from .losses_dap import at_least_float32
except ImportError:  # a checkout or an installed wheel, where these files are top-level modules
    from configuration_dap import DAPConfig
    from losses_dap import at_least_float32

#: Encoder classes whose every objective is tested.
TESTED = ("bert", "deberta-v2", "distilbert", "modernbert", "roberta", "xlm-roberta")
#: Encoders whose layers are made like BERT's and are followed by nothing.
LIKE_BERT = ("bert", "camembert", "electra", "roberta", "xlm-roberta")
TOKENS_PER_GROUP = 128  # padded rows of like length run together once they have this many tokens
PACKED = "dap_packed"  # torch's attention that also takes packed rows


# ---------------------------------------------------------------------------------------------------- which encoder


def require_encoder(config: PreTrainedConfig, name: str) -> None:
    """Raise `ValueError` unless the configuration is that of a bidirectional encoder with a masked-LM class."""
    remedy = "Give an encoder such as bert, xlm-roberta, roberta, deberta-v2 or modernbert."
    if config.model_type == "dap":
        raise ValueError(
            f"{name} is a DAP checkpoint already: load it with DAPForPreTraining.from_pretrained."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{name} is an encoder-decoder (model_type {config.model_type!r}). {remedy}"
        )
    if type(config).__module__.startswith("transformers_modules."):
        raise ValueError(
            f"{name} (model_type {config.model_type!r}) runs code of its own; a DAP checkpoint nests only encoders "
            f"that are part of Transformers. {remedy}"
        )
    if getattr(config, "is_decoder", False) or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(
            f"{name} is not a bidirectional encoder (model_type {config.model_type!r}). {remedy}"
        )


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """The encoder of a configuration with random weights, and without a pooler, whose weights nothing would train.

    Raises:
        ValueError: an encoder whose states depend on padding, as it is not told of any.
    """
    accepted = inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in accepted else {}
    encoder = AutoModel.from_config(config, **options)
    if "attention_mask" not in inspect.signature(encoder.forward).parameters:
        raise ValueError("it takes no attention_mask, so that padding would change the embeddings")
    return encoder


@contextmanager
def encoder_named(name: str, config: DAPConfig) -> Iterator[None]:
    """Make what fails with an encoder class that no test covers a `ValueError` that names it."""
    try:
        yield
    except (
        Exception
    ) as error:  # a foreign class may fail in any way; in a tested one it is a mistake of ours
        if config.encoder_config.model_type in TESTED:
            raise
        reason = " ".join(str(error).split())
        remedy = (
            "give another encoder"
            if config.objectives == {"tr"}
            else "use objective='tr', or another encoder"
        )
        raise ValueError(
            f"{name}: objective {config.objective!r} does not work with an encoder of model_type "
            f"{config.encoder_config.model_type!r} ({reason}): {remedy}."
        ) from error


def load_masked_lm(
    name_or_path: str, kind: type = AutoModelForMaskedLM, **options: Any
) -> tuple[PreTrainedModel, set[str]]:
    """A checkpoint as a masked-LM model, and the names of the weights that it lacks (reported by the caller).

    Raises:
        ValueError: some of these are the encoder's, or the weights cannot be read or are of another shape.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, report = kind.from_pretrained(name_or_path, output_loading_info=True, **options)
    except Exception as error:  # of damaged files libraries raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, UnpicklingError):  # whose text recommends to run it
            reason = "a pickle that is damaged or would run code"
        if "ignore_mismatched_sizes" in reason:
            reason = "their shapes are not those of the configuration"
        raise ValueError(
            f"the weights of {name_or_path} cannot be loaded ({reason}): mend them, or give others"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    missing = set(report["missing_keys"])
    prefix = model.base_model_prefix + "."  # which the names in a file may lack
    if lost := sorted(key.removeprefix(prefix) for key in missing if key.startswith(prefix)):
        raise ValueError(
            f"{name_or_path} lacks {len(lost)} weights of its encoder, the first is {lost[0]!r}: not usable."
        )
    return model, missing


def find_mask_token_id(name_or_path: str, **hub: Any) -> int:
    """The mask token's id of a checkpoint's tokenizer.

    Raises:
        ValueError: the tokenizer has no mask token.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **hub)
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"the tokenizer of {name_or_path} has no mask token, which every objective but 'tr' needs: "
            "use objective='tr', or give mask_token_id."
        )
    return tokenizer.mask_token_id


def layer_stack(encoder: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of an encoder's transformer blocks."""
    for name, module in encoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == encoder.config.num_hidden_layers:
            return name, module
    raise ValueError(
        f"no list of {encoder.config.num_hidden_layers} layers in {type(encoder).__name__}"
    )


# ----------------------------------------------------------------------------------------------------- token states


def last_states(
    encoder: PreTrainedModel, mask: Tensor, wanted: Tensor | None = None, **inputs: Tensor
) -> Tensor:
    """Last hidden states (B, S, D) of the tokens where a mask (B, S) is 1, wherever they stand, of inputs (B, S, ...).

    The other states are zeros, and next to nothing is computed for them: rows are packed for an attention that takes
    them so, else run in groups of like length on CPU. Any other encoder is given rows padded on the right. Where
    some tokens of each row are `wanted` (B, S), the others' states may be zeros, too.
    """
    if takes_packed(encoder):
        return packed_states(encoder, mask, inputs, wanted)
    order = real_tokens_first(mask)
    mask, inputs = (
        gather_columns(mask, order),
        {name: gather_columns(own, order) for name, own in inputs.items()},
    )
    compute = grouped_states if mask.device.type == "cpu" else padded_states
    states = compute(encoder, mask, inputs)  # (B, S, D)
    return gather_columns(states.masked_fill(mask.unsqueeze(-1) == 0, 0.0), order.argsort(1))


def real_tokens_first(mask: Tensor) -> Tensor:
    """Column order (B, S) that moves real tokens to the front and padding to the end, each in its old order.

    >>> real_tokens_first(torch.tensor([[1, 0, 1]]))
    tensor([[0, 2, 1]])
    """
    return mask.bool().logical_not().to(torch.uint8).argsort(dim=1, stable=True)


def gather_columns(values: Tensor, order: Tensor) -> Tensor:
    """(B, S) or (B, S, D) values with their columns in the order (B, S)."""
    if values.dim() == 3:
        order = order.unsqueeze(-1).expand(-1, -1, values.shape[-1])
    return values.gather(1, order)


def packed_states(
    encoder: PreTrainedModel, mask: Tensor, inputs: dict[str, Tensor], wanted: Tensor | None = None
) -> Tensor:
    """`last_states` by one long row without padding; a last layer like BERT's computes only what is wanted."""
    reads_all = wanted is None or not computes_some(encoder)
    packing, *queries = pack(mask) if reads_all else pack(mask, wanted)
    packed = {"position_ids": packing.columns + (position_offset(encoder) or 0)}  # (1, T)
    packed |= {key: packing.take(value) for key, value in inputs.items()}  # (1, T, ...)
    arguments = attention_arguments(encoder, packing)
    if reads_all:
        return packing.put_back(encoder(**packed, **arguments).last_hidden_state)  # of (1, T, D)
    _, layers = layer_stack(encoder)
    states = encoder.embeddings(**packed)  # (1, T, D)
    for layer in layers[:-1]:
        states = layer(states, **arguments)
    places = packing.take(wanted)[0].argsort(stable=True, descending=True)[
        : sum(queries[0].lengths)
    ]
    states = last_layer_of_some(
        layers[-1], states, places, attention_arguments(encoder, packing, *queries)
    )
    return queries[0].put_back(states)


def computes_some(encoder: PreTrainedModel) -> bool:
    """Whether an encoder's last layer can be computed for some tokens only: it is like BERT's, and sees all tokens."""
    config = encoder.config
    return (
        config.model_type in LIKE_BERT
        and not config.is_decoder
        and not hasattr(encoder, "embeddings_project")
    )


def last_layer_of_some(
    layer: nn.Module, states: Tensor, places: Tensor, arguments: dict[str, Any]
) -> Tensor:
    """States (1, T', D) after a layer like BERT's of those tokens (T',) of (1, T, D) that are asked for."""
    attention = layer.attention.self
    if hasattr(layer, "unshard"):  # FSDP keeps shards of a layer that is not called
        layer.unshard()

    def heads(linear: nn.Linear, tokens: Tensor) -> Tensor:
        return (
            linear(tokens).unflatten(-1, (-1, attention.attention_head_size)).transpose(1, 2)
        )  # (1, H, T, d)

    asked = states.index_select(1, places)  # (1, T', D)
    query, key, value = (
        heads(attention.query, asked),
        heads(attention.key, states),
        heads(attention.value, states),
    )
    dropout = attention.dropout.p if attention.training else 0.0
    attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    options = {"attention_mask": None, "dropout": dropout, "scaling": attention.scaling} | arguments
    mixed, _ = attend(attention, query, key, value, **options)
    return layer.feed_forward_chunk(layer.attention.output(mixed.flatten(2), asked))


def padded_states(encoder: PreTrainedModel, mask: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """`last_states` of all rows at once; those of padding have no meaning."""
    return encoder(attention_mask=mask, **inputs).last_hidden_state


def grouped_states(encoder: PreTrainedModel, mask: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """`last_states` by groups of padded rows of like length; those of padding have no meaning."""
    lengths = mask.sum(1).tolist()
    groups = length_groups(lengths, TOKENS_PER_GROUP)
    parts = []
    for rows in groups:
        width = lengths[rows[-1]]
        part = {key: value[rows, :width] for key, value in inputs.items()}
        states = encoder(
            attention_mask=mask[rows, :width], **part
        ).last_hidden_state  # (rows, width, D)
        parts.append(F.pad(states, (0, 0, 0, mask.shape[1] - width)))
    order = torch.tensor([row for rows in groups for row in rows])
    return torch.cat(parts)[order.argsort()]


def length_groups(lengths: list[int], tokens: int) -> list[list[int]]:
    """Row numbers, shortest rows first, in groups that end where the length changes once they have enough tokens.

    >>> length_groups([9, 2, 2, 9, 3], tokens=4)
    [[1, 2], [4, 0, 3]]
    """
    groups: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        current = groups[-1]
        if (
            current
            and lengths[row] > lengths[current[-1]]
            and sum(lengths[i] for i in current) >= tokens
        ):
            groups.append([])
        groups[-1].append(row)
    return groups


def position_offset(encoder: PreTrainedModel) -> int | None:
    """Position id of the first token, or None where the encoder has no absolute position embeddings."""
    table = getattr(getattr(encoder, "embeddings", None), "position_embeddings", None)
    if table is None:
        return None
    return (
        0 if table.padding_idx is None else table.padding_idx + 1
    )  # RoBERTa and XLM-R start after the padding id


def absolute_positions(encoder: PreTrainedModel, columns: Tensor | None) -> dict[str, Tensor]:
    """An encoder's argument for tokens in these columns (B, S), if it has absolute positions and any are given."""
    offset = position_offset(encoder)
    return {} if offset is None or columns is None else {"position_ids": columns + offset}


def pooled_tokens(attention_mask: Tensor, pooling: str) -> Tensor | None:
    """Which tokens `pool` reads, (B, S) bool; None for all real ones.

    >>> pooled_tokens(torch.tensor([[1, 1, 0], [0, 1, 1]]), "cls")
    tensor([[ True, False, False],
            [False,  True, False]])
    """
    return attention_mask.bool() & (attention_mask.cumsum(1) == 1) if pooling == "cls" else None


def pool(last_hidden_state: Tensor, attention_mask: Tensor, pooling: str = "cls") -> Tensor:
    """Sentence embeddings (B, D) of token states (B, S, D): the first token's (section 3.2) or the real tokens' mean.

    >>> states = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> pool(states, torch.tensor([[1, 1, 0]]), "mean")
    tensor([[2.]])
    """
    if pooling == "cls":
        first = (
            attention_mask.bool().to(torch.uint8).argmax(1)
        )  # (B,): 0 unless the padding is on the left
        rows = torch.arange(
            first.shape[0], device=first.device
        )  # (B,); an export takes len() for a constant
        return last_hidden_state[rows, first]
    states = at_least_float32(last_hidden_state)  # a sum in half precision would overflow
    mask = attention_mask.unsqueeze(-1).to(states.dtype)  # (B, S, 1)
    return ((states * mask).sum(1) / mask.sum(1).clamp(min=1)).to(last_hidden_state.dtype)


# --------------------------------------------------------------------------------------------- rows without padding


def use_packing(encoder: PreTrainedModel) -> None:
    """Let an encoder that runs torch's attention (`sdpa`) through Transformers' attention interface take packed rows.

    Given padded rows it computes what it did before.
    """
    if encoder.config._attn_implementation == "sdpa" and encoder._supports_attention_backend:
        encoder.set_attn_implementation(PACKED)


def takes_packed(encoder: PreTrainedModel) -> bool:
    """Whether an encoder's attention keeps rows apart that stand one after another."""
    return encoder.config._attn_implementation.startswith((PACKED, "flash_attention"))


class Packing(NamedTuple):
    """Where the real tokens of a batch (B, S) stand when rows follow each other without padding."""

    index: Tensor  # (T,) places in the flattened batch
    columns: Tensor  # (1, T) how many real tokens of its row come before a token
    lengths: list[int]  # (B,) how many tokens its rows have, in their packed order
    shape: torch.Size  # (B, S)

    def take(self, values: Tensor) -> Tensor:
        """The packed tokens (1, T, ...) of a batch (B, S, ...)."""
        return values.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def put_back(self, packed: Tensor) -> Tensor:
        """The batch (B, S, ...) of packed tokens (1, T, ...), with zeros for the rest."""
        flat = packed.new_zeros(self.shape.numel(), *packed.shape[2:])
        return flat.index_copy(0, self.index, packed[0]).unflatten(0, self.shape)


@torch.compiler.disable
def pack(*masks: Tensor) -> list[Packing]:
    """The packing of the tokens where each mask (B, S) is 1, wherever they stand; the first one's shortest rows first.

    All are read back from a GPU at once.

    >>> (packing,) = pack(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    >>> packing.index, packing.columns, packing.lengths
    (tensor([3, 1, 2]), tensor([[0, 0, 1]]), [1, 2])
    """
    masks = tuple(mask.bool() for mask in masks)
    counts = torch.stack([mask.sum(1) for mask in masks]).tolist()
    rows = sorted(range(len(counts[0])), key=counts[0].__getitem__)
    order = torch.tensor(rows, device=masks[0].device)  # (B,)
    return [
        _pack_in_order(mask, order, [own[row] for row in rows]) for mask, own in zip(masks, counts)
    ]


def _pack_in_order(mask: Tensor, order: Tensor, lengths: list[int]) -> Packing:
    real = mask[order].flatten()  # (B·S,)
    places = real.logical_not().to(torch.uint8).argsort(stable=True)[: sum(lengths)]  # (T,)
    index = (
        torch.arange(mask.numel(), device=mask.device).view(mask.shape)[order].flatten()[places]
    )  # (T,)
    columns = (mask.cumsum(1) - 1).flatten()[index]  # (T,)
    return Packing(index, columns.unsqueeze(0), lengths, mask.shape)


@torch.compiler.disable
def attention_arguments(
    encoder: PreTrainedModel, keys: Packing, queries: Packing | None = None
) -> dict[str, Any]:
    """Keyword arguments that tell an encoder, or a layer of it, which tokens belong together.

    They are those of Transformers' flash attention. `queries` are the tokens that attend, all of them when absent.
    """
    arguments: dict[str, Any] = {}
    for letter, packing in (("q", queries or keys), ("k", keys)):
        ends = torch.tensor([0, *packing.lengths], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )  # (B+1,)
        arguments[f"cu_seq_lens_{letter}"] = ends.to(packing.index.device, non_blocking=True)
        arguments[f"max_length_{letter}"] = max(packing.lengths)
    if encoder.config._attn_implementation == PACKED:
        # a mask of four dimensions goes through Transformers as it is; without one it would make its own
        arguments |= {
            "attention_mask": keys.index.new_empty(1, 1, 0, 0),
            "row_lengths": keys.lengths,
        }
    return arguments


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention (1, T, H, d) of packed queries, keys and values (1, H, T, d), as `attention_arguments` describe them.

    Without these arguments the rows are padded, and it is Transformers' `sdpa`.
    """
    if kwargs.get("cu_seq_lens_q") is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    return _attention_of_rows(query, key, value, dropout, scaling, **kwargs), None


@torch.compiler.disable
def _attention_of_rows(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, **kwargs: Any
) -> Tensor:
    """`packed_attention` of rows without padding, by lengths that no compiled graph can hold.

    In a layer with a sliding window (ModernBERT) a token sees those less than `sliding_window` away.
    """
    tokens = [states[0].transpose(0, 1) for states in (query, key, value)]  # (T, H, d) each
    ends = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]  # (B+1,) each
    window = kwargs.get("sliding_window")
    if window is not None and kwargs["max_length_k"] <= window:
        window = None
    if query.device.type != "cuda" or window is not None:
        out = attention_by_length(*tokens, *ends, dropout, scaling, window)  # (T, H, d)
    else:
        limits = min(kwargs["row_lengths"]), kwargs["max_length_k"]
        out = jagged_attention(*tokens, *ends, dropout, scaling, limits)
    return out.unsqueeze(0)


def attention_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    dropout: float = 0.0,
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Attention (T, H, d) where neighbouring rows of the same length run together: no padding, no mask.

    Queries (T, H, d), keys and values (T', H, d) of row i are those from `ends[i]` to `ends[i + 1]`.
    """
    lengths = zip(query_ends.diff().tolist(), key_ends.diff().tolist(), strict=True)
    runs = [(size, len(list(rows))) for size, rows in groupby(lengths)]
    queries = query.split([q * count for (q, _), count in runs])
    keys, values = (states.split([k * count for (_, k), count in runs]) for states in (key, value))
    parts = []
    for ((_, length), count), *states in zip(runs, queries, keys, values, strict=True):
        q, k, v = (
            part.unflatten(0, (count, -1)).transpose(1, 2) for part in states
        )  # (rows, H, length, d) each
        mask = None if window is None else near(length, window, query.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def near(length: int, window: int, device: torch.device) -> Tensor:
    """(length, length) bool: whether two tokens are less than `window` apart."""
    column = torch.arange(length, device=device)
    return (column[:, None] - column).abs() < window


def jagged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    dropout: float,
    scaling: float | None,
    limits: tuple[int, int],
) -> Tensor:
    """The same by torch's jagged tensors, one kernel for all rows; `limits` are the least and the largest length."""

    def rows(states: Tensor, ends: Tensor) -> Tensor:
        least, largest = limits
        nested = torch.nested.nested_tensor_from_jagged(
            states, ends, min_seqlen=least, max_seqlen=largest
        )
        return nested.transpose(1, 2)  # (B, H, length, d)

    ends = key_ends.long()
    q, k, v = (
        rows(query, ends if query_ends is key_ends else query_ends.long()),
        rows(key, ends),
        rows(value, ends),
    )
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2).values()


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
