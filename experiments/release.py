"""Trains as several processes of the released code (github.com/ChillingDream/DAP) do, in one process.

    python -m experiments.release --released_processes 8 --objective tr+rtl --rtl_weight 0.1 ...

Every other argument is one of `train_dap.py`, and so is what is written: the checkpoint is a `DAPForPreTraining`. Only
the gather and the mean of the RTL loss are the released ones; similarity, negatives and heads are as configured.

Shapes in the comments: `B` pairs of a batch, `W` processes that share it, `Q` query tokens,
`G` groups of labels.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import train_dap
from dap.commands import command
from dap.errors import UserError
from dap.training import parse_arguments
from modeling_dap import DAPForPreTraining
from objectives_dap import Batch, Objective, RepresentationTranslation, TranslationRanking


class ReleasedRanking(TranslationRanking):
    """TR with 1/W of its gradient."""

    processes: int

    def compare(
        self, compared: tuple[Tensor, Tensor], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        loss, measures = super().compare(compared, batch)
        share = loss / self.processes
        return share + (loss - share).detach(), measures


class ReleasedTranslation(RepresentationTranslation):
    """RTL as a mean of the processes' means."""

    processes: int

    def groups(self, labels: Tensor, first: int) -> Tensor:
        """The labels (B, Q) of each process and direction apart, (G, B, Q)."""
        rows = torch.arange(len(labels), device=labels.device)  # (B,)
        process = (rows * self.processes // len(labels)).unsqueeze(-1)  # (B, 1)
        whole = super().groups(labels, first)
        return torch.cat([whole & (process == number) for number in range(self.processes)])


class ReleasedDAP(DAPForPreTraining):
    """`DAPForPreTraining` whose gradients are those of W processes of the released code with B/W pairs each.

    There, every process gathers the sources and the targets of all, of which its own rows alone carry gradients, and
    takes L_TR over all B pairs, not only its own. So L_TR is the same number everywhere, no embedding has a gradient
    on more than one process, and the mean that DDP takes of the processes' gradients leaves 1/W of that of L_TR, on
    both sides and wherever the negatives come from. L_RTL is a mean over each process's own tokens and keeps its
    scale: RTL counts W·`rtl_weight` times as much as L_TR, 0.8 times with the released 0.1 and 8 processes. A step of
    AdamW depends on that proportion, and on the scale itself only where `max_grad_norm` cuts.
    """

    processes = 8  # W; those of the released training scripts

    @property
    def objectives(self) -> list[Objective]:
        own = {"tr": ReleasedRanking, "rtl": ReleasedTranslation}
        found = [
            own[each.name](self.config) if each.name in own else each for each in super().objectives
        ]
        for each in found:
            each.processes = self.processes
        return found

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Saves what any `DAPForPreTraining` does: neither this class's name nor its file belongs to a checkpoint."""
        own, self.__class__ = type(self), DAPForPreTraining
        try:
            self.save_pretrained(*args, **kwargs)
        finally:
            self.__class__ = own


@command
def main(argv: Sequence[str] | None = None) -> None:
    """The command: trains as `train_dap.run` does, with batches that one process takes whole and W can share."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--released_processes", type=int, default=ReleasedDAP.processes)
    args, others = parser.parse_known_args(argv)
    training = parse_arguments(others)[2]
    given, pairs = (
        f"--released_processes {args.released_processes}",
        training.per_device_train_batch_size,
    )
    if args.released_processes < 1 or pairs % args.released_processes:
        raise UserError(
            f"{given} do not share a batch of {pairs} pairs evenly: give a divisor of it"
        )
    if training.world_size > 1:
        raise UserError(
            f"{given} are simulated in one process, not in {training.world_size}: start one"
        )
    if training.mini_batch_size is not None:
        raise UserError(
            f"{given} does not go with --mini_batch_size {training.mini_batch_size}: leave that out"
        )
    train_dap.run(
        others,
        type("ReleasedDAP", (ReleasedDAP,), {"processes": args.released_processes}),
        vars(args),
    )


if __name__ == "__main__":
    main()
