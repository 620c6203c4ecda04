"""How every command reads its arguments."""

import argparse
import copy
import dataclasses
import inspect
import math
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from transformers import HfArgumentParser

from dap_transformers.addresses import fetch_address, local_path
from dap_transformers.commands.edge import add_version
from dap_transformers.errors import UserError, refusals, require_plain_name
from dap_transformers.options import arg  # noqa: F401

#: Arguments that may be empty: an empty prefix replaces the one of a checkpoint.
MAY_BE_EMPTY = ("prefix",)

#: Arguments that may be addresses (`dap_transformers.addresses`): first those that are read, then
#: those written.
READ = (
    "train_data",
    "validation_data",
    "data",
    "evaluation_data",
    "data_dir",
    "bucc",
    "files",
    "gold",
    "calibrate",
)
WRITTEN = (
    "output",
    "output_dir",
    "output_file",
    "report_file",
    "embeddings_dir",
    "distill_dir",
    "list_leaks",
)


def require_least(args: Any, **least: float) -> None:
    """Raise `UserError` for an argument that is below its smallest allowed value.

    Arguments that are None are not checked.

    Args:
        args: object with the arguments as attributes.
        **least: smallest allowed value of each argument, by name.
    """
    for name, value in least.items():
        given = getattr(args, name)
        if given is not None and given < value:
            raise UserError(f"--{name} {given}: at least {value:g}")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Formats a short help text.

    Each argument is listed once, with `_` in its name. Its default is added, except if there is
    none or the help text names it.
    """

    def add_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], *others: Any
    ) -> None:
        """Show only required arguments and `--help` in the usage line. The list shows all."""
        shown = [action for action in actions if action.required or action.dest == "help"]
        super().add_usage(usage, shown, *others)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_no_default = action.default is None or action.default is False or action.default == []
        if has_no_default or "default" in (action.help or "").lower():
            return action.help
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        action = copy.copy(action)
        names = [name for name in action.option_strings if "-" not in name.lstrip("-")]
        action.option_strings = names
        return super()._format_action_invocation(action)


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` with stricter values and shorter help.

    - The help shows the arguments of Transformers' Trainer last.
    - Every refused value is a `UserError`, also if Transformers refuses it.
    - Empty values are refused. They usually come from an unset shell variable.
    - Numbers that are not finite or too large, and file names that are not UTF-8, are refused.
    - Inputs that are given as an address (`dap_transformers.addresses`) are downloaded, and the
      value becomes
      the path of the local copy.

    Args:
        types: the dataclass, or the dataclasses, whose fields are the arguments.
        **options: options of `HfArgumentParser`.
    """

    def __init__(self, types: Iterable[type] | type, **options: Any) -> None:
        types = [types] if isinstance(types, type) else list(types)
        own = {"output_dir"}
        for each in types:
            for base in each.__mro__:
                if base.__name__ != "TrainingArguments":
                    own.update(inspect.get_annotations(base))
        fields = {field.name for each in types for field in dataclasses.fields(each)}
        self.inherited = fields - own
        self.inherited_group: Any = None
        super().__init__(types, formatter_class=_Help, **options)
        add_version(self)

    def _parse_dataclass_field(
        self, parser: argparse.ArgumentParser, field: dataclasses.Field
    ) -> None:
        if field.name in self.inherited:
            if self.inherited_group is None:
                self.inherited_group = self.add_argument_group("arguments of Transformers' Trainer")
            parser = self.inherited_group

        # argparse does not know our own metadata.
        field = copy.copy(field)
        metadata = dict(field.metadata)
        metadata.pop("changes_weights", None)
        field.metadata = metadata
        super()._parse_dataclass_field(parser, field)

    def parse_known_args(self, *args: Any, **options: Any) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments, check their values, and download inputs from addresses.

        An address becomes the path of its local copy, also that of an output, which need not exist.

        Returns:
            The values, and positional arguments that the parser does not know.
        """
        given = args[0] if args else options.get("args")
        self._require_known_flags(sys.argv[1:] if given is None else given)
        found, rest = super().parse_known_args(*args, **options)
        for name, value in vars(found).items():
            shown = f"--{name}" if f"--{name}" in self._option_string_actions else name.upper()
            values = value if isinstance(value, list) else [value]
            for each in values:
                if each == "" and name not in MAY_BE_EMPTY and value != self.get_default(name):
                    raise UserError(
                        f"{shown} is empty: give a value (is a variable unset?), or leave it out"
                    )
                check_number(name, each)
                require_plain_name(each)

            if value and name in READ + WRITTEN:
                local = fetch_address if name in READ else local_path
                paths = [local(each, shown) for each in values]
                setattr(found, name, paths if isinstance(value, list) else paths[0])
        return found, rest

    @refusals()
    def parse_args_into_dataclasses(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        """Parse the command line into the dataclasses that the parser was made with.

        The arguments are those of `HfArgumentParser.parse_args_into_dataclasses`, such as `args`,
        a list of texts (None: the process's own).

        Returns:
            One object of each dataclass. If the parser has further arguments, a namespace with
            these follows.
        """
        return super().parse_args_into_dataclasses(*args, **options)

    def _require_known_flags(self, arguments: Iterable[str]) -> None:
        """Raise `UserError` for a flag that the parser does not know, and name the most similar.

        argparse would complain about missing arguments first, even if one of them was only
        misspelled.
        """
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for argument in arguments:
            name = argument.split("=", 1)[0]
            if name == "--":
                return  # everything behind it is no flag
            is_flag = name.startswith("--") and " " not in argument
            is_short = self.allow_abbrev and any(flag.startswith(name) for flag in known)
            if is_flag and name not in known and not is_short:
                similar = get_close_matches(name.replace("-", "_"), map(_underscored, known), 1)
                remedy = "--help lists all arguments"
                if similar:
                    remedy = f"did you mean --{similar[0].lstrip('_')}?"
                raise UserError(f"unknown argument {name}: {remedy}")


def _underscored(flag: str) -> str:
    """Return a flag with `_` instead of `-`, such as "__train_data" for "--train-data"."""
    return flag.replace("-", "_")


def check_number(name: str, value: Any) -> None:
    """Raise `UserError` for an integer of more than 63 bits, or a float that is not finite.

    Args:
        name: the argument, for the message.
        value: its value. Values of other types are not checked.
    """
    is_large = isinstance(value, int) and abs(value) >= 2**63
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    if is_large or is_infinite:
        raise UserError(f"--{name} {value}: give a finite number, or an integer below 2**63")
