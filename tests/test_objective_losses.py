"""Compare each objective with loops over the paper's equations, pair by pair without padding."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from tiny_models import (
    ENCODERS,
    MASK,
    PAD,
    RELEASED,
    make_batch,
    tiny_model,
    tokens_of,
    with_negatives,
)
from torch import Tensor

from modeling_dap import DAPConfig, DAPForPreTraining
from states_dap import position_offset

pytestmark = pytest.mark.usefixtures("small_groups")


def token_loss(model: DAPForPreTraining, state: Tensor, label: int | Tensor) -> Tensor:
    """Cross entropy of one label among all ids, given its state (D,)."""
    head = model.prediction_head
    state = head.norm(head.activation(head.dense(state)))
    logits = state @ model.get_input_embeddings().weight.T + head.bias
    return logits.exp().sum().log() - logits[label]


def reconstruct(
    model: DAPForPreTraining,
    batch: dict[str, Tensor],
    row: int,
    sides: Sequence[str] = ("source", "target"),
    added: Sequence[Tensor | float] = (0.0, 0.0),
) -> list[tuple[int, Tensor]]:
    """Return label and loss of each token of a pair's answer (eq. g^0 and L_RTL).

    Args:
        sides: the context and the answer.
        added: embeddings of their languages.
    """
    encoder = model.dap.encoder
    context, answer = (tokens_of(batch, side, row) for side in sides)
    states = encoder(context[None]).last_hidden_state[:, 1:]  # without CLS
    masks = encoder.embeddings(torch.full_like(answer, MASK)[None])[:, 1:]
    visible = encoder(answer[None]).last_hidden_state[:, 1:]
    noise = batch[f"{sides[1]}_noise"][row, 1 : len(answer)]
    chosen = noise < model.config.rtl_ratio
    queries = torch.where(chosen[:, None], masks, visible)
    joined = torch.cat([states + added[0], queries + added[1]], 1)
    out = model.rtl_head.blocks(inputs_embeds=joined).last_hidden_state[0, states.shape[1] :]
    labels = answer[1:][chosen].tolist()
    return [(label, token_loss(model, state, label)) for state, label in zip(out[chosen], labels)]


def mean(losses: list[Tensor]) -> float:
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize(
    ("model_type", "ratio"), [*zip(ENCODERS, itertools.repeat(0.5)), ("bert", 1.0)]
)
def test_rtl_is_the_mean_over_real_target_tokens_of_unpadded_pairs(
    model_type: str, ratio: float
) -> None:
    model, batch, losses = tiny_model(model_type, rtl_ratio=ratio).double(), make_batch(), []
    for row in range(6):
        losses += [loss for _, loss in reconstruct(model, batch, row)]
    assert model(**batch).rtl_loss.item() == pytest.approx(mean(losses), rel=1e-9)


@pytest.mark.parametrize("direction", ["target-to-source", "both"])
def test_directions_swap_sides_and_read_languages(direction: str) -> None:
    languages = ["de", "fr", "sw"]
    model = tiny_model(rtl_direction=direction, rtl_languages=languages).double()
    batch, ids = make_batch(), torch.tensor([0, 1, 2, 0, 1, 2])
    embeddings, losses = model.rtl_head.language_embeddings.weight, {False: [], True: []}
    for row in range(6):
        sides, added = ("source", "target"), (embeddings[ids[row] + 1], embeddings[0])
        reverse = direction == "target-to-source" or row % 2 == 1
        if reverse:
            sides, added = sides[::-1], added[::-1]
        losses[reverse] += [loss for _, loss in reconstruct(model, batch, row, sides, added)]
    means = [mean(part) for part in losses.values() if part]
    assert len(means) == (2 if direction == "both" else 1)
    found = model(**batch, language_ids=ids).rtl_loss.item()
    assert found == pytest.approx(sum(means) / len(means), rel=1e-9)


@pytest.mark.parametrize("objective", ["tr+rtl", "tr+rtl+tlm"])
def test_target_vocabulary_is_the_softmax_over_its_ids_and_ignores_others(objective: str) -> None:
    model, full = tiny_model(objective=objective, target_vocab_size=140), tiny_model()
    batch, ids = make_batch(), sorted({2, *range(60, 199)})
    model.set_target_vocabulary(ids)
    own = ("prediction_head.token_ids", "prediction_head.bias")
    shared = {key: value for key, value in model.state_dict().items() if key not in own}
    full.load_state_dict(shared, strict=False)
    with torch.no_grad():
        full.prediction_head.bias.fill_(float("-inf"))
        bias = model.prediction_head.bias  # TLM predicts all ids, so that it needs all biases
        full.prediction_head.bias[ids] = bias if objective == "tr+rtl" else bias[ids]
    pairs = [pair for row in range(6) for pair in reconstruct(full, batch, row)]
    kept = [loss for label, loss in pairs if label in ids]
    out = model(**batch)
    assert 0 < len(kept) < len(pairs)
    assert out.rtl_loss.item() == pytest.approx(mean(kept), rel=1e-5)
    assert out.ignored_tokens.item() == len(pairs) - len(kept)


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "roberta", "distilbert"])
def test_the_released_head_embeds_again_and_has_a_matrix_of_its_own(model_type: str) -> None:
    """Compare with the released code, where the first tokens are there but nothing sees them."""
    model, batch, losses = tiny_model(model_type, **RELEASED).double(), make_batch(), []
    decoder, prediction = model.rtl_head.blocks, model.prediction_head
    offset = position_offset(decoder)
    for row in range(6):
        source, target = tokens_of(batch, "source", row), tokens_of(batch, "target", row)
        states = model.dap.encoder(source[None]).last_hidden_state  # (1, S_x, D)
        masks = model.get_input_embeddings()(torch.full_like(target, MASK))[None]  # (1, S_y, E)
        positions = torch.arange(len(source) + len(target))[None] + offset
        masks = decoder.embeddings(
            input_ids=None, inputs_embeds=masks, position_ids=positions[:, : len(target)]
        )
        seen = torch.ones_like(positions)
        seen[0, [0, len(source)]] = 0
        joined = torch.cat([states, masks], 1)
        given = {"inputs_embeds": joined, "attention_mask": seen, "position_ids": positions}
        out = decoder(**given).last_hidden_state[0]
        hidden = prediction.norm(prediction.activation(prediction.dense(out[len(source) + 1 :])))
        logits = hidden @ prediction.decoder.weight.T + prediction.bias
        losses += F.cross_entropy(logits, target[1:], reduction="none")
    assert model(**batch).rtl_loss.item() == pytest.approx(mean(losses), rel=1e-9)


@pytest.mark.parametrize("ids", [None, [2, *range(150, 250)]])
def test_a_matrix_of_its_own_starts_as_the_word_embeddings_and_learns_apart(
    ids: list[int] | None,
) -> None:
    options = {"objective": "rtl", "mask_token_id": MASK, "target_token_ids": ids}
    model, tied = (
        DAPForPreTraining.from_scratch(tiny_config("bert"), rtl_tied=is_tied, **options).eval()
        for is_tied in (False, True)
    )
    batch, state = make_batch(), model.state_dict()
    tied.load_state_dict({name: state[name] for name in tied.state_dict()})
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


def rank(config: DAPConfig, own: Tensor, candidates: list[Tensor]) -> tuple[Tensor, int, bool]:
    """Cross entropy of the first candidate, number of the others, and whether it is the nearest."""
    scores = []
    for each in candidates:
        length = own.norm() * each.norm() if config.tr_similarity == "cosine" else 1
        scores.append(own @ each / length / config.tr_temperature)
    loss = torch.stack(scores).logsumexp(0) - scores[0]
    return loss, len(scores) - 1, bool(scores[0] == max(scores))


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *zip(ENCODERS, itertools.cycle([{}, {"projection": "mlp"}, {"tr_mask_duplicates": False}])),
        ("bert", {"tr_similarity": "cosine", "tr_temperature": 0.3}),
        ("bert", {"tr_same_side_negatives": True}),
        ("bert", {"tr_same_side_negatives": True, "tr_mask_duplicates": False}),
        ("bert", {"tr_matryoshka_dims": [8, 16]}),
    ],
    ids=str,
)
def test_a_source_is_ranked_over_all_targets_and_all_hard_negatives(
    model_type: str, options: dict
) -> None:
    """Compare TR with a loop over sentences.

    Pairs 4 and 5 have the same target, pairs 2 and 3 the same source. The hard negative of pair 1
    is the target of pair 0.
    """
    settings = {"tr_bidirectional": True, "tr_similarity": "dot", "tr_temperature": 3.0, **options}
    model = tiny_model(model_type, objective="tr", tr_hard_negatives=0.7, **settings).double()
    batch = make_batch()
    for side, row, other in (("target", 4, 5), ("source", 2, 3)):
        for name in (f"{side}_input_ids", f"{side}_attention_mask"):
            batch[name][row] = batch[name][other]
    batch = with_negatives(batch)

    def vector_of(side: str, row: int) -> Tensor:
        vector = model.dap(tokens_of(batch, side, row)[None]).pooler_output[0]
        return vector if model.projection is None else model.projection(vector)

    vectors = [[vector_of(side, row) for row in range(6)] for side in ("source", "target")]
    copies = {row: vector_of("negative", row) for row in (0, 1, 3, 4)}
    config = model.config
    duplicates = {4: [5], 5: [4], 2: [3], 3: [2]} if config.tr_mask_duplicates else {}
    ranked = []
    for size in (32, *(config.tr_matryoshka_dims or ())):
        x, y = ([vector[:size] for vector in side] for side in vectors)
        for i in range(6):
            others = [j for j in range(6) if j != i and j not in duplicates.get(i, [])]
            forward = [y[j] for j in (i, *others)]
            backward = [x[j] for j in (i, *others)]
            for j, copy in copies.items():
                is_own_target = (i, j) == (0, 1)
                if not (config.tr_mask_duplicates and is_own_target):
                    forward.append(copy[:size])
            if config.tr_same_side_negatives:
                forward += [x[j] for j in others]
                backward += [y[j] for j in others]
            ranked += [rank(config, x[i], forward), rank(config, y[i], backward)]
    losses, negatives, hits = zip(*ranked)
    expected = torch.stack(losses).mean()
    out = model(**batch)
    assert out.tr_loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert out.negatives.item() == pytest.approx(sum(negatives) / len(negatives))
    if config.tr_mask_duplicates:  # else there are ties
        assert out.accuracy.item() == pytest.approx(sum(hits[:12]) / 12)  # of whole vectors
    table = model.get_input_embeddings().weight
    (found,) = torch.autograd.grad(out.loss, table)
    (gradient,) = torch.autograd.grad(expected, table)
    torch.testing.assert_close(found, gradient)


def texts_of(objective: str, batch: dict[str, Tensor], row: int) -> list[tuple[Tensor, ...]]:
    """Ids, noise and columns of the texts that are masked of one pair: one of TLM, two of MLM."""
    texts = []
    for side in ("source", "target"):
        ids = tokens_of(batch, side, row)
        texts.append((ids, batch[f"{side}_noise"][row, : len(ids)], torch.arange(len(ids))))
    if objective == "mlm":
        return texts
    source, target = texts
    return [tuple(torch.cat([x, y[1:]]) for x, y in zip(source, target))]


@pytest.mark.parametrize(("objective", "model_type"), itertools.product(["tlm", "mlm"], ENCODERS))
def test_masked_modelling_is_the_mean_over_masked_tokens_of_unpadded_text(
    objective: str, model_type: str
) -> None:
    options = {"tlm_probability": 0.6, "mlm_probability": 0.6, "projection": "mlp"}
    model = tiny_model(model_type, objective=objective, **options).double()
    batch, encoder, losses, kinds = make_batch(), model.dap.encoder, [], set()
    for row in range(6):
        for ids, noise, columns in texts_of(objective, batch, row):
            is_special = (ids == 0) | (ids == 2)
            chosen = ((noise < 0.6) & ~is_special).nonzero()[:, 0].tolist()
            shown = ids.clone()
            for i in chosen:
                kind = "masked" if noise[i] < 0.8 * 0.6 else "kept"
                if 0.8 * 0.6 <= noise[i] < 0.9 * 0.6:
                    kind = "random"
                    shown[i] = int(noise[i].item() * 2**24) * 10368889 % 2**24 * 250 // 2**24
                elif kind == "masked":
                    shown[i] = MASK
                kinds.add(kind)
            offset = position_offset(encoder)
            given = {} if offset is None else {"position_ids": columns[None] + offset}
            states = encoder(shown[None], **given).last_hidden_state[0]
            losses += [token_loss(model, states[i], ids[i]) for i in chosen]
    assert len(kinds) == 3
    out = model(**batch)
    assert getattr(out, f"{objective}_loss").item() == pytest.approx(mean(losses), rel=1e-9)
    absent = (out.tr_loss, out.accuracy, out.negatives, out.source_embeds, out.target_embeds)
    assert absent == (None,) * 5  # nobody reads the sentences without masks


@pytest.mark.parametrize("options", [{}, {"rtl_tied": False}, {"objective": "rtl+bow"}])
def test_bow_tells_the_targets_words_from_either_sentence_vector(options: dict[str, Any]) -> None:
    options = {"objective": "bow", "target_vocab_size": 150, "pooling": "mean", **options}
    model, batch = tiny_model(**options).double(), make_batch()
    batch["target_input_ids"][1, 1:3] = 100  # a word that occurs twice counts twice
    vocabulary = [2, *range(60, 209)]
    model.set_target_vocabulary(vocabulary)
    head, losses = model.prediction_head, []
    weight = model.get_input_embeddings().weight[vocabulary]
    if head.decoder is not None:
        weight = head.decoder.weight
    before = head if model.bow_transform is None else model.bow_transform
    assert (before is head) == ("rtl" not in options["objective"])
    for side in ("source", "target"):
        losses.append([])
        for row in range(6):
            vector = model.dap(tokens_of(batch, side, row)[None]).pooler_output[0]
            state = before.norm(before.activation(before.dense(vector / vector.norm() * 32**0.5)))
            surprise = -(weight @ state + head.bias).log_softmax(0)
            words = tokens_of(batch, "target", row)[1:-1].tolist()
            known = [vocabulary.index(word) for word in words if word in vocabulary]
            losses[-1] += [surprise[place] for place in known]
    expected = (mean(losses[0]) + mean(losses[1])) / 2
    assert model(**batch).bow_loss.item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("size", [32, 24])
def test_distillation_is_the_mean_of_1_minus_cosine_over_both_sides(size: int) -> None:
    model = tiny_model(objective="distill", distill_size=size).eval()
    batch = make_batch()
    batch["teacher_embeds"] = torch.randn(6, size)
    expected = []
    for row in range(6):
        for side in ("source", "target"):
            vector = model.dap(tokens_of(batch, side, row)[None]).pooler_output[0]
            if size != 32:
                vector = model.teacher_projection(vector)
            teacher = batch["teacher_embeds"][row]
            cosine = vector.double() @ teacher.double() / (vector.norm() * teacher.norm())
            expected.append(1 - cosine.item())
    assert model(**batch).distill_loss.item() == pytest.approx(sum(expected) / 12, rel=1e-5)


def test_mlm_masks_anew_in_each_step_and_never_special_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model(objective="mlm", mlm_probability=0.5)
    batch = {name: value for name, value in make_batch().items() if "noise" not in name}
    ids = torch.cat([batch["source_input_ids"], batch["target_input_ids"]])  # (12, 9)
    encode_text, shown = model.encode_text, []
    monkeypatch.setattr(
        model, "encode_text", lambda ids, *rest: shown.append(ids) or encode_text(ids, *rest)
    )
    for _ in range(20):
        model(**batch)
    assert len({tuple(step.flatten().tolist()) for step in shown}) == 20
    special = (ids == 0) | (ids == 2) | (ids == PAD)
    assert all(torch.equal(step[special], ids[special]) for step in shown)
    share = sum((step == MASK).sum().item() for step in shown) / (20 * (~special).sum().item())
    assert 0.35 < share < 0.45  # 80% of a half


def test_a_direction_without_pairs_does_not_count() -> None:
    both = tiny_model(objective="rtl", rtl_direction="both", rtl_languages=["de"])
    torch.nn.init.zeros_(both.rtl_head.language_embeddings.weight)
    forward = tiny_model(objective="rtl")
    forward.load_state_dict(both.state_dict(), strict=False)
    batch = make_batch(1)  # of two pairs, the second one would go the other way
    found = both(**batch, language_ids=torch.tensor([0])).loss
    torch.testing.assert_close(found, forward(**batch).loss)
