"""Fine-tune an encoder to classify pairs of texts: arguments, classifier, trainer, resumable
runs."""

import copy
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
from dap_transformers.errors import UserError
from dap_transformers.files import read_json, write_json
from dap_transformers.options import arg
from dap_transformers.tokenizers import forget_calls
from dap_transformers.training.arguments import check_launched, follow_metric, set_precision
from dap_transformers.training.resume import ResumableTrainer, find_resumable, train_to_end
from dap_transformers.training.trainer import DrawsOfProcess, EpochOfSampler
from dap_transformers.xnli.data import LABEL, NLIData, StepLengthSampler
from modeling_dap import DAPForSequenceClassification, DAPModel

logger = logging.getLogger(__name__)

RESULT = "result.json"  # in the folder of a finished run
#: What a later command reads of a `RESULT`, in the form of `dap_transformers.files.misfit`.
OF_SET = {"accuracy": float, "seconds": float}
OF_RESULT = {
    "learning_rate": float,
    "seed": int,
    "train_seconds": float,
    "dev": {str: OF_SET},
    "test": {str: OF_SET},
}
WEIGHTS = "model*.safetensors*"
METRICS = ("loss", "accuracy", "eval_loss", "eval_accuracy")


@dataclass
class XNLITrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's defaults (appendix "XNLI Fine-tuning").

    Further fields choose the seeds, the learning rates to search, and the pairs per step.
    `gradient_accumulation_steps` follows from the pairs per step. Values that cannot work here
    raise `UserError`.
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
        if self.push_to_hub:
            raise UserError(
                "push_to_hub=True: this command makes several models. Push the folder of one with "
                "`hf upload`"
            )
        for name in ("seeds", "learning_rates"):
            values = getattr(self, name)
            if values is None:
                continue
            if not values or len(set(values)) < len(values) or min(values) < 0:
                raise UserError(f"{name}={values}: give one or more, each once, and none below 0")
        if max(self.all_seeds) >= 2**32:
            raise UserError(f"seeds={self.seeds}: give seeds below 2**32")
        if self.metric_for_best_model not in (None, *METRICS):
            raise UserError(
                f"metric_for_best_model={self.metric_for_best_model!r}: give accuracy or loss"
            )
        if str(self.resume_from_checkpoint).lower() not in ("none", "true", "false"):
            raise UserError(
                f"resume_from_checkpoint={self.resume_from_checkpoint}: each run continues from "
                "its own checkpoint. Leave it out, or give false to restart unfinished runs"
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type == "cuda"
        self.gradient_accumulation_steps = self._accumulated_batches()

    def _accumulated_batches(self) -> int:
        """Return how many batches a process accumulates for `total_train_batch_size` pairs."""
        at_once = self.train_batch_size * self.world_size
        steps = self.total_train_batch_size // at_once
        given = self.gradient_accumulation_steps
        if steps * at_once != self.total_train_batch_size or steps < 1 or given not in (1, steps):
            raise UserError(
                f"total_train_batch_size={self.total_train_batch_size} is not {at_once} pairs "
                f"(per_device_train_batch_size={self.per_device_train_batch_size}, "
                f"{self.world_size} processes) times "
                f"gradient_accumulation_steps={given if given > 1 else 'any'}: change one of them"
            )
        return steps

    @property
    def all_seeds(self) -> list[int]:
        """Return the seeds to fine-tune with: `seeds`, or else the single `seed`."""
        return self.seeds or [self.seed]


def build_classifier(encoder: SentenceEncoder) -> DAPForSequenceClassification:
    """Return a new classifier: a copy of the encoder with a random head for NLI labels.

    The encoder's weights are copied, so that each run starts from them. Parameters have the same
    names and shapes, whether the encoder is a DAP model or the plain encoder inside it. A plain
    encoder's own pooler is left out.
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
    """Tell whether the encoder has embeddings that tell the two texts of a pair apart.

    Such embeddings need `token_type_ids`. mBERT has them, XLM-R has not.
    """
    config = encoder.model.config
    config = getattr(config, "encoder_config", config)
    return (getattr(config, "type_vocab_size", None) or 0) > 1


class XNLITrainer(ResumableTrainer):
    """Trains and evaluates an NLI classifier, with little padding in its batches.

    The pairs of each optimizer step are drawn at random. Within the step they are sorted by
    length, so that a batch holds pairs of similar length.

    Args:
        model: the classifier.
        tokenizer: the encoder's tokenizer, which pads batches.
        args: arguments of the training.
        train: tokenised training pairs, with the column "length". If it is None, the trainer can
            only evaluate.
        dev: tokenised pairs for evaluations during training. None if there are none.
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
    """Compute a batch's share of the mean cross entropy of its optimizer step.

    The shares of all batches of the step add up to that mean.

    Args:
        outputs: output of the classifier, with logits (B, C).
        labels: class numbers (B,).
        num_items_in_batch: number of pairs of the whole step. None takes B.

    Returns:
        A scalar: the sum of the batch's cross entropies, divided by the number of pairs of the
        step.
    """
    total = F.cross_entropy(outputs["logits"].float(), labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def compute_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """Compute the accuracy of predicted classes.

    The metric is that of `evaluate.load("accuracy")`, which would need a download.

    >>> compute_accuracy(EvalPrediction(np.eye(3)[[0, 1, 2, 2]], np.array([0, 1, 1, 2])))
    {'accuracy': 0.75}

    Args:
        prediction: logits (N, C) and labels (N,).

    Returns:
        `{"accuracy": share}`, the share of the N pairs whose highest logit is at their label, 0
        to 1.
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
    """What all fine-tuning runs of a command share: the encoder, the tokenised text, the arguments.

    Attributes:
        encoder: the encoder before fine-tuning. Each run fine-tunes a copy of it.
        data: the tokenised text.
        training: the arguments. Each run sets learning rate, seed and folder in a copy of them.
    """

    encoder: SentenceEncoder
    data: NLIData
    training: XNLITrainingArguments

    def run_folder(self, learning_rate: float, seed: int) -> Path:
        """Return the folder of the fine-tuning run with this learning rate and seed.

        It lies in `output_dir`, and need not exist.
        """
        return Path(self.training.output_dir) / f"lr-{learning_rate}-seed-{seed}"

    def dev_accuracies(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Return the accuracy on each language's dev set, in percent, from the result of a run.

        Args:
            result: what `measured` returned for the dev sets.

        Returns:
            Language code -> accuracy.
        """
        return {code: result["dev"][code]["accuracy"] for code in self.data.dev}


def search(task: Task) -> tuple[float, list[dict[str, Any]]]:
    """Choose the learning rate with the best dev accuracy of the first seed.

    Each learning rate of `learning_rates` is tried by a fine-tuning run. The accuracy is the mean
    over the dev sets of `task`. Without `--search` nothing is tried, and the learning rate is the
    one in the arguments. Without `--keep_models`, the weights of runs that are not the best so
    far are deleted.

    Returns:
        The learning rate (the first of equally good ones). And for each one tried a dictionary
        with "learning_rate" and "dev_accuracy", in percent or None if the loss became NaN or
        infinite.
    """
    training = task.training
    if not training.search:
        return training.learning_rate, []

    seed = training.all_seeds[0]
    tried: list[dict[str, Any]] = []
    best: dict[str, Any] | None = None
    for rate in training.learning_rates:
        try:
            dev = task.dev_accuracies(measured(task, rate, seed, "dev"))
        except FloatingPointError as error:
            logger.warning("left out of the search: %s", error)
            tried.append({"learning_rate": rate, "dev_accuracy": None})
            continue
        trial = {"learning_rate": rate, "dev_accuracy": sum(dev.values()) / len(dev)}
        tried.append(trial)

        if best is None:
            best = trial
            continue
        loser = trial
        if trial["dev_accuracy"] > best["dev_accuracy"]:
            loser = best
            best = trial
        if not training.keep_models and training.process_index == 0:
            for path in task.run_folder(loser["learning_rate"], seed).glob(WEIGHTS):
                path.unlink()

    if best is None:
        raise FloatingPointError(
            f"no loss was finite with any of learning_rates={training.learning_rates}: lower them"
        )
    return best["learning_rate"], tried


def measured(task: Task, learning_rate: float, seed: int, split: str) -> dict[str, Any]:
    """Fine-tune unless that is done, and measure accuracy on the dev or test sets of all languages.

    Accuracies that an earlier command measured are kept, if their text is the same. New ones are
    written to the run's `result.json`.

    Args:
        task: encoder, text and arguments.
        learning_rate: learning rate of the run.
        seed: seed of the run.
        split: which sets to measure, "dev" or "test".

    Returns:
        The run's result as `fine_tune` returns it. `result[split][code]["accuracy"]` is the
        accuracy of a language in percent.
    """
    datasets = getattr(task.data, split)
    digests = {code: task.data.digests[f"{split} {code}"] for code in datasets}

    def is_known(code: str) -> bool:
        return result[split].get(code, {}).get("text") == digests[code]

    result = fine_tune(task, learning_rate, seed)
    if all(map(is_known, datasets)):
        return result

    result = fine_tune(task, learning_rate, seed, needs_weights=True)
    folder = task.run_folder(learning_rate, seed)
    args = copy.copy(task.training)
    args.output_dir = str(folder)
    args.eval_strategy = IntervalStrategy.NO
    args.load_best_model_at_end = False
    model = DAPForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    trainer = XNLITrainer(model, task.encoder.tokenizer, args)
    for code, dataset in datasets.items():
        if is_known(code):
            continue
        started = time.perf_counter()
        accuracy = 100 * trainer.predict(dataset).metrics["test_accuracy"]
        result[split][code] = {
            "accuracy": accuracy,
            "text": digests[code],
            "seconds": round(time.perf_counter() - started, 1),
        }
        write_result(trainer, result, folder)
    return result


def fine_tune(
    task: Task, learning_rate: float, seed: int, needs_weights: bool = False
) -> dict[str, Any]:
    """Fine-tune with one learning rate and seed, or read the result if that run has finished.

    A stopped run continues from its checkpoint. The weights and `result.json` are written to the
    run's folder.

    Args:
        task: encoder, text and arguments.
        learning_rate: learning rate of the run.
        seed: seed of the run.
        needs_weights: whether the caller needs the weights. If True, a finished run whose weights
            were deleted is repeated.

    Returns:
        The content of the run's `result.json`: "learning_rate", "seed", "steps", "loss" (the last
        one logged), "train_seconds" and "resumed_from" (a checkpoint or None). "dev" and "test"
        hold accuracies by language, and are empty after a new run.
    """
    folder = task.run_folder(learning_rate, seed)
    args = copy.copy(task.training)
    if (folder / RESULT).exists():
        if any(folder.glob(WEIGHTS)) or not needs_weights:
            return read_json(folder / RESULT)
        if args.process_index == 0:
            (folder / RESULT).unlink()  # until the weights are written again, the run is unfinished

    args.learning_rate = learning_rate
    args.seed = seed
    args.output_dir = str(folder)
    set_seed(seed)
    model = build_classifier(task.encoder)
    dev = task.data.dev.get("en")
    trainer = XNLITrainer(model, task.encoder.tokenizer, args, task.data.train, dev)
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


def write_result(trainer: XNLITrainer, result: dict[str, Any], folder: Path) -> None:
    """Write a run's result, and remove its checkpoints, which only an unfinished run needs.

    Only the first process writes. All processes call this together, and wait for each other.

    Args:
        trainer: the run's trainer.
        result: content of `result.json`.
        folder: the run's folder.
    """
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        write_json(result, folder / RESULT)
        for checkpoint in sort_checkpoints(str(folder)):
            shutil.rmtree(checkpoint)
    trainer.accelerator.wait_for_everyone()
