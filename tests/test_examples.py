"""The app in examples/, and the recipes of serve.md."""

import gzip
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, synthetic_pairs
from serve_recipes import RECIPES
from tokenizers import Tokenizer
from transformers import AutoModel

from dap.encoding import SentenceEncoder
from dap.errors import UserError
from dap.publishing import Options, build


def load_app() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_app", REPOSITORY / "examples" / "app.py")
    module = sys.modules["example_app"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


app = load_app()
SOURCE, TARGET = (list(side) for side in zip(*synthetic_pairs("de", 12), strict=True))


@pytest.fixture(scope="module", params=["", "query: "])
def encoder(tiny_bert_dir: Path, request: pytest.FixtureRequest) -> SentenceEncoder:
    return SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean", request.param)


def test_matches_are_the_sentences_with_the_highest_cosine(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    (tmp_path / "text.gz").write_bytes(gzip.compress("\n".join(["", *SOURCE, SOURCE[1]]).encode()))
    given = [("a", "not read", str(tmp_path / "text.gz")), ("b", "\n".join(TARGET), None)]
    texts = [app.read_text(encoder, *text) for text in given]
    assert [text.sentences for text in texts] == [
        list(dict.fromkeys(SOURCE)),
        list(dict.fromkeys(TARGET)),
    ]
    rows = app.search(encoder, texts, f" {SOURCE[3]} ")
    assert rows[0] == [1.0, 1, SOURCE[3]]
    assert len(rows) == 2 * app.MATCHES
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True)
    vector, others = encoder.encode([SOURCE[3]])[0], encoder.encode(texts[1].sentences)
    cosines = others @ vector / np.linalg.norm(others, axis=1) / np.linalg.norm(vector)
    assert next(row for row in rows if row[1] == 2)[2] == texts[1].sentences[int(cosines.argmax())]


def test_tokens_of_the_picture_are_pieces_of_the_sentences(encoder: SentenceEncoder) -> None:
    axes = app.picture(encoder, f" {SOURCE[0]}", TARGET[0]).axes[0]
    for labels, sentence in (
        (axes.get_yticklabels(), SOURCE[0]),
        (axes.get_xticklabels(), TARGET[0]),
    ):
        assert "".join(label.get_text() for label in labels) == sentence.replace(" ", "")


def test_empty_texts_and_queries_are_refused(encoder: SentenceEncoder) -> None:
    with pytest.raises(UserError, match="text 2 has 0 sentences"):
        app.read_text(encoder, "text 2", " \n", None)
    with pytest.raises(UserError, match="nothing to search"):
        app.search(encoder, [app.read_text(encoder, "text 1", "a", None)], " ")


def test_the_search_button_finds_and_draws(
    encoder: SentenceEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradio is not installed here, so a stand-in collects what the app gives to it."""

    class Error(Exception):
        pass

    gradio = MagicMock(Error=Error)
    monkeypatch.setitem(sys.modules, "gradio", gradio)
    app.build(encoder, "tiny")
    find, inputs, outputs = gradio.Button.return_value.click.call_args.args
    assert (len(inputs), len(outputs)) == (5, 2)
    rows, figure = find(SOURCE[0], "\n".join(SOURCE), "\n".join(TARGET), None, None)
    assert rows[0] == [1.0, 1, SOURCE[0]]
    assert figure.axes
    choose = gradio.Dataframe.return_value.select.call_args.args[0]
    assert choose(SOURCE[0], rows, SimpleNamespace(index=(1, 0))).axes
    with pytest.raises(Error, match="nothing to search"):
        find("", "a", "b", None, None)


@pytest.fixture(scope="module")
def published(tiny_bert_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "out-hub"
    build(tiny_bert_dir, folder, Options(pooling="mean", prefix="query: ", max_seq_length=12))
    return folder


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def require_same(vectors: object, folder: Path) -> None:
    found = np.asarray(vectors)
    expected = SentenceEncoder.from_pretrained(str(folder)).encode(SOURCE)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    np.testing.assert_allclose((found * expected).sum(1) / lengths, 1, atol=1e-5)


@pytest.mark.parametrize(
    ("client", "package"),
    [
        ("sentence-transformers",) * 2,
        ("vLLM", "vllm"),
        ("infinity", "infinity_emb"),
        ("fastembed", "fastembed"),
    ],
)
def test_recipes_of_the_page_give_the_same_vectors(
    client: str, package: str, published: Path
) -> None:
    code = compile(RECIPES[client], client, "exec")
    pytest.importorskip(package.replace("-", "_"))
    if client == "fastembed":
        pytest.importorskip("dap.publishing.onnx_export").export(published)
    texts = ["query: " + text for text in SOURCE]
    names = {
        "folder": str(published),
        "sentences": SOURCE,
        "texts": texts,
        "pooling": "mean",
        "code": False,
    }
    exec(code, names)
    require_same(names["vectors"], published)


def test_the_files_that_text_embeddings_inference_reads_give_the_vectors(published: Path) -> None:
    tokenizer = Tokenizer.from_file(str(published / "tokenizer.json"))
    tokenizer.enable_truncation(read(published, "sentence_bert_config.json")["max_seq_length"])
    prompts = read(published, "config_sentence_transformers.json")["prompts"]
    prompt = prompts["text"]  # --default-prompt-name
    pooling = read(published, "1_Pooling/config.json")
    config = read(published, "config.json")
    assert (pooling["pooling_mode_cls_token"], pooling["pooling_mode_mean_tokens"]) == (False, True)
    assert (config["model_type"], config["architectures"]) == ("bert", ["BertModel"])
    assert config["position_embedding_type"] == "absolute"  # vLLM needs it
    encoder, vectors = AutoModel.from_pretrained(published), []
    for text in SOURCE:
        ids = torch.tensor([tokenizer.encode(prompt + text).ids])
        with torch.no_grad():
            vectors.append(encoder(ids).last_hidden_state[0].mean(0).numpy())
    assert max(len(tokenizer.encode(prompt + text).ids) for text in SOURCE) == 12
    require_same(vectors, published)
