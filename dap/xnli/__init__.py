"""XNLI, cross-lingual natural language inference: its text, fine-tuning, and accuracy by
language."""

from dap.xnli.finetuning import (
    RESULT,
    Task,
    XNLITrainingArguments,
    has_token_types,
    measured,
    search,
)
from dap.xnli.nli_data import NLISource, chosen_languages, find_nli, prepare_nli, training_source

__all__ = [
    "NLISource",
    "RESULT",
    "Task",
    "XNLITrainingArguments",
    "chosen_languages",
    "find_nli",
    "has_token_types",
    "measured",
    "prepare_nli",
    "search",
    "training_source",
]
