"""The arguments of `train_dap.py`. Flags override a YAML recipe, which overrides the defaults."""

import argparse
import dataclasses
import inspect
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import yaml
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.integrations import is_tensorboard_available
from transformers.trainer_utils import HubStrategy, SchedulerType
from transformers.utils.chat_template_utils import parse_google_format_docstring

from configuration_dap import FIELDS, DAPConfig
from dap_transformers.commands.arguments import ArgumentParser
from dap_transformers.errors import UserError, one_line
from dap_transformers.files import public_name
from dap_transformers.options import arg
from dap_transformers.training.lora import require_peft
from dap_transformers.training.plugins import load_plugin
from objectives_dap import OBJECTIVES

#: Fields of `DAPConfig` that are read from the text and its tokenizer, so that nobody chooses them.
FROM_TEXT = ("rtl_languages", "target_vocab_size", "mask_token_id", "distill_size")

#: Pairs of arguments of which only one may be given. A flag replaces its rival in the recipe.
RIVALS = (
    ("per_device_train_batch_size", "total_train_batch_size"),
    ("max_steps", "num_train_epochs"),
    ("model_name_or_path", "config_name"),
)

#: The folder of the project's recipes.
RECIPES = Path(__file__).parents[1] / "configs"

#: Characters that a recipe may have.
RECIPE_SIZE = 100_000

#: Values of `torch_compile_mode`.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")

CONFIG_FIELDS = {name: field for name, field in FIELDS.items() if name != "encoder_config"}
CONFIG_DEFAULTS = {name: field.default for name, field in CONFIG_FIELDS.items()}


def config_arguments() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Yield a command-line argument for each field of `DAPConfig` that a user chooses.

    The type is the field's, and the help comes from the docstring of `DAPConfig`. The default is
    always None, so that `given_fields` can tell which arguments were given.

    Yields:
        The name, type and field of each argument, as `make_dataclass` takes them.
    """
    _, texts, _ = parse_google_format_docstring(inspect.getdoc(DAPConfig) or "")
    for name, field in CONFIG_FIELDS.items():
        if name in FROM_TEXT:
            continue
        text = (texts or {}).get(name, "")
        text = text.replace("`", "").replace('"', "").replace("%", "%%")
        if field.default is not None and field.default is not False:
            text += f" Default: that of the checkpoint, otherwise {field.default}."

        # `--name` without a value is `--name true`.
        options = {"nargs": "?", "const": True} if field.type is bool else {}
        kind = float if float in get_args(field.type) else field.type
        yield name, kind | None, HfArg(default=None, help=text, metadata=options)


def added_weights() -> list[str]:
    """Return the names of the weights of objectives that are not ours, such as "bag_weight"."""
    weights = [f"{name}_weight" for name in OBJECTIVES]
    return [weight for weight in weights if weight not in CONFIG_FIELDS]


@dataclass
class StartArguments:
    """Arguments that name the checkpoint from which training starts, and say how to load it."""

    model_name_or_path: str | None = arg(
        None, "Encoder to start from, or DAP checkpoint to train further."
    )
    config_name: str | None = arg(
        None,
        "Configuration (file, folder or Hub id) of an encoder to train from random weights, "
        "instead of --model_name_or_path.",
    )
    init_heads_from: str | None = arg(
        None,
        "DAP checkpoint to copy trained heads from, such as one made by configs/head.yaml. It "
        "must have the same encoder.",
    )
    tokenizer_name: str | None = arg(
        None, "Tokenizer, if it is not in the folder of the model or the configuration."
    )
    revision: str | None = arg(None, "Commit, tag or branch of the checkpoint.")
    trust_remote_code: bool = arg(
        False, "Run code that comes with the checkpoint.", changes_weights=False
    )
    attn_implementation: str | None = arg(
        None, "Attention: eager, sdpa, flash_attention_2, ...", changes_weights=False
    )
    restrict_target_vocabulary: bool = arg(
        True,
        "RTL and BOW predict only token ids that occur in the training targets. This has no "
        "effect on streamed text, or where sources are predicted.",
    )
    target_vocabulary_file: str | None = arg(
        None,
        "JSON file of the token ids that RTL and BOW predict, as written by "
        "prepare-data --target_vocabulary.",
    )
    distill_from: str | None = arg(
        None,
        "Teacher of the objective distill: folder or Hub id of a sentence encoder. Its vectors of "
        "the targets are computed once.",
    )
    distill_dir: str | None = arg(
        None,
        "Folder that keeps the teacher's vectors. Default: teacher/ in --output_dir.",
        changes_weights=False,
    )
    plugin: list[str] = arg(
        [],
        "Python files that add objectives of your own (docs/architecture.md). Each objective NAME "
        "gets a flag --NAME_weight.",
    )
    prediction_bias: str = arg(
        "zeros",
        "Bias of a new prediction head: zeros, or frequencies (log of the token frequencies in "
        "the training text).",
    )


@dataclass
class PretrainingModelArguments(
    dataclasses.make_dataclass("ConfigArguments", config_arguments(), bases=(StartArguments,))
):
    """Arguments of the model: where it starts from, and the fields of `DAPConfig`.

    A field that is not given keeps the value of the DAP checkpoint, or else has its default.
    """

    _argument_group_name = "model and objective"


def given_fields(args: PretrainingModelArguments) -> dict[str, Any]:
    """Return the values of `DAPConfig` fields that the user gave, by name.

    Fields that were not given are None in the arguments, and left out.
    """
    fields = {*CONFIG_FIELDS, *added_weights()}
    given = {}
    for name, value in vars(args).items():
        if name in fields and value is not None:
            given[name] = value
    return given


@dataclass
class PretrainingDataArguments:
    """Arguments of the parallel text to train on. All languages share one target language."""

    _argument_group_name = "text"

    train_data: list[str] = HfArg(
        help="Files, folders or Hub dataset ids of parallel text. docs/training.md lists formats."
    )
    validation_data: list[str] = arg([], "Dev pairs. If not given, some pairs are held out.")
    dev_pairs: int = arg(
        1000, "Pairs per language to hold out, at most a tenth of the language. 0 holds out none."
    )
    target_language: str = arg("en", "Language code of the target side.")
    columns: list[int] | None = arg(
        None, "Columns of source and target in TSV files, such as '2 3'. Default: the first two."
    )
    max_seq_length: int | None = arg(
        None,
        "Tokens that a sentence is cut to. Default: the length of a sentence-transformers "
        "folder, otherwise 32.",
    )
    prefix: str | None = arg(
        None,
        "Text to put before every sentence, such as 'query: '. Default: the default prompt of a "
        "sentence-transformers folder, otherwise none.",
    )
    language_mix: str = arg(
        "natural", "How often to draw each language: natural, uniform or temperature."
    )
    mix_alpha: float = arg(0.5, "Exponent of the temperature mix, 0 to 1.")
    streaming: bool = arg(
        False,
        "Read the text during training instead of before it. The natural and temperature mixes "
        "read it once before, to count the pairs.",
    )
    shuffle_buffer: int = arg(
        4000,
        "With --streaming: pairs per language in the shuffle buffer. 0 keeps the order of the "
        "files.",
    )
    max_bad_lines: float = arg(
        0.001, "Share of malformed lines that a file may have.", changes_weights=False
    )


@dataclass
class DAPTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's defaults (section 4.2) and options for large batches.

    Values that would break the training or have no effect here raise `UserError`. So do several
    GPUs in one process, and several processes that would not exchange gradients.
    """

    _argument_group_name = "training"

    mini_batch_size: int | None = arg(
        None,
        "Pairs that a process holds in memory at once (GradCache). The gradients stay those of "
        "the whole batch, at the cost of a second pass through the encoder. Default: the whole "
        "batch.",
        changes_weights=False,
    )
    total_train_batch_size: int | None = arg(
        None,
        "Pairs per step over all processes. Each pair is a negative for all others. This sets "
        "the batch size per device.",
    )
    early_stopping_patience: int | None = arg(
        None,
        "Stop after this many evaluations without a better metric_for_best_model.",
        changes_weights=False,
    )
    freeze_word_embeddings: bool = arg(
        False, "Do not train the word embeddings. Saves memory and time."
    )
    freeze_encoder: bool = arg(
        False, "Train only the heads. The encoder runs without dropout and without gradients."
    )
    peft_lora_rank: int | None = arg(
        None,
        "Train LoRA adapters of this rank in the encoder instead of its weights (package peft). "
        "The heads are trained in full. The saved model is merged.",
    )
    learning_rate: float = arg(5e-5, "Peak learning rate of AdamW.")
    head_learning_rate: float | None = arg(
        None, "Peak learning rate of the heads, if it differs. The schedule is the same."
    )
    head_steps: int | None = arg(
        None,
        "Steps that train the heads of RTL and BOW before the joint training, if they start from "
        "random weights. The encoder stays unchanged. 0 leaves this out. Default: 400, or 200 "
        "with RTL, whose steps cost more and teach more.",
    )
    head_pairs: int = arg(
        8_000,
        "Pairs that these steps learn from. They are encoded once. RTL keeps their token states "
        "in memory, about 0.2 GB for 8,000 pairs at a hidden size of 384 and 32 tokens.",
    )
    max_steps: int = arg(100_000, "Number of optimizer steps.")
    per_device_train_batch_size: int = arg(128, "Pairs per process and step.")
    dataloader_drop_last: bool = arg(
        True, "Must stay true: gathering negatives needs equal batches."
    )
    remove_unused_columns: bool = arg(False, "Must stay false: the collator uses all columns.")
    logging_nan_inf_filter: bool = arg(False, "A loss that is not finite stops the run.")
    metric_for_best_model: str | None = arg(
        "eval_mean_accuracy", "Metric that chooses the best checkpoint."
    )
    ddp_find_unused_parameters: bool | None = arg(
        False, "Can stay false: every parameter of the model is used."
    )
    ddp_broadcast_buffers: bool | None = arg(
        False, "Can stay false: no buffer of the model changes during training."
    )
    report_to: None | str | list[str] = arg(
        None, "Trackers to report to. Default: TensorBoard, if it is installed."
    )
    hub_strategy: HubStrategy | str = arg(
        "end", "Must stay end: the model is published once, after training."
    )
    dataloader_pin_memory: bool | None = arg(
        None, "Use page-locked batches, which copy faster. Default: true on CUDA."
    )

    def __post_init__(self) -> None:
        self._check_deepspeed()
        if self.report_to is None:
            self.report_to = ["tensorboard"] if find_spec("tensorboard") else []
        super().__post_init__()
        set_precision(self)
        follow_metric(self)

        if self.torch_compile:
            # Compile only the layers: the packed rows between them change shape in every step.
            os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
        if self.hub_token is not None:
            # Every save pickles these arguments. The Hub's client reads the token from here.
            os.environ["HF_TOKEN"] = self.hub_token
            self.hub_token = None
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = self.device.type == "cuda"
        if self.accelerator_config.dispatch_batches is None:
            # Every process reads its own share of a stream.
            self.accelerator_config.dispatch_batches = False

        if self.n_gpu > 1:
            raise UserError(
                f"{self.n_gpu} GPUs in one process: start one process per GPU with "
                "`accelerate launch`."
            )
        check_launched(self.world_size)
        self._check_values()
        if self.total_train_batch_size is not None:
            self.per_device_train_batch_size = share_of_batch(
                self.total_train_batch_size, self.world_size
            )

    def to_json_string(self) -> str:
        """Return all arguments as JSON, for TensorBoard's log, which may be published.

        Values that are absolute paths lose the folders above them.
        """
        values = self.to_dict()
        for name, value in values.items():
            if isinstance(value, str):
                values[name] = public_name(value)
        return json.dumps(values, indent=2)

    @property
    def seed_of_text(self) -> int:
        """Return the seed that chooses and orders text: `data_seed`, or `seed` if it is None."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def chooses(self) -> bool:
        """Tell whether the run uses a metric of the evaluations.

        It does so for an early stop, for the best checkpoint, or for a learning rate that falls
        when the metric gets no better.
        """
        follows = (
            self.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
            or self.save_strategy == "best"
        )
        return bool(follows or self.load_best_model_at_end or self.early_stopping_patience)

    def _check_deepspeed(self) -> None:
        uses_deepspeed = self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        if self.mini_batch_size and uses_deepspeed:
            raise UserError(
                f"mini_batch_size={self.mini_batch_size} does not work with DeepSpeed, which "
                "takes a step at each backward pass: use configs/accelerate/ddp.yaml or "
                "fsdp2.yaml, or leave it out."
            )

    def _check_values(self) -> None:
        """Raise `UserError` for values that would break the training or have no effect here."""
        size = self.mini_batch_size
        patience = self.early_stopping_patience
        rate = self.head_learning_rate
        rank = self.peft_lora_rank
        accelerator = self.accelerator_config
        pushes_early = self.push_to_hub and self.hub_strategy != HubStrategy.END
        allowed = {
            "mini_batch_size": (size is None or size >= 1, "1 or more, or leave it out"),
            "early_stopping_patience": (
                patience is None or patience >= 1,
                "1 or more, or leave it out",
            ),
            "peft_lora_rank": (
                rank is None or (rank >= 1 and not self.freeze_encoder),
                "1 or more, without --freeze_encoder, or leave it out",
            ),
            "head_learning_rate": (rate is None or rate >= 0, "0 or more"),
            "head_steps": (
                self.head_steps is None or self.head_steps >= 0,
                "0 (no training of the heads by themselves) or more",
            ),
            "head_pairs": (self.head_pairs >= 2, "2 or more"),
            "dataloader_drop_last": (
                self.dataloader_drop_last,
                "true: negatives are gathered from equal batches",
            ),
            "remove_unused_columns": (
                not self.remove_unused_columns,
                "false: the collator uses all columns",
            ),
            "neftune_noise_alpha": (
                not self.neftune_noise_alpha,
                "none: sentences are embedded without noise",
            ),
            "label_smoothing_factor": (
                self.label_smoothing_factor == 0,
                "0: no DAP objective uses it",
            ),
            "train_sampling_strategy": (
                self.train_sampling_strategy == "random",
                "random, and choose languages by --language_mix",
            ),
            "torch_compile_mode": (
                self.torch_compile_mode in (None, *COMPILE_MODES),
                f"one of {', '.join(COMPILE_MODES)}, or leave it out",
            ),
            "hub_strategy": (
                not pushes_early,
                "end: the others push half-trained models and training_args.bin, a pickle",
            ),
            "auto_find_batch_size": (
                not self.auto_find_batch_size,
                "false: a smaller batch has fewer negatives. mini_batch_size saves memory",
            ),
            "accelerator_config.dispatch_batches": (not accelerator.dispatch_batches, "false"),
            "accelerator_config.split_batches": (not accelerator.split_batches, "false"),
        }
        require(self, allowed)
        if rank is not None:
            require_peft()
        if "tensorboard" in self.report_to and not is_tensorboard_available():
            raise UserError(
                "--report_to tensorboard: its package is missing: pip install tensorboard, or give "
                "--report_to none"
            )
        if self.eval_strategy == "no" and (patience is not None or self.save_strategy == "best"):
            chosen = "save_strategy=best"
            if patience is not None:
                chosen = f"early_stopping_patience={patience}"
            raise UserError(
                f"{chosen} needs evaluations: give --eval_strategy steps --save_strategy steps "
                "--load_best_model_at_end."
            )


def set_precision(args: TrainingArguments) -> None:
    """Set `bf16` and `fp16` to the precision that the training will have.

    This is `args.mixed_precision`. If the arguments name none, `accelerate launch
    --mixed_precision` has decided it.

    Args:
        args: arguments to change in place.
    """
    precision = str(args.mixed_precision)
    if precision not in ("no", "bf16", "fp16"):
        raise UserError(f"mixed_precision={precision!r}: give no, bf16 or fp16.")
    args.bf16 = precision == "bf16"
    args.fp16 = precision == "fp16"


def follow_metric(args: TrainingArguments) -> None:
    """Make a plateau schedule follow the metric's direction, such as higher accuracy.

    Such a schedule lowers the learning rate when a metric gets no better. By default torch
    expects a metric that falls, like a loss. For any other schedule, do nothing.

    Args:
        args: arguments to change in place (`lr_scheduler_kwargs`). A mode that the user gave stays.
    """
    if args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU:
        mode = {"mode": "max" if args.greater_is_better else "min"}
        args.lr_scheduler_kwargs = mode | (args.lr_scheduler_kwargs or {})


def require(args: Any, allowed: dict[str, tuple[bool, str]]) -> None:
    """Raise `UserError` for the first argument whose value is not allowed.

    Args:
        args: object with the arguments as attributes.
        allowed: name of an attribute -> (whether its value is allowed, what to give instead). The
            name may have a dot, such as "accelerator_config.split_batches".
    """
    for name, (fits, remedy) in allowed.items():
        if not fits:
            raise UserError(f"{name}={attrgetter(name)(args)!r:.200}: give {remedy}.")


def no_heads(argument: str, config: DAPConfig) -> UserError:
    """Return the error for an argument that needs heads, in a run whose objectives have none.

    Args:
        argument: the argument with its value, such as "--head_learning_rate 0.0003".
        config: configuration of the model, with the objective.
    """
    return UserError(
        f"{argument} is for heads, but objective {config.objective!r} has none: leave it out of "
        "the command and the recipe."
    )


def check_launched(world_size: int) -> None:
    """Raise `UserError` if launched processes would train without exchanging gradients.

    Args:
        world_size: number of processes that train together. It must equal the number launched,
            which the environment variable `WORLD_SIZE` states.
    """
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != world_size:
        raise UserError(
            f"{launched} processes were launched, but world_size={world_size}: each would train "
            "on its own. On CPU, put ACCELERATE_USE_CPU=true before the command."
        )


def share_of_batch(total: int, processes: int) -> int:
    """Return the number of pairs per process in a batch of `total` pairs.

    >>> share_of_batch(1024, 8)
    128

    Args:
        total: pairs of a batch over all processes.
        processes: number of processes.
    """
    if total < processes or total % processes:
        better = max(1, round(total / processes)) * processes
        raise UserError(
            f"total_train_batch_size={total} cannot be shared evenly by {processes} processes: "
            f"give {better}, for example."
        )
    return total // processes


Arguments = tuple[PretrainingModelArguments, PretrainingDataArguments, DAPTrainingArguments]
GROUPS = (PretrainingModelArguments, PretrainingDataArguments, DAPTrainingArguments)
USAGE = "%(prog)s [RECIPE] --train_data PATH [PATH ...] --output_dir FOLDER [arguments]"


def parse_arguments(argv: list[str]) -> Arguments:
    """Parse the command line of `train_dap.py`.

    Epochs and steps exclude each other, so `--num_train_epochs` sets `max_steps` to -1.

    Args:
        argv: flags, which may stand after a recipe (`find_recipe`). Flags override the recipe.

    Returns:
        The arguments of the model, the text and the training.
    """
    load_plugins_of(argv)
    if argv and not argv[0].startswith("-"):
        flags = argv[1:]
        argv = recipe_flags(find_recipe(argv[0]), without=rivals_of(flags)) + flags
    for first, second in RIVALS:
        if given(first, argv) and given(second, argv):
            raise UserError(f"--{first} and --{second} say the same: give one of them.")

    # The default of max_steps would win over the epochs.
    if given("num_train_epochs", argv):
        argv = [*argv, "--max_steps", "-1"]

    groups = (with_added_weights(), *GROUPS[1:])
    parser = ArgumentParser(groups, usage=USAGE, allow_abbrev=False)
    model, data, training = parser.parse_args_into_dataclasses(args=argv)
    if model.model_name_or_path is None and model.config_name is None:
        raise UserError(
            "nothing to start from: give --model_name_or_path, or --config_name to begin from "
            "random weights."
        )
    return model, data, training


def find_recipe(name: str) -> Path:
    """Return the path of a recipe's YAML file.

    Args:
        name: path of a YAML file, or the name of a recipe of this project, such as "xlmr". If
            both exist, the path wins.
    """
    path = Path(name)
    if path.is_file():
        return path

    own = {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}
    if name not in own:
        raise UserError(f"{name}: no such recipe. Give a YAML file, or one of {', '.join(own)}.")
    return own[name]


def load_plugins_of(flags: list[str]) -> None:
    """Run the files that `--plugin` names, so that their objectives are known.

    Args:
        flags: the command line. `--plugin` of a recipe is loaded when the recipe is read.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--plugin", nargs="+", default=[])
    for path in parser.parse_known_args(flags)[0].plugin:
        load_plugin(path)


def with_added_weights() -> type[PretrainingModelArguments]:
    """Add a flag for the weight of each objective that is not ours to the model's arguments."""
    fields = []
    for weight in added_weights():
        objective = weight.removesuffix("_weight")
        text = f"factor of the loss of {objective}. Default: 1, or that of the checkpoint."
        fields.append((weight, float | None, arg(None, text)))
    if not fields:
        return PretrainingModelArguments
    return dataclasses.make_dataclass(
        "PretrainingModelArguments", fields, bases=(PretrainingModelArguments,)
    )


def rivals_of(flags: list[str]) -> set[str]:
    """Return the names of the arguments that exclude one of the given flags (`RIVALS`).

    For example, `--max_steps` excludes "num_train_epochs". The recipe's value of such an argument
    is then dropped.

    Args:
        flags: the flags of a command line, with their values.
    """
    rivals = set()
    for first, second in RIVALS:
        if given(first, flags):
            rivals.add(second)
        if given(second, flags):
            rivals.add(first)
    return rivals


def given(name: str, argv: list[str]) -> bool:
    """Tell whether a command line has the flag `--name`.

    `--name=value` counts as well, and `-` may stand for `_` within the name.

    Args:
        name: name of the argument without dashes before it, such as "max_steps".
        argv: the command line.
    """
    flags = [argument.split("=", 1)[0].replace("-", "_") for argument in argv]
    return f"__{name}" in flags


def recipe_flags(path: Path, without: Collection[str] = ()) -> list[str]:
    """Convert a recipe to flags: `{"rtl_layers": 2}` becomes `["--rtl_layers", "2"]`.

    A list becomes several values, and a mapping becomes JSON. An argument without a value (null)
    is left out. `no`, which YAML reads as false, becomes "no" again for arguments such as
    `eval_strategy`.

    Args:
        path: a YAML file of `argument: value` lines, which must exist.
        without: arguments of the recipe to leave out.
    """
    flags: list[str] = []
    for key, value in recipe_arguments(path).items():
        if value == []:
            raise UserError(f"{path}: {key} is an empty list: give a value, or remove the line.")
        if value is None or key in without:
            continue
        if value is False and key.endswith("_strategy"):
            # YAML reads a bare `no` as false.
            value = "no"
        if isinstance(value, dict):
            value = json.dumps(value)
        values = value if isinstance(value, list) else [value]
        flags += [f"--{key}", *map(str, values)]
    return flags


class UniqueKeys(yaml.SafeLoader):
    """Loader that reads YAML, but raises `UserError` for a repeated key.

    YAML itself takes the last value of such a key.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise UserError(f"{', '.join(twice)} is given twice")
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Any:
    """Read a YAML file of at most `RECIPE_SIZE` characters, aliases written out."""
    too_large = UserError(f"over {RECIPE_SIZE:,} characters, with its aliases written out")
    if path.stat().st_size > RECIPE_SIZE:
        raise too_large
    loader = UniqueKeys(path.read_text(encoding="utf-8"))
    document = loader.get_single_node()
    if document is None:
        return None
    if _written_out(document, {}) > RECIPE_SIZE:
        raise too_large
    return loader.construct_document(document)


def _written_out(node: yaml.Node, known: dict[int, int]) -> int:
    """Count the characters of a YAML node, roughly, if each alias in it were written out."""
    if id(node) not in known:
        known[id(node)] = RECIPE_SIZE + 1  # for a node that contains itself
        size = 1
        if isinstance(node, yaml.ScalarNode):
            size += len(node.value)
        elif isinstance(node, yaml.SequenceNode):
            size += sum(_written_out(each, known) for each in node.value)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                size += _written_out(key, known) + _written_out(value, known)
        known[id(node)] = size
    return known[id(node)]


def recipe_arguments(path: Path) -> dict[str, Any]:
    """Read the YAML file of a recipe, and check that its keys are arguments of `train_dap.py`.

    Args:
        path: the file.

    Returns:
        Values by the name of the argument, as YAML reads them. Their types are not checked.
    """
    try:
        recipe = _read_yaml(path)
    except Exception as error:  # odd tags such as `!!int many` make YAML raise any exception
        raise UserError(f"{path}: not readable as YAML ({one_line(error)}): repair it.") from error
    if not isinstance(recipe, dict):
        kind = type(recipe).__name__
        raise UserError(f"{path}: expected lines of `argument: value`, found {kind}.")

    plugins = recipe.get("plugin") or []
    for plugin in [plugins] if isinstance(plugins, str) else plugins:
        load_plugin(plugin)
    known = {field.name for group in GROUPS for field in dataclasses.fields(group)}
    known.update(added_weights())
    unknown = sorted(map(str, recipe.keys() - known))
    if unknown:
        raise UserError(
            f"{path}: unknown argument {', '.join(unknown)}. `--help` lists all arguments."
        )
    return recipe
