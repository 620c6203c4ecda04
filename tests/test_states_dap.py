"""Packed rows: the same states and gradients as row by row, by every attention that takes them."""

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from tiny_models import ENCODERS, gradients, make_batch, tiny_model
from torch import Tensor

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
    torch.manual_seed(0)
    encoder = build_encoder(tiny_config(model_type))
    use_packing(encoder)
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


def test_lengths_are_read_back_once_for_all_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Tensor] = []
    monkeypatch.setattr(Tensor, "tolist", lambda self: read.append(self) or self.numpy().tolist())
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    pack(mask, mask == 0)
    assert [own.tolist() for own in map(Tensor.numpy, read)] == [[[2, 3], [1, 0]]]


def states_of(lengths: list[int]) -> Tensor:
    return torch.randn(sum(lengths), 2, 8, dtype=torch.float64)


def naive_attention(query: Tensor, key: Tensor, value: Tensor, window: int = 99) -> Tensor:
    """(T, H, d) of one row."""
    distance = (torch.arange(len(query))[:, None] - torch.arange(len(key))).abs()
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.5
    return torch.einsum(
        "hqk,khd->qhd", scores.masked_fill(distance >= window, float("-inf")).softmax(-1), value
    )


def test_attention_keeps_rows_apart() -> None:
    torch.manual_seed(0)
    query, key, value = states_of(QUERIES), states_of(KEYS), states_of(KEYS)
    rows = zip(query.split(QUERIES), key.split(KEYS), value.split(KEYS))
    expected = torch.cat([naive_attention(*row) for row in rows])
    found = attention_by_length(query, key, value, QUERIES, KEYS, scaling=0.5)
    torch.testing.assert_close(found, expected)


def test_a_window_is_that_of_the_row() -> None:
    torch.manual_seed(0)
    query, key, value = (states_of(KEYS) for _ in range(3))
    found = attention_by_length(query, key, value, KEYS, KEYS, scaling=0.5, window=2)
    rows = zip(query.split(KEYS), key.split(KEYS), value.split(KEYS))
    torch.testing.assert_close(found, torch.cat([naive_attention(*row, window=2) for row in rows]))


def flash_on_the_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    most_queries: int,
    most_keys: int,
    dropout: float,
    *_: bool,
    scale: float | None,
) -> tuple[Tensor, None]:
    """Do what `aten._flash_attention_forward` does on a GPU, which also checks these limits."""
    assert query_ends.dtype == key_ends.dtype == torch.int32
    query_lengths, key_lengths = query_ends.diff().tolist(), key_ends.diff().tolist()
    assert (most_queries, most_keys) == (max(query_lengths), max(key_lengths))
    return attention_by_length(query, key, value, query_lengths, key_lengths, dropout, scale), None


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_flash_attention_is_given_queries_and_keys_of_their_own_lengths(
    pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch()
    model = tiny_model("bert", objective="tr+rtl", pooling=pooling)
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


@pytest.mark.parametrize("length", [5, 6])
def test_the_window_begins_at_the_first_row_that_is_longer(length: int) -> None:
    encoder = build_encoder(tiny_config("modernbert")).eval()
    use_packing(encoder)
    ids = torch.randint(5, 250, (2, length))
    mask = torch.ones_like(ids)
    found = last_states(encoder, mask, input_ids=ids)
    torch.testing.assert_close(found, one_by_one(encoder, ids, mask))


def test_the_last_layer_of_some_tokens_has_dropout_in_training() -> None:
    encoder = build_encoder(tiny_config("bert"))
    use_packing(encoder)
    encoder.encoder.layer[-1].attention.self.dropout.p = 0.5
    ids = torch.randint(5, 250, (2, 6))
    mask = torch.ones_like(ids)
    for is_training in (False, True):
        encoder.train(is_training)
        once, again = (
            last_states(encoder, mask, first_tokens(mask), input_ids=ids) for _ in range(2)
        )
        assert torch.equal(once, again) != is_training


def test_padded_rows_are_computed_as_by_sdpa() -> None:
    encoder = build_encoder(tiny_config("modernbert")).eval()
    batch = make_batch(longest=20)
    given = {
        "input_ids": batch["source_input_ids"],
        "attention_mask": batch["source_attention_mask"],
    }
    expected = encoder(**given).last_hidden_state
    use_packing(encoder)
    assert encoder.config._attn_implementation == PACKED
    assert torch.equal(encoder(**given).last_hidden_state, expected)


def test_padded_rows_are_compiled_whole() -> None:
    encoder = build_encoder(tiny_config("bert")).eval()
    ids, mask = torch.randint(5, 250, (2, 6)), torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    expected = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    use_packing(encoder)
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    torch.testing.assert_close(
        compiled(input_ids=ids, attention_mask=mask).last_hidden_state, expected
    )


def test_flash_attention_is_told_by_its_own_arguments() -> None:
    encoder = build_encoder(tiny_config("bert"))
    encoder.config._attn_implementation = "flash_attention_2"
    arguments = attention_arguments(encoder, *pack(torch.tensor([[1, 1, 1], [1, 0, 0]])))
    assert set(arguments) == {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
    assert arguments["cu_seq_lens_k"].tolist() == [0, 1, 4]
    assert arguments["cu_seq_lens_k"].dtype == torch.int32
    assert arguments["max_length_q"] == 3


def test_an_encoder_that_drops_the_arguments_is_not_given_wrong_attention() -> None:
    encoder = build_encoder(tiny_config("bert"))
    use_packing(encoder)
    mask = attention_arguments(encoder, *pack(torch.ones(2, 3, dtype=torch.long)))["attention_mask"]
    states = torch.randn(1, 4, 6, 8)
    with pytest.raises(RuntimeError, match="attn_mask"):
        packed_attention(encoder, states, states, states, mask)
    packed_attention(encoder, states, states, states, None)  # nothing else is wrong


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "roberta"])
@pytest.mark.parametrize("layers", [1, 3])
def test_the_last_layer_is_right_for_the_queries(model_type: str, layers: int) -> None:
    model, batch, found = tiny_model(model_type, rtl_layers=layers), make_batch(), {}
    for implementation in (PACKED, "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        loss = model(**batch).rtl_loss
        loss.backward()
        found[implementation] = torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        )
    packed, padded = found.values()
    assert (packed - padded).norm() < 1e-5 * padded.norm()


def test_mean_in_half_precision_does_not_overflow() -> None:
    states = torch.full((1, 512, 2), 300.0, dtype=torch.float16)
    assert POOLINGS["mean"].pool(states, torch.ones(1, 512)).tolist() == [[300.0, 300.0]]
