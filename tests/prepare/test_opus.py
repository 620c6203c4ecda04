"""OPUS' addresses and codes, what it says it has, and fetching from a loopback server laid out as its file store."""

import io
import json
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from dap.languages import TATOEBA_36
from dap.prepare.opus import CORPORA, fetch, file_of, find_files, licences
from dap.text.corpus import find_bitext, load_bitext

PAIRS = {"de": ("Guten Tag", "Good day"), "pt_br": ("Bom dia", "Good morning"), "zh_cn": ("你好", "Hello")}


def archive(corpus: str, code: str) -> bytes:
    """A zip as OPUS makes them: a Moses pair, a licence and what else there is."""
    pair = "-".join(sorted((code, "en")))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as opened:
        for name in ("README", "LICENSE", f"{corpus}.{pair}.ids", f"{corpus}.{pair}.scores"):
            opened.writestr(name, "not text\n")
        for side, text in zip((code, "en"), PAIRS[code]):
            opened.writestr(f"{corpus}.{pair}.{side}", f"{text}\n")
    return packed.getvalue()


STORE = {
    "/OPUS-Europarl/v8/moses/de-en.txt.zip": archive("Europarl", "de"),
    "/OPUS-OpenSubtitles/v2018/moses/de-en.txt.zip": archive("OpenSubtitles", "de"),
    "/OPUS-OpenSubtitles/v2018/moses/en-pt_br.txt.zip": archive("OpenSubtitles", "pt_br"),
    "/OPUS-OpenSubtitles/v2018/moses/en-zh_cn.txt.zip": archive("OpenSubtitles", "zh_cn"),
}


class Handler(BaseHTTPRequestHandler):
    """The file store, and at `/api` the JSON that tells what it holds."""

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        body = self.listing(parse_qs(address.query)) if address.path == "/api" else STORE.get(address.path)
        self.send_response(404 if body is None else 200)
        self.end_headers()
        self.wfile.write(body or b"")

    def listing(self, query: dict[str, list[str]]) -> bytes:
        asked = {name: values[0] for name, values in query.items()}
        assert asked.pop("preprocessing") == "moses"
        path = "/OPUS-{corpus}/{version}/moses/{source}-{target}".format(**asked)
        urls = [f"http://127.0.0.1:{self.server.server_port}{path}{end}" for end in (".strict.txt.zip", ".txt.zip")]
        known = [{**asked, "url": url, "alignment_pairs": 7, "size": 1} for url in urls if f"{path}.txt.zip" in STORE]
        return json.dumps({"corpora": known}).encode()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def test_addresses_put_the_codes_in_order() -> None:
    files, absent = find_files(["sw", "deu", "zh"], api=None)
    assert absent == []
    urls = {str(file): file.url for file in files}
    assert urls["Europarl v8 de-en"] == "https://object.pouta.csc.fi/OPUS-Europarl/v8/moses/de-en.txt.zip"
    assert urls["UNPC v1.0 en-zh"] == "https://object.pouta.csc.fi/OPUS-UNPC/v1.0/moses/en-zh.txt.zip"
    assert urls["OpenSubtitles v2018 en-zh_tw"].endswith("/OPUS-OpenSubtitles/v2018/moses/en-zh_tw.txt.zip")
    assert "OpenSubtitles v2018 en-zh" not in urls
    assert len(files) == len(urls) == 3 * 6 + 1
    assert {file.language for file in files} == {"sw", "de", "zh"}


def test_all_languages_of_the_paper_by_default() -> None:
    files, _ = find_files(api=None)
    assert {file.language for file in files} == set(TATOEBA_36)
    assert len({file.filename for file in files}) == len({file.url for file in files}) == len(files) == 36 * 6 + 2


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown corpora Books; known are Europarl, UNPC"):
        find_files(["de"], ["Books"], api=None)
    with pytest.raises(ValueError, match="unknown language code 'xx'"):
        find_files(["xx"], api=None)
    with pytest.raises(ValueError, match="other side of every pair"):
        find_files(["en"], api=None)


def test_opus_tells_what_there_is(base: str) -> None:
    files, absent = find_files(["de", "zh", "sw"], ["Europarl", "OpenSubtitles"], api=f"{base}/api")
    assert [str(file) for file in files] == [
        "Europarl v8 de-en",
        "OpenSubtitles v2018 de-en",
        "OpenSubtitles v2018 en-zh_cn",
    ]
    assert all(file.pairs == 7 and file.url.startswith(base) and ".strict." not in file.url for file in files)
    assert [str(file) for file in absent] == [
        "Europarl v8 en-zh",
        "Europarl v8 en-sw",
        "OpenSubtitles v2018 en-zh_tw",
        "OpenSubtitles v2018 en-sw",
    ]


@pytest.mark.parametrize("api", ["{base}/nothing", "http://127.0.0.1:9/"])
def test_without_an_answer_everything_is_tried(base: str, api: str, caplog: pytest.LogCaptureFixture) -> None:
    files, absent = find_files(["de", "sw"], ["Europarl", "Tanzil"], api=api.format(base=base), tries=1)
    assert (len(files), absent) == (4, [])
    assert caplog.text.count("OPUS does not say which files it has") == 1


def test_fetch_from_a_mirror_and_read(base: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files, _ = find_files(["de", "pt", "zh"], ["Europarl", "OpenSubtitles"], mirror=f"{base}/")
    paths, absent = fetch(files, tmp_path / "raw", tries=1)
    assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == sorted(path.name for path in paths.values())
    assert [str(file) for file in paths] == [
        "Europarl v8 de-en",
        "OpenSubtitles v2018 de-en",
        "OpenSubtitles v2018 en-pt_br",
        "OpenSubtitles v2018 en-zh_cn",
    ]
    assert [f"{file} is absent" in caplog.text for file in absent] == [True] * 4
    data = load_bitext(tmp_path / "raw", cache_dir=tmp_path / "cache")
    read = {language: [tuple(row.values()) for row in rows] for language, rows in data.items()}
    assert read == {"de": [PAIRS["de"]] * 2, "pt": [PAIRS["pt_br"]], "zh": [PAIRS["zh_cn"]]}
    found = find_bitext(tmp_path / "raw")["zh"][0].paths
    assert found[0].endswith("raw/OpenSubtitles_v2018.en-zh_cn.txt.zip/OpenSubtitles.en-zh_cn.zh_cn")


def test_licences_are_stated_for_each_corpus() -> None:
    stated = licences([file_of(CORPORA["WikiMatrix"], "sw"), file_of(CORPORA["Tanzil"], "sw")])
    assert list(stated) == ["WikiMatrix v1", "Tanzil v1"]
    assert stated["WikiMatrix v1"].startswith("CC-BY-SA 4.0. (https://github.com/")
    assert "non-commercial purposes only" in stated["Tanzil v1"]
