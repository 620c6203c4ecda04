"""Corpora are downloaded from a local server that looks like OPUS' and often fails."""

import io
import re
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dap_transformers.errors import UserError
from dap_transformers.prepare import opus
from dap_transformers.prepare.opus import TRIES, corpus_of_archive, download, download_corpora
from dap_transformers.text.corpus import find_bitext, load_bitext

PAIRS = {
    "de": ("Guten Tag", "Good day"),
    "pt_br": ("Bom dia", "Good morning"),
    "zh_cn": ("你好", "Hello"),
}


def archive(corpus: str, code: str) -> bytes:
    """Make a zip archive as OPUS does: a Moses pair, a licence and other files."""
    pair = "-".join(sorted((code, "en")))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened:
        for name in ("README", "LICENSE", f"{corpus}.{pair}.ids", f"{corpus}.{pair}.scores"):
            opened.writestr(name, "not text\n" * 50)
        for side, text in zip((code, "en"), PAIRS[code]):
            opened.writestr(f"{corpus}.{pair}.{side}", f"{text}\n")
    return packed.getvalue()


STORE = {
    "/OPUS-Europarl/v8/moses/de-en.txt.zip": archive("Europarl", "de"),
    "/OPUS-OpenSubtitles/v2018/moses/de-en.txt.zip": archive("OpenSubtitles", "de"),
    "/OPUS-OpenSubtitles/v2018/moses/en-pt_br.txt.zip": archive("OpenSubtitles", "pt_br"),
    "/OPUS-OpenSubtitles/v2018/moses/en-zh_cn.txt.zip": archive("OpenSubtitles", "zh_cn"),
}
DE = STORE["/OPUS-Europarl/v8/moses/de-en.txt.zip"]


class Handler(BaseHTTPRequestHandler):
    """Sends the files of `STORE`, unless `server.faults` says otherwise.

    A fault above 400 is the status to send. A smaller one is the number of bytes to send before the
    connection breaks.
    """

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))
        body = STORE.get(self.path)
        fault = self.server.faults.pop(0) if self.server.faults else None
        start = 0
        if self.server.ranges:
            start = int(re.sub(r"\D", "", self.headers.get("Range", "0")))
        if fault and fault > 400:
            self.refuse(fault)
        elif body is None:
            self.refuse(404)
        elif start >= len(body):
            self.refuse(416)
        else:
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.end_headers()
            self.wfile.write(body[start:][:fault])

    def refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.asked = []
        running.faults = []
        running.ranges = True
        running.base = f"http://127.0.0.1:{running.server_port}"
        running.url = f"{running.base}/OPUS-Europarl/v8/moses/de-en.txt.zip"
        thread = threading.Thread(
            target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_all_corpora_are_asked_for_in_all_languages_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(opus, "download", lambda url, path: asked.append(url))
    download_corpora(["all"], [], tmp_path, "http://a.b")
    paths = {url.removeprefix("http://a.b") for url in asked}
    assert len(asked) == len(paths) == 36 * 6 + 2
    assert {
        "/OPUS-UNPC/v1.0/moses/en-zh.txt.zip",
        "/OPUS-OpenSubtitles/v2018/moses/en-zh_tw.txt.zip",
    } < paths
    assert "/OPUS-OpenSubtitles/v2018/moses/en-zh.txt.zip" not in paths


def test_other_corpora_need_opustools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "opustools", None)  # as if it was not installed
    with pytest.raises(UserError, match="Tatoeba: .*Europarl.*pip install opustools"):
        download_corpora(["Tatoeba"], ["de"], tmp_path, "http://a.b")


@pytest.mark.slow  # the extra `slow` installs opustools
def test_other_corpora_are_found_by_opustools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opustools")
    monkeypatch.setenv("DAP_CACHE", str(tmp_path / "cache"))
    asked = []
    monkeypatch.setattr(opus, "download", lambda url, path: asked.append(url))
    [(path, corpus)] = download_corpora(["Tatoeba"], ["de"], tmp_path, "http://a.b").items()
    assert asked == [f"http://a.b/OPUS-Tatoeba/{corpus.version}/moses/de-en.txt.zip"]
    assert path.name == f"Tatoeba_{corpus.version}.de-en.txt.zip"
    with pytest.raises(UserError, match="--opus Nonsense"):
        download_corpora(["Nonsense"], ["de"], tmp_path, "http://a.b")


@pytest.mark.parametrize(
    ("names", "languages", "named"),
    [
        (["Books"], ["de"], "Books"),
        (["all"], ["xx"], "xx"),
        (["all"], ["en"], "en"),
        (["UNPC", "Tanzil"], ["sw"], "UNPC Tanzil"),
    ],
)
def test_unknown_or_absent_corpora_and_languages_are_refused(
    names: list[str], languages: list[str], named: str, server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        download_corpora(names, languages, tmp_path, server.base)


def test_downloaded_text_can_be_read(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    found = download_corpora(
        ["Europarl", "OpenSubtitles"], ["deu", "pt", "zh"], tmp_path / "raw", f"{server.base}/"
    )
    assert [(path.name, str(corpus)) for path, corpus in found.items()] == [
        ("Europarl_v8.de-en.txt.zip", "Europarl v8"),
        ("OpenSubtitles_v2018.de-en.txt.zip", "OpenSubtitles v2018"),
        ("OpenSubtitles_v2018.en-pt_br.txt.zip", "OpenSubtitles v2018"),
        ("OpenSubtitles_v2018.en-zh_cn.txt.zip", "OpenSubtitles v2018"),
    ]
    assert sorted(found) == sorted((tmp_path / "raw").iterdir())
    data = load_bitext(tmp_path / "raw", cache_dir=tmp_path / "cache")
    read = {language: [tuple(row.values()) for row in rows] for language, rows in data.items()}
    assert read == {"de": [PAIRS["de"]] * 2, "pt": [PAIRS["pt_br"]], "zh": [PAIRS["zh_cn"]]}
    assert (
        find_bitext(tmp_path / "raw")["zh"][0]
        .paths[0]
        .endswith("en-zh_cn.txt.zip/OpenSubtitles.en-zh_cn.zh_cn")
    )
    before = len(server.asked)
    download_corpora(["Europarl"], ["de"], tmp_path / "raw", server.base)
    assert len(server.asked) == before


def test_the_readme_of_an_archive_names_corpus_and_licence(tmp_path: Path) -> None:
    readme = """Corpus Name: Tatoeba
     Package: Tatoeba.de-en in Moses format
     Website: http://opus.nlpl.eu/Tatoeba/corpus/version/v2023-04-12
     Release: v2023-04-12
     License: CC-BY 2.0 FR

This corpus is part of OPUS
"""
    path = tmp_path / "de-en.txt.zip"
    with zipfile.ZipFile(path, "w") as opened:
        opened.writestr("README", readme)
    corpus = corpus_of_archive(path)
    assert str(corpus) == "Tatoeba v2023-04-12"
    assert corpus.licence == "CC-BY 2.0 FR"
    assert corpus.home == "http://opus.nlpl.eu/Tatoeba/corpus/version/v2023-04-12"

    path.write_bytes(DE)  # its README says nothing
    assert corpus_of_archive(path) is None
    path.write_bytes(DE[:100])
    assert corpus_of_archive(path) is None


def test_a_connection_that_breaks_is_resumed(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    server.faults = [100, 100, 503, 429]
    download(server.url, tmp_path / "a.zip", wait=0.001)
    assert (tmp_path / "a.zip").read_bytes() == DE
    assert [asked for _, asked in server.asked] == [None, "bytes=100-", *["bytes=200-"] * 3]


def test_a_later_run_resumes_a_download(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    server.faults = [200] + [500] * (TRIES - 1)
    with pytest.raises(UserError, match=r"a\.zip\.part"):
        download(server.url, tmp_path / "a.zip", wait=0.001)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip.part"]
    server.faults = []
    download(server.url, tmp_path / "a.zip")
    assert (tmp_path / "a.zip").read_bytes() == DE
    assert server.asked[-1][1] == "bytes=200-"


def test_a_complete_part_needs_no_download(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "a.zip.part").write_bytes(DE)  # as after a kill before the renaming
    download(server.url, tmp_path / "a.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]
    assert (tmp_path / "a.zip").read_bytes() == DE


def test_a_server_that_cannot_resume_sends_the_whole_file_again(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    server.faults = [300]
    server.ranges = False
    download(server.url, tmp_path / "a.zip", wait=0.001)
    assert (tmp_path / "a.zip").read_bytes() == DE


def test_an_encrypted_download_is_refused_by_its_address(
    server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = DE.index(b"PK\x01\x02") + 8
    local_flags = 6
    locked = bytearray(DE)
    locked[flags] |= 1
    locked[local_flags] |= 1
    monkeypatch.setitem(STORE, "/OPUS-Europarl/v8/moses/de-en.txt.zip", bytes(locked))
    with pytest.raises(UserError, match="de-en.txt.zip: .*encrypted.*--data"):
        download(server.url, tmp_path / "a.zip")


@pytest.mark.parametrize("start", [b"x" * 300, DE[:100] + b"x" * 200])
def test_a_damaged_download_is_removed(
    start: bytes, server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    (tmp_path / "a.zip.part").write_bytes(start)
    with pytest.raises(UserError, match="de-en.txt.zip"):
        download(server.url, tmp_path / "a.zip")
    assert not list(tmp_path.iterdir())
    download(server.url, tmp_path / "a.zip")
    assert (tmp_path / "a.zip").read_bytes() == DE


def test_absent_servers_and_files_are_told_apart(
    server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opus, "TRIES", 2)
    with pytest.raises(UserError, match=r"127\.0\.0\.1:9/x: 2 tries"):
        download("http://127.0.0.1:9/x", tmp_path / "x", wait=0.001)
    with pytest.raises(FileNotFoundError, match="absent"):
        download(f"{server.base}/absent", tmp_path / "x")
    assert len(server.asked) == 1
