"""Training on parallel text: arguments, text to batches, the model to start from, the trainer, and resuming."""

from dap.training.arguments import (
    DAPTrainingArguments,
    DataArguments,
    ModelArguments,
    check_values,
    parse_arguments,
)
from dap.training.callbacks import EpochOfSampler
from dap.training.data import (
    BitextCollator,
    LanguageMixSampler,
    drop_targets,
    interleave_languages,
    normalise,
    split_validation,
    tokenize_bitext,
)
from dap.training.grad_cache import CachedBatch
from dap.training.hard_negatives import HardNegatives
from dap.training.model import load_model, read_start, token_counts
from dap.training.resuming import (
    FINISHED,
    FindBestAgain,
    RecordInCheckpoints,
    changes_weights,
    describe_run,
    differences,
    find_resumable,
    has_ended,
    keep_record,
    load_ended,
)
from dap.training.source_reading import HARDLY
from dap.training.trainer import DAPTrainer, freeze_encoder, freeze_word_embeddings, leave_together

__all__ = [
    "BitextCollator",
    "CachedBatch",
    "DAPTrainer",
    "DAPTrainingArguments",
    "DataArguments",
    "EpochOfSampler",
    "FINISHED",
    "FindBestAgain",
    "HARDLY",
    "HardNegatives",
    "LanguageMixSampler",
    "ModelArguments",
    "RecordInCheckpoints",
    "changes_weights",
    "check_values",
    "describe_run",
    "differences",
    "drop_targets",
    "find_resumable",
    "freeze_encoder",
    "freeze_word_embeddings",
    "has_ended",
    "interleave_languages",
    "keep_record",
    "leave_together",
    "load_ended",
    "load_model",
    "normalise",
    "parse_arguments",
    "read_start",
    "split_validation",
    "token_counts",
    "tokenize_bitext",
]
