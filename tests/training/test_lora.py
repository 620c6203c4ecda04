"""LoRA: adapters train in the encoder, and everything that is saved is a plain, merged model."""

import shutil
from pathlib import Path

import pytest
import torch
from conftest import assert_equal_weights, built, run, weights
from tiny_models import SHAPE, make_batch
from transformers import AutoModel, Qwen3MoeConfig

from dap_transformers.errors import UserError
from dap_transformers.training.lora import ADAPTERS_FILE, adapter_parameters, add_adapters
from dap_transformers.training.resume import FINISHED
from modeling_dap import DAPForPreTraining

LORA = "--objective tr+rtl --peft_lora_rank 4"


def test_a_stopped_run_resumes_and_only_adapted_layers_and_heads_change(
    flags: str, tiny_bert_dir: Path, tmp_path: Path
) -> None:
    options = (
        "--freeze_word_embeddings --mini_batch_size 8 --bf16 --use_cpu --max_steps 2 "
        "--save_strategy steps --save_steps 1 --eval_strategy steps --eval_steps 1 "
        "--load_best_model_at_end"
    )
    flags += f" {LORA} {options}"
    out = tmp_path / "out"
    run(f"{flags} --output_dir {out}")
    again = tmp_path / "again"
    shutil.copytree(out, again)
    (again / FINISHED).unlink()
    shutil.rmtree(again / "checkpoint-2")
    run(f"{flags} --output_dir {again}")

    # The weights at the end do not depend on the stop, and the best ones are saved.
    for place in (".", "checkpoint-2"):
        assert_equal_weights(out / place, again / place)
    assert not (out / ADAPTERS_FILE).exists()

    # The model loads as any other. Only adapted layers differ from the encoder's.
    model, problems = AutoModel.from_pretrained(out / "checkpoint-2", output_loading_info=True)
    assert not problems["missing_keys"]
    before = weights(tiny_bert_dir)
    after = model.encoder.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    layers = {name.split(".", 3)[-1] for name in changed}
    assert layers == {"attention.self.query.weight", "attention.self.value.weight"}


def test_the_merged_model_computes_what_the_adapted_one_does(flags: str, tmp_path: Path) -> None:
    trainer = built(f"{flags} {LORA} --output_dir {tmp_path}")
    adapters = adapter_parameters(trainer.model.dap.encoder)
    heads = [name for name, _ in trainer.model.named_parameters() if not name.startswith("dap.")]
    learning = {name for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert learning == {*heads, *(f"dap.encoder.{name}" for name in adapters)}

    for parameter in adapters.values():
        torch.nn.init.normal_(parameter, std=0.3)
    trainer.save_model()
    merged = DAPForPreTraining.from_pretrained(tmp_path).eval()
    batch = make_batch()
    with torch.no_grad():
        expected = trainer.model.eval()(**batch).loss
        torch.testing.assert_close(merged(**batch).loss, expected)
        for parameter in adapters.values():
            parameter.zero_()
        assert not torch.isclose(trainer.model(**batch).loss, expected)


def test_experts_are_not_adapted() -> None:
    config = Qwen3MoeConfig(**SHAPE, num_experts=2, moe_intermediate_size=16, head_dim=8)
    with pytest.raises(UserError, match="layers.0.mlp.experts of model_type 'qwen3_moe'"):
        add_adapters(AutoModel.from_config(config), 4)
