"""Compare each objective with loops over the paper's equations, pair by pair without padding."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from tiny_models import (
    ENCODERS,
    MASK,
    RELEASED,
    Batch,
    make_batch,
    tiny_model,
    tokens_of,
    with_negatives,
)
from torch import Tensor, nn
from torch.testing import assert_close

from modeling_dap import DAPConfig, DAPForPreTraining
from objectives_dap import draw_noise
from states_dap import position_offset


def vector_of(model: DAPForPreTraining, batch: Batch, side: str, row: int) -> Tensor:
    """Return the sentence vector (D,) of one sentence."""
    return model.dap(tokens_of(batch, side, row)[None]).pooler_output[0]


def token_losses(
    model: DAPForPreTraining,
    states: Tensor,
    labels: Sequence[int],
    transform: nn.Module | None = None,
) -> list[Tensor]:
    """Return the cross entropy of each label that the vocabulary has, given its state (T, D)."""
    head = model.prediction_head
    before = transform or head
    weight, bias = model.get_input_embeddings().weight, head.bias
    ids = [*range(250)]
    if head.token_ids is not None:
        ids = head.token_ids.tolist()
        weight = weight[ids]
        bias = bias if head.is_narrow else bias[ids]
    if head.decoder is not None:
        weight = head.decoder.weight
    losses = []
    for state, label in zip(states, labels, strict=True):
        if label in ids:
            state = before.norm(before.activation(before.dense(state)))
            surprise = -(weight @ state + bias).log_softmax(0)
            losses.append(surprise[ids.index(label)])
    return losses


def reconstruct(
    model: DAPForPreTraining,
    batch: Batch,
    row: int,
    sides: Sequence[str] = ("source", "target"),
    added: Sequence[Tensor | float] = (0.0, 0.0),
) -> list[Tensor]:
    """Return the loss of each token of a pair's answer (eq. g^0 and L_RTL).

    The released head embeds the masks again. Its blocks count the first tokens, which they do not
    see.

    Args:
        sides: the context and the answer.
        added: embeddings of their languages.
    """
    encoder, blocks = model.dap.encoder, model.rtl_head.blocks
    context, answer = (tokens_of(batch, side, row) for side in sides)
    states = encoder(context[None]).last_hidden_state[:, 1:]  # without CLS
    visible = encoder(answer[None]).last_hidden_state[:, 1:]
    masks = encoder.embeddings(torch.full_like(answer, MASK)[None])
    given = {}
    if model.config.rtl_reembed:
        words = model.get_input_embeddings()(torch.full_like(answer, MASK)[None])
        places = torch.arange(len(context) + len(answer))[None] + position_offset(blocks)
        own = places[:, : len(answer)]
        masks = blocks.embeddings(input_ids=None, inputs_embeds=words, position_ids=own)
        _, context_places, _, answer_places = places.split(
            [1, len(context) - 1, 1, len(answer) - 1], 1
        )
        given["position_ids"] = torch.cat([context_places, answer_places], 1)
    noise = batch[f"{sides[1]}_noise"][row, 1 : len(answer)]
    chosen = noise < model.config.rtl_ratio
    queries = torch.where(chosen[:, None], masks[:, 1:], visible)
    joined = torch.cat([states + added[0], queries + added[1]], 1)
    out = blocks(inputs_embeds=joined, **given).last_hidden_state[0, states.shape[1] :]
    return token_losses(model, out[chosen], answer[1:][chosen].tolist())


def mean(losses: list[Tensor]) -> float:
    return torch.stack(losses).mean().item()


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        *((name, {"rtl_ratio": 0.5}) for name in ENCODERS),
        ("bert", {"rtl_ratio": 1.0}),
        *(
            (model_type, RELEASED)
            for model_type in ("bert", "xlm-roberta", "roberta", "distilbert")
        ),
    ],
    ids=str,
)
def test_rtl_is_the_mean_over_real_target_tokens_of_unpadded_pairs(
    model_type: str, options: dict
) -> None:
    model, batch, losses = tiny_model(model_type, **options).double(), make_batch(), []
    for row in range(6):
        losses += reconstruct(model, batch, row)
    assert model(**batch).rtl_loss.item() == pytest.approx(mean(losses), rel=1e-9)


@pytest.mark.parametrize(
    ("direction", "pairs"),
    [("target-to-source", 6), ("both", 6), ("both", 1)],  # of one pair, no direction is reversed
)
def test_directions_swap_sides_and_read_languages(direction: str, pairs: int) -> None:
    languages = ["de", "fr", "sw"]
    model = tiny_model(rtl_direction=direction, rtl_languages=languages).double()
    batch, ids = make_batch(pairs), torch.tensor([0, 1, 2, 0, 1, 2])[:pairs]
    embeddings, losses = model.rtl_head.language_embeddings.weight, {}
    for row in range(pairs):
        sides, added = ("source", "target"), (embeddings[ids[row] + 1], embeddings[0])
        is_reversed = direction == "target-to-source" or row % 2 == 1
        if is_reversed:
            sides, added = sides[::-1], added[::-1]
        own = reconstruct(model, batch, row, sides, added)
        losses.setdefault(is_reversed, []).extend(own)
    means = [mean(part) for part in losses.values()]
    found = model(**batch, language_ids=ids).rtl_loss.item()
    assert found == pytest.approx(sum(means) / len(means), rel=1e-9)


@pytest.mark.parametrize("objective", ["tr+rtl", "tr+rtl+tlm"])
def test_target_vocabulary_is_the_softmax_over_its_ids_and_ignores_others(objective: str) -> None:
    model, batch = tiny_model(objective=objective, target_vocab_size=140), make_batch()
    model.set_target_vocabulary([2, *range(60, 199)])
    assert model.prediction_head.is_narrow == (objective == "tr+rtl")  # TLM predicts all ids
    kept = []
    for row in range(6):
        kept += reconstruct(model, batch, row)
    out = model(**batch)
    assert out.rtl_loss.item() == pytest.approx(mean(kept), rel=1e-5)
    labels = int(batch["target_attention_mask"][:, 1:].sum())
    assert out.ignored_tokens.item() == labels - len(kept) > 0


@pytest.mark.parametrize("ids", [None, [2, *range(150, 250)]])
def test_a_matrix_of_its_own_starts_as_the_word_embeddings_and_learns_apart(
    ids: list | None,
) -> None:
    options = {"objective": "rtl", "mask_token_id": MASK, "target_token_ids": ids}
    model = DAPForPreTraining.from_scratch(tiny_config("bert"), rtl_tied=False, **options)
    table = model.get_input_embeddings().weight
    assert torch.equal(model.prediction_head.decoder.weight, table if ids is None else table[ids])
    batch = make_batch()
    model(**batch).rtl_loss.backward()
    read = torch.cat([batch["source_input_ids"].flatten(), torch.tensor([MASK])])
    unread = ~torch.isin(torch.arange(250), read)
    assert not table.grad[unread].any()  # no gradient of the softmax


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
    config, batch = model.config, make_batch()
    for side, row, other in (("target", 4, 5), ("source", 2, 3)):
        for name in (f"{side}_input_ids", f"{side}_attention_mask"):
            batch[name][row] = batch[name][other]
    batch = with_negatives(batch)
    out = model(**batch)

    def vectors_of(side: str, rows: Sequence[int]) -> Tensor:
        return torch.stack([vector_of(model, batch, side, row) for row in rows])

    vectors = [vectors_of(side, range(6)) for side in ("source", "target")]
    assert_close([out.source_embeds, out.target_embeds], vectors)
    copied = [0, 1, 3, 4]
    vectors.append(vectors_of("negative", copied))
    if model.projection is not None:
        vectors = [model.projection(side) for side in vectors]
    duplicates = {4: 5, 5: 4, 2: 3, 3: 2} if config.tr_mask_duplicates else {}
    ranked = []
    for size in (32, *(config.tr_matryoshka_dims or ())):
        x, y, copies = (side[:, :size] for side in vectors)
        for i in range(6):
            others = [j for j in range(6) if j not in (i, duplicates.get(i))]
            known = [j for j in copied if not (config.tr_mask_duplicates and (i, j) == (0, 1))]
            forward = [*y[[i, *others]], *copies[[copied.index(j) for j in known]]]
            backward = [*x[[i, *others]]]
            if config.tr_same_side_negatives:
                forward += [*x[others]]
                backward += [*y[others]]
            ranked += [rank(config, x[i], forward), rank(config, y[i], backward)]
    losses, negatives, hits = zip(*ranked)
    expected = torch.stack(losses).mean()
    assert out.tr_loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert out.negatives.item() == pytest.approx(sum(negatives) / len(negatives))
    if config.tr_mask_duplicates:  # else there are ties
        assert out.accuracy.item() == pytest.approx(sum(hits[:12]) / 12)  # of whole vectors
    table = model.get_input_embeddings().weight
    found = torch.autograd.grad(out.loss, table)
    assert_close(found, torch.autograd.grad(expected, table))


def texts_of(objective: str, batch: Batch, row: int) -> list[tuple[Tensor, ...]]:
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
    batch, encoder, losses, shares = make_batch(), model.dap.encoder, [], []
    for row in range(6):
        for ids, noise, columns in texts_of(objective, batch, row):
            chosen = (noise < 0.6) & (ids != 0) & (ids != 2)
            share = (noise.double() / 0.6).where(chosen, 1.0)
            random = (noise.double() * 2**24).long() * 10368889 % 2**24 * 250 // 2**24
            shown = torch.where(share < 0.9, random, ids).masked_fill(share < 0.8, MASK)
            shares += share[chosen].tolist()
            offset = position_offset(encoder)
            given = {} if offset is None else {"position_ids": columns[None] + offset}
            states = encoder(shown[None], **given).last_hidden_state[0]
            losses += token_losses(model, states[chosen], ids[chosen].tolist())
    kinds = {(share >= 0.8) + (share >= 0.9) for share in shares}
    assert kinds == {0, 1, 2}  # masked, random and kept tokens

    out = model(**batch)
    assert getattr(out, f"{objective}_loss").item() == pytest.approx(mean(losses), rel=1e-9)
    absent = (out.tr_loss, out.accuracy, out.negatives, out.source_embeds, out.target_embeds)
    assert absent == (None,) * 5  # nobody reads the sentences without masks


@pytest.mark.parametrize("options", [{}, {"rtl_tied": False}, {"objective": "rtl+bow"}])
def test_bow_tells_the_targets_words_from_either_sentence_vector(options: dict) -> None:
    options = {"objective": "bow", "target_vocab_size": 150, "pooling": "mean", **options}
    model, batch, means = tiny_model(**options).double(), make_batch(), []
    batch["target_input_ids"][1, 1:3] = 100  # a word that occurs twice counts twice
    model.set_target_vocabulary([2, *range(60, 209)])
    assert (model.bow_transform is None) == ("rtl" not in options["objective"])
    for side in ("source", "target"):
        losses = []
        for row in range(6):
            vector = vector_of(model, batch, side, row)
            words = tokens_of(batch, "target", row)[1:-1].tolist()
            states = (vector / vector.norm() * 32**0.5).expand(len(words), -1)
            losses += token_losses(model, states, words, model.bow_transform)
        means.append(mean(losses))
    assert model(**batch).bow_loss.item() == pytest.approx(sum(means) / 2, rel=1e-9)


@pytest.mark.parametrize("size", [32, 24])
def test_distillation_is_the_mean_of_1_minus_cosine_over_both_sides(size: int) -> None:
    model, batch = tiny_model(objective="distill", distill_size=size).eval(), make_batch()
    batch["teacher_embeds"] = torch.randn(6, 2, size)
    expected = []
    for row, teachers in enumerate(batch["teacher_embeds"]):
        for side, teacher in zip(("source", "target"), teachers):
            vector = vector_of(model, batch, side, row)
            if size != 32:
                vector = model.teacher_projection(vector)
            expected.append(1 - F.cosine_similarity(vector.double(), teacher.double(), dim=0))
    assert model(**batch).distill_loss.item() == pytest.approx(mean(expected), rel=1e-5)


def test_each_step_masks_anew_by_uniform_noise() -> None:
    model, batch = tiny_model(objective="mlm"), make_batch(has_noise=False)
    assert len({model(**batch).mlm_loss.item() for _ in range(20)}) == 20
    noise = draw_noise(torch.empty(100, 100)).flatten().sort().values
    assert_close(noise, torch.linspace(0, 1, len(noise)), atol=0.03, rtol=0)
    assert noise[0] >= 0
    assert noise[-1] < 1
