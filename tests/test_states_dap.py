"""Packed rows: the same states and gradients as row by row, by every attention that takes them."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from tiny_models import ENCODERS, MORE_ENCODERS, distance, gradients, make_batch, on_cuda
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

import states_dap
from encoder_dap import build_encoder
from states_dap import (
    PACKED,
    POOLINGS,
    attention_arguments,
    first_tokens,
    last_states,
    layer_stack,
    pack,
    packed_attention,
    takes_packed,
    use_packing,
)

QUERIES, KEYS = [1, 2, 1, 1], [4, 4, 9, 40]  # fewer queries in all than keys in the last row


def packed_encoder(model_type: str) -> PreTrainedModel:
    encoder = build_encoder(tiny_config(model_type)).eval()
    use_packing(encoder)
    return encoder


def one_by_one(encoder: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    expected = torch.zeros(*ids.shape, 32, dtype=encoder.dtype)
    for row, real in enumerate(mask.bool()):
        expected[row, real] = encoder(input_ids=ids[row, real][None]).last_hidden_state[0]
    return expected


def mask_of(lengths: list[int]) -> Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()


ROWS = [12, 3, 7, 7, 30, 1, 2]  # all windows here are shorter than the longest row


@pytest.mark.parametrize(
    ("dtype", "asks_some", "recomputes"),
    [
        (torch.float32, False, False),
        (torch.float64, True, False),
        (torch.float64, False, True),  # gradient checkpointing
    ],
)
@pytest.mark.parametrize(
    ("model_type", "lengths"),
    [
        *((name, ROWS) for name in (*ENCODERS, *MORE_ENCODERS, "lfm2")),
        *(("modernbert", [length] * 2) for length in (5, 6)),  # within a window, and above
        *(("mistral", [length] * 2) for length in (6, 7)),
    ],
)
def test_states_are_those_of_each_row_alone(
    model_type: str, lengths: list, dtype: torch.dtype, asks_some: bool, recomputes: bool
) -> None:
    encoder = packed_encoder(model_type).to(dtype)
    # Relative positions, and convolutions over a row.
    assert takes_packed(encoder) == (model_type not in ("deberta-v2", "lfm2", "t5"))
    mask = F.pad(mask_of(lengths), (1, 1)).roll(1, 1)  # padding on both sides
    mask[0] = mask[0].flip(0)
    ids = torch.randint(5, 250, mask.shape)
    asked = None
    real = mask.bool()
    if asks_some:  # also for padding, which is ignored
        asked = (torch.rand(mask.shape) < 0.3) | first_tokens(mask)
        real = real & asked
    weight = torch.randn(*mask.shape, 32, dtype=dtype) * real.unsqueeze(-1)
    expected = one_by_one(encoder, ids, mask)
    (expected * weight).sum().backward()
    gradient = gradients(encoder)
    encoder.zero_grad()

    if recomputes:
        encoder.train().gradient_checkpointing_enable()
    found = last_states(encoder, mask, asked, input_ids=ids)
    (found * weight).sum().backward()
    near = {torch.float32: 1e-5, torch.float64: 1e-8}[dtype]  # norms of Gemma are in float32
    assert_close(found[real], expected[real], rtol=near, atol=near)
    assert not found[mask == 0].any()
    assert distance(gradients(encoder), gradient) < near


def naive_attention(
    query: Tensor, key: Tensor, value: Tensor, window: int, is_causal: bool, scale: float = 0.5
) -> Tensor:
    """(H, T, d) of one row."""
    key, value = (part.repeat_interleave(len(query) // len(key), 0) for part in (key, value))
    distance = torch.arange(query.shape[1])[:, None] - torch.arange(key.shape[1])
    hidden = (distance.abs() >= window) | (is_causal & (distance < 0))
    scores = (query @ key.mT * scale).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ value


def made_up_flash(
    query: Tensor, key: Tensor, value: Tensor, *limits: Any, **more: Any
) -> list[Tensor]:
    """Compute `aten._flash_attention_forward` row by row."""
    query_ends, key_ends, most_queries, most_keys, _, is_causal, *_ = limits
    assert query_ends.dtype == key_ends.dtype == torch.int32
    lengths = query_ends.diff(), key_ends.diff()
    assert (most_queries, most_keys) == tuple(each.max() for each in lengths)
    before, after = more["window_size_left"], more["window_size_right"]
    assert after == (0 if is_causal else before)
    states = zip((query, key, value), (lengths[0], lengths[1], lengths[1]))
    rows = zip(*(part.transpose(0, 1).split(own.tolist(), 1) for part, own in states))
    window = 99 if before < 0 else before + 1
    alone = [naive_attention(*row, window, is_causal, more["scale"]) for row in rows]
    return [torch.cat(alone, 1).transpose(0, 1)]


@pytest.mark.parametrize(
    ("device", "dtype", "is_made_up"),
    [
        ("cpu", torch.float64, False),
        ("cpu", torch.float64, True),
        pytest.param("cuda", torch.bfloat16, False, marks=on_cuda),
        pytest.param("cuda", torch.float32, False, marks=on_cuda),
    ],
)
@pytest.mark.parametrize(
    ("queries", "window", "is_causal"),
    [(QUERIES, None, False), (KEYS, 2, False), (KEYS, None, True), (KEYS, 5, True)],
)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_packed_attention_is_that_of_each_row(
    device: str,
    dtype: torch.dtype,
    is_made_up: bool,
    queries: list,
    window: int | None,
    is_causal: bool,
    key_heads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also check what the kernel of flash attention is told, which a CPU does not have."""
    flash = Mock(side_effect=made_up_flash)
    if is_made_up:
        monkeypatch.setattr(states_dap, "can_use_flash", lambda *_: True)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    packings = pack(mask_of(KEYS).to(device), mask_of(queries).to(device))
    arguments = attention_arguments(packed_encoder("bert"), *packings)
    sizes = ((4, queries), (key_heads, KEYS), (key_heads, KEYS))
    states = [torch.randn(1, heads, sum(part), 8, dtype=dtype) for heads, part in sizes]
    given = [part.to(device).requires_grad_() for part in states]
    module = torch.nn.Module()
    module.is_causal = is_causal
    found, _ = packed_attention(module, *given, scaling=0.5, sliding_window=window, **arguments)
    assert flash.called == is_made_up

    query, key, value = (part[0].double().requires_grad_() for part in states)
    rows = zip(query.split(queries, 1), key.split(KEYS, 1), value.split(KEYS, 1))
    alone = [naive_attention(*row, window or 99, is_causal) for row in rows]
    expected = torch.cat(alone, 1).transpose(0, 1)
    tolerance = 0.02 if device == "cuda" else 1e-9
    near = {"rtol": tolerance, "atol": tolerance}
    assert_close(found[0].cpu().double(), expected, **near)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((found[0] * weight.to(device)).sum(), given[1])[0]
    theirs = torch.autograd.grad((expected * weight).sum(), key)[0]
    assert_close(ours[0].cpu().double(), theirs, **near)


def test_the_last_layer_of_some_tokens_has_dropout_in_training() -> None:
    encoder, ids = packed_encoder("bert"), torch.randint(5, 250, (2, 6))
    encoder.encoder.layer[-1].attention.self.dropout.p = 0.5
    mask = torch.ones_like(ids)
    for is_training in (False, True):
        encoder.train(is_training)
        asked = first_tokens(mask)
        once, again = (last_states(encoder, mask, asked, input_ids=ids) for _ in range(2))
        assert torch.equal(once, again) != is_training


def test_a_hook_on_a_projection_is_called_in_training() -> None:
    encoder, ids = packed_encoder("bert").train(), torch.randint(5, 250, (2, 6))
    calls = []
    for layer in layer_stack(encoder)[1]:
        layer.attention.self.query.register_forward_hook(lambda *_: calls.append(1))
    last_states(encoder, torch.ones_like(ids), input_ids=ids)
    assert len(calls) == 3


@pytest.mark.parametrize("model_type", ["bert", "modernbert"])
def test_padded_rows_are_computed_as_by_sdpa_and_compiled_whole(model_type: str) -> None:
    encoder = build_encoder(tiny_config(model_type)).eval()
    batch = make_batch(longest=20)
    given = {name: batch[f"source_{name}"] for name in ("input_ids", "attention_mask")}
    expected = encoder(**given).last_hidden_state
    use_packing(encoder)
    assert encoder.config._attn_implementation == PACKED
    assert torch.equal(encoder(**given).last_hidden_state, expected)
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    assert_close(compiled(**given).last_hidden_state, expected)


def test_flash_attention_is_told_by_its_own_arguments() -> None:
    encoder = packed_encoder("bert")
    encoder.config._attn_implementation = "flash_attention_2"
    arguments = attention_arguments(encoder, *pack(torch.tensor([[1, 1, 1], [1, 0, 0]])))
    assert set(arguments) == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert arguments["cu_seq_lens_k"].tolist() == [0, 1, 4]
    assert arguments["cu_seq_lens_k"].dtype == torch.int32
    assert arguments["max_length_q"] == 3


def test_an_encoder_is_not_given_wrong_attention() -> None:
    encoder = packed_encoder("bert")
    (packing,) = pack(torch.ones(2, 3, dtype=torch.long))
    mask = attention_arguments(encoder, packing)["attention_mask"]
    states = torch.randn(1, 4, 6, 8)
    with pytest.raises(RuntimeError, match="attn_mask"):
        packed_attention(encoder, states, states, states, mask)
    encoder.is_causal = False
    packed_attention(encoder, states, states, states, None)  # nothing else is wrong
    arguments = attention_arguments(encoder, packing) | {"softcap": 30.0}
    with pytest.raises(ValueError, match="softcap"):
        packed_attention(encoder, states[:1], states[:1], states[:1], **arguments)


def test_mean_in_half_precision_does_not_overflow() -> None:
    states = torch.full((1, 512, 2), 300.0, dtype=torch.float16)
    assert POOLINGS["mean"].pool(states, torch.ones(1, 512)).tolist() == [[300.0, 300.0]]
