"""Open plain, gz and xz files and members of zip archives, and read their lines: bytes, no formats.

A path may lead into a zip archive as if that were a folder: `europarl/en-fr.txt.zip/Europarl.en-fr.fr`. Nothing is
unpacked to the disk.
"""

import errno
import gzip
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from xz import XZError, XZFile

from dap.errors import UserError, require_utf8

MAX_LINE = 64 << 20  # bytes; what is longer is no text, and would fill the memory
MAX_RETURNS = 9  # carriage returns within a line; what has more is many lines

_DAMAGED = (
    EOFError,
    zlib.error,
    XZError,
    LZMAError,
    gzip.BadGzipFile,
    zipfile.BadZipFile,
    NotImplementedError,
)
_DAMAGED += (UnicodeDecodeError,)  # of a member's name


@contextmanager
def open_file(path: str | Path) -> Iterator[io.BufferedReader]:
    """The unpacked bytes of a file, or of `archive.zip/member`.

    Raises:
        ValueError: damaged or truncated, in the `with` statement or while its block reads; or as `list_archive`.
        FileNotFoundError: no such file or member.
    """
    unpack: Callable[[BinaryIO], Any] = {".gz": gzip.open, ".xz": _Xz}.get(
        Path(path).suffix, nullcontext
    )
    try:
        with _open_packed(Path(path)) as packed, unpack(packed) as stream:
            yield io.BufferedReader(stream, 1 << 20)  # lines in C, whatever is below
    except (*_DAMAGED, OSError) as error:
        if isinstance(error, FileNotFoundError) or getattr(error, "errno", None) not in (
            None,
            errno.EINVAL,
        ):
            raise  # not what bz2 raises, nor a place before the start of an archive
        raise UserError(
            f"{path}: damaged or truncated compressed file ({error}); fetch it again"
        ) from error


class _Xz(XZFile, io.BufferedIOBase):
    """All streams of an .xz file, or an error; `lzma.open` ends in silence at the first padding. Has a `readinto`."""


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
    return next(
        (each for each in path.parents if each.suffix in (".zip", ".whl") and each.is_file()), path
    )


def list_folder(folder: Path, start: str = "") -> list[Path]:
    """The files in a folder whose names begin with `start`, sorted.

    Folders within are left out, and where no start is given hidden files, as editors and macOS leave beside others.

    Raises:
        UserError: what cannot be read as a file, such as a link that leads nowhere or a pipe: its language would be
            missing, and nobody the wiser.
    """
    files = []
    for path in sorted(each for each in folder.iterdir() if each.name.startswith(start)):
        if path.name.startswith(".") and not start:
            continue
        try:
            mode = path.stat().st_mode
        except OSError as error:  # a link to nothing or to itself
            raise UserError(f"{path}: {error.strerror}; mend or remove it") from error
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode) or not os.access(path, os.R_OK):
            raise UserError(
                f"{path} is no file that can be read; give the right to read it, or move it elsewhere"
            )
        require_utf8(path)
        files.append(path)
    return files


def list_archive(archive: Path) -> list[Path]:
    """The paths of the files in a zip archive but hidden ones, sorted.

    Raises:
        ValueError: the archive is damaged, or a member is encrypted, is there twice, or has a path outside the
            archive's folder.
    """
    members = [
        archive / member.filename
        for member in _open_archive(archive).infolist()
        if not member.is_dir()
    ]
    return sorted(path for path in members if not path.name.startswith("."))


def _open_archive(archive: Path) -> zipfile.ZipFile:
    """Opens an archive anew where it has changed, and in a forked process, which would share its parent's place."""
    return _open_checked(archive, archive.stat().st_size, archive.stat().st_mtime_ns, os.getpid())


@lru_cache(maxsize=64)  # it stays open for its next member: reading all N would list all N as often
def _open_checked(archive: Path, *state: int) -> zipfile.ZipFile:
    try:
        opened = zipfile.ZipFile(archive)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        if getattr(error, "errno", None) not in (None, errno.EINVAL):
            raise
        raise UserError(
            f"{archive}: damaged or truncated zip archive ({error}); fetch it again"
        ) from error
    names = set()
    for member in opened.infolist():
        name = PurePosixPath(member.filename)
        if name.is_absolute() or ".." in name.parts:
            raise UserError(
                f"{archive}: its member {str(name)!r} has a path outside the archive's folder; repack it"
            )
        if member.flag_bits & 1:
            raise UserError(f"{archive}: its member {str(name)!r} is encrypted; unpack it by hand")
        if name in names and not member.is_dir():
            raise UserError(f"{archive}: its member {str(name)!r} is there twice; repack it")
        names.add(name)
    return opened


def read_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file without their end, LF or CR + LF, and without the byte order mark that some editors write.

    A carriage return within a line is a lost line end or a slip: `decode_line` refuses it as it does invalid UTF-8.

    Raises:
        ValueError: as `open_file`, UTF-16, lines that end in CR alone, or one longer than `MAX_LINE`.
    """
    with open_file(path) as stream:
        start = stream.peek(3)[:3]
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(
                f"{path} is UTF-16, expected UTF-8: convert it, iconv -f UTF-16 -t UTF-8"
            )
        if start == b"\xef\xbb\xbf":
            stream.read(3)
        for number, line in enumerate(iter(partial(stream.readline, MAX_LINE), b""), 1):
            if line.count(b"\r") > MAX_RETURNS:
                raise UserError(
                    f"{path}, line {number}: many lines that end in CR alone; convert it: tr '\\r' '\\n'"
                )
            if len(line) >= MAX_LINE:
                raise UserError(
                    f"{path}, line {number}: longer than {MAX_LINE:,} bytes; is this file text?"
                )
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def decode_line(line: bytes) -> str:
    """The text of a line.

    No line of the 2.2 million that this project was measured on has a carriage return within, but web crawls have a
    stray one in millions of lines: whoever tolerates bad lines need not give up the file for it, and whoever splits
    there tears a sentence.

    Raises:
        ValueError: a carriage return within it, or no UTF-8.
    """
    if b"\r" in line:
        raise UserError(
            f"carriage return at offset {line.index(13)}, within the line: tr '\\r' '\\n' or ' '"
        )
    return decode(line)


def decode(text: bytes) -> str:
    """The text of its bytes; raises `UserError` for what is no UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"invalid UTF-8: byte 0x{text[error.start]:02x} at offset {error.start}"
        ) from error


def read_sentences(path: str | Path) -> Iterator[str]:
    """The lines of one monolingual text, unpacked, empty ones included: line i is sentence i.

    Raises:
        ValueError: a line that is no text (`decode_line`), or as `read_lines`.
        FileNotFoundError: no such file.
    """
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield decode_line(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; repair the line") from error
