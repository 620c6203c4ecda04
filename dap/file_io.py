"""JSON in and out, files that appear whole or not at all, and a full disk in one line."""

import errno
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dap.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: How those say it who give no number: numpy, safetensors, torch.
FULL_IN_WORDS = (
    *(f"(os error {number})" for number in FULL),
    *("requested and", "unexpected pos", "iostream error", "PytorchStreamWriter failed"),
)
KEPT = "make room, then run again: what is finished is kept"


class DiskFullError(UserError, OSError):
    """There is no room for a file; says which, the bytes needed if they are known, and what to do."""


def read_json(path: str | Path, finite: bool = False) -> Any:
    """The content of a JSON file.

    Args:
        finite: refuse NaN and infinity, which are no JSON, although Python reads them, as it does 1e999.

    Raises:
        FileNotFoundError: no such file.
        UserError: it holds something else than JSON.
    """
    try:
        hooks = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
        return json.loads(Path(path).read_text(encoding="utf-8"), **hooks)
    except ValueError as error:  # JSON's and Unicode's errors are ValueErrors
        raise UserError(f"{path}: no JSON ({error})") from error


def _finite(number: str) -> float:
    if not math.isfinite(float(number)):
        raise UserError(f"it holds {number}")
    return float(number)


def read_object(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file; raises as `read_json`, and `UserError` for a list or a single value."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(
            f"{path}: holds a JSON {type(content).__name__}, expected an object " + '{"name": …}'
        )
    return content


def write_json(content: Mapping[str, Any], path: str | Path) -> None:
    """Write a JSON file as `whole_file` does; raises `ValueError` for NaN or infinity, which JSON cannot hold."""
    text = json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    with whole_file(path) as file:
        file.write(text.encode())


@contextmanager
def whole_file(
    path: str | Path, needed: int | None = None, remedy: str = KEPT
) -> Iterator[BinaryIO]:
    """A file to write, which takes its name when the block ends without an error: nobody ever sees half of it.

    Until then it lies beside that name as `.NAME.….tmp`, and a kill leaves it there. The folder is made.

    Raises:
        DiskFullError: as `disk_full`.
    """
    path = Path(os.path.realpath(path))  # a link stays one
    path.parent.mkdir(parents=True, exist_ok=True)
    with disk_full(path, needed, remedy):
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open(
                "xb"
            ) as file:  # readable for whom the umask says, other than by `mkstemp`
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


@contextmanager
def disk_full(path: Path, needed: int | None = None, remedy: str = KEPT) -> Iterator[None]:
    """Turns "no space left" into a message that says where, how many bytes are needed if known, and what to do.

    Any exception may say it, or come from one that does; all others, and those that are such messages, pass.

    Raises:
        DiskFullError: no space, no quota, or a file that may not become so large.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, DiskFullError) or not _is_full(error):
            raise
        amount = "" if needed is None else f"{needed:,} bytes to write, "
        free = shutil.disk_usage(path if path.is_dir() else path.parent).free
        raise DiskFullError(
            f"{path}: the disk is full ({amount}{free:,} free); {remedy}"
        ) from error


def _is_full(error: BaseException | None) -> bool:
    if error is None:
        return False
    says = getattr(error, "errno", None) in FULL or any(
        words in str(error) for words in FULL_IN_WORDS
    )
    return says or _is_full(error.__cause__ or error.__context__)
