"""Read inputs at addresses that fsspec knows, such as `s3://bucket/corpus`, and send results there.

The rest of the code sees only local paths. The local copy of `s3://bucket/corpus` is
`CACHE/s3/bucket/corpus`. There are four steps:

- `local_path` returns the path of the local copy, which need not exist.
- `fetch_address` downloads a file or folder into its local copy.
- `fetch_path` does the same, given the path of the local copy.
- `send_path` uploads a local copy to its address.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import fsspec.core
from filelock import FileLock

from dap.errors import UserError, one_line
from dap.file_io import DiskFullError, whole_file

#: Local copies that equal the file at their address: path -> (time, size) when fetched or sent.
_IN_SYNC: dict[Path, tuple[int, int]] = {}


def cache_folder() -> Path | None:
    """Return the folder of all local copies, or None without a home directory.

    On a cluster, `DAP_CACHE` names a folder that all nodes share.
    """
    named = os.environ.get("DAP_CACHE") or "~/.cache/dap-transformers"
    try:
        return Path(named).expanduser().absolute()
    except RuntimeError:  # a container may run as a user who has no home directory
        return None


def local_path(address: str, name: str = "") -> str:
    """Return the path of an address's local copy. A path is returned unchanged.

    Args:
        address: an address or a path.
        name: the argument that names it, for error messages.

    Raises:
        UserError: no library for such addresses is installed, or the host or bucket is missing.
    """
    protocol, separator, rest = address.partition("://")
    if not separator or not rest:
        return address
    if rest.startswith("/"):
        raise UserError(
            f"{name} {address}: name a host or a bucket after {protocol}://, or give a plain path"
        )
    with _named_errors(f"{name} {address}", "cannot be reached"):
        fsspec.get_filesystem_class(protocol)
    cache = cache_folder()
    if cache is None:
        raise UserError(
            f"{name} {address}: there is no home directory for a copy: set the environment "
            "variable DAP_CACHE to a folder"
        )
    inside = os.path.normpath(f"/{rest}").lstrip("/")
    return str(cache / protocol / inside)


def fetch_address(address: str, name: str = "") -> str:
    """Download a file, or a folder with everything in it, and return the path of the local copy.

    A path is returned unchanged. A file is downloaded again only if its size or its modification
    time has changed. If several processes call this, one downloads and the others wait.

    Args:
        address: an address or a path.
        name: the argument that names it, for error messages.

    Raises:
        UserError: as `local_path`, the address cannot be read, or the local copy has additional
            files.
    """
    copy = Path(local_path(address, name))
    if "://" not in address:
        return address

    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    copies = set()
    remedy = "; check the address and your login there"
    with (
        _named_errors(f"{name} {address}", "cannot be fetched", remedy),
        FileLock(cache / ".lock"),
    ):
        system, root = fsspec.core.url_to_fs(address)
        info = system.info(root)
        files = {root: info} if info["type"] == "file" else system.find(root, detail=True)
        for file, details in files.items():
            path = copy / os.path.relpath(file, root)
            _fetch_file(system, file, details["size"], path)
            _IN_SYNC[path] = _time_and_size(path)
            copies.add(path)

    for path in sorted(copy.rglob("[!.]*")):
        if path.is_file() and path not in copies:
            inside = path.relative_to(copy)
            raise UserError(f"{name} {address} has no {inside}, but its copy has: remove {path}")
    return str(copy)


def _fetch_file(system: fsspec.AbstractFileSystem, file: str, size: int | None, copy: Path) -> None:
    """Download one file, unless its copy has the same size and modification time.

    Args:
        size: bytes of the file, or None if the file system does not know.
    """
    if os.pardir in copy.parts:
        raise ValueError(f"{file} leads out of the folder")
    modified = 0
    with suppress(NotImplementedError):  # some file systems have no modification times
        modified = int(system.modified(file).timestamp())
    if copy.is_file():
        state = copy.stat()
        if (state.st_size, int(state.st_mtime)) == (size, modified):
            return

    with whole_file(copy, size) as part:
        system.get_file(file, part.name)
        received = os.path.getsize(part.name)
        if size is not None and received != size:
            raise OSError(f"only {received:,} of {size:,} bytes were received")
        os.utime(part.name, (modified, modified))


def fetch_path(path: Path) -> None:
    """Download what was sent from this path earlier, for example by another machine.

    Does nothing if the path is not a local copy, or if nothing is at its address.

    Raises:
        UserError: as `fetch_address`.
    """
    address = _address_of(path)
    if address is None:
        return
    with _named_errors(address, "cannot be reached"):
        system, root = fsspec.core.url_to_fs(address)
        exists = system.exists(root)
    if exists:
        fetch_address(address)


def send_path(path: str | Path, name: str = "") -> str | None:
    """Upload a file, or all files of a folder, if the path is the local copy of an address.

    Files that this process has fetched or sent, and that have not changed since, are not sent
    again.

    Args:
        path: any path.
        name: the argument that names it, for error messages.

    Returns:
        The address, or None if the path is not a local copy.

    Raises:
        UserError: the address cannot be written.
    """
    path = Path(path).absolute()
    address = _address_of(path)
    if address is None:
        return None

    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    files.sort(key=os.path.getmtime)  # the file that marks the end of a run is sent last
    remedy = f"; {path} has it, and the same command sends it"
    with _named_errors(f"{name} {address}", "cannot be written", remedy):
        system, root = fsspec.core.url_to_fs(address)
        for file in files:
            if _IN_SYNC.get(file) == _time_and_size(file):
                continue
            system.put_file(str(file), os.path.normpath(f"{root}/{file.relative_to(path)}"))
            _IN_SYNC[file] = _time_and_size(file)
    return address


def _address_of(path: Path) -> str | None:
    """Return the address of a local copy, or None for any other path."""
    cache = cache_folder()
    if cache is None or not path.absolute().is_relative_to(cache):
        return None
    protocol, *parts = path.absolute().relative_to(cache).parts
    return f"{protocol}://{'/'.join(parts)}"


def _time_and_size(file: Path) -> tuple[int, int]:
    state = file.stat()
    return state.st_mtime_ns, state.st_size


@contextmanager
def _named_errors(subject: str, problem: str, remedy: str = "") -> Iterator[None]:
    """Turn any error of a file system, whose classes all differ, into a `UserError`."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"{subject.strip()} {problem} ({reason}){remedy}") from error
