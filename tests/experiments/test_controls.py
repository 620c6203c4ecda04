"""Controls lack what they should lack, and neighbours are put into the same batches."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from tiny_models import make_batch, tiny_model

from dap_transformers.training.batches import LanguageMixSampler
from experiments.controls import OwnWordsBOW, ShuffledRTL, TranslatedWordsBOW, VectorRTL
from experiments.neighbour_batches import NeighbourSampler, groups_of_neighbours, target_vectors
from objectives_dap import OBJECTIVES, Pairs, Sentences


def test_controls_do_not_read_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    other = dict(batch)
    for name in ("source_input_ids", "source_attention_mask"):
        other[name] = torch.roll(batch[name], -1, 0)
    mirrored = dict(batch)  # each source is the target
    for name in ("input_ids", "attention_mask"):
        mirrored[f"source_{name}"] = batch[f"target_{name}"]
    for kind in (OwnWordsBOW, ShuffledRTL):
        monkeypatch.setitem(OBJECTIVES, kind.name, kind)
        control = tiny_model(objective=kind.name).eval()
        losses = [control(**each).loss for each in (batch, other)]
        monkeypatch.undo()
        plain = tiny_model(objective=kind.name).eval()
        plain.load_state_dict(control.state_dict())
        if kind is OwnWordsBOW:
            torch.testing.assert_close(*losses)
            torch.testing.assert_close(losses[0], plain(**mirrored).loss)
        else:
            torch.testing.assert_close(losses[1], plain(**batch).loss)


def test_translated_words_are_predicted_from_the_source_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = make_batch()
    same_words = dict(batch)  # each source has the words of its target
    for name in ("input_ids", "attention_mask"):
        same_words[f"target_{name}"] = batch[f"source_{name}"]
    model = tiny_model(objective="bow").eval()
    plain = [model(**each).loss for each in (same_words, batch)]
    monkeypatch.setitem(OBJECTIVES, "bow", TranslatedWordsBOW)
    control = [model(**each).loss for each in (same_words, batch)]
    # If both sides have the same vector, predicting from either one is the same.
    torch.testing.assert_close(control[0], plain[0])
    assert abs(control[1] - plain[1]) > 1e-4


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_rtl_through_the_vector_reads_nothing_else_of_the_source(
    ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OBJECTIVES, "rtl", VectorRTL)
    model = tiny_model(objective="rtl", rtl_ratio=ratio).eval()
    batch = make_batch()
    sides = []
    for side in ("source", "target"):
        ids = batch[f"{side}_input_ids"]
        noise = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
        sides.append(Sentences(ids, batch[f"{side}_attention_mask"], noise))
    pairs = Pairs(*sides)
    (objective,) = model.objectives
    encoded = model.encode(pairs, objective.needs)
    loss, _ = objective.loss(pairs, encoded, model)

    no_states = encoded._replace(source_states=None, target_states=None)
    torch.testing.assert_close(objective.loss(pairs, no_states, model)[0], loss)
    other = encoded._replace(source_embeds=encoded.source_embeds.roll(1, 0))
    assert abs(objective.loss(pairs, other, model)[0] - loss) > 1e-6

    # Only the tokens to predict are hidden from the head.
    hidden = objective.chosen(pairs.target).sum()
    tokens = pairs.target.mask[:, 1:].sum()
    assert hidden == objective.labels(pairs, model).sum()
    assert hidden == tokens if ratio == 1 else 0 < hidden < tokens


def test_neighbours_share_rare_tokens() -> None:
    generator = np.random.default_rng(0)
    topics = generator.permutation(np.repeat(np.arange(16), 8))  # 8 targets of each topic
    token_ids = []
    for topic in topics:
        common = generator.integers(4, 8, 3)
        rare = 100 + 10 * topic + generator.integers(0, 3, 4)
        token_ids.append(np.array([0, *common, *rare, 2]))
    groups = groups_of_neighbours(target_vectors(token_ids, seed=0), size=8, seed=0)
    assert sorted(np.concatenate(groups)) == list(range(128))
    assert {len(group) for group in groups} == {8}
    same = [np.bincount(topics[group]).max() for group in groups]
    assert np.mean(same) > 5  # at random it would be about 2


def test_a_sampler_of_neighbours_draws_the_rows_of_the_other_sampler() -> None:
    ids = [[0, 10 + row % 7, 20 + row % 5, 2] for row in range(50)]
    dataset = Dataset.from_dict({"target_input_ids": ids})
    plain = LanguageMixSampler([20, 30], "uniform", 0.5, 3)
    sampler = NeighbourSampler(plain, dataset, 8)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        rows = list(sampler)
        assert len(rows) == len(sampler) == 50
        assert sorted(rows) == sorted(plain)
        epochs.append(rows)
    assert epochs[0] == epochs[2] != epochs[1]
