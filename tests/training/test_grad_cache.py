from pathlib import Path

import pytest
import torch
from test_distributed import CASES, PAIRS, micro_batch, step_gradients
from tiny_models import gradients, make_batch, tiny_model

from dap.training import grad_cache
from dap.training.arguments import DAPTrainingArguments
from dap.training.grad_cache import CachedBatch, seeded
from losses_dap import text_hash
from modeling_dap import DAPForPreTraining


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(value) for value in case.values()))
def test_chunks_give_the_gradients_of_the_batch(case: dict, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_cache, "SIMILARITIES_AT_A_TIME", 2 * PAIRS)  # blocks of two queries
    expected, found = (step_gradients(case, 2, False, chunk) for chunk in (None, size))
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_losses_are_those_of_the_batch() -> None:
    for case in CASES:
        model, batch = tiny_model("bert", **case), micro_batch(0)
        expected, cached = model(**batch), CachedBatch(model, model, batch, 5)
        for part in cached.parts:
            cached.run(part)
        found = cached.output()
        for name in ("loss", "tr_loss", "rtl_loss", "tlm_loss", "mlm_loss", "accuracy", "negatives", "ignored_tokens"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=f"{name} of {case}")


def with_dropout(**config: object) -> DAPForPreTraining:
    model = tiny_model("bert", **config)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.3
    return model


@pytest.mark.parametrize("objective", ["tr+tlm", "tr+rtl"])
def test_dropout_is_the_same_in_both_passes(objective: str) -> None:
    """The gradients are those of all chunks' graphs held at once, each with its own dropout."""
    model, batch = with_dropout(objective=objective, tlm_probability=0.5), make_batch(PAIRS)
    cached = CachedBatch(model, model, batch, 5)
    outs = [cached._forward(part) for part in cached.parts]
    queries, answers = (torch.cat([out[f"{side}_embeds"] for out in outs]) for side in ("source", "target"))
    texts = text_hash(batch["target_input_ids"], batch["target_attention_mask"])
    ranking = model._translation_ranking(queries, answers, texts)
    predicted = sum(out.tlm_loss * model.config.tlm_weight if out.rtl_loss is None else out.rtl_loss for out in outs)
    (ranking.loss + predicted).backward()
    expected = gradients(model)
    model.zero_grad()
    for part in cached.parts:
        cached.run(part).backward()
    assert (gradients(model) - expected).norm() < 1e-5 * expected.norm()


def test_dropout_differs_between_chunks_and_steps() -> None:
    model, batch = with_dropout(objective="tr"), make_batch(2)
    batch = {name: value[:1].repeat(4, 1) for name, value in batch.items()}
    drawn = [CachedBatch(model, model, batch, 2)._embed()[0] for _ in range(2)]  # (4, D) each
    assert len(torch.cat(drawn).unique(dim=0)) == 8


def test_random_numbers_go_on_after_a_seeded_part() -> None:
    state = torch.get_rng_state()
    with seeded(7, torch.device("cpu")):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_dropout_the_same_tokens_are_masked_as_in_a_plain_step() -> None:
    model = tiny_model("bert", objective="tr+tlm", tlm_probability=0.5)
    batch = {name: value for name, value in make_batch(PAIRS).items() if "noise" not in name}
    torch.manual_seed(3)
    expected = model(**batch).tlm_loss
    torch.manual_seed(3)
    cached = CachedBatch(model, model, batch, 4)
    for part in cached.parts:
        cached.run(part)
    torch.testing.assert_close(cached.output().tlm_loss, expected)


def test_a_part_is_as_wide_as_its_own_longest_row() -> None:
    model, batch = tiny_model(objective="tr"), make_batch(PAIRS, longest=11)
    order = batch["source_attention_mask"].sum(1).argsort()
    parts = CachedBatch(model, model, {name: value[order] for name, value in batch.items()}, 3).parts
    widths = [part.inputs["source_input_ids"].shape[1] for part in parts]
    assert widths == sorted(widths)
    assert widths[0] < widths[-1] == 11
    assert all(bool(part.inputs["source_attention_mask"][:, -1].any()) for part in parts)


def test_padding_on_the_left_is_still_refused() -> None:
    model, batch = tiny_model(objective="tr"), make_batch(4)
    batch = {name: value.flip(1) for name, value in batch.items()}
    with pytest.raises(ValueError, match="padding before a real token"):
        CachedBatch(model, model, batch, 2)


@pytest.mark.parametrize("size", [0, -4])
def test_sizes_that_are_not_positive_are_refused(size: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"mini_batch_size={size}: give 1 or more"):
        DAPTrainingArguments(output_dir=str(tmp_path), mini_batch_size=size)
