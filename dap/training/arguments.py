"""The arguments of `train_dap.py`: flags over a YAML recipe over defaults."""

import dataclasses
import inspect
import json
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from configuration_dap import DAPConfig
from dap.arguments import ArgumentParser
from dap.errors import UserError
from dap.training.data import SHUFFLE_BUFFER
from dap.training.trainer import DAPTrainingArguments

# Arguments of which only one can be given: a flag takes the place of the other one in the recipe.
RIVALS = (("per_device_train_batch_size", "total_train_batch_size"), ("max_steps", "num_train_epochs"))
RIVALS += (("model_name_or_path", "config_name"),)
STRATEGIES = ("save_strategy", "eval_strategy", "logging_strategy")


def _flag(text: str) -> Any:
    """A yes/no field of `DAPConfig`: `--name` is `--name true`."""
    return field(default=None, metadata={"help": text, "nargs": "?", "const": True})


@dataclass
class ModelArguments:
    """What is trained. A field of `DAPConfig` that is not given has its default, or the DAP checkpoint's value."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Encoder to start from, or a DAP checkpoint to go on with."}
    )
    config_name: str | None = field(
        default=None,
        metadata={"help": "In its place: a configuration (file, folder or Hub id) of an encoder of random weights."},
    )
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Tokenizer, if it is not where the model or the configuration is."}
    )
    objective: str | None = field(
        default=None,
        metadata={"help": "tr, tr+tlm, tr+rtl (= DAP, the default), or mlm, which makes an encoder for the others."},
    )
    pooling: str | None = field(default=None, metadata={"help": "cls (default) or mean."})
    projection: str | None = field(default=None, metadata={"help": "mlp: a train-only layer on the sentence vector."})
    tr_similarity: str | None = field(default=None, metadata={"help": "cosine (default) or dot."})
    tr_temperature: float | None = field(default=None, metadata={"help": "0.05 for cosine, 1 for dot by default."})
    tr_margin: float | None = field(default=None, metadata={"help": "Additive margin on the true pair; 0 by default."})
    tr_bidirectional: bool | None = _flag("Rank sources for each target, too.")
    tr_mask_duplicates: bool | None = _flag("Equal targets are not each other's negatives; true by default.")
    rtl_layers: int | None = field(default=None, metadata={"help": "K, blocks of the RTL head; 2 by default."})
    rtl_direction: str | None = field(
        default=None, metadata={"help": "source-to-target (default), target-to-source, or both."}
    )
    rtl_ratio: float | None = field(
        default=None, metadata={"help": "rho, share of target tokens to reconstruct; 1 by default."}
    )
    rtl_weight: float | None = field(default=None, metadata={"help": "Factor of the RTL loss; 1 by default."})
    rtl_sampled_negatives: int | None = field(
        default=None,
        metadata={"help": "Ids drawn each step for the softmax of the RTL loss; all by default."},
    )
    tlm_probability: float | None = field(default=None, metadata={"help": "Share of masked tokens; 0.2 by default."})
    tlm_weight: float | None = field(default=None, metadata={"help": "Factor of the TLM loss; 0.1 by default."})
    mlm_probability: float | None = field(
        default=None, metadata={"help": "Share of tokens that mlm masks; 0.15 by default."}
    )
    restrict_target_vocabulary: bool = field(
        default=True,
        metadata={"help": "RTL predicts only ids of the training targets (neither streamed nor of sources)."},
    )
    target_vocabulary_file: str | None = field(
        default=None,
        metadata={"help": "JSON of the ids that RTL predicts (from prepare_data.py --target_vocabulary)."},
    )
    prediction_bias: str = field(
        default="zeros",
        metadata={"help": "zeros, or frequencies of the training tokens: how a head without weights to take starts."},
    )
    attn_implementation: str | None = field(default=None, metadata={"help": "eager, sdpa, flash_attention_2, ..."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the checkpoint."})
    revision: str | None = field(default=None, metadata={"help": "Commit, tag or branch of the checkpoint."})


@dataclass
class DataArguments:
    """Parallel text; sources of every language share one target language, English."""

    train_data: list[str] = field(metadata={"help": "Files, folders or a Hub dataset id; see docs/training.md."})
    validation_data: list[str] = field(default_factory=list, metadata={"help": "Dev pairs; held out if not given."})
    dev_pairs: int = field(default=1000, metadata={"help": "Pairs a language to hold out, at most a tenth; 0: none."})
    target_language: str = field(default="en", metadata={"help": "Language code of the target side."})
    max_seq_length: int = field(default=32, metadata={"help": "Tokens a sentence is cut to."})
    language_mix: str = field(default="natural", metadata={"help": "natural, uniform or temperature."})
    mix_alpha: float = field(default=0.5, metadata={"help": "Exponent of the temperature mix, 0 to 1."})
    streaming: bool = field(
        default=False, metadata={"help": "Read the text as it is needed; natural and temperature count it first."}
    )
    shuffle_buffer: int = field(
        default=SHUFFLE_BUFFER,
        metadata={"help": "Streaming: pairs of a language that are shuffled at a time; 0: none."},
    )
    max_bad_lines: float = field(default=0.001, metadata={"help": "Share of malformed lines a file may have."})


CONFIG_DEFAULTS = {
    name: parameter.default
    for name, parameter in inspect.signature(DAPConfig.__init__).parameters.items()
    if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name not in ("self", "encoder_config")
}
Arguments = tuple[ModelArguments, DataArguments, DAPTrainingArguments]


def parse_arguments(argv: list[str]) -> Arguments:
    """Arguments from an optional YAML recipe (first in `argv`) and flags, which override it."""
    parser = ArgumentParser((ModelArguments, DataArguments, DAPTrainingArguments), allow_abbrev=False)
    if argv and argv[0].endswith((".yaml", ".yml")):
        flags = argv[1:]
        rivals = {pair[1 - place] for pair in RIVALS for place in (0, 1) if given(pair[place], flags)}
        argv = recipe_flags(Path(argv[0]), without=rivals) + flags
    for pair in RIVALS:
        if all(given(name, argv) for name in pair):
            raise UserError(f"--{pair[0]} and --{pair[1]} say the same: give one of them.")
    if given("num_train_epochs", argv):
        argv = [*argv, "--max_steps", "-1"]
    model, data, training = parser.parse_args_into_dataclasses(args=argv)
    if model.model_name_or_path is None and model.config_name is None:
        raise UserError("nothing to start from: give --model_name_or_path, or --config_name to begin from scratch.")
    return model, data, training


def given(name: str, argv: list[str]) -> bool:
    """Whether a flag is among the arguments, as `--name value` or `--name=value`, with `_` or `-`."""
    return any(argument.split("=", 1)[0].replace("-", "_") == f"__{name}" for argument in argv)


def recipe_flags(path: Path, without: Collection[str] = ()) -> list[str]:
    """A recipe as flags: `{"rtl_layers": 2}` becomes `["--rtl_layers", "2"]`.

    Args:
        without: arguments of the recipe to leave out.

    Raises:
        FileNotFoundError: there is no such recipe.
        ValueError: not a mapping, a key that is no argument of this command, or an empty list.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such recipe; those of the project are in configs/.")
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(recipe, dict):
        raise UserError(f"{path}: expected lines of `argument: value`, found {type(recipe).__name__}.")
    groups = (ModelArguments, DataArguments, DAPTrainingArguments)
    known = {item.name for group in groups for item in dataclasses.fields(group)}
    if unknown := sorted(set(recipe) - known):
        raise UserError(f"{path}: unknown argument {', '.join(unknown)}; `python train_dap.py --help` lists them.")
    flags: list[str] = []
    for key, value in recipe.items():
        if value == []:
            raise UserError(f"{path}: {key} is an empty list; give a value, or remove the line.")
        if value is not None and key not in without:
            values = value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            values = ["no" if value is False and key in STRATEGIES else value for value in values]  # YAML's bare `no`
            flags += [f"--{key}", *map(str, values)]
    return flags


def given_fields(args: ModelArguments) -> dict[str, Any]:
    """The fields of `DAPConfig` that the command or the recipe gives."""
    values = {name: getattr(args, name, None) for name in CONFIG_DEFAULTS}
    return {name: value for name, value in values.items() if value is not None}
