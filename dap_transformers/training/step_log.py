"""What training steps log and print, and the check that they are finite.

Values stay on the device until a line is logged, because reading them at each step would let a GPU
wait for the host.
"""

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

#: Checks that are kept on the device, where lines are logged more rarely.
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
    """Averages losses and measures the pairs per second between two lines of the log."""

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
        """Return the mean of each loss since the last call, and begin again from zero.

        The means are over batches and processes, which all call this together. `pairs_per_second`
        is of all processes. The result is empty if no batch was added.
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


class StepChecks:
    """Remembers conditions that each step must fulfil, and raises an error later if one did not.

    Attributes:
        pairs: ids of the pairs since the last optimizer step, such as "de:17".
    """

    def __init__(self) -> None:
        self.pairs: list[str] = []
        self.unchecked: list[tuple[Tensor, str, Mapping[str, Tensor], list[str]]] = []

    def later(self, is_fine: Tensor, message: str, values: Mapping[str, Tensor]) -> None:
        """Keep a condition, a bool scalar on the device, for the next `raise_if_not_fine`.

        The error will have the message, the values (scalars) and the present pairs.
        """
        self.unchecked.append((is_fine.detach(), message, values, self.pairs.copy()))
        if len(self.unchecked) >= UNCHECKED_AT_MOST:
            self.raise_if_not_fine()

    def raise_if_not_fine(self) -> None:
        """Raise `UserError` for the first condition since the last call that did not hold."""
        unchecked = self.unchecked
        self.unchecked = []
        if not unchecked:
            return
        are_fine = torch.stack([is_fine for is_fine, *_ in unchecked]).tolist()
        for (_, message, values, pairs), is_fine in zip(unchecked, are_fine, strict=True):
            if not is_fine:
                listed = ", ".join(f"{name}={value.item()}" for name, value in values.items())
                raise UserError(f"{message} ({listed}; pairs: {' '.join(pairs)})")
