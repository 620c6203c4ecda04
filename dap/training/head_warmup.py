"""A warm-up of the heads: for the first steps they learn alone, so that a cold one does not disturb the encoder.

The encoder, `model.dap`, has a learning rate of 0 for `args.head_warmup_steps` steps. Thereafter it follows the
schedule, warm-up included, over the steps that are left; the heads follow it from the first step on. The word
embeddings, which are the prediction head's output, too, belong to the encoder.

The encoder has gradients all the while. So all steps are alike to DDP and FSDP, and AdamW has means of the gradients
and of their squares over the whole warm-up when the encoder begins to move: its first step is as large as any later
one, where a fresh optimizer would move every weight by the whole learning rate.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments, get_scheduler

from dap.errors import UserError
from dap.training.arguments import DAPTrainingArguments
from modeling_dap import DAPForPreTraining


def put_heads_first(optimizer: Optimizer, model: DAPForPreTraining, args: DAPTrainingArguments) -> int:
    """Split each parameter group into one of the heads and one of the encoder, all heads first; how many those are.

    Raises:
        ValueError: the model has no heads.
    """
    encoder = {id(parameter) for parameter in model.dap.parameters()}
    groups: dict[bool, list[dict]] = {False: [], True: []}
    for group in optimizer.param_groups:
        for own, found in groups.items():
            if chosen := [parameter for parameter in group["params"] if (id(parameter) in encoder) is own]:
                found.append({**group, "params": chosen})
    if not groups[False]:
        given = f"head_warmup_steps={args.head_warmup_steps}"
        raise UserError(f"{given}, but objective {model.config.objective!r} has no heads: leave it out.")
    optimizer.param_groups[:] = groups[False] + groups[True]
    return len(groups[False])


def warmup_schedule(optimizer: Optimizer, args: DAPTrainingArguments, total: int, head_groups: int) -> LambdaLR:
    """The schedule of `total` steps for the heads' groups, and that of the steps after the warm-up for the others.

    Raises:
        ValueError: no step is left for the encoder, or the schedule follows the evaluations.
    """
    args.check_head_warmup(total)
    steps = args.head_warmup_steps
    heads, encoder = _factors(args, total), _factors(args, total - steps)

    def late(step: int) -> float:
        return 0.0 if step < steps else encoder(step - steps)

    others = len(optimizer.param_groups) - head_groups
    return LambdaLR(optimizer, [heads] * head_groups + [late] * others)


def _factors(args: DAPTrainingArguments, steps: int) -> Callable[[int], float]:
    """What the schedule of so many steps multiplies the learning rate by in each of them."""
    unused = SGD([torch.zeros(1)], lr=args.learning_rate)
    options = {"scheduler_specific_kwargs": args.lr_scheduler_kwargs}
    schedule = get_scheduler(args.lr_scheduler_type, unused, args.get_warmup_steps(steps), steps, **options)
    if not isinstance(schedule, LambdaLR):
        raise UserError(
            f"head_warmup_steps={args.head_warmup_steps} does not go with lr_scheduler_type="
            f"{args.lr_scheduler_type.value!r}, which follows the evaluations: give 'linear', for one."
        )
    return schedule.lr_lambdas[0]


class StopEarlyAfterWarmup(EarlyStoppingCallback):
    """Stops early, but not for evaluations of the head's warm-up, in which the encoder stays what it was."""

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        if state.global_step > args.head_warmup_steps:
            super().on_evaluate(args, state, control, **given)
