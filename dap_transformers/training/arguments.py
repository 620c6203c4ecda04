"""The options of a training: model, text, and the Trainer's own with the paper's defaults."""

import dataclasses
import inspect
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, get_args

from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy, SchedulerType
from transformers.utils.chat_template_utils import parse_google_format_docstring

from configuration_dap import FIELDS, DAPConfig
from dap_transformers.errors import UserError
from dap_transformers.evaluation.evaluation_data import EvaluationData
from dap_transformers.languages import base_language
from dap_transformers.options import arg, require_least
from objectives_dap import objectives_of

#: Fields of `DAPConfig` that are read from folders and text, so that nobody chooses them.
FROM_FILES = (
    "rtl_languages",
    "target_vocab_size",
    "mask_token_id",
    "distill_size",
    "modules",
    "special_tokens_before",
    "special_tokens_after",
)

#: Endings of metrics of which less is better. Transformers only knows the first one.
LESS_IS_BETTER = ("loss", "error", "aer")

CONFIG_FIELDS = {name: field for name, field in FIELDS.items() if name != "encoder_config"}


def config_arguments() -> Iterator[tuple[str, Any, dataclasses.Field]]:
    """Yield a command-line argument for each field of `DAPConfig` that a user chooses.

    The type is the field's, and the help comes from the docstring of `DAPConfig`. The default is
    always None, so that `given_fields` can tell which arguments were given.

    Yields:
        The name, type and field of each argument, as `make_dataclass` takes them.
    """
    _, texts, _ = parse_google_format_docstring(inspect.getdoc(DAPConfig) or "")
    for name, field in CONFIG_FIELDS.items():
        if name in FROM_FILES:
            continue
        text = (texts or {}).get(name, "")
        text = text.replace("`", "").replace('"', "").replace("%", "%%")
        kind = float if float in get_args(field.type) else field.type
        yield config_argument(name, kind, field.default, text)


def config_argument(
    name: str, kind: type, default: Any, text: str = ""
) -> tuple[str, Any, dataclasses.Field]:
    """Return the name, type and field of an argument of the command line, for `make_dataclass`.

    It sets a field of `DAPConfig` or an option of a plug-in. It is None if the user does not give
    it, and `default` is only for the help.
    """
    if default is not None and default is not False:
        text += f" Default: that of the checkpoint, otherwise {default}."
    # `--name` without a value is `--name true`.
    options = {"nargs": "?", "const": True} if kind is bool else {}
    return name, kind | None, arg(None, text, **options)


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
    tokenizer_name: str | None = arg(
        None, "Tokenizer, if it is not in the folder of the model or the configuration."
    )
    revision: str | None = arg(None, "Commit, tag or branch of the checkpoint.")
    trust_remote_code: bool = arg(False, "Run code that comes with the checkpoint.")
    attn_implementation: str | None = arg(None, "Attention: eager, sdpa, flash_attention_2, ...")
    distill_from: str | None = arg(
        None,
        "Teacher of the objective distill: folder or Hub id of a sentence encoder. Its vectors of "
        "the targets are computed once. Default: the model itself, as it is before training, with "
        "its own vectors of both sides.",
    )
    plugin: list[str] = arg(
        [],
        "Python files that add objectives of your own (docs/architecture.md). The options "
        "of an objective NAME are flags that begin with its name, such as --NAME_weight.",
        action="extend",
    )


@dataclass
class PretrainingModelArguments(
    dataclasses.make_dataclass("ConfigArguments", config_arguments(), bases=(StartArguments,))
):
    """Arguments of the model: where it starts from, and the fields of `DAPConfig`.

    A field that is not given keeps the value of the DAP checkpoint, or else has its default.

    Attributes:
        own_fields: options of objectives that a plug-in adds, by name, such as "bag_weight".
    """

    _argument_group_name = "model and objective"

    own_fields: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)


def given_fields(args: PretrainingModelArguments) -> dict[str, Any]:
    """Return the values of `DAPConfig` fields that the user gave, by name.

    Fields that were not given are None in the arguments, and left out.
    """
    given = {}
    for name, value in vars(args).items():
        if name in CONFIG_FIELDS and value is not None:
            given[name] = value
    return given | args.own_fields


def fields_of(config: DAPConfig) -> dict[str, Any]:
    """Return a configuration's fields by name, also fields of plug-ins, but not the encoder."""
    fields = {name: getattr(config, name) for name in CONFIG_FIELDS}
    for objective in objectives_of(config):
        fields |= objective.fields
    return fields


@dataclass
class PretrainingDataArguments(EvaluationData):
    """Arguments of the parallel text to train on. All languages share one target language."""

    _argument_group_name = "text"

    train_data: list[str] = arg(
        dataclasses.MISSING,
        "Files, folders or Hub dataset ids of parallel text. docs/training.md lists formats.",
    )
    validation_data: list[str] = arg(
        [], "Dev pairs. Default: those beside the training text (dev/), or some are held out."
    )
    dev_pairs: int = arg(
        1000,
        "Most dev pairs per language, from the dev set beside the training text, or else held out "
        "of the text (at most a twentieth). --validation_data is used whole. 0: none but that.",
    )
    target_language: str = arg("en", "Language code of the target side.")
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
    query_prompt: str | None = arg(
        None,
        "Text that the saved model and --search_data put before a question. Default: that of a "
        "sentence-transformers folder, perhaps none, unless --prefix is given, else the prefix.",
    )
    document_prompt: str | None = arg(None, "The same before a passage, such as 'passage: '.")
    language_mix: str = arg(
        "natural",
        "How often to draw each language.",
        choices=("natural", "uniform", "temperature"),
    )
    mix_alpha: float = arg(0.5, "Exponent of the temperature mix, 0 to 1.")
    max_bad_lines: float = arg(0.001, "Share of malformed lines that a file may have.")

    def __post_init__(self) -> None:
        require_least(self, dev_pairs=0)
        self.target_language = base_language(self.target_language)


@dataclass
class DAPTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's defaults (section 4.2) and options for large batches.

    What the losses rest on cannot be changed: all processes have equal batches of the size that was
    given, and the collator gets all columns. So `dataloader_drop_last`, `remove_unused_columns` and
    `auto_find_batch_size` are set here, and so is `hub_strategy`.
    """

    _argument_group_name = "training"

    mini_batch_size: int | None = arg(
        None,
        "Pairs that a process holds in memory at once (GradCache). The gradients stay those of "
        "the whole batch, at the cost of a second pass through the encoder. Default: the whole "
        "batch.",
    )
    total_train_batch_size: int | None = arg(
        None,
        "Pairs per optimizer step, over all processes and accumulated batches. This sets the batch "
        "size per device. Accumulated batches add no negatives.",
    )
    freeze_word_embeddings: bool = arg(
        False, "Do not train the word embeddings. Saves memory and time."
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
    num_train_epochs: float | None = arg(
        None, "Passes over the text. Ignored if max_steps is given."
    )
    max_steps: int | None = arg(
        None, "Optimizer steps. Default: 100,000, unless num_train_epochs is given."
    )
    per_device_train_batch_size: int = arg(128, "Pairs per process and step.")
    logging_nan_inf_filter: bool = arg(False, "A loss that is not finite stops the run.")
    metric_for_best_model: str | None = arg(
        "eval_mean_accuracy", "Metric that chooses the best checkpoint."
    )
    ddp_timeout: int = arg(
        86_400, "Seconds that processes wait for each other, as while one reads the text."
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
    dataloader_pin_memory: bool | None = arg(
        None, "Use page-locked batches, which copy faster. Default: true on CUDA."
    )

    def __post_init__(self) -> None:
        if self.max_steps is None:
            self.max_steps = 100_000 if self.num_train_epochs is None else -1
        if self.num_train_epochs is None:
            self.num_train_epochs = 3.0  # has no effect if there are steps, which count
        if self.report_to is None:
            self.report_to = ["tensorboard"] if find_spec("tensorboard") else []
        if self.greater_is_better is None:
            self.greater_is_better = not self.metric_for_best_model.endswith(LESS_IS_BETTER)
        # Negatives are gathered from equal batches, and the collator uses all columns.
        self.dataloader_drop_last = True
        self.remove_unused_columns = False
        # A smaller batch would have fewer negatives.
        self.auto_find_batch_size = False
        # The model is published once, after training.
        self.hub_strategy = HubStrategy.END
        # `Trainer` would compute float32 products in TF32 if it compiles.
        compiles = self.torch_compile or self.torch_compile_backend or self.torch_compile_mode
        self.tf32 = False if compiles and self.tf32 is None else self.tf32
        super().__post_init__()
        self.accelerator_config.dispatch_batches = False
        self.accelerator_config.split_batches = False
        set_precision(self)
        if self.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU:
            # By default torch expects a metric that falls, like a loss.
            mode = {"mode": "max" if self.greater_is_better else "min"}
            self.lr_scheduler_kwargs = mode | (self.lr_scheduler_kwargs or {})

        if self.torch_compile:
            # Compile only the layers: the packed rows between them change shape in every step.
            os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = "true"
        if self.hub_token is not None:
            # Every save pickles these arguments. The Hub's client reads the token from here.
            os.environ["HF_TOKEN"] = self.hub_token
            self.hub_token = None
        if self.dataloader_pin_memory is None:
            self.dataloader_pin_memory = self.device.type == "cuda"

        check_launched(self)
        require_least(self, mini_batch_size=1, gradient_accumulation_steps=1)
        require_least(self, head_steps=0, head_pairs=2, peft_lora_rank=1)
        if self.total_train_batch_size is not None:
            set_batch_size(self, self.total_train_batch_size)

    @property
    def seed_of_text(self) -> int:
        """Return the seed that chooses and orders text: `data_seed`, or `seed` if it is None."""
        return self.seed if self.data_seed is None else self.data_seed


def set_batch_size(args: TrainingArguments, total: int) -> None:
    """Set the batch size per device, given the pairs of an optimizer step over all processes."""
    batches = args.world_size * args.gradient_accumulation_steps
    args.per_device_train_batch_size, rest = divmod(total, batches)
    if rest:
        raise UserError(
            f"total_train_batch_size={total} is no multiple of {batches}, the processes times "
            "gradient_accumulation_steps"
        )


def set_precision(args: TrainingArguments) -> None:
    """Set `bf16` and `fp16` to the precision that the training will have.

    If the arguments name none, `accelerate launch --mixed_precision` has decided it.
    """
    precision = str(args.mixed_precision)
    args.bf16 = precision == "bf16"
    args.fp16 = precision == "fp16"


def check_launched(args: TrainingArguments) -> None:
    """Raise `UserError` if a process has several GPUs, or each would train on its own."""
    if args.n_gpu > 1:
        raise UserError(f"{args.n_gpu} GPUs in one process: start it with `accelerate launch`")
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched != args.world_size:
        raise UserError(
            f"{launched} processes were launched, but world_size={args.world_size}: each would "
            "train on its own. On CPU, put ACCELERATE_USE_CPU=true before the command."
        )


Arguments = tuple[PretrainingModelArguments, PretrainingDataArguments, DAPTrainingArguments]
GROUPS = (PretrainingModelArguments, PretrainingDataArguments, DAPTrainingArguments)
