"""Fine-tune an encoder on English XNLI, and test it in many languages.

Each learning rate is a run with its own folder in `output_dir`. A finished run holds `result.json`
and is used again. A stopped run resumes.
"""

import copy
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from datasets import Dataset, Features, Value
from torch import Tensor
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_utils import sort_checkpoints

from configuration_dap import DAPConfig
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.shards import model_fingerprint
from dap_transformers.errors import UserError
from dap_transformers.evaluation.evaluator import Metric, card_rows, data_name
from dap_transformers.files import public_name, read_json, write_json
from dap_transformers.languages import XNLI_LANGUAGES
from dap_transformers.options import arg
from dap_transformers.reports import report
from dap_transformers.tokenizer import forget_calls
from dap_transformers.training.arguments import check_launched, set_precision
from dap_transformers.training.resume import (
    ResumableTrainer,
    changes_weights,
    find_resumable,
    record_run,
    train_to_end,
)
from dap_transformers.xnli.data import (
    LABEL,
    NLIData,
    TextOptions,
    find_nli,
    prepare_nli,
    training_source,
)
from modeling_dap import DAPForSequenceClassification, DAPModel

PROTOCOL = "XNLI, fine-tuned on English, zero-shot"
RESULT = "result.json"  # in the folder of a finished run
#: Arguments that may differ between the runs in one output folder.
OF_ONE_RUN = ("search", "learning_rate", "learning_rates")
#: Arguments that a report shows.
SHOWN = (
    "total_train_batch_size",
    "num_train_epochs",
    "weight_decay",
    "warmup_steps",
    "max_steps",
    "bf16",
)


@dataclass
class XNLITrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's defaults (appendix "XNLI Fine-tuning").

    `gradient_accumulation_steps` follows from the pairs per step.
    """

    total_train_batch_size: int = arg(
        256,
        "Pairs per step, over all processes and accumulated batches. Sets the number of these.",
    )
    search: bool = arg(False, "Choose among learning_rates by accuracy on English dev pairs.")
    learning_rates: list[float] = arg([1e-5, 3e-5, 5e-5, 7e-5], "Learning rates for --search.")
    learning_rate: float = arg(5e-5, "Peak learning rate of AdamW.")
    num_train_epochs: float = arg(2.0, "Passes over the training pairs.")
    weight_decay: float = arg(0.0, "Weight decay of AdamW.")
    per_device_train_batch_size: int = arg(32, "Pairs in memory at once, per process.")
    per_device_eval_batch_size: int = arg(64, "Pairs per batch of the evaluation.")
    save_steps: float = arg(0.2, "Steps between checkpoints, or share of a run.")
    save_total_limit: int | None = arg(1, "Checkpoints that a run keeps.")
    logging_steps: float = arg(0.05, "Steps between logs, or share of a run.")
    logging_nan_inf_filter: bool = arg(False, "Hide losses that are NaN or infinite.")
    report_to: None | str | list[str] = arg("none", "Trackers, such as tensorboard.")
    dataloader_pin_memory: bool = arg(False, "Use page-locked batches, for a GPU.")
    resume_from_checkpoint: str | None = arg(
        None, "Give false to restart unfinished runs.", choices=("true", "false")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        set_precision(self)
        check_launched(self)
        at_once = self.train_batch_size * self.world_size
        self.gradient_accumulation_steps, rest = divmod(self.total_train_batch_size, at_once)
        if rest:
            raise UserError(
                f"total_train_batch_size={self.total_train_batch_size} is no multiple of "
                f"per_device_train_batch_size times {self.world_size} processes, {at_once}: "
                "change one of them"
            )


def build_classifier(encoder: SentenceEncoder) -> DAPForSequenceClassification:
    """Return a copy of the encoder, a DAP or a plain one, with a random head for NLI labels.

    A plain encoder's own pooler is left out.
    """
    config = copy.deepcopy(encoder.model.config)
    if not isinstance(encoder.model, DAPModel):
        config = DAPConfig(config, objective="tr")
    config.pooling = encoder.pooling
    config.modules = []
    for module in encoder.after:
        config.modules.append({"type": type(module).__name__} | getattr(module, "config", {}))
    config.id2label = dict(enumerate(LABEL.names))
    config.label2id = {name: number for number, name in enumerate(LABEL.names)}

    model = DAPForSequenceClassification(config)
    state = encoder.backbone.state_dict()
    own = model.dap.encoder
    own.load_state_dict({name: state[name] for name in own.state_dict()})
    model.dap.after.load_state_dict(encoder.after.state_dict())
    return model


def has_token_types(encoder: SentenceEncoder) -> bool:
    """Tell whether the encoder has token types, as mBERT has and XLM-R has not."""
    return (getattr(encoder.backbone.config, "type_vocab_size", None) or 0) > 1


def make_trainer(
    model: DAPForSequenceClassification,
    tokenizer: PreTrainedTokenizerBase,
    args: XNLITrainingArguments,
    train: Dataset,
) -> ResumableTrainer:
    """Make the trainer of an NLI classifier."""
    return ResumableTrainer(
        model=model,
        args=args,
        train_dataset=train,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        compute_loss_func=mean_over_step,
        compute_metrics=compute_accuracy,
    )


def mean_over_step(
    outputs: SequenceClassifierOutput,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Compute a batch's share of its step's mean cross entropy: logits (B, C), labels (B,).

    The shares of all batches of the step add up to that mean. `num_items_in_batch` is the number of
    pairs of the whole step. None takes B.
    """
    total = F.cross_entropy(outputs["logits"].float(), labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def compute_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Compute the accuracy of predicted classes, given logits (N, C) and labels (N,).

    `evaluate.load("accuracy")` gives the same, but would need a download.

    Logits that are not finite raise `FloatingPointError`, because their class would be the first.

    >>> compute_accuracy(EvalPrediction(np.eye(3)[[0, 1, 2, 2]], np.array([0, 1, 1, 2])))
    {'accuracy': 0.75}
    """
    import evaluate  # takes a second, which `--help` does not need

    class Accuracy(evaluate.Metric):
        def _info(self) -> evaluate.MetricInfo:
            features = Features({"predictions": Value("int32"), "references": Value("int32")})
            text = "Share of predictions that equal their reference."
            return evaluate.MetricInfo(
                description=text, citation="", inputs_description="", features=features
            )

        def _compute(self, predictions: Any, references: Any) -> dict[str, float]:
            return {"accuracy": float(np.mean(np.asarray(predictions) == np.asarray(references)))}

    logits = np.asarray(prediction.predictions)
    if not np.isfinite(logits).all():
        raise FloatingPointError("the predictions are not finite: give a lower learning rate")
    classes = logits.argmax(-1)  # (N,)
    metric = Accuracy(keep_in_memory=True)
    return metric.compute(predictions=classes, references=prediction.label_ids)


def fine_tune_and_test(
    model: str, encoder: SentenceEncoder, text: TextOptions, training: XNLITrainingArguments
) -> dict[str, Any]:
    """Fine-tune an encoder on English pairs, test it in all languages, and write `xnli.json`.

    Returns the content of that file. With `search`, the learning rate with the best English dev
    accuracy is taken, the first of equals. The encoder stays unchanged. In a launch of several
    processes, only the first one writes.
    """
    found = find_nli(text.data_dir)
    if not found["test"]:
        raise UserError(f"there is no test-xx file in {text.data_dir}")
    sources = {
        "train": {"en": training_source(text.train_data, found)},
        "dev": {code: source for code, source in found["dev"].items() if code == "en"},
        "test": found["test"],
    }
    if training.search and not sources["dev"]:
        raise UserError(f"the search needs English dev pairs in {text.data_dir}")
    data = prepare_nli(sources, encoder.tokenizer, text, has_token_types(encoder))
    record_run(describe_runs(encoder, data, text, training), training, training.output_dir)

    rates = training.learning_rates if training.search else [training.learning_rate]
    results = [fine_tune(encoder, data, training, rate) for rate in rates]
    best = max(results, key=lambda result: result["dev"].get("en", 0.0))
    tried = []
    if training.search:
        for rate, result in zip(rates, results, strict=True):
            tried.append({"learning_rate": rate, "dev_accuracy": result["dev"]["en"]})
    settings = {"learning_rate": best["learning_rate"]}
    settings |= {name: getattr(training, name) for name in SHOWN}
    del settings["num_train_epochs" if training.max_steps > 0 else "max_steps"]
    settings |= {
        "pooling": encoder.pooling,
        "max_seq_length": text.max_seq_length,
        "data": public_name(text.data_dir),
        "train_data": text.train_data and public_name(text.train_data),
        "train_pairs": len(data.train["en"]),
        "search": tried,
    }
    revision = encoder.revision
    numbers = report_numbers(best, data, data_name([text.data_dir]))
    content = report(model, PROTOCOL, numbers, settings, best["seconds"], revision, training.seed)
    if training.process_index == 0:
        write_json(content, Path(training.output_dir, "xnli.json"))
    return content


def describe_runs(
    encoder: SentenceEncoder, data: NLIData, text: TextOptions, training: XNLITrainingArguments
) -> dict[str, Any]:
    """Return the settings and texts that all runs in `output_dir` share."""
    record: dict[str, Any] = {}
    for name, value in training.to_dict().items():
        if changes_weights(name) and name not in OF_ONE_RUN:
            record[name] = value
    record["texts"] = data.digests
    record["max_seq_length"] = text.max_seq_length
    record["model"] = model_fingerprint(encoder)
    return record


def fine_tune(
    encoder: SentenceEncoder, data: NLIData, training: XNLITrainingArguments, learning_rate: float
) -> dict[str, Any]:
    """Fine-tune a copy of the encoder with one learning rate, and measure its accuracy.

    A stopped run resumes from its checkpoint. A finished one is only read.

    Returns:
        The content of `result.json` in the run's folder: "dev" and "test" map language codes to
        accuracies in percent.

    Raises:
        FloatingPointError: the training diverged, so that predictions are NaN or infinite.
    """
    folder = Path(training.output_dir, f"lr-{learning_rate}-seed-{training.seed}")
    if (folder / RESULT).exists():
        return read_json(folder / RESULT)

    args = copy.copy(training)
    args.learning_rate = learning_rate
    args.output_dir = str(folder)
    set_seed(args.seed)
    model = build_classifier(encoder)
    trainer = make_trainer(model, encoder.tokenizer, args, data.train["en"])
    metrics = train_to_end(trainer, find_resumable(args))
    result = {
        "learning_rate": learning_rate,
        "steps": trainer.state.global_step,
        "seconds": metrics.get("train_runtime", 0.0),
    }
    for split, datasets in (("dev", data.dev), ("test", data.test)):
        result[split] = {}
        for code, dataset in datasets.items():
            metrics = trainer.predict(dataset).metrics
            result[split][code] = 100 * metrics["test_accuracy"]
            result["seconds"] += metrics["test_runtime"]

    forget_calls(encoder.tokenizer)  # training leaves its padding there
    trainer.save_model(str(folder))
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        write_json(result, folder / RESULT)
        for checkpoint in sort_checkpoints(str(folder)):
            shutil.rmtree(checkpoint)
    trainer.accelerator.wait_for_everyone()
    return result


def report_numbers(result: Mapping[str, Any], data: NLIData, name: str) -> dict[str, Any]:
    """Return the numbers of a report: accuracies in percent by language, and their mean.

    `name` is that of the test data.
    """
    accuracies = result["test"]
    mean = sum(accuracies.values()) / len(accuracies)
    count, all_languages = len(accuracies), len(XNLI_LANGUAGES)
    place = "mean" if count == all_languages else f"{count} of {all_languages} languages"
    metrics = [Metric("accuracy", mean, place, "accuracy")]
    languages = {}
    for code, accuracy in accuracies.items():
        metrics.append(Metric("accuracy", accuracy, code, "accuracy"))
        languages[code] = {"pairs": len(data.test[code]), "accuracy": accuracy}
    return {
        "languages": languages,
        "mean": {"languages": len(languages), "accuracy": mean},
        "dev": {code: {"accuracy": accuracy} for code, accuracy in result["dev"].items()},
        "metrics": card_rows("natural language inference", metrics, name),
    }
