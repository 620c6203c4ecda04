"""GradCache (Gao et al. 2021, arXiv 2101.06983): a batch of any size in the memory of a chunk.

It works with all objectives, in three steps:

1. The vectors that objectives such as TR compare are computed for all chunks, without a graph.
2. The loss of the whole batch gives the gradients of these vectors.
3. Each chunk runs again, with the same dropout, and back-propagates from these gradients to the
   weights.

The labels of the other objectives concern one pair each. A chunk therefore takes its share of their
sum, divided by the number of labels in the whole batch.

Shapes in the comments: `B` pairs of one process, `S` tokens, `D` hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from losses_dap import at_least_float32, first_row
from modeling_dap import DAPForPreTraining, DAPForPreTrainingOutput
from objectives_dap import Chunk, Comparison, Pairs, needs_of, pairs_of


@dataclass
class Part:
    """One chunk: some consecutive pairs of a process's batch, with all that both passes need.

    Attributes:
        inputs: arguments of `DAPForPreTraining.forward` for these pairs.
        chunk: what the model must know of the whole batch, such as the gradients of the vectors.
        seed: seed of dropout, the same in both passes.
    """

    inputs: dict[str, Tensor]
    chunk: Chunk
    seed: int


class CachedBatch:
    """A batch that runs in chunks. The gradients of all chunks add up to those of a plain step.

    Creating the object computes the vectors of all chunks without a graph, then the losses of the
    whole batch that compare them, and the gradients with respect to these vectors. After that, call
    `run` once for each of `parts`, and back-propagate from its result before the next call. Then
    `output` returns the loss of the batch.

    Args:
        model: the model without wrappers, for its objectives and heads.
        forward: calls the model, perhaps through a wrapper for several processes. Every process
            must have a batch of the same size.
        inputs: arguments of `DAPForPreTraining.forward` for the whole batch.
        size: pairs per chunk.

    Attributes:
        parts: the chunks.
        measures: values to log, by name. Each chunk that runs adds its share.
    """

    def __init__(
        self,
        model: DAPForPreTraining,
        forward: Callable[..., DAPForPreTrainingOutput],
        inputs: dict[str, Tensor],
        size: int,
    ) -> None:
        self.objectives = model.objectives
        self.forward = forward
        pairs, self.parts = split(model, inputs, size)
        gradients, self.measures = self._compare(pairs)

        counts = {}
        for objective in self.objectives:
            if not isinstance(objective, Comparison):
                counts[objective.name] = objective.count(objective.labels(pairs, model))

        for number, part in enumerate(self.parts):
            rows = slice(number * size, (number + 1) * size)
            share = {}
            for name, found in gradients.items():
                share[name] = tuple(gradient[rows] for gradient in found)
            part.chunk = replace(part.chunk, gradients=share, label_counts=counts)

    def _compare(self, pairs: Pairs) -> tuple[dict[str, tuple[Tensor, ...]], dict[str, Tensor]]:
        """Compute the losses of the objectives that compare sentences, such as translation ranking.

        The first result has, by the objective's name, the gradients of its loss with respect to the
        vectors of the whole batch. The second has the values to log.
        """
        gradients, measures = {}, {}
        comparisons = [each for each in self.objectives if isinstance(each, Comparison)]
        compared = []
        if comparisons:
            with torch.no_grad():
                compared = [self._forward(part).compared for part in self.parts]
        for objective in comparisons:
            vectors = []
            for rows in zip(*(each[objective.name] for each in compared)):
                vectors.append(at_least_float32(torch.cat(rows)).requires_grad_())
            with torch.enable_grad():
                loss, found = objective.loss_of(tuple(vectors), pairs)
            loss.backward()
            gradients[objective.name] = tuple(gradient_of(rows) for rows in vectors)
            measures |= {name: value.detach() for name, value in found.items()}
        return gradients, measures

    def _forward(self, part: Part) -> DAPForPreTrainingOutput:
        """Run the model on a chunk, with the same dropout at each call, and return its output."""
        with seeded(part.seed, part.inputs["source_input_ids"].device):
            return self.forward(**part.inputs, chunk=part.chunk)

    def run(self, part: Part) -> Tensor:
        """Run a chunk with a graph, and return a scalar from which the caller back-propagates.

        Its gradient is the chunk's share of the gradient of the batch's loss. Its value is no share
        of the loss if an objective compares sentences, as TR does: `output` returns the loss.
        Back-propagate before the next call, or several graphs are in memory at once.
        """
        out = self._forward(part)
        for name, value in out.measures.items():
            self.measures[name] = self.measures.get(name, 0) + value.detach()
        return out.loss

    def output(self) -> DAPForPreTrainingOutput:
        """Return the loss and the values to log of the whole batch, once every chunk has run."""
        loss = 0
        for objective in self.objectives:
            loss = loss + objective.weight * self.measures[f"{objective.name}_loss"]
        return DAPForPreTrainingOutput(loss=loss, measures=self.measures)


def split(
    model: DAPForPreTraining, inputs: dict[str, Tensor], size: int
) -> tuple[Pairs, list[Part]]:
    """Split a batch into chunks, padded on the right.

    Random numbers are drawn here, so that both passes over a chunk share them. These are a seed
    for dropout and the noise that decides which tokens are masked, unless `inputs` has noise.

    Returns:
        The pairs of the whole batch, and chunks of `size` pairs. The last one may have fewer.
    """
    pairs = pairs_of(inputs, needs_of(model.objectives))
    sides = {"source": pairs.source, "target": pairs.target}
    if pairs.negatives is not None:
        sides["negative"] = pairs.negatives
    first = first_row(len(pairs.source.ids))
    per_pair = {name: value for name, value in inputs.items() if not name.endswith("_noise")}

    seeds = torch.randint(2**62, (-(-len(pairs.source.ids) // size),)).tolist()

    parts = []
    for number, seed in enumerate(seeds):
        rows = slice(number * size, (number + 1) * size)
        part_inputs = {name: value[rows] for name, value in per_pair.items()}
        for name, side in sides.items():
            part_inputs[f"{name}_input_ids"] = side.ids[rows]
            part_inputs[f"{name}_attention_mask"] = side.mask[rows]
            if side.noise is not None:
                part_inputs[f"{name}_noise"] = side.noise[rows]
        chunk = Chunk(first_pair=first + rows.start)
        parts.append(Part(part_inputs, chunk, seed))
    return pairs, parts


def gradient_of(rows: Tensor) -> Tensor:
    """Return the gradient of a tensor, or zeros if the loss does not depend on it."""
    return torch.zeros_like(rows) if rows.grad is None else rows.grad


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Use a seed for the random numbers of the CPU and a device, until the block ends.

    After the block, the random numbers continue as if it had drawn none.
    """
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(seed)
        yield
