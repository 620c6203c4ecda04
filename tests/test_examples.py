"""The app in examples/, and what the servers of serve.md read."""

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, load_encoder, synthetic_pairs
from naive import cosines
from tokenizers import Tokenizer
from transformers import AutoModel
from written import lines_of, read, write

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError
from dap_transformers.files import read_json
from dap_transformers.mining.mine_pairs import MiningOptions, mine_vectors
from dap_transformers.publishing.layout import FolderOptions, build

spec = importlib.util.spec_from_file_location("example_app", REPOSITORY / "examples" / "app.py")
app = sys.modules["example_app"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(app)
SOURCE, TARGET = map(list, zip(*synthetic_pairs("de", 12)))


@pytest.fixture(scope="module")
def encoder(tiny_bert_dir: Path) -> SentenceEncoder:
    return load_encoder(tiny_bert_dir, "mean", "query: ")


def test_matches_of_both_texts_come_by_cosine_and_repeated_lines_once(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    packed = write(tmp_path / "text.gz", "\n".join(["", *SOURCE, SOURCE[1]]))
    texts = [
        app.read_text(encoder, "a", "not read", str(packed)),
        app.read_text(encoder, "b", "\n".join(TARGET), None),
    ]
    assert [*texts[0].sentences] == [*dict.fromkeys(SOURCE)]
    rows = app.search(encoder, texts, f" {SOURCE[3]} ")
    assert rows[0] == [pytest.approx(1.0), 1, SOURCE[3]]
    assert len(rows) == 2 * app.MATCHES
    assert rows == sorted(rows, key=lambda row: -row[0])
    found = [sentence for _, number, sentence in rows if number == 2]
    own = cosines(encoder.encode([SOURCE[3]]), encoder.encode(TARGET))[0]
    assert found == [TARGET[row] for row in (-own).argsort()[: app.MATCHES]]


def test_the_picture_has_the_words_of_both_sentences(encoder: SentenceEncoder) -> None:
    html = app.picture(encoder, f" {SOURCE[0]}", TARGET[0])
    words = re.findall(r'dir="auto">(.*?)</th>', html)
    assert words == [*TARGET[0].split(), *SOURCE[0].split()]


def test_the_chosen_threshold_keeps_the_pairs_that_the_command_keeps(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    shared = [source for source, _ in synthetic_pairs("de", 150, seed=5)]
    source = shared + [source for source, _ in synthetic_pairs("de", 60, seed=6)]
    target = shared + [target for _, target in synthetic_pairs("de", 60, seed=7)]
    lines = ["", *source, shared[0]], target
    files = [write(tmp_path / name, lines_of(side)) for name, side in zip("st", lines)]
    rows, threshold = app.mine_files(encoder, *map(str, files))
    for row in rows:
        assert lines[0][row.source_line - 1] == row.source
        assert lines[1][row.target_line - 1] == row.target

    line, _, path = app.keep(rows, threshold)
    sides = [encoder.encode(text) for text in (source, target)]
    _, candidates, choice = mine_vectors(sides, MiningOptions())
    kept = int((candidates["score"] >= choice.threshold).sum())
    assert line.startswith(f"{kept} of {len(candidates)} pairs")
    assert read(Path(path)) == [row[1:3] for row in rows[:kept]]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda encoder: app.first_lines("text 3", map(str, range(10**12))), "many sentences"),
        (lambda encoder: app.first_lines("text 3", repeat("a" * 99)), "too long"),
        (lambda encoder: app.search(encoder, [None], "a" * 10_001), "sentence is too long"),
        (lambda encoder: app.mine_files(encoder, __file__, os.devnull), "the target"),
    ],
)
def test_what_is_refused(encoder: SentenceEncoder, call: Callable, says: str) -> None:
    with pytest.raises(UserError, match=says):
        call(encoder)


@pytest.mark.slow
def test_the_buttons_search_and_mine(
    encoder: SentenceEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client presses the buttons of the running app."""
    sides = {"a.de": SOURCE, "a.en": TARGET[::-1]}
    files = [str(write(tmp_path / name, lines_of(side))) for name, side in sides.items()]
    monkeypatch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
    gradio_client = pytest.importorskip("gradio_client")
    built = app.build(encoder, "tiny")
    try:
        _, address, _ = built.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1")
        client = gradio_client.Client(address, verbose=False)

        texts = ["\n".join(SOURCE), "\n".join(TARGET), None, None]
        matches, table = client.predict(SOURCE[0], *texts, api_name="/search")
        assert matches["data"][0] == ["1.000", 1, SOURCE[0]]
        (choose,) = [each.fn for each in built.fns.values() if each.name == "choose"]
        second = SimpleNamespace(index=(1, 0))
        words = app.picture(encoder, SOURCE[0], matches["data"][1][2])
        assert choose(SOURCE[0], matches["data"], second) == words != table
        with pytest.raises(gradio_client.exceptions.AppError, match="nothing to search"):
            client.predict("", *texts, api_name="/search")

        uploads = [gradio_client.handle_file(path) for path in files]
        slider, _, mined, download = client.predict(*uploads, api_name="/mine")
        rows, threshold = app.mine_files(encoder, *files)
        assert slider["value"] == threshold
        assert mined["data"] == [list(row) for row in rows if row.score >= threshold]
        assert len(Path(download).read_text().splitlines()) == 1 + len(mined["data"])
    finally:
        built.close()


def test_the_files_that_text_embeddings_inference_reads_give_the_vectors(
    tiny_bert_dir: Path, tmp_path: Path
) -> None:
    published = tmp_path / "out-hub"
    options = FolderOptions(pooling="mean", prefix="query: ", max_seq_length=12)
    build(tiny_bert_dir, published, options)

    def read(name: str) -> dict:
        return read_json(published / name)

    tokenizer = Tokenizer.from_file(str(published / "tokenizer.json"))
    tokenizer.enable_truncation(read("sentence_bert_config.json")["max_seq_length"])
    prompt = read("config_sentence_transformers.json")["prompts"]["text"]  # --default-prompt-name
    pooling, config = read("1_Pooling/config.json"), read("config.json")
    assert (pooling["pooling_mode_cls_token"], pooling["pooling_mode_mean_tokens"]) == (False, True)
    assert (config["model_type"], config["architectures"]) == ("bert", ["BertModel"])
    assert config["position_embedding_type"] == "absolute"  # vLLM needs it
    encoder, vectors = AutoModel.from_pretrained(published), []
    for text in SOURCE:
        ids = torch.tensor([tokenizer.encode(prompt + text).ids])
        with torch.no_grad():
            vectors.append(encoder(ids).last_hidden_state[0].mean(0).numpy())
    assert max(len(tokenizer.encode(prompt + text).ids) for text in SOURCE) == 12
    np.testing.assert_allclose(vectors, load_encoder(published).encode(SOURCE), atol=1e-5)
