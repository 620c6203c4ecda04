"""The parser of all commands."""

import argparse
import copy
import dataclasses
import inspect
from collections.abc import Iterable
from typing import Any

from transformers import HfArgumentParser

from dap_transformers import __version__
from dap_transformers.errors import UserError, one_line


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
    """`HfArgumentParser` with `--version` and a shorter help.

    The help shows the arguments of Transformers' Trainer last. A refused value is a `UserError`.

    Args:
        types: the dataclass, or the dataclasses, whose fields are the arguments.
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
        text = f"dap-transformers {__version__}"
        self.add_argument("--version", action="version", version=text, help="Print the version.")

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

    def parse_args_into_dataclasses(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        """Parse the command line into the dataclasses that the parser was made with.

        The arguments are those of `HfArgumentParser.parse_args_into_dataclasses`, such as `args`,
        a list of texts (None: the process's own).
        """
        try:
            return super().parse_args_into_dataclasses(*args, **options)
        except (ValueError, ImportError) as error:
            raise UserError(one_line(error)) from error

    def parse_known_args(self, *args: Any, **options: Any) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments. A path that is empty would silently name the current folder."""
        found, rest = super().parse_known_args(*args, **options)
        for name, value in vars(found).items():
            if name != "prefix" and "" in (value if isinstance(value, list) else [value]):
                raise UserError(f"--{name} is empty: is a variable unset?")
        return found, rest
