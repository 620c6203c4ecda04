"""Open plain, gz and xz files and members of zip archives, and read their lines.

A path may lead into a zip archive as if that were a folder:
`europarl/en-fr.txt.zip/Europarl.en-fr.fr`. Nothing is unpacked to the disk.
"""

import errno
import gzip
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from dap_transformers.errors import UserError, require_plain_name

#: Bytes that a line may have. A longer line is no text and would fill the memory.
MAX_LINE = 64 << 20
#: Carriage returns that a line may have. With more, the file uses CR alone as its line end.
MAX_RETURNS = 9
#: Bytes that are unpacked at a time.
BUFFER = 1 << 20


# ---------------------------------------------------------------------------------------- files


@contextmanager
def open_file(path: str | Path) -> Iterator[io.BufferedReader]:
    """Open a file for reading bytes, as a context manager, and unpack it while it is read.

    Args:
        path: a plain, `.gz` or `.xz` file, or a member of a zip archive: `archive.zip/member`.
            The suffix decides how the content is unpacked.

    Yields:
        A buffered stream of the unpacked bytes.
    """
    path = Path(path)
    try:
        with _open_packed(path) as packed, _unpacked(packed, path.suffix) as stream:
            yield io.BufferedReader(stream, BUFFER)
    except (*_damage_errors(), OSError) as error:
        if isinstance(error, FileNotFoundError) or not _says_damaged(error):
            raise
        raise UserError(
            f"{path}: damaged or truncated compressed file ({error}); fetch it again"
        ) from error


def _open_packed(path: Path) -> BinaryIO:
    """Open a file, or a member of a zip archive, as a stream of bytes.

    A file that is packed as gz or xz is not unpacked here.
    """
    archive = disk_path(path)
    if archive == path:
        return open(path, "rb")
    member = path.relative_to(archive).as_posix()
    opened, members = _open_archive(archive)
    if member not in members:
        raise FileNotFoundError(f"{archive}: holds no member {member!r}")
    return opened.open(members[member])


def _unpacked(packed: BinaryIO, suffix: str) -> Any:
    """Return a context manager whose value is the unpacked content of a stream."""
    if suffix == ".gz":
        return gzip.open(packed)
    if suffix == ".xz":
        return _open_xz(packed)
    return nullcontext(packed)


def _open_xz(packed: BinaryIO) -> Any:
    """Return a stream with the unpacked content of an .xz file.

    Such a file may consist of several xz streams. `lzma.open` would end without an error at the
    first padding between two of them.
    """
    from xz import XZFile

    class BufferedXZFile(XZFile, io.BufferedIOBase):
        """An `XZFile` with the method `readinto`, which `io.BufferedReader` needs."""

    return BufferedXZFile(packed)


def _damage_errors() -> tuple[type[Exception], ...]:
    """Return the classes of errors that mean a damaged file, apart from `OSError`."""
    from xz import XZError

    return (
        EOFError,
        LZMAError,
        NotImplementedError,
        UnicodeDecodeError,  # the name of a member
        XZError,
        gzip.BadGzipFile,
        zipfile.BadZipFile,
        zlib.error,
    )


def _says_damaged(error: Exception) -> bool:
    """Tell whether an error is about a file's content, and not about the file system.

    For a damaged file, libraries raise errors without an error number (`errno`), or with EINVAL (a
    position before the file's start). Any other number comes from the file system.
    """
    return getattr(error, "errno", None) in (None, errno.EINVAL)


def disk_path(path: str | Path) -> Path:
    """Return the file on the disk that holds the content of a path.

    This is the archive for a path such as `archive.zip/member` (also `.whl`), if that archive is
    a file. Any other path is returned unchanged, also that of an archive itself.
    """
    path = Path(path)
    for parent in path.parents:
        if parent.suffix in (".zip", ".whl") and parent.is_file():
            return parent
    return path


def list_folder(folder: Path, start: str = "") -> list[Path]:
    """List the files in a folder, sorted, without its subfolders.

    Args:
        folder: the folder.
        start: list only files whose names begin with it. If it is empty, hidden files are left
            out, because editors and macOS put some beside others.
    """
    files = []
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(start):
            continue
        if path.name.startswith(".") and not start:
            continue
        try:
            mode = path.stat().st_mode
        except OSError as error:  # a link to nothing or to itself
            raise UserError(f"{path}: {error.strerror}; repair or remove it") from error
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode) or not os.access(path, os.R_OK):
            raise UserError(f"{path} cannot be read as a file: allow reading it, or move it away")
        require_plain_name(path)
        files.append(path)
    return files


# ------------------------------------------------------------------------------------- archives


def list_archive(archive: Path) -> list[Path]:
    """List the files in a zip archive, sorted, without files whose names begin with a dot.

    Args:
        archive: path of the archive.

    Returns:
        Paths such as `archive.zip/member`.
    """
    paths = []
    _, members = _open_archive(archive)
    for name in members:
        path = archive / name
        if not path.name.startswith("."):
            paths.append(path)
    return sorted(paths)


#: An open archive, and its files by their path within it.
OpenArchive = tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]


def _open_archive(archive: Path) -> OpenArchive:
    """Open a zip archive, or return it if this process has opened it already.

    An archive that has changed since then is opened again. A forked process opens it itself,
    because it would share the position in the file with its parent.

    Returns:
        The open archive, and the entry of each member that is a file, by the member's name.
    """
    state = archive.stat()
    version = (state.st_ino, state.st_size, state.st_mtime_ns, state.st_ctime_ns)
    return _open_checked(archive, *version, os.getpid())


@lru_cache(maxsize=64)  # otherwise the table of an archive would be read for each of its members
def _open_checked(archive: Path, *state: int) -> OpenArchive:
    """Open a zip archive and check its members. The result is cached.

    Returns:
        The open archive, and the entry of each member that is a file, by the member's name.
    """
    try:
        opened = zipfile.ZipFile(archive)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        if not _says_damaged(error):
            raise
        raise UserError(
            f"{archive}: damaged or truncated zip archive ({error}); fetch it again"
        ) from error

    members = {}
    for member in opened.infolist():
        if not member.filename:
            raise UserError(f"{archive}: a member has no name; repack it")
        name = PurePosixPath(member.filename)
        shown = f"{archive}: its member {str(name)!r}"
        if name.is_absolute() or ".." in name.parts:
            raise UserError(f"{shown} has a path outside the archive's folder; repack it")
        if member.flag_bits & 1:
            raise UserError(f"{shown} is encrypted; unpack it by hand")
        if member.is_dir():
            continue
        if str(name) in members:
            raise UserError(f"{shown} occurs twice; repack it")
        require_plain_name(archive / name)
        members[str(name)] = member
    return opened, members


# ---------------------------------------------------------------------------------------- lines


def read_lines(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends (LF or CR LF) and without a byte order mark.

    Empty lines are yielded. A single carriage return within a line does not end it. `decode_line`
    refuses such a line.

    Args:
        path: the file, which may be packed (`open_file`).
    """
    with open_file(path) as stream:
        start = stream.peek(3)[:3]
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{path} is UTF-16, expected UTF-8: iconv -f UTF-16 -t UTF-8")
        if start == b"\xef\xbb\xbf":
            stream.read(3)

        next_line = partial(stream.readline, MAX_LINE)
        for number, line in enumerate(iter(next_line, b""), 1):
            if line.count(b"\r") > MAX_RETURNS:
                raise UserError(
                    f"{path}, line {number}: lines end in CR alone; convert it: tr '\\r' '\\n'"
                )
            if len(line) >= MAX_LINE:
                raise UserError(
                    f"{path}, line {number}: longer than {MAX_LINE:,} bytes; is this file text?"
                )
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def decode_line(line: bytes) -> str:
    """Decode a line from UTF-8, and check that it holds no carriage return.

    Web crawls have stray carriage returns in millions of lines. Splitting such a line would tear a
    sentence. The error lets a caller who tolerates some bad lines skip it.

    Args:
        line: a line without its end (LF or CR LF), as `read_lines` yields it.
    """
    if b"\r" in line:
        offset = line.index(b"\r")
        raise UserError(f"carriage return at offset {offset}, within the line: tr '\\r' ' '")
    return decode(line)


def decode(text: bytes) -> str:
    """Return bytes in UTF-8 as text."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise UserError(f"invalid UTF-8: byte 0x{byte:02x} at offset {error.start}") from error


def read_sentences(path: str | Path) -> Iterator[str]:
    """Yield the lines of a text in one language, including empty ones: line i is sentence i.

    Args:
        path: the file, which may be packed (`open_file`).
    """
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield decode_line(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: {error}; repair the line") from error
