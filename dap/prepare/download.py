"""Download files over HTTP so that they appear under their name only when whole: retries, resume, size, checksum."""

import errno
import hashlib
import http.client
import json
import logging
import os
import random
import re
import ssl
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from dap.errors import UserError

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 20
LONGEST_WAIT = 60.0  # seconds between two tries
#: Answers that may be better next time: time-outs, too many requests, and a server or gateway in trouble.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
ABSENT = frozenset({404, 410})

_Result = TypeVar("_Result")


class _RetryError(Exception):
    """One try failed in a way that may pass; `wait`: seconds that the server asks for."""

    def __init__(self, reason: object, wait: float = 0.0) -> None:
        super().__init__(str(reason))
        self.wait = wait


def download(
    url: str,
    path: str | Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    tries: int = 5,
    timeout: float = 60.0,
    wait: float = 1.0,
    progress: bool = False,
) -> Path:
    """Fetch `url` into `path`, unless it is there; an earlier download that was cut is resumed.

    Until it is whole the text is in `path` + `.part`, beside it `.part.json`, which says what version of the file it
    belongs to: a file that has changed on the server (ETag, Last-Modified) starts again. Two processes must not
    download the same file at once. A zip archive must have its directory.

    Args:
        size: in bytes, where it is known; else the server's Content-Length is checked.
        sha256: in hexadecimal, where it is known.
        tries: in a row without a byte more than before.
        timeout: seconds without an answer.
        wait: seconds before the second try, twice as many before each further one.

    Raises:
        FileNotFoundError: the server has no such file (404, 410).
        ValueError: another answer, too many tries, other size or checksum, no space left; says what to do.
    """
    path = Path(path)
    if path.exists():
        _check(path, url, size, sha256)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = Path(f"{path}.part")

    def whole() -> None:
        _fetch_rest(url, part, timeout, progress)
        _check(part, url, size, sha256, retry=True)

    _with_retries(whole, url, tries, wait, lambda: part.stat().st_size if part.exists() else 0)
    os.replace(part, path)
    _notes(part).unlink(missing_ok=True)
    return path


def get_json(url: str, *, tries: int = 5, timeout: float = 60.0, wait: float = 1.0) -> object:
    """The JSON that a URL answers with; raises as `download`."""

    def answer() -> object:
        with _open(url, {}, timeout) as response, _network():
            data = response.read()
        try:
            return json.loads(data)
        except ValueError as error:
            raise _RetryError(f"the answer is no JSON ({error}): {data[:80]!r}") from error

    return _with_retries(answer, url, tries, wait, lambda: 0)


def _with_retries(
    action: Callable[[], _Result], url: str, tries: int, wait: float, received: Callable[[], int]
) -> _Result:
    """Repeats the action until it succeeds; tries that brought bytes beyond all earlier ones do not count."""
    failed, most = 0, received()
    while True:
        try:
            return action()
        except _RetryError as reason:
            failed = 1 if received() > most else failed + 1
            most = max(most, received())
            if failed >= tries:
                kept = f"; the {most:,} bytes that are here are kept" if received() else ""
                raise UserError(
                    f"{url}: {reason}, {tries} tries in a row; check the address and the network, and run again{kept}"
                ) from reason
            pause = min(LONGEST_WAIT, max(reason.wait, wait * 2 ** (failed - 1) * random.uniform(0.8, 1.2)))
            logger.warning("%s: %s; next try in %.1f s", url, reason, pause)
        time.sleep(pause)


def _fetch_rest(url: str, part: Path, timeout: float, progress: bool) -> None:
    """One try to complete `part`: from where it ends if the server still has the same file, else from the start."""
    validator = _validator(part, url)
    start = part.stat().st_size if validator else 0
    headers = {"Range": f"bytes={start}-", "If-Range": validator} if start else {}
    try:
        with _open(url, headers, timeout) as response:
            resumed = response.status == 206 and _range_start(response) == start
            if response.status == 206 and not resumed:
                _forget(part)
                raise _RetryError(f"bytes {start:,} on were asked for, {response.headers['Content-Range']} came")
            _write(response, part, start if resumed else 0, url, progress)
    except _BeyondEndError as error:
        if error.total != start:
            _forget(part)
            raise _RetryError(f"{start:,} bytes are here, the file now has {error.total}") from None


class _BeyondEndError(Exception):
    """416: the file of `total` bytes ends before the range asked for; at its start if nothing is missing."""

    def __init__(self, total: int | None) -> None:
        super().__init__()
        self.total = total


@contextmanager
def _open(url: str, headers: dict[str, str], timeout: float) -> Iterator[http.client.HTTPResponse]:
    if not re.match(r"https?://", url):
        raise UserError(f"{url}: only http:// and https:// addresses can be downloaded")
    agent = {"User-Agent": "dap-transformers", "Accept-Encoding": "identity"}
    request = urllib.request.Request(url, headers={**agent, **headers})
    try:
        with _network():
            response = urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            _refused(url, error)
    with response:
        coding = response.headers.get("Content-Encoding", "identity")
        if coding.lower() != "identity":
            raise UserError(f"{url}: sent as {coding}, which was not asked for; fetch the file by other means")
        yield response


def _refused(url: str, error: urllib.error.HTTPError) -> None:
    status = f"status {error.code} ({error.reason})"
    if error.code in ABSENT:
        raise FileNotFoundError(f"{url}: {status}: the server has no such file") from None
    if error.code == 416:
        total = re.fullmatch(r"bytes \*/(\d+)", error.headers.get("Content-Range", ""))
        raise _BeyondEndError(int(total[1]) if total else None) from None
    if error.code in PASSING:
        seconds = error.headers.get("Retry-After", "")
        raise _RetryError(status, float(seconds) if seconds.isdecimal() else 0.0) from None
    raise UserError(f"{url}: {status}; check the address, or whether it needs a permission") from None


@contextmanager
def _network() -> Iterator[None]:
    """Turns what a bad line does into another try."""
    try:
        yield
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        raise _RetryError(f"no connection ({error.reason})") from error
    except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
        raise _RetryError(f"the connection broke ({error or type(error).__name__})") from error


def _write(response: http.client.HTTPResponse, part: Path, start: int, url: str, progress: bool) -> None:
    """Appends the body at byte `start` of `part`; a body shorter than announced is one more reason to try again."""
    length, whole = response.headers.get("Content-Length"), _range_total(response)
    total = whole if whole is not None else start + int(length) if length else None
    bar = tqdm(total=total, initial=start, unit="B", unit_scale=True, desc=part.stem, disable=not progress)
    try:
        with open(part, "r+b" if start else "wb") as file, bar:
            if not start:  # once the old bytes are gone, lest they be taken for the new file's
                validator = _strong(response.headers.get("ETag")) or response.headers.get("Last-Modified")
                _notes(part).write_text(json.dumps({"url": url, "validator": validator}))
            file.seek(start)
            while block := _read(response):
                file.write(block)
                bar.update(len(block))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(f"{part}: {error.strerror}; make room and run again, the download will go on") from error
    if total is not None and part.stat().st_size != total:
        raise _RetryError(f"the connection broke: {part.stat().st_size:,} of {total:,} bytes came")


def _read(response: http.client.HTTPResponse) -> bytes:
    with _network():
        return response.read1(BLOCK_BYTES)  # what has come: read() would lose up to a block when the line breaks


def _range_start(response: http.client.HTTPResponse) -> int | None:
    match = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(match[1]) if match else None


def _range_total(response: http.client.HTTPResponse) -> int | None:
    """Bytes of the whole file, where an answer of a part tells it; the part may end before the file does."""
    match = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range", ""))
    return int(match[1]) if match and response.status == 206 else None


def _strong(etag: str | None) -> str | None:
    """Weak ETags do not tell that two files are equal byte by byte."""
    return etag if etag and not etag.startswith("W/") else None


def _notes(part: Path) -> Path:
    return Path(f"{part}.json")


def _validator(part: Path, url: str) -> str | None:
    """What `part` is a piece of, as the server called it; None where it cannot be gone on with."""
    try:
        notes = json.loads(_notes(part).read_text())
        return notes["validator"] if notes["url"] == url and part.exists() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _notes(part).unlink(missing_ok=True)


def _check(path: Path, url: str, size: int | None, sha256: str | None, retry: bool = False) -> None:
    """Size, checksum and zip directory; with `retry` a bad file is deleted and another try asked for."""
    reason = None
    if size is not None and path.stat().st_size != size:
        reason = f"{path.stat().st_size:,} bytes, expected {size:,}"
    elif sha256 is not None and (found := _sha256(path)) != sha256.lower():
        reason = f"SHA-256 is {found}, expected {sha256.lower()}"
    elif path.name.removesuffix(".part").endswith(".zip") and not zipfile.is_zipfile(path):
        reason = f"no whole zip archive ({path.stat().st_size:,} bytes)"
    if reason and retry:
        _forget(path)
        raise _RetryError(f"a damaged file came: {reason}")
    if reason:
        raise UserError(f"{path}: {reason}; delete it and run again to fetch it from {url}")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
