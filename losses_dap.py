"""The losses of DAP as pure functions of tensors, and what processes share for them.

Ships with a checkpoint beside modeling_dap.py. Shapes in the comments: `B` pairs of one process, `W` processes, `S`
tokens, `D` hidden size, `E` width of the word embeddings, `V` predicted vocabulary, `T` tokens with a label.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_PER_CHUNK = 2**25  # float32 logits held at a time by the vocabulary loss: 128 MiB
SIMILARITIES_PER_BLOCK = (
    2**21
)  # of the (B, W·B) that ranking compares; in float32 8 MiB, held a few times over


# ------------------------------------------------------------------------------------------- across processes


def world_size() -> int:
    """Number of processes that train together; 1 when `torch.distributed` is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class _AllGather(torch.autograd.Function):
    """Concatenate the rows of every process; backward returns to each its rows' gradient, summed over processes."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.count = rows.shape[0]
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(
            memory_format=torch.contiguous_format
        )  # autograd's own is not ours to change
        dist.all_reduce(gradient)
        return gradient.narrow(0, dist.get_rank() * ctx.count, ctx.count)


@torch.compiler.disable
def gather_rows(rows: Tensor) -> Tensor:
    """Gather (B, ...) rows of every process as (W·B, ...), in rank order, with gradients; identity when W is 1.

    Every process must bring the same B: train with `dataloader_drop_last=True`.
    """
    return rows if world_size() == 1 else _AllGather.apply(rows)


def first_row(count: int) -> int:
    """Row of this process's first pair in the gathered batch, where every process brings `count`."""
    return dist.get_rank() * count if world_size() > 1 else 0


@torch.compiler.disable
def sum_over_processes(value: Tensor) -> Tensor:
    """The sum of a tensor over all processes, without gradient; the tensor itself when W is 1."""
    if world_size() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def whole(weight: Tensor) -> Tensor:
    """A parameter as a plain tensor: FSDP keeps a shard of it while its module's forward does not run."""
    if not hasattr(weight, "full_tensor"):
        return weight
    from torch.distributed.tensor import Partial  # not part of every build of torch

    full = weight.full_tensor(grad_placements=[Partial()] * weight.device_mesh.ndim)
    if full.requires_grad:
        full.register_hook(
            lambda gradient: gradient / weight.device_mesh.size()
        )  # FSDP takes the mean of processes
    return full


# ------------------------------------------------------------------------------------------- losses, pure functions


class RankingResult(NamedTuple):
    """What translation ranking gives; each is a float32 scalar, a mean over the rows."""

    loss: Tensor
    accuracy: Tensor
    negatives: Tensor


def similarity_matrix(queries: Tensor, candidates: Tensor, similarity: str = "cosine") -> Tensor:
    """phi(x, y) of eq. L_TR for every query (B, D) and candidate (N, D): one float32 product (B, N), autocast or not.

    >>> similarity_matrix(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0], [4.0, -3.0]]))
    tensor([[1., 0.]])
    >>> similarity_matrix(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]]), similarity="dot")
    tensor([[25.]])
    """
    with torch.autocast(queries.device.type, enabled=False):
        queries, candidates = at_least_float32(queries), at_least_float32(candidates)
        if similarity == "cosine":
            queries, candidates = F.normalize(queries, dim=-1), F.normalize(candidates, dim=-1)
        return queries @ candidates.T  # (B, N)


def translation_ranking_loss(
    queries: Tensor,
    candidates: Tensor,
    similarity: str = "cosine",
    temperature: float = 0.05,
    margin: float = 0.0,
    first: int = 0,
    excluded: Tensor | None = None,
) -> RankingResult:
    """Eq. L_TR: softmax over all candidates, where query i belongs to candidate `first + i`.

    Args:
        queries: (B, D) sentence embeddings, those of this process.
        candidates: (N, D) sentence embeddings of the other side, those of all processes.
        similarity: `"cosine"` or `"dot"`.
        temperature: divisor of the similarities.
        margin: taken from the similarity of the true pair before the division.
        first: column of the first query's own candidate.
        excluded: (B, N) bool, True where a candidate is not a negative; never consulted for the true pair.

    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> translation_ranking_loss(x, y, temperature=1.0).loss  # log(e + 1) - 1
    tensor(0.3133)
    """
    logits = similarity_matrix(queries, candidates, similarity)  # (B, N)
    rows = torch.arange(logits.shape[0], device=logits.device)  # (B,)
    own = columns_of(logits) == (rows + first).unsqueeze(1)  # (B, N)
    logits = (logits - margin * own) / temperature
    if excluded is not None:
        logits = logits.masked_fill(excluded & ~own, float("-inf"))
    negatives = torch.isfinite(logits).sum(-1).float().mean() - 1
    accuracy = (logits.argmax(-1) == rows + first).float().mean()
    return RankingResult(F.cross_entropy(logits, rows + first), accuracy, negatives)


def rank_in_blocks(
    queries: Tensor,
    answers: Sequence[Tensor],
    texts: Sequence[Tensor],
    similarity: str,
    temperature: float,
    margin: float,
) -> RankingResult:
    """L_TR of this process's queries (B, D) over the answers of all processes, N in all.

    A block of queries at a time is compared, and in the backward pass compared again: nothing of size (B, N) is held
    where that is large.

    Args:
        answers: (B, D) those that belong to the queries, and maybe as many more that belong to none.
        texts: hashes (B,) of each. An answer with the same one as a query's own is no negative of that, and one with 0
            is no negative of any.
    """
    if similarity == "cosine":
        queries, *answers = (
            F.normalize(at_least_float32(side), dim=-1) for side in (queries, *answers)
        )
    own, candidates, hashes = (
        texts[0],
        torch.cat([*map(gather_rows, answers)]),
        torch.cat([*map(gather_rows, texts)]),
    )
    first, size = first_row(len(queries)), max(1, SIMILARITIES_PER_BLOCK // len(candidates))

    def rank(start: int, block: Tensor, candidates: Tensor) -> RankingResult:
        excluded = (own[start : start + size, None] == hashes) | (hashes == 0)  # (b, N)
        return translation_ranking_loss(
            block, candidates, "dot", temperature, margin, first + start, excluded
        )

    if size >= len(queries):
        return rank(0, queries, candidates)
    shares = []
    for number, block in enumerate(queries.split(size)):
        found = checkpoint(
            rank, number * size, block, candidates, use_reentrant=False, preserve_rng_state=False
        )
        shares.append(torch.stack(found) * (len(block) / len(queries)))
    return RankingResult(*torch.stack(shares).sum(0))


def text_hash(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """64-bit hash (B,) of each row's real tokens (B, S) in order, whatever the padding; equal texts hash equal.

    That of a row without real tokens is 0.

    >>> a, b = torch.tensor([[5, 6, 7, 0]]), torch.tensor([[5, 6, 7], [6, 5, 7]])
    >>> text_hash(a, (a > 0).long()) == text_hash(b, torch.ones_like(b))
    tensor([ True, False])
    """
    position = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)  # (S,)
    mixed = (
        input_ids * -7046029254386353131 + position * -4417276706812531889
    )  # (B, S), modulo 2^64
    mixed = (mixed ^ (mixed >> 31)) * -49064778989728563
    mixed = mixed ^ (mixed >> 29)
    return (mixed * attention_mask.long()).sum(-1)


def vocabulary_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
) -> Tensor:
    """Sum over T tokens of the cross entropy of softmax(hidden @ weight.T + bias), in float32 (CE of eq. L_RTL).

    The logits are never held as a whole: a chunk of rows at a time gives its loss and, at once, its gradients.

    Args:
        hidden: (T, E) states.
        weight: (V, E) output embeddings.
        bias: (V,).
        labels: (T,) rows of `weight`.

    >>> vocabulary_cross_entropy(torch.zeros(3, 2), torch.ones(4, 2), torch.zeros(4), torch.tensor([0, 1, 3]))
    tensor(4.1589)
    """
    device = hidden.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        fused = fused_cross_entropy(device)
        if fused is not None:
            kind = half or hidden.dtype
            return fused(weight.to(kind), hidden.to(kind), labels, bias.to(kind)).float()
        hidden, weight, bias = (at_least_float32(value) for value in (hidden, weight, bias))
        return _VocabularyCrossEntropy.apply(hidden, weight, bias, labels, half)


@functools.cache
def fused_cross_entropy(device: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """Liger's fused kernel (weight, hidden, labels, bias) on CUDA; None elsewhere and where it is not installed."""
    if device != "cuda":
        return None
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)


def product(a: Tensor, b: Tensor, half: torch.dtype | None) -> Tensor:
    """A float32 matrix product (m, n); of factors in half precision where asked for, and on CPU then rounded to it."""
    return a @ b if half is None else half_product(a.device.type)(a.to(half), b.to(half))


def half_product(device: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The product of matrices in half precision: on CUDA it is float32."""
    return functools.partial(torch.mm, out_dtype=torch.float32) if device == "cuda" else torch.mm


class _VocabularyCrossEntropy(torch.autograd.Function):
    @staticmethod
    @torch.compiler.disable
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        labels: Tensor,
        half: torch.dtype | None,
    ) -> Tensor:
        """Labels stand apart: their logits and gradients are of float32 products, whatever the type of the others."""
        rows = max(1, LOGITS_PER_CHUNK // weight.shape[0])
        needed = ctx.needs_input_grad[:3]
        grads = [
            torch.zeros_like(value) if need else None
            for value, need in zip((hidden, weight, bias), needed)
        ]
        factor = weight if half is None else weight.to(half)
        total = hidden.new_zeros(())
        for start in range(0, hidden.shape[0], rows):
            states, wanted = hidden[start : start + rows], labels[start : start + rows]
            answers = weight.index_select(0, wanted)  # (rows, E)
            own = (states * answers).sum(-1, keepdim=True) + bias[wanted, None]  # (rows, 1)
            logits = at_least_float32(product(states, factor.T, half)).add_(bias)  # (rows, V)
            highest = logits.amax(-1, keepdim=True)  # (rows, 1)
            powers = logits.sub_(highest).exp_().scatter_(1, wanted[:, None], 0.0)  # (rows, V)
            others = powers.sum(-1, keepdim=True)  # (rows, 1)
            norm = others + (own - highest).exp()
            total += (norm.log() + highest - own).sum()
            share, missed = (
                norm.reciprocal(),
                others / norm,
            )  # (rows, 1): the gradient is -missed at the label
            if needed[2]:  # (V,)
                grads[2].addmv_(powers.T, share[:, 0]).index_add_(0, wanted, missed[:, 0], alpha=-1)
            powers = powers if half is None else powers.to(half)
            if needed[0]:  # (rows, E)
                found = product(powers, factor, half) * share
                grads[0][start : start + rows] = found.addcmul_(missed, answers, value=-1)
            if needed[1]:  # (V, E)
                if half is None:
                    grads[1].addmm_(powers.T, states * share)
                else:
                    grads[1] += product(powers.T, states * share, half)
                grads[1].index_add_(0, wanted, states * missed, alpha=-1)
        ctx.grads = grads
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "vocabulary_cross_entropy has given its gradients already: compute it again."
            )
        grads, ctx.grads = ctx.grads, None
        return *(None if grad is None else grad.mul_(gradient) for grad in grads), None, None


def bag_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, counted: Tensor
) -> Tensor:
    """`vocabulary_cross_entropy` of rows that have several labels each, those that count: in float32, for few rows.

    A block of rows at a time, and in the backward pass again, so that the logits are never held as a whole.

    Args:
        hidden: (B, E) states.
        weight: (V, E) output embeddings.
        bias: (V,).
        labels: (B, S) rows of `weight`.
        counted: (B, S) bool.

    >>> labels = torch.tensor([[0, 1, 3]])
    >>> bag_cross_entropy(torch.zeros(1, 2), torch.ones(4, 2), torch.zeros(4), labels, labels >= 0)
    tensor(4.1589)
    """

    def block_sum(
        hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, counted: Tensor
    ) -> Tensor:
        logits = torch.addmm(bias, hidden, weight.T)  # (b, V)
        counts = torch.zeros_like(logits).scatter_add_(
            1, labels, counted.to(logits.dtype)
        )  # (b, V)
        return F.cross_entropy(logits, counts, reduction="sum")

    with torch.autocast(hidden.device.type, enabled=False):
        hidden, weight, bias = (at_least_float32(value) for value in (hidden, weight, bias))
        rows = max(1, LOGITS_PER_CHUNK // len(weight))
        blocks = zip(hidden.split(rows), labels.split(rows), counted.split(rows))
        return sum(
            checkpoint(block_sum, part, weight, bias, *rest, use_reentrant=False)
            for part, *rest in blocks
        )


def sampled_cross_entropy(
    hidden: Tensor,
    own_weight: Tensor,
    own_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    own: Tensor,
    size: int,
) -> Tensor:
    """`vocabulary_cross_entropy` with the sum over all other ids estimated from N that are drawn without replacement.

    The estimate of the softmax's normaliser is unbiased, and exact where N is the vocabulary.

    Args:
        hidden: (T, E) states.
        own_weight: (T, E) output embeddings of the labels.
        own_bias: (T,).
        weight: (N, E) output embeddings of the drawn ids, at least two.
        bias: (N,).
        own: (T, N) bool, True where a drawn id is the label, which does not stand for another.
        size: V, number of ids in the vocabulary.
    """
    with torch.autocast(hidden.device.type, enabled=False):
        given = hidden, own_weight, own_bias, weight, bias
        hidden, own_weight, own_bias, weight, bias = map(at_least_float32, given)
        label = (hidden * own_weight).sum(-1) + own_bias  # (T,)
        logits = torch.addmm(bias, hidden, weight.T).masked_fill(own, float("-inf"))  # (T, N)
        factor = (size - 1) / (~own).sum(-1)  # (T,): how many ids a drawn one stands for
        others = logits.logsumexp(-1) + factor.log()  # (T,)
        return (torch.logaddexp(label, others) - label).sum()


def at_least_float32(value: Tensor) -> Tensor:
    """Half precision as float32; float32 and float64 as they are."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def columns_of(ids: Tensor) -> Tensor:
    """Column numbers (B, S) of values (B, S)."""
    return torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
