"""A warm-up of the heads: for the first steps they learn alone, so that a cold one does not disturb the encoder."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import (
    EarlyStoppingCallback,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    get_scheduler,
)

from dap.errors import UserError


def check_head_warmup(args: TrainingArguments, total: int) -> None:
    """Raise `ValueError` for a number of steps that leaves the encoder none of `total` (-1: not known yet)."""
    steps = args.head_warmup_steps
    if steps < 0 or 0 < total <= steps:
        allowed = "0 or more" if total <= 0 else f"0 to {total - 1}, as the training has {total} steps"
        raise UserError(f"head_warmup_steps={steps}: give {allowed}.")
    if steps and (args.deepspeed or os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"):
        raise UserError(
            f"head_warmup_steps={steps} does not go with DeepSpeed, which makes a schedule of its own: use "
            "configs/accelerate/ddp.yaml or fsdp2.yaml, or leave it out."
        )


class StopEarlyAfterWarmup(EarlyStoppingCallback):
    """Stops early, but not for evaluations of the head's warm-up, in which the encoder stays what it was."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if state.global_step > args.head_warmup_steps:
            super().on_evaluate(args, state, control, **given)


class HeadWarmupTrainer(Trainer):
    """`Trainer` whose encoder, `model.dap`, has a learning rate of 0 for the first `args.head_warmup_steps` steps.

    Thereafter it follows the schedule, warm-up included, over the steps that are left; the heads follow it from the
    first step on. The word embeddings, which are the prediction head's output, too, belong to the encoder.

    The encoder has gradients all the while. So all steps are alike to DDP and FSDP, and AdamW has means of the
    gradients and of their squares over the whole warm-up when the encoder begins to move: its first step is as large
    as any later one, where a fresh optimizer would move every weight by the whole learning rate. With 0 steps this is
    the stock trainer.
    """

    def create_optimizer(self, model: nn.Module | None = None) -> Optimizer:
        """The stock optimizer, with groups of the heads' parameters before those of the encoder's.

        Raises:
            ValueError: the model has no heads.
        """
        optimizer = super().create_optimizer(model)
        if self.args.head_warmup_steps:
            whole = self.accelerator.unwrap_model(self.model if model is None else model, keep_torch_compile=False)
            encoder = {id(parameter) for parameter in whole.dap.parameters()}
            optimizer.param_groups[:], self.head_groups = split_groups(optimizer, encoder)
            if not self.head_groups:
                given = f"head_warmup_steps={self.args.head_warmup_steps}"
                raise UserError(f"{given}, but objective {whole.config.objective!r} has no heads: leave it out.")
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """The stock schedule, for the encoder that of a training which begins after the warm-up."""
        steps = self.args.head_warmup_steps
        if not steps or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        check_head_warmup(self.args, num_training_steps)
        optimizer = self.optimizer if optimizer is None else optimizer
        heads, encoder = self._factors(num_training_steps), self._factors(num_training_steps - steps)

        def late(step: int) -> float:
            return 0.0 if step < steps else encoder(step - steps)

        others = len(optimizer.param_groups) - self.head_groups
        self.lr_scheduler = LambdaLR(optimizer, [heads] * self.head_groups + [late] * others)
        self._created_lr_scheduler = True  # `Trainer.train` makes a new one when it is called again
        return self.lr_scheduler

    def _factors(self, steps: int) -> Callable[[int], float]:
        """What the schedule of so many steps multiplies the learning rate by in each of them."""
        unused = SGD([torch.zeros(1)], lr=self.args.learning_rate)
        warmup = self.args.get_warmup_steps(steps)
        options = {"scheduler_specific_kwargs": self.args.lr_scheduler_kwargs}
        schedule = get_scheduler(self.args.lr_scheduler_type, unused, warmup, steps, **options)
        if not isinstance(schedule, LambdaLR):
            raise UserError(
                f"head_warmup_steps={self.args.head_warmup_steps} does not go with lr_scheduler_type="
                f"{self.args.lr_scheduler_type.value!r}, which follows the evaluations: give 'linear', for one."
            )
        return schedule.lr_lambdas[0]


def split_groups(optimizer: Optimizer, encoder: set[int]) -> tuple[list[dict], int]:
    """Each parameter group as one of the heads and one of the encoder, whose `id`s these are, all heads first; and how
    many are of heads."""
    groups: dict[bool, list[dict]] = {False: [], True: []}
    for group in optimizer.param_groups:
        for own, found in groups.items():
            if chosen := [parameter for parameter in group["params"] if (id(parameter) in encoder) is own]:
                found.append({**group, "params": chosen})
    return groups[False] + groups[True], len(groups[False])
