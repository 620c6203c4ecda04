"""Fetching from a loopback server laid out as OPUS' file store, which behaves as badly as real ones do."""

import io
import re
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dap.prepare import opus
from dap.prepare.opus import TRIES, download, fetch
from dap.text.corpus import find_bitext, load_bitext

PAIRS = {
    "de": ("Guten Tag", "Good day"),
    "pt_br": ("Bom dia", "Good morning"),
    "zh_cn": ("你好", "Hello"),
}


def archive(corpus: str, code: str) -> bytes:
    """A zip as OPUS makes them: a Moses pair, a licence and what else there is."""
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
    """Sends what `STORE` has, or what `server.faults` say: a status, or so many bytes until the line breaks."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Range")))
        body, fault = (
            STORE.get(self.path),
            self.server.faults.pop(0) if self.server.faults else None,
        )
        start = int(re.sub(r"\D", "", self.headers.get("Range", "0"))) if self.server.ranges else 0
        status = 404 if body is None else 416 if start >= len(body) else 206 if start else 200
        self.send_response(fault if fault and fault > 400 else status)
        if body is None or status == 416 or (fault and fault > 400):
            self.send_header("Content-Length", "0")
            return self.end_headers()
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        self.wfile.write(body[start:][:fault])
        return None

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.asked, running.faults, running.ranges = [], [], True
        running.base = f"http://127.0.0.1:{running.server_port}"
        running.url = f"{running.base}/OPUS-Europarl/v8/moses/de-en.txt.zip"
        thread = threading.Thread(
            target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_all_languages_of_the_paper_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(opus, "download", lambda url, path: asked.append(url) or path)
    fetch(["all"], [], tmp_path, "http://a.b")
    paths = {url.removeprefix("http://a.b") for url in asked}
    assert len(asked) == len(paths) == 36 * 6 + 2
    assert {
        "/OPUS-UNPC/v1.0/moses/en-zh.txt.zip",
        "/OPUS-OpenSubtitles/v2018/moses/en-zh_tw.txt.zip",
    } < paths
    assert "/OPUS-OpenSubtitles/v2018/moses/en-zh.txt.zip" not in paths


@pytest.mark.parametrize(
    ("names", "languages", "message"),
    [
        (["Books"], ["de"], "unknown corpora Books; known are Europarl, UNPC"),
        (["all"], ["xx"], "unknown language code 'xx'"),
        (["all"], ["en"], "other side of every pair"),
        (["UNPC", "Tanzil"], ["sw"], "--opus UNPC Tanzil: none of the 2 files is there"),
    ],
)
def test_unknown_names(
    names: list[str],
    languages: list[str],
    message: str,
    server: ThreadingHTTPServer,
    tmp_path: Path,
) -> None:
    with pytest.raises(ValueError, match=message):
        fetch(names, languages, tmp_path, server.base)


def test_what_is_fetched_can_be_read(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    found = fetch(
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
    fetch(["Europarl"], ["de"], tmp_path / "raw", server.base)
    assert len(server.asked) == before


def test_a_connection_that_breaks_again_and_again_is_resumed(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    server.faults = [100, 100, 503, 429]
    assert download(server.url, tmp_path / "a.zip", wait=0.001).read_bytes() == DE
    assert [asked for _, asked in server.asked] == [None, "bytes=100-", *["bytes=200-"] * 3]


def test_a_later_run_goes_on_where_the_first_one_gave_up(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    server.faults = [200] + [500] * (TRIES - 1)
    with pytest.raises(
        ValueError, match=r"5 tries failed, see above; run again to go on with .*a.zip.part"
    ):
        download(server.url, tmp_path / "a.zip", wait=0.001)
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip.part"]
    server.faults = []
    assert download(server.url, tmp_path / "a.zip").read_bytes() == DE
    assert server.asked[-1][1] == "bytes=200-"
    (tmp_path / "a.zip").rename(tmp_path / "b.zip.part")  # whole, but killed before it had its name
    assert download(server.url, tmp_path / "b.zip").read_bytes() == DE
    assert [path.name for path in tmp_path.iterdir()] == ["b.zip"]


def test_a_server_without_ranges_sends_all_again(
    server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    server.faults, server.ranges = [300], False
    assert download(server.url, tmp_path / "a.zip", wait=0.001).read_bytes() == DE


@pytest.mark.parametrize("start", [b"x" * 300, DE[:100] + b"x" * 200])
def test_a_part_of_another_file_is_found_out(
    start: bytes, server: ThreadingHTTPServer, tmp_path: Path
) -> None:
    (tmp_path / "a.zip.part").write_bytes(start)
    with pytest.raises(
        ValueError, match="de-en.txt.zip: a damaged file came .*; run again to fetch it anew"
    ):
        download(server.url, tmp_path / "a.zip")
    assert not list(tmp_path.iterdir())
    assert download(server.url, tmp_path / "a.zip").read_bytes() == DE


def test_without_an_answer_it_says_so(
    server: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opus, "TRIES", 2)
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9/x: 2 tries failed"):
        download("http://127.0.0.1:9/x", tmp_path / "x", wait=0.001)
    with pytest.raises(FileNotFoundError, match="the server has no such file"):
        download(f"{server.base}/absent", tmp_path / "x")
    assert len(server.asked) == 1
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ValueError, match="fetched by curl, which is absent; install it, or put the file in"
    ):
        download(server.url, tmp_path / "x")
