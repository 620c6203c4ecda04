"""Files at addresses that fsspec knows, such as `s3://bucket/corpus`: copies to read, and results to send there.

Every copy lies under `CACHE` as `s3/bucket/corpus`, so that the rest of the code knows paths alone.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
import fsspec.core
from filelock import FileLock

from dap.errors import UserError, one_line
from dap.file_io import DiskFullError, disk_full

#: `DAP_CACHE` moves it; on a cluster it is a folder that all nodes share.
CACHE = Path(os.environ.get("DAP_CACHE", "~/.cache/dap-transformers")).expanduser().absolute()
#: Copies that are at their addresses, as they were when this process fetched or sent them.
_SAME: dict[Path, tuple[int, int]] = {}


def place(address: str, name: str = "") -> str:
    """Where the copy of what an address names lies; a path stays as it is.

    Args:
        name: the argument that names it, for the error.

    Raises:
        UserError: the library for such addresses is absent, or the address has no host or bucket.
    """
    protocol, _, rest = address.partition("://")
    if not rest:
        return address
    if rest.startswith("/"):
        raise UserError(
            f"{name} {address}: name a host or a bucket behind {protocol}://, or give a path without it"
        )
    with _refusals(f"{name} {address}", "cannot be reached"):
        fsspec.get_filesystem_class(protocol)
    return str(CACHE / protocol / os.path.normpath(f"/{rest}").lstrip("/"))


def fetch(address: str, name: str = "") -> str:
    """`place`, with a copy of the file, or of the folder with all that it holds; a path stays as it is.

    A file whose copy has the same size and, where the file system tells it, the same time is not fetched again; a copy
    appears once it is whole. Of several processes one fetches, and the others wait for it.

    Raises:
        UserError: as `place`, nothing is there that may be read, or the copy has more files.
    """
    copy = Path(place(address, name))
    if "://" not in address:
        return address
    CACHE.mkdir(parents=True, exist_ok=True)
    remedy = "; check the address and your login there"
    with _refusals(f"{name} {address}", "cannot be fetched", remedy), FileLock(CACHE / ".lock"):
        system, root = fsspec.core.url_to_fs(address)
        info = system.info(root)
        files = {root: info} if info["type"] == "file" else system.find(root, detail=True)
        copies = {copy / os.path.relpath(file, root): file for file in files}
        for path, file in copies.items():
            _fetch_file(system, file, files[file]["size"], path)
            _SAME[path] = _state(path)
    for path in sorted(copy.rglob("[!.]*")):
        if path.is_file() and path not in copies:
            raise UserError(
                f"{name} {address} has no {path.relative_to(copy)}, but its copy has: remove {path}"
            )
    return str(copy)


def _fetch_file(system: fsspec.AbstractFileSystem, file: str, size: int | None, copy: Path) -> None:
    if os.pardir in copy.parts:
        raise ValueError(f"{file} leads out of the folder")
    changed = 0
    with suppress(NotImplementedError):  # a file system that does not tell
        changed = int(system.modified(file).timestamp())
    state = copy.stat() if copy.is_file() else None
    if state is None or (state.st_size, int(state.st_mtime)) != (size, changed):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with disk_full(copy, size), tempfile.TemporaryDirectory(prefix=".", dir=CACHE) as folder:
            part = Path(folder, copy.name)
            system.get_file(file, str(part))
            if size not in (None, part.stat().st_size):
                raise OSError(f"{part.stat().st_size:,} of {size:,} bytes came")
            os.utime(part, (changed, changed))
            part.replace(copy)


def fetch_sent(path: Path) -> None:
    """Fetches what was sent from a path, if anything was; raises as `fetch`."""
    if address := _address(path):
        with _refusals(address, "cannot be reached"):
            is_there = fsspec.core.url_to_fs(address)[0].exists(address)
        if is_there:
            fetch(address)


def send(path: str | Path, name: str = "") -> str | None:
    """Sends a file, or all that a folder holds, to the address whose `place` it is, which is returned.

    What this process has sent, and nobody has changed, is not sent again. Any other path stays where it is.

    Raises:
        UserError: it may not be written.
    """
    path = Path(path).absolute()
    if address := _address(path):
        with _refusals(
            f"{name} {address}",
            "cannot be written",
            f"; {path} has it, and the same command sends it",
        ):
            system, root = fsspec.core.url_to_fs(address)
            files = [
                file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()
            ]
            for file in sorted(files, key=os.path.getmtime):  # what marks the end comes last
                if _SAME.get(file) != _state(file):
                    system.put_file(str(file), os.path.normpath(f"{root}/{file.relative_to(path)}"))
                    _SAME[file] = _state(file)
    return address


def _address(path: Path) -> str | None:
    if not path.absolute().is_relative_to(CACHE):
        return None
    protocol, *rest = path.absolute().relative_to(CACHE).parts
    return f"{protocol}://{'/'.join(rest)}"


def _state(file: Path) -> tuple[int, int]:
    state = file.stat()
    return state.st_mtime_ns, state.st_size


@contextmanager
def _refusals(what: str, why: str, remedy: str = "") -> Iterator[None]:
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:  # each file system has its own
        raise UserError(
            f"{what.strip()} {why} ({type(error).__name__}: {one_line(error)}){remedy}"
        ) from error
