"""Options: fields of dataclasses with a help text, which a command turns into flags."""

from typing import Any

from transformers.hf_argparser import HfArg


def arg(default: Any, text: str, changes_weights: bool = True, **options: Any) -> Any:
    """Return a dataclass field that is an option.

    Args:
        default: the default value, which may be a list.
        text: the help text.
        changes_weights: False if a resumed training may have another value of this option.
        options: more options of argparse's `add_argument`, such as `choices`.
    """
    if not changes_weights:
        options["changes_weights"] = False
    if isinstance(default, list):
        return HfArg(default_factory=default.copy, help=text, metadata=options)
    return HfArg(default=default, help=text, metadata=options)
