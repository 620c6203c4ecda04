"""The parser of all commands. It needs no torch, so `prepare-data` starts in a second."""

import argparse
import inspect
import re
from collections.abc import Sequence
from typing import Any

from transformers import HfArgumentParser

from dap_transformers import __version__
from dap_transformers.errors import UserError, one_line

TRAINER = "arguments of Transformers' Trainer"
#: Arguments of the Trainer that `--help` shows.
OFTEN = (
    "num_train_epochs",
    "warmup_steps",
    "gradient_accumulation_steps",
    "bf16",
    "use_cpu",
    "seed",
    "logging_steps",
    "eval_strategy",
    "eval_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "resume_from_checkpoint",
    "push_to_hub",
    "hub_model_id",
)
#: Beginnings of the names of our own arguments that `--help` leaves out.
SELDOM = ("tlm_", "mlm_", "rtl_", "bow_", "head_", "peft_", "ddp_", "dataloader_", "logging_nan_")


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Formats the help of all arguments, without a name for each value.

    The default of an argument is added, except if there is none or the help text names it.
    """

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        (choices,) = self._metavar_formatter(action, "")(1)
        return f"{', '.join(action.option_strings)} {choices}".rstrip()

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False, []) or "default" in (action.help or "").lower():
            return action.help
        return super()._get_help_string(action)


class _HelpAll(argparse._HelpAction):
    """Prints the whole help of all arguments."""

    def __call__(self, parser: argparse.ArgumentParser, *others: Any) -> None:
        for action, text in parser.whole_help.items():
            action.help = text
        super().__call__(parser, *others)


class ArgumentParser(HfArgumentParser):
    """`HfArgumentParser` with `--version`. A refused value is a `UserError`.

    A training has a short `--help`, and `--help_all` with all arguments of Transformers' Trainer.

    Args:
        types: the dataclasses whose fields are the arguments.
    """

    def __init__(
        self, types: Sequence[type], usage: str = "%(prog)s [arguments]", **options: Any
    ) -> None:
        options |= {"usage": usage, "allow_abbrev": False}
        super().__init__(types, formatter_class=_Help, **options)
        text = f"dap-transformers {__version__}"
        self.add_argument("--version", action="version", version=text, help="Print the version.")
        # The help and errors show each name once. Names with dashes are still accepted.
        for action in self._actions:
            names = action.option_strings
            action.option_strings = [name for name in names if "-" not in name.lstrip("-")]
        for each in types:
            for base in each.__mro__:
                if base.__name__ == "TrainingArguments":
                    own = {"output_dir", *inspect.get_annotations(each)}
                    self._shorten_help(base.__dataclass_fields__.keys() - own)

    def _shorten_help(self, inherited: set[str]) -> None:
        """Add `--help_all`, and make `--help` short.

        It hides arguments that are seldom used, and shows the first sentence of the others.
        `inherited` names the arguments of Transformers' Trainer, which get a group of their own.
        """
        self.epilog = "--help_all shows all arguments."
        self.add_argument("--help_all", action=_HelpAll, help="Show all arguments.")
        self.whole_help = {action: action.help for action in self._actions}
        trainers = self.add_argument_group(TRAINER)._group_actions
        for action, text in self.whole_help.items():
            is_seldom = action.dest.startswith(SELDOM)
            if action.dest in inherited:
                is_seldom = action.dest not in OFTEN
                trainers.append(action)
            action.help = argparse.SUPPRESS if is_seldom else re.split(r"(?<=\.) ", text)[0]
        for group in self._action_groups[:-1]:
            group._group_actions = [each for each in group._group_actions if each not in trainers]

    def parse_args_into_dataclasses(self, *args: Any, **options: Any) -> tuple[Any, ...]:
        """Parse the command line into the dataclasses that the parser was made with."""
        try:
            return super().parse_args_into_dataclasses(*args, **options)
        except (ValueError, ImportError) as error:
            raise UserError(one_line(error)) from error

    def parse_known_args(self, *args: Any, **options: Any) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments. A path that is empty would silently name the current folder."""
        found, rest = super().parse_known_args(*args, **options)
        for name, value in vars(found).items():
            is_path = not name.endswith(("prefix", "prompt"))
            if is_path and "" in (value if isinstance(value, list) else [value]):
                raise UserError(f"--{name} is empty: is a variable unset?")
        return found, rest
