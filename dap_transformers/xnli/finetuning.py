"""Fine-tune an encoder on English XNLI, and test it in many languages.

Each pair of learning rate and seed is a run with its own folder in `output_dir`. Runs can be
stopped and resumed, and finished runs are used again.
"""

import copy
import json
import logging
import math
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset, Features, Value
from datasets import config as datasets_config
from torch import Tensor
from torch.utils.data import Sampler
from transformers import (
    DataCollatorWithPadding,
    EvalPrediction,
    PreTrainedTokenizerBase,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer_utils import IntervalStrategy, sort_checkpoints

from configuration_dap import DAPConfig
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.encoding.shards import model_fingerprint
from dap_transformers.errors import UserError, reading
from dap_transformers.files import disk_full, public_name, read_json, write_json
from dap_transformers.languages import XNLI_LANGUAGES
from dap_transformers.options import arg
from dap_transformers.reports import merge_seeds, report
from dap_transformers.tokenizers import forget_calls
from dap_transformers.training.arguments import check_launched, follow_metric, set_precision
from dap_transformers.training.resume import (
    ResumableTrainer,
    changes_weights,
    differences,
    find_resumable,
    train_to_end,
)
from dap_transformers.training.step_log import DrawsOfProcess, EpochOfSampler
from dap_transformers.xnli.data import (
    LABEL,
    NLIData,
    StepLengthSampler,
    TextOptions,
    chosen_languages,
    find_nli,
    prepare_nli,
    training_source,
)
from modeling_dap import DAPForSequenceClassification, DAPModel

logger = logging.getLogger(__name__)

PROTOCOL = "XNLI, fine-tuned on English, zero-shot"
RECORD = "run.json"  # in the folder of all runs
RESULT = "result.json"  # in the folder of a finished run
WEIGHTS = "model*.safetensors*"
#: Arguments that may differ between the runs in one output folder.
MAY_DIFFER = {
    "seed",
    "seeds",
    "search",
    "learning_rate",
    "learning_rates",
    "selection",
    "keep_models",
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
    seeds: list[int] | None = arg(None, "Fine-tune once with each seed. Default: --seed.")
    search: bool = arg(False, "Choose among learning_rates by dev accuracy of the first seed.")
    learning_rates: list[float] = arg([1e-5, 3e-5, 5e-5, 7e-5], "Learning rates for --search.")
    selection: str = arg(
        "english",
        "Dev sets for --search: English only (zero-shot), or the mean over all languages.",
        choices=("english", "all"),
    )
    keep_models: bool = arg(False, "Keep the models that --search did not choose.")
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

    def __post_init__(self) -> None:
        super().__post_init__()
        set_precision(self)
        follow_metric(self)
        check_launched(self.world_size)
        if str(self.resume_from_checkpoint).lower() not in ("none", "true", "false"):
            raise UserError(
                f"resume_from_checkpoint={self.resume_from_checkpoint}: each run resumes from its "
                "own checkpoint. Leave it out, or give false to restart unfinished runs"
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type == "cuda"
        at_once = self.train_batch_size * self.world_size
        self.gradient_accumulation_steps, rest = divmod(self.total_train_batch_size, at_once)
        if rest:
            raise UserError(
                f"total_train_batch_size={self.total_train_batch_size} is no multiple of "
                f"per_device_train_batch_size times {self.world_size} processes, {at_once}: "
                "change one of them"
            )

    @property
    def all_seeds(self) -> list[int]:
        """Return the seeds to fine-tune with: `seeds`, or else the single `seed`."""
        return self.seeds or [self.seed]


def build_classifier(encoder: SentenceEncoder) -> DAPForSequenceClassification:
    """Return a new classifier: a copy of the encoder with a random head for NLI labels.

    Parameters have the same names and shapes, whether the encoder is a DAP model or the plain
    encoder inside it. A plain encoder's own pooler is left out.
    """
    body = encoder.model
    is_dap = isinstance(body, DAPModel)
    config = copy.deepcopy(body.config)
    if not is_dap:
        config = DAPConfig(config, objective="tr")
    config.pooling = encoder.pooling
    config.id2label = dict(enumerate(LABEL.names))
    config.label2id = {name: number for number, name in enumerate(LABEL.names)}

    model = DAPForSequenceClassification(config)
    state = body.state_dict()
    if is_dap:
        model.dap.load_state_dict(state)
    else:
        names = model.dap.encoder.state_dict()  # without a pooler, which is not used
        model.dap.encoder.load_state_dict({name: state[name] for name in names})
    return model


def has_token_types(encoder: SentenceEncoder) -> bool:
    """Tell whether the encoder has token types, as mBERT has and XLM-R has not."""
    config = encoder.model.config
    config = getattr(config, "encoder_config", config)
    return (getattr(config, "type_vocab_size", None) or 0) > 1


class XNLITrainer(ResumableTrainer):
    """Trains and evaluates an NLI classifier, with little padding in its batches.

    The pairs of each optimizer step are drawn at random. Within the step they are sorted by length
    (the column "length"). Without `train`, the trainer can only evaluate.
    """

    def __init__(
        self,
        model: DAPForSequenceClassification,
        tokenizer: PreTrainedTokenizerBase,
        args: TrainingArguments,
        train: Dataset | None = None,
        dev: Dataset | None = None,
    ) -> None:
        self.train_sampler = None
        callbacks = [DrawsOfProcess()]
        if train is not None:
            step = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
            self.train_sampler = StepLengthSampler(train["length"][:], step, args.seed)
            callbacks.append(EpochOfSampler(self.train_sampler))
        super().__init__(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=dev,
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_loss_func=mean_over_step,
            compute_metrics=compute_accuracy,
            callbacks=callbacks,
        )

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return self.train_sampler


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

    def run_folder(self, learning_rate: float, seed: int) -> Path:
        """Return the folder of the fine-tuning run with this learning rate and seed."""
        return Path(self.training.output_dir) / f"lr-{learning_rate}-seed-{seed}"


def fine_tune_and_test(
    model: str, encoder: SentenceEncoder, text: TextOptions, training: XNLITrainingArguments
) -> dict[str, Any]:
    """Fine-tune an encoder on English pairs, test it in all languages, and write `xnli.json`.

    The result is its content: the report of the only seed, or the merged one of all seeds. For
    several seeds, the report of each one is written beside it. The encoder stays unchanged. In a
    launch of several processes, only the first one writes.
    """
    waiting = training.main_process_first(desc="reading and tokenising")
    with waiting, disk_full(Path(datasets_config.HF_DATASETS_CACHE)):
        task = Task(model, encoder, text, read_data(encoder, text, training), training)
    keep_record(task)

    learning_rate, tried = search(task)
    reports = {}
    for seed in training.all_seeds:
        measured(task, learning_rate, seed, "dev")
        result = measured(task, learning_rate, seed, "test")
        reports[seed] = make_report(task, result, tried)

    content = reports[training.all_seeds[0]]
    files = {}
    if len(reports) > 1:
        content = merge_seeds(list(reports.values()))
        files = {f"xnli-seed-{seed}.json": each for seed, each in reports.items()}
    files["xnli.json"] = content
    if training.process_index == 0:
        for name, each in files.items():
            write_json(each, Path(training.output_dir, name))
    return content


def read_data(
    encoder: SentenceEncoder, text: TextOptions, training: XNLITrainingArguments
) -> NLIData:
    """Read and tokenise the text. Dev sets are those that `selection` asks for and that exist."""
    found = find_nli(text.data_dir)
    codes = chosen_languages(text.languages, found["test"])
    wanted = ["en"] if training.selection == "english" else codes
    sources = {
        "train": {"en": training_source(text.train_data, found)},
        "dev": {code: found["dev"][code] for code in wanted if code in found["dev"]},
        "test": {code: found["test"][code] for code in codes},
    }
    if training.search and len(sources["dev"]) < len(wanted):
        raise UserError(f"the search needs dev sets of {' '.join(wanted)} in {text.data_dir}")
    return prepare_nli(sources, encoder.tokenizer, text, has_token_types(encoder))


def keep_record(task: Task) -> None:
    """Record the settings that all runs in `output_dir` share, or compare them with the record.

    A later command must have the same settings, so that runs of different settings never meet in
    one report.
    """
    training = task.training
    folder = Path(training.output_dir)
    record = {}
    for name, value in training.to_dict().items():
        if changes_weights(name) and name not in MAY_DIFFER:
            record[name] = value
    record["max_seq_length"] = task.text.max_seq_length
    record["model"] = model_fingerprint(task.encoder)
    record["training text"] = task.data.digests["train en"]
    record["load_best_model_at_end"] = training.load_best_model_at_end
    record = json.loads(json.dumps(record, default=str))  # as it is read from the file

    path = folder / RECORD
    if not path.exists():
        if training.process_index == 0:
            write_json(record, path)
        return
    with reading(path):
        differing = differences(read_json(path), record)
    if differing:
        raise UserError(
            f"{folder} holds runs with {'; '.join(differing)}: give the same arguments, or another "
            "folder"
        )
    finished = [result.parent.name for result in sorted(folder.glob(f"lr-*/{RESULT}"))]
    logger.info("used again from %s: %s", folder, ", ".join(finished) or "no finished run yet")


def search(task: Task) -> tuple[float, list[dict[str, Any]]]:
    """Choose the learning rate with the best dev accuracy of the first seed, the first of equals.

    The accuracy is the mean over the dev sets, in percent, or None if the loss became NaN or
    infinite. The result also lists it for each rate tried. Without `search` nothing is tried, and
    the learning rate is the one in the arguments.
    """
    training = task.training
    if not training.search:
        return training.learning_rate, []

    seed = training.all_seeds[0]
    tried: list[dict[str, Any]] = []
    for rate in training.learning_rates:
        mean = None
        try:
            dev = measured(task, rate, seed, "dev")["dev"]
            mean = sum(dev[code]["accuracy"] for code in task.data.dev) / len(task.data.dev)
        except FloatingPointError as error:
            logger.warning("left out of the search: %s", error)
        tried.append({"learning_rate": rate, "dev_accuracy": mean})

    finite = [trial for trial in tried if trial["dev_accuracy"] is not None]
    if not finite:
        raise FloatingPointError(
            f"no loss was finite with any of learning_rates={training.learning_rates}: lower them"
        )
    best = max(finite, key=lambda trial: trial["dev_accuracy"])
    for trial in tried:
        is_kept = trial is best or training.keep_models or training.process_index
        for path in task.run_folder(trial["learning_rate"], seed).glob(WEIGHTS):
            if not is_kept:
                path.unlink()
    return best["learning_rate"], tried


def measured(task: Task, learning_rate: float, seed: int, split: str) -> dict[str, Any]:
    """Fine-tune unless that is done, and measure accuracy of a split, "dev" or "test", in percent.

    Accuracies that an earlier command measured are kept, if their text is the same. New ones are
    written to the run's `result.json`, which is returned: `result[split][code]["accuracy"]`.
    """
    folder = task.run_folder(learning_rate, seed)
    datasets = getattr(task.data, split)
    digests = {code: task.data.digests[f"{split} {code}"] for code in datasets}

    def unknown() -> list[str]:
        known = result[split]
        return [code for code in datasets if known.get(code, {}).get("text") != digests[code]]

    path = folder / RESULT
    result = read_json(path) if path.exists() else None
    if result is not None and not unknown():
        return result
    if result is None or not any(folder.glob(WEIGHTS)):
        if task.training.process_index == 0:
            path.unlink(missing_ok=True)  # until the weights are written, the run is unfinished
        result = fine_tune(task, learning_rate, seed)

    args = copy.copy(task.training)
    args.output_dir = str(folder)
    args.eval_strategy = IntervalStrategy.NO
    args.load_best_model_at_end = False
    model = DAPForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    trainer = XNLITrainer(model, task.encoder.tokenizer, args)
    for code in unknown():
        started = time.perf_counter()
        accuracy = 100 * trainer.predict(datasets[code]).metrics["test_accuracy"]
        result[split][code] = {
            "accuracy": accuracy,
            "text": digests[code],
            "seconds": round(time.perf_counter() - started, 1),
        }
        write_result(trainer, result, folder)
    return result


def fine_tune(task: Task, learning_rate: float, seed: int) -> dict[str, Any]:
    """Fine-tune with one learning rate and seed, and write weights and `result.json`.

    A stopped run resumes from its checkpoint. The result has "loss" (the last one logged) and
    "resumed_from" (a checkpoint or None). "dev" and "test" will hold accuracies by language.
    """
    folder = task.run_folder(learning_rate, seed)
    args = copy.copy(task.training)
    args.learning_rate = learning_rate
    args.seed = seed
    args.output_dir = str(folder)
    set_seed(seed)
    with reading(task.model):
        model = build_classifier(task.encoder)
    dev = task.data.dev.get("en")
    trainer = XNLITrainer(model, task.encoder.tokenizer, args, task.data.train["en"], dev)
    started = time.perf_counter()
    checkpoint = find_resumable(args)
    train_to_end(trainer, checkpoint)
    seconds = round(time.perf_counter() - started, 1)

    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    loss = losses[-1] if losses else None
    if loss is not None and not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss} with learning_rate={learning_rate:g}, seed={seed}: give a lower "
            "learning rate"
        )
    result = {
        "learning_rate": learning_rate,
        "seed": seed,
        "steps": trainer.state.global_step,
        "loss": loss,
        "train_seconds": seconds,
        "resumed_from": checkpoint and Path(checkpoint).name,
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
    """Make the report of one seed from what `measured` returned: percent by language, and mean.

    `tried` lists the learning rates that `search` tried. It is empty without search.
    """
    training, text = task.training, task.text
    settings = {"learning_rate": result["learning_rate"]}
    for name in SHOWN:
        settings[name] = getattr(training, name)
    settings |= {
        "pooling": task.encoder.pooling,
        "max_seq_length": text.max_seq_length,
        "data": public_name(text.data_dir),
        "train_data": text.train_data and public_name(text.train_data),
        "train_pairs": len(task.data.train["en"]),
        "max_test_pairs": text.max_test_pairs,
        "selection": training.selection if tried else None,
        "search": tried,
        "missing": [code for code in XNLI_LANGUAGES if code not in task.data.test],
    }

    languages = {}
    seconds = result["train_seconds"]
    for code, dataset in task.data.test.items():
        tested = result["test"][code]
        languages[code] = {"pairs": len(dataset), "accuracy": tested["accuracy"]}
        seconds += tested["seconds"]
    mean = sum(numbers["accuracy"] for numbers in languages.values()) / len(languages)
    numbers = {
        "languages": languages,
        "mean": {"languages": len(languages), "accuracy": mean},
        "dev": {code: {"accuracy": result["dev"][code]["accuracy"]} for code in task.data.dev},
    }
    revision = task.encoder.revision
    return report(task.model, PROTOCOL, numbers, settings, seconds, revision, result["seed"])


def write_result(trainer: XNLITrainer, result: dict[str, Any], folder: Path) -> None:
    """Write a run's result in the first process, and remove its checkpoints. All processes wait."""
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        write_json(result, folder / RESULT)
        for checkpoint in sort_checkpoints(str(folder)):
            shutil.rmtree(checkpoint)
    trainer.accelerator.wait_for_everyone()
