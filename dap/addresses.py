"""Files at addresses that fsspec knows, such as `s3://bucket/corpus`: copies to read, and results to send there.

Every copy lies under `CACHE` as `s3/bucket/corpus`, so that the rest of the code knows paths alone.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import fsspec.core

from dap.errors import UserError, one_line
from dap.files import DiskFullError, whole_file

#: `DAP_CACHE` moves it; on a cluster it is a folder that all nodes share.
CACHE = Path(os.environ.get("DAP_CACHE", "~/.cache/dap-transformers")).expanduser().absolute()


def place(address: str) -> str:
    """Where the copy of what an address names lies; a path stays as it is.

    Raises:
        UserError: the library for such addresses is absent.
    """
    protocol, _, rest = address.partition("://")
    if not rest:
        return address
    with _refusals(address, "cannot be reached"):
        fsspec.get_filesystem_class(protocol)
    return str(CACHE / protocol / os.path.normpath(f"/{rest}").lstrip("/"))


def fetch(address: str) -> str:
    """`place`, with a copy of the file, or of the folder with all that it holds; a path stays as it is.

    A file whose copy has the same size is not fetched again; a copy appears once it is whole.

    Raises:
        UserError: as `place`, or nothing is there that may be read.
    """
    copy = place(address)
    if copy != address:
        with _refusals(address, "cannot be fetched"):
            system, root = fsspec.core.url_to_fs(address)
            is_file = system.info(root)["type"] == "file"
            for name in [root] if is_file else system.find(root):
                path, size = Path(copy) / os.path.relpath(name, root), system.size(name)
                if not path.is_file() or path.stat().st_size != size:
                    with whole_file(path, size) as file, system.open(name, "rb") as stream:
                        shutil.copyfileobj(stream, file)
    return copy


def send(path: str | Path) -> None:
    """Sends a file, or all that a folder holds, to the address whose `place` it is; any other path stays where it is.

    Raises:
        UserError: it may not be written.
    """
    path = Path(path)
    if path.absolute().is_relative_to(CACHE):
        protocol, *rest = path.absolute().relative_to(CACHE).parts
        address = f"{protocol}://{'/'.join(rest)}"
        with _refusals(address, f"cannot be written; {path} has it, and the same command sends it"):
            system, root = fsspec.core.url_to_fs(address)
            files = [file for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
            for file in sorted(files, key=os.path.getmtime):  # what marks the end comes last
                system.put_file(str(file), os.path.normpath(f"{root}/{file.relative_to(path)}"))


@contextmanager
def _refusals(address: str, what: str) -> Iterator[None]:
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:  # each file system has its own
        raise UserError(f"{address} {what} ({type(error).__name__}: {one_line(error)})") from error
