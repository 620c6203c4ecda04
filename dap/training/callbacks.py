"""What a training says while it runs: means of its losses, its pace, and evaluations in brief; and its epochs."""

import re
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from losses_dap import sum_over_processes
from modeling_dap import DAPForPreTrainingOutput


class StepMeter:
    """Means of the model's outputs and the pace since the last reading; the first one counts from `start` on."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.reset()

    def reset(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.steps, self.pairs = 0, 0

    def start(self) -> None:
        """Begin to count time, unless that was done."""
        if self.started is None:
            self.started = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Take time that was not spent on training out of the pace."""
        if self.started is not None:
            self.started += seconds

    def add(self, out: DAPForPreTrainingOutput, pairs: int) -> None:
        for name, value in out.measures.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach().float()
        self.steps += 1
        self.pairs += pairs

    def read(self, processes: int) -> dict[str, float]:
        """Means over steps and processes, and pairs a second of all processes; starts anew."""
        if not self.steps:
            return {}
        names = list(self.sums)
        totals = sum_over_processes(torch.stack([self.sums[name] for name in names])) / (self.steps * processes)
        values = {name: round(value, 4) for name, value in zip(names, totals.tolist())}
        now = time.perf_counter()
        values["pairs_per_second"] = round(self.pairs * processes / (now - self.started), 1)
        self.started = now
        self.reset()
        return values


def brief(logs: dict[str, Any]) -> dict[str, Any]:
    """A line of the log to print: of an evaluation's directions only the three with the lowest accuracy.

    >>> brief({"eval_de-en_accuracy": 9, "eval_en-de_accuracy": 7, "eval_fr-en_accuracy": 8, "eval_en-fr_accuracy": 6})
    {'eval_en-de_accuracy': 7, 'eval_fr-en_accuracy': 8, 'eval_en-fr_accuracy': 6}
    """
    directions = [name for name in logs if re.fullmatch(r".+_\w+-\w+_accuracy", name)]
    hidden = sorted(directions, key=logs.get)[3:]
    return {name: value for name, value in logs.items() if name not in hidden}


class BriefPrinter(PrinterCallback):
    """Prints an evaluation in brief."""

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        super().on_log(*args, logs=brief(logs), **kwargs)


class BriefProgress(ProgressCallback):
    """Prints an evaluation in brief, above the progress bar."""

    def on_log(self, *args: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        super().on_log(*args, logs=brief(logs), **kwargs)


class EpochOfSampler(TrainerCallback):
    """Tells the sampler its epoch: accelerate does not get through to it where several processes skip batches, as in
    the first epoch of a resumed run, which would then go on with the order of epoch 0."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.sampler.set_epoch(int(state.epoch))
