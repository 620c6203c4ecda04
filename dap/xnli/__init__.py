"""Cross-lingual natural language inference: its text, fine-tuning, and accuracy by language."""

from dap.xnli.arguments import DataArguments, ModelArguments, XNLITrainingArguments
from dap.xnli.data import NLIData, NLISource, chosen_languages, find_nli, prepare_nli, training_source
from dap.xnli.finetuning import XNLITrainer, accuracy, build_classifier, build_trainer, has_token_types

__all__ = [
    "DataArguments",
    "ModelArguments",
    "NLIData",
    "NLISource",
    "XNLITrainer",
    "XNLITrainingArguments",
    "accuracy",
    "build_classifier",
    "build_trainer",
    "chosen_languages",
    "find_nli",
    "has_token_types",
    "prepare_nli",
    "training_source",
]
