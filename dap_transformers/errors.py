"""Errors that the user can fix, with a message of one line, and helpers that make messages."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

#: In an address: what stands before the login, and what stands before the query.
_LOGIN = re.compile(r"(\b(?!abfs|wasb)[a-z][a-z0-9+.]*://)[^/\s'\"?#]*@")
_QUERY = re.compile(r"(\bhttps?://[^\s'\"?#]+)[?#][^\s'\",)]*")
QUOTED_ERRORS = 5  # errors, lines or names that a message quotes if there are many


class UserError(ValueError):
    """An error that the user can fix. Commands print its message, one line, without a traceback."""


def one_line(error: object) -> str:
    """Return an error's message on one line, without secrets and hidden characters.

    For errors of the file system, the file comes first and the error number is left out. Addresses
    lose their logins and queries.

    >>> one_line(ValueError("no https://me:secret@host/de-en.tsv?token=abc there"))
    'no https://host/de-en.tsv there'
    >>> one_line(ValueError("a\\n  b\\x1b[2J"))
    'a b\\\\x1b[2J'
    >>> one_line(FileNotFoundError(2, "No such file", "a.txt"))
    'a.txt: No such file'
    """
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    line = _QUERY.sub(r"\1", _LOGIN.sub(r"\1", " ".join(text.split())))
    return "".join(map(_escaped, line))


@cache
def warn_once(text: str, *values: object) -> None:
    """Log a warning, unless it was logged before: a second pass over a file repeats none."""
    logging.getLogger(__name__).warning(text, *values)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, which gets an "s" unless the count is 1.

    >>> counted(1, "language"), counted(1200, "pair")
    ('1 language', '1,200 pairs')
    """
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _escaped(character: str) -> str:
    """Return a printable character unchanged, and any other as its escape sequence."""
    if character.isprintable():
        return character
    return character.encode("unicode_escape").decode()


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn any error within the block into a `UserError` that begins with `what` is read."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        cause = error
        if type(error).__name__ == "StrictDataclassClassValidationError":
            cause = error.__cause__ or error  # without the words that huggingface_hub puts before
        reason = f"{type(cause).__name__}: {one_line(cause)}"
        if "couldn't connect to" in reason:  # Transformers' words, also for an absent folder
            reason = "there is no such folder, and the Hub cannot be reached"
        raise UserError(f"{what}: {reason}") from error
