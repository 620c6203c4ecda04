"""Compare each objective with loops over the paper's equations, pair by pair without padding."""

import itertools
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

from modeling_dap import DAPForPreTraining
from objectives_dap import Pairs, Sentences, TranslationRanking
from states_dap import position_offset

pytestmark = pytest.mark.usefixtures("small_groups")


def token_loss(model: DAPForPreTraining, state: Tensor, label: int | Tensor) -> Tensor:
    """Cross entropy of one label among all ids, given its state (D,)."""
    head = model.prediction_head
    logits = (
        head.norm(head.activation(head.dense(state))) @ model.get_input_embeddings().weight.T
        + head.bias
    )
    return logits.exp().sum().log() - logits[label]


def reconstruct_one_by_one(
    model: DAPForPreTraining, batch: dict[str, Tensor]
) -> tuple[list[Tensor], list[int]]:
    """Return RTL cross entropies of all target tokens, pair by pair (eq. g^0 and L_RTL)."""
    encoder, head = model.dap.encoder, model.rtl_head
    offset = position_offset(encoder)
    losses, labels = [], []
    for row in range(len(batch["source_input_ids"])):
        source, target = tokens_of(batch, "source", row), tokens_of(batch, "target", row)
        states = encoder(source[None]).last_hidden_state[:, 1:]  # without CLS
        positions = (
            {} if offset is None else {"position_ids": torch.arange(len(target))[None] + offset}
        )
        masks = encoder.embeddings(input_ids=torch.full_like(target, MASK)[None], **positions)[
            :, 1:
        ]
        representations = encoder(target[None]).last_hidden_state[:, 1:]
        for i in range(len(target) - 1):
            if batch["target_noise"][row, i + 1] >= model.config.rtl_ratio:
                masks[:, i] = representations[:, i]
        out = head.blocks(inputs_embeds=torch.cat([states, masks], 1)).last_hidden_state[
            0, states.shape[1] :
        ]
        for i, label in enumerate(target[1:].tolist()):
            if batch["target_noise"][row, i + 1] < model.config.rtl_ratio:
                losses.append(token_loss(model, out[i], label))
                labels.append(label)
    return losses, labels


@pytest.mark.parametrize(
    ("model_type", "ratio"), [*zip(ENCODERS, itertools.repeat(0.5)), ("bert", 1.0)]
)
def test_rtl_is_the_mean_over_real_target_tokens_of_unpadded_pairs(
    model_type: str, ratio: float
) -> None:
    model = tiny_model(model_type, rtl_ratio=ratio).double()
    batch = make_batch()
    losses, _ = reconstruct_one_by_one(model, batch)
    assert model(**batch).rtl_loss.item() == pytest.approx(
        torch.stack(losses).mean().item(), rel=1e-9
    )


@pytest.mark.parametrize("objective", ["tr+rtl", "tr+rtl+tlm"])
def test_target_vocabulary_is_the_softmax_over_its_ids_and_ignores_others(objective: str) -> None:
    model = tiny_model("bert", objective=objective, target_vocab_size=140)
    full = tiny_model("bert")
    batch = make_batch()
    ids = sorted({2, *range(60, 199)})
    model.set_target_vocabulary(ids)
    own = ("prediction_head.token_ids", "prediction_head.bias")
    full.load_state_dict(
        {k: v for k, v in model.state_dict().items() if k not in own}, strict=False
    )
    with torch.no_grad():
        full.prediction_head.bias.fill_(float("-inf"))
        bias = model.prediction_head.bias  # TLM predicts all ids, so that it needs all biases
        full.prediction_head.bias[ids] = bias if objective == "tr+rtl" else bias[ids]
    losses, labels = reconstruct_one_by_one(full, batch)
    kept = [loss for loss, label in zip(losses, labels) if label in ids]
    out = model(**batch)
    assert 0 < len(kept) < len(losses)
    assert out.rtl_loss.item() == pytest.approx(torch.stack(kept).mean().item(), rel=1e-5)
    assert out.ignored_tokens.item() == len(losses) - len(kept)


@pytest.mark.parametrize("model_type", ["bert", "xlm-roberta", "roberta", "distilbert"])
def test_the_released_head_embeds_again_and_has_a_matrix_of_its_own(model_type: str) -> None:
    """Compare with the released code, where the first tokens are there but nothing sees them."""
    model, batch = tiny_model(model_type, **RELEASED).double(), make_batch()
    decoder, prediction, losses = model.rtl_head.blocks, model.prediction_head, []
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
        out = decoder(
            inputs_embeds=joined, attention_mask=seen, position_ids=positions
        ).last_hidden_state[0]
        hidden = prediction.norm(prediction.activation(prediction.dense(out[len(source) + 1 :])))
        logits = hidden @ prediction.decoder.weight.T + prediction.bias
        losses.append(F.cross_entropy(logits, target[1:], reduction="none"))
    assert model(**batch).rtl_loss.item() == pytest.approx(
        torch.cat(losses).mean().item(), rel=1e-9
    )


@pytest.mark.parametrize("ids", [None, [2, *range(150, 250)]])
def test_a_matrix_of_its_own_starts_as_the_word_embeddings_and_learns_apart(
    ids: list[int] | None,
) -> None:
    options = {"objective": "rtl", "mask_token_id": MASK, "target_token_ids": ids}
    model, batch = (
        DAPForPreTraining.from_scratch(tiny_config("bert"), rtl_tied=False, **options).eval(),
        make_batch(),
    )
    tied = DAPForPreTraining.from_scratch(tiny_config("bert"), **options).eval()
    tied.load_state_dict(
        {key: value for key, value in model.state_dict().items() if "decoder" not in key}
    )
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
    [
        *zip(ENCODERS, itertools.cycle([{}, {"projection": "mlp"}, {"tr_mask_duplicates": False}])),
        ("bert", {"tr_similarity": "cosine", "tr_temperature": 0.3}),
        ("bert", {"tr_same_side_negatives": True}),
        ("bert", {"tr_same_side_negatives": True, "tr_mask_duplicates": False}),
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
        if model.projection is not None:
            vector = model.projection(vector)
        return vector / vector.norm() if model.config.tr_similarity == "cosine" else vector

    x = [vector_of("source", row) for row in range(6)]
    y = [vector_of("target", row) for row in range(6)]
    copies = {row: vector_of("negative", row) for row in (0, 1, 3, 4)}
    masks_duplicates = model.config.tr_mask_duplicates
    temperature = model.config.tr_temperature
    duplicates = {4: [5], 5: [4], 2: [3], 3: [2]} if masks_duplicates else {}

    negatives, forward, backward = [], [], []
    for i in range(6):
        others = [j for j in range(6) if j != i and j not in duplicates.get(i, [])]
        candidates = [y[j] for j in others]
        for j, copy in copies.items():
            is_own_target = (i, j) == (0, 1)
            if not (masks_duplicates and is_own_target):
                candidates.append(copy)
        reverse = [x[j] for j in (i, *others)]
        if model.config.tr_same_side_negatives:
            candidates += [x[j] for j in others]
            reverse += [y[j] for j in others]
        scores = torch.stack([x[i] @ candidate for candidate in (y[i], *candidates)]) / temperature
        forward.append(scores.exp().sum().log() - scores[0])

        reverse = torch.stack([y[i] @ candidate for candidate in reverse]) / temperature
        backward.append(reverse.exp().sum().log() - reverse[0])
        negatives.append((len(candidates) + len(reverse) - 1) / 2)

    expected = (torch.stack(forward).mean() + torch.stack(backward).mean()) / 2
    out = model(**batch)
    assert out.tr_loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert out.negatives.item() == pytest.approx(sum(negatives) / 6)
    table = model.get_input_embeddings().weight
    (found,) = torch.autograd.grad(out.loss, table)
    (gradient,) = torch.autograd.grad(expected, table)
    torch.testing.assert_close(found, gradient)


def masked_by_hand(ids: Tensor, noise: Tensor, special: set[int]) -> tuple[Tensor, list[int]]:
    """Return a text with a share of 0.6 masked as in MLM, and the places to predict."""
    masked, chosen = (
        ids.clone(),
        [i for i in range(len(ids)) if i not in special and noise[i] < 0.6],
    )
    for i in chosen:
        if noise[i] < 0.8 * 0.6:
            masked[i] = MASK
        elif noise[i] < 0.9 * 0.6:
            masked[i] = int(noise[i].item() * 2**24) * 10368889 % 2**24 * 250 // 2**24
    return masked, chosen


def mask_one_by_one(
    batch: dict[str, Tensor], side: str, row: int
) -> tuple[Tensor, Tensor, list[int]]:
    """One sentence as it is and as MLM shows it, and the places to predict."""
    ids = tokens_of(batch, side, row)
    return ids, *masked_by_hand(ids, batch[f"{side}_noise"][row], {0, len(ids) - 1})


def kinds_of(ids: Tensor, masked: Tensor, chosen: list[int]) -> set[str]:
    return {
        "masked" if masked[i] == MASK else "kept" if masked[i] == ids[i] else "random"
        for i in chosen
    }


@pytest.mark.parametrize("model_type", ENCODERS)
def test_tlm_is_the_mean_over_masked_tokens_of_unpadded_pairs(model_type: str) -> None:
    model = tiny_model(model_type, objective="tr+tlm", tlm_probability=0.6).double()
    batch, encoder, losses, kinds = make_batch(), model.dap.encoder, [], set()
    for row in range(6):
        x, y = tokens_of(batch, "source", row), tokens_of(batch, "target", row)
        ids = torch.cat([x, y[1:]])
        noise = torch.cat(
            [batch["source_noise"][row, : len(x)], batch["target_noise"][row, 1 : len(y)]]
        )
        masked, chosen = masked_by_hand(ids, noise, {0, len(x) - 1, len(ids) - 1})
        kinds |= kinds_of(ids, masked, chosen)
        positions = torch.cat([torch.arange(len(x)), torch.arange(1, len(y))])
        offset = position_offset(encoder)
        given = {} if offset is None else {"position_ids": positions[None] + offset}
        states = encoder(masked[None], **given).last_hidden_state[0]
        losses += [token_loss(model, states[i], ids[i]) for i in chosen]
    assert len(kinds) == 3
    assert model(**batch).tlm_loss.item() == pytest.approx(
        torch.stack(losses).mean().item(), rel=1e-9
    )


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
    assert (out.source_embeds, out.target_embeds) == (
        None,
        None,
    )  # nobody read the sentences as they are


@pytest.mark.parametrize("options", [{}, {"rtl_tied": False}, {"objective": "rtl+bow"}])
def test_bow_tells_the_targets_words_from_either_sentence_vector(options: dict[str, Any]) -> None:
    options = {"objective": "bow", "target_vocab_size": 150, "pooling": "mean", **options}
    model, batch = tiny_model(**options).double(), make_batch()
    batch["target_input_ids"][1, 1:3] = 100  # a word that occurs twice counts twice
    vocabulary = [2, *range(60, 209)]
    model.set_target_vocabulary(vocabulary)
    head, losses = model.prediction_head, []
    weight = (
        model.get_input_embeddings().weight[vocabulary]
        if head.decoder is None
        else head.decoder.weight
    )
    before = head if model.bow_transform is None else model.bow_transform
    assert (before is head) == ("rtl" not in options["objective"])
    for side in ("source", "target"):
        losses.append([])
        for row in range(6):
            vector = model.dap(tokens_of(batch, side, row)[None]).pooler_output[0]
            state = before.norm(before.activation(before.dense(vector / vector.norm() * 32**0.5)))
            surprise = -(weight @ state + head.bias).log_softmax(0)
            words = [
                word
                for word in tokens_of(batch, "target", row)[1:-1].tolist()
                if word in vocabulary
            ]
            losses[-1] += [surprise[vocabulary.index(word)] for word in words]
    expected = (torch.stack(losses[0]).mean() + torch.stack(losses[1]).mean()) / 2
    assert model(**batch).bow_loss.item() == pytest.approx(expected.item(), rel=1e-9)


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
    with pytest.raises(ValueError, match=f"the size None.*vectors of {size}"):
        model(**{key: value for key, value in batch.items() if key != "teacher_embeds"})


@pytest.mark.parametrize("options", [{}, {"tr_bidirectional": True, "tr_hard_negatives": 0.7}])
def test_shortened_vectors_are_ranked_as_well(options: dict[str, Any]) -> None:
    model = tiny_model(objective="tr", tr_matryoshka_dims=[8, 16], **options).eval()
    batch = make_batch()
    if "tr_hard_negatives" in options:
        batch = with_negatives(batch)
    out = model(**batch)
    model.config.tr_matryoshka_dims = None
    whole = model(**batch)
    pairs = Pairs(
        source=Sentences(batch["source_input_ids"], batch["source_attention_mask"]),
        target=Sentences(batch["target_input_ids"], batch["target_attention_mask"]),
    )
    vectors = [whole.source_embeds, whole.target_embeds]
    if "negative_input_ids" in batch:
        negatives = Sentences(batch["negative_input_ids"], batch["negative_attention_mask"])
        pairs = pairs._replace(negatives=negatives)
        mask = negatives.mask.clone()
        mask[:, 0] = 1
        vectors.append(model.dap(negatives.ids, mask).pooler_output)
    losses = [whole.tr_loss]
    for size in (8, 16):
        cut = tuple(rows[:, :size] for rows in vectors)
        losses.append(TranslationRanking(model.config).compare(cut, pairs)[0])
    torch.testing.assert_close(out.tr_loss, torch.stack(losses).mean())
    torch.testing.assert_close(out.accuracy, whole.accuracy)


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
        masks = model.dap.encoder.embeddings(torch.full_like(y, MASK)[None])[:, 1:] + (
            own if reverse else english
        )
        out = model.rtl_head.blocks(inputs_embeds=torch.cat([states, masks], 1)).last_hidden_state
        predicted = out[0, states.shape[1] :]
        losses[reverse] += [
            token_loss(model, state, label) for state, label in zip(predicted, y[1:])
        ]
    means = [torch.stack(part).mean().item() for part in losses.values() if part]
    assert len(means) == (2 if direction == "both" else 1)
    assert loss.item() == pytest.approx(sum(means) / len(means), rel=1e-9)
    with pytest.raises(ValueError, match="language_ids=None.*" + direction):
        model(**batch)
