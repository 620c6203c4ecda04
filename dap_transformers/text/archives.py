"""Open plain, gz and xz files and members of zip archives, and read their lines.

A path may lead into a zip archive as if that were a folder:
`europarl/en-fr.txt.zip/Europarl.en-fr.fr`. Nothing is unpacked to the disk.
"""

import gzip
import io
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from dap_transformers.errors import UserError, reading
from dap_transformers.files import plain_suffix, version_of

#: Carriage returns that a line may have. With more, the file uses CR alone as its line end.
MAX_RETURNS = 9
#: Bytes that are unpacked at a time.
BUFFER = 1 << 20
#: How a file that is no text begins, what else its first bytes hold, and what to do with it.
NO_TEXT = (
    (b"%PDF", b"", "a PDF: turn it into text, such as with pdftotext"),
    (b"PK\3\4", b"epub+zip", "an e-book: turn it into text, such as with ebook-convert of Calibre"),
    (b"PK\3\4", b"word/", "a Word document: save it as plain text in UTF-8"),
    (b"PK\3\4", b"", "a zip archive: name one of its files, such as archive.zip/novel.de"),
)
#: Endings of text files whose lines are no sentences.
NO_SENTENCES = (
    ".json", ".jsonl", ".csv", ".parquet", ".xml", ".sgm", ".tmx", ".po", ".srt", ".vtt",
)  # fmt: skip


# ---------------------------------------------------------------------------------------- files


@contextmanager
def open_file(path: str | Path) -> Iterator[io.BufferedReader]:
    """Open a file or member of an archive for reading bytes. Its suffix tells how it is packed."""
    path = Path(path)
    with (
        _open_packed(path) as packed,
        reading(path),  # names the file if its packed content is damaged
        _unpacked(packed, path.suffix.lower()) as stream,
    ):
        yield io.BufferedReader(stream, BUFFER)


def _open_packed(path: Path) -> BinaryIO:
    """Open a file, or a member of a zip archive, without unpacking gz or xz."""
    archive = disk_path(path)
    if archive == path:
        return open(path, "rb")
    member = path.relative_to(archive).as_posix()
    opened, members = _open_archive(archive)
    if member not in members:
        raise FileNotFoundError(f"{archive}: holds no member {member!r}")
    with reading(path):
        return opened.open(members[member])


def _unpacked(packed: BinaryIO, suffix: str) -> Any:
    """Return a context manager whose value is the unpacked content of a stream."""
    if suffix == ".gz":
        return gzip.open(packed)
    if suffix != ".xz":
        return nullcontext(packed)

    # An .xz file may consist of several streams. `lzma.open` would end without an error at the
    # first padding between two of them.
    from xz import XZFile

    class BufferedXZFile(XZFile, io.BufferedIOBase):
        """An `XZFile` with the method `readinto`, which `io.BufferedReader` needs."""

    return BufferedXZFile(packed)


def disk_path(path: str | Path) -> Path:
    """Return the archive for a path such as `archive.zip/member`, and any other path unchanged."""
    path = Path(path)
    for parent in path.parents:
        if parent.suffix in (".zip", ".whl") and parent.is_file():
            return parent
    return path


def list_folder(folder: Path) -> list[Path]:
    """List the files in a folder, sorted, without its subfolders and hidden files."""
    visible = (path for path in folder.iterdir() if not path.name.startswith("."))
    return sorted(path for path in visible if not path.is_dir())


# ------------------------------------------------------------------------------------- archives


def list_archive(archive: Path) -> list[Path]:
    """List the visible files in a zip archive as paths such as `archive.zip/member`, sorted."""
    _, members = _open_archive(archive)
    paths = [archive / name for name in members]
    return sorted(path for path in paths if not path.name.startswith("."))


#: An open archive, and its files by their path within it.
OpenArchive = tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]


def _open_archive(archive: Path) -> OpenArchive:
    """Open a zip archive, unless this process has opened it already and it has not changed.

    A forked process opens it itself, because it would share the position with its parent.
    """
    return _open_version(archive, version_of(archive), os.getpid())


@lru_cache(maxsize=64)  # otherwise the table of an archive would be read for each of its members
def _open_version(archive: Path, *_state: Any) -> OpenArchive:
    """Open a zip archive and list its files. The result is cached."""
    with reading(archive):
        opened = zipfile.ZipFile(archive)

    files = [member for member in opened.infolist() if not member.is_dir()]
    return opened, {str(PurePosixPath(file.filename.lstrip("/"))): file for file in files}


# ---------------------------------------------------------------------------------------- lines


def read_lines(path: str | Path) -> Iterator[bytes]:
    """Yield the lines of a file without their ends (LF or CR LF) and without a byte order mark.

    A single carriage return within a line does not end it. `decode_line` refuses such a line.
    """
    with open_file(path) as stream:
        start = stream.peek(BUFFER)
        for begins, holds, advice in NO_TEXT:
            if start.startswith(begins) and holds in start:
                raise UserError(f"{path} is {advice}")
        if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise UserError(f"{path} is UTF-16, expected UTF-8: iconv -f UTF-16 -t UTF-8")
        if start.startswith(b"\xef\xbb\xbf"):
            stream.read(3)

        for number, line in enumerate(stream, 1):
            if line.count(b"\r") > MAX_RETURNS:
                raise UserError(
                    f"{path}, line {number}: lines end in CR alone; convert it: tr '\\r' '\\n'"
                )
            yield line.removesuffix(b"\n").removesuffix(b"\r")


def decode_line(line: bytes) -> str:
    """Decode a line from UTF-8, and check that it holds no carriage return.

    Web crawls have stray ones in millions of lines. Splitting such a line would tear a sentence.
    """
    if b"\r" in line:
        raise UserError("carriage return within the line: tr '\\r' ' '")
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        advice = "if it is Windows-1252, iconv -f WINDOWS-1252 -t UTF-8"
        raise UserError(f"not UTF-8 (byte {line[error.start]:#x}): {advice}") from None


def read_sentences(path: str | Path) -> Iterator[str]:
    """Yield the lines of a text in one language, including empty ones: line i is sentence i.

    Files whose lines are no sentences are refused, such as JSON.
    """
    suffix = plain_suffix(path)
    unfit = UserError(f"{path}: its lines are no sentences; give one sentence per line")
    if suffix in NO_SENTENCES:
        raise unfit
    for line in decoded_lines(path):
        if suffix == ".tsv" and "\t" in line:
            raise unfit
        yield line


def decoded_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file. An error names the line."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield decode_line(line)
        except UserError as error:
            raise UserError(f"{path}, line {number}: {error}") from error
