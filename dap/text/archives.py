"""Open plain, gz and xz files and members of zip archives, and read their lines: bytes, no formats.

A path may lead into a zip archive as if that were a folder: `europarl/en-fr.txt.zip/Europarl.en-fr.fr`. Nothing is
unpacked to the disk. An archive that holds a member outside its own folder, a link, an encrypted member or more data
than `MAX_RATIO` allows is refused whole.
"""

import gzip
import io
import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

from dap.errors import UserError

BLOCK_BYTES = 4 << 20  # lines are read in blocks of about this size
MAX_LINE = 64 << 20  # bytes; what is longer is no text, and would fill the memory
MAX_RATIO = 200  # unpacked bytes a packed byte; parallel text has 3 to 10, a zip bomb 1,000 and more
FREE_BYTES = 64 << 20  # an archive may always unpack to this much

_DAMAGED = (
    EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile, zipfile.BadZipFile, NotImplementedError
)  # fmt: skip


@contextmanager
def open_file(path: str | Path) -> Iterator[BinaryIO]:
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


def disk_path(path: str | Path) -> Path:
    """The file on the disk: the archive for `archive.zip/member`, else the path itself."""
    path = Path(path)
    return next((parent for parent in path.parents if parent.suffix == ".zip" and parent.is_file()), path)


def _open_packed(path: Path) -> BinaryIO:
    archive = disk_path(path)
    if archive == path:
        return open(path, "rb")
    member = path.relative_to(archive).as_posix()
    try:
        return _opened(archive).open(member)  # never reads more than the archive declares
    except KeyError:
        raise FileNotFoundError(f"{archive}: holds no member {member!r}") from None


def list_archive(archive: str | Path) -> list[str]:
    """The names of the files in a zip archive, in its order.

    Raises:
        ValueError: damaged; a member is a link, encrypted or outside the archive's folder; or the members unpack to
            more than `MAX_RATIO` times the archive's size and more than `FREE_BYTES`.
    """
    return [member.filename for member in _opened(archive).infolist() if not member.is_dir()]


def _opened(archive: str | Path) -> zipfile.ZipFile:
    """The archive after the checks that `list_archive` names; it stays open for its next member."""
    state = Path(archive).stat()
    return _checked(str(archive), state.st_size, state.st_mtime_ns, os.getpid())


@lru_cache(maxsize=64)  # else opening each of N members would read the directory of N, as often
def _checked(archive: str, size: int, changed: int, process: int) -> zipfile.ZipFile:
    """A forked process needs a file of its own, as processes share the place where an open one is read."""
    try:
        opened = zipfile.ZipFile(archive)
    except zipfile.BadZipFile as error:
        raise UserError(f"{archive}: damaged or truncated zip archive ({error}); fetch it again") from error
    members = opened.infolist()
    for member in members:
        if reason := _refusal(member):
            raise UserError(f"{archive}: its member {member.filename!r} {reason}; such an archive is not read")
    unpacked, limit = sum(member.file_size for member in members), max(FREE_BYTES, MAX_RATIO * size)
    if unpacked > limit:
        raise UserError(
            f"{archive}: would unpack from {size:,} to {unpacked:,} bytes, more than the {limit:,} that an archive of "
            f"its size may ({MAX_RATIO} times its size): a zip bomb? Unpack it by hand if you trust it"
        )
    return opened


def _refusal(member: zipfile.ZipInfo) -> str | None:
    """What is wrong with a member; None for a harmless one."""
    name = PurePosixPath(member.filename)
    if name.is_absolute() or ".." in name.parts or "\\" in member.filename or PureWindowsPath(name).drive:
        return "has a path outside the archive's folder"
    if stat.S_ISLNK(member.external_attr >> 16):
        return "is a link"
    return "is encrypted" if member.flag_bits & 1 else None


def line_blocks(path: str | Path, span: tuple[int, int] | None = None, number: int = 0) -> Iterator[bytes]:
    """Whole lines, about `BLOCK_BYTES` of them at a time, all of them ending in a line feed alone.

    A CR before it and the byte order mark that some editors write are dropped.

    Args:
        span: bytes of a plain file to read, from the start of a line to the end of one; None reads all.
        number: lines before the span.

    Raises:
        ValueError: as `open_file`, or a line is longer than `MAX_LINE`.
    """
    start, end = span or (0, None)
    with open_file(path) as stream:
        stream.seek(start) if start else skip_mark(stream, path)
        while block := stream.read(BLOCK_BYTES if end is None else min(BLOCK_BYTES, end - stream.tell())):
            if not number and block.count(b"\r") > 1 and b"\n" not in block:
                raise UserError(f"{path}: its lines end in CR alone; convert it: tr '\\r' '\\n'")
            if not block.endswith(b"\n"):
                rest = stream.readline(MAX_LINE)
                block += rest if rest.endswith(b"\n") else rest + b"\n"  # the last line may lack its end
                if len(rest) >= MAX_LINE:
                    line = number + block.count(b"\n")
                    raise UserError(f"{path}, line {line}: longer than {MAX_LINE:,} bytes; is this file text?")
            if b"\r" in block:
                block = block.replace(b"\r\n", b"\n")
            yield block
            number += block.count(b"\n")


def skip_mark(stream: io.BufferedReader, path: str | Path) -> None:
    """Read past the byte order mark of UTF-8; raise `ValueError` for that of UTF-16, whose text is full of NULs."""
    start = stream.peek(3)[:3]
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UserError(f"{path} is UTF-16, expected UTF-8: convert it, iconv -f UTF-16 -t UTF-8")
    if start == b"\xef\xbb\xbf":
        stream.read(3)


def read_lines(path: str | Path) -> Iterator[bytes]:
    """The lines of a file without their end; raises as `line_blocks`."""
    for block in line_blocks(path):
        lines = block.split(b"\n")
        lines.pop()
        yield from lines


def count_lines(path: str | Path) -> int:
    """The number of lines; raises as `line_blocks`."""
    return sum(block.count(b"\n") for block in line_blocks(path))


def invalid_utf8(error: UnicodeDecodeError) -> str:
    """What is wrong with a line that is no UTF-8."""
    return f"invalid UTF-8: byte 0x{error.object[error.start]:02x} at offset {error.start}"


def read_sentences(path: str | Path) -> Iterator[str]:
    """The lines of one monolingual text, unpacked, empty ones included: line i is sentence i.

    Raises:
        ValueError: invalid UTF-8, named by its line, or as `line_blocks`.
        FileNotFoundError: no such file.
    """
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise UserError(f"{path}, line {number}: {invalid_utf8(error)}; repair the line") from error
