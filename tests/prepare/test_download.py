"""Downloads from a loopback server that behaves as badly as real ones do: whole files appear, or none and a reason."""

import gzip
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dap.prepare.download import download, get_json

BODY = bytes(range(256)) * 2000  # 512,000 bytes


class Server(ThreadingHTTPServer):
    """Answers each request with the next of its `answers`, the last one for ever; keeps the requests' headers."""

    daemon_threads = True
    answers: list[Callable[[BaseHTTPRequestHandler], None]]

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers, self.seen = [], []

    def url(self, name: str = "text.bin") -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.seen.append(dict(self.headers) | {"path": self.path})
        answer = self.server.answers.pop(0) if len(self.server.answers) > 1 else self.server.answers[0]
        answer(self)

    def log_message(self, *arguments: object) -> None:
        pass


def send(
    body: bytes = BODY, etag: str | None = '"one"', cut: int | None = None, ranges: bool = True, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    """A file server; `cut`: the connection ends after so many bytes of the answer."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        start = 0
        if ranges and "Range" in handler.headers and handler.headers.get("If-Range") == etag:
            start = int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        if start and start >= len(body):
            return status(416, **{"Content-Range": f"bytes */{len(body)}"})(handler)
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(body) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        for name, value in {**({"ETag": etag} if etag else {}), **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body[start:][:cut])
        handler.close_connection = True
        return None

    return answer


def status(code: int, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(code)
        for name, value in {"Content-Length": "0", **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


def hang_up(handler: BaseHTTPRequestHandler) -> None:
    handler.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def fetch(server: Server, path: Path, **options: object) -> Path:
    return download(server.url(path.name), path, **({"wait": 0.001, "timeout": 5.0} | options))


def zipped(text: bytes = b"text" * 50_000) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.de", text)
    return packed.getvalue()


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_whole_file_appears_and_is_not_fetched_twice(server: Server, tmp_path: Path) -> None:
    server.answers = [send()]
    path = tmp_path / "new/folder/text.bin"
    for _ in range(2):
        assert fetch(server, path, size=len(BODY), sha256=hashlib.sha256(BODY).hexdigest().upper()) == path
    assert path.read_bytes() == BODY
    assert left(path.parent) == ["text.bin"]
    assert len(server.seen) == 1
    with pytest.raises(ValueError, match=r"text\.bin: 512,000 bytes, expected 7; delete it"):
        fetch(server, path, size=7)


def test_a_connection_that_breaks_again_and_again_is_resumed(server: Server, tmp_path: Path) -> None:
    server.answers = [send(cut=60_000)]
    assert fetch(server, tmp_path / "text.bin", tries=2).read_bytes() == BODY  # each try brings some more
    ranges = [seen.get("Range") for seen in server.seen]
    assert ranges == [None] + [f"bytes={start}-" for start in range(60_000, len(BODY), 60_000)]
    assert {seen.get("If-Range") for seen in server.seen[1:]} == {'"one"'}


def test_a_later_run_goes_on_where_the_first_one_gave_up(server: Server, tmp_path: Path) -> None:
    server.answers = [send(cut=200_000), hang_up]
    with pytest.raises(ValueError, match=r"text\.bin: .*2 tries in a row.* the 200,000 bytes that are here are kept"):
        fetch(server, tmp_path / "text.bin", tries=2)
    assert left(tmp_path) == ["text.bin.part", "text.bin.part.json"]
    server.answers = [send()]
    assert fetch(server, tmp_path / "text.bin").read_bytes() == BODY
    assert server.seen[-1]["Range"] == "bytes=200000-"
    assert left(tmp_path) == ["text.bin"]


def test_a_whole_part_is_only_renamed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "text.bin.part").write_bytes(BODY)
    notes = {"url": server.url("text.bin"), "validator": '"one"'}
    (tmp_path / "text.bin.part.json").write_text(json.dumps(notes))
    server.answers = [send()]
    assert fetch(server, tmp_path / "text.bin").read_bytes() == BODY
    assert len(server.seen) == 1


@pytest.mark.parametrize("other", [BODY[::-1], BODY[::-1] * 2, BODY[:1000]])
def test_a_file_that_changed_between_two_tries_starts_again(server: Server, tmp_path: Path, other: bytes) -> None:
    server.answers = [send(cut=300_000), send(other, '"two"')]
    assert fetch(server, tmp_path / "text.bin").read_bytes() == other


def test_a_shorter_file_behind_a_server_without_if_range_starts_again(server: Server, tmp_path: Path) -> None:
    server.answers = [
        send(cut=300_000),
        status(416, **{"Content-Range": "bytes */1000"}),
        send(BODY[:1000], '"two"'),
    ]
    assert fetch(server, tmp_path / "text.bin").read_bytes() == BODY[:1000]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_without_a_name_for_the_version_nothing_is_joined(server: Server, tmp_path: Path, etag: str | None) -> None:
    server.answers = [send(cut=300_000, etag=etag), send(BODY[::-1], etag=etag)]
    assert fetch(server, tmp_path / "text.bin").read_bytes() == BODY[::-1]
    assert "Range" not in server.seen[1]


def test_a_part_from_another_address_is_not_gone_on_with(server: Server, tmp_path: Path) -> None:
    server.answers = [send(cut=200_000), hang_up]
    with pytest.raises(ValueError, match="2 tries"):
        fetch(server, tmp_path / "text.bin", tries=2)
    server.answers = [send(BODY[::-1])]
    assert download(server.url("mirror"), tmp_path / "text.bin").read_bytes() == BODY[::-1]


def test_a_server_that_ignores_ranges_or_sends_another_one(server: Server, tmp_path: Path) -> None:
    server.answers = [send(cut=300_000), send(ranges=False)]
    assert fetch(server, tmp_path / "text.bin").read_bytes() == BODY

    def wrong_range(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(206)
        handler.send_header("Content-Length", "10")
        handler.send_header("Content-Range", f"bytes 5-14/{len(BODY)}")
        handler.end_headers()
        handler.wfile.write(BODY[5:15])

    server.answers = [send(cut=300_000), wrong_range, send()]
    assert fetch(server, tmp_path / "more.bin").read_bytes() == BODY


def test_trouble_that_passes(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.answers = [status(503, **{"Retry-After": "0"}), status(429), hang_up, send()]
    assert fetch(server, tmp_path / "text.bin").read_bytes() == BODY
    assert "status 503" in caplog.text
    assert "status 429" in caplog.text
    assert len(server.seen) == 4


@pytest.mark.parametrize("code", [404, 410])
def test_an_absent_file_is_asked_for_once(server: Server, tmp_path: Path, code: int) -> None:
    server.answers = [status(code)]
    with pytest.raises(FileNotFoundError, match=f"{server.url()}: status {code}"):
        fetch(server, tmp_path / "text.bin")
    assert len(server.seen) == 1
    assert left(tmp_path) == []


def test_answers_that_do_not_pass_stop_at_once_or_after_the_tries(server: Server, tmp_path: Path) -> None:
    server.answers = [status(403)]
    with pytest.raises(ValueError, match=f"{server.url()}: status 403 .*permission"):
        fetch(server, tmp_path / "text.bin")
    assert len(server.seen) == 1
    server.answers = [status(500)]
    with pytest.raises(ValueError, match=r"status 500 .*3 tries in a row; check the address"):
        fetch(server, tmp_path / "text.bin", tries=3)
    assert len(server.seen) == 4


def test_a_server_that_never_answers(server: Server, tmp_path: Path) -> None:
    ready = threading.Event()
    server.answers = [lambda handler: ready.wait(5) and None]
    with pytest.raises(ValueError, match="2 tries in a row"):
        fetch(server, tmp_path / "text.bin", tries=2, timeout=0.1)
    ready.set()


def test_no_server_and_no_such_protocol(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9/x: no connection .*2 tries"):
        download("http://127.0.0.1:9/x", tmp_path / "x", tries=2, wait=0.001)
    with pytest.raises(ValueError, match="only http:// and https://"):
        download("file:///etc/passwd", tmp_path / "x")
    assert left(tmp_path) == []


@pytest.mark.parametrize("wrong", [{"size": 1}, {"sha256": "0" * 64}])
def test_another_size_or_checksum_leaves_nothing_behind(server: Server, tmp_path: Path, wrong: dict) -> None:
    server.answers = [send()]
    expected = "expected 1" if "size" in wrong else f"SHA-256 is {hashlib.sha256(BODY).hexdigest()}, expected 0000"
    with pytest.raises(ValueError, match=f"a damaged file came: .*{expected}"):
        fetch(server, tmp_path / "text.bin", tries=2, **wrong)
    assert left(tmp_path) == []
    server.answers = [send(b"broken", '"two"'), send()]
    fetch(server, tmp_path / "text.bin", size=len(BODY), sha256=hashlib.sha256(BODY).hexdigest())
    assert left(tmp_path) == ["text.bin"]


def test_a_truncated_zip_is_no_download(server: Server, tmp_path: Path) -> None:
    server.answers = [send(zipped()[:-30])]
    with pytest.raises(ValueError, match=r"a\.zip: a damaged file came: no whole zip archive"):
        fetch(server, tmp_path / "a.zip", tries=2)
    assert left(tmp_path) == []
    server.answers = [send(zipped()[:-30]), send(zipped())]
    assert zipfile.ZipFile(fetch(server, tmp_path / "a.zip")).namelist() == ["a.de"]


def test_no_space_left(server: Server, tmp_path: Path) -> None:
    Path(tmp_path / "text.bin.part").symlink_to("/dev/full")
    server.answers = [send()]
    with pytest.raises(ValueError, match=r"text\.bin\.part: No space left on device; make room and run again"):
        fetch(server, tmp_path / "text.bin")


def test_progress_counts_from_the_bytes_that_were_there(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    server.answers = [send(cut=300_000), send()]
    fetch(server, tmp_path / "text.bin", progress=True)
    assert "512k/512k" in capsys.readouterr().err


def test_json_answers(server: Server) -> None:
    def answer(text: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
        return send(text, None)

    server.answers = [status(502), answer(b"<html>"), answer(b'{"corpora": []}')]
    assert get_json(server.url("api?x=1"), wait=0.001) == {"corpora": []}
    assert server.seen[0]["path"] == "/api?x=1"
    server.answers = [answer(b"<html>")]
    with pytest.raises(ValueError, match="the answer is no JSON .*<html>"):
        get_json(server.url("api"), wait=0.001, tries=2)


def test_bytes_that_came_before_a_reset_or_a_stall_are_kept(server: Server, tmp_path: Path) -> None:
    waiting = threading.Event()

    def stall(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(BODY)))
        handler.send_header("ETag", '"one"')
        handler.end_headers()
        handler.wfile.write(BODY[:300_000])
        waiting.wait(5)
        handler.close_connection = True

    server.answers = [stall, send()]
    assert fetch(server, tmp_path / "text.bin", timeout=0.3).read_bytes() == BODY
    waiting.set()
    assert server.seen[1]["Range"] == "bytes=300000-"


def test_an_answer_of_less_than_was_asked_for_is_not_the_whole(server: Server, tmp_path: Path) -> None:
    def piece(handler: BaseHTTPRequestHandler) -> None:
        start = int(handler.headers["Range"].removeprefix("bytes=").removesuffix("-"))
        body = BODY[start : start + 100_000]
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(body)))
        handler.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(BODY)}")
        handler.end_headers()
        handler.wfile.write(body)

    server.answers = [send(cut=300_000), piece]
    assert fetch(server, tmp_path / "text.bin").read_bytes() == BODY


def test_a_body_in_another_coding_is_refused(server: Server, tmp_path: Path) -> None:
    server.answers = [send(gzip.compress(b"ja\tyes\n"), **{"Content-Encoding": "gzip"})]
    with pytest.raises(ValueError, match=r"text\.bin: sent as gzip, which was not asked for"):
        fetch(server, tmp_path / "text.bin")
    assert left(tmp_path) == []
