"""Compare loss and gradients of every fast path with the padded computation in float64.

    python -m benchmarks.correctness --device cuda

It takes small encoders of four classes, every objective and pairs of uneven lengths. The paths
without dropout are float32, bfloat16 autocast, `torch.compile`, and GradCache in float32. Each
line has the relative errors of loss and gradients. The float64 computation runs on the CPU.

The paths with dropout are "dropout" (float32) and "dropout, bf16". Two computations never draw the
same dropout masks. So the encoder's states, their gradients, and the squares and products of both
are averaged over `--draws`, and compared with those of padded rows on the same device. Each line
has the largest excess: the squared distance of two means, divided by its expectation if both
computations are the same. It is near 1 if a path is right.

The command fails if a path is wrong.
"""

import argparse
import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.timing import machine_parser, prepare_machine, save
from benchmarks.workload import OBJECTIVES, Batch, backward, cached_backward
from dap.reports import text_table
from encoder_dap import first_tokens
from modeling_dap import DAPConfig, DAPForPreTraining
from states_dap import last_states, layer_stack

ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
WORDS, MASK, PAD = 300, 4, 1
#: Path -> largest relative error of the loss, and of the gradients as one vector.
ALLOWED = {
    "float32": (1e-4, 1e-3),
    "bf16": (2e-2, 1e-1),
    "compiled": (1e-4, 1e-3),
    "cached": (1e-4, 1e-3),
}
#: Path with dropout -> whether it runs under bfloat16 autocast.
WITH_DROPOUT = {"dropout": False, "dropout, bf16": True}
DROPOUT = 0.1
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
    loss = backward(lambda batch: plain(**batch).loss, batch)
    return loss.item(), gradient(plain)


def padded(model: DAPForPreTraining) -> DAPForPreTraining:
    """Make a model compute padded rows with torch's attention ("sdpa"), and return it.

    The model is changed in place: its encoder, and the RTL head if it has one.
    """
    for encoder in [model.dap.encoder, *([model.rtl_head.blocks] if model.rtl_head else [])]:
        encoder.set_attn_implementation("sdpa")
    return model


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
        cached_backward(model, 5, batch)
        return None, gradient(model)
    if path == "compiled":
        for layer in layer_stack(model.dap.encoder)[1]:  # as the trainer's --torch_compile
            layer.compile(dynamic=True)
    loss = backward(lambda batch: model(**batch).loss, batch, bf16=path == "bf16")
    return loss.item(), gradient(model)


def draw(
    encoder: PreTrainedModel, batch: Batch, draws: int, only_first: bool, bf16: bool
) -> list[Tensor]:
    """Run an encoder with many dropout masks, and return what each draw computes.

    Squares and products are returned as well, so that means over the draws can be compared. Only
    the source side of the batch is used.

    Args:
        encoder: the encoder.
        batch: B pairs.
        draws: number of copies of each sentence, each with masks of its own.
        only_first: read the first token's state only, as CLS pooling does. Otherwise read all.
        bf16: run under bfloat16 autocast.

    Returns:
        Five float64 tensors (draws, values). The first holds the states that are read. The second
        holds the gradients of a fixed weighted sum of these states, at the input embeddings. Then
        come the squares of the states and of the gradients. The last holds the product of state and
        gradient at the first token.
    """
    ids = batch["source_input_ids"]
    mask = batch["source_attention_mask"]  # (B, S)
    read = first_tokens(mask) if only_first else mask.bool()  # (B, S)
    embeds = encoder.get_input_embeddings()(ids).detach()  # (B, S, D)
    embeds = embeds.repeat(draws, 1, 1).requires_grad_()  # (draws * B, S, D)
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        states = last_states(
            encoder,
            mask.repeat(draws, 1),
            read.repeat(draws, 1) if only_first else None,
            inputs_embeds=embeds,
        )
    states = states.float()
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(*ids.shape, states.shape[-1], generator=generator)  # (B, S, D)
    direction = (direction.to(ids.device) * read.unsqueeze(-1)).repeat(draws, 1, 1)
    (states * direction).sum().backward()

    shape = (draws, *ids.shape, states.shape[-1])
    found = states.detach().reshape(shape).double().cpu()  # (draws, B, S, D)
    slopes = embeds.grad.reshape(shape).double().cpu()
    read, mask = read.cpu(), mask.bool().cpu()
    first = first_tokens(mask)
    first_product = found[:, first] * slopes[:, first]
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
    """Compare the fast ways of running an encoder with padded rows, under dropout.

    Args:
        args: the command line, which names the encoders, paths, draws and device.

    Returns:
        A dictionary per encoder, path and choice of tokens: "encoder", "objective" ("first token"
        or "all tokens"), "path", "loss" (largest `excess` of the states), "gradient" (largest
        `excess` of their gradients), and "fine" (whether both are small enough).
    """
    batch = {key: value.to(args.device) for key, value in uneven_batch().items()}
    found = []
    for name in args.encoders:
        model = build(name, "tr", DROPOUT).to(args.device)
        reference = padded(copy.deepcopy(model))
        for path in [path for path in args.paths if path in WITH_DROPOUT]:
            for only_first in (False, True):
                options = (batch, args.draws, only_first, WITH_DROPOUT[path])
                ours = draw(model.dap.encoder, *options)
                theirs = draw(reference.dap.encoder, *options)
                excesses = [excess(*pair) for pair in zip(ours, theirs, strict=True)]
                line = {
                    "encoder": name,
                    "objective": "first token" if only_first else "all tokens",
                    "path": path,
                    "loss": max(excesses[0::2]),
                    "gradient": max(excesses[1::2]),
                    "fine": max(excesses) <= ALLOWED_EXCESS,
                }
                found.append(line)
    return found


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

    Raises:
        ValueError: a path is wrong. Table and file are written before.
    """
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=ENCODERS)
    paths = [*ALLOWED, *WITH_DROPOUT]
    parser.add_argument("--paths", nargs="+", choices=paths, default=paths)
    parser.add_argument("--draws", type=int, default=200, help="draws of dropout masks")
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = []
    if any(path in ALLOWED for path in args.paths):
        found += compare(args)
    if any(path in WITH_DROPOUT for path in args.paths):
        found += compare_with_dropout(args)
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
