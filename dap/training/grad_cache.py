"""GradCache (Gao et al. 2021, arXiv 2101.06983): a batch of any size in the memory of a chunk, with all objectives.

What is compared (the embeddings, for TR) is computed for all chunks without a graph; the loss of the whole batch gives
its gradient; then each chunk runs again, with the same dropout, from that gradient back to the weights. Other labels
concern one pair each, so a chunk takes its share of the sum over the labels of the whole batch.

Shapes in the comments: `B` pairs of one process, `S` tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from losses_dap import at_least_float32, columns_of, first_row
from modeling_dap import DAPForPreTraining, DAPForPreTrainingOutput
from objectives_dap import Batch, Chunk, Comparison, Side

SIDES = ("source", "target", "negative")


@dataclass
class Part:
    """Some pairs of a process's batch: forward's arguments, and the seed that both passes start from."""

    inputs: dict[str, Tensor]
    chunk: Chunk
    seed: int


class CachedBatch:
    """A batch whose comparisons are made; each of its `parts` is to `run` once, and its loss to go back.

    The gradients of all parts together are those of a plain step on the batch, within rounding.

    Args:
        model: the model, for its objectives and its heads.
        forward: the model as it is wrapped for several processes, each of which brings a batch of the same size.
        inputs: arguments of `DAPForPreTraining.forward`.
        size: pairs of a part.
    """

    def __init__(
        self,
        model: DAPForPreTraining,
        forward: Callable[..., DAPForPreTrainingOutput],
        inputs: dict[str, Tensor],
        size: int,
    ) -> None:
        self.objectives, self.forward = model.objectives, forward
        batch, self.parts = split(model, inputs, size)
        gradients, self.measures = self._compare(batch)
        labels = {}
        for objective in self.objectives:
            if not isinstance(objective, Comparison):
                own = batch._replace(text=objective.text(batch))
                labels[objective.name] = objective.count(objective.labels(own, model))
        for number, part in enumerate(self.parts):
            rows = slice(number * size, (number + 1) * size)
            own = {
                name: tuple(gradient[rows] for gradient in found)
                for name, found in gradients.items()
            }
            part.chunk = replace(part.chunk, gradients=own, labels=labels)

    def _compare(self, batch: Batch) -> tuple[dict[str, tuple[Tensor, ...]], dict[str, Tensor]]:
        """Gradients of each comparison's loss for what it compares, and what it measures."""
        comparisons = [
            objective for objective in self.objectives if isinstance(objective, Comparison)
        ]
        if not comparisons:
            return {}, {}
        compared, gradients, measures = self._compared(), {}, {}
        for objective in comparisons:
            given = tuple(rows.requires_grad_() for rows in compared[objective.name])
            with torch.enable_grad():
                loss, found = objective.compare(given, batch)
            loss.backward()
            gradients[objective.name] = tuple(rows.grad for rows in given)
            measures |= {name: value.detach() for name, value in found.items()}
        return gradients, measures

    @torch.no_grad()
    def _compared(self) -> dict[str, tuple[Tensor, ...]]:
        """What each comparison compares, of all parts."""
        given = [self._forward(part).compared for part in self.parts]
        return {
            name: tuple(
                at_least_float32(torch.cat(rows)) for rows in zip(*(own[name] for own in given))
            )
            for name in given[0]
        }

    def _forward(self, part: Part) -> DAPForPreTrainingOutput:
        with seeded(part.seed, part.inputs["source_input_ids"].device):
            return self.forward(**part.inputs, chunk=part.chunk)

    def run(self, part: Part) -> Tensor:
        """The part's loss; go back from it before the next part runs."""
        out = self._forward(part)
        for name, value in out.measures.items():
            self.measures[name] = self.measures.get(name, 0) + value.detach()
        return out.loss

    def output(self) -> DAPForPreTrainingOutput:
        """What a plain step gives, but for the embeddings and without a graph, once every part has run."""
        loss = sum(
            objective.weight * self.measures[f"{objective.name}_loss"]
            for objective in self.objectives
        )
        return DAPForPreTrainingOutput(loss=loss, measures=self.measures)


def split(
    model: DAPForPreTraining, inputs: dict[str, Tensor], size: int
) -> tuple[Batch, list[Part]]:
    """A batch, and its parts, each as wide as its own longest row."""
    inputs = dict(inputs)
    sides = []
    for side in (side for side in SIDES if f"{side}_input_ids" in inputs):
        ids, noise = inputs[f"{side}_input_ids"], inputs.pop(f"{side}_noise", None)
        noise = model.draw_noise(ids) if noise is None and side != "negative" else noise
        sides.append(Side(ids, inputs[f"{side}_attention_mask"], noise))
    source, target, *negatives = sides
    first = first_row(len(source.ids))
    batch = Batch(
        source,
        target,
        inputs.get("language_ids"),
        first,
        negatives=negatives[0] if negatives else None,
    )
    lengths = torch.stack(
        [(side.mask * (columns_of(side.mask) + 1)).amax(1) for side in sides]
    )  # (2 or 3, B)
    widths = [part.amax(1) for part in lengths.clamp(min=1).split(size, 1)]  # (2 or 3,) each
    seeds = torch.randint(2**62, (len(widths),)).tolist()
    parts = []
    for number, (*columns, seed) in enumerate(zip(*torch.stack(widths, 1).tolist(), seeds)):
        rows = slice(number * size, (number + 1) * size)
        own = {name: value[rows] for name, value in inputs.items()}
        for side, width in zip(SIDES, columns):
            own |= {
                f"{side}_{name}": own[f"{side}_{name}"][:, :width]
                for name in ("input_ids", "attention_mask")
            }
        noises = ((side.noise, width) for side, width in zip(batch.sides, columns))
        cut = tuple(None if noise is None else noise[rows, :width] for noise, width in noises)
        parts.append(Part(own, Chunk(batch.first + rows.start, cut), seed))
    return batch, parts


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of a device and of the CPU from a seed, and as they were going on before, afterwards."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(seed)
        yield
