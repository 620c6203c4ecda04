"""The app in examples/: what it finds and aligns, over HTTP and in Chromium where they are; and serve.md's recipes."""

import gzip
import importlib.util
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

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


def test_matches_are_the_sentences_of_highest_cosine(
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


def test_texts_and_queries_that_are_none_are_refused(encoder: SentenceEncoder) -> None:
    with pytest.raises(UserError, match="text 2 has 0 sentences: give 1 to 20,000"):
        app.read_text(encoder, "text 2", " \n", None)
    with pytest.raises(UserError, match="nothing to search"):
        app.search(encoder, [app.read_text(encoder, "text 1", "a", None)], " ")


def test_the_app_answers(tiny_bert_dir: Path) -> None:
    gradio_client = pytest.importorskip("gradio_client")
    pytest.importorskip("gradio")
    encoder = SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean")
    built = app.build(encoder, "tiny")
    _, url, _ = built.launch(prevent_thread_lock=True, quiet=True)
    client = gradio_client.Client(url, verbose=False)
    found, plot = client.predict(
        SOURCE[0], "\n".join(SOURCE), "\n".join(TARGET), None, None, api_name="/search"
    )
    assert found["data"][0] == [1.0, 1, SOURCE[0]]
    assert plot["type"] == "matplotlib"
    with pytest.raises(Exception, match="nothing to search"):
        client.predict("", "a", "b", None, None, api_name="/search")
    built.close()


def test_a_reader_uploads_a_text_and_chooses_a_match(tiny_bert_dir: Path, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or pytest.skip("needs chromium")
    pytest.importorskip("gradio")
    built = app.build(SentenceEncoder.from_pretrained(str(tiny_bert_dir), "mean"), "tiny")
    (tmp_path / "text.txt").write_text("\n".join(SOURCE))
    _, url, _ = built.launch(prevent_thread_lock=True, quiet=True)
    with playwright.sync_playwright() as play:
        page = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page()
        match = partial(page.locator("[data-testid^=cell-]").get_by_text, exact=True)
        page.goto(url)
        for line in "\n".join(app.EXAMPLE).splitlines():  # found as soon as the page is open
            match(line).wait_for()
        page.locator("input[type=file]").first.set_input_files(tmp_path / "text.txt")
        page.get_by_label("Sentence, in any language").fill(SOURCE[3])
        page.get_by_role("button", name="Search").click()
        match(SOURCE[3]).wait_for()
        plot = page.locator("img[src^='data:image/webp']")
        before = plot.get_attribute("src")
        match(app.EXAMPLE[1].splitlines()[0]).click()
        playwright.expect(plot).not_to_have_attribute("src", before)
    built.close()


@pytest.fixture(scope="module")
def published(tiny_bert_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "out-hub"
    build(tiny_bert_dir, folder, Options(pooling="mean", prefix="query: ", max_seq_length=12))
    return folder


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / name).read_text())


def require_same(vectors: object, folder: Path) -> None:
    found, expected = (
        np.asarray(vectors),
        SentenceEncoder.from_pretrained(str(folder)).encode(SOURCE),
    )
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


def test_text_embeddings_inference_finds_what_its_source_reads(published: Path) -> None:
    tokenizer = Tokenizer.from_file(str(published / "tokenizer.json"))
    tokenizer.enable_truncation(read(published, "sentence_bert_config.json")["max_seq_length"])
    prompt = read(published, "config_sentence_transformers.json")["prompts"][
        "text"
    ]  # --default-prompt-name
    pooling, config = read(published, "1_Pooling/config.json"), read(published, "config.json")
    assert (pooling["pooling_mode_cls_token"], pooling["pooling_mode_mean_tokens"]) == (False, True)
    assert (config["model_type"], config["architectures"]) == ("bert", ["BertModel"])
    assert config["position_embedding_type"] == "absolute"  # which vLLM asks for
    encoder, vectors = AutoModel.from_pretrained(published), []
    for text in SOURCE:
        ids = torch.tensor([tokenizer.encode(prompt + text).ids])
        with torch.no_grad():
            vectors.append(encoder(ids).last_hidden_state[0].mean(0).numpy())
    assert max(len(tokenizer.encode(prompt + text).ids) for text in SOURCE) == 12
    require_same(vectors, published)
