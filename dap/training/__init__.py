"""Training on parallel text: arguments, batches, the model to start from, trainer and resuming."""

from dap.training.batches import (
    BitextCollator,
    LanguageMixSampler,
    drop_targets,
    mix_streams,
    mix_weights,
    split_validation,
    tokenize_bitext,
)
from dap.training.distillation import add_teacher, check_teacher
from dap.training.grad_cache import CachedBatch, seeded
from dap.training.head_training import HEADS_FILE, RESULTS_FILE, train_missing_heads
from dap.training.resuming import (
    FINISHED,
    ResumableTrainer,
    changes_weights,
    describe_run,
    differences,
    find_resumable,
    record_run,
    train_to_end,
)
from dap.training.source_reading import HARDLY, READERS
from dap.training.start import Start, check_settings, is_streamed, load_model, read_start
from dap.training.trainer import (
    DAPTrainer,
    DrawsOfProcess,
    EpochOfSampler,
    leave_together,
    require_batch,
)
from dap.training.training_arguments import (
    DAPTrainingArguments,
    PretrainingDataArguments,
    PretrainingModelArguments,
    check_launched,
    follow_metric,
    parse_arguments,
    set_precision,
)
from dap.training.word_edits import HardNegatives

__all__ = [
    "BitextCollator",
    "CachedBatch",
    "DAPTrainer",
    "DAPTrainingArguments",
    "DrawsOfProcess",
    "EpochOfSampler",
    "FINISHED",
    "HARDLY",
    "HEADS_FILE",
    "HardNegatives",
    "LanguageMixSampler",
    "PretrainingDataArguments",
    "PretrainingModelArguments",
    "READERS",
    "RESULTS_FILE",
    "ResumableTrainer",
    "Start",
    "add_teacher",
    "changes_weights",
    "check_launched",
    "check_settings",
    "check_teacher",
    "describe_run",
    "differences",
    "drop_targets",
    "find_resumable",
    "follow_metric",
    "is_streamed",
    "leave_together",
    "load_model",
    "mix_streams",
    "mix_weights",
    "parse_arguments",
    "read_start",
    "record_run",
    "require_batch",
    "seeded",
    "set_precision",
    "split_validation",
    "tokenize_bitext",
    "train_missing_heads",
    "train_to_end",
]
