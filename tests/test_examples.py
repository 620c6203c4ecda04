"""The app in examples/, and the recipes of serve.md."""

import gzip
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from conftest import REPOSITORY, synthetic_pairs
from sklearn.metrics.pairwise import cosine_similarity

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.text.formats import BitextFile, read_pairs


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


def test_matches_of_both_texts_come_by_cosine_and_repeated_lines_once(
    encoder: SentenceEncoder, tmp_path: Path
) -> None:
    (tmp_path / "text.gz").write_bytes(gzip.compress("\n".join(["", *SOURCE, SOURCE[1]]).encode()))
    texts = [
        app.read_text(encoder, "a", "not read", str(tmp_path / "text.gz")),
        app.read_text(encoder, "b", "\n".join(TARGET), None),
    ]
    assert [*texts[0].sentences] == [*dict.fromkeys(SOURCE)]
    rows = app.search(encoder, texts, f" {SOURCE[3]} ")
    assert rows[0] == [1.0, 1, SOURCE[3]]
    assert len(rows) == 2 * app.MATCHES
    assert rows == sorted(rows, key=lambda row: -row[0])
    found = {sentence: cosine for cosine, number, sentence in rows if number == 2}
    cosines = cosine_similarity(encoder.encode([SOURCE[3]]), encoder.encode(TARGET))[0]
    assert max(found.values()) == pytest.approx(cosines.max(), abs=1e-3)
    assert found[TARGET[cosines.argmax()]] == max(found.values())


def test_the_picture_has_the_words_of_both_sentences(encoder: SentenceEncoder) -> None:
    html = app.picture(encoder, f" {SOURCE[0]}", TARGET[0])
    words = re.findall(r'dir="auto">(.*?)</th>', html)
    assert words == [*TARGET[0].split(), *SOURCE[0].split()]
    assert "sentence vectors only" in app.picture(SimpleNamespace(), "a", "b")


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Write two texts: repeated and empty lines, quotes, and translations in another order."""
    source = ["", *SOURCE, SOURCE[0], '"a']
    target = [*reversed(TARGET), '"b" c']
    paths = [tmp_path / "a.de", tmp_path / "a.en"]
    for path, sentences in zip(paths, (source, target), strict=True):
        path.write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")
    return [str(path) for path in paths]


def test_mined_pairs_have_their_lines_and_the_threshold_keeps_the_better_ones(
    encoder: SentenceEncoder, files: list[str]
) -> None:
    rows, threshold = app.mine_files(encoder, *files)
    assert rows[-1].score <= threshold <= rows[0].score
    assert 4 < len(rows) <= 13
    lines = [Path(file).read_text().splitlines() for file in files]
    for row in rows:
        assert lines[0][row.source_line - 1] == row.source
        assert lines[1][row.target_line - 1] == row.target

    line, shown, path = app.keep(rows, rows[3].score)
    kept = [row for row in rows if row.score >= rows[3].score]
    assert shown == kept
    assert line.startswith(f"{len(kept)} of {len(rows)} pairs")
    found = read_pairs(BitextFile("de", (path,), "tsv"))
    assert [tuple(pair.values()) for pair in found] == [row[1:3] for row in kept]
