"""Packed rows: the same states and gradients as row by row, by every attention that takes them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from tiny_models import ENCODERS, gradients, make_batch, step, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

import states_dap
from encoder_dap import build_encoder
from states_dap import (
    PACKED,
    POOLINGS,
    attention_arguments,
    attention_by_length,
    first_tokens,
    last_states,
    pack,
    packed_attention,
    takes_packed,
    use_packing,
)

QUERIES, KEYS = [2, 2, 3, 1], [4, 4, 4, 6]  # tokens of four rows


def one_by_one(encoder: torch.nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    rows = [
        encoder(input_ids=row[real.bool()][None]).last_hidden_state[0]
        for row, real in zip(ids, mask)
    ]
    return torch.stack([F.pad(row, (0, 0, 0, ids.shape[1] - len(row))) for row in rows])


@pytest.mark.parametrize("asks_some", [False, True])
@pytest.mark.parametrize(
    ("model_type", "device"), [*((name, "cpu") for name in ENCODERS), ("deberta-v2", "cuda")]
)
def test_states_are_those_of_each_row_alone(
    model_type: str, device: str, asks_some: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda":  # where rows are padded
        monkeypatch.setattr(states_dap, "grouped_states", states_dap.padded_states)
    encoder = packed_encoder(model_type)
    assert takes_packed(encoder) == (model_type != "deberta-v2")
    lengths = torch.tensor([30, 3, 12, 12, 1])  # ModernBERT's window here is 4 on either side
    mask = (torch.arange(30) < lengths[:, None]).long()
    ids = torch.randint(5, 250, mask.shape)
    asked = None
    real = mask.bool()
    if asks_some:  # also for padding, which is ignored
        asked = (torch.rand(mask.shape) < 0.3).index_fill(1, torch.tensor([0]), True)
        real = real & asked
    weight = torch.randn(*mask.shape, 32) * real.unsqueeze(-1)
    found = last_states(encoder, mask, asked, input_ids=ids)
    (found * weight).sum().backward()
    gradient = gradients(encoder)
    encoder.zero_grad()
    expected = one_by_one(encoder, ids, mask)
    (expected * weight).sum().backward()
    torch.testing.assert_close(found[real], expected[real], rtol=1e-4, atol=1e-5)
    assert not found[mask == 0].any()
    assert (gradient - gradients(encoder)).norm() < 1e-5 * gradient.norm()


def test_tokens_come_back_to_where_they_stood() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    values = torch.randn(3, 5, 2)
    asked = torch.tensor([[0, 0, 1, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
    for packing, own, lengths in zip(pack(mask, asked), (mask, asked), ([1, 2, 3], [0, 2, 1])):
        assert packing.lengths == lengths
        assert torch.equal(
            packing.take(values)[0], torch.cat([values[row][own[row].bool()] for row in (1, 2, 0)])
        )
        assert torch.equal(packing.put_back(packing.take(values)), values * own.unsqueeze(-1))


def states_of(lengths: list[int]) -> Tensor:
    return torch.randn(sum(lengths), 2, 8, dtype=torch.float64)


def naive_attention(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    """(T, H, d) of one row."""
    distance = (torch.arange(len(query))[:, None] - torch.arange(len(key))).abs()
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.5
    weights = scores.masked_fill(distance >= window, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@pytest.mark.parametrize(("lengths", "window"), [(QUERIES, None), (KEYS, 2)])
def test_attention_keeps_rows_apart(lengths: list[int], window: int | None) -> None:
    query, key, value = states_of(lengths), states_of(KEYS), states_of(KEYS)
    rows = zip(query.split(lengths), key.split(KEYS), value.split(KEYS))
    expected = torch.cat([naive_attention(*row, window or 99) for row in rows])
    found = attention_by_length(query, key, value, lengths, KEYS, scaling=0.5, window=window)
    torch.testing.assert_close(found, expected)


def flash_on_the_cpu(
    query: Tensor, key: Tensor, value: Tensor, *limits: Any, scale: float | None
) -> tuple[Tensor, None]:
    """Do what `aten._flash_attention_forward` does on a GPU, which also checks these limits."""
    query_ends, key_ends, most_queries, most_keys, dropout, *_ = limits
    assert query_ends.dtype == key_ends.dtype == torch.int32
    lengths = query_ends.diff().tolist(), key_ends.diff().tolist()
    assert (most_queries, most_keys) == (max(lengths[0]), max(lengths[1]))
    return attention_by_length(query, key, value, *lengths, dropout, scale), None


@pytest.mark.parametrize("pooling", POOLINGS)
def test_flash_attention_is_given_queries_and_keys_of_their_own_lengths(
    pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny_model(pooling=pooling), make_batch()
    expected = model(**batch).loss
    monkeypatch.setattr(states_dap, "can_use_flash", lambda *_: True)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash_on_the_cpu)
    torch.testing.assert_close(model(**batch).loss, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_attention_on_a_gpu_is_that_of_each_row(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = {"q": [1, 2, 1, 1], "k": [4, 4, 9, 40]}  # fewer queries in all than keys in a row
    arguments = {}
    for letter, own in lengths.items():
        ends = torch.tensor([0, *own], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        arguments[f"cu_seq_lens_{letter}"] = ends.cuda()
        arguments[f"row_lengths_{letter}"] = own
        arguments[f"max_length_{letter}"] = max(own)
    query, key, value = (
        torch.randn(1, 2, sum(lengths[letter]), 8, device="cuda", dtype=dtype, requires_grad=True)
        for letter in "qkk"
    )
    found, _ = packed_attention(torch.nn.Module(), query, key, value, None, 0.0, 0.5, **arguments)
    rows = [states[0].transpose(0, 1).double() for states in (query, key, value)]
    expected = attention_by_length(*rows, lengths["q"], lengths["k"], scaling=0.5)
    torch.testing.assert_close(found[0].double(), expected, rtol=0.02, atol=0.02)
    weight = torch.randn_like(expected)
    ours = torch.autograd.grad((found[0] * weight).sum(), key)[0]
    theirs = torch.autograd.grad((expected * weight).sum(), key)[0]
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)


def packed_encoder(model_type: str) -> PreTrainedModel:
    encoder = build_encoder(tiny_config(model_type)).eval()
    use_packing(encoder)
    return encoder


@pytest.mark.parametrize("length", [5, 6])
def test_the_window_begins_at_the_first_row_that_is_longer(length: int) -> None:
    encoder, ids = packed_encoder("modernbert"), torch.randint(5, 250, (2, length))
    mask = torch.ones_like(ids)
    found = last_states(encoder, mask, input_ids=ids)
    torch.testing.assert_close(found, one_by_one(encoder, ids, mask))


def test_the_last_layer_of_some_tokens_has_dropout_in_training() -> None:
    encoder, ids = packed_encoder("bert"), torch.randint(5, 250, (2, 6))
    encoder.encoder.layer[-1].attention.self.dropout.p = 0.5
    mask = torch.ones_like(ids)
    for is_training in (False, True):
        encoder.train(is_training)
        asked = first_tokens(mask)
        once, again = (last_states(encoder, mask, asked, input_ids=ids) for _ in range(2))
        assert torch.equal(once, again) != is_training


def test_padded_rows_are_computed_as_by_sdpa() -> None:
    encoder = build_encoder(tiny_config("modernbert")).eval()
    batch = make_batch(longest=20)
    given = {name: batch[f"source_{name}"] for name in ("input_ids", "attention_mask")}
    expected = encoder(**given).last_hidden_state
    use_packing(encoder)
    assert encoder.config._attn_implementation == PACKED
    assert torch.equal(encoder(**given).last_hidden_state, expected)


def test_padded_rows_are_compiled_whole() -> None:
    encoder, batch = packed_encoder("bert"), make_batch()
    given = {name: batch[f"source_{name}"] for name in ("input_ids", "attention_mask")}
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    expected = encoder(**given).last_hidden_state
    torch.testing.assert_close(compiled(**given).last_hidden_state, expected)


def test_flash_attention_is_told_by_its_own_arguments() -> None:
    encoder = build_encoder(tiny_config("bert"))
    encoder.config._attn_implementation = "flash_attention_2"
    arguments = attention_arguments(encoder, *pack(torch.tensor([[1, 1, 1], [1, 0, 0]])))
    assert set(arguments) == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert arguments["cu_seq_lens_k"].tolist() == [0, 1, 4]
    assert arguments["cu_seq_lens_k"].dtype == torch.int32
    assert arguments["max_length_q"] == 3


def test_an_encoder_that_drops_the_arguments_is_not_given_wrong_attention() -> None:
    encoder = packed_encoder("bert")
    (packing,) = pack(torch.ones(2, 3, dtype=torch.long))
    mask = attention_arguments(encoder, packing)["attention_mask"]
    states = torch.randn(1, 4, 6, 8)
    with pytest.raises(RuntimeError, match="attn_mask"):
        packed_attention(encoder, states, states, states, mask)
    packed_attention(encoder, states, states, states, None)  # nothing else is wrong


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "roberta"])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_last_layer_is_right_for_the_queries(model_type: str, layers: int) -> None:
    model, batch = tiny_model(model_type, rtl_layers=layers, objective="rtl"), make_batch()
    _, packed = step(model, batch)
    model.set_attn_implementation("sdpa")
    _, padded = step(model, batch)
    assert (packed - padded).norm() < 1e-5 * padded.norm()


def test_mean_in_half_precision_does_not_overflow() -> None:
    states = torch.full((1, 512, 2), 300.0, dtype=torch.float16)
    assert POOLINGS["mean"].pool(states, torch.ones(1, 512)).tolist() == [[300.0, 300.0]]
