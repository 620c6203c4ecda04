"""Files at addresses that fsspec knows are fetched and sent, once and whole."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from traceback import format_exception
from typing import Any

import fsspec
import pytest
from conftest import synthetic_pairs
from written import serve_folder, text_of

from dap_transformers import addresses
from dap_transformers.commands import prepare as prepare_data
from dap_transformers.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bucket() -> Iterator[fsspec.AbstractFileSystem]:
    """Yield the file system `memory://`, and empty it at the end."""
    system = fsspec.filesystem("memory")
    yield system
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def refused(*_: Any, **__: Any) -> None:
    raise PermissionError("read-only")


def test_text_of_a_bucket_is_prepared_into_a_bucket(
    bucket: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    pairs = [pair for pair in synthetic_pairs("de", 160) if len(pair[1].split()) > 3]
    text = text_of(pairs)
    bucket.pipe("/raw/de-en.tsv", text)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/de-en.tsv").write_bytes(text)
    options = ["--dev_pairs", "5", "--max_shared", "2"]
    prepare_data.run(["--data", "memory://raw", "--output_dir", "memory://made/corpus", *options])
    here = tmp_path / "corpus"
    prepare_data.run(["--data", str(tmp_path / "raw"), "--output_dir", str(here), *options])
    files = [path for path in here.rglob("*") if path.is_file()]
    addresses_of_files = {f"/made/{path.relative_to(tmp_path)}": path for path in files}
    assert set(bucket.find("/made")) == set(addresses_of_files)
    for address, path in addresses_of_files.items():
        if path.suffix == ".parquet":
            assert bucket.cat(address) == path.read_bytes()


def fetched(address: str) -> bytes:
    return Path(addresses.fetch_address(address)).read_bytes()


def test_a_file_is_fetched_again_only_if_its_size_or_time_has_changed(
    bucket: fsspec.AbstractFileSystem, cache: Path
) -> None:
    german, french = "memory://corpus/de-en.tsv", "memory://corpus/more/fr-en.tsv"
    bucket.pipe({"/corpus/de-en.tsv": b"eins\tone\n", "/corpus/more/fr-en.tsv": b"un\tone\n"})
    assert addresses.fetch_address("memory://corpus") == str(cache / "memory/corpus")
    assert (cache / "memory/corpus/de-en.tsv").read_bytes() == b"eins\tone\n"
    assert (cache / "memory/corpus/more/fr-en.tsv").read_bytes() == b"un\tone\n"

    modified = bucket.modified("/corpus/de-en.tsv")
    bucket.pipe({"/corpus/de-en.tsv": b"drei\tsix\n", "/corpus/more/fr-en.tsv": b"deux\ttwo\n"})
    assert fetched(french) == b"deux\ttwo\n"
    file = bucket.store["/corpus/de-en.tsv"]
    file.modified = modified
    assert fetched(german) == b"eins\tone\n"
    file.modified = modified + timedelta(seconds=1)
    assert fetched(german) == b"drei\tsix\n"


def test_a_folder_whose_copy_has_more_files_or_that_leads_elsewhere_is_refused(
    bucket: fsspec.AbstractFileSystem,
) -> None:
    bucket.pipe({"/corpus/de-en.tsv": b"eins\tone\n", "/corpus/more/fr-en.tsv": b"un\tone\n"})
    addresses.fetch_address("memory://corpus")
    bucket.rm("/corpus/more/fr-en.tsv")
    with pytest.raises(UserError, match="memory/corpus/more/fr-en.tsv"):
        addresses.fetch_address("memory://corpus")
    bucket.store["/corpus/../out.tsv"] = bucket.store["/corpus/de-en.tsv"]
    with pytest.raises(UserError, match=r"/corpus/\.\./out.tsv"):
        addresses.fetch_address("memory://corpus")


def test_a_file_of_a_web_server_is_fetched_and_an_absent_one_is_refused(
    tmp_path: Path,
) -> None:
    # fsspec would read a file of this size in parts, which this server does not support.
    text = b"eins\tone\n" * 1_300_000
    (tmp_path / "de-en.tsv").write_bytes(text)
    with serve_folder(tmp_path) as home:
        assert fetched(f"{home}/de-en.tsv") == text
        with pytest.raises(UserError, match=f"{home}/fr-en.tsv"):
            addresses.fetch_address(f"{home}/fr-en.tsv")


class Versioned(BaseHTTPRequestHandler):
    """A server of one file that needs a login, and tells an ETag but no time."""

    text = b"eins\tone\n"
    etag = "1"

    def do_GET(self) -> None:
        allowed = self.path.endswith("?download=true") or "Authorization" in self.headers
        self.send_response(200 if allowed else 401)
        self.send_header("ETag", self.etag)
        self.send_header("Content-Length", str(len(self.text) if allowed else 0))
        self.end_headers()
        if allowed and self.command == "GET":
            self.wfile.write(self.text)

    do_HEAD = do_GET

    def log_message(self, *_: Any) -> None:
        pass


def test_a_changed_file_is_fetched_again_and_no_secret_of_an_address_is_shown(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Versioned) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        of_hub = f"http://{host}/de-en.tsv?download=true"
        assert Path(addresses.fetch_address(of_hub)).name == "de-en.tsv"
        secret = "s3cret"
        assert fetched(of_hub) == fetched(f"http://me:{secret}@{host}/de-en.tsv") == b"eins\tone\n"

        monkeypatch.setattr(Versioned, "text", b"drei\tsix\n")
        assert fetched(of_hub) == b"eins\tone\n"
        monkeypatch.setattr(Versioned, "etag", "2")
        assert fetched(of_hub) == b"drei\tsix\n"

        with pytest.raises(UserError, match=f"--data http://{host}/de-en.tsv cannot") as refused:
            addresses.fetch_address(f"http://{host}/de-en.tsv?token={secret}", "--data")
        server.shutdown()
    assert secret not in "".join(format_exception(refused.value))
    copies = [str(path) for path in cache.rglob("*")]
    assert not any(secret in path or "?" in path or ":" in path for path in copies)
    made = addresses.local_path(f"http://me:{secret}@{host}/made/pairs.tsv")
    assert addresses.public_name(made) == f"http://{host}/made/pairs.tsv"
    made = addresses.local_path(f"ftp://me:{secret}@host/made/pairs.tsv")
    assert addresses.public_name(made) == "ftp://host/made/pairs.tsv"
    assert addresses.public_name("/home/me/corpus") == "corpus"


@pytest.mark.parametrize("option", ["--data", "--output_dir"])
@pytest.mark.parametrize("address", ["file:///a", "s4://a/b", "memory://nothing"])
def test_addresses_that_cannot_be_used_are_refused_with_the_name_of_the_argument(
    option: str, address: str, tmp_path: Path
) -> None:
    if (option, address) == ("--output_dir", "memory://nothing"):
        return  # an output need not exist
    argv = ["--data", str(tmp_path), "--output_dir", str(tmp_path / "out"), option, address]
    with pytest.raises(UserError, match=f"^{option} {address}"):
        prepare_data.run(argv)


def test_results_that_cannot_be_sent_stay_on_this_machine(
    bucket: fsspec.AbstractFileSystem, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Path(addresses.local_path("memory://made/pairs.tsv"))
    made.parent.mkdir(parents=True)
    made.write_bytes(b"1.2\ta\tb\n")
    with monkeypatch.context() as patch:
        patch.setattr(type(bucket), "_open", refused)
        with pytest.raises(
            UserError, match=f"made/pairs.tsv cannot be written .*read-only.*; {made} has it"
        ):
            addresses.send_path(made)
    addresses.send_path(made)
    assert bucket.cat("/made/pairs.tsv") == made.read_bytes()


def test_without_a_home_directory_only_addresses_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DAP_CACHE")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)  # a user without an entry
    assert addresses.local_path("de-en.tsv") == "de-en.tsv"
    assert addresses.send_path(tmp_path) is None
    with pytest.raises(UserError, match="no home directory .*DAP_CACHE"):
        addresses.local_path("memory://bucket/de-en.tsv")
