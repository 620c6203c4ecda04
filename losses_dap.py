"""The losses of DAP as pure functions of tensors, and what several processes share for them.

The file ships with every checkpoint, beside modeling_dap.py. The losses come first, helpers last:

- `translation_ranking_loss`: eq. L_TR, section 3.2.
- `ranking_loss_over_processes`: the same, with the candidates of all processes, in bounded memory.
- `vocabulary_cross_entropy`: the cross entropy of RTL, TLM and MLM, in bounded memory.
- `bag_cross_entropy`: the cross entropy of bag-of-words prediction.

Shapes in the comments: `B` pairs of one process, `W` processes, `N` candidates, `S` tokens, `D`
hidden size, `E` width of the word embeddings, `V` predicted vocabulary, `T` tokens with a label.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: Number of float32 logits that the vocabulary losses hold at a time: 128 MiB.
LOGITS_PER_CHUNK = 2**25
#: The same on CUDA, where small products waste the device: 1 GiB.
LOGITS_PER_CHUNK_ON_CUDA = 2**28
#: Number of similarities that translation ranking holds at a time: 8 MiB in float32, held a few
#: times.
SIMILARITIES_PER_BLOCK = 2**21


# ---------------------------------------------------------------------------- translation ranking


class RankingResult(NamedTuple):
    """Result of translation ranking. Each value is a float32 scalar, the mean over the queries."""

    loss: Tensor  # cross entropy, in nats per query
    accuracy: Tensor  # share of the queries whose own candidate ranks first, 0 to 1
    negatives: Tensor  # number of negatives per query


def similarity_matrix(queries: Tensor, candidates: Tensor, similarity: str = "cosine") -> Tensor:
    """Compute phi(x, y) of eq. L_TR for all queries (B, D) and candidates (N, D): (B, N).

    The product is computed in float32, also under autocast. `similarity` is "cosine" or "dot".

    >>> similarity_matrix(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0], [4.0, -3.0]]))
    tensor([[1., 0.]])
    >>> similarity_matrix(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 4.0]]), similarity="dot")
    tensor([[25.]])
    """
    with torch.autocast(queries.device.type, enabled=False):
        queries = at_least_float32(queries)
        candidates = at_least_float32(candidates)
        if similarity == "cosine":
            queries = F.normalize(queries, dim=-1)
            candidates = F.normalize(candidates, dim=-1)
        return queries @ candidates.T  # (B, N)


def translation_ranking_loss(
    queries: Tensor,
    candidates: Tensor,
    similarity: str = "cosine",
    temperature: float = 0.05,
    first: int = 0,
    excluded: Tensor | None = None,
) -> RankingResult:
    """Compute eq. L_TR: the cross entropy of each query's own candidate among all candidates.

    Candidate `first + i` is the translation of query i. All other candidates are its negatives.

    Args:
        queries: (B, D) sentence vectors of this process.
        candidates: (N, D) sentence vectors of the other side, of all processes.
        excluded: (B, N) bool, True where a candidate is not a negative. The entries of true pairs
            are ignored. None excludes nothing.
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> translation_ranking_loss(x, x.clone(), temperature=1.0).loss  # log(e + 1) - 1
    tensor(0.3133)
    """
    logits = similarity_matrix(queries, candidates, similarity) / temperature  # (B, N)
    translations = first + torch.arange(len(queries), device=logits.device)  # (B,)
    own = columns_of(logits) == translations.unsqueeze(1)  # (B, N), True at the true pairs

    if excluded is not None:
        logits = logits.masked_fill(excluded & ~own, float("-inf"))

    loss = F.cross_entropy(logits, translations)
    accuracy = (logits.argmax(-1) == translations).float().mean()
    negatives = (logits > float("-inf")).sum(-1).float().mean() - 1
    return RankingResult(loss, accuracy, negatives)


def ranking_loss_over_processes(
    queries: Tensor,
    candidates: Sequence[Tensor],
    hashes: Sequence[Tensor],
    similarity: str,
    temperature: float,
) -> RankingResult:
    """Compute eq. L_TR of this process's queries over the candidates of all processes.

    Where the matrix of similarities (B, N) is large, it is never held as a whole. A block of
    queries at a time is compared, and compared again in the backward pass.

    Args:
        queries: sentence vectors (B, D) of this process.
        candidates: tensors (B, D) of this process. The first holds the translations of the queries.
            Others hold negatives, such as changed copies of the translations.
        hashes: for each tensor of candidates, hashes (B, H) of H texts that belong to each
            candidate, such as a target and its source. A candidate that shares a text with a
            query's own candidate is not a negative of the query. A candidate whose first hash is 0
            is not a negative of any query.
    """
    if similarity == "cosine":  # once here, not once per block; then the dot product is the cosine
        queries = F.normalize(at_least_float32(queries), dim=-1)
        candidates = [F.normalize(at_least_float32(part), dim=-1) for part in candidates]

    own_hashes = hashes[0]  # (B, H)
    everyone = torch.cat([gather_rows(part) for part in candidates])  # (N, D)
    all_hashes = torch.cat([gather_rows(part) for part in hashes])  # (N, H)
    is_empty = all_hashes[:, 0] == 0  # (N,)
    first = first_row(len(queries))
    size = max(1, SIMILARITIES_PER_BLOCK // len(everyone))  # queries per block

    def rank_block(start: int, block: Tensor) -> RankingResult:
        same_text = own_hashes[start : start + size, None] == all_hashes  # (b, N, H)
        excluded = same_text.any(-1) | is_empty  # (b, N)
        return translation_ranking_loss(
            block, everyone, "dot", temperature, first + start, excluded
        )

    if size >= len(queries):
        return rank_block(0, queries)

    total = torch.zeros(3, device=queries.device)
    for number, block in enumerate(queries.split(size)):
        result = checkpoint(
            rank_block, number * size, block, use_reentrant=False, preserve_rng_state=False
        )
        total = total + torch.stack(result) * (len(block) / len(queries))
    return RankingResult(*total)


# ---------------------------------------------------------------- cross entropy over a vocabulary


def vocabulary_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor
) -> Tensor:
    """Sum the cross entropy of softmax(hidden @ weight.T + bias) over T tokens (CE of eq. L_RTL).

    `hidden` is (T, E), `weight` (V, E), `bias` (V,). `labels` (T,) are rows of `weight`. The sum is
    in nats.

    The logits (T, V) are never held at once. A chunk of rows at a time gives its loss and, in the
    same pass, its gradients. On CUDA this is Liger's kernel, if it is installed. Otherwise the
    logits of labels and all sums are float32, also under autocast.

    >>> hidden, weight = torch.zeros(3, 2), torch.ones(4, 2)
    >>> vocabulary_cross_entropy(hidden, weight, torch.zeros(4), torch.tensor([0, 1, 3]))
    tensor(4.1589)
    """
    device = hidden.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    with torch.autocast(device, enabled=False):
        fused = fused_cross_entropy(device)
        if fused is not None and len(hidden):  # the kernel divides by the number of tokens
            dtype = half or hidden.dtype
            return fused(weight.to(dtype), hidden.to(dtype), labels, bias.to(dtype)).float()
        hidden = at_least_float32(hidden)
        weight = at_least_float32(weight)
        bias = at_least_float32(bias)
        return _VocabularyCrossEntropy.apply(hidden, weight, bias, labels, half)


@functools.cache
def fused_cross_entropy(device: str) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """Return Liger's fused kernel of (weight, hidden, labels, bias), None without it or CUDA."""
    if device != "cuda":
        return None
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss(reduction="sum", accum_dtype=torch.float32)


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Chunked cross entropy that computes the gradients in the forward pass."""

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
        """Compute loss and gradients chunk by chunk.

        The gradient of the logits is softmax - one-hot. The label's entry is kept apart from the
        others (`exps` is 0 there), so that its logit and gradient stay float32 even where the
        large products run in half precision.
        """
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        hidden_grad = torch.zeros_like(hidden) if needs_hidden else None
        weight_grad = torch.zeros_like(weight) if needs_weight else None
        bias_grad = torch.zeros_like(bias) if needs_bias else None

        factor = weight if half is None else weight.to(half)
        rows = rows_per_chunk(weight)
        total = hidden.new_zeros(())
        for start in range(0, hidden.shape[0], rows):
            states = hidden[start : start + rows]  # (rows, E)
            label = labels[start : start + rows]  # (rows,)

            # The label's own logit, in float32.
            label_weight = weight.index_select(0, label)  # (rows, E)
            label_logit = (states * label_weight).sum(-1, keepdim=True) + bias[label, None]

            # exp(logit - highest) of all other entries.
            logits = at_least_float32(product(states, factor.T, half)).add_(bias)  # (rows, V)
            highest = logits.amax(-1, keepdim=True)  # (rows, 1)
            exps = logits.sub_(highest).exp_().scatter_(1, label[:, None], 0.0)  # (rows, V)
            others = exps.sum(-1, keepdim=True)  # (rows, 1)
            norm = others + (label_logit - highest).exp()
            total += (norm.log() + highest - label_logit).sum()

            # Gradients: exps * scale for the other entries, -missing for the label.
            scale = norm.reciprocal()  # (rows, 1)
            missing = others / norm  # (rows, 1): 1 - probability of the label
            if needs_bias:  # (V,)
                bias_grad.addmv_(exps.T, scale[:, 0])
                bias_grad.index_add_(0, label, missing[:, 0], alpha=-1)
            exps = exps if half is None else exps.to(half)
            if needs_hidden:  # (rows, E)
                gradient = product(exps, factor, half) * scale
                gradient.addcmul_(missing, label_weight, value=-1)
                hidden_grad[start : start + rows] = gradient
            if needs_weight:  # (V, E)
                if half is None:
                    weight_grad.addmm_(exps.T, states * scale)
                else:
                    weight_grad += product(exps.T, states * scale, half)
                weight_grad.index_add_(0, label, states * missing, alpha=-1)

        ctx.grads = (hidden_grad, weight_grad, bias_grad)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the stored gradients in place, which can be done once only."""
        if ctx.grads is None:
            raise RuntimeError(
                "vocabulary_cross_entropy: the gradients were used already; compute the loss again."
            )
        grads, ctx.grads = ctx.grads, None
        scaled = [None if grad is None else grad.mul_(gradient) for grad in grads]
        return *scaled, None, None


def product(a: Tensor, b: Tensor, half: torch.dtype | None) -> Tensor:
    """Multiply (m, k) and (k, n), cast to `half` if given. On CUDA the result is float32."""
    if half is None:
        return a @ b
    options = {"out_dtype": torch.float32} if a.is_cuda else {}
    return torch.mm(a.to(half), b.to(half), **options)


class _HalfProduct(torch.autograd.Function):
    """Autograd function of hidden @ weight.T, with `product` in both passes."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, half: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.half = half
        return product(hidden, weight.T, half)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, weight = ctx.saved_tensors
        of_hidden = product(gradient, weight, ctx.half)
        of_weight = product(gradient.T, hidden, ctx.half)
        return of_hidden, of_weight, None


def rows_per_chunk(weight: Tensor) -> int:
    """Return how many rows of logits (rows, V) are computed at a time, for `weight` (V, E)."""
    logits = LOGITS_PER_CHUNK_ON_CUDA if weight.is_cuda else LOGITS_PER_CHUNK
    return max(1, logits // weight.shape[0])


def bag_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, counted: Tensor
) -> Tensor:
    """Sum the cross entropy of softmax(hidden @ weight.T + bias), with several labels per row.

    Logits and sums are float32, in nats. On CUDA under bfloat16 autocast the products take bfloat16
    factors, and add up in float32. The logits (B, V) are never held at once: a block of rows at a
    time is computed, and computed again in the backward pass. `labels` (B, S) are rows of `weight`,
    of which those count where `counted` is True.

    >>> labels = torch.tensor([[0, 1, 3]])
    >>> bag_cross_entropy(torch.zeros(1, 2), torch.ones(4, 2), torch.zeros(4), labels, labels >= 0)
    tensor(4.1589)
    """
    device = hidden.device.type
    is_half = torch.is_autocast_enabled(device) and (
        torch.get_autocast_dtype(device) is torch.bfloat16
    )
    half = torch.bfloat16 if is_half and hidden.is_cuda else None

    def block_sum(
        hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, counted: Tensor
    ) -> Tensor:
        if half is None:
            logits = torch.addmm(bias, hidden, weight.T)  # (b, V)
        else:
            logits = _HalfProduct.apply(hidden, weight, half) + bias  # (b, V)
        counts = torch.zeros_like(logits)  # (b, V): how often each label occurs
        counts.scatter_add_(1, labels, counted.to(logits.dtype))
        return F.cross_entropy(logits, counts, reduction="sum")

    with torch.autocast(device, enabled=False):
        hidden = at_least_float32(hidden)
        weight = at_least_float32(weight)
        bias = at_least_float32(bias)
        rows = rows_per_chunk(weight)
        total = hidden.new_zeros(())
        for start in range(0, len(hidden), rows):
            block = slice(start, start + rows)
            total = total + checkpoint(
                block_sum,
                hidden[block],
                weight,
                bias,
                labels[block],
                counted[block],
                use_reentrant=False,
                preserve_rng_state=False,
            )
        return total


# ---------------------------------------------------------------------------------------- helpers


def at_least_float32(value: Tensor) -> Tensor:
    """Convert a half-precision tensor to float32. Other tensors are returned unchanged."""
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def columns_of(values: Tensor) -> Tensor:
    """Return an integer tensor of the same shape (B, S) with the column number of each entry."""
    return torch.arange(values.shape[1], device=values.device).expand(values.shape)


# ------------------------------------------------------------------------------- across processes


def world_size() -> int:
    """Return the number of processes that train together: 1 without `torch.distributed`."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def first_row(count: int) -> int:
    """Return the number of this process's first pair in the batch of all processes, from 0.

    Each process has `count` pairs.
    """
    return dist.get_rank() * count if world_size() > 1 else 0


@torch.compiler.disable
def gather_rows(rows: Tensor) -> Tensor:
    """Concatenate rows (B, ...) of processes in rank order, with gradients: (W·B, ...)."""
    return rows if world_size() == 1 else _AllGather.apply(rows)


class _AllGather(torch.autograd.Function):
    """Concatenate the rows of every process. The backward pass sums, and returns the own part."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.count = rows.shape[0]
        gathered = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, rows.contiguous())
        return torch.cat(gathered)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # Not every backend has `reduce_scatter`, and the gradients of the weights are far larger.
        total = sum_over_processes(gradient.contiguous())
        return total.narrow(0, first_row(ctx.count), ctx.count)


@torch.compiler.disable
def sum_over_processes(value: Tensor) -> Tensor:
    """Return the element-wise sum of a tensor over all processes, without gradient."""
    if world_size() == 1:
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def mean_over_processes(value: Tensor) -> Tensor:
    """Return the element-wise mean of a tensor over all processes, without gradient."""
    return sum_over_processes(value) / world_size()
