"""Open plain, gz and xz files and members of zip archives, and read their lines: bytes, no formats.

A path may lead into a zip archive as if that were a folder: `europarl/en-fr.txt.zip/Europarl.en-fr.fr`. Nothing is
unpacked to the disk.
"""

import gzip
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from dap.errors import UserError

MAX_LINE = 64 << 20  # bytes; what is longer is no text, and would fill the memory

_DAMAGED = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError)


@contextmanager
def open_file(path: str | Path) -> Iterator[io.BufferedReader]:
    """The unpacked bytes of a file, or of `archive.zip/member`.

    Raises:
        ValueError: damaged or truncated, in the `with` statement or while its block reads; or as `list_archive`.
        FileNotFoundError: no such file or member.
    """
    unpack: Callable[[BinaryIO], Any] = {".gz": gzip.open, ".xz": lzma.open}.get(Path(path).suffix, nullcontext)
    try:
        with _open_packed(Path(path)) as packed, unpack(packed) as stream:
            yield io.BufferedReader(stream, 1 << 20)  # lines in C, whatever is below
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, OSError) and (error.errno or isinstance(error, FileNotFoundError)):
            raise  # not what bz2 raises
        raise UserError(f"{path}: damaged or truncated compressed file ({error}); fetch it again") from error


def _open_packed(path: Path) -> BinaryIO:
    archive = disk_path(path)
    if archive == path:
        return open(path, "rb")
    member = path.relative_to(archive).as_posix()
    try:
        return _open_archive(archive).open(member)
    except KeyError:
        raise FileNotFoundError(f"{archive}: holds no member {member!r}") from None


def disk_path(path: str | Path) -> Path:
    """The file on the disk: the archive for `archive.zip/member`, else the path itself."""
    path = Path(path)
    return next((parent for parent in path.parents if parent.suffix == ".zip" and parent.is_file()), path)


def list_folder(folder: Path) -> list[Path]:
    """The files in a folder, sorted; folders within are left out."""
    return sorted(filter(Path.is_file, folder.iterdir()))


def list_archive(archive: Path) -> list[Path]:
    """The paths of the files in a zip archive, sorted.

    Raises:
        ValueError: the archive is damaged, or a member is encrypted or has a path outside the archive's folder.
    """
    return sorted(archive / member.filename for member in _open_archive(archive).infolist() if not member.is_dir())


def _open_archive(archive: Path) -> zipfile.ZipFile:
    """Opens a changed archive anew, and one of a forked process: they would share their place in it."""
    return _open_checked(archive, archive.stat().st_size, archive.stat().st_mtime_ns, os.getpid())


@lru_cache(maxsize=64)  # it stays open for its next member: reading all N would list all N as often
def _open_checked(archive: Path, *state: int) -> zipfile.ZipFile:
    try:
        opened = zipfile.ZipFile(archive)
    except zipfile.BadZipFile as error:
        raise UserError(f"{archive}: damaged or truncated zip archive ({error}); fetch it again") from error
    for member in opened.infolist():
        name = PurePosixPath(member.filename)
        if name.is_absolute() or ".." in name.parts:
            raise UserError(f"{archive}: its member {str(name)!r} has a path outside the archive's folder; repack it")
        if member.flag_bits & 1:
            raise UserError(f"{archive}: its member {str(name)!r} is encrypted; unpack it by hand")
    return opened


def read_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file without their end, LF or CR + LF, and without the byte order mark that some editors write.

    Raises:
        ValueError: as `open_file`, UTF-16, lines that end in CR alone, or one longer than `MAX_LINE`.
    """
    with open_file(path) as stream:
        start = stream.peek(3)[:3]
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{path} is UTF-16, expected UTF-8: convert it, iconv -f UTF-16 -t UTF-8")
        if start == b"\xef\xbb\xbf":
            stream.read(3)
        for number, line in enumerate(iter(partial(stream.readline, MAX_LINE), b""), 1):
            if number == 1 and line.count(b"\r") > 1 and not line.endswith(b"\n"):
                raise UserError(f"{path}: its lines end in CR alone; convert it: tr '\\r' '\\n'")
            if len(line) >= MAX_LINE:
                raise UserError(f"{path}, line {number}: longer than {MAX_LINE:,} bytes; is this file text?")
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def not_utf8(text: bytes) -> str | None:
    """Why a text is no UTF-8; None where it is."""
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return f"invalid UTF-8: byte 0x{text[error.start]:02x} at offset {error.start}"
    return None


def read_sentences(path: str | Path) -> Iterator[str]:
    """The lines of one monolingual text, unpacked, empty ones included: line i is sentence i.

    Raises:
        ValueError: invalid UTF-8, named by its line, or as `read_lines`.
        FileNotFoundError: no such file.
    """
    for number, line in enumerate(read_lines(path), 1):
        if reason := not_utf8(line):
            raise UserError(f"{path}, line {number}: {reason}; repair the line")
        yield line.decode()
