"""The model: what must not matter to it, and every way of making and running it."""

import itertools
from collections.abc import Callable
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
    RELEASED,
    gradients,
    make_batch,
    step,
    tiny_model,
    widen,
    with_negatives,
)
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

import losses_dap
import states_dap
from modeling_dap import (
    DAPConfig,
    DAPForPreTraining,
    DAPForPreTrainingOutput,
    DAPForSequenceClassification,
    DAPModel,
)
from states_dap import POOLINGS, layer_stack

pytestmark = pytest.mark.usefixtures("small_groups")

Batch = dict[str, Tensor]


# ------------------------------------------------------------------------- what must not matter

OPTIONS = [{"objective": name} for name in COMBINATIONS]
OPTIONS.append(RELEASED | {"rtl_ratio": 0.5})
MORE = [{"objective": "tr+tlm", "tr_hard_negatives": 0.7, "pooling": name} for name in POOLINGS]
MORE.append(RELEASED)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [*itertools.product(ENCODERS, OPTIONS), *(("bert", options) for options in MORE)],
    ids=str,
)
def test_padding_and_order_change_nothing(model_type: str, options: dict) -> None:
    """Every parameter gets a gradient, else `gradients` would fail."""
    model = tiny_model(model_type, tlm_probability=0.5, mlm_probability=0.5, **options)
    batch = with_negatives(make_batch()) if "tr_hard_negatives" in options else make_batch()
    loss, expected = step(model, batch)
    order = torch.randperm(6)
    for changed in (widen(batch, 5), {key: value[order] for key, value in batch.items()}):
        again, found = step(model, changed)
        assert again == pytest.approx(loss, rel=1e-5)
        assert (found - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize(
    ("options", "whole_sides"),
    [
        ({"objective": "tr"}, []),
        ({"objective": "tr", "pooling": "lasttoken"}, []),
        ({"objective": "tr", "pooling": "mean"}, ["source", "target"]),
        ({"objective": "tr+rtl"}, ["source"]),
        ({"rtl_direction": "target-to-source", "rtl_languages": ["de"]}, ["target"]),
        ({"rtl_direction": "both", "rtl_languages": ["de"]}, ["source", "target"]),
        ({"rtl_ratio": 0.5}, ["source", "target"]),
    ],
    ids=str,
)
def test_the_last_layer_computes_the_tokens_that_are_read(
    options: dict, whole_sides: list[str]
) -> None:
    model, batch, found = tiny_model(**options), make_batch(), []
    last = layer_stack(model.dap.encoder)[1][-1].intermediate
    last.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].shape[1]))
    model(**batch, language_ids=torch.zeros(6, dtype=torch.long))
    expected = 0
    for side in ("source", "target"):
        expected += int(batch[f"{side}_attention_mask"].sum()) if side in whole_sides else 6
    assert found == [expected]


@pytest.mark.parametrize("model_type", ENCODERS)
def test_groups_of_like_length_equal_packed_rows(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny_model(model_type, objective=ALL), make_batch()
    _, expected = step(model, batch)  # packed, where the encoder's attention takes it
    model.set_attn_implementation("eager")
    for part in (model.dap.encoder, model.rtl_head.blocks):
        assert part.config._attn_implementation == "eager"
    for tokens in (1, 8, 10**9):
        monkeypatch.setattr(states_dap, "TOKENS_PER_GROUP", tokens)
        _, found = step(model, batch)
        assert (found - expected).norm() < 1e-4 * expected.norm()


def test_projection_is_for_the_loss_only() -> None:
    plain, projected = (tiny_model(objective="tr", projection=kind) for kind in (None, "mlp"))
    projected.dap.load_state_dict(plain.dap.state_dict())
    out, expected = projected(**make_batch()), plain(**make_batch())
    torch.testing.assert_close(out.source_embeds, expected.source_embeds)
    assert out.loss.item() != pytest.approx(expected.loss.item())


@pytest.mark.parametrize("pooling", POOLINGS)
def test_sentence_vectors_do_not_depend_on_the_side_of_the_padding(pooling: str) -> None:
    model = DAPModel(DAPConfig(tiny_config("deberta-v2"), pooling=pooling, objective="tr")).eval()
    ids, mask = torch.tensor([[0, 7, 8, 2, PAD, PAD]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
    right = model(ids, mask)
    left = model(ids.roll(2, 1), mask.roll(2, 1)).pooler_output
    torch.testing.assert_close(left, right.pooler_output, rtol=1e-4, atol=1e-5)
    real = right.last_hidden_state[:, :4]
    expected = {"cls": real[:, 0], "mean": real.mean(1), "lasttoken": real[:, 3]}
    torch.testing.assert_close(right.pooler_output, expected[pooling])


def test_labels_are_counted_exactly_in_half_precision() -> None:
    model, batch = tiny_model().to(torch.bfloat16), make_batch(pairs=63)
    batch["target_attention_mask"][0, 3:] = 0
    labels = int(batch["target_attention_mask"][:, 1:].sum())
    assert labels != int(torch.tensor(labels).bfloat16())
    assert model(**batch).ignored_tokens.item() == 0


# --------------------------------------------------------------------------- ways of running it


@pytest.mark.parametrize("objective", ["tr", ALL])
def test_activation_checkpointing_keeps_gradients(objective: str) -> None:
    model, batch = tiny_model("xlm-roberta", objective=objective), make_batch()
    _, expected = step(model, batch)
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(step(model, batch)[1], expected)


@pytest.mark.parametrize("objective", COMBINATIONS)
def test_bf16_autocast_hands_the_losses_float32(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, seen = tiny_model(objective=objective), make_batch(), []

    def spied(function: Callable, count: int) -> Callable:
        def spy(*values: Tensor, **how: str) -> Tensor:
            seen.extend(value.dtype for value in values[:count])
            return function(*values, **how)

        return spy

    chunked = losses_dap._VocabularyCrossEntropy
    monkeypatch.setattr(losses_dap.F, "cross_entropy", spied(F.cross_entropy, 1))
    monkeypatch.setattr(chunked, "apply", spied(chunked.apply, 3))
    expected = model(**batch).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**batch)
        hidden = model.dap(batch["source_input_ids"]).last_hidden_state
        assert (hidden @ hidden.mT).dtype == torch.bfloat16  # autocast is on
    # Distillation has no cross entropy.
    assert set(seen) == (set() if objective == "distill" else {torch.float32})
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected, rel=0.1)
    out.loss.backward()
    assert torch.isfinite(gradients(model)).all()


@pytest.mark.parametrize("model_type", ["bert", "deberta-v2"])  # packed, and in groups
def test_what_the_encoder_does_on_its_way_is_given_with_the_same_losses(model_type: str) -> None:
    model, batch = tiny_model(model_type).eval(), make_batch()
    model.set_attn_implementation("eager")
    plain, seen = model(**batch), model(**batch, output_hidden_states=True, output_attentions=True)
    torch.testing.assert_close(seen.loss, plain.loss)
    assert plain.hidden_states is None
    assert [tuple(states.shape) for states in seen.hidden_states] == [(12, 9, 32)] * 4
    assert [tuple(weights.shape) for weights in seen.attentions] == [(12, 4, 9, 9)] * 3


def test_configured_outputs_are_given_as_tuples() -> None:
    more = {"objective": "tr", "num_labels": 3, "return_dict": False}
    ids = torch.tensor([[0, 7, 2]])
    outputs = DAPModel(DAPConfig(tiny_config("bert"), output_hidden_states=True, **more))(ids)
    assert len(outputs[2]) == 4  # embeddings and three layers
    model = DAPForSequenceClassification(DAPConfig(tiny_config("bert"), **more)).eval()
    logits = model(ids, return_dict=True).logits
    for mask in (None, torch.ones_like(ids)):
        (same,) = model(ids, mask)
        torch.testing.assert_close(same, logits)


@pytest.mark.parametrize("kind", [DAPModel, DAPForSequenceClassification])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_trace_and_an_export_hold_for_other_sentences(kind: type, pooling: str) -> None:
    options = {"objective": "tr", "pooling": pooling, "num_labels": 3, "return_dict": False}
    model, batch = kind(DAPConfig(tiny_config("xlm-roberta"), **options)).eval(), make_batch()
    ids, mask = batch["source_input_ids"], batch["source_attention_mask"]
    example = (ids[5:, :5], torch.ones_like(mask[5:, :5]))
    rows = {0: torch.export.Dim("rows", max=99)}
    with torch.no_grad():
        traced = torch.jit.trace(model, example, strict=False, check_trace=False)
        torch.testing.assert_close(traced(ids, mask)[-1], model(ids, mask)[-1])
        exported = torch.export.export(
            model, (ids, mask), dynamic_shapes=(rows, rows), strict=False
        ).module()
        torch.testing.assert_close(exported(ids[:3], mask[:3])[-1], model(ids[:3], mask[:3])[-1])


def test_what_hangs_on_the_embeddings_takes_part() -> None:
    model, batch = tiny_model(), make_batch()
    plain, embeddings = model(**batch), model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, given, out: out * 2)
    doubled = model(**batch)
    assert not torch.allclose(doubled.source_embeds, plain.source_embeds)
    own = model.dap(batch["source_input_ids"], batch["source_attention_mask"]).pooler_output
    torch.testing.assert_close(doubled.source_embeds, own, rtol=1e-4, atol=1e-5)
    hook.remove()
    assert torch.equal(model(**batch).loss, plain.loss)


@pytest.mark.parametrize("objective", ["tr", ALL])
def test_vocabulary_can_be_resized(objective: str) -> None:
    model, batch = tiny_model(objective=objective), make_batch()
    model.resize_token_embeddings(260)
    batch["target_input_ids"][0, 1] = 255
    assert model.config.vocab_size == model.config.encoder_config.vocab_size == 260
    assert torch.isfinite(model(**batch).loss)


class Waits(TorchDispatchMode):
    """Count the operations for which a CPU waits for a GPU: scalar reads and masks."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        places = args[1] if args[1:] and isinstance(args[1], (list, tuple)) else ()
        by_mask = any(isinstance(own, Tensor) and own.dtype == torch.bool for own in places)
        self.count += by_mask or function.name() in ("aten::_local_scalar_dense", "aten::nonzero")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("objective", "expected"), [("tr", 2), ("tr+bow", 2), ("tr+rtl", 4), ("tr+tlm", 4)]
)
def test_a_step_waits_for_a_gpu_as_often_as_the_docs_say(
    objective: str, expected: int, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lists = []
    monkeypatch.setattr(Tensor, "tolist", lambda self: lists.append(self) or self.numpy().tolist())
    # The kernel of the GPU takes the lengths as a tensor. Its CPU twin reads them.
    one_kernel = lambda query, key, value, *_: query * value.sum()  # noqa: E731
    monkeypatch.setattr(states_dap, "attention_by_length", one_kernel)
    model = tiny_model(objective=objective, pooling=pooling)
    with Waits() as waits:
        model(**make_batch()).loss.backward()
    assert waits.count + len(lists) == expected


def test_a_misspelt_loss_of_the_output_is_an_error() -> None:
    out = DAPForPreTrainingOutput(measures={"tr_loss": torch.tensor(1.0)})
    assert (out.tr_loss, out.rtl_loss) == (1.0, None)
    with pytest.raises(AttributeError, match="rlt_loss"):
        _ = out.rlt_loss


# ---------------------------------------------------------------------------- what is refused


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Batch], Batch]:
    """Return a function that changes one entry of a batch with hard negatives."""

    def of(batch: Batch) -> Batch:
        batch = with_negatives(batch)
        return batch | {name: change(batch[name].clone())}

    return of


BOTH = {"rtl_direction": "both", "rtl_languages": ["de"]}
FEW = changed("target_input_ids", lambda ids: ids[:4])
REFUSED = [
    ({"objective": "tr"}, FEW, r"\[6, 4, 6\]"),
    ({"objective": "bow"}, FEW, r"\[6, 4, 6\]"),
    ({"objective": "tr"}, changed("negative_input_ids", lambda ids: ids[:4]), r"\[6, 6, 4\]"),
    ({"objective": "tr"}, changed("source_attention_mask", lambda mask: mask.flip(1)), "padding"),
    (
        {"objective": "tr"},
        changed("source_attention_mask", lambda mask: mask.index_fill(1, torch.tensor([0]), 0)),
        "padding",
    ),
    (BOTH, lambda batch: batch, "language_ids"),
    ({"objective": "distill"}, lambda batch: batch | {"teacher_embeds": None}, "teacher_embeds"),
]


@pytest.mark.parametrize(("options", "change", "says"), REFUSED)
def test_which_batches_are_refused(
    options: dict, change: Callable[[Batch], Batch], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        tiny_model(**options)(**change(make_batch()))


def cut_below_the_target_vocabulary() -> None:
    model = tiny_model(objective="tr+bow", target_vocab_size=100)
    model.set_target_vocabulary(list(range(150, 250)))
    model.resize_token_embeddings(200)


def with_targets(objective: str, **more: Any) -> DAPForPreTraining:
    more |= {"objective": objective, "mask_token_id": MASK, "target_token_ids": [7]}
    return DAPForPreTraining.from_scratch(tiny_config("bert"), **more)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: DAPForPreTraining(DAPConfig(tiny_config("bert"))), "mask_token_id"),
        (cut_below_the_target_vocabulary, "id 249: give 250"),
        (lambda: with_targets("mlm"), "1 target tokens .*'mlm'"),
        (lambda: with_targets("tr"), "1 target tokens .*'tr'"),
        (lambda: with_targets("bow", target_vocab_size=2), "1 target tokens .*=2"),
    ],
)
def test_which_models_are_refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


# ------------------------------------------------------------------------------ classification


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("bert", "cls"), ("xlm-roberta", "mean"), ("modernbert", "cls"), ("deberta-v2", "mean")],
)
def test_classification_computes_each_row_as_if_alone(kind: str, pooling: str) -> None:
    config = DAPConfig(tiny_config(kind), num_labels=3, pooling=pooling, objective="tr")
    model = DAPForSequenceClassification(config).double().eval()
    inputs = []
    for length in (3, 9, 1, 6):
        row = {"input_ids": torch.randint(5, 60, (length,))}
        if kind == "bert":
            row["token_type_ids"] = (torch.arange(length) > 2).long()
        inputs.append(row)
    alone = [model(**{name: each[None] for name, each in row.items()}).logits for row in inputs]
    alone = torch.cat(alone)
    alone.logsumexp(1).sum().backward()
    expected = gradients(model)

    def padded(rows: list[Tensor]) -> Tensor:
        return pad_sequence(rows, batch_first=True)

    batch = {name: padded([row[name] for row in inputs]) for name in inputs[0]}
    batch["attention_mask"] = padded([torch.ones_like(row["input_ids"]) for row in inputs])
    model.zero_grad()
    logits = model(**batch).logits
    logits.logsumexp(1).sum().backward()
    torch.testing.assert_close(logits, alone)
    torch.testing.assert_close(gradients(model), expected)
    assert len(model(**batch, output_hidden_states=True).hidden_states) > 2


# ---------------------------------------------------------------------- Transformers' own Trainer


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    return TrainingArguments(str(folder), **quiet, **more)


def test_trainer_keeps_token_types_for_classification(tmp_path: Path) -> None:
    model = DAPForSequenceClassification(DAPConfig(tiny_config("bert"), num_labels=3))
    rows = [{"input_ids": [0, 5, 2], "token_type_ids": [0, 0, 1], "labels": 1, "premise": "text"}]
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Dataset.from_list(rows))
    batch = next(iter(trainer.get_train_dataloader()))
    assert set(batch) == {"input_ids", "token_type_ids", "labels"}
    assert not torch.equal(model.eval()(**batch).logits, model(input_ids=batch["input_ids"]).logits)


def test_the_stock_trainer_evaluates_by_the_loss(tmp_path: Path) -> None:
    model, batch = tiny_model(objective="tr"), make_batch(8)
    rows = [{name: batch[name][row] for name in batch if "noise" not in name} for row in range(8)]
    collate = torch.utils.data.default_collate
    trainer = Trainer(model, arguments(tmp_path), eval_dataset=rows, data_collator=collate)
    expected = model.eval()(**batch).loss.item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_accumulation_of_the_stock_trainer_keeps_the_classifiers_loss(tmp_path: Path) -> None:
    rows = []
    for number in range(6):
        ids = [3, 9, 8 + number, 4]
        rows.append({"input_ids": ids, "attention_mask": [1] * 4, "labels": number % 3})
    losses = []
    for steps in (1, 3):
        torch.manual_seed(0)
        config = DAPConfig(tiny_config("bert"), num_labels=3, objective="tr")
        options = {"per_device_train_batch_size": 6 // steps, "max_steps": 1, "logging_steps": 1}
        options["gradient_accumulation_steps"] = steps
        trainer = Trainer(
            DAPForSequenceClassification(config),
            arguments(tmp_path, **options),
            train_dataset=Dataset.from_list(rows),
        )
        losses.append(trainer.train().training_loss)
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
