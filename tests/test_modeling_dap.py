"""The model: what must not matter to it, and every way of making and running it."""

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
    RELEASED,
    gradients,
    make_batch,
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
from objectives_dap import OBJECTIVES
from states_dap import POOLINGS, layer_stack

pytestmark = pytest.mark.usefixtures("small_groups")


# ----------------------------------------------------------------------------------------- what
# must not matter

OPTIONS = [
    *({"objective": name} for name in COMBINATIONS),
    *(RELEASED, RELEASED | {"rtl_ratio": 0.5}),
    *(
        {"objective": "tr+tlm", "tr_hard_negatives": 0.7, "pooling": pooling}
        for pooling in POOLINGS
    ),
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
    lengths = {side: batch[f"{side}_attention_mask"].sum().item() for side in ("source", "target")}
    assert found == [sum(count if side in whole_sides else 6 for side, count in lengths.items())]


@pytest.mark.parametrize("model_type", ENCODERS)
def test_groups_of_like_length_equal_packed_rows(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch, found = tiny_model(model_type, objective=ALL), make_batch(), []
    model(**batch).loss.backward()  # packed, where the encoder's attention takes it
    found.append(gradients(model))
    model.set_attn_implementation("eager")
    assert {
        part.config._attn_implementation for part in (model.dap.encoder, model.rtl_head.blocks)
    } == {"eager"}
    for tokens in (1, 8, 10**9):
        monkeypatch.setattr(states_dap, "TOKENS_PER_GROUP", tokens)
        model.zero_grad()
        model(**batch).loss.backward()
        found.append(gradients(model))
    for gradient in found[:-1]:
        assert (gradient - found[-1]).norm() < 1e-4 * gradient.norm()


def test_projection_is_for_the_loss_only() -> None:
    plain, projected = (
        tiny_model("bert", objective="tr", projection=kind) for kind in (None, "mlp")
    )
    projected.dap.load_state_dict(plain.dap.state_dict())
    batch = make_batch()
    torch.testing.assert_close(projected(**batch).source_embeds, plain(**batch).source_embeds)
    assert projected(**batch).loss.item() != pytest.approx(plain(**batch).loss.item())


# ----------------------------------------------------------------------------------------- ways
# of running it


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
def test_bf16_autocast_hands_the_losses_float32(
    objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    # Distillation has no cross entropy.
    assert set(seen) == (set() if objective == "distill" else {torch.float32})
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(expected, rel=0.1)
    out.loss.backward()
    assert torch.isfinite(gradients(model)).all()


@pytest.mark.parametrize("objective", COMBINATIONS)
def test_every_parameter_gets_a_gradient(objective: str) -> None:
    for model_type in (
        ENCODERS if objective in OBJECTIVES else ("bert",)
    ):  # several have the parameters of each
        model = tiny_model(model_type, objective=objective)
        model(**make_batch()).loss.backward()
        assert [name for name, value in model.named_parameters() if value.grad is None] == []


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


@pytest.mark.parametrize("objective", ["tr", "bow"])
def test_sources_without_a_target_are_refused(objective: str) -> None:
    model, batch = tiny_model("bert", objective=objective), make_batch()
    batch = {
        name: value[:4] if name.startswith("target") else value for name, value in batch.items()
    }
    with pytest.raises(ValueError, match="6 sources, 4 targets: give pairs"):
        model(**batch)


def test_hard_negatives_without_a_pair_are_refused() -> None:
    model, batch = tiny_model("bert", objective="tr"), make_batch()
    batch["negative_input_ids"] = batch["target_input_ids"][:4]
    batch["negative_attention_mask"] = batch["target_attention_mask"][:4]
    with pytest.raises(ValueError, match="4 hard negatives, 6 pairs"):
        model(**batch)


def test_one_token_of_padding_on_the_left_is_refused() -> None:
    model, batch = tiny_model("bert", objective="tr"), make_batch()
    batch["source_attention_mask"][2, 0] = 0
    with pytest.raises(ValueError, match="padding before a real token"):
        model(**batch)


def test_text_without_sentences_or_tokens_is_refused() -> None:
    model, batch = tiny_model("bert"), make_batch()
    no_pairs = {name: value[:0] for name, value in batch.items()}
    no_tokens = {name: value[:, :0] for name, value in batch.items()}
    for empty in (no_pairs, no_tokens):
        with pytest.raises(ValueError, match=r"shape \((0, 9|6, 0)\): give at least one"):
            model(**empty)
        with pytest.raises(ValueError, match="give at least one"):
            model.dap(empty["source_input_ids"])


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
    config = DAPConfig(
        tiny_config("bert"), objective="tr", output_hidden_states=True, return_dict=False
    )
    outputs = DAPModel(config)(torch.tensor([[0, 7, 2]]))
    assert isinstance(outputs, tuple)
    assert len(outputs[2]) == 4  # embeddings and three layers


@pytest.mark.parametrize(
    "model_type", ["bert", "deberta-v2"]
)  # packed, and in groups of like length
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
    inputs = {
        "input_ids": torch.tensor([[0, 7, 2]]),
        "attention_mask": torch.ones(1, 3, dtype=torch.long),
    }
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


@pytest.mark.parametrize("kind", [DAPModel, DAPForSequenceClassification])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_trace_holds_for_other_sentences(kind: type, pooling: str) -> None:
    config = DAPConfig(
        tiny_config("xlm-roberta"), objective="tr", pooling=pooling, num_labels=3, return_dict=False
    )
    model, batch = kind(config).eval(), make_batch()
    ids, mask = batch["source_input_ids"], batch["source_attention_mask"]
    with torch.no_grad():
        traced = torch.jit.trace(
            model, (ids[5:, :5], torch.ones_like(mask[5:, :5])), strict=False, check_trace=False
        )
        torch.testing.assert_close(traced(ids, mask)[-1], model(ids, mask)[-1])


@pytest.mark.parametrize("kind", [DAPModel, DAPForSequenceClassification])
def test_a_model_is_exported_for_any_batch(kind: type) -> None:
    model, batch = (
        kind(DAPConfig(tiny_config("bert"), objective="tr", num_labels=3)).eval(),
        make_batch(),
    )
    ids, mask = batch["source_input_ids"], batch["source_attention_mask"]
    rows = torch.export.Dim("rows", max=99)
    exported = torch.export.export(
        model, (ids, mask), dynamic_shapes=({0: rows}, {0: rows}), strict=False
    ).module()
    for name, value in model(ids[:3], mask[:3]).items():
        torch.testing.assert_close(exported(ids[:3], mask[:3])[name], value)


def test_what_hangs_on_the_embeddings_takes_part() -> None:
    model, batch = tiny_model(objective="tr+rtl"), make_batch()
    plain, embeddings = model(**batch), model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, given, out: out * 2)
    doubled = model(**batch)
    assert not torch.allclose(doubled.source_embeds, plain.source_embeds)
    own = model.dap(batch["source_input_ids"], batch["source_attention_mask"]).pooler_output
    torch.testing.assert_close(doubled.source_embeds, own, rtol=1e-4, atol=1e-5)
    hook.remove()
    assert torch.equal(model(**batch).loss, plain.loss)


def test_token_embeddings_are_not_cut_below_the_target_vocabulary() -> None:
    model = tiny_model(objective="tr+bow", target_vocab_size=100)
    model.set_target_vocabulary(list(range(150, 250)))
    with pytest.raises(
        ValueError, match="the target vocabulary has id 249: give 250 or more embeddings"
    ):
        model.resize_token_embeddings(200)


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


@pytest.mark.parametrize("pooling", ["cls", "mean"])
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


def test_a_mask_token_must_be_known() -> None:
    with pytest.raises(ValueError, match="mask_token_id=None"):
        DAPForPreTraining(DAPConfig(tiny_config("bert")))


@pytest.mark.parametrize(
    ("kind", "pooling"),
    [("bert", "cls"), ("xlm-roberta", "mean"), ("modernbert", "cls"), ("deberta-v2", "mean")],
)
def test_classification_computes_each_row_as_if_alone(kind: str, pooling: str) -> None:
    torch.manual_seed(0)
    model = DAPForSequenceClassification(
        DAPConfig(tiny_config(kind), num_labels=3, pooling=pooling, objective="tr")
    )
    model = model.double().eval()
    rows = [torch.randint(5, 60, (length,)) for length in (3, 9, 1, 6)]
    types = [(torch.arange(len(row)) > 2).long() for row in rows]
    inputs = [
        {"input_ids": row} | ({"token_type_ids": kinds} if kind == "bert" else {})
        for row, kinds in zip(rows, types)
    ]
    alone = torch.cat(
        [model(**{key: value[None] for key, value in each.items()}).logits for each in inputs]
    )
    alone.logsumexp(1).sum().backward()
    expected = gradients(model)
    batch = {
        key: pad_sequence([each[key] for each in inputs], batch_first=True, padding_value=1)
        for key in inputs[0]
    }
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
    loader = Trainer(
        model=model, args=args, train_dataset=Dataset.from_list(rows)
    ).get_train_dataloader()
    batch = next(iter(loader))
    assert set(batch) == {"input_ids", "token_type_ids", "labels"}
    assert not torch.equal(model.eval()(**batch).logits, model(input_ids=batch["input_ids"]).logits)


def test_the_stock_trainer_evaluates_by_the_loss(tmp_path: Path) -> None:
    model, batch = tiny_model(objective="tr"), make_batch(8)
    rows = [{name: batch[name][row] for name in batch if "noise" not in name} for row in range(8)]
    args = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    found = Trainer(
        model, args, eval_dataset=rows, data_collator=torch.utils.data.default_collate
    ).evaluate()
    assert found["eval_loss"] == pytest.approx(model.eval()(**batch).loss.item(), rel=1e-5)


def test_accumulation_of_the_stock_trainer_keeps_the_classifiers_loss(tmp_path: Path) -> None:
    rows = [
        {"input_ids": [3, 9, 8 + i, 4], "attention_mask": [1] * 4, "labels": i % 3}
        for i in range(6)
    ]
    losses = []
    for steps in (1, 3):
        torch.manual_seed(0)
        model = DAPForSequenceClassification(
            DAPConfig(tiny_config("bert"), num_labels=3, objective="tr")
        )
        batch = {
            "per_device_train_batch_size": 6 // steps,
            "gradient_accumulation_steps": steps,
            "max_steps": 1,
        }
        quiet = {"report_to": "none", "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
        args = TrainingArguments(str(tmp_path), **batch, **quiet, logging_steps=1)
        losses.append(
            Trainer(model, args, train_dataset=Dataset.from_list(rows)).train().training_loss
        )
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_from_scratch_starts_every_objective_with_its_weights(
    model_type: str, tmp_path: Path
) -> None:
    options = {"objective": "mlm", "pooling": "mean", "mask_token_id": MASK}
    made = DAPForPreTraining.from_scratch(tiny_config(model_type), **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    made.save_pretrained(tmp_path)
    batch = make_batch()
    for objective in ("tr", "tr+tlm", "tr+rtl") if model_type == "bert" else ("tr+rtl",):
        model = DAPForPreTraining.from_encoder(str(tmp_path), objective=objective)
        assert (model.config.objective, model.config.pooling) == (objective, "mean")
        shared = {
            name: value for name, value in made.state_dict().items() if name in model.state_dict()
        }
        assert len(shared) == len(made.dap.state_dict()) + len(
            made.prediction_head.state_dict()
        ) * (objective != "tr")
        assert all(torch.equal(model.state_dict()[name], value) for name, value in shared.items())
        assert torch.isfinite(model(**batch).loss)
    assert DAPForPreTraining.from_encoder(str(tmp_path), pooling="cls").config.pooling == "cls"


def test_a_misspelt_loss_of_the_output_is_an_error() -> None:
    out = DAPForPreTrainingOutput(measures={"tr_loss": torch.tensor(1.0)})
    assert (out.tr_loss, out.rtl_loss) == (1.0, None)
    with pytest.raises(AttributeError, match="rlt_loss"):
        _ = out.rlt_loss
