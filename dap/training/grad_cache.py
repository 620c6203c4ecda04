"""GradCache (Gao et al. 2021, arXiv 2101.06983): a batch of any size in the memory of a chunk, with all objectives.

The embeddings of all chunks are computed without a graph; the ranking loss of the whole batch gives the gradient of
each embedding; then each chunk runs again, with the same dropout, from that gradient back to the weights. A prediction
of RTL, TLM or MLM concerns one pair, so each chunk takes its share of their sum over the labels of the whole batch.

Shapes in the comments: `B` pairs of one process, `W` processes, `b` pairs of a chunk, `S` tokens, `D` hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from configuration_dap import DAPConfig
from losses_dap import (
    RankingResult,
    at_least_float32,
    columns_of,
    first_row,
    gather_rows,
    sum_over_processes,
    text_hash,
    translation_ranking_loss,
)
from modeling_dap import DAPForPreTraining, DAPForPreTrainingOutput
from objectives_dap import Chunk, Side

SIMILARITIES_AT_A_TIME = 2**21  # of the (B, W·B) that ranking compares; in float32 8 MiB, held a few times over
SIDES = ("source", "target")
PREDICTED = ("rtl_loss", "tlm_loss", "mlm_loss", "ignored_tokens")  # what the chunks' shares add up to
Embeddings = tuple[Tensor, Tensor]  # of the sources and of the targets, (B, D) each


@dataclass
class Part:
    """Some pairs of a process's batch: forward's arguments, and the seed that both passes start from."""

    inputs: dict[str, Tensor]
    chunk: Chunk
    seed: int


class CachedBatch:
    """A batch whose ranking loss, if any, is known; each of its `parts` is to `run` once, and its loss to go back.

    The gradients of all parts together are those of a plain step on the batch, within rounding.

    Args:
        model: the model, for its configuration and its heads.
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
        self.config, self.forward = model.config, forward
        self.parts, labels = split(model, inputs, size)
        self.ranking, gradients = None, ()
        if self.config.uses_tr:
            texts = text_hash(inputs["target_input_ids"], inputs["target_attention_mask"])  # (B,)
            self.ranking, gradients = ranking_gradients(self.config, *self._embed(), texts)
        for part, *own in zip(self.parts, *(gradient.split(size) for gradient in gradients)):
            part.chunk = replace(part.chunk, gradients=tuple(own), labels=labels)
        self.sums: dict[str, Tensor] = {}

    @torch.no_grad()
    def _embed(self) -> Embeddings:
        """What ranking compares."""
        given = [self._forward(part) for part in self.parts]
        sources, targets = ([out[f"{side}_embeds"] for out in given] for side in SIDES)
        return at_least_float32(torch.cat(sources)), at_least_float32(torch.cat(targets))

    def _forward(self, part: Part) -> DAPForPreTrainingOutput:
        with seeded(part.seed, part.inputs["source_input_ids"].device):
            return self.forward(**part.inputs, chunk=part.chunk)

    def run(self, part: Part) -> Tensor:
        """The part's loss; go back from it before the next part runs."""
        out = self._forward(part)
        for name in PREDICTED:
            if (value := getattr(out, name)) is not None:
                self.sums[name] = self.sums.get(name, 0) + value.detach()
        return out.loss

    def output(self) -> DAPForPreTrainingOutput:
        """What a plain step gives, but for the embeddings and without a graph, once every part has run."""
        if self.ranking is None:
            return DAPForPreTrainingOutput(loss=self.sums["mlm_loss"], **self.sums)
        rtl, tlm = self.sums.get("rtl_loss", 0), self.sums.get("tlm_loss", 0)
        loss = self.ranking.loss + self.config.rtl_weight * rtl + self.config.tlm_weight * tlm
        measured = {"accuracy": self.ranking.accuracy, "negatives": self.ranking.negatives}
        return DAPForPreTrainingOutput(loss=loss, tr_loss=self.ranking.loss, **measured, **self.sums)


def split(model: DAPForPreTraining, inputs: dict[str, Tensor], size: int) -> tuple[list[Part], Tensor]:
    """The parts of a batch, each as wide as its own longest row, and the labels (directions,) of all processes."""
    inputs = dict(inputs)
    sides = []
    for side in SIDES:
        ids, noise = inputs[f"{side}_input_ids"], inputs.pop(f"{side}_noise", None)
        sides.append(Side(ids, inputs[f"{side}_attention_mask"], model.draw_noise(ids) if noise is None else noise))
    first = first_row(len(sides[0].ids))
    labels = sum_over_processes(model.count_labels(sides, first)) if model.prediction_head else None
    lengths = torch.stack([(side.mask * (columns_of(side.mask) + 1)).amax(1) for side in sides])  # (2, B)
    widths = [part.amax(1) for part in lengths.split(size, 1)]  # (2,) each
    seeds = torch.randint(2**62, (len(widths),)).tolist()
    parts = []
    for number, (*columns, seed) in enumerate(zip(*torch.stack(widths, 1).tolist(), seeds)):
        rows = slice(number * size, (number + 1) * size)
        own = {name: value[rows] for name, value in inputs.items()}
        for side, width in zip(SIDES, columns):
            own |= {f"{side}_{name}": own[f"{side}_{name}"][:, :width] for name in ("input_ids", "attention_mask")}
        cut = tuple(None if side.noise is None else side.noise[rows, :width] for side, width in zip(sides, columns))
        parts.append(Part(own, Chunk(first + rows.start, cut), seed))
    return parts, labels


def ranking_gradients(
    config: DAPConfig, queries: Tensor, answers: Tensor, texts: Tensor
) -> tuple[RankingResult, Embeddings]:
    """L_TR over the batch of all processes, and its gradients at this process's embeddings (B, D).

    Args:
        config: how to compare.
        queries, answers: (B, D) of the sources and of the targets.
        texts: (B,) hashes of the targets.
    """
    texts = texts, gather_rows(texts)
    forward = _one_direction(config, queries, answers, *texts)
    if not config.tr_bidirectional:
        return forward
    backward = _one_direction(config, answers, queries, *texts)
    gradients = (forward[1][0] + backward[1][1]) / 2, (forward[1][1] + backward[1][0]) / 2
    return RankingResult(*((a + b) / 2 for a, b in zip(forward[0], backward[0]))), gradients


@torch.enable_grad()
def _one_direction(
    config: DAPConfig, queries: Tensor, answers: Tensor, texts: Tensor, all_texts: Tensor
) -> tuple[RankingResult, Embeddings]:
    """A block of queries at a time against all answers; nothing of size (B, W·B) is held."""
    given = queries.detach().requires_grad_(), answers.detach().requires_grad_()
    compared = [F.normalize(side, dim=-1) if config.tr_similarity == "cosine" else side for side in given]
    compared[1] = gather_rows(compared[1])  # (W·B, D)
    queries, candidates = (side.detach().requires_grad_() for side in compared)
    block, first = max(1, SIMILARITIES_AT_A_TIME // len(candidates)), first_row(len(queries))
    totals = [torch.zeros((), device=queries.device) for _ in RankingResult._fields]
    for start in range(0, len(queries), block):
        rows = slice(start, start + block)
        excluded = texts[rows, None] == all_texts if config.tr_mask_duplicates else None  # (b, W·B)
        options = (config.tr_temperature, config.tr_margin, first + start, excluded)
        found = translation_ranking_loss(queries[rows], candidates, "dot", *options)
        share = len(texts[rows]) / len(texts)
        (found.loss * share).backward()
        totals = [total + value.detach() * share for total, value in zip(totals, found)]
    torch.autograd.backward(compared, [queries.grad, candidates.grad])
    return RankingResult(*totals), (given[0].grad, given[1].grad)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers of a device and of the CPU from a seed, and as they were going on before, afterwards."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(seed)
        yield
