import itertools

import pytest
import torch
from test_distributed import (
    CASES,
    IN_EVERY_VARIANT,
    IN_ONE_VARIANT,
    PAIRS,
    Variant,
    micro_batch,
    step_gradients,
)
from tiny_models import (
    COMBINATIONS,
    distance,
    gradients,
    make_batch,
    step,
    tiny_model,
)
from torch.testing import assert_close

import losses_dap
from dap_transformers.training.grad_cache import CachedBatch, seeded
from modeling_dap import DAPForPreTraining
from objectives_dap import TranslationRanking


@pytest.mark.parametrize(
    ("case", "size", "accumulation"),
    [
        *itertools.product(IN_EVERY_VARIANT, (1, 5), (2,)),
        *zip(IN_ONE_VARIANT, itertools.cycle((5, 3)), itertools.repeat(1)),
    ],
    ids=str,
)
def test_chunks_give_the_gradients_of_the_batch(
    case: dict, size: int, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = step_gradients(case, Variant(accumulation, False, None))
    # Only the chunks rank in blocks: of 4, 4 and 2 queries, or of 2 if there are hard negatives.
    monkeypatch.setattr(losses_dap, "SIMILARITIES_PER_BLOCK", 4 * PAIRS)
    found = step_gradients(case, Variant(accumulation, False, size))
    assert distance(found, expected) < 1e-5


def test_losses_are_those_of_the_batch() -> None:
    for case in CASES:
        model, batch = tiny_model("bert", **case), micro_batch(0, case)
        expected, cached = model(**batch), CachedBatch(model, model, batch, 5)
        for part in cached.parts:
            cached.run(part)
        found = cached.output()
        assert_close(found.loss, expected.loss, msg=f"loss of {case}")
        assert_close(found.measures, expected.measures)


def test_a_side_that_the_loss_leaves_out_has_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = TranslationRanking.rank

    def rank_source(self: TranslationRanking, vectors: tuple, hashes: list) -> list:
        source, target = vectors
        return rank(self, (source, target.detach()), hashes)

    monkeypatch.setattr(TranslationRanking, "rank", rank_source)
    batch = micro_batch(0, {})
    model = tiny_model("bert", objective="tr")
    (_, expected), (_, found) = (step(model, batch, size) for size in (PAIRS, 3))
    assert distance(found, expected) < 1e-5


def with_dropout(**config: object) -> DAPForPreTraining:
    model = tiny_model("bert", **config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    return model


@pytest.mark.parametrize("objective", [name for name in COMBINATIONS if name.startswith("tr+")])
def test_dropout_is_the_same_in_both_passes(objective: str) -> None:
    """A single chunk has the gradients of a plain step with the same dropout."""
    model = with_dropout(objective=objective, tlm_probability=0.5, mlm_probability=0.5)
    cached = CachedBatch(model, model, make_batch(PAIRS), PAIRS)
    (part,) = cached.parts
    with seeded(part.seed, torch.device("cpu")):
        _, expected = step(model, part.inputs)
    model.zero_grad()
    cached.run(part).backward()
    assert distance(gradients(model), expected) < 1e-5


def test_dropout_differs_between_chunks_and_steps() -> None:
    model, batch = with_dropout(objective="tr"), make_batch(2)
    batch = {name: value[[0] * 4] for name, value in batch.items()}
    steps = [CachedBatch(model, model, batch, 2) for _ in range(2)]
    drawn = [
        step._forward(part).source_embeds for step in steps for part in step.parts
    ]  # (2, D) each
    assert len(torch.cat(drawn).unique(dim=0)) == 8


def test_random_numbers_go_on_after_a_seeded_part() -> None:
    state = torch.get_rng_state()
    with seeded(7, torch.device("cpu")):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_dropout_the_same_tokens_are_masked_as_in_a_plain_step() -> None:
    model = tiny_model("bert", objective="tr+tlm", tlm_probability=0.5)
    batch = make_batch(PAIRS, has_noise=False)
    torch.manual_seed(3)
    expected = model(**batch).tlm_loss
    torch.manual_seed(3)
    cached = CachedBatch(model, model, batch, 4)
    for part in cached.parts:
        cached.run(part)
    assert_close(cached.output().tlm_loss, expected)
