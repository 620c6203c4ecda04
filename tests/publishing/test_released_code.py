"""Checkpoints of the paper's released code can be used and published."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import save, synthetic_pairs, tiny_config
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModel, BertModel, PreTrainedTokenizerFast, XLMRobertaModel

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.publishing.layout import Options, build
from modeling_dap import DAPForPreTraining

SENTENCES = [source for source, _ in synthetic_pairs("de", 5)]
CLASSES = {"bert": BertModel, "xlm-roberta": XLMRobertaModel}


def released(
    folder: Path, tokenizer: PreTrainedTokenizerFast, model_type: str, form: str
) -> np.ndarray:
    """Save a checkpoint as the released code does.

    Args:
        form: "plain", with a "pooler", or "training" with all its heads.

    Returns:
        That code's sentence vectors (N, D), the first tokens' last states.
    """
    torch.manual_seed(0)
    model = CLASSES[model_type](
        tiny_config(model_type, len(tokenizer)), add_pooling_layer=form == "pooler"
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    save(folder, model.config, tokenizer)
    state = model.state_dict()
    if form == "training":
        base = {"bert": "bert.", "xlm-roberta": "roberta."}[model_type]
        heads = {f"mlp.dense.{name}": torch.zeros(32) for name in ("weight", "bias")}
        heads |= {f"decoder.{base}{name}": value.clone() for name, value in state.items()}
        state = {base + name: value for name, value in state.items()} | heads
    save_file(
        {name: value.contiguous() for name, value in state.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(batch["input_ids"], batch["attention_mask"]).last_hidden_state[:, 0].numpy()


@pytest.mark.parametrize(
    ("model_type", "form"),
    [
        ("bert", "plain"),
        ("xlm-roberta", "pooler"),
        ("bert", "training"),
        ("xlm-roberta", "training"),
    ],
)
def test_every_command_reads_a_release_and_its_published_form_alike(
    model_type: str, form: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = released(tmp_path / "old", tiny_tokenizer, model_type, form)
    assert build(tmp_path / "old", tmp_path / "out", Options(pooling="cls")).pooling == "cls"
    left = set(AutoModel.from_pretrained(tmp_path / "out").state_dict())
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as weights:
        assert set(weights.keys()) == left  # nothing that only training needed
    batch = tiny_tokenizer(SENTENCES, padding=True, return_tensors="pt")
    for folder, pooling in (("old", "cls"), ("out", None)):
        encoder = SentenceEncoder.from_pretrained(str(tmp_path / folder), pooling=pooling)
        np.testing.assert_allclose(encoder.encode(SENTENCES), expected, atol=1e-5)
        model = DAPForPreTraining.from_encoder(str(tmp_path / folder), objective="tr").eval()
        with torch.no_grad():
            vectors = model.dap(batch["input_ids"], batch["attention_mask"]).pooler_output
        np.testing.assert_allclose(vectors.numpy(), expected, atol=1e-5)
