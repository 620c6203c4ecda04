"""What training steps log, the check that they are finite, and two callbacks.

Values stay on the device until a line is logged, because reading them at each step would let a GPU
wait for the host.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from dap_transformers.errors import SHOWN, UserError
from losses_dap import sum_over_processes
from modeling_dap import DAPForPreTrainingOutput

#: Distance of the seeds of two processes, so that they are no seeds of other runs.
SEEDS_BETWEEN_PROCESSES = 1_000_003

#: Checks that are kept on the device, where lines are logged more rarely.
UNCHECKED_AT_MOST = 1000


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


class FiniteCheck:
    """Remembers whether losses and gradients were finite, and raises an error later if not.

    Attributes:
        pairs: ids of the pairs since the last optimizer step, such as "de:17".
    """

    def __init__(self) -> None:
        self.pairs: list[str] = []
        self.unchecked: list[tuple[Tensor, Callable[[], Exception]]] = []

    def is_finite(self, what: str, value: Tensor, step: int, parts: Mapping[str, Tensor]) -> None:
        """Check later that a loss or gradient is finite.

        Args:
            what: "loss" or "gradient", for the message.
            value: a scalar.
            step: number of the present step, from 1.
            parts: values to name in the message, such as the loss of each objective.
        """
        pairs = self.pairs.copy()
        parts = {name: part.detach() for name, part in parts.items()}

        def failure() -> FloatingPointError:
            listed = ", ".join(f"{name}={part.item()}" for name, part in parts.items())
            languages = ", ".join(sorted({pair.split(":", 1)[0] for pair in pairs}))
            return FloatingPointError(
                f"the {what} is not finite at step {step} ({listed}); languages: {languages}; "
                f"pairs: {' '.join(pairs)}. Nothing was saved after it: resume from the last "
                "checkpoint with a lower learning rate, or look at these pairs"
            )

        self._later(value.isfinite(), failure)

    def has_negatives(self, negatives: Tensor, step: int) -> None:
        """Check later that the sentences of a batch had negatives, a scalar number."""
        error = UserError(
            f"the batch of step {step} has no negatives, because all its sources or targets are "
            f"equal (pairs: {' '.join(self.pairs[:SHOWN])} ...): give a larger batch, or remove "
            "repeated sentences from the text"
        )
        self._later(negatives != 0, lambda: error)

    def _later(self, is_fine: Tensor, failure: Callable[[], Any]) -> None:
        """Keep a condition, a bool scalar on the device, for the next `raise_if_not_fine`."""
        self.unchecked.append((is_fine.detach(), failure))
        if len(self.unchecked) >= UNCHECKED_AT_MOST:
            self.raise_if_not_fine()

    def raise_if_not_fine(self) -> None:
        """Raise the error of the first condition since the last call that did not hold."""
        checks = self.unchecked
        self.unchecked = []
        if not checks:
            return
        are_fine = torch.stack([is_fine for is_fine, _ in checks]).tolist()
        for (_, failure), is_fine in zip(checks, are_fine, strict=True):
            if not is_fine:
                raise failure()


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
