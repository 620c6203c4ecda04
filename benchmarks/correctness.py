"""Compare loss and gradients of every fast path with the padded computation in float64.

    python -m benchmarks.correctness --device cuda

It takes small encoders of four classes, every objective and pairs of uneven lengths. The paths
without dropout are float32, bfloat16 autocast, `torch.compile`, and GradCache in float32. Each
line has the relative errors of loss and gradients. The float64 computation runs on the CPU.

The paths with dropout are "dropout" (float32), "dropout, bf16" and "dropout, compiled". Two
computations never draw the same dropout masks. So the states of the encoder and of the RTL head,
their gradients, and the squares and products of both are averaged over `--draws`, and compared with
those of padded rows on the same device. Each line has the largest excess: the squared distance of
two means, divided by its expectation if both computations are the same. It is near 1 if a path is
right.

The path "dropout, cached" is GradCache. Its gradients are compared with those of all chunks in one
graph, where each chunk has the seed that GradCache has drawn for it. Each line has the relative
error of the gradients.

The command fails if a path is wrong.
"""

import argparse
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.timing import machine_parser, save
from benchmarks.workload import OBJECTIVES, Batch, backward, cached_backward
from dap_transformers.tables import text_table
from modeling_dap import DAPConfig, DAPForPreTraining
from objectives_dap import Comparison, Pairs, Sentences
from states_dap import first_tokens, last_states, layer_stack

ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
WORDS, MASK, PAD = 300, 4, 1
#: Path -> largest relative error of the loss, and of the gradients as one vector.
ALLOWED = {
    "float32": (1e-4, 1e-3),
    "bf16": (2e-2, 1e-1),
    "compiled": (1e-4, 1e-3),
    "cached": (1e-4, 1e-3),
}
#: Paths with dropout whose means over many draws are compared with those of padded rows.
BY_MEANS = ("dropout", "dropout, bf16", "dropout, compiled")
#: GradCache with dropout, which draws the same masks as a plain step with its seeds.
CACHED_DROPOUT = "dropout, cached"
DROPOUT = 0.3
#: Pairs of a chunk of GradCache.
CHUNK = 5
#: Largest excess of states, gradients, their squares or their product.
ALLOWED_EXCESS = 1.5


def encoder_config(name: str, dropout: float = 0.0) -> PreTrainedConfig:
    """Return the configuration of an encoder with three layers.

    ModernBERT's attention window is shorter than the sentences, so that the window matters.

    Args:
        name: model type of Transformers, one of `ENCODERS`.
        dropout: probability of every dropout.
    """
    shape = {
        "vocab_size": WORDS,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    shape |= {"intermediate_size": 256, "max_position_embeddings": 80, "pad_token_id": PAD}
    if name == "modernbert":
        ids = {"bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
        ids |= {"local_attention": 8, "global_attn_every_n_layers": 3}
        drops = ("embedding_dropout", "attention_dropout", "mlp_dropout")
    else:
        ids = {}
        drops = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    return AutoConfig.for_model(name, **shape, **ids, **dict.fromkeys(drops, dropout))


def build(name: str, objective: str, dropout: float = 0.0) -> DAPForPreTraining:
    """Return a model with random weights, in training mode.

    The weights are so large that an error in any of them changes the loss. They are the same in
    every call.

    Args:
        name: model type of the encoder, one of `ENCODERS`.
        objective: objective of the model, such as "tr+rtl".
        dropout: probability of every dropout.
    """
    torch.manual_seed(0)
    config = DAPConfig(encoder_config(name, dropout), objective=objective, mask_token_id=MASK)
    model = DAPForPreTraining(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            parameter.data.add_(0.1)
    return model.train()


def uneven_batch(pairs: int = 12, longest: int = 24) -> Batch:
    """Return a batch of random pairs whose sentences have 3 to `longest` tokens.

    The batch also has the random numbers that choose masked tokens, so all paths mask the same
    tokens.

    Args:
        pairs: number of pairs.
        longest: most tokens of a sentence. All rows are padded to it.

    Returns:
        Name of a model's input -> tensor (pairs, longest).
    """
    generator = torch.Generator().manual_seed(0)
    batch: Batch = {}
    for side in ("source", "target"):
        lengths = torch.randint(3, longest + 1, (pairs, 1), generator=generator)
        mask = (torch.arange(longest) < lengths).long()  # (B, S)
        ids = torch.randint(5, WORDS, mask.shape, generator=generator).masked_fill(mask == 0, PAD)
        batch[f"{side}_input_ids"] = ids
        batch[f"{side}_attention_mask"] = mask
        batch[f"{side}_noise"] = torch.rand(mask.shape, generator=generator)
    return batch


def gradient(model: DAPForPreTraining) -> Tensor:
    """Return the gradients of all parameters as one float64 vector on the CPU.

    A parameter without a gradient gives zeros.
    """
    parts = []
    for parameter in model.parameters():
        part = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts.append(part.flatten().double().cpu())
    return torch.cat(parts)


def reference(model: DAPForPreTraining, batch: Batch) -> tuple[float, Tensor]:
    """Compute loss and gradients in the simplest way: padded rows, torch's attention, float64.

    Transformers' eager attention is not used, because it gives NaN for ModernBERT.

    Args:
        model: the model. A copy of it is used.
        batch: the pairs, on the CPU.

    Returns:
        The loss, and the gradients of all parameters as one float64 vector.
    """
    plain = padded(copy.deepcopy(model).double())
    loss = backward(plain, batch)
    return loss.item(), gradient(plain)


def stacks(model: DAPForPreTraining) -> list[PreTrainedModel]:
    """Return the parts of a model that have transformer layers: encoder and RTL head."""
    if model.rtl_head is None:
        return [model.dap.encoder]
    return [model.dap.encoder, model.rtl_head.blocks]


def padded(model: DAPForPreTraining) -> DAPForPreTraining:
    """Make a model compute padded rows with torch's attention ("sdpa"), and return it.

    The model is changed in place: its encoder, and the RTL head if it has one.
    """
    for encoder in stacks(model):
        encoder.set_attn_implementation("sdpa")
    return model


def compile_layers(model: DAPForPreTraining) -> None:
    """Compile each layer of a model, as `--torch_compile` of the training does."""
    for encoder in stacks(model):
        for layer in layer_stack(encoder)[1]:
            layer.compile(dynamic=True)


def by_path(path: str, model: DAPForPreTraining, batch: Batch) -> tuple[float | None, Tensor]:
    """Compute loss and gradients on one of the fast paths.

    Args:
        path: key of `ALLOWED`: "float32", "bf16", "compiled" or "cached" (GradCache).
        model: the model. It is changed: its gradients are set, and "compiled" compiles its layers.
        batch: the pairs, on the model's device.

    Returns:
        The loss, and the gradients of all parameters as one float64 vector. The loss is None for
        GradCache, which computes it in parts.
    """
    if path == "cached":
        cached_backward(model, CHUNK, batch)
        return None, gradient(model)
    if path == "compiled":
        compile_layers(model)
    loss = backward(model, batch, bf16=path == "bf16")
    return loss.item(), gradient(model)


class Computation(NamedTuple):
    """A part of a model that draws dropout masks, and its input."""

    #: Computes states (N·B, S', D) of N copies of the input: `embeds` is (N·B, S, D).
    run: Callable[[Tensor], Tensor]
    embeds: Tensor  # (B, S, D)
    mask: Tensor  # (B, S) bool, the real tokens of the input
    read: Tensor  # (B, S') bool, the states that are read


def embed(model: DAPForPreTraining, ids: Tensor) -> Tensor:
    """Return the word embeddings (B, S, D) of token ids (B, S), without gradients."""
    return model.get_input_embeddings()(ids).detach()


def encoder_states(
    model: DAPForPreTraining, batch: Batch, draws: int, only_first: bool
) -> Computation:
    """Return the computation of the encoder's states for the source side of a batch.

    Args:
        model: the model.
        batch: B pairs.
        draws: number of copies of each sentence.
        only_first: read the first token's state only, as CLS pooling does. Otherwise read all.
    """
    mask = batch["source_attention_mask"]  # (B, S)
    read = first_tokens(mask) if only_first else mask.bool()  # (B, S)
    masks = mask.repeat(draws, 1)  # (N·B, S)
    wanted = read.repeat(draws, 1) if only_first else None

    def run(embeds: Tensor) -> Tensor:
        return last_states(model.dap.encoder, masks, wanted, inputs_embeds=embeds)

    return Computation(run, embed(model, batch["source_input_ids"]), mask.bool(), read)


def head_states(model: DAPForPreTraining, batch: Batch, draws: int) -> Computation:
    """Return the computation of the RTL head's states for the target side of a batch.

    The word embeddings of the sources stand for the encoder's states, and those of the targets for
    the queries.

    Args:
        model: the model.
        batch: B pairs.
        draws: number of copies of each pair.
    """
    mask = batch["source_attention_mask"]  # (B, S)
    read = batch["target_attention_mask"]  # (B, S')
    masks = mask.repeat(draws, 1)
    wanted = read.repeat(draws, 1)
    queries = embed(model, batch["target_input_ids"]).repeat(draws, 1, 1)  # (N·B, S', D)

    def run(embeds: Tensor) -> Tensor:
        return model.rtl_head(embeds, masks, queries, wanted, None)

    return Computation(run, embed(model, batch["source_input_ids"]), mask.bool(), read.bool())


def draw(computation: Computation, draws: int, bf16: bool = False) -> list[Tensor]:
    """Compute states with many dropout masks, and return what each draw gives.

    Squares and products are returned as well, so that means over the draws can be compared.

    Args:
        computation: what to compute.
        draws: number of copies of each sentence, each with masks of its own.
        bf16: compute under bfloat16 autocast.

    Returns:
        Five float64 tensors (draws, values). The first holds the states that are read. The second
        holds the gradients of a fixed weighted sum of these states, at the input embeddings. Then
        come the squares of the states and of the gradients. The last holds the product of state and
        gradient at the first token.
    """
    read, mask = computation.read, computation.mask
    device = mask.device.type
    embeds = computation.embeds.repeat(draws, 1, 1).requires_grad_()  # (N·B, S, D)
    with torch.autocast(device, torch.bfloat16, enabled=bf16):
        states = computation.run(embeds).float()  # (N·B, S', D)
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(*read.shape, states.shape[-1], generator=generator)  # (B, S', D)
    direction = (direction.to(device) * read.unsqueeze(-1)).repeat(draws, 1, 1)
    (states * direction).sum().backward()

    found = states.detach().unflatten(0, (draws, -1)).double().cpu()  # (N, B, S', D)
    slopes = embeds.grad.unflatten(0, (draws, -1)).double().cpu()  # (N, B, S, D)
    read, mask = read.cpu(), mask.cpu()
    first_product = found[:, first_tokens(read)] * slopes[:, first_tokens(mask)]
    values = [found[:, read], slopes[:, mask]]
    moments = [*values, *(value.square() for value in values), first_product]
    return [moment.flatten(1) for moment in moments]


def excess(ours: Tensor, theirs: Tensor) -> float:
    """Return the squared distance of two means, divided by its expectation for equal means.

    It is near 1 if both computations are the same, and larger if one of them is wrong.

    Args:
        ours: (draws, values) of one computation.
        theirs: (draws, values) of the other computation.
    """
    distance = (ours.mean(0) - theirs.mean(0)).square().sum()
    expected = (ours.var(0) + theirs.var(0)).sum() / len(ours)
    return (distance / expected).item()


def compare_with_dropout(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare the fast ways of running encoder and RTL head with padded rows, under dropout.

    Args:
        args: the command line, which names the encoders, paths, draws and device.

    Returns:
        A dictionary per encoder, path and choice of states: "encoder", "objective" ("first token",
        "all tokens" or "RTL head"), "path", "loss" (largest `excess` of the states), "gradient"
        (largest `excess` of their gradients), and "fine" (whether both are small enough).
    """
    batch = {key: value.to(args.device) for key, value in uneven_batch().items()}
    found = []
    for name in args.encoders:
        model = build(name, "tr+rtl", DROPOUT).to(args.device)
        reference = computations(padded(copy.deepcopy(model)), batch, args.draws)
        for path in [path for path in args.paths if path in BY_MEANS]:
            copied = copy.deepcopy(model)
            if path == "dropout, compiled":
                compile_layers(copied)
            is_half = path == "dropout, bf16"
            for what, ours in computations(copied, batch, args.draws).items():
                moments = draw(ours, args.draws, is_half)
                theirs = draw(reference[what], args.draws, is_half)
                excesses = [excess(*pair) for pair in zip(moments, theirs, strict=True)]
                line = {
                    "encoder": name,
                    "objective": what,
                    "path": path,
                    "loss": max(excesses[0::2]),
                    "gradient": max(excesses[1::2]),
                    "fine": max(excesses) <= ALLOWED_EXCESS,
                }
                found.append(line)
    return found


def computations(model: DAPForPreTraining, batch: Batch, draws: int) -> dict[str, Computation]:
    """Return what to compute with a model under dropout, by the name of the states that are read.

    Args:
        model: the model, with an RTL head.
        batch: the pairs.
        draws: number of copies of each pair.
    """
    return {
        "all tokens": encoder_states(model, batch, draws, only_first=False),
        "first token": encoder_states(model, batch, draws, only_first=True),
        "RTL head": head_states(model, batch, draws),
    }


def compare_cached(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare GradCache with a plain step, where both draw the same dropout masks.

    Args:
        args: the command line.

    Returns:
        A dictionary per encoder and objective, as `compare` returns them. "loss" is 0, because
        GradCache computes the loss in parts.
    """
    batch = {key: value.to(args.device) for key, value in uneven_batch().items()}
    found = []
    for name in args.encoders:
        for short, objective in OBJECTIVES.items():
            model = build(name, objective, DROPOUT).to(args.device)
            ours, wanted = cached_gradients(model, batch)
            error = ((ours - wanted).norm() / wanted.norm()).item()
            line = {
                "encoder": name,
                "objective": short,
                "path": CACHED_DROPOUT,
                "loss": 0.0,
                "gradient": error,
                "fine": error <= ALLOWED["cached"][1],
            }
            found.append(line)
    return found


def cached_gradients(model: DAPForPreTraining, batch: Batch) -> tuple[Tensor, Tensor]:
    """Compute the gradients of a batch by GradCache, and by one graph of all chunks.

    Args:
        model: the model, with dropout.
        batch: the pairs, on the model's device.

    Returns:
        All gradients as one vector, by GradCache and by the graph. In both, a chunk has the dropout
        of its own seed.
    """
    from dap_transformers.training.grad_cache import CachedBatch, seeded

    cached = CachedBatch(model, model, batch, CHUNK)
    outs = []
    for part in cached.parts:
        with seeded(part.seed, batch["source_input_ids"].device):
            outs.append(model(**part.inputs, chunk=part.chunk))

    sides = []
    vectors = []
    for side in ("source", "target"):
        sides.append(Sentences(batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]))
        vectors.append(torch.cat([out[f"{side}_embeds"] for out in outs]))  # (B, D)
    total = 0
    for objective in model.objectives:
        if isinstance(objective, Comparison):
            loss, _ = objective.compare(tuple(vectors), Pairs(*sides))
        else:
            loss = sum(out.measures[f"{objective.name}_loss"] for out in outs)
        total = total + objective.weight * loss
    total.backward()
    wanted = gradient(model)

    model.zero_grad()
    for part in cached.parts:
        cached.run(part).backward()
    return gradient(model), wanted


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Compare loss and gradients of the fast paths with a plain float64 computation.

    There is no dropout here.

    Args:
        args: the command line, which names the encoders, paths and device.

    Returns:
        A dictionary per encoder, objective and path: "encoder", "objective", "path", "loss" and
        "gradient" (their relative errors), and "fine" (whether both are small enough).
    """
    batch = uneven_batch()
    on_device = {key: value.to(args.device) for key, value in batch.items()}
    found = []
    for name in args.encoders:
        for short, objective in OBJECTIVES.items():
            model = build(name, objective)
            loss, wanted = reference(model, batch)
            for path in [path for path in args.paths if path in ALLOWED]:
                copied = copy.deepcopy(model).to(args.device)
                ours, gradients = by_path(path, copied, on_device)
                loss_error = 0.0 if ours is None else abs(ours / loss - 1)
                gradient_error = ((gradients - wanted).norm() / wanted.norm()).item()
                most_loss, most_gradient = ALLOWED[path]
                line = {
                    "encoder": name,
                    "objective": short,
                    "path": path,
                    "loss": loss_error,
                    "gradient": gradient_error,
                    "fine": loss_error <= most_loss and gradient_error <= most_gradient,
                }
                found.append(line)
    return found


def main(argv: list[str] | None = None) -> None:
    """Compare the fast paths with the padded computation, print a table, and write it to `--json`.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=ENCODERS)
    paths = [*ALLOWED, *BY_MEANS, CACHED_DROPOUT]
    parser.add_argument("--paths", nargs="+", choices=paths, default=paths)
    parser.add_argument("--draws", type=int, default=200, help="draws of dropout masks")
    args = parser.parse_args(argv)
    found = []
    if any(path in ALLOWED for path in args.paths):
        found += compare(args)
    if any(path in BY_MEANS for path in args.paths):
        found += compare_with_dropout(args)
    if CACHED_DROPOUT in args.paths:
        found += compare_cached(args)
    rows = []
    wrong = []
    for part in found:
        case = [part["encoder"], part["objective"], part["path"]]
        verdict = "ok" if part["fine"] else "WRONG"
        rows.append([*case, f"{part['loss']:.1e}", f"{part['gradient']:.1e}", verdict])
        if not part["fine"]:
            wrong.append(" ".join(case))
    print(text_table(["encoder", "objective", "path", "loss", "gradient", ""], rows))
    save(args, {"lines": found})
    if wrong:
        raise ValueError(f"differs from padded rows: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
