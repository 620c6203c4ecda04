"""Read inputs at addresses that fsspec knows, such as `s3://bucket/corpus`, and send results there.

An *address* names a file or folder on another machine: `protocol://host/path`. The rest of the code
sees only local paths. The *local copy* of `s3://bucket/corpus` is `CACHE/s3/bucket/corpus`, where
`CACHE` is the `cache_folder`. There are four steps:

- `local_path` returns the path of the local copy, which need not exist.
- `fetch_address` downloads a file or folder into its local copy.
- `fetch_path` does the same, given the path of the local copy.
- `send_path` uploads a local copy to its address.

fsspec's own copies do not fit:

- `filecache::` with `same_names=True` gives `de/train.txt` and `fr/train.txt` the same copy. It
  takes files of web servers as unchanging, and writes an address's secrets into file names.
- `fsspec.generic.rsync` takes no single file. By default it compares only sizes, and returns
  without an error if a download fails.
- `put(recursive=True)` sends all files each time, in no useful order.

An address may hold secrets: `user:password@`, or a query such as `?token=…`. No message, report or
file name shows them. The copy of such an address lies in `CACHE/https/@DIGEST/host/…`.
"""

import filecmp
import hashlib
import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import fsspec.core
from filelock import FileLock

from dap_transformers.errors import UserError, one_line
from dap_transformers.files import DiskFullError, read_json, whole_file, write_json

#: Local copies that equal the file at their address: path -> (time, size) when fetched or sent.
_IN_SYNC: dict[Path, tuple[int, int]] = {}
#: Digest of an address's secrets -> the secrets, for the addresses that this process was given.
_SECRETS: dict[str, tuple[str, str]] = {}
#: Protocols whose `name@` before the host is no secret.
_CONTAINERS = ("abfs", "abfss", "wasb", "wasbs")
#: How a copy's path writes the colon of `host:port`, which names on Windows cannot have.
_COLON = "%3A"
#: What file systems tell of a file's version, beside its time.
_STAMPS = (
    "ETag", "etag", "Content-MD5", "Digest", "Last-Modified", "LastModified", "last_modified",
    "generation", "md5Hash", "mtime",
)  # fmt: skip


class _Parts(NamedTuple):
    """The parts of an address: `protocol://login@rest?query`.

    Attributes:
        protocol: such as "s3" or "https".
        login: user and password, or "". It is a secret.
        rest: host or bucket, and path.
        query: for http(s), the part from "?" or "#" on, or "". It is a secret.
    """

    protocol: str
    login: str
    rest: str
    query: str

    @property
    def public(self) -> str:
        """Return the address without its secrets, `protocol://rest`."""
        return f"{self.protocol}://{self.rest}"


def _split(address: str) -> _Parts | None:
    """Split an address into its parts. Return None for a path, which has no `protocol://`."""
    protocol, separator, rest = address.partition("://")
    if not separator or not rest:
        return None
    login = query = ""
    if protocol in ("http", "https"):
        end = min(rest.find(mark) % (len(rest) + 1) for mark in "?#")
        rest, query = rest[:end], rest[end:]
    host, slash, path = rest.partition("/")
    if protocol not in _CONTAINERS and "@" in host:
        login, _, host = host.rpartition("@")
    return _Parts(protocol, login, f"{host}{slash}{path}", query)


def public_name(path: str) -> str:
    """Return a name for a path or address that reports and cards can show to others.

    - An absolute path becomes its last part. A relative path is not changed.
    - An address, or the path of its local copy, becomes the address without secrets.
    """
    address = _address_of(Path(path)) or path
    parts = _split(address)
    if parts:
        return parts.public
    return Path(path).name if os.path.isabs(path) else path


def cache_folder() -> Path:
    """Return the folder with the local copies of all addresses.

    The environment variable `DAP_CACHE` names it. On a cluster it must be a folder that all nodes
    share. If it is not set, the folder is in the user's home folder. It need not exist.
    """
    folder = os.environ.get("DAP_CACHE") or "~/.cache/dap-transformers"
    try:
        return Path(folder).expanduser().absolute()
    except RuntimeError:
        raise UserError(
            "there is no home directory for copies: set the environment variable DAP_CACHE"
        ) from None


def local_path(address: str, name: str = "") -> str:
    """Return the path of an address's local copy, which need not exist. Nothing is downloaded.

    Secrets of the address are kept in memory, so that `send_path` can use them.

    Args:
        address: an address, such as `s3://bucket/corpus`. A path is returned unchanged.
        name: the flag that names it, for error messages.
    """
    parts = _split(address)
    if parts is None:
        return address
    if parts.rest.startswith("/"):
        raise UserError(
            f"{name} {parts.public}: name a host or a bucket after {parts.protocol}://, or give a "
            "plain path"
        )
    with _named_errors(f"{name} {parts.public}", "cannot be reached"):
        fsspec.get_filesystem_class(parts.protocol)

    folder = cache_folder() / parts.protocol
    if parts.login or parts.query:
        secrets = (parts.login, parts.query)
        digest = "@" + hashlib.sha256(repr(secrets).encode()).hexdigest()[:16]
        _SECRETS[digest] = secrets
        folder /= digest
    host, _, path = posixpath.normpath(f"/{parts.rest}").lstrip("/").partition("/")
    return str(folder / host.replace(":", _COLON) / path)


def fetch_address(address: str, name: str = "") -> str:
    """Download a file, or a folder with everything in it, unless the local copy is up to date.

    A file is downloaded again if its size, time or ETag has changed, or if its server tells neither
    time nor ETag. If several processes call this, one downloads and the others wait.

    Args:
        address: an address, such as `s3://bucket/corpus`. A path is returned unchanged, and nothing
            is done.
        name: the flag that names it, for error messages.

    Returns:
        The path of the local copy.
    """
    copy = Path(local_path(address, name))
    parts = _split(address)
    if parts is None:
        return address

    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    copies = set()
    shown = f"{name} {parts.public}"
    remedy = "; check the address and your login there"
    with _named_errors(shown, "cannot be fetched", remedy), FileLock(cache / ".lock"):
        system, root = fsspec.core.url_to_fs(address)
        info = system.info(root)
        files = {root: info} if info["type"] == "file" else system.find(root, detail=True)
        for file, details in files.items():
            path = copy / posixpath.relpath(file, root)
            _fetch_file(system, file, details, path)
            _IN_SYNC[path] = _time_and_size(path)
            copies.add(path)

    for path in sorted(copy.rglob("[!.]*")):
        if path.is_file() and path not in copies:
            inside = path.relative_to(copy)
            raise UserError(f"{shown} has no {inside}, but its copy has: remove {path}")
    return str(copy)


def _fetch_file(
    system: fsspec.AbstractFileSystem, file: str, details: dict[str, Any], copy: Path
) -> None:
    """Download one file, unless its local copy has the same version.

    The version (time, ETag and the like) is noted in the cache, to be compared at the next call.
    A file that is downloaded again, but has the same content, keeps its modification time.
    """
    if os.pardir in copy.parts:
        raise ValueError(f"{file} leads out of the folder")
    if not any(details.get(stamp) for stamp in _STAMPS):
        details = details | system.info(file)
    version = {stamp: str(details[stamp]) for stamp in _STAMPS if details.get(stamp)}
    with suppress(NotImplementedError):  # some file systems have no modification times
        version["modified"] = str(system.modified(file).timestamp())
    size = details["size"]

    digest = hashlib.sha256(str(copy).encode()).hexdigest()
    noted = cache_folder() / ".versions" / digest
    is_whole = copy.is_file() and size in (None, copy.stat().st_size)
    if is_whole and version and noted.is_file() and read_json(noted) == version:
        return

    with whole_file(copy, size) as part:
        system.get_file(file, part.name)
        received = os.path.getsize(part.name)
        if size is not None and received != size:
            raise OSError(f"only {received:,} of {size:,} bytes were received")
        if copy.is_file() and filecmp.cmp(part.name, copy, shallow=False):
            times = copy.stat()
            os.utime(part.name, ns=(times.st_atime_ns, times.st_mtime_ns))
    write_json(version, noted)


def fetch_path(path: Path) -> None:
    """Download the file or folder at an address, given the path of its local copy.

    An address is a name such as `s3://bucket/corpus`. Its local copy is a path in `cache_folder`. A
    run calls this to find the results that an earlier run has sent to the address (`send_path`),
    perhaps from another machine.

    If the path is not a local copy, or nothing is at the address, nothing is done.

    Args:
        path: any path.
    """
    address = _address_of(path)
    if address is None:
        return
    with _named_errors(public_name(address), "cannot be reached"):
        system, root = fsspec.core.url_to_fs(address)
        exists = system.exists(root)
    if exists:
        fetch_address(address)


def send_path(path: str | Path, name: str = "") -> str | None:
    """Upload a file, or all files of a folder, if the path is the local copy of an address.

    An address is a name such as `s3://bucket/corpus`. Its local copy is a path in `cache_folder`.
    Files that this process has fetched or sent, and that have not changed since, are not sent
    again.

    Args:
        path: any path.
        name: the flag that names it, for error messages.

    Returns:
        The address without its secrets, or None if the path is not a local copy.
    """
    path = Path(path).absolute()
    address = _address_of(path)
    if address is None:
        return None

    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    files.sort(key=os.path.getmtime)  # the file that marks the end of a run is sent last
    remedy = f"; {path} has it, and the same command sends it"
    shown = public_name(address)
    with _named_errors(f"{name} {shown}", "cannot be written", remedy):
        system, root = fsspec.core.url_to_fs(address)
        for file in files:
            if _IN_SYNC.get(file) == _time_and_size(file):
                continue
            there = posixpath.normpath(f"{root}/{file.relative_to(path).as_posix()}")
            system.put_file(str(file), there)
            _IN_SYNC[file] = _time_and_size(file)
    return shown


def _address_of(path: Path) -> str | None:
    """Return the address of a local copy, with its secrets, or None for any other path.

    A copy is known by its place in `cache_folder`. Secrets are known only if this process was
    given the address.
    """
    try:
        cache = cache_folder()
    except UserError:  # without a folder there are no copies
        return None
    path = path.absolute()
    if not path.is_relative_to(cache) or path == cache:
        return None
    protocol, *parts = path.relative_to(cache).parts
    login = query = ""
    if parts and parts[0] in _SECRETS:
        login, query = _SECRETS[parts.pop(0)]
    if parts:
        parts[0] = parts[0].replace(_COLON, ":")
    return f"{protocol}://{login}{'@' if login else ''}{'/'.join(parts)}{query}"


def _time_and_size(file: Path) -> tuple[int, int]:
    """Return a file's modification time in ns, and its size in bytes."""
    state = file.stat()
    return state.st_mtime_ns, state.st_size


@contextmanager
def _named_errors(subject: str, problem: str, remedy: str = "") -> Iterator[None]:
    """Turn any error within the block into a `UserError`, without the secrets of addresses.

    This is a context manager. fsspec's file systems raise errors of many classes. A full disk
    keeps its own error.
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        for secrets in _SECRETS.values():
            for secret in filter(None, secrets):
                reason = reason.replace(secret, "…")
        # The error itself has the address with its secrets, so no traceback may show it.
        raise UserError(f"{subject.strip()} {problem} ({reason}){remedy}") from None
