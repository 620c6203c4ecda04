"""The app in examples/: what it finds and aligns, and the app itself over HTTP where gradio is installed."""

import gzip
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import REPOSITORY, synthetic_pairs

from dap.encoding import SentenceEncoder
from dap.errors import UserError
from dap.search import align_tokens


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


def test_matches_are_the_sentences_of_highest_cosine(encoder: SentenceEncoder, tmp_path: Path) -> None:
    (tmp_path / "text.gz").write_bytes(gzip.compress("\n".join(["", *SOURCE, SOURCE[1]]).encode()))
    texts = [
        app.read_text(encoder, "a", "not read", str(tmp_path / "text.gz")),
        app.read_text(encoder, "b", "\n".join(TARGET), None),
    ]
    assert [text.sentences for text in texts] == [list(dict.fromkeys(SOURCE)), list(dict.fromkeys(TARGET))]
    rows = app.search(encoder, texts, f" {SOURCE[3]} ")
    assert rows[0] == [1.0, 1, SOURCE[3]]
    assert len(rows) == 2 * app.MATCHES
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), reverse=True)
    vector, others = encoder.encode([SOURCE[3]])[0], encoder.encode(texts[1].sentences)
    cosines = others @ vector / np.linalg.norm(others, axis=1) / np.linalg.norm(vector)
    assert next(row for row in rows if row[1] == 2)[2] == texts[1].sentences[int(cosines.argmax())]


def test_tokens_are_pieces_of_the_sentence_and_aligned(encoder: SentenceEncoder) -> None:
    query, match = SOURCE[0], TARGET[0]
    source, target, links, cosines = app.aligned(encoder, query, match)
    assert "".join(source) == query.replace(" ", "")
    assert cosines.shape == (len(source), len(target))
    assert links.tolist() == align_tokens(*encoder.encode_tokens([query, match]))[0].tolist()


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
    found, plot = client.predict(SOURCE[0], "\n".join(SOURCE), "\n".join(TARGET), None, None, api_name="/search")
    assert found["data"][0] == [1.0, 1, SOURCE[0]]
    assert plot["type"] == "matplotlib"
    with pytest.raises(Exception, match="nothing to search"):
        client.predict("", "a", "b", None, None, api_name="/search")
    built.close()
