"""The parser of all commands, and the arguments that choose an encoder."""

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import HfArgumentParser, TrainingArguments

from dap_transformers import __version__
from dap_transformers.encoding.encoder import Encoder, SentenceEncoder
from dap_transformers.errors import UserError, one_line
from dap_transformers.options import arg
from dap_transformers.ray.connection import Cluster
from dap_transformers.ray.encoder import ClusterEncoder
from dap_transformers.reports import read_record, report
from states_dap import POOLINGS

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
            if issubclass(each, TrainingArguments):
                own = {"output_dir", *inspect.get_annotations(each)}
                self._shorten_help(TrainingArguments.__dataclass_fields__.keys() - own)

    def _shorten_help(self, inherited: set[str]) -> None:
        """Show the first sentence of what is used often, with a group for the Trainer's arguments.

        `--help_all` shows the whole text of all arguments.
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


@dataclass
class BaseEncoderArguments:
    """Command-line arguments of every command that loads an encoder: its name and its pooling."""

    model_name_or_path: str = arg(
        MISSING,
        "A DAP checkpoint, any encoder of AutoModel, or a sentence-transformers folder; a folder "
        "or a Hub id.",
        aliases=["--model"],
    )
    pooling: str | None = arg(
        None,
        "How a plain encoder pools. Default: as the checkpoint says, else the mean, and the last "
        "token of a decoder.",
        choices=tuple(POOLINGS),
    )
    revision: str | None = arg(None, "Branch, tag or commit of a Hub repository.")
    trust_remote_code: bool = arg(False, "Run the code that the repository carries.")


@dataclass
class EncoderArguments(BaseEncoderArguments):
    """Command-line arguments of commands that encode: which encoder, and how it makes a vector."""

    prefix: str | None = arg(
        None, "Text before every sentence, such as 'query: ' for E5. Default: the checkpoint's."
    )
    max_seq_length: int | None = arg(
        None, "Tokens per sentence. Default: the sentence-transformers folder's, else 128."
    )
    bf16: bool = arg(False, "Encode under bfloat16 autocast: faster on BF16 hardware.")

    def load(self, cluster: Cluster | None = None) -> Encoder:
        """Load the encoder that the arguments choose, here or on a cluster."""
        options = asdict(self)
        name = options.pop("model_name_or_path")
        load = partial(SentenceEncoder.from_pretrained, name, **options)
        return ClusterEncoder(load, cluster) if cluster and cluster.ray else load()

    def summary(self, encoder: SentenceEncoder) -> str:
        """Return one line that says how sentence vectors are made: pooling, prefix and length."""
        return (
            f"{self.model_name_or_path}: pooling {encoder.pooling}, prefix "
            f"{encoder.prefix!r}, at most {encoder.max_seq_length} tokens"
        )

    def report(
        self,
        encoder: SentenceEncoder,
        protocol: str,
        numbers: Mapping[str, Any],
        settings: Mapping[str, Any],
        seconds: float,
    ) -> dict[str, Any]:
        """Return the report of an evaluation, a dictionary that can be written as JSON.

        To the given settings it adds those of the encoder, such as pooling and prefix. If the model
        folder has a record of its training, the report also has the seed.
        """
        names = ("pooling", "prefix", "max_seq_length", "bf16")
        own = {name: getattr(encoder, name) for name in names} | dict(settings)
        seed = read_record(Path(self.model_name_or_path)).get("seed")
        revision = encoder.revision or self.revision
        return report(self.model_name_or_path, protocol, numbers, own, seconds, revision, seed)
