"""Parquet shards and folders that appear under their name only when whole (no models).

Shapes: none but tables of pairs.
"""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dap.errors import UserError

ROW_GROUP = 65_536  # pairs
#: Of the shards. `text_hash` is the key of the normalised pair; `target_repeated` marks English sentences that other
#: training pairs, of any language, have too.
SCHEMA = pa.schema(
    {
        "source": pa.string(),
        "target": pa.string(),
        "origin": pa.string(),
        "text_hash": pa.uint64(),
        "target_repeated": pa.bool_(),
    }
)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_COMPRESSION = {"compression": "zstd", "compression_level": 3}


def shard_path(folder: Path, name: str, number: int) -> Path:
    return folder / f"{number:05d}.{name}.parquet"


class ShardWriter:
    """Writes pairs into shards `{number}.{name}.parquet` of a folder; each has its name only when it is whole."""

    def __init__(self, folder: Path, name: str, shard_size: int) -> None:
        self._folder, self._name, self._size = folder, name, shard_size
        self._waiting: list[pa.Table] = []
        self._rows = self._number = 0
        self._writer: pq.ParquetWriter | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def add(self, table: pa.Table) -> None:
        while len(table):
            part = table.slice(0, self._size - self._rows)
            table = table.slice(len(part))
            self._waiting.append(part)
            self._rows += len(part)
            if sum(map(len, self._waiting)) >= ROW_GROUP or self._rows == self._size:
                self._flush(self._rows == self._size)
            if self._rows == self._size:
                self._finish()

    def close(self) -> int:
        """Ends the last shard and tells the number of shards."""
        self._flush(True)
        self._finish()
        return self._number

    def _flush(self, all_rows: bool) -> None:
        """Writes whole row groups; the bytes of a shard do not depend on the tables that its pairs came in."""
        if not self._waiting:
            return
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._unfinished, SCHEMA, **_COMPRESSION)
        waiting = pa.concat_tables(self._waiting).combine_chunks()
        rows = len(waiting) if all_rows else len(waiting) // ROW_GROUP * ROW_GROUP
        self._writer.write_table(waiting.slice(0, rows), ROW_GROUP)
        self._waiting = [waiting.slice(rows)] if rows < len(waiting) else []

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            os.replace(self._unfinished, shard_path(self._folder, self._name, self._number))
            self._writer, self._rows, self._number = None, 0, self._number + 1

    @property
    def _unfinished(self) -> Path:
        return self._folder / f".{self._number:05d}.{self._name}.{os.getpid()}.tmp"

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self._unfinished.unlink(missing_ok=True)


@contextmanager
def full_device(place: str | Path) -> Iterator[None]:
    """Turns the error of a full device into one message.

    Raises:
        ValueError: no space left on the device.
    """
    try:
        yield
    except OSError as error:
        cut_short = error.errno is None and "requested and" in str(error)  # numpy's, when it writes less than asked
        if error.errno not in _FULL and not cut_short:
            raise
        raise UserError(
            f"{place}: {os.strerror(error.errno or errno.ENOSPC).lower()}; what is finished stays valid: make "
            "room and give the same command again"
        ) from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends without an error, and else goes.

    Raises:
        ValueError: as `full_device`.
    """
    new = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        with full_device(folder):
            new.mkdir(parents=True)
            yield new
            os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
