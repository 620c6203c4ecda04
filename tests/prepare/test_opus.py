"""Corpora are downloaded from a local server that looks like OPUS' and sometimes fails."""

import io
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dap_transformers.errors import UserError
from dap_transformers.prepare import opus
from dap_transformers.prepare.opus import download, download_corpora
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
    """Sends the files of `STORE`. `server.cut` is the number of bytes that it sends of them."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        body = STORE.get(self.path, b"")
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[: self.server.cut])

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.asked = []
        running.cut = None
        monkeypatch.setattr(opus, "STORE", f"http://127.0.0.1:{running.server_port}")
        options = {"poll_interval": 0.01}
        thread = threading.Thread(target=running.serve_forever, kwargs=options, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_all_corpora_are_asked_for_in_all_languages_of_the_paper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(opus, "download", lambda url, path: asked.append(url))
    download_corpora(["all"], [], tmp_path)
    paths = {url.removeprefix(opus.STORE) for url in asked}
    assert len(asked) == len(paths) == 36 * 6 + 2
    assert "/OPUS-OpenSubtitles/v2018/moses/en-zh_tw.txt.zip" in paths
    assert "/OPUS-OpenSubtitles/v2018/moses/en-zh.txt.zip" not in paths
    with pytest.raises(UserError, match="Books: known are Europarl"):
        download_corpora(["Books"], ["de"], tmp_path)


def test_downloaded_text_can_be_read(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    found = download_corpora(["Europarl", "OpenSubtitles"], ["deu", "pt", "zh"], folder)
    assert [(path.name, str(corpus)) for path, corpus in found.items()] == [
        ("Europarl_v8.de-en.txt.zip", "Europarl v8"),
        ("OpenSubtitles_v2018.de-en.txt.zip", "OpenSubtitles v2018"),
        ("OpenSubtitles_v2018.en-pt_br.txt.zip", "OpenSubtitles v2018"),
        ("OpenSubtitles_v2018.en-zh_cn.txt.zip", "OpenSubtitles v2018"),
    ]
    assert sorted(found) == sorted(folder.iterdir())
    data = load_bitext(folder, cache_dir=tmp_path / "cache")
    read = {language: [tuple(row.values()) for row in rows] for language, rows in data.items()}
    assert read == {"de": [PAIRS["de"]] * 2, "pt": [PAIRS["pt_br"]], "zh": [PAIRS["zh_cn"]]}
    chinese = find_bitext(folder)["zh"][0].paths[0]
    assert chinese.endswith("en-zh_cn.txt.zip/OpenSubtitles.en-zh_cn.zh_cn")
    before = len(server.asked)
    download_corpora(["Europarl"], ["de"], folder)
    assert len(server.asked) == before
    with pytest.raises(UserError, match="UNPC"):
        download_corpora(["UNPC"], ["sw"], folder)


def test_a_file_that_was_cut_off_is_never_taken_for_a_whole_one(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    url = f"{opus.STORE}/OPUS-Europarl/v8/moses/de-en.txt.zip"
    for server.cut in (100, len(DE) - 1):
        with pytest.raises((UserError, OSError)):
            download(url, tmp_path / "a.zip")
        assert not (tmp_path / "a.zip").exists()
    server.cut = None
    download(url, tmp_path / "a.zip")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]
    assert (tmp_path / "a.zip").read_bytes() == DE
