"""Fine-tune an encoder on English XNLI, and test it in many languages.

Each pair of learning rate and seed is a run with its own folder in `output_dir`. Runs can be
stopped and resumed, and finished runs are used again.
"""

import copy
import json
import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
from dap_transformers.evaluation.evaluator import Metric, card_rows
from dap_transformers.files import public_name, read_json, write_json
from dap_transformers.languages import XNLI_LANGUAGES
from dap_transformers.options import arg
from dap_transformers.reports import RECORD, report
from dap_transformers.tokenizer import forget_calls
from dap_transformers.training.arguments import check_launched, set_precision
from dap_transformers.training.resume import (
    ResumableTrainer,
    changes_weights,
    differences,
    find_resumable,
    train_to_end,
)
from dap_transformers.xnli.data import (
    LABEL,
    NLIData,
    StepLengthSampler,
    TextOptions,
    find_nli,
    prepare_nli,
    training_source,
)
from modeling_dap import DAPForSequenceClassification, DAPModel

PROTOCOL = "XNLI, fine-tuned on English, zero-shot"
RESULT = "result.json"  # in the folder of a finished run
WEIGHTS = "model*.safetensors*"
#: Arguments that may differ between the runs in one output folder.
MAY_DIFFER = {
    "seed",
    "search",
    "learning_rate",
    "learning_rates",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
}
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
    body = encoder.model
    if isinstance(body, DAPModel):
        config = copy.deepcopy(body.config)
        plain = body.encoder
    else:
        config = DAPConfig(copy.deepcopy(body.config), objective="tr")
        plain = body
    config.pooling = encoder.pooling
    config.id2label = dict(enumerate(LABEL.names))
    config.label2id = {name: number for number, name in enumerate(LABEL.names)}

    model = DAPForSequenceClassification(config)
    state = plain.state_dict()
    own = model.dap.encoder
    own.load_state_dict({name: state[name] for name in own.state_dict()})
    return model


def has_token_types(encoder: SentenceEncoder) -> bool:
    """Tell whether the encoder has token types, as mBERT has and XLM-R has not."""
    config = encoder.model.config
    config = getattr(config, "encoder_config", config)
    return (getattr(config, "type_vocab_size", None) or 0) > 1


def make_trainer(
    model: DAPForSequenceClassification,
    tokenizer: PreTrainedTokenizerBase,
    args: XNLITrainingArguments,
    train: Dataset | None = None,
) -> ResumableTrainer:
    """Make the trainer of an NLI classifier. Without `train` it can only evaluate.

    The pairs of each optimizer step are drawn at random. Within the step they are sorted by length
    (the column "length"), so that batches have little padding.
    """
    sampler = None
    if train is not None:
        sampler = StepLengthSampler(train["length"][:], args.total_train_batch_size, args.seed)
    return ResumableTrainer(
        model=model,
        args=args,
        train_dataset=train,
        train_sampler=sampler,
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

    classes = np.asarray(prediction.predictions).argmax(-1)  # (N,)
    metric = Accuracy(keep_in_memory=True)
    return metric.compute(predictions=classes, references=prediction.label_ids)


@dataclass
class Task:
    """What all fine-tuning runs share: the encoder, the tokenised text, the arguments.

    Each run fine-tunes a copy of the encoder, and sets learning rate, seed and folder in a copy of
    the arguments.
    """

    model: str
    encoder: SentenceEncoder
    text: TextOptions
    data: NLIData
    training: XNLITrainingArguments

    def run_folder(self, learning_rate: float) -> Path:
        """Return the folder of the fine-tuning run with this learning rate."""
        name = f"lr-{learning_rate}-seed-{self.training.seed}"
        return Path(self.training.output_dir) / name


def fine_tune_and_test(
    model: str, encoder: SentenceEncoder, text: TextOptions, training: XNLITrainingArguments
) -> dict[str, Any]:
    """Fine-tune an encoder on English pairs, test it in all languages, and write `xnli.json`.

    The result is its content. The encoder stays unchanged. In a launch of several processes, only
    the first one writes.
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
    task = Task(model, encoder, text, data, training)
    keep_record(task)

    learning_rate, tried = search(task)
    measured(task, learning_rate, "dev")
    content = make_report(task, measured(task, learning_rate, "test"), tried)
    if training.process_index == 0:
        write_json(content, Path(training.output_dir, "xnli.json"))
    return content


def keep_record(task: Task) -> None:
    """Record the settings and texts that all runs in `output_dir` share.

    A later command must have the same, so that different runs never meet in one report. It may
    test more languages.
    """
    training = task.training
    record: dict[str, Any] = {}
    for name, value in training.to_dict().items():
        if changes_weights(name) and name not in MAY_DIFFER:
            record[name] = value
    record |= task.data.digests
    record["max_seq_length"] = task.text.max_seq_length
    record["model"] = model_fingerprint(task.encoder)
    record = json.loads(json.dumps(record, default=str))  # as it is read from the file

    path = Path(training.output_dir, RECORD)
    before = read_json(path) if path.exists() else {}
    differing = differences(before, record)
    if differing:
        raise UserError(
            f"{path.parent} holds runs with {'; '.join(differing)}: give the same arguments, or "
            "another folder"
        )
    if training.process_index == 0:
        write_json(before | record, path)


def search(task: Task) -> tuple[float, list[dict[str, Any]]]:
    """Choose the learning rate with the best English dev accuracy, the first of equals.

    The result also lists the accuracy, in percent, for each rate tried. It is None if the loss
    became NaN or infinite. Without `search`, the learning rate is the one in the arguments.
    """
    training = task.training
    if not training.search:
        return training.learning_rate, []

    accuracies = {}
    for rate in training.learning_rates:
        with suppress(FloatingPointError):
            accuracies[rate] = measured(task, rate, "dev")["dev"]["en"]
    if not accuracies:
        raise FloatingPointError(
            f"no loss was finite with any of learning_rates={training.learning_rates}: lower them"
        )
    best = max(accuracies, key=accuracies.get)
    tried = []
    for rate in training.learning_rates:
        tried.append({"learning_rate": rate, "dev_accuracy": accuracies.get(rate)})
        if rate != best and training.process_index == 0:
            for path in task.run_folder(rate).glob(WEIGHTS):
                path.unlink()
    return best, tried


def measured(task: Task, learning_rate: float, split: str) -> dict[str, Any]:
    """Fine-tune unless that is done, and measure accuracy of a split, "dev" or "test", in percent.

    Accuracies that an earlier command measured are kept. New ones are written to the run's
    `result.json`, which is returned: `result[split][code]`.
    """
    folder = task.run_folder(learning_rate)
    datasets = getattr(task.data, split)
    path = folder / RESULT
    result = read_json(path) if path.exists() else None
    if result is not None and datasets.keys() <= result[split].keys():
        return result
    if result is None or not any(folder.glob(WEIGHTS)):
        if task.training.process_index == 0:
            path.unlink(missing_ok=True)  # until the weights are written, the run is unfinished
        result = fine_tune(task, learning_rate)

    args = copy.copy(task.training)
    args.output_dir = str(folder)
    model = DAPForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    trainer = make_trainer(model, task.encoder.tokenizer, args)
    for code in datasets:
        if code not in result[split]:
            metrics = trainer.predict(datasets[code]).metrics
            result[split][code] = 100 * metrics["test_accuracy"]
            result["seconds"] += metrics["test_runtime"]
            write_result(trainer, result, folder)
    return result


def fine_tune(task: Task, learning_rate: float) -> dict[str, Any]:
    """Fine-tune with one learning rate, and write weights and `result.json`.

    A stopped run resumes from its checkpoint. "dev" and "test" will hold accuracies by language.
    """
    folder = task.run_folder(learning_rate)
    args = copy.copy(task.training)
    args.learning_rate = learning_rate
    args.output_dir = str(folder)
    set_seed(args.seed)
    model = build_classifier(task.encoder)
    trainer = make_trainer(model, task.encoder.tokenizer, args, task.data.train["en"])
    metrics = train_to_end(trainer, find_resumable(args))

    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    if losses and not math.isfinite(losses[-1]):
        raise FloatingPointError(
            f"the loss is {losses[-1]} with learning_rate={learning_rate:g}, seed={args.seed}: "
            "give a lower learning rate"
        )
    result = {
        "learning_rate": learning_rate,
        "seed": args.seed,
        "steps": trainer.state.global_step,
        "seconds": metrics.get("train_runtime", 0.0),
        "dev": {},
        "test": {},
    }
    forget_calls(task.encoder.tokenizer)  # training leaves its padding there
    trainer.save_model(str(folder))
    write_result(trainer, result, folder)
    return result


def make_report(
    task: Task, result: Mapping[str, Any], tried: list[dict[str, Any]]
) -> dict[str, Any]:
    """Make the report from what `measured` returned: percent by language, and mean.

    `tried` lists the learning rates that `search` tried. It is empty without search.
    """
    text = task.text
    settings = {"learning_rate": result["learning_rate"]}
    for name in SHOWN:
        settings[name] = getattr(task.training, name)
    settings |= {
        "pooling": task.encoder.pooling,
        "max_seq_length": text.max_seq_length,
        "data": public_name(text.data_dir),
        "train_data": text.train_data and public_name(text.train_data),
        "train_pairs": len(task.data.train["en"]),
        "max_test_pairs": text.max_test_pairs,
        "search": tried,
        "missing": [code for code in XNLI_LANGUAGES if code not in task.data.test],
    }

    languages = {}
    for code, dataset in task.data.test.items():
        languages[code] = {"pairs": len(dataset), "accuracy": result["test"][code]}
    mean = sum(numbers["accuracy"] for numbers in languages.values()) / len(languages)
    metrics = [Metric("accuracy", mean, "mean", "accuracy")]
    for code, each in languages.items():
        metrics.append(Metric("accuracy", each["accuracy"], code, "accuracy"))
    numbers = {
        "languages": languages,
        "mean": {"languages": len(languages), "accuracy": mean},
        "dev": {code: {"accuracy": accuracy} for code, accuracy in result["dev"].items()},
        "metrics": card_rows("natural language inference", metrics),
    }
    return report(
        task.model,
        PROTOCOL,
        numbers,
        settings,
        result["seconds"],
        task.encoder.revision,
        result["seed"],
    )


def write_result(trainer: ResumableTrainer, result: dict[str, Any], folder: Path) -> None:
    """Write a run's result in the first process, and remove its checkpoints. All processes wait."""
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        write_json(result, folder / RESULT)
        for checkpoint in sort_checkpoints(str(folder)):
            shutil.rmtree(checkpoint)
    trainer.accelerator.wait_for_everyone()
