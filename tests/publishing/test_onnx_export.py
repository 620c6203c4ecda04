"""ONNX files give the encoder's vectors for every batch size, length and padding."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, save, synthetic_pairs, tiny_config
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.onnx import OnnxEncoder
from dap_transformers.encoding.shards import model_fingerprint
from dap_transformers.publishing import onnx_export
from dap_transformers.publishing.onnx_export import export, run
from modeling_dap import DAPForPreTraining

pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
pytest.importorskip("onnxruntime", reason="the extra `onnx` is not installed")

pytestmark = pytest.mark.slow  # an export takes seconds

SENTENCES = [source for source, _ in synthetic_pairs("de", 12)] + ["", "ka", "lo " * 100]


@pytest.fixture(scope="module")
def checkpoint(
    tiny_tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A DAP checkpoint of XLM-R with mean pooling. XLM-R's positions begin after the padding id."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("xlmr")
    config = tiny_config("xlm-roberta", len(tiny_tokenizer))
    config.num_hidden_layers = 1
    plain = AutoModel.from_config(config)
    # an untrained encoder gives all sentences nearly the same vector
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    save(folder / "plain", plain, tiny_tokenizer)
    options = {"objective": "tr", "pooling": "mean", "mask_token_id": 4}
    save(
        folder / "dap",
        DAPForPreTraining.from_encoder(str(folder / "plain"), **options),
        tiny_tokenizer,
    )
    return folder / "dap"


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("onnx")
    files = run([str(checkpoint), str(out), "--int8"])
    assert set(files) == {"onnx/model.onnx", "onnx/model_quantized.onnx"}
    return out


def test_the_graph_gives_the_models_vectors_with_length_1(checkpoint: Path, exported: Path) -> None:
    model = SentenceEncoder.from_pretrained(str(checkpoint))
    graph = OnnxEncoder(exported / "onnx" / "model.onnx")
    assert (graph.pooling, graph.prefix, graph.max_seq_length) == ("mean", "", model.max_seq_length)
    expected = model.encode(SENTENCES).astype(np.float64)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.abs(expected - expected[0]).max() > 0.1
    for token_budget in (1, 40, 4096):
        vectors = graph.encode(SENTENCES, token_budget)
        assert vectors.dtype == np.float32
        assert np.abs(vectors - expected).max() < 1e-5
    for ours, theirs in zip(
        graph.encode_tokens(SENTENCES), model.encode_tokens(SENTENCES), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_the_tokenizer_files_tell_other_clients_where_to_cut(
    checkpoint: Path, exported: Path
) -> None:
    session = OnnxEncoder(exported / "onnx" / "model.onnx").model.session
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    settings = json.loads((exported / "tokenizer_config.json").read_text())
    length, closing = settings["model_max_length"], tokenizer.token_to_id(settings["sep_token"])
    expected = SentenceEncoder.from_pretrained(str(checkpoint)).encode(SENTENCES)
    assert len(tokenizer.encode(SENTENCES[-1]).ids) > length
    for text, vector in zip(SENTENCES, expected, strict=True):
        ids = tokenizer.encode(text).ids[:length]
        ids[-1] = closing  # Transformers.js cuts it off, and examples/serve.md puts it back
        feed = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64)}
        found = session.run(["sentence_embedding"], feed)[0][0]
        np.testing.assert_allclose(found, vector / np.linalg.norm(vector), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (1, 78), (9, 4)])
@pytest.mark.parametrize("left", [False, True])
def test_both_outputs_are_right_for_any_batch_and_padding(
    checkpoint: Path, exported: Path, shape: tuple[int, int], left: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, shape[1] + 1, (shape[0], 1), generator=generator)
    mask = (torch.arange(shape[1]) < lengths).long()
    mask = mask.flip(1) if left else mask
    ids = torch.randint(5, 200, shape, generator=generator).where(mask == 1, 1)
    session = OnnxEncoder(exported / "onnx" / "model.onnx").model.session
    states, vectors = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
    with torch.no_grad():
        out = AutoModel.from_pretrained(checkpoint)(ids, mask)
    real = mask.bool().numpy()
    np.testing.assert_allclose(states[real], out.last_hidden_state.numpy()[real], atol=1e-4)
    np.testing.assert_allclose(
        vectors, torch.nn.functional.normalize(out.pooler_output).numpy(), atol=1e-5
    )


def test_int8_is_smaller_and_close(exported: Path) -> None:
    paths = [exported / "onnx" / name for name in ("model.onnx", "model_quantized.onnx")]
    exact, coarse = (OnnxEncoder(path).encode(SENTENCES) for path in paths)
    cosines = (exact * coarse).sum(1)
    assert cosines.min() > 0.95
    assert cosines.max() < 1 - 1e-6
    assert paths[1].stat().st_size < paths[0].stat().st_size
    assert len({model_fingerprint(OnnxEncoder(path)) for path in paths}) == 2


def test_large_weights_are_written_to_a_second_file(exported: Path, tmp_path: Path) -> None:
    whole = exported / "onnx" / "model.onnx"
    large = tmp_path / "onnx" / "model.onnx"
    large.parent.mkdir()
    onnx_export._save(pytest.importorskip("onnx_ir").load(whole), large, onnx_export.ONE_FILE + 1)
    shutil.copy(exported / "tokenizer.json", tmp_path)
    shutil.copy(exported / "tokenizer_config.json", tmp_path)
    encoders = OnnxEncoder(whole), OnnxEncoder(large)
    np.testing.assert_array_equal(*(encoder.encode(SENTENCES) for encoder in encoders))
    weights = large.with_name("model.onnx_data")
    assert large.stat().st_size < whole.stat().st_size - 50_000
    onnx_export.quantize(large, large.with_name("model_quantized.onnx"))
    assert OnnxEncoder(large.with_name("model_quantized.onnx")).encode(SENTENCES).shape == (
        len(SENTENCES),
        32,
    )
    before = model_fingerprint(encoders[1])
    data = weights.read_bytes()
    weights.write_bytes(data[:-4] + b"\0\0\0\1")
    assert model_fingerprint(OnnxEncoder(large)) != before


def test_the_folder_holds_what_a_server_needs_and_no_path_of_this_machine(exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {"onnx", "config.json", "tokenizer.json", "tokenizer_config.json"}
    assert AutoConfig.from_pretrained(exported).model_type == "xlm-roberta"
    for path in (exported / "onnx").iterdir():
        content = path.read_bytes()
        assert b"layer.0" in content  # weights keep their names
        assert all(
            part not in content for part in (b"site-packages", b".py", str(REPOSITORY).encode())
        )


@pytest.fixture
def same_graph(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Export the graph of the checkpoint, whatever the model is."""
    copy = lambda encoder, path: shutil.copy(exported / "onnx" / path.name, path)  # noqa: E731
    monkeypatch.setattr(onnx_export, "_write_graph", copy)


@pytest.mark.usefixtures("same_graph")
def test_a_graph_that_differs_is_not_written(checkpoint: Path, tmp_path: Path) -> None:
    encoder = SentenceEncoder.from_pretrained(str(checkpoint))
    assert export(encoder, tmp_path / "same").is_file()
    with torch.no_grad():
        next(encoder.model.encoder.encoder.parameters()).add_(0.5)
    with pytest.raises(
        ValueError, match=r"model.onnx differ from the checkpoint's by .* above 0.0001"
    ):
        export(encoder, tmp_path / "other")
    assert not list((tmp_path / "other").rglob("*"))


@pytest.mark.usefixtures("same_graph")
def test_export_into_the_checkpoint_adds_only_onnx_files(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "own")
    (tmp_path / "own" / "onnx").mkdir()
    (tmp_path / "own" / "onnx" / "model_quantized.onnx").write_text("of an earlier model")
    before = {path: path.read_bytes() for path in (tmp_path / "own").iterdir() if path.is_file()}
    assert export(tmp_path / "own") == tmp_path / "own" / "onnx" / "model.onnx"
    assert {
        path: path.read_bytes() for path in (tmp_path / "own").iterdir() if path.is_file()
    } == before
    assert [path.name for path in (tmp_path / "own" / "onnx").iterdir()] == ["model.onnx"]
    with pytest.raises(ValueError, match="is not empty: give a new folder"):
        export(checkpoint, tmp_path / "own")


def test_arguments_that_do_not_fit_are_refused(
    checkpoint: Path, exported: Path, tmp_path: Path
) -> None:
    with pytest.raises(FileNotFoundError, match="absent.onnx: no such file"):
        OnnxEncoder(tmp_path / "absent.onnx")
    with pytest.raises(ValueError, match="max_seq_length=79 is above the model's 78 positions"):
        OnnxEncoder(exported / "onnx" / "model.onnx", max_seq_length=79)
    with pytest.raises(ValueError, match="bf16=True: export an encoder in float32"):
        export(SentenceEncoder.from_pretrained(str(checkpoint), bf16=True), tmp_path / "bf16")
    with pytest.raises(ValueError, match="layer=1: a graph uses the last layer"):
        export(SentenceEncoder.from_pretrained(str(checkpoint), layer=1), tmp_path / "layer")
    with pytest.raises(ValueError, match="output is needed"):
        export(SentenceEncoder.from_pretrained(str(checkpoint)))
    assert not list(tmp_path.iterdir())
