"""How every command reads its arguments."""

import argparse
import copy
import dataclasses
import inspect
import math
from collections.abc import Iterable
from typing import Any

from transformers import HfArgumentParser
from transformers.hf_argparser import HfArg

from dap.addresses import fetch_address, local_path
from dap.errors import UserError, refusals, require_utf8

MAY_BE_EMPTY = ("prefix",)  # says that there is none, where a checkpoint has one
#: Arguments that may be addresses (`dap.addresses`): what is read, and what is written.
READ = ("train_data", "validation_data", "data", "evaluation_data", "data_dir", "bucc", "files")
WRITTEN = ("output", "output_dir", "output_file", "report_file", "embeddings_dir", "list_leaks")


def arg(default: Any, text: str, **options: Any) -> Any:
    """An argument of a dataclass, with its default, which may be a list, its help, and options such as `choices`."""
    given = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return HfArg(**given, help=text, metadata=options)


def require_least(args: Any, **least: float) -> None:
    """Raise `UserError` for an argument, by name, that is below its least value; None is not."""
    for name, value in least.items():
        if (given := getattr(args, name)) is not None and given < value:
            raise UserError(f"--{name} {given}: at least {value:g}")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Shows an argument once, with `_`, and its default where there is one and the text does not name it."""

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], *others: Any
    ) -> None:
        """The first line: what has to be given, of which the list below says more."""
        super().add_usage(
            usage,
            [action for action in actions if action.required or action.dest == "help"],
            *others,
        )

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says_nothing = action.default is None or action.default is False or action.default == []
        if says_nothing or "default" in (action.help or "").lower():
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        action = copy.copy(action)
        action.option_strings = [
            name for name in action.option_strings if "-" not in name.lstrip("-")
        ]
        return super()._format_action_invocation(action)


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` for dataclasses, whose help shows those of Transformers' Trainer last.

    What the dataclasses refuse, Transformers' own among them, is a `UserError`; so is an empty value (of an unset
    variable: as a path it would be the current folder), a number that is none or too large to reckon with, and a file
    name that is no UTF-8. What is read from an address is fetched.
    """

    def __init__(self, types: Iterable[type] | type, **options: Any) -> None:
        types = [types] if isinstance(types, type) else list(types)
        classes = {
            base for each in types for base in each.__mro__ if base.__name__ != "TrainingArguments"
        }
        own = {name for each in classes for name in inspect.get_annotations(each)} | {"output_dir"}
        self.inherited = {field.name for each in types for field in dataclasses.fields(each)} - own
        self.others: Any = None  # their group
        super().__init__(types, formatter_class=_Help, **options)

    def _parse_dataclass_field(
        self, parser: argparse.ArgumentParser, field: dataclasses.Field
    ) -> None:
        if field.name in self.inherited:
            self.others = parser = self.others or self.add_argument_group(
                "arguments of Transformers' Trainer"
            )
        super()._parse_dataclass_field(parser, field)

    def parse_known_args(self, *args: Any, **options: Any) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's, which gives the values and the arguments that it does not know."""
        found, rest = super().parse_known_args(*args, **options)
        for name, value in vars(found).items():
            shown = f"--{name}" if f"--{name}" in self._option_string_actions else name.upper()
            for text in value if isinstance(value, list) else [value]:
                if text == "" and name not in MAY_BE_EMPTY and value != self.get_default(name):
                    raise UserError(
                        f"{shown} is empty: give a value (is a variable unset?), or leave it out"
                    )
                if (
                    isinstance(text, int)
                    and abs(text) >= 2**63
                    or isinstance(text, float)
                    and not math.isfinite(text)
                ):
                    raise UserError(
                        f"--{name} {text}: give a finite number, or an integer below 2**63"
                    )
                require_utf8(text)
            if value and name in READ + WRITTEN:
                local = fetch_address if name in READ else local_path
                paths = (
                    [local(text, shown) for text in value]
                    if isinstance(value, list)
                    else local(value, shown)
                )
                setattr(found, name, paths)
        return found, rest

    @refusals()
    def parse_args_into_dataclasses(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        """The dataclasses that the command line fills; raises `UserError` for what they refuse."""
        return super().parse_args_into_dataclasses(*args, **options)
