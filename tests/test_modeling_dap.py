"""The model against the paper's equations, what must not matter to it, and every way of running it."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from datasets import Dataset
from tiny_models import (
    ALL,
    COMBINATIONS,
    ENCODERS,
    MASK,
    PAD,
    gradients,
    make_batch,
    tiny_model,
    tokens_of,
    widen,
    with_negatives,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, Trainer, TrainingArguments

import encoder_dap
import losses_dap
from encoder_dap import position_offset
from modeling_dap import DAPConfig, DAPForPreTraining, DAPForSequenceClassification, DAPModel
from objectives_dap import OBJECTIVES


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny batches, too, run in several groups of like length."""
    monkeypatch.setattr(encoder_dap, "TOKENS_PER_GROUP", 8)


# ----------------------------------------------------------------------------------------- losses against plain loops


def token_loss(model: DAPForPreTraining, state: Tensor, label: int | Tensor) -> Tensor:
    """Cross entropy of one label among all ids, given its state (D,)."""
    head = model.prediction_head
    logits = head.norm(head.activation(head.dense(state))) @ model.get_input_embeddings().weight.T + head.bias
    return logits.exp().sum().log() - logits[label]


def reconstruct_one_by_one(model: DAPForPreTraining, batch: dict[str, Tensor]) -> tuple[list[Tensor], list[int]]:
    """RTL cross entropies of every target token, pair by pair without any padding (eq. g^0 and L_RTL)."""
    encoder, head = model.dap.encoder, model.rtl_head
    offset = position_offset(encoder)
    losses, labels = [], []
    for row in range(len(batch["source_input_ids"])):
        source, target = tokens_of(batch, "source", row), tokens_of(batch, "target", row)
        states = encoder(source[None]).last_hidden_state[:, 1:]  # without CLS
        positions = {} if offset is None else {"position_ids": torch.arange(len(target))[None] + offset}
        masks = encoder.embeddings(input_ids=torch.full_like(target, MASK)[None], **positions)[:, 1:]
        representations = encoder(target[None]).last_hidden_state[:, 1:]
        for i in range(len(target) - 1):
            if batch["target_noise"][row, i + 1] >= model.config.rtl_ratio:
                masks[:, i] = representations[:, i]
        out = head.blocks(inputs_embeds=torch.cat([states, masks], 1)).last_hidden_state[0, states.shape[1] :]
        for i, label in enumerate(target[1:].tolist()):
            if batch["target_noise"][row, i + 1] < model.config.rtl_ratio:
                losses.append(token_loss(model, out[i], label))
                labels.append(label)
    return losses, labels


@pytest.mark.parametrize(
    ("size", "untied", "objective"), [(None, False, "tr+rtl"), (60, False, "rtl+tlm"), (60, True, "tr+rtl")]
)
def test_sampled_negatives_are_for_training_and_exact_when_they_are_all(
    size: int | None, untied: bool, objective: str
) -> None:
    model, batch = tiny_model("bert", objective=objective, target_vocab_size=size, rtl_tied=not untied), make_batch()
    if size:
        model.set_target_vocabulary([2, *range(150, 149 + size)])
    model(**batch).loss.backward()
    expected, full = gradients(model), model(**batch).rtl_loss
    model.config.rtl_sampled_negatives = size or model.config.vocab_size
    model.zero_grad()
    model(**batch).loss.backward()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-4, atol=1e-5)
    model.config.rtl_sampled_negatives = 10
    assert model(**batch).rtl_loss.item() != pytest.approx(full.item(), rel=1e-4)
    torch.testing.assert_close(model.eval()(**batch).rtl_loss, full)


@pytest.mark.parametrize(("model_type", "ratio"), [*zip(ENCODERS, itertools.repeat(0.5)), ("bert", 1.0)])
def test_rtl_is_the_mean_over_real_target_tokens_of_unpadded_pairs(model_type: str, ratio: float) -> None:
    model = tiny_model(model_type, rtl_ratio=ratio).double()
    batch = make_batch()
    losses, _ = reconstruct_one_by_one(model, batch)
    assert model(**batch).rtl_loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)


def test_target_vocabulary_is_the_softmax_over_its_ids_and_ignores_others() -> None:
    model, full = tiny_model("bert", target_vocab_size=140), tiny_model("bert")
    batch = make_batch()
    ids = sorted({2, *range(60, 199)})
    model.set_target_vocabulary(ids)
    own = ("prediction_head.token_ids", "prediction_head.bias")
    full.load_state_dict({k: v for k, v in model.state_dict().items() if k not in own}, strict=False)
    with torch.no_grad():
        full.prediction_head.bias.fill_(float("-inf"))
        full.prediction_head.bias[ids] = model.prediction_head.bias
    losses, labels = reconstruct_one_by_one(full, batch)
    kept = [loss for loss, label in zip(losses, labels) if label in ids]
    out = model(**batch)
    assert 0 < len(kept) < len(losses)
    assert out.rtl_loss.item() == pytest.approx(torch.stack(kept).mean().item(), rel=1e-5)
    assert out.ignored_tokens.item() == len(losses) - len(kept)


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "roberta", "distilbert"])
def test_the_released_head_embeds_again_and_has_a_matrix_of_its_own(model_type: str) -> None:
    """Pair by pair as in the released code: the first tokens stand in the sequence, which nothing attends to."""
    model, batch = tiny_model(model_type, **RELEASED).double(), make_batch()
    decoder, prediction, losses = model.rtl_head.blocks, model.prediction_head, []
    offset = position_offset(decoder)
    for row in range(6):
        source, target = tokens_of(batch, "source", row), tokens_of(batch, "target", row)
        states = model.dap.encoder(source[None]).last_hidden_state  # (1, S_x, D)
        masks = model.get_input_embeddings()(torch.full_like(target, MASK))[None]  # (1, S_y, E)
        positions = torch.arange(len(source) + len(target))[None] + offset
        masks = decoder.embeddings(input_ids=None, inputs_embeds=masks, position_ids=positions[:, : len(target)])
        seen = torch.ones_like(positions)
        seen[0, [0, len(source)]] = 0
        joined = torch.cat([states, masks], 1)
        out = decoder(inputs_embeds=joined, attention_mask=seen, position_ids=positions).last_hidden_state[0]
        hidden = prediction.norm(prediction.activation(prediction.dense(out[len(source) + 1 :])))
        logits = hidden @ prediction.decoder.weight.T + prediction.bias
        losses.append(F.cross_entropy(logits, target[1:], reduction="none"))
    assert model(**batch).rtl_loss.item() == pytest.approx(torch.cat(losses).mean().item(), rel=1e-9)


@pytest.mark.parametrize("ids", [None, [2, *range(150, 250)]])
def test_a_matrix_of_its_own_starts_as_the_word_embeddings_and_learns_apart(ids: list[int] | None) -> None:
    options = {"objective": "rtl", "mask_token_id": MASK, "target_token_ids": ids}
    model, batch = DAPForPreTraining.from_scratch(tiny_config("bert"), rtl_tied=False, **options).eval(), make_batch()
    tied = DAPForPreTraining.from_scratch(tiny_config("bert"), **options).eval()
    tied.load_state_dict({key: value for key, value in model.state_dict().items() if "decoder" not in key})
    loss = model(**batch).rtl_loss
    torch.testing.assert_close(loss, tied(**batch).rtl_loss)
    table, matrix = model.get_input_embeddings().weight, model.prediction_head.decoder.weight
    assert torch.equal(matrix, table if ids is None else table[ids])
    loss.backward()
    read = torch.cat([batch["source_input_ids"].flatten(), torch.tensor([MASK])])
    unread = ~torch.isin(torch.arange(250), read)
    assert not table.grad[unread].any()  # no gradient of the softmax
    table.requires_grad_(False)
    assert matrix.requires_grad
    if ids is None:
        model.resize_token_embeddings(260)
        assert model.prediction_head.decoder.weight.shape == (260, 32)
        assert torch.isfinite(model(**batch).rtl_loss)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [*zip(ENCODERS, itertools.cycle([{}, {"projection": "mlp"}, {"tr_mask_duplicates": False}]))],
    ids=str,
)
def test_a_source_is_ranked_over_all_targets_and_all_changed_copies_of_them(model_type: str, options: dict) -> None:
    """Sentence by sentence; a copy that is the very target of a source is no negative of that source."""
    settings = {"tr_bidirectional": True, "tr_similarity": "dot", "tr_temperature": 3.0, **options}
    model, batch = tiny_model(model_type, objective="tr", tr_hard_negatives=0.7, **settings).double(), make_batch()
    for name in ("target_input_ids", "target_attention_mask"):
        batch[name][4] = batch[name][5]
    batch = with_negatives(batch)

    def read(side: str, row: int) -> Tensor:
        vector = model.dap(tokens_of(batch, side, row)[None]).pooler_output[0]
        return vector if model.projection is None else model.projection(vector)

    x, y = ([read(side, row) for row in range(6)] for side in ("source", "target"))
    copies = {row: read("negative", row) for row in (0, 1, 3, 4)}
    masks, negatives, forward, backward = model.config.tr_mask_duplicates, [], [], []
    for i in range(6):
        equal = {4: [5], 5: [4]}.get(i, []) if masks else []
        others = [y[j] for j in range(6) if j != i and j not in equal]
        others += [copies[j] for j in copies if not (masks and (i, j) == (0, 1))]
        scores = torch.stack([x[i] @ candidate for candidate in (y[i], *others)]) / 3
        forward.append(scores.exp().sum().log() - scores[0])
        reverse = torch.stack([y[i] @ x[j] for j in range(6) if j not in equal]) / 3
        backward.append(reverse.exp().sum().log() - y[i] @ x[i] / 3)
        negatives.append((len(others) + len(reverse) - 1) / 2)
    expected = (torch.stack(forward).mean() + torch.stack(backward).mean()) / 2
    out = model(**batch)
    assert out.tr_loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert out.negatives.item() == pytest.approx(sum(negatives) / 6)
    (found,) = torch.autograd.grad(out.loss, model.get_input_embeddings().weight)
    (gradient,) = torch.autograd.grad(expected, model.get_input_embeddings().weight)
    torch.testing.assert_close(found, gradient)


def masked_by_hand(ids: Tensor, noise: Tensor, special: set[int]) -> tuple[Tensor, list[int]]:
    """A text in which a share of 0.6 is chosen as masked language modelling shows it, and the places to predict."""
    masked, chosen = ids.clone(), [i for i in range(len(ids)) if i not in special and noise[i] < 0.6]
    for i in chosen:
        if noise[i] < 0.8 * 0.6:
            masked[i] = MASK
        elif noise[i] < 0.9 * 0.6:
            masked[i] = int((noise[i].item() * 2**20) % 1 * 250)
    return masked, chosen


def mask_one_by_one(batch: dict[str, Tensor], side: str, row: int) -> tuple[Tensor, Tensor, list[int]]:
    """One sentence as it is and as MLM shows it, and the places to predict."""
    ids = tokens_of(batch, side, row)
    return ids, *masked_by_hand(ids, batch[f"{side}_noise"][row], {0, len(ids) - 1})


def kinds_of(ids: Tensor, masked: Tensor, chosen: list[int]) -> set[str]:
    return {"masked" if masked[i] == MASK else "kept" if masked[i] == ids[i] else "random" for i in chosen}


@pytest.mark.parametrize("model_type", ENCODERS)
def test_tlm_is_the_mean_over_masked_tokens_of_unpadded_pairs(model_type: str) -> None:
    model = tiny_model(model_type, objective="tr+tlm", tlm_probability=0.6).double()
    batch, encoder, losses, kinds = make_batch(), model.dap.encoder, [], set()
    for row in range(6):
        x, y = tokens_of(batch, "source", row), tokens_of(batch, "target", row)
        ids = torch.cat([x, y[1:]])
        noise = torch.cat([batch["source_noise"][row, : len(x)], batch["target_noise"][row, 1 : len(y)]])
        masked, chosen = masked_by_hand(ids, noise, {0, len(x) - 1, len(ids) - 1})
        kinds |= kinds_of(ids, masked, chosen)
        positions = torch.cat([torch.arange(len(x)), torch.arange(1, len(y))])
        offset = position_offset(encoder)
        given = {} if offset is None else {"position_ids": positions[None] + offset}
        states = encoder(masked[None], **given).last_hidden_state[0]
        losses += [token_loss(model, states[i], ids[i]) for i in chosen]
    assert len(kinds) == 3
    assert model(**batch).tlm_loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)


@pytest.mark.parametrize("model_type", ENCODERS)
def test_mlm_is_the_mean_over_masked_tokens_of_unpadded_sentences(model_type: str) -> None:
    model = tiny_model(model_type, objective="mlm", mlm_probability=0.6, projection="mlp").double()
    batch, losses, kinds = make_batch(), [], set()
    for side, row in itertools.product(("source", "target"), range(6)):
        ids, masked, chosen = mask_one_by_one(batch, side, row)
        kinds |= kinds_of(ids, masked, chosen)
        states = model.dap.encoder(masked[None]).last_hidden_state[0]
        losses += [token_loss(model, states[i], ids[i]) for i in chosen]
    out = model(**batch)
    assert len(kinds) == 3
    assert out.mlm_loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)
    assert torch.equal(out.loss, out.mlm_loss)
    assert (out.tr_loss, out.accuracy, out.negatives) == (None, None, None)
    assert (out.source_embeds, out.target_embeds) == (None, None)  # nobody read the sentences as they are


@pytest.mark.parametrize(("model_type", "pooling"), [*zip(ENCODERS, itertools.cycle(["mean", "cls"]))])
def test_xum_predicts_masked_tokens_with_the_other_sentences_vector_in_the_place_of_cls(
    model_type: str, pooling: str
) -> None:
    model = tiny_model(model_type, objective="xum", xum_probability=0.6, pooling=pooling).double()
    batch, table, losses, vectors = make_batch(), model.get_input_embeddings().weight, [], []
    for side, row in itertools.product(("source", "target"), range(6)):
        ids, masked, chosen = mask_one_by_one(batch, side, row)
        other = tokens_of(batch, {"source": "target", "target": "source"}[side], row)
        vectors.append(model.dap(other[None]).pooler_output)
        words = torch.cat([vectors[-1], table[masked[1:]]])
        states = model.dap.encoder(inputs_embeds=words[None]).last_hidden_state[0]
        losses += [token_loss(model, states[i], ids[i]) for i in chosen]
    expected, out = torch.stack(losses).mean(), model(**batch)
    assert out.xum_loss.item() == pytest.approx(expected.item(), rel=1e-9)
    by_hand = torch.cat(torch.autograd.grad(expected, vectors))
    found = torch.autograd.grad(out.loss, (out.target_embeds, out.source_embeds))
    assert (by_hand.abs().sum(1) > 0).any()
    torch.testing.assert_close(torch.cat(found), by_hand)


@pytest.mark.parametrize("options", [{}, {"rtl_tied": False}, {"objective": "rtl+bow", "rtl_sampled_negatives": 9}])
def test_bow_tells_the_targets_words_from_either_sentence_vector(options: dict[str, Any]) -> None:
    options = {"objective": "bow", "target_vocab_size": 150, "pooling": "mean", **options}
    model, batch = tiny_model(**options).double(), make_batch()
    vocabulary = [2, *range(60, 209)]
    model.set_target_vocabulary(vocabulary)
    head, losses = model.prediction_head, []
    weight = model.get_input_embeddings().weight[vocabulary] if head.decoder is None else head.decoder.weight
    before = head if model.bow_transform is None else model.bow_transform
    assert (before is head) == ("rtl" not in options["objective"])
    for side in ("source", "target"):
        losses.append([])
        for row in range(6):
            vector = model.dap(tokens_of(batch, side, row)[None]).pooler_output[0]
            state = before.norm(before.activation(before.dense(vector / vector.norm() * 32**0.5)))
            surprise = -(weight @ state + head.bias).log_softmax(0)
            words = [word for word in tokens_of(batch, "target", row)[1:-1].tolist() if word in vocabulary]
            losses[-1] += [surprise[vocabulary.index(word)] for word in words]
    expected = (torch.stack(losses[0]).mean() + torch.stack(losses[1]).mean()) / 2
    assert model(**batch).bow_loss.item() == pytest.approx(expected.item(), rel=1e-9)


def test_xum_needs_word_embeddings_as_wide_as_the_vectors() -> None:
    config = tiny_config("deberta-v2")
    config.embedding_size = 16
    with pytest.raises(ValueError, match=r"sentence vector \(32 dimensions\).*embedding \(16\).*leave 'xum' out"):
        DAPForPreTraining.from_scratch(config, objective="tr+xum", mask_token_id=MASK)


def test_mlm_masks_anew_in_each_step_and_never_special_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(objective="mlm", mlm_probability=0.5)
    batch = {name: value for name, value in make_batch().items() if "noise" not in name}
    ids = torch.cat([batch["source_input_ids"], batch["target_input_ids"]])  # (12, 9)
    look_up, shown = model._look_up, []
    monkeypatch.setattr(model, "_look_up", lambda texts, *rest: shown.extend(texts) or look_up(texts, *rest))
    for _ in range(20):
        model(**batch)
    assert len({tuple(step.flatten().tolist()) for step in shown}) == 20
    special = (ids == 0) | (ids == 2) | (ids == PAD)
    assert all(torch.equal(step[special], ids[special]) for step in shown)
    share = sum((step == MASK).sum().item() for step in shown) / (20 * (~special).sum().item())
    assert 0.35 < share < 0.45  # 80% of a half


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_from_scratch_starts_every_objective_with_its_weights(model_type: str, tmp_path: Path) -> None:
    options = {"objective": "mlm", "pooling": "mean", "mask_token_id": MASK}
    made = DAPForPreTraining.from_scratch(tiny_config(model_type), **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(tmp_path)
    batch = make_batch()
    for objective in ("tr", "tr+tlm", "tr+rtl") if model_type == "bert" else ("tr+rtl",):
        model = DAPForPreTraining.from_encoder(str(tmp_path), objective=objective)
        assert (model.config.objective, model.config.pooling) == (objective, "mean")
        shared = {name: value for name, value in made.state_dict().items() if name in model.state_dict()}
        assert len(shared) == len(made.dap.state_dict()) + len(made.prediction_head.state_dict()) * (objective != "tr")
        assert all(torch.equal(model.state_dict()[name], value) for name, value in shared.items())
        assert torch.isfinite(model(**batch).loss)
    assert DAPForPreTraining.from_encoder(str(tmp_path), pooling="cls").config.pooling == "cls"


# ----------------------------------------------------------------------------------------- what must not matter


RELEASED = {"rtl_tied": False, "rtl_reembed": True}


OPTIONS = [
    *({"objective": name} for name in COMBINATIONS),
    *(RELEASED, RELEASED | {"rtl_ratio": 0.5}),
    *({"objective": "tr+tlm", "tr_hard_negatives": 0.7, "pooling": pooling} for pooling in ("cls", "mean")),
]


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *(("bert", options) for options in OPTIONS),
        *itertools.product(ENCODERS[1:], ({"objective": ALL}, RELEASED | {"rtl_ratio": 0.5})),
    ],
    ids=str,
)
def test_padding_and_order_change_nothing(model_type: str, options: dict) -> None:
    model = tiny_model(model_type, tlm_probability=0.5, mlm_probability=0.5, **options)
    batch = with_negatives(make_batch()) if "tr_hard_negatives" in options else make_batch()
    out = model(**batch)
    out.loss.backward()
    expected_loss, expected = out.loss.item(), gradients(model)
    order = torch.randperm(6)
    for changed in (widen(batch, 5), {key: value[order] for key, value in batch.items()}):
        model.zero_grad()
        out = model(**changed)
        out.loss.backward()
        assert out.loss.item() == pytest.approx(expected_loss, rel=1e-5)
        assert (gradients(model) - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("options", "whole_sides"),
    [
        ({"objective": "tr"}, []),
        ({"objective": "tr", "pooling": "mean"}, ["source", "target"]),
        ({"objective": "tr+rtl"}, ["source"]),
        ({"rtl_direction": "target-to-source", "rtl_languages": ["de"]}, ["target"]),
        ({"rtl_direction": "both", "rtl_languages": ["de"]}, ["source", "target"]),
        ({"rtl_ratio": 0.5}, ["source", "target"]),
    ],
    ids=str,
)
def test_the_last_layer_computes_the_tokens_that_are_read(options: dict, whole_sides: list[str]) -> None:
    model, batch, found = tiny_model(**options), make_batch(), []
    last = encoder_dap.layer_stack(model.dap.encoder)[1][-1].intermediate
    last.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].shape[1]))
    model(**batch, language_ids=torch.zeros(6, dtype=torch.long))
    lengths = {side: batch[f"{side}_attention_mask"].sum().item() for side in ("source", "target")}
    assert found == [sum(count if side in whole_sides else 6 for side, count in lengths.items())]


@pytest.mark.parametrize("model_type", ENCODERS)
def test_groups_of_like_length_equal_packed_rows(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, found = tiny_model(model_type, objective=ALL), make_batch(), []
    model(**batch).loss.backward()  # packed, where the encoder's attention takes it
    found.append(gradients(model))
    model.set_attn_implementation("eager")
    assert {part.config._attn_implementation for part in (model.dap.encoder, model.rtl_head.blocks)} == {"eager"}
    for tokens in (1, 8, 10**9):
        monkeypatch.setattr(encoder_dap, "TOKENS_PER_GROUP", tokens)
        model.zero_grad()
        model(**batch).loss.backward()
        found.append(gradients(model))
    for gradient in found[:-1]:
        assert (gradient - found[-1]).norm() < 1e-4 * gradient.norm()


@pytest.mark.parametrize("direction", ["target-to-source", "both"])
def test_directions_swap_sides_and_read_languages(direction: str) -> None:
    languages = ["de", "fr", "sw"]
    model = tiny_model("bert", rtl_direction=direction, rtl_languages=languages).double()
    batch, ids = make_batch(), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = model(**batch, language_ids=ids).rtl_loss
    embeddings, losses = model.rtl_head.language_embeddings.weight, {False: [], True: []}
    for row in range(6):
        reverse = direction == "target-to-source" or row % 2 == 1
        sides = ("target", "source") if reverse else ("source", "target")
        x, y = (tokens_of(batch, side, row) for side in sides)
        own, english = embeddings[ids[row] + 1], embeddings[0]
        states = model.dap.encoder(x[None]).last_hidden_state[:, 1:] + (english if reverse else own)
        masks = model.dap.encoder.embeddings(torch.full_like(y, MASK)[None])[:, 1:] + (own if reverse else english)
        out = model.rtl_head.blocks(inputs_embeds=torch.cat([states, masks], 1)).last_hidden_state
        predicted = out[0, states.shape[1] :]
        losses[reverse] += [token_loss(model, state, label) for state, label in zip(predicted, y[1:])]
    means = [torch.stack(part).mean().item() for part in losses.values() if part]
    assert len(means) == (2 if direction == "both" else 1)
    assert loss.item() == pytest.approx(sum(means) / len(means), rel=1e-9)
    with pytest.raises(ValueError, match="language_ids=None.*" + direction):
        model(**batch)


def test_projection_is_for_the_loss_only() -> None:
    plain, projected = (tiny_model("bert", objective="tr", projection=kind) for kind in (None, "mlp"))
    projected.dap.load_state_dict(plain.dap.state_dict())
    batch = make_batch()
    torch.testing.assert_close(projected(**batch).source_embeds, plain(**batch).source_embeds)
    assert projected(**batch).loss.item() != pytest.approx(plain(**batch).loss.item())


# ----------------------------------------------------------------------------------------- ways of running it


@pytest.mark.parametrize("objective", ["tr", ALL])
def test_activation_checkpointing_keeps_gradients(objective: str) -> None:
    model, batch = tiny_model("xlm-roberta", objective=objective), make_batch()
    model(**batch).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model(**batch).loss.backward()
    torch.testing.assert_close(gradients(model), expected)


@pytest.mark.parametrize("objective", COMBINATIONS)
def test_bf16_autocast_hands_the_losses_float32(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, seen = tiny_model("bert", objective=objective), make_batch(), []
    cross_entropy, chunked = F.cross_entropy, losses_dap._VocabularyCrossEntropy.apply

    def spy(logits: Tensor, labels: Tensor, **how: str) -> Tensor:
        seen.append(logits.dtype)
        return cross_entropy(logits, labels, **how)

    def spy_vocabulary(*values: Tensor) -> Tensor:
        seen.extend(value.dtype for value in values[:3])
        return chunked(*values)

    monkeypatch.setattr(losses_dap.F, "cross_entropy", spy)
    monkeypatch.setattr(losses_dap._VocabularyCrossEntropy, "apply", spy_vocabulary)
    expected = model(**batch).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**batch)
        hidden = model.dap(batch["source_input_ids"], batch["source_attention_mask"])
        product = hidden.last_hidden_state @ hidden.last_hidden_state.mT
    assert product.dtype == torch.bfloat16  # autocast was on
    assert set(seen) == {torch.float32}
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected, rel=0.1)
    out.loss.backward()
    assert torch.isfinite(gradients(model)).all()


@pytest.mark.parametrize("objective", COMBINATIONS)
def test_every_parameter_gets_a_gradient(objective: str) -> None:
    for model_type in ENCODERS if objective in OBJECTIVES else ("bert",):  # several have the parameters of each
        model = tiny_model(model_type, objective=objective)
        model(**make_batch()).loss.backward()
        assert [name for name, value in model.named_parameters() if value.grad is None] == []


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_sentence_vectors_do_not_depend_on_the_side_of_the_padding(pooling: str) -> None:
    model = DAPModel(DAPConfig(tiny_config("deberta-v2"), pooling=pooling, objective="tr")).eval()
    ids, mask = torch.tensor([[0, 7, 8, 2, PAD, PAD]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
    left = model(ids.roll(2, 1), mask.roll(2, 1)).pooler_output
    torch.testing.assert_close(left, model(ids, mask).pooler_output, rtol=1e-4, atol=1e-5)


def test_training_batches_must_be_padded_on_the_right() -> None:
    model, batch = tiny_model("bert", objective="tr"), make_batch()
    batch["source_attention_mask"] = batch["source_attention_mask"].flip(1)
    with pytest.raises(ValueError, match="pad on the right"):
        model(**batch)


def test_labels_are_counted_exactly_in_half_precision() -> None:
    model, batch = tiny_model("bert").to(torch.bfloat16), make_batch(pairs=63)
    batch["target_attention_mask"][0, 3:] = 0
    labels = int(batch["target_attention_mask"][:, 1:].sum())
    assert labels != int(torch.tensor(labels).bfloat16())
    assert model(**batch).ignored_tokens.item() == 0


@pytest.mark.parametrize("objective", ["tr", ALL])
def test_vocabulary_can_be_resized(objective: str) -> None:
    model, batch = tiny_model("bert", objective=objective), make_batch()
    model.resize_token_embeddings(260)
    batch["target_input_ids"][0, 1] = 255
    assert model.config.vocab_size == model.config.encoder_config.vocab_size == 260
    assert torch.isfinite(model(**batch).loss)


def test_configured_outputs_are_given() -> None:
    config = DAPConfig(tiny_config("bert"), objective="tr", output_hidden_states=True, return_dict=False)
    outputs = DAPModel(config)(torch.tensor([[0, 7, 2]]))
    assert isinstance(outputs, tuple)
    assert len(outputs[2]) == 4  # embeddings and three layers


@pytest.mark.parametrize("model_type", ["bert", "deberta-v2"])  # packed, and in groups of like length
def test_what_the_encoder_does_on_its_way_is_given_with_the_same_losses(model_type: str) -> None:
    model, batch = tiny_model(model_type, objective="tr+rtl").eval(), make_batch()
    model.set_attn_implementation("eager")
    plain, seen = model(**batch), model(**batch, output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(seen.loss, plain.loss)
    longest = max(batch["source_input_ids"].shape[1], batch["target_input_ids"].shape[1])
    assert plain.hidden_states is None
    assert [tuple(states.shape) for states in seen.hidden_states] == [(12, longest, 32)] * 4
    assert [tuple(weights.shape) for weights in seen.attentions] == [(12, 4, longest, longest)] * 3
    assert model(**batch, return_dict=False)[0] == plain.loss


def test_a_classifier_gives_tuples_where_asked() -> None:
    config = DAPConfig(tiny_config("bert"), num_labels=3, objective="tr", return_dict=False)
    model = DAPForSequenceClassification(config).eval()
    inputs = {"input_ids": torch.tensor([[0, 7, 2]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    logits = model(**inputs, return_dict=True).logits
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        (same,) = model(**given)
        torch.testing.assert_close(same, logits)


def test_a_direction_without_labels_does_not_halve_the_loss() -> None:
    languages = {"rtl_languages": ["de"], "rtl_direction": "both"}
    both, forward = tiny_model("bert", **languages), tiny_model("bert")
    forward.load_state_dict(both.state_dict(), strict=False)
    with torch.no_grad():
        both.rtl_head.language_embeddings.weight.zero_()
    one = {key: value[:1] for key, value in make_batch().items()}
    loss = both(**one, language_ids=torch.tensor([0])).rtl_loss.item()
    assert loss == pytest.approx(forward(**one).rtl_loss.item(), rel=1e-5)


def test_models_refuse_what_was_set_after_the_config_was_checked() -> None:
    config = DAPConfig(BertConfig(num_hidden_layers=2), objective="tr")
    config.pooling = "max"
    with pytest.raises(ValueError, match="pooling='max'"):
        DAPForPreTraining(config)
    with pytest.raises(ValueError, match="mask_token_id=None"):
        DAPForPreTraining(DAPConfig(tiny_config("bert")))


@pytest.mark.parametrize(
    ("kind", "pooling"), [("bert", "cls"), ("xlm-roberta", "mean"), ("modernbert", "cls"), ("deberta-v2", "mean")]
)
def test_classification_computes_each_row_as_if_alone(kind: str, pooling: str) -> None:
    torch.manual_seed(0)
    model = DAPForSequenceClassification(DAPConfig(tiny_config(kind), num_labels=3, pooling=pooling, objective="tr"))
    model = model.double().eval()
    rows = [torch.randint(5, 60, (length,)) for length in (3, 9, 1, 6)]
    types = [(torch.arange(len(row)) > 2).long() for row in rows]
    inputs = [
        {"input_ids": row} | ({"token_type_ids": kinds} if kind == "bert" else {}) for row, kinds in zip(rows, types)
    ]
    alone = torch.cat([model(**{key: value[None] for key, value in each.items()}).logits for each in inputs])
    alone.logsumexp(1).sum().backward()
    expected = gradients(model)
    batch = {key: pad_sequence([each[key] for each in inputs], batch_first=True, padding_value=1) for key in inputs[0]}
    batch["attention_mask"] = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    model.zero_grad()
    logits = model(**batch).logits
    logits.logsumexp(1).sum().backward()
    torch.testing.assert_close(logits, alone)
    torch.testing.assert_close(gradients(model), expected)
    assert len(model(**batch, output_hidden_states=True).hidden_states) > 2


def test_trainer_keeps_token_types_for_classification(tmp_path: Path) -> None:
    model = DAPForSequenceClassification(DAPConfig(tiny_config("bert"), num_labels=3))
    args = TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    rows = [{"input_ids": [0, 5, 2], "token_type_ids": [0, 0, 1], "labels": 1, "premise": "text"}]
    loader = Trainer(model=model, args=args, train_dataset=Dataset.from_list(rows)).get_train_dataloader()
    batch = next(iter(loader))
    assert set(batch) == {"input_ids", "token_type_ids", "labels"}
    assert not torch.equal(model.eval()(**batch).logits, model(input_ids=batch["input_ids"]).logits)


def test_accumulation_of_the_stock_trainer_keeps_the_classifiers_loss(tmp_path: Path) -> None:
    rows = [{"input_ids": [3, 9, 8 + i, 4], "attention_mask": [1] * 4, "labels": i % 3} for i in range(6)]
    losses = []
    for steps in (1, 3):
        torch.manual_seed(0)
        model = DAPForSequenceClassification(DAPConfig(tiny_config("bert"), num_labels=3, objective="tr"))
        batch = {"per_device_train_batch_size": 6 // steps, "gradient_accumulation_steps": steps, "max_steps": 1}
        quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        args = TrainingArguments(str(tmp_path), **batch, **quiet, logging_steps=1)
        losses.append(Trainer(model, args, train_dataset=Dataset.from_list(rows)).train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
