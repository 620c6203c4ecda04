"""Token states of an encoder without computing padding, and sentence vectors from them.

The file ships with every checkpoint, beside modeling_dap.py. `POOLINGS` lists the ways from token
states to a sentence vector. `last_states` computes token states, in the fastest way that the
encoder allows:

- *Packed*: all rows stand one behind the other in one long row without padding. Attention gets the
  length of each row, so that no token sees another row. Within a row, attention may be causal, have
  a window, or share keys between heads. This needs an attention that takes packed rows:
  `use_packing` gives ours to any encoder that runs torch's `sdpa` attention.
- *Padded*: one batch with padding, as in Transformers.

Shapes in the comments: `B` rows, `S` tokens of the longest row, `T` real tokens of all rows, `D`
hidden size, `E` width of the word embeddings, `H` attention heads, `d` size of a head.
"""

from collections.abc import Callable
from functools import partial
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

try:
    from .losses_dap import at_least_float32
except ImportError:  # a checkout, where these files are top-level modules
    from losses_dap import at_least_float32

#: Types of encoders whose layers are built like BERT's and are followed by nothing.
LIKE_BERT = ("bert", "camembert", "electra", "roberta", "xlm-roberta")
#: Name of torch's attention that also takes packed rows.
PACKED = "dap_packed"
#: Arguments of Transformers' attention that packed attention does not compute.
CHANGES_SCORES = ("position_bias", "s_aux", "softcap")


# --------------------------------------------------------------------------------------- pooling


class Pooling(NamedTuple):
    """A way from token states to sentence vectors.

    Attributes:
        reads: function of a mask (B, S) that returns True for each token whose state is read,
            (B, S) bool. None means that all real tokens are read.
        pool: function of the last hidden states (B, S, D) and a mask (B, S) that returns the
            sentence vectors (B, D), not normalised. Padding may be on either side.
        flag: name in the files of sentence-transformers.
    """

    reads: Callable[[Tensor], Tensor] | None
    pool: Callable[[Tensor, Tensor], Tensor]
    flag: str


def first_tokens(mask: Tensor) -> Tensor:
    """Return True for the first real token of each row: (B, S).

    >>> first_tokens(torch.tensor([[1, 1, 0], [0, 1, 1]])).int().tolist()
    [[1, 0, 0], [0, 1, 0]]
    """
    return mask.bool() & (mask.cumsum(1) == 1)


def last_tokens(mask: Tensor) -> Tensor:
    """Return True for the last real token of each row: (B, S).

    >>> last_tokens(torch.tensor([[1, 1, 0], [0, 1, 1]])).int().tolist()
    [[0, 1, 0], [0, 0, 1]]
    """
    return first_tokens(mask.flip(1)).flip(1)


def state_of(tokens: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that takes the state of one token per row, such as the first."""

    def pool(states: Tensor, mask: Tensor) -> Tensor:
        column = tokens(mask).to(torch.uint8).argmax(1)  # (B,)
        # Not range(len(...)): an export to ONNX would take the length for a constant.
        rows = torch.arange(column.shape[0], device=column.device)
        return states[rows, column]

    return pool


def mean_of_real(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean state (B, D) of each row's real tokens.

    >>> mean_of_real(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[1, 1, 0]]))
    tensor([[2.]])
    """
    values = at_least_float32(states)  # a sum in half precision would overflow
    mask = mask.unsqueeze(-1).to(values.dtype)  # (B, S, 1)
    mean = (values * mask).sum(1) / mask.sum(1).clamp(min=1)
    return mean.to(states.dtype)


#: Every pooling by its name in `DAPConfig.pooling`. The paper's is "cls" (section 3.2).
POOLINGS = {
    "cls": Pooling(first_tokens, state_of(first_tokens), "cls_token"),
    "mean": Pooling(None, mean_of_real, "mean_tokens"),
    "lasttoken": Pooling(last_tokens, state_of(last_tokens), "lasttoken"),
}


# ---------------------------------------------------------------------------------------- states


def last_states(
    encoder: PreTrainedModel, mask: Tensor, read: Tensor | None = None, **inputs: Tensor
) -> Tensor:
    """Return the last hidden states (B, S, D) of the real tokens, and zeros for padding.

    Args:
        mask: (B, S), 1 for real tokens, which may stand anywhere in their row.
        read: (B, S) bool, the tokens whose states the caller reads. None means all tokens. The
            states of other tokens may be zeros, which saves work in the last layer.
        inputs: `input_ids` (B, S) or `inputs_embeds` (B, S, E), and further inputs of the encoder
            with a value per token, such as `position_ids` (B, S).
    """
    if takes_packed(encoder):
        return packed_states(encoder, mask, inputs, read)

    order = real_tokens_first(mask)
    mask = gather_columns(mask, order)
    inputs = {name: gather_columns(value, order) for name, value in inputs.items()}
    states = encoder(attention_mask=mask, **inputs).last_hidden_state
    states = states.masked_fill(mask.unsqueeze(-1) == 0, 0.0)
    return gather_columns(states, order.argsort(1))  # back to the old order


def sentence_vectors(
    encoder: PreTrainedModel, mask: Tensor, pooling: str, **inputs: Tensor
) -> Tensor:
    """Return sentence vectors (B, D) from `packed_states` of the tokens that the pooling reads."""
    kind = POOLINGS[pooling]
    read = None if kind.reads is None else kind.reads(mask)
    return kind.pool(packed_states(encoder, mask, inputs, read), mask)


def real_tokens_first(mask: Tensor) -> Tensor:
    """Return the column order (B, S) that moves real tokens to the front and padding to the end.

    >>> real_tokens_first(torch.tensor([[1, 0, 1]]))
    tensor([[0, 2, 1]])
    """
    return mask.to(torch.uint8).argsort(dim=1, descending=True, stable=True)


def gather_columns(values: Tensor, order: Tensor) -> Tensor:
    """Return values (B, S) or (B, S, D) with the columns of each row in the order (B, S)."""
    if values.dim() == 3:
        order = order.unsqueeze(-1).expand(-1, -1, values.shape[-1])
    return values.gather(1, order)


# -------------------------------------------------------------------------------------- positions


def position_offset(encoder: PreTrainedModel) -> int | None:
    """Return the position id of the first token, or None without absolute position embeddings."""
    table = getattr(getattr(encoder, "embeddings", None), "position_embeddings", None)
    if table is None:
        return None
    if table.padding_idx is None:
        return 0
    return table.padding_idx + 1  # RoBERTa and XLM-R start after the padding id


def absolute_positions(encoder: PreTrainedModel, columns: Tensor | None) -> dict[str, Tensor]:
    """Return `position_ids` (B, S) of tokens whose places in the sentence are `columns`, from 0.

    The dictionary is empty if `columns` is None, or if the encoder has no absolute positions.
    """
    offset = position_offset(encoder)
    if offset is None or columns is None:
        return {}
    return {"position_ids": columns + offset}


# ------------------------------------------------------------------------------------ packed rows


def use_packing(encoder: PreTrainedModel, trains: bool = True) -> None:
    """Make an encoder that runs torch's `sdpa` take packed rows as well. Others stay unchanged.

    If it `trains`, layers like BERT's also get `self_attention`. They then refer to themselves, so
    that only Python's garbage collection frees them.
    """
    if encoder.config._attn_implementation == "sdpa" and encoder._supports_attention_backend:
        encoder.set_attn_implementation(PACKED)
    if trains and can_skip_tokens(encoder):
        for layer in layer_stack(encoder)[1]:
            attention = layer.attention.self
            attention.forward = partial(self_attention, attention)


def takes_packed(encoder: PreTrainedModel) -> bool:
    """Tell whether an encoder takes packed rows: its attention can tell rows apart.

    Other kinds of layers, such as convolutions, would mix the tokens of neighbouring rows.
    """
    kinds = set(getattr(encoder.config, "layer_types", None) or ())
    takes_lengths = encoder.config._attn_implementation.startswith((PACKED, "flash_attention"))
    return takes_lengths and kinds <= {"full_attention", "sliding_attention"}


class Packing(NamedTuple):
    """Where the tokens of a batch (B, S) come from when its rows are packed, shortest first."""

    index: Tensor  # (T,) position of each packed token in the flattened batch
    lengths: list[int]  # number of tokens of each row, in packed order
    shape: torch.Size  # (B, S)

    def take(self, values: Tensor) -> Tensor:
        """Pack a batch (B, S, ...): return its tokens (1, T, ...)."""
        return values.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def put_back(self, packed: Tensor) -> Tensor:
        """Unpack tokens (1, T, ...): return the batch (B, S, ...) with zeros elsewhere."""
        flat = packed.new_zeros(self.shape.numel(), *packed.shape[2:])
        return flat.index_copy(0, self.index, packed[0]).unflatten(0, self.shape)


@torch.compiler.disable
def pack(*masks: Tensor) -> list[Packing]:
    """Return one `Packing` per mask (B, S), of the tokens where the mask is 1.

    All masks have the same order of rows, from few to many tokens in the first mask. Ties go by the
    next mask. Rows of equal lengths are then neighbours, which `attention_by_length` computes
    together. The lengths of all masks are copied from a GPU in one transfer.

    >>> (packing,) = pack(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    >>> packing.index, packing.lengths
    (tensor([3, 1, 2]), [1, 2])
    """
    masks = tuple(mask.bool() for mask in masks)
    counts = torch.stack([mask.sum(1) for mask in masks]).tolist()
    counts_of_rows = list(zip(*counts))
    rows = sorted(range(len(counts_of_rows)), key=counts_of_rows.__getitem__)
    order = torch.tensor(rows).to(masks[0].device, non_blocking=True)  # (B,)

    packings = []
    for mask, count in zip(masks, counts):
        lengths = [count[row] for row in rows]
        packings.append(_pack_in_order(mask, order, lengths))
    return packings


def _pack_in_order(mask: Tensor, order: Tensor, lengths: list[int]) -> Packing:
    """Return the packing of the tokens where a mask (B, S) is True, rows in this order (B,)."""
    real = mask[order].flatten()  # (B·S,)
    # The places of the real tokens, by a sort: `nonzero` would wait for a GPU.
    places = real.to(torch.uint8).argsort(descending=True, stable=True)[: sum(lengths)]  # (T,)
    numbers = torch.arange(mask.numel(), device=mask.device).view(mask.shape)  # (B, S)
    index = numbers[order].flatten()[places]  # (T,)
    return Packing(index, lengths, mask.shape)


def packed_states(
    encoder: PreTrainedModel, mask: Tensor, inputs: dict[str, Tensor], read: Tensor | None = None
) -> Tensor:
    """Return the last hidden states (B, S, D), computed without padding. Padding has zeros.

    The encoder must be one for which `takes_packed` is true. Position ids are added to the inputs
    if they have none. `mask`, `inputs` and `read` are as in `last_states`.
    """
    if read is None or not can_skip_tokens(encoder):
        (packing,) = pack(mask)
        packed = _packed_inputs(encoder, packing, mask, inputs)
        out = encoder(**packed, use_cache=False, **attention_arguments(encoder, packing))
        return packing.put_back(out.last_hidden_state)  # from (1, T, D)

    # All layers but the last for all tokens, the last one only for the tokens that are read.
    read = read & mask.bool()
    packing, read_packing = pack(mask, read)
    packed = _packed_inputs(encoder, packing, mask, inputs)
    arguments = attention_arguments(encoder, packing)
    states = encoder.embeddings(**packed)  # (1, T, D)
    _, layers = layer_stack(encoder)
    for layer in layers[:-1]:
        states = layer(states, **arguments)

    count = sum(read_packing.lengths)
    # A sort, because `nonzero` would wait for a GPU.
    places = packing.take(read)[0].argsort(stable=True, descending=True)[:count]  # (T',)
    arguments = attention_arguments(encoder, packing, read_packing)
    states = last_layer_of_some(layers[-1], states, places, arguments)  # (1, T', D)
    return read_packing.put_back(states)


class PassThrough(nn.Module):
    """A replacement for an encoder's embedding layer that returns `inputs_embeds` unchanged."""

    word_embeddings = tok_embeddings = None  # what encoders return from get_input_embeddings

    def forward(
        self, input_ids: None = None, inputs_embeds: Tensor | None = None, *_: Any, **others: Any
    ) -> Tensor:
        return inputs_embeds


def _packed_inputs(
    encoder: PreTrainedModel, packing: Packing, mask: Tensor, inputs: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return an encoder's inputs (B, S, ...) packed as (1, T, ...), with position ids."""
    first = position_offset(encoder) or 0
    packed = {"position_ids": packing.take(mask.cumsum(1) + (first - 1))}  # (1, T)
    for name, value in inputs.items():
        packed[name] = packing.take(value)
    return packed


def embed(encoder: PreTrainedModel, words: Tensor) -> Tensor:
    """Return what the first layer gets, (B, S, D), given word embeddings (B, S, E)."""
    if not hasattr(encoder, "embeddings"):  # such as a decoder
        return words
    return encoder.embeddings(input_ids=None, inputs_embeds=words)


def layer_stack(encoder: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name of an encoder's list of blocks, such as "encoder.layer", and the list."""
    count = encoder.config.num_hidden_layers
    for name, module in encoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return name, module
    raise ValueError(f"no list of {count} layers in {type(encoder).__name__}")


def can_skip_tokens(encoder: PreTrainedModel) -> bool:
    """Tell whether the last layer is like BERT's, so that it can be computed for some tokens."""
    config = encoder.config
    if config.model_type not in LIKE_BERT or config.is_decoder:
        return False
    return not hasattr(encoder, "embeddings_project")


def last_layer_of_some(
    layer: nn.Module, states: Tensor, places: Tensor, arguments: dict[str, Any]
) -> Tensor:
    """Compute a layer like BERT's at packed `places` (T',), which see all states (1, T, D).

    The arguments come from `attention_arguments`, with the tokens to compute as queries.
    """
    attention = layer.attention.self
    if hasattr(layer, "unshard"):  # FSDP keeps shards of a layer that is not called as a whole
        layer.unshard()

    def heads(linear: nn.Linear, tokens: Tensor) -> Tensor:
        projected = linear(tokens).unflatten(-1, (-1, attention.attention_head_size))
        return projected.transpose(1, 2)  # (1, H, T, d)

    some = states.index_select(1, places)  # (1, T', D)
    query = heads(attention.query, some)
    key = heads(attention.key, states)
    value = heads(attention.value, states)
    mixed = _attend(attention, query, key, value, arguments)  # (1, T', D)
    return layer.feed_forward_chunk(layer.attention.output(mixed, some))


def self_attention(
    attention: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute the self-attention of BERT. It replaces the `forward` of that class.

    For packed rows in training, one product gives queries, keys and values. This takes fewer
    operations than three, also for the gradients.
    """
    linears = (attention.query, attention.key, attention.value)
    is_fused = attention.training and "cu_seq_lens_q" in kwargs
    for linear in linears:  # an adapter or a hook must be called, so it excludes the one product
        is_called = linear._forward_pre_hooks or linear._forward_hooks
        is_fused = is_fused and type(linear) is nn.Linear and not is_called
    if not is_fused:
        forward = type(attention).forward
        return forward(attention, hidden_states, attention_mask, past_key_values, **kwargs)

    weight = torch.cat([linear.weight for linear in linears])  # (3·D, D)
    bias = torch.cat([linear.bias for linear in linears])
    projected = F.linear(hidden_states, weight, bias)  # (1, T, 3·D)
    projected = projected.unflatten(-1, (3, -1, attention.attention_head_size))
    query, key, value = (part.transpose(1, 2) for part in projected.unbind(2))  # (1, H, T, d)
    return _attend(attention, query, key, value, kwargs), None


def _attend(
    attention: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: dict[str, Any]
) -> Tensor:
    """Compute packed attention (1, H, T, d) of a layer like BERT's, and return (1, T, D)."""
    attend = ALL_ATTENTION_FUNCTIONS[attention.config._attn_implementation]
    options = {
        "attention_mask": None,
        "dropout": attention.dropout.p if attention.training else 0.0,
        "scaling": attention.scaling,
    }
    mixed, _ = attend(attention, query, key, value, **(options | arguments))  # (1, T, H, d)
    return mixed.flatten(2)


# --------------------------------------------------------------------- attention over packed rows


@torch.compiler.disable
def attention_arguments(
    encoder: PreTrainedModel, keys: Packing, queries: Packing | None = None
) -> dict[str, Any]:
    """Return the arguments of Transformers' flash attention, which tell rows apart.

    `queries` are the tokens that attend to `keys`. None means the same tokens.
    """
    arguments: dict[str, Any] = {}
    for letter, packing in (("q", queries or keys), ("k", keys)):
        ends = torch.tensor([0, *accumulate(packing.lengths)], dtype=torch.int32)  # (B+1,)
        arguments[f"cu_seq_lens_{letter}"] = ends.to(packing.index.device, non_blocking=True)
        arguments[f"max_length_{letter}"] = max(packing.lengths)
    if encoder.config._attn_implementation == PACKED:
        # Transformers passes on a mask of four dimensions. Without one it would make its own.
        arguments["attention_mask"] = keys.index.new_empty(1, 1, 0, 0)
        arguments["row_lengths_q"] = (queries or keys).lengths
        arguments["row_lengths_k"] = keys.lengths
    return arguments


class Attention(NamedTuple):
    """How the tokens of one layer attend to the tokens of their row.

    Attributes:
        dropout: share of the attention weights that become 0.
        scaling: factor of the products of queries and keys. None is 1/sqrt(d).
        is_causal: whether a token sees no later tokens.
        window: a token sees the tokens fewer than this many places away. None means all.
    """

    dropout: float
    scaling: float | None
    is_causal: bool
    window: int | None


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention for packed or padded rows, as Transformers' attention interface asks.

    With the arguments of `attention_arguments` the rows (1, H, T, d) are packed. Otherwise they are
    padded, (B, H, S, d), and this is Transformers' `sdpa`. Keys and values may have fewer heads.
    """
    if kwargs.get("cu_seq_lens_q") is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    unknown = [name for name in CHANGES_SCORES if kwargs.get(name) is not None]
    if unknown:
        raise ValueError(f"{type(module).__name__} attends with {unknown}: use 'eager' attention")
    if is_causal is None:
        is_causal = module.is_causal
    kind = Attention(dropout, scaling, is_causal, sliding_window)
    return _attention_of_rows(query, key, value, kind, **kwargs), None


@torch.compiler.disable
def _attention_of_rows(
    query: Tensor, key: Tensor, value: Tensor, kind: Attention, **kwargs: Any
) -> Tensor:
    """Compute attention of packed rows (1, H, T, d), and return (1, T, H, d).

    It stays outside compiled graphs, which cannot hold the lengths of the rows.
    """
    parts = (query, key, value)
    query, key, value = (part.squeeze(0).transpose(0, 1) for part in parts)  # (T, H, d)
    device = query.device.type
    if torch.is_autocast_enabled(device):
        # Rotary positions leave queries and keys in float32, for which there is no flash attention.
        half = torch.get_autocast_dtype(device)
        query, key, value = (part.to(half) for part in (query, key, value))

    if can_use_flash(query, key, value, kind):
        out = flash_attention(query, key, value, kind, **kwargs)
    else:
        lengths = (kwargs["row_lengths_q"], kwargs["row_lengths_k"])
        out = attention_by_length(query, key, value, *lengths, kind)
    return out.unsqueeze(0)  # from (T, H, d)


def attention_by_length(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: list[int],
    key_lengths: list[int],
    kind: Attention,
) -> Tensor:
    """Compute attention (T, H, d) over packed rows, neighbours with equal lengths in one call.

    There is no padding, and no mask but for rows longer than a window. Queries are (T, H, d). Keys
    and values are (T', H', d), where a key serves H/H' heads. Rows must have as many queries as
    keys if attention is causal or has a window.
    """
    is_grouped = query.shape[1] != key.shape[1]
    lengths = zip(query_lengths, key_lengths, strict=True)
    # Runs of rows that have as many queries and as many keys: (queries, keys, rows).
    runs = [(*size, len(list(rows))) for size, rows in groupby(lengths)]
    queries = query.split([query_length * rows for query_length, _, rows in runs])
    keys = key.split([key_length * rows for _, key_length, rows in runs])
    values = value.split([key_length * rows for _, key_length, rows in runs])

    parts = []
    for (_, length, rows), *states in zip(runs, queries, keys, values, strict=True):
        q, k, v = (part.unflatten(0, (rows, -1)).transpose(1, 2) for part in states)
        mask = None
        if kind.window is not None and length > kind.window:
            mask = within_window(length, kind, query.device)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=kind.dropout,
            is_causal=kind.is_causal and mask is None,
            scale=kind.scaling,
            enable_gqa=is_grouped,
        )  # (rows, H, length, d)
        parts.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts)


def within_window(length: int, kind: Attention, device: torch.device) -> Tensor:
    """Tell which tokens of a row a token sees: (length, length) bool."""
    column = torch.arange(length, device=device)
    distance = column[:, None] - column
    if kind.is_causal:
        return (distance >= 0) & (distance < kind.window)
    return distance.abs() < kind.window


def can_use_flash(query: Tensor, key: Tensor, value: Tensor, kind: Attention) -> bool:
    """Tell whether `flash_attention` can run on this device, type and head size.

    It needs CUDA and heads whose size is a multiple of 8. Torch knows the other limits.
    """
    if query.device.type != "cuda" or query.shape[-1] % 8:
        return False
    batches = [states.transpose(0, 1).unsqueeze(0) for states in (query, key, value)]
    is_grouped = query.shape[1] != key.shape[1]
    limits = SDPAParams(*batches, None, kind.dropout, kind.is_causal, is_grouped)  # None: no mask
    return can_use_flash_attention(limits)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, kind: Attention, **kwargs: Any
) -> Tensor:
    """Compute attention (T, H, d) over packed rows by torch's flash attention, one kernel for all.

    `torch.nn.attention.varlen` calls the same operation, but has no option for dropout. Jagged
    tensors also call it, but they run much more Python.
    """
    ends = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]
    longest = kwargs["max_length_q"], kwargs["max_length_k"]
    reach = -1 if kind.window is None else kind.window - 1  # tokens seen on either side, -1: all
    out, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *ends,
        *longest,
        kind.dropout,
        kind.is_causal,
        False,  # no mask for debugging
        scale=kind.scaling,
        window_size_left=reach,
        window_size_right=0 if kind.is_causal else reach,
    )
    return out


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
