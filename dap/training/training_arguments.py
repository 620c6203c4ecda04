"""The arguments of `train_dap.py`: flags over a YAML recipe over defaults."""

import dataclasses
import inspect
import json
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.utils import DynamoBackend
from transformers import Trainer, TrainingArguments, get_scheduler
from transformers.hf_argparser import HfArg
from transformers.integrations import get_available_reporting_integrations
from transformers.trainer_utils import HubStrategy, SchedulerType
from transformers.utils import is_liger_kernel_available
from transformers.utils.chat_template_utils import parse_google_format_docstring

from configuration_dap import FIELDS, DAPConfig
from dap.arguments import ArgumentParser, arg
from dap.errors import UserError, one_line

# Fields of `DAPConfig` that come from the text and its tokenizer, and those that may change when training goes on from
# a DAP checkpoint; its weights were made for all others.
FROM_TEXT = ("rtl_languages", "target_vocab_size", "mask_token_id")
CHANGEABLE = ("tr_temperature", "tr_margin", "tr_bidirectional", "tr_mask_duplicates", "tr_hard_negatives",
              "tr_weight", "rtl_ratio", "rtl_weight", "tlm_probability", "tlm_weight",
              "mlm_probability", "mlm_weight", "bow_weight")  # fmt: skip
# Arguments of which only one can be given: a flag takes the place of the other one in the recipe.
RIVALS = (
    ("per_device_train_batch_size", "total_train_batch_size"),
    ("max_steps", "num_train_epochs"),
    ("model_name_or_path", "config_name"),
)
CONFIG_FIELDS = {name: field for name, field in FIELDS.items() if name != "encoder_config"}
CONFIG_DEFAULTS = {name: field.default for name, field in CONFIG_FIELDS.items()}


def config_arguments() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """An argument for each field of `DAPConfig` that a user chooses: the type and help are the field's own.

    The default is always None, so that `given_fields` knows what was given.
    """
    _, texts, _ = parse_google_format_docstring(inspect.getdoc(DAPConfig) or "")
    for name, field in CONFIG_FIELDS.items():
        if name in FROM_TEXT:
            continue
        text = (texts or {}).get(name, "").replace("`", "").replace('"', "").replace("%", "%%")
        if field.default is not None and field.default is not False:
            text += f" (default: {field.default})"
        flag = (
            {"nargs": "?", "const": True} if field.type is bool else {}
        )  # `--name` is `--name true`
        yield name, field.type | None, HfArg(default=None, help=text, metadata=flag)


@dataclass
class StartArguments:
    """What a training starts from, and how that is read."""

    model_name_or_path: str | None = arg(
        None, "Encoder to start from, or a DAP checkpoint to go on with."
    )
    config_name: str | None = arg(
        None,
        "In its place: a configuration (file, folder or Hub id) of an encoder of random weights.",
    )
    init_heads_from: str | None = arg(
        None,
        "DAP checkpoint, made around the same encoder with configs/head.yaml, whose heads to start from.",
    )
    tokenizer_name: str | None = arg(
        None, "Tokenizer, if it is not where the model or the configuration is."
    )
    revision: str | None = arg(None, "Commit, tag or branch of the checkpoint.")
    trust_remote_code: bool = arg(False, "Run code that comes with the checkpoint.")
    attn_implementation: str | None = arg(None, "eager, sdpa, flash_attention_2, ...")
    restrict_target_vocabulary: bool = arg(
        True,
        "RTL and BOW predict only ids of the training targets (neither streamed nor of sources).",
    )
    target_vocabulary_file: str | None = arg(
        None, "JSON of the ids that RTL and BOW predict (from prepare_data.py --target_vocabulary)."
    )
    prediction_bias: str = arg(
        "zeros",
        "zeros, or frequencies of the training tokens: how a prediction head without weights to take starts.",
    )


@dataclass
class ModelArguments(
    dataclasses.make_dataclass("ConfigArguments", config_arguments(), bases=(StartArguments,))
):
    """What is trained. A field of `DAPConfig` that is not given has its default, or the DAP checkpoint's value."""

    _argument_group_name = "model and objective"


def given_fields(args: ModelArguments) -> dict[str, Any]:
    """The fields of `DAPConfig` that the command or the recipe gives."""
    return {
        name: value
        for name, value in vars(args).items()
        if name in CONFIG_FIELDS and value is not None
    }


@dataclass
class DataArguments:
    """Parallel text; sources of every language share one target language, English."""

    _argument_group_name = "text"

    train_data: list[str] = HfArg(help="Files, folders or a Hub dataset id; see docs/training.md.")
    validation_data: list[str] = arg([], "Dev pairs; held out if not given.")
    dev_pairs: int = arg(1000, "Pairs a language to hold out, at most a tenth; 0: none.")
    target_language: str = arg("en", "Language code of the target side.")
    max_seq_length: int | None = arg(
        None,
        "Tokens a sentence is cut to. Default: those of a sentence-transformers folder, else 32.",
    )
    prefix: str | None = arg(
        None,
        "Text before every sentence, such as 'query: '. Default: a sentence-transformers folder's, else none.",
    )
    language_mix: str = arg("natural", "natural, uniform or temperature.")
    mix_alpha: float = arg(0.5, "Exponent of the temperature mix, 0 to 1.")
    streaming: bool = arg(
        False, "Read the text as it is needed; natural and temperature count it first."
    )
    shuffle_buffer: int = arg(
        4000, "Streaming: pairs of a language that are shuffled at a time; 0: none."
    )
    max_bad_lines: float = arg(0.001, "Share of malformed lines a file may have.")


@dataclass
class DAPTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's values as defaults (section 4.2) and what a contrastive loss needs."""

    _argument_group_name = "training"

    mini_batch_size: int | None = arg(
        None,
        "Pairs a process holds in memory at a time (GradCache): a batch of any size in the memory of this one, "
        "with the same gradients, for a second pass through the encoder; the whole batch if not given.",
    )
    total_train_batch_size: int | None = arg(
        None,
        "Pairs a step over all processes, each a negative of every other; sets the per-device size.",
    )
    early_stopping_patience: int | None = arg(
        None, "Stop after this many evaluations without a better metric_for_best_model."
    )
    freeze_word_embeddings: bool = arg(
        False, "Do not train the word embeddings: less memory, faster steps."
    )
    freeze_encoder: bool = arg(
        False, "Train only the heads, on what the encoder gives without dropout."
    )
    learning_rate: float = arg(5e-5, "Peak learning rate of AdamW.")
    head_learning_rate: float | None = arg(
        None, "That of the heads, where it differs; the schedule is the same."
    )
    max_steps: int = arg(100_000, "Number of optimizer steps.")
    per_device_train_batch_size: int = arg(128, "Pairs a process in one step.")
    dataloader_drop_last: bool = arg(True, "The gather needs equal batches: keep it.")
    remove_unused_columns: bool = arg(False, "The collator uses all columns: keep it.")
    logging_nan_inf_filter: bool = arg(False, "A loss that is not finite stops the run.")
    metric_for_best_model: str | None = arg("eval_mean_accuracy", "What 'best' means.")
    ddp_find_unused_parameters: bool | None = arg(
        False, "Every parameter of an objective is used: keep it."
    )
    report_to: None | str | list[str] = arg(
        None, "Trackers; TensorBoard, when installed, if not given."
    )
    hub_strategy: HubStrategy | str = arg(
        "end", "The model is published once, when the run has ended: keep it."
    )
    dataloader_pin_memory: bool | None = arg(
        None, "Page-locked batches, for faster copies; true on CUDA if not given."
    )

    def __post_init__(self) -> None:
        self._check_deepspeed()
        if self.report_to is None:
            self.report_to = ["tensorboard"] if find_spec("tensorboard") else []
        super().__post_init__()
        follow_metric(self)
        if (
            self.torch_compile
        ):  # the layers alone: between them rows are packed, which differs in every step
            os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
        if (
            self.hub_token is not None
        ):  # where the Hub's client looks: every save pickles these arguments
            os.environ["HF_TOKEN"], self.hub_token = self.hub_token, None
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = self.device.type == "cuda"
        if self.accelerator_config.dispatch_batches is None:
            self.accelerator_config.dispatch_batches = (
                False  # every process reads its own share of a stream
            )
        if self.n_gpu > 1:
            raise UserError(
                f"{self.n_gpu} GPUs in one process: start one process a GPU with `accelerate launch`."
            )
        check_values(self)
        self._check_values()
        if self.total_train_batch_size is not None:
            self.per_device_train_batch_size = share_of_batch(
                self.total_train_batch_size, self.world_size
            )

    @property
    def seed_of_text(self) -> int:
        """The seed of everything that chooses or orders text."""
        return self.seed if self.data_seed is None else self.data_seed

    def _check_deepspeed(self) -> None:
        if self.mini_batch_size and (
            self.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
        ):
            raise UserError(
                f"mini_batch_size={self.mini_batch_size} does not go with DeepSpeed, which takes a step at each "
                "backward pass: use configs/accelerate/ddp.yaml or fsdp2.yaml, or leave it out."
            )

    def _check_values(self) -> None:
        """Raise `ValueError` for values that would break the gather, or do nothing."""
        size, patience, hub = self.mini_batch_size, self.early_stopping_patience, self.hub_strategy
        allowed = {
            "mini_batch_size": (size is None or size >= 1, "1 or more, or leave it out"),
            "early_stopping_patience": (
                patience is None or patience >= 1,
                "1 or more, or leave it out",
            ),
            "head_learning_rate": (
                self.head_learning_rate is None or self.head_learning_rate >= 0,
                "0 or more",
            ),
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
                "0: no DAP objective has it",
            ),
            "train_sampling_strategy": (
                self.train_sampling_strategy == "random",
                "random, and --language_mix",
            ),
            "hub_strategy": (
                not self.push_to_hub or hub == HubStrategy.END,
                "end: the others push half-trained models and training_args.bin, a pickle",
            ),
            "accelerator_config.dispatch_batches": (
                not self.accelerator_config.dispatch_batches,
                "false",
            ),
            "accelerator_config.split_batches": (
                not self.accelerator_config.split_batches,
                "false",
            ),
        }
        require(self, allowed)
        if self.eval_strategy == "no" and (patience is not None or self.save_strategy == "best"):
            chosen = (
                "save_strategy=best" if patience is None else f"early_stopping_patience={patience}"
            )
            raise UserError(
                f"{chosen} needs evaluations: give --eval_strategy steps --save_strategy steps "
                "--load_best_model_at_end."
            )

    @property
    def chooses(self) -> bool:
        """Whether the run needs a metric of its evaluations."""
        follows = (
            self.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
            or self.save_strategy == "best"
        )
        return bool(follows or self.load_best_model_at_end or self.early_stopping_patience)


def follow_metric(args: TrainingArguments) -> None:
    """A learning rate that falls on a plateau falls where the metric gets no better, not where it gets no lower."""
    if args.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU:
        mode = {"mode": "max" if args.greater_is_better else "min"}
        args.lr_scheduler_kwargs = mode | (args.lr_scheduler_kwargs or {})


def check_values(args: TrainingArguments) -> None:
    """Raise `ValueError` for what the Trainer would stumble over, or do without a word; and as `check_launched`."""
    check_launched(args.world_size)
    trackers = get_available_reporting_integrations() if args.report_to else []
    installed = f"trackers that are installed ({' '.join(trackers) or 'none is'})"
    backends = [each.value.lower() for each in DynamoBackend]
    allowed = {
        "learning_rate": (0 <= args.learning_rate < math.inf, "0 or more"),
        "weight_decay": (args.weight_decay >= 0, "0 or more"),
        "max_grad_norm": (args.max_grad_norm >= 0, "0 (no clipping) or more"),
        "max_steps": (
            args.max_steps > 0 or args.max_steps == -1,
            "1 or more, or --num_train_epochs",
        ),
        "num_train_epochs": (args.num_train_epochs > 0 or args.max_steps > 0, "more than 0"),
        "save_steps": (args.save_steps > 0, "1 or more, or --save_strategy no"),
        "seed": (0 <= args.seed < 2**32, "0 or more, below 2**32"),
        "data_seed": (0 <= (args.data_seed or 0) < 2**32, "0 or more, below 2**32"),
        "dataloader_num_workers": (args.dataloader_num_workers >= 0, "0 or more"),
        "fp16": (
            not args.fp16 or args.device.type != "cpu",
            "false, or --bf16: float16 is for GPUs",
        ),
        "torch_compile_backend": (
            (args.torch_compile_backend or "no").lower() in backends,
            " or ".join(backends),
        ),
        "neftune_noise_alpha": ((args.neftune_noise_alpha or 0) >= 0, "0 or more"),
        "use_liger_kernel": (
            not args.use_liger_kernel or is_liger_kernel_available(),
            "false, or install it",
        ),
        "report_to": ({*args.report_to} <= {*trackers}, installed),
    }
    sizes = (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
    )
    require(args, allowed | {name: (getattr(args, name) >= 1, "1 or more") for name in sizes})
    _try_optimizer(args)


def _try_optimizer(args: TrainingArguments) -> None:
    """Raise `UserError` where the Trainer could not make its optimizer or schedule, by making them for one number."""
    if args.optim_target_modules or "lomo" in args.optim:  # made for the layers of a model
        return
    try:
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args)
        optimizer = kind([torch.nn.Parameter(torch.zeros(1))], **options)
        get_scheduler(
            args.lr_scheduler_type,
            optimizer,
            0,
            1,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,
        )
    except (ValueError, TypeError, ImportError) as error:
        names = ("optim", "optim_args", "adam_beta1", "adam_beta2", "adam_epsilon")
        given = args.to_dict()
        shown = ", ".join(
            f"{name}={given[name]}" for name in (*names, "lr_scheduler_type", "lr_scheduler_kwargs")
        )
        raise UserError(
            f"no optimizer with a schedule can be made of {shown}: {one_line(error)}"
        ) from error


def require(args: Any, allowed: dict[str, tuple[bool, str]]) -> None:
    """Raise `ValueError` for an argument that does not fit; `allowed` is name -> (whether it fits, what to give)."""
    for name, (fits, remedy) in allowed.items():
        if not fits:
            raise UserError(f"{name}={attrgetter(name)(args)!r:.200}: give {remedy}.")


def check_launched(world_size: int) -> None:
    """Raise `ValueError` unless all launched processes know of each other."""
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != world_size:
        raise UserError(
            f"{launched} processes were launched, but world_size={world_size}: each would train alone. On CPU, put "
            "ACCELERATE_USE_CPU=true before the command."
        )


def share_of_batch(total: int, processes: int) -> int:
    """Pairs of each process in a batch of `total`.

    >>> share_of_batch(1024, 8)
    128

    Raises:
        ValueError: fewer pairs than processes, or pairs that do not divide evenly.
    """
    if total < processes or total % processes:
        better = max(1, round(total / processes)) * processes
        raise UserError(
            f"total_train_batch_size={total} cannot be shared evenly by {processes} processes; give {better}, for one."
        )
    return total // processes


Arguments = tuple[ModelArguments, DataArguments, DAPTrainingArguments]
GROUPS = (ModelArguments, DataArguments, DAPTrainingArguments)
USAGE = "%(prog)s [RECIPE.yaml] --train_data PATH [PATH ...] --output_dir FOLDER [arguments]"


def parse_arguments(argv: list[str]) -> Arguments:
    """Arguments from an optional YAML recipe (first in `argv`) and flags, which override it."""
    if argv and argv[0].endswith((".yaml", ".yml")):
        flags = argv[1:]
        rivals = {
            other for pair in RIVALS for name, other in (pair, pair[::-1]) if given(name, flags)
        }
        argv = recipe_flags(Path(argv[0]), without=rivals) + flags
    for pair in RIVALS:
        if all(given(name, argv) for name in pair):
            raise UserError(f"--{pair[0]} and --{pair[1]} say the same: give one of them.")
    if given("num_train_epochs", argv):
        argv = [*argv, "--max_steps", "-1"]
    parser = ArgumentParser(GROUPS, usage=USAGE, allow_abbrev=False)
    model, data, training = parser.parse_args_into_dataclasses(args=argv)
    if model.model_name_or_path is None and model.config_name is None:
        raise UserError(
            "nothing to start from: give --model_name_or_path, or --config_name to begin from scratch."
        )
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
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except Exception as error:  # of odd tags, such as `!!int many`, YAML raises anything
        raise UserError(
            f"{path}: no YAML that can be read ({one_line(error)}); repair it."
        ) from error
    if not isinstance(recipe, dict):
        raise UserError(
            f"{path}: expected lines of `argument: value`, found {type(recipe).__name__}."
        )
    known = {field.name for group in GROUPS for field in dataclasses.fields(group)}
    if unknown := sorted(map(str, recipe.keys() - known)):
        raise UserError(
            f"{path}: unknown argument {', '.join(unknown)}; `python train_dap.py --help` lists them."
        )
    flags: list[str] = []
    for key, value in recipe.items():
        if value == []:
            raise UserError(f"{path}: {key} is an empty list; give a value, or remove the line.")
        if value is None or key in without:
            continue
        if value is False and key.endswith("_strategy"):  # YAML's bare `no`
            value = "no"
        values = (
            value
            if isinstance(value, list)
            else [json.dumps(value) if isinstance(value, dict) else value]
        )
        flags += [f"--{key}", *map(str, values)]
    return flags
