"""Checkpoints of the paper's released code: usable as they are, and what the import adds and leaves out."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import synthetic_pairs, tiny_config
from safetensors.torch import save_file
from transformers import AutoModel, BertModel, PreTrainedTokenizerFast, XLMRobertaModel

from dap.encoding.encoder import SentenceEncoder
from dap.publishing import import_release
from dap.publishing.folder import Options, build
from modeling_dap import DAPForPreTraining

SENTENCES = [source for source, _ in synthetic_pairs("de", 5)]
CLASSES = {"bert": BertModel, "xlm-roberta": XLMRobertaModel}


def released(folder: Path, tokenizer: PreTrainedTokenizerFast, model_type: str, form: str) -> np.ndarray:
    """A checkpoint as the released code saves it: "plain", with a "pooler", or in "training" with all its heads.

    Gives the first tokens' last states (N, D), the sentence vectors of that code.
    """
    torch.manual_seed(0)
    model = CLASSES[model_type](tiny_config(model_type, len(tokenizer)), add_pooling_layer=form == "pooler").eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    state = model.state_dict()
    if form == "training":
        base = {"bert": "bert.", "xlm-roberta": "roberta."}[model_type]
        heads = {f"mlp.dense.{name}": torch.zeros(32) for name in ("weight", "bias")}
        heads |= {f"decoder.{base}{name}": value.clone() for name, value in state.items()}
        state = {base + name: value for name, value in state.items()} | heads
    save_file(
        {name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        return model(batch["input_ids"], batch["attention_mask"]).last_hidden_state[:, 0].numpy()


@pytest.mark.parametrize("model_type", CLASSES)
@pytest.mark.parametrize("form", ["plain", "pooler", "training"])
def test_import_keeps_the_vectors(
    model_type: str, form: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = released(tmp_path / "old", tiny_tokenizer, model_type, form)
    published, dropped = import_release.import_release(str(tmp_path / "old"), tmp_path / "out")
    assert published.pooling == "cls"
    size = len(AutoModel.from_pretrained(tmp_path / "out", add_pooling_layer=False).state_dict())
    assert dropped == {"plain": {}, "pooler": {"pooler": 2}, "training": {"decoder": size, "mlp": 2}}[form]
    imported = SentenceEncoder.from_pretrained(str(tmp_path / "out"))
    np.testing.assert_allclose(imported.encode(SENTENCES), expected, atol=1e-5)
    start = DAPForPreTraining.from_encoder(str(tmp_path / "out"), objective="tr")
    assert start.config.encoder_config.model_type == model_type


@pytest.mark.parametrize("form", ["plain", "pooler", "training"])
def test_every_command_reads_a_release_as_it_is(
    form: str, tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast
) -> None:
    expected = released(tmp_path, tiny_tokenizer, "xlm-roberta", form)
    encoder = SentenceEncoder.from_pretrained(str(tmp_path), pooling="cls")
    np.testing.assert_allclose(encoder.encode(SENTENCES), expected, atol=1e-5)
    batch = tiny_tokenizer(SENTENCES, padding=True, return_tensors="pt")
    model = DAPForPreTraining.from_encoder(str(tmp_path), objective="tr").eval()
    with torch.no_grad():
        vectors = model.dap(batch["input_ids"], batch["attention_mask"]).pooler_output
    np.testing.assert_allclose(vectors.numpy(), expected, atol=1e-5)


def test_command(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, capsys: pytest.CaptureFixture) -> None:
    released(tmp_path / "old", tiny_tokenizer, "bert", "pooler")
    import_release.main([str(tmp_path / "old"), str(tmp_path / "out")])
    assert capsys.readouterr().out == f"{tmp_path}/out: bert, pooling cls; left out: pooler (2 tensors)\n"
    with pytest.raises(SystemExit, match="error: .*out is not empty"):
        import_release.main([str(tmp_path / "old"), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match="error: .*absent: no such folder"):
        import_release.main([str(tmp_path / "absent"), str(tmp_path / "other")])


def test_an_encoder_that_is_not_whole_is_refused(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    released(tmp_path / "old", tiny_tokenizer, "bert", "plain")
    save_file({"embeddings.LayerNorm.bias": torch.zeros(32)}, tmp_path / "old/model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \d+ weights of its encoder"):
        build(tmp_path / "old", tmp_path / "out", Options(pooling="cls"))
    assert not (tmp_path / "out").exists()


def test_a_library_folder_keeps_how_it_pools(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast) -> None:
    released(tmp_path / "old", tiny_tokenizer, "bert", "plain")
    build(tmp_path / "old", tmp_path / "mean", Options(pooling="mean", prefix="kaban: "))
    published, _ = import_release.import_release(str(tmp_path / "mean"), tmp_path / "again")
    assert (published.pooling, published.prefix) == ("mean", "kaban: ")


def test_an_unknown_flag_ends_the_command_with_one_message() -> None:
    with pytest.raises(SystemExit, match="error: Some specified arguments are not used.*--foo"):
        import_release.main(["a", "b", "--foo"])
