"""What training steps log and print, and the check that their losses are finite.

Values stay on the device until a line is logged, because reading them at each step would let a GPU
wait for the host.
"""

import math
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerCallback, TrainerState

from dap_transformers.errors import UserError
from losses_dap import sum_over_processes
from modeling_dap import DAPForPreTrainingOutput

#: Batches whose values are kept on the device, where lines are logged more rarely.
UNCHECKED_AT_MOST = 1000
#: Endings of numbers that are not printed, to keep lines short. `trainer_state.json` has them all.
NOT_PRINTED = (
    "epoch", "grad_norm", "ignored_tokens", "learning_rate", "negatives", "eval_seconds",
    "shuffled", "steps_per_second", "total_flos",
)  # fmt: skip


class ShortLines(TrainerCallback):
    """Callback that prints the numbers of a step on one line."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: dict, **_: Any) -> None:
        if state.is_world_process_zero:
            tqdm.write(f"step {state.global_step}: {readable(logs)}")


class ShortProgress(ShortLines, ProgressCallback):
    """The progress bar of Transformers, with `ShortLines`."""


def readable(numbers: Mapping[str, float]) -> str:
    """Format numbers with their names, except `NOT_PRINTED` and numbers of a single language.

    >>> readable({"loss": 0.51234, "learning_rate": 2e-05, "pairs_per_second": 1503.2})
    'loss 0.5123, pairs per second 1503'
    >>> readable({"eval_de-en_accuracy": 91.5, "eval_mean_accuracy": 93.25})
    'dev mean accuracy 93.25'
    """
    parts = []
    for name, value in numbers.items():
        if "-" not in name and not name.endswith(NOT_PRINTED):
            parts.append(f"{name.removeprefix('eval_').replace('_', ' ')} {value:.4g}")
    begin = "dev " if any(name.startswith("eval_") for name in numbers) else ""
    return begin + ", ".join(parts)


class StepMeter:
    """Averages losses, measures the pairs per second, and checks the batches of the last steps."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.names: tuple[str, ...] = ()  # of the M values of a batch
        self.sums: Tensor | float = 0.0  # (M,)
        self.batches = 0
        self.pairs = 0
        self.unchecked: list[tuple[int, Tensor, list[str]]] = []  # step, values (M,), ids of pairs

    def start(self) -> None:
        """Start the clock that measures the pairs per second, unless it is running."""
        if self.started is None:
            self.started = time.perf_counter()

    def leave_out(self, seconds: float) -> None:
        """Leave out seconds that were not spent on training, such as those of an evaluation."""
        if self.started is not None:
            self.started += seconds

    def add(self, step: int, out: DAPForPreTrainingOutput, pairs: list[str]) -> None:
        """Add the losses of a batch, which has these pairs' ids, such as "de:17"."""
        self.names = tuple(out.measures)
        values = torch.stack([value.detach().float() for value in out.measures.values()])
        self.sums = self.sums + values
        self.batches += 1
        self.pairs += len(pairs)
        self.unchecked.append((step, values, pairs))
        if len(self.unchecked) >= UNCHECKED_AT_MOST:
            self.check()

    def check(self) -> None:
        """Raise `UserError` if a new batch has losses that are not finite, or no negatives."""
        unchecked = self.unchecked
        self.unchecked = []
        if not unchecked:
            return
        rows = torch.stack([values for _, values, _ in unchecked]).tolist()
        for (step, _, pairs), row in zip(unchecked, rows, strict=True):
            values = dict(zip(self.names, row, strict=True))
            if not all(map(math.isfinite, row)):
                problem = (
                    f"the loss is not finite at step {step}: lower the learning rate, or look at "
                    "its pairs"
                )
            elif values.get("negatives") == 0:
                problem = (
                    f"the batch of step {step} has no negatives, because all its sources or "
                    "targets are equal: give a larger batch, or remove repeated sentences"
                )
            else:
                continue
            listed = ", ".join(f"{name}={value}" for name, value in values.items())
            raise UserError(f"{problem} ({listed}; pairs: {' '.join(pairs)})")

    def read(self, processes: int) -> dict[str, float]:
        """Return the mean of each loss since the last call, and begin again from zero.

        The means are over batches and processes, which all call this together. `pairs_per_second`
        is of all processes. The result is empty if no batch was added.
        """
        if not self.batches:
            return {}
        means = sum_over_processes(self.sums) / (self.batches * processes)
        values = {name: round(mean, 4) for name, mean in zip(self.names, means.tolist())}

        now = time.perf_counter()
        values["pairs_per_second"] = round(self.pairs * processes / (now - self.started), 1)
        self.started = now
        self.sums = 0.0
        self.batches = 0
        self.pairs = 0
        return values
