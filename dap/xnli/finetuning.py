"""Fine-tuning an encoder on pairs of texts with a label: arguments, classifier, trainer, and runs that go on."""

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
    Trainer,
    TrainingArguments,
    set_seed,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import IntervalStrategy, sort_checkpoints

from configuration_dap import DAPConfig
from dap.arguments import arg
from dap.encoding import SentenceEncoder
from dap.errors import UserError
from dap.file_io import read_json, write_json
from dap.tokenizers import forget_calls
from dap.training import EpochOfSampler, check_launched, find_resumable, follow_metric, train_to_end
from dap.xnli.nli_data import LABEL, NLIData, StepLengthSampler
from modeling_dap import DAPForSequenceClassification, DAPModel

logger = logging.getLogger(__name__)

RESULT, WEIGHTS = "result.json", "model*.safetensors*"  # of a finished run, in its folder


@dataclass
class XNLITrainingArguments(TrainingArguments):
    """`TrainingArguments` with the paper's values as defaults (appendix "XNLI Fine-tuning")."""

    total_train_batch_size: int = arg(
        256, "Pairs a step, over all processes and accumulated batches; sets the latter."
    )
    seeds: list[int] | None = arg(None, "Fine-tune with each; --seed when absent.")
    search: bool = arg(False, "Choose among learning_rates by dev accuracy, with the first seed.")
    learning_rates: list[float] = arg([1e-5, 3e-5, 5e-5, 7e-5], "What --search chooses from.")
    selection: str = arg(
        "english", "Dev sets that choose: English alone (zero-shot), or the mean over all languages.",
        choices=("english", "all")
    )  # fmt: skip
    keep_models: bool = arg(False, "Keep the models that --search did not choose, too.")
    learning_rate: float = arg(5e-5, "Peak learning rate of AdamW.")
    num_train_epochs: float = arg(2.0, "Passes over the training pairs.")
    weight_decay: float = arg(0.0, "Weight decay of AdamW.")
    per_device_train_batch_size: int = arg(32, "Pairs a process has in memory at once.")
    per_device_eval_batch_size: int = arg(64, "Accuracy does not depend on it.")
    save_steps: float = arg(0.2, "Steps, or share of a run, between checkpoints.")
    save_total_limit: int | None = arg(1, "Checkpoints that a run keeps.")
    logging_steps: float = arg(0.05, "Steps, or share of a run, between logs.")
    logging_nan_inf_filter: bool = arg(False, "A loss that is not finite is an error.")
    report_to: None | str | list[str] = arg("none", "Trackers, such as tensorboard.")

    def __post_init__(self) -> None:
        super().__post_init__()
        follow_metric(self)
        check_launched(self.world_size)
        if self.push_to_hub:
            raise UserError(
                "push_to_hub=True: several models are made here; push the folder of one with `hf upload`."
            )
        for name in ("seeds", "learning_rates"):
            values = getattr(self, name)
            if values is not None and (
                not values or len(set(values)) < len(values) or min(values) < 0
            ):
                raise UserError(f"{name}={values}: give one or more, each once, and none below 0.")
        if max(self.all_seeds) >= 2**32:
            raise UserError(f"seeds={self.seeds}: give seeds below 2**32.")
        if self.metric_for_best_model not in (
            None,
            "loss",
            "accuracy",
            "eval_loss",
            "eval_accuracy",
        ):
            raise UserError(
                f"metric_for_best_model={self.metric_for_best_model!r}: give accuracy or loss."
            )
        if str(self.resume_from_checkpoint).lower() not in ("none", "true", "false"):
            raise UserError(
                f"resume_from_checkpoint={self.resume_from_checkpoint}: each run goes on from its own checkpoint; "
                "leave it out, or give false to begin unfinished runs anew."
            )
        self.dataloader_pin_memory = self.dataloader_pin_memory and self.device.type == "cuda"
        self.gradient_accumulation_steps = self._accumulation()

    def _accumulation(self) -> int:
        """Batches that make a step; raises `ValueError` where they cannot come to `total_train_batch_size`."""
        at_once = self.train_batch_size * self.world_size
        given, steps = self.gradient_accumulation_steps, self.total_train_batch_size // at_once
        if steps * at_once != self.total_train_batch_size or steps < 1 or given not in (1, steps):
            raise UserError(
                f"total_train_batch_size={self.total_train_batch_size} is not {at_once} pairs (per_device_train_"
                f"batch_size={self.per_device_train_batch_size}, {self.world_size} processes) times "
                f"gradient_accumulation_steps={given if given > 1 else 'any'}: change one of them."
            )
        return steps

    @property
    def all_seeds(self) -> list[int]:
        return self.seeds or [self.seed]


def build_classifier(encoder: SentenceEncoder) -> DAPForSequenceClassification:
    """The encoder's weights under a new classifier, of the same shape whatever the encoder is."""
    body, config = encoder.model, copy.deepcopy(encoder.model.config)
    if not isinstance(body, DAPModel):
        config = DAPConfig(config, objective="tr")
    config.pooling = encoder.pooling
    config.id2label = dict(enumerate(LABEL.names))
    config.label2id = {name: number for number, name in enumerate(LABEL.names)}
    model = DAPForSequenceClassification(config)
    target, state = model.dap, body.state_dict()
    if not isinstance(body, DAPModel):  # a pooler would not be used
        target, state = (
            model.dap.encoder,
            {key: state[key] for key in model.dap.encoder.state_dict()},
        )
    target.load_state_dict(state)
    return model


def has_token_types(encoder: SentenceEncoder) -> bool:
    """Whether the encoder tells the two texts of a pair apart by embeddings."""
    config = encoder.model.config
    return (getattr(getattr(config, "encoder_config", config), "type_vocab_size", None) or 0) > 1


class XNLITrainer(Trainer):
    """`Trainer` whose batches are of like lengths within each optimizer step; without `train` it measures alone."""

    def __init__(
        self,
        model: DAPForSequenceClassification,
        tokenizer: PreTrainedTokenizerBase,
        args: TrainingArguments,
        train: Dataset | None = None,
        dev: Dataset | None = None,
    ) -> None:
        step = args.train_batch_size * args.world_size * args.gradient_accumulation_steps
        self.train_sampler = (
            None if train is None else StepLengthSampler(train["length"][:], step, args.seed)
        )
        super().__init__(
            model=model,
            args=args,
            train_dataset=train,
            eval_dataset=dev,
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_loss_func=mean_over_step,
            compute_metrics=compute_accuracy,
            callbacks=[] if self.train_sampler is None else [EpochOfSampler(self.train_sampler)],
        )

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler | None:
        return self.train_sampler


def mean_over_step(
    outputs: SequenceClassifierOutput,
    labels: Tensor,
    num_items_in_batch: Tensor | int | None = None,
) -> Tensor:
    """Cross entropy summed over this batch, divided by the pairs of the whole step, however it is accumulated."""
    total = F.cross_entropy(outputs["logits"].float(), labels, reduction="sum")
    return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)


def compute_accuracy(prediction: EvalPrediction) -> dict[str, float]:
    """`compute_metrics` of a `Trainer`: accuracy, 0 to 1, of logits (N, C) against labels (N,).

    The metric is `evaluate.load("accuracy")` without the download.

    >>> compute_accuracy(EvalPrediction(np.eye(3)[[0, 1, 2, 2]], np.array([0, 1, 1, 2])))
    {'accuracy': 0.75}
    """
    import evaluate  # takes a second, which `--help` need not wait

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
    return Accuracy(keep_in_memory=True).compute(
        predictions=classes, references=prediction.label_ids
    )


@dataclass
class Task:
    """What all runs share."""

    encoder: SentenceEncoder
    data: NLIData
    training: XNLITrainingArguments

    def run_folder(self, learning_rate: float, seed: int) -> Path:
        return Path(self.training.output_dir) / f"lr-{learning_rate}-seed-{seed}"

    def dev_accuracies(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Language -> accuracy on its dev set, in percent."""
        return {code: result["dev"][code]["accuracy"] for code in self.data.dev}


def search(task: Task) -> tuple[float, list[dict[str, Any]]]:
    """The learning rate with the best dev accuracy of the first seed (the first of equals), and all that it tried."""
    training = task.training
    if not training.search:
        return training.learning_rate, []
    seed, tried, best = training.all_seeds[0], [], None
    for rate in training.learning_rates:
        try:
            dev = task.dev_accuracies(measured(task, rate, seed, "dev"))
        except FloatingPointError as error:
            logger.warning("left out of the search: %s", error)
            tried.append({"learning_rate": rate, "dev_accuracy": None})
            continue
        tried.append({"learning_rate": rate, "dev_accuracy": sum(dev.values()) / len(dev)})
        better = best is None or tried[-1]["dev_accuracy"] > best["dev_accuracy"]
        loser, best = (best, tried[-1]) if better else (tried[-1], best)
        if loser is not None and not training.keep_models and training.process_index == 0:
            for path in task.run_folder(loser["learning_rate"], seed).glob(WEIGHTS):
                path.unlink()
    if best is None:
        raise FloatingPointError(
            f"no loss was finite with any of learning_rates={training.learning_rates}: lower them"
        )
    return best["learning_rate"], tried


def measured(task: Task, learning_rate: float, seed: int, split: str) -> dict[str, Any]:
    """The result of a run with its accuracy on every "dev" or "test" set; what is known already stays as it is."""
    folder, datasets = task.run_folder(learning_rate, seed), getattr(task.data, split)
    digests = {code: task.data.digests[f"{split} {code}"] for code in datasets}
    result = fine_tune(task, learning_rate, seed)
    if all(result[split].get(code, {}).get("text") == digests[code] for code in datasets):
        return result
    result = fine_tune(task, learning_rate, seed, needs_weights=True)
    args = copy.copy(task.training)
    args.output_dir, args.eval_strategy, args.load_best_model_at_end = (
        str(folder),
        IntervalStrategy.NO,
        False,
    )
    model = DAPForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    trainer = XNLITrainer(model, task.encoder.tokenizer, args)
    for code, dataset in datasets.items():
        if result[split].get(code, {}).get("text") == digests[code]:
            continue
        started = time.perf_counter()
        accuracy = 100 * trainer.predict(dataset).metrics["test_accuracy"]
        seconds = round(time.perf_counter() - started, 1)
        result[split][code] = {"accuracy": accuracy, "text": digests[code], "seconds": seconds}
        write_result(trainer, result, folder)
    return result


def fine_tune(
    task: Task, learning_rate: float, seed: int, needs_weights: bool = False
) -> dict[str, Any]:
    """One run: its result, from its folder where it has finished (and its weights are there, if they are needed).

    Raises:
        FloatingPointError: the loss is not finite.
    """
    folder, args = task.run_folder(learning_rate, seed), copy.copy(task.training)
    done = (folder / RESULT).exists()
    if done and (any(folder.glob(WEIGHTS)) or not needs_weights):
        return read_json(folder / RESULT)
    if done and args.process_index == 0:
        (
            folder / RESULT
        ).unlink()  # weights that are being written again are not yet those of a finished run
    args.learning_rate, args.seed, args.output_dir = learning_rate, seed, str(folder)
    set_seed(seed)
    model = build_classifier(task.encoder)
    trainer = XNLITrainer(
        model, task.encoder.tokenizer, args, task.data.train, task.data.dev.get("en")
    )
    started, checkpoint = time.perf_counter(), find_resumable(args)
    train_to_end(trainer, checkpoint)
    seconds = round(time.perf_counter() - started, 1)
    loss = next(
        (line["loss"] for line in reversed(trainer.state.log_history) if "loss" in line), None
    )
    if loss is not None and not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss is {loss} with learning_rate={learning_rate:g}, seed={seed}: give a lower learning rate"
        )
    result = {
        "learning_rate": learning_rate,
        "seed": seed,
        "steps": trainer.state.global_step,
        "loss": loss,
    }
    result |= {
        "train_seconds": seconds,
        "resumed_from": checkpoint and Path(checkpoint).name,
        "dev": {},
        "test": {},
    }
    forget_calls(task.encoder.tokenizer)  # padding, where there was a step to train
    trainer.save_model(str(folder))
    if trainer.is_world_process_zero():
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)  # a pickle, which nobody needs
    write_result(trainer, result, folder)
    return result


def write_result(trainer: XNLITrainer, result: dict[str, Any], folder: Path) -> None:
    """Write a run's result, and remove the checkpoints that only resuming needs."""
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        write_json(result, folder / RESULT)
        for checkpoint in sort_checkpoints(str(folder)):
            shutil.rmtree(checkpoint)
    trainer.accelerator.wait_for_everyone()
