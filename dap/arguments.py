"""How every command reads its arguments."""

import argparse
import copy
from collections.abc import Iterable
from typing import Any

from transformers import HfArgumentParser

from dap.errors import refusals


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows an argument once, with `_`, and its default where there is one and the text does not name it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False or action.default == []
        if says_nothing or "default" in (action.help or "").lower():
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        action = copy.copy(action)
        action.option_strings = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        return super()._format_action_invocation(action)


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` for dataclasses, whose help shows only defaults that say something.

    What the dataclasses refuse, Transformers' own among them, is a `UserError`.
    """

    def __init__(self, types: Iterable[type] | type, **options: Any) -> None:
        super().__init__(types, formatter_class=_Help, **options)

    @refusals()
    def parse_args_into_dataclasses(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        """The dataclasses that the command line fills; raises `UserError` for what they refuse."""
        return super().parse_args_into_dataclasses(*args, **options)
