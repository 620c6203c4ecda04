"""What passes between the parts of a pre-training step: both sides of the pairs, their words, a part of a batch.

Ships with a checkpoint beside modeling_dap.py. Shapes in the comments: `B` pairs of one process, `S` tokens (`S_x` of
the source, `S_y` of the target), `D` hidden size, `E` width of the word embeddings, `V` predicted vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Side(NamedTuple):
    """One side of the pairs: token ids (B, S), mask (B, S), states (B, S, D), embeddings (B, D), noise (B, S)."""

    ids: Tensor
    mask: Tensor
    states: Tensor
    embeds: Tensor
    noise: Tensor | None


class Words(NamedTuple):
    """Word embeddings of sources (B, S_x, E) and targets (B, S_y, E), of [MASK] (1, E), and of what is predicted."""

    source: Tensor
    target: Tensor
    mask: Tensor | None
    predicted: Tensor


@dataclass
class Chunk:
    """Some pairs of a larger batch, and what their losses need to be the share of these pairs (GradCache).

    A plain object, not a tuple, so that a wrapper that casts forward's tensors leaves its own as they are.

    Args:
        first: row of the first pair in the batch of all processes.
        noise: for the source (B, S_x) and the target (B, S_y), or None where none is needed.
        gradients: of L_TR of the whole batch for the compared embeddings of sources and targets, (B, D) each; `()`
            where nothing is ranked. With None, forward only gives these embeddings.
        labels: (1,), or (2,) with two directions: labels of the whole batch.
    """

    first: int
    noise: tuple[Tensor | None, Tensor | None]
    gradients: tuple[Tensor, ...] | None = None
    labels: Tensor | None = None


def pad_to_same_length(source: Side, target: Side) -> tuple[Side, Side]:
    """Both sides with as many columns as the longer one has; what is added is padding."""
    length = max(source.ids.shape[1], target.ids.shape[1])

    def padded(side: Side) -> Side:
        missing = length - side.ids.shape[1]
        noise = None if side.noise is None else F.pad(side.noise, (0, missing), value=1.0)
        states = F.pad(side.states, (0, 0, 0, missing))
        return Side(F.pad(side.ids, (0, missing)), F.pad(side.mask, (0, missing)), states, side.embeds, noise)

    return padded(source), padded(target)


def odd_rows(count: int, device: torch.device, first: int) -> Tensor:
    """(B,) bool: whether a row's number in the batch of all processes, where these begin at `first`, is odd."""
    return (torch.arange(count, device=device) + first) % 2 == 1


def swap_rows(side: Side, other: Side, swapped: Tensor) -> Side:
    """The side with the rows of the other where `swapped` (B,) is True."""

    def choose(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None else torch.where(swapped.view(-1, *[1] * (a.dim() - 1)), b, a)

    return Side(*(choose(a, b) for a, b in zip(side, other)))
