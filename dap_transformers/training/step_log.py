"""What training steps log, and the check that they are finite.

Values stay on the device until a line is logged, because reading them at each step would let a GPU
wait for the host.
"""

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from dap_transformers.errors import UserError
from losses_dap import sum_over_processes
from modeling_dap import DAPForPreTrainingOutput

#: Checks that are kept on the device, where lines are logged more rarely.
UNCHECKED_AT_MOST = 1000


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
