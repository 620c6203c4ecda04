"""The model: what must not matter to it, and every way of making and running it."""

import itertools
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from tiny_models import (
    ALL,
    COMBINATIONS,
    ENCODERS,
    MASK,
    RELEASED,
    gradients,
    make_batch,
    padded_left,
    require_step,
    step,
    tiny_model,
    widen,
    with_negatives,
)
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import losses_dap
from modeling_dap import (
    DAPConfig,
    DAPForPreTraining,
    DAPForPreTrainingOutput,
    DAPForSequenceClassification,
    DAPModel,
)
from states_dap import POOLINGS, layer_stack

# ------------------------------------------------------------------------- what must not matter

BOTH = {"rtl_direction": "both", "rtl_languages": ["de"]}
OF_EVERY_ENCODER = [{"objective": ALL}, RELEASED | {"rtl_ratio": 0.5}]
MORE = [{"objective": name} for name in COMBINATIONS if name != ALL]
MORE += [{"objective": "tr+tlm", "tr_hard_negatives": 0.7, "pooling": name} for name in POOLINGS]
MORE.append(RELEASED)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [*itertools.product(ENCODERS, OF_EVERY_ENCODER), *(("bert", options) for options in MORE)],
    ids=str,
)
def test_padding_and_order_change_nothing(model_type: str, options: dict) -> None:
    """Every parameter gets a gradient, else `gradients` would fail."""
    model = tiny_model(model_type, tlm_probability=0.5, mlm_probability=0.5, **options)
    batch = with_negatives(make_batch()) if "tr_hard_negatives" in options else make_batch()
    expected = step(model, batch)
    order = torch.randperm(6)
    reordered = {key: value[order] for key, value in batch.items()}
    for changed in (widen(batch, 5), reordered, padded_left(batch)):
        require_step(expected, model, changed)


@pytest.mark.parametrize(
    ("options", "whole_sides"),
    [
        ({"objective": "tr"}, []),
        ({"objective": "tr", "pooling": "mean"}, ["source", "target"]),
        ({"objective": "tr+rtl"}, ["source"]),
        ({"rtl_direction": "target-to-source", "rtl_languages": ["de"]}, ["target"]),
        (BOTH, ["source", "target"]),
        ({"rtl_ratio": 0.5}, ["source", "target"]),
    ],
    ids=str,
)
def test_the_last_layer_computes_the_tokens_that_are_read(options: dict, whole_sides: list) -> None:
    model, batch, found = tiny_model(**options), make_batch(), []
    last = layer_stack(model.dap.encoder)[1][-1].intermediate
    last.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0].shape[1]))
    model(**batch, language_ids=torch.zeros(6, dtype=torch.long))
    expected = 0
    for side in ("source", "target"):
        expected += int(batch[f"{side}_attention_mask"].sum()) if side in whole_sides else 6
    assert found == [expected]


@pytest.mark.parametrize(
    ("model_type", "objective", "layers"),
    [
        *zip(ENCODERS, itertools.repeat(ALL), (1, 2, 3, 2, 1, 3)),
        *itertools.product(("gemma3_text", "llama", "qwen3"), ["tr+rtl"], [2]),
    ],
)
def test_padded_rows_equal_packed_rows(model_type: str, objective: str, layers: int) -> None:
    options = {"objective": objective, "rtl_layers": layers}
    if model_type not in ENCODERS:
        options["pooling"] = "lasttoken"
    model, batch = tiny_model(model_type, **options), make_batch()
    expected = step(model, batch)  # packed, where the encoder's attention takes it
    model.set_attn_implementation("eager")
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    assert {part.config._attn_implementation for part in parts} == {"eager"}
    require_step(expected, model, batch)


def test_labels_are_counted_exactly_in_half_precision() -> None:
    model, batch = tiny_model().to(torch.bfloat16), make_batch(pairs=63)
    batch["target_attention_mask"][0, 3:] = 0
    labels = int(batch["target_attention_mask"][:, 1:].sum())
    assert labels != int(torch.tensor(labels).bfloat16())
    assert model(**batch).ignored_tokens.item() == 0


# --------------------------------------------------------------------------- ways of running it


@pytest.mark.parametrize("objective", COMBINATIONS)
def test_bf16_autocast_hands_the_losses_float32(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, seen = tiny_model(objective=objective), make_batch(), set()

    def spied(function: Callable) -> Callable:
        def spy(*values: Tensor, **how: str) -> Tensor:
            seen.update(value.dtype for value in values[:3] if value.is_floating_point())
            return function(*values, **how)

        return spy

    chunked = losses_dap._VocabularyCrossEntropy
    monkeypatch.setattr(losses_dap.F, "cross_entropy", spied(F.cross_entropy))
    monkeypatch.setattr(chunked, "apply", spied(chunked.apply))
    expected = model(**batch).loss.item()
    with torch.autocast("cpu", torch.bfloat16):
        out = model(**batch)
    # Distillation has no cross entropy.
    assert seen == (set() if objective == "distill" else {torch.float32})
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected, rel=0.1)
    out.loss.backward()
    assert torch.isfinite(gradients(model)).all()


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [(DAPModel, "cls"), (DAPModel, "lasttoken"), (DAPForSequenceClassification, "mean")],
)
def test_an_export_holds_for_other_sentences(kind: type, pooling: str) -> None:
    encoder = tiny_config("xlm-roberta")
    encoder.num_hidden_layers = 1  # an export takes long
    config = DAPConfig(encoder, objective="tr", pooling=pooling, num_labels=3)
    model, batch = kind(config).eval(), make_batch()
    inputs = (batch["source_input_ids"], batch["source_attention_mask"])
    rows = {0: torch.export.Dim("rows", max=99)}
    shapes = {"dynamic_shapes": (rows, rows)}
    exported = torch.export.export(model, inputs, **shapes, strict=False).module()
    some = [values[:3] for values in inputs]
    assert_close(exported(*some).to_tuple(), model(*some, return_dict=False))


def test_what_hangs_on_the_embeddings_takes_part() -> None:
    model, batch = tiny_model(), make_batch()
    plain, embeddings = model(**batch), model.get_input_embeddings()
    embeddings.register_forward_hook(lambda module, given, out: out * 2)
    doubled = model(**batch)
    assert not torch.allclose(doubled.source_embeds, plain.source_embeds)
    own = model.dap(batch["source_input_ids"], batch["source_attention_mask"]).pooler_output
    assert_close(doubled.source_embeds, own, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"objective": "tr"}, {"objective": ALL}, {"rtl_tied": False}])
def test_vocabulary_can_be_resized(options: dict) -> None:
    model, batch = tiny_model(**options), make_batch()
    model.resize_token_embeddings(260)
    batch["target_input_ids"][0, 1] = 255
    assert model.config.vocab_size == model.config.encoder_config.vocab_size == 260
    assert torch.isfinite(model(**batch).loss)


class Operations(TorchDispatchMode):
    """Count torch's operations, without views."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += not function.is_view
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("objective", "most"), [("tr", 1050), ("tr+rtl", 1370)])
def test_a_step_takes_few_operations(objective: str, most: int) -> None:
    config = tiny_config("bert")
    config.num_hidden_layers, config.hidden_dropout_prob = 12, 0.1
    model = DAPForPreTraining(DAPConfig(config, objective=objective, mask_token_id=MASK)).train()
    ids = torch.randint(5, 250, (8, 6))  # rows of equal length: attention is one operation
    batch = {f"{side}_input_ids": ids for side in ("source", "target")}
    batch |= {f"{side}_attention_mask": torch.ones_like(ids) for side in ("source", "target")}
    with Operations() as operations:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
    assert operations.count <= most


def test_a_misspelt_loss_of_the_output_is_an_error() -> None:
    out = DAPForPreTrainingOutput(measures={"tr_loss": torch.tensor(1.0)})
    assert (out.tr_loss, out.rtl_loss) == (1.0, None)
    with pytest.raises(AttributeError, match="rlt_loss"):
        _ = out.rlt_loss


# ---------------------------------------------------------------------------- what is refused


def run_changed(part: str, change: Callable, objective: str = "tr") -> None:
    """Run a model on a batch with hard negatives, the entries of one part changed."""
    batch = with_negatives(make_batch())
    changed = {name: change(value) for name, value in batch.items() if name.startswith(part)}
    tiny_model(objective=objective)(**batch | changed)


def cut_below_the_target_vocabulary() -> None:
    model = tiny_model(objective="tr+bow", target_vocab_size=100)
    model.set_target_vocabulary(list(range(150, 250)))
    model.resize_token_embeddings(200)


def with_targets(objective: str, **more: Any) -> None:
    more |= {"objective": objective, "mask_token_id": MASK, "target_token_ids": [7]}
    DAPForPreTraining.from_scratch(tiny_config("bert"), **more)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: run_changed("target", lambda values: values[:4]), r"\[6, 4, 6\]"),
        (lambda: run_changed("target", lambda values: values[:4], "bow"), r"\[6, 4, 6\]"),
        (lambda: run_changed("negative", lambda values: values[:4]), r"\[6, 6, 4\]"),
        (lambda: run_changed("teacher", lambda _: None, "distill"), "teacher_embeds"),
        (lambda: tiny_model(**BOTH)(**make_batch()), "language_ids"),
        (lambda: tiny_model(objective="tr+rtk"), "there is no rtk, but tr, rtl, tlm, mlm"),
        (lambda: tiny_model(objective="mlm", mask_token_id=None), "mask_token_id"),
        (cut_below_the_target_vocabulary, "id 249: give 250"),
        (lambda: with_targets("mlm"), "1 target tokens .*'mlm'"),
        (lambda: with_targets("tr"), "1 target tokens .*'tr'"),
        (lambda: with_targets("bow", target_vocab_size=2), "1 target tokens .*=2"),
    ],
)
def test_what_is_refused(call: Callable, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


# ------------------------------------------------------------------------------ classification


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("bert", "cls"), ("xlm-roberta", "mean"), ("modernbert", "cls"), ("deberta-v2", "mean")],
)
def test_classification_computes_each_row_as_if_alone(kind: str, pooling: str) -> None:
    config = DAPConfig(tiny_config(kind), num_labels=3, pooling=pooling, objective="tr")
    model, batch = DAPForSequenceClassification(config).double().eval(), make_batch()
    inputs = {name: batch[f"source_{name}"] for name in ("input_ids", "attention_mask")}
    if kind == "bert":
        inputs["token_type_ids"] = (torch.arange(9) > 2).long().expand(6, 9)
    alone = []
    for row, real in enumerate(inputs["attention_mask"].bool()):
        own = {name: value[row : row + 1, real] for name, value in inputs.items()}
        alone.append(model(**own).logits)
    found = []
    for logits in (torch.cat(alone), model(**inputs).logits):
        model.zero_grad()
        logits.logsumexp(1).sum().backward()
        found.append((logits, gradients(model)))
    assert_close(*found)
    labels = torch.arange(6) % 3
    out = model(**inputs, labels=labels, output_hidden_states=True)
    assert_close(out.loss, F.cross_entropy(logits, labels))
    assert len(out.hidden_states) > 2
    if kind == "bert":
        del inputs["token_type_ids"]
        assert not torch.equal(model(**inputs).logits, logits)
        # The Trainer keeps the columns that are named here.
        assert "token_type_ids" in signature(model.forward).parameters
