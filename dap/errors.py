"""What a user can mend: refusals in one line, and the errors of libraries as such refusals."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SHOWN = 5  # errors, lines or names that a message tells of many


class UserError(ValueError):
    """A refusal in one line: the argument, file or line it is about, both values, and what to do instead."""


def one_line(error: object) -> str:
    """What an error says, without line breaks; of the system's errors the file comes first, and no number.

    What a terminal would not show, such as an escape sequence or a byte that is no UTF-8, is escaped.

    >>> one_line(ValueError("a\\n  b\\x1b[2J")), one_line(FileNotFoundError(2, "No such file", "a.txt"))
    ('a b\\\\x1b[2J', 'a.txt: No such file')
    """
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    line = " ".join(text.split())
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in line
    )


def joined(failed: Sequence[Exception]) -> Exception:
    """The error where one call of several has failed, else one line of the first `SHOWN` errors."""
    if len(failed) == 1:
        return failed[0]
    return UserError(f"{len(failed)} fail: {'; '.join(map(one_line, failed[:SHOWN]))}")


def require_utf8(path: object) -> None:
    """Raises `UserError` for a file name that is no UTF-8, which no report and no shard could hold."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise UserError(
            f"{os.fsencode(str(path))!r}: a file name that is no UTF-8; rename it"
        ) from None


@contextmanager
def refusals(subject: str = "") -> Iterator[None]:
    """Turns what a library raises for the user's values into a `UserError`.

    Only for the few calls that build something from what the user gave; also a decorator.

    Args:
        subject: argument and value that the message begins with, as libraries seldom name them.

    Raises:
        UserError: of a `ValueError`, an `OSError`, or an `ImportError` of a package that is not installed.
    """
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        if not subject and isinstance(error, UserError | OSError):
            raise
        raise UserError(f"{subject}: {one_line(error)}" if subject else one_line(error)) from error


@contextmanager
def loading(part: str, name: str | Path) -> Iterator[None]:
    """Turns anything that is raised while a file of a model is read into a `UserError` that names both.

    Of damaged or odd files Transformers, tokenizers and our own readers of foreign JSON raise any exception there is.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(
            f"the {part} of {name} cannot be loaded ({reason}): mend it, or give another"
        ) from error
