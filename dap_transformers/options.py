"""Options of a run as fields of plain dataclasses, which a command turns into flags."""

from dataclasses import field
from typing import Any


def arg(default: Any, text: str, **options: Any) -> Any:
    """Return a dataclass field that a command shows as a flag.

    Args:
        default: the default value, which may be a list. `dataclasses.MISSING` makes it required.
        text: the help text.
        options: more options of argparse's `add_argument`, such as `choices`.
    """
    metadata = {"help": text, **options}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def require_least(options: Any, **least: float) -> None:
    """Raise `ValueError` for an option below its smallest allowed value. None is allowed."""
    for name, value in least.items():
        given = getattr(options, name)
        if given is not None and given < value:
            raise ValueError(f"{name}={given}: at least {value:g}")
