"""Training on parallel text: arguments, batches, the language mix, the trainer, GradCache and resuming."""

from dap.training.arguments import CONFIG_DEFAULTS, DataArguments, ModelArguments, given_fields, parse_arguments
from dap.training.data import BitextCollator, read_target_vocabulary, target_vocabulary, token_counts, tokenize_bitext
from dap.training.grad_cache import CachedBatch
from dap.training.head_warmup import StopEarlyAfterWarmup
from dap.training.mixing import LanguageMixSampler, mix_languages
from dap.training.resuming import (
    FINISHED,
    FindBestAgain,
    RecordInCheckpoints,
    describe_run,
    differences,
    find_resumable,
    has_ended,
    keep_record,
    load_ended,
)
from dap.training.splitting import drop_targets, normalise, split_validation
from dap.training.start import goes_on, load_model, load_start_config, load_tokenizer
from dap.training.trainer import (
    DAPTrainer,
    DAPTrainingArguments,
    EpochOfSampler,
    freeze_word_embeddings,
    leave_together,
)

__all__ = [
    "BitextCollator",
    "CONFIG_DEFAULTS",
    "CachedBatch",
    "DAPTrainer",
    "DAPTrainingArguments",
    "DataArguments",
    "EpochOfSampler",
    "FINISHED",
    "FindBestAgain",
    "LanguageMixSampler",
    "ModelArguments",
    "RecordInCheckpoints",
    "StopEarlyAfterWarmup",
    "describe_run",
    "differences",
    "drop_targets",
    "find_resumable",
    "freeze_word_embeddings",
    "given_fields",
    "goes_on",
    "has_ended",
    "keep_record",
    "leave_together",
    "load_ended",
    "load_model",
    "load_start_config",
    "load_tokenizer",
    "mix_languages",
    "normalise",
    "parse_arguments",
    "read_target_vocabulary",
    "split_validation",
    "target_vocabulary",
    "token_counts",
    "tokenize_bitext",
]
