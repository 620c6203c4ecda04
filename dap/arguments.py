"""How every command reads its arguments."""

import argparse
from collections.abc import Iterable
from typing import Any

from transformers import HfArgumentParser

from dap.errors import refusals


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where there is one and the text does not name it: no "0 by default. (default: None)"."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False or action.default == []
        if says_nothing or "default" in (action.help or "").lower():
            return action.help
        return super()._get_help_string(action)


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
