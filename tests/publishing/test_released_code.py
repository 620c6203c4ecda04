"""Checkpoints of the paper's released code can be used and published."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import load_encoder, save, synthetic_pairs, tiny_config, tiny_tokenizer
from safetensors.torch import save_file
from tiny_models import start_from
from transformers import AutoModel, BertModel, XLMRobertaModel

from dap_transformers.publishing.layout import FolderOptions, build

SENTENCES = [source for source, _ in synthetic_pairs("de", 5)]


@pytest.mark.parametrize(
    ("model_class", "base"), [(BertModel, "bert."), (XLMRobertaModel, "roberta.")]
)
def test_every_command_reads_a_release_and_its_published_form_alike(
    model_class: type, base: str, tmp_path: Path
) -> None:
    config = tiny_config(model_class.config_class.model_type)
    plain = model_class(config, add_pooling_layer=False).eval()
    save(tmp_path / "old", plain.config)
    weights = {f"mlp.dense.{name}": torch.zeros(32) for name in ("weight", "bias")}
    for name, value in plain.state_dict().items():
        weights[base + name] = value
        weights[f"decoder.{base}{name}"] = value.clone()
    save_file(weights, tmp_path / "old/model.safetensors", {"format": "pt"})
    batch = tiny_tokenizer()(SENTENCES, padding=True, return_tensors="pt")
    inputs = (batch["input_ids"], batch["attention_mask"])
    expected = plain(*inputs).last_hidden_state[:, 0].detach().numpy()

    build(tmp_path / "old", tmp_path / "out", FolderOptions(pooling="cls"))
    _, report = AutoModel.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["unexpected_keys"]  # nothing that only training needed
    found = load_encoder(tmp_path / "out").encode(SENTENCES)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    model = start_from(tmp_path / "old", objective="tr", pooling="cls").eval()
    vectors = model.dap(*inputs).pooler_output.detach()
    np.testing.assert_allclose(vectors, expected, atol=1e-5)
