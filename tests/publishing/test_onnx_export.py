"""The exported graph gives the encoder's vectors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, load_encoder, save, synthetic_pairs, tiny_tokenizer
from tiny_models import tiny_model

from dap_transformers.publishing.onnx_export import export_onnx

SENTENCES = [source for source, _ in synthetic_pairs("de", 12)] + ["", "ka", "lo " * 100]


@pytest.mark.slow  # an export takes seconds
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_the_graph_gives_the_models_vectors_with_length_1(pooling: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    # XLM-R's positions begin after the padding id.
    model = tiny_model("xlm-roberta", objective="tr", pooling=pooling)
    folder = save(tmp_path / "dap", model)
    path = export_onnx(folder)
    assert path == folder / "onnx" / "model.onnx"
    assert [file.name for file in path.parent.iterdir()] == ["model.onnx"]
    assert str(REPOSITORY).encode() not in path.read_bytes()

    encoder = load_encoder(folder)
    expected = encoder.encode(SENTENCES, normalize=True)
    assert np.abs(expected - expected[0]).max() > 0.1
    session = onnxruntime.InferenceSession(path)
    options = {"padding": True, "truncation": True, "max_length": encoder.max_seq_length}
    for batch in (SENTENCES, SENTENCES[:1]):
        inputs = tiny_tokenizer()(batch, **options, return_tensors="np")
        states, vectors = session.run(
            None, {name: inputs[name] for name in ("input_ids", "attention_mask")}
        )
        np.testing.assert_allclose(vectors, expected[: len(batch)], atol=1e-5)
    theirs = encoder.backbone(torch.from_numpy(inputs["input_ids"])).last_hidden_state.detach()
    np.testing.assert_allclose(states, theirs, atol=1e-4)
