"""What a training logs of its steps, and two callbacks."""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from losses_dap import sum_over_processes
from modeling_dap import DAPForPreTrainingOutput

#: Distance of the seeds of two processes, so that they are no seeds of other runs.
SEEDS_BETWEEN_PROCESSES = 1_000_003


class StepMeter:
    """Averages the model's losses and measures the pairs per second between two lines of the log.

    The clock starts with the first batch.
    """

    def __init__(self) -> None:
        self.started: float | None = None
        self.sums: dict[str, Tensor] = {}
        self.steps = 0
        self.pairs = 0

    def start(self) -> None:
        """Start the clock that measures the pairs per second, unless it is running."""
        if self.started is None:
            self.started = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leave out seconds that were not spent on training, such as those of an evaluation."""
        if self.started is not None:
            self.started += seconds

    def add(self, out: DAPForPreTrainingOutput, pairs: int) -> None:
        """Add the losses and the number of pairs of one training batch to the sums for the log."""
        for name, value in out.measures.items():
            self.sums[name] = self.sums.get(name, 0.0) + value.detach().float()
        self.steps += 1
        self.pairs += pairs

    def read(self, processes: int) -> dict[str, float]:
        """Return the mean of each loss since the last call, over batches and processes.

        All sums and the clock start again from zero. All processes call this together.

        Returns:
            Mean losses by name, and `pairs_per_second` of all processes together. An empty
            dictionary if no batch was added.
        """
        if not self.steps:
            return {}
        sums = sum_over_processes(torch.stack(list(self.sums.values())))
        means = sums / (self.steps * processes)
        values = {name: round(mean, 4) for name, mean in zip(self.sums, means.tolist())}

        now = time.perf_counter()
        values["pairs_per_second"] = round(self.pairs * processes / (now - self.started), 1)
        self.started = now
        self.sums = {}
        self.steps = 0
        self.pairs = 0
        return values


class EpochOfSampler(TrainerCallback):
    """Callback that tells the sampler which epoch begins (`set_epoch`).

    This is needed because accelerate does not do so if a resumed run of several processes skips
    batches.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.sampler.set_epoch(int(state.epoch))


class DrawsOfProcess(TrainerCallback):
    """Callback that lets every process draw its own dropout and masks.

    `Trainer` gives all processes the same seed, so that they build the same model and order the
    text in the same way. When training begins, each process except the first gets a seed of its
    own.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if args.process_index > 0:
            torch.manual_seed(args.seed + SEEDS_BETWEEN_PROCESSES * args.process_index)
