"""Read text and JSON, write files and folders as a whole or not at all."""

import gzip
import hashlib
import json
import logging
import lzma
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import xxhash
from filelock import FileLock, Timeout

from dap_transformers.errors import UserError, one_line

logger = logging.getLogger(__name__)

#: Name of the lock in a folder, if nothing can be written beside it.
LOCK = ".lock"


def _gzip(file: BinaryIO) -> gzip.GzipFile:
    """Return a stream that compresses, whose bytes tell neither a name nor a time."""
    return gzip.GzipFile("", "wb", fileobj=file, mtime=0)


#: Ending of a compressed file's name -> function that opens a stream which compresses.
COMPRESSORS = {".gz": _gzip, ".xz": partial(lzma.open, mode="wb")}


def read_json(path: str | Path) -> Any:
    """Read a JSON file. An error names the file."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # includes JSONDecodeError
        raise UserError(f"{path}: not valid JSON ({error})") from error


def public_name(path: str) -> str:
    """Return a name that reports and cards can show: an absolute path becomes its last part."""
    return Path(path).name if os.path.isabs(path) else path


def content_digest(path: str | Path) -> str:
    """Return a hash of a file's content, 32 hexadecimal digits. Each process reads a file once.

    Size and time do not tell whether a file has changed: `cp -p` and unpacked archives set the
    time.
    """
    return _digest_of(str(path), version_of(path))


def version_of(path: str | Path) -> tuple[int, ...]:
    """Return numbers that change with a file: its inode, size and times."""
    state = os.stat(path)
    return (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)


@lru_cache(maxsize=1000)  # an archive may hold the text of many languages
def _digest_of(path: str, version: tuple[int, ...]) -> str:
    """Return the hash of a file's content. The version is part of the cache's key."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def write_json(content: Mapping[str, Any], path: str | Path) -> None:
    """Write a JSON file that appears whole or not at all (see `whole_file`)."""
    text = json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing that takes its name only when the block ends without an error.

    Until then the file is called `.NAME.….tmp`, in the same folder, so nobody reads half a file.
    The folder is created. A symbolic link is kept, and the file that it points to is replaced.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        # `open` gives the access rights that the umask allows, `mkstemp` would not.
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def compressed_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a `whole_file` for writing, and compress it if its name ends in .gz or .xz."""
    compress = COMPRESSORS.get(Path(path).suffix.lower(), nullcontext)
    with whole_file(path) as file, compress(file) as stream:
        yield stream


def plain_suffix(path: str | Path) -> str:
    """Return the suffix of a file name in small letters, not counting `.gz` or `.xz` behind it.

    >>> plain_suffix("pairs.tsv.gz"), plain_suffix("pairs.TSV.GZ"), plain_suffix("pairs.gz")
    ('.tsv', '.tsv', '')
    """
    return unpacked(Path(path)).suffix.lower()


def unpacked(path: Path) -> Path:
    """Return a path without `.gz` or `.xz` at its end."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSORS else path


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Create a folder for writing that takes its name only when the block ends without an error.

    If a folder of that name holds something by then, another process has done the same work. That
    folder is kept, and the new one is removed.
    """
    path = Path(os.path.realpath(path))
    temporary = _temporary_name(path)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        try:
            temporary.replace(path)  # also over an empty folder
        except OSError:
            if not path.is_dir():
                raise
            if not any(path.iterdir()):  # a mount point, which cannot be replaced
                for child in temporary.iterdir():
                    shutil.move(child, path / child.name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_name(path: Path) -> Path:
    """Return a path beside the given one with a hidden, random name: `.NAME.….tmp`."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")


@contextmanager
def claimed(path: str | Path, name: str = "") -> Iterator[None]:
    """Lock a file or folder until the block ends. If another run has it, raise `UserError` at once.

    The lock is the file `.NAME.lock` beside the path, or `.lock` inside a folder whose parent is
    not writable, such as a mounted one. The system frees it when the process ends, even if the
    process is killed. If the file system has no locks, only a warning is logged.
    """
    absolute = Path(path).resolve()
    absolute.parent.mkdir(parents=True, exist_ok=True)
    lock_file = absolute.with_name(f".{absolute.name}.lock")
    if absolute.is_dir() and not os.access(absolute.parent, os.W_OK):
        lock_file = absolute / LOCK
    lock = FileLock(lock_file)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        named = f"{name} {path}".strip()
        raise UserError(
            f"{named} is in use by another run: wait until it ends, or give another path"
        ) from None
    except NotImplementedError as error:  # some network file systems have no locks
        logger.warning("%s cannot be locked (%s): start no other run there", path, one_line(error))

    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # Windows removes no open file
                lock_file.unlink()
            lock.release()
