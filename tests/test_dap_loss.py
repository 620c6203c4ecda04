"""`DAPLoss` in sentence-transformers' trainer against `DAPForPreTraining` by itself."""

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import save, save_with_modules, synthetic_pairs, tiny_config
from datasets import Dataset
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MatryoshkaLoss
from sentence_transformers.models import Dense, Normalize, Pooling, Transformer
from tiny_models import start_from
from torch.testing import assert_close
from transformers import AutoModel

from dap_transformers.dap_loss import HEADS_FILE, DAPLoss, KeepHeads
from modeling_dap import DAPForPreTraining
from modules_dap import build_modules

PAIRS = synthetic_pairs("de", 6)
COLUMNS = dict(zip(("anchor", "positive"), zip(*PAIRS)))


def library_model(
    folder: Path, pooling: str = "mean", *more: torch.nn.Module
) -> SentenceTransformer:
    return SentenceTransformer(
        modules=[Transformer(str(folder)), Pooling(32, pooling), *more], device="cpu"
    )


def trainer_of(
    loss: DAPLoss, columns: dict, folder: Path, **options: Any
) -> SentenceTransformerTrainer:
    options |= {"report_to": [], "use_cpu": True}
    arguments = SentenceTransformerTrainingArguments(str(folder), **options)
    return SentenceTransformerTrainer(loss.model, arguments, Dataset.from_dict(columns), loss=loss)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    weights = dict(model.named_parameters())
    return {name: each.grad for name, each in weights.items() if each.grad is not None}


@pytest.mark.parametrize(
    ("objective", "pooling", "bf16", "padding"),
    [
        ("tr", "lasttoken", False, "right"),
        ("tr+rtl", "mean", False, "left"),
        ("tr+rtl", "mean", True, "right"),
        ("tr+rtl+tlm+bow", "cls", False, "right"),
    ],
)
def test_gradients_are_those_of_the_model_by_itself(
    objective: str,
    pooling: str,
    bf16: bool,
    padding: str,
    tiny_bert_dir: Path,
    tmp_path: Path,
) -> None:
    fields = {}
    if "rtl" in objective:
        # Random numbers that choose masked tokens would be drawn for other places on the left.
        fields = {"rtl_weight": 0.5, "rtl_ratio": 0.7 if padding == "right" else 1.0}
    # float64, because the vectors of a random encoder are nearly equal, and their small differences
    # would be lost in rounding.
    dtype = torch.float32 if bf16 else torch.float64
    heads = start_from(tiny_bert_dir, objective=objective, **fields)
    alone = copy.deepcopy(heads.to(dtype)).train()
    alone.config.pooling = pooling
    alone.dap.after = build_modules([{"type": "Normalize"}])
    model = library_model(tiny_bert_dir, pooling, Normalize()).to(dtype)
    model.max_seq_length = 9
    model.tokenizer.padding_side = padding
    loss = DAPLoss(model, heads.eval())
    sources, targets = zip(*PAIRS)
    negatives = (*targets[1:], "no copy of these words")
    columns = {"source": sources, "target": targets, "negative": negatives}
    trainer = trainer_of(loss, columns, tmp_path, per_device_train_batch_size=6, bf16=bf16)
    batch = next(iter(trainer.get_train_dataloader()))
    torch.manual_seed(3)  # of the masks
    total = trainer.compute_loss(model.train(), dict(batch))
    total.backward()

    tokens = {name: batch[name] for name in batch if name.endswith(("_input_ids", "_mask"))}
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        expected = alone(**tokens).loss
    expected.backward()
    assert total.item() == pytest.approx(expected.item(), rel=1e-6)
    near = {"rtol": 1e-4, "atol": 1e-6 if bf16 else 1e-9}
    assert_close(gradients_of(loss.dap), gradients_of(alone), **near)

    groups = trainer.create_optimizer().param_groups
    learned = {id(parameter) for group in groups for parameter in group["params"]}
    assert {id(parameter) for parameter in loss.dap.parameters()} <= learned
    # This configuration is saved with these weights.
    assert loss.dap.config.encoder_config is model[0].auto_model.config


def test_a_checkpoint_of_dap_trains_as_by_itself(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", AutoModel.from_config(tiny_config("xlm-roberta")))
    library = save_with_modules(tmp_path / "library", plain)
    folder = save(tmp_path / "dap", start_from(library, objective="tr+bow"))
    alone = DAPForPreTraining.from_pretrained(folder).eval()
    model = SentenceTransformer(str(folder), device="cpu").eval()
    loss = DAPLoss(model, DAPForPreTraining.from_pretrained(folder))
    columns = [model.preprocess(list(side)) for side in zip(*PAIRS)]
    tokens = {}
    for side, column in zip(("source", "target"), columns):
        for name in ("input_ids", "attention_mask"):
            tokens[f"{side}_{name}"] = column[name]
    assert_close(sum(loss(columns, None).values()), alone(**tokens).loss)
    assert model[0].auto_model.after[0].linear is model[2].linear  # both are saved

    # Half of the precision is not enough for vectors of length 1, so the heads get float32.
    half = DAPLoss(model.to(torch.bfloat16), DAPForPreTraining.from_pretrained(folder))
    assert_close(sum(half(columns, None).values()), alone(**tokens).loss, rtol=0.02, atol=0)


def test_what_the_loss_cannot_train_is_refused(tiny_bert_dir: Path) -> None:
    heads = start_from(tiny_bert_dir, objective="tr")
    without_prompt = library_model(tiny_bert_dir)
    without_prompt[1].include_prompt = False
    residual = Dense(32, 32, use_residual=True)
    for model, says in (
        (library_model(tiny_bert_dir, "mean", torch.nn.Identity()), "consists of"),
        (without_prompt, "consists of"),
        (library_model(tiny_bert_dir, "mean", residual), "use_residual"),
        (library_model(tiny_bert_dir, "max"), "pooling"),
    ):
        with pytest.raises((ValueError, StrictDataclassError), match=says):
            DAPLoss(model, heads)
    model = library_model(tiny_bert_dir)
    with pytest.raises(ValueError, match="train-dap"):
        DAPLoss(model, start_from(tiny_bert_dir, objective="tr+distill"))

    loss = DAPLoss(model, heads)
    features = {"input_ids": torch.tensor([[0, 5, 2]]), "attention_mask": torch.ones(1, 3).long()}
    for columns in (1, 4):
        with pytest.raises(ValueError, match="columns of text"):
            loss([features] * columns, None)
    nested = MatryoshkaLoss(model, loss, [32, 16])
    with pytest.raises(ValueError, match="tr_matryoshka_dims"):
        nested([features, features], None)


def trainer_that_keeps_heads(
    encoder: Path, folder: Path, **options: Any
) -> SentenceTransformerTrainer:
    loss = DAPLoss(library_model(encoder), start_from(encoder))
    trainer = trainer_of(loss, COLUMNS, folder, **options)
    trainer.add_callback(KeepHeads(loss))
    return trainer


def test_a_run_resumes_with_its_heads_or_not_at_all(tiny_bert_dir: Path, tmp_path: Path) -> None:
    def make_trainer(folder: str) -> SentenceTransformerTrainer:
        options = {"per_device_train_batch_size": 2, "lr_scheduler_type": "constant"}
        options |= {"max_steps": 3, "save_steps": 2}
        return trainer_that_keeps_heads(tiny_bert_dir, tmp_path / folder, **options)

    whole = make_trainer("out")
    whole.train()
    expected = whole.loss.dap.state_dict()
    checkpoint = str(tmp_path / "out" / "checkpoint-2")

    resumed = make_trainer("out")
    resumed.train(resume_from_checkpoint=checkpoint)
    assert_close(resumed.loss.dap.state_dict(), expected)
    with pytest.raises(ValueError, match="is missing: resume from a checkpoint of the output"):
        make_trainer("other").train(resume_from_checkpoint=checkpoint)
    shutil.copytree(tmp_path / "out" / "checkpoint-3", tmp_path / "another" / "checkpoint-2")
    with pytest.raises(ValueError, match="is of another encoder"):
        make_trainer("another").train(resume_from_checkpoint=checkpoint)

    two = make_trainer("out")
    DAPLoss(two.loss.model, start_from(tiny_bert_dir, objective="tr"))  # has no heads
    two.train()
    DAPLoss(two.loss.model, start_from(tiny_bert_dir))
    with pytest.raises(ValueError, match="give one DAPLoss"):
        two.train()

    # Encoder and heads of different steps are neither trained nor saved.
    without = make_trainer("out")
    without.remove_callback(KeepHeads)
    with pytest.raises(ValueError, match="not the heads of this loss"):
        without.train(resume_from_checkpoint=checkpoint)
    with pytest.raises(ValueError, match="not the heads of this loss"):
        without.loss.dap.save_pretrained(tmp_path / "saved")
    without.loss.model.save_pretrained(str(tmp_path / "saved"))  # only the encoder
    assert not (tmp_path / "saved" / HEADS_FILE).exists()


def test_the_best_model_has_its_own_heads(tiny_bert_dir: Path, tmp_path: Path) -> None:
    options = {"save_steps": 1, "max_steps": 2, "metric_for_best_model": "step"}
    options["greater_is_better"] = False
    trainer = trainer_that_keeps_heads(tiny_bert_dir, tmp_path, **options)
    trainer.args.eval_strategy = trainer.args.save_strategy
    trainer.args.eval_steps = 1
    trainer.args.load_best_model_at_end = True
    trainer.evaluate = lambda *_, **__: {"eval_step": trainer.state.global_step}
    trainer.train()
    best = tmp_path / "checkpoint-1"
    assert trainer.state.best_model_checkpoint == str(best)
    loss = trainer.loss
    assert_close(loss.head_weights(), load_file(best / HEADS_FILE))
    encoder = SentenceTransformer(str(best), device="cpu")[0].auto_model
    assert_close(loss.dap.dap.encoder.state_dict(), encoder.state_dict())
