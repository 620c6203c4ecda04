"""Rows of uneven length one after another instead of padded, and attention that keeps them apart.

Ships with a checkpoint beside modeling_dap.py. Shapes in the comments: `B` rows, `S` tokens of the longest, `T` real
tokens of all rows, `H` heads, `d` size of a head.
"""

from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

PACKED = "dap_packed"  # torch's attention that also takes packed rows


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
    rows: list[int]  # (B,) row numbers in their packed order: the shortest first, as far as this packing has the say
    lengths: list[int]  # (B,) real tokens of these rows
    shape: torch.Size  # (B, S)

    def take(self, values: Tensor) -> Tensor:
        """The packed tokens (1, T, ...) of a batch (B, S, ...)."""
        return values.flatten(0, 1).index_select(0, self.index).unsqueeze(0)

    def put_back(self, packed: Tensor) -> Tensor:
        """The batch (B, S, ...) of packed tokens (1, T, ...), with zeros for the rest."""
        flat = packed.new_zeros(self.shape.numel(), *packed.shape[2:])
        return flat.index_copy(0, self.index, packed[0]).unflatten(0, self.shape)


@torch.compiler.disable
def pack(mask: Tensor, rows: list[int] | None = None) -> Packing:
    """The packing of the tokens where a mask (B, S) is 1, wherever they stand, in the order of `rows` if given.

    >>> packing = pack(torch.tensor([[0, 1, 1], [1, 0, 0]]))
    >>> packing.index, packing.columns, packing.rows, packing.lengths
    (tensor([3, 1, 2]), tensor([[0, 0, 1]]), [1, 0], [1, 2])
    """
    counts = mask.sum(1).tolist()
    rows = sorted(range(len(counts)), key=counts.__getitem__) if rows is None else rows
    order = torch.tensor(rows, device=mask.device)  # (B,)
    real = mask.bool()[order].flatten()  # (B·S,)
    places = real.logical_not().to(torch.uint8).argsort(stable=True)[: sum(counts)]  # (T,)
    index = torch.arange(mask.numel(), device=mask.device).view(mask.shape)[order].flatten()[places]  # (T,)
    columns = (mask.cumsum(1) - 1).flatten()[index]  # (T,)
    return Packing(index, columns.unsqueeze(0), rows, [counts[row] for row in rows], mask.shape)


@torch.compiler.disable
def attention_arguments(encoder: PreTrainedModel, keys: Packing, queries: Packing | None = None) -> dict[str, Any]:
    """Keyword arguments that tell an encoder, or a layer of it, which tokens belong together.

    They are those of Transformers' flash attention. `queries` are the tokens that attend, all of them when absent.
    """
    arguments: dict[str, Any] = {}
    for letter, packing in (("q", queries or keys), ("k", keys)):
        ends = torch.tensor([0, *packing.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)  # (B+1,)
        arguments[f"cu_seq_lens_{letter}"] = ends.to(packing.index.device, non_blocking=True)
        arguments[f"max_length_{letter}"] = max(packing.lengths)
    if encoder.config._attn_implementation == PACKED:
        # a mask of four dimensions goes through Transformers as it is; without one it would make its own
        arguments |= {"attention_mask": keys.index.new_empty(1, 1, 0, 0), "row_lengths": keys.lengths}
    return arguments


@torch.compiler.disable
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

    Without these arguments the rows are padded, and it is Transformers' `sdpa`. In a layer with a sliding window
    (ModernBERT) a token sees those less than `sliding_window` away.
    """
    if kwargs.get("cu_seq_lens_q") is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
    tokens = [states[0].transpose(0, 1) for states in (query, key, value)]  # (T, H, d) each
    ends = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"]  # (B+1,) each
    window = kwargs.get("sliding_window")
    if window is not None and kwargs["max_length_k"] <= window:
        window = None
    if query.device.type == "cpu" or window is not None:
        out = attention_by_length(*tokens, *ends, dropout, scaling, window)  # (T, H, d)
    else:
        limits = min(kwargs["row_lengths"]), kwargs["max_length_k"]
        out = jagged_attention(*tokens, *ends, dropout, scaling, limits)
    return out.unsqueeze(0), None


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
        q, k, v = (part.unflatten(0, (count, -1)).transpose(1, 2) for part in states)  # (rows, H, length, d) each
        mask = None if window is None else near(length, window, query.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling)
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
        nested = torch.nested.nested_tensor_from_jagged(states, ends, min_seqlen=least, max_seqlen=largest)
        return nested.transpose(1, 2)  # (B, H, length, d)

    ends = key_ends.long()
    q, k, v = rows(query, ends if query_ends is key_ends else query_ends.long()), rows(key, ends), rows(value, ends)
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2).values()


AttentionInterface.register(PACKED, packed_attention)
AttentionMaskInterface.register(PACKED, sdpa_mask)
