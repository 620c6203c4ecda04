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

The path "dropout, cached" is GradCache, which computes a chunk twice and must draw the same masks
again. Its gradients are compared with those of a plain step. Each line has their relative error.

The command fails if a path is wrong.
"""

import argparse
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.timing import machine_parser, save
from benchmarks.workload import OBJECTIVES, Batch, backward, cached_backward
from dap_transformers.tables import text_table
from modeling_dap import DAPConfig, DAPForPreTraining
from states_dap import first_tokens, last_states, layer_stack

ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
WORDS, MASK, PAD = 300, 4, 1
PAIRS, LONGEST = 12, 24  # of the batch: tokens of a row
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
CACHED = ("dropout, cached",)
DROPOUT = 0.3
CHUNK = 5  # pairs of a chunk of GradCache
#: Largest excess of states, gradients, their squares or their product.
ALLOWED_EXCESS = 1.5


class Line(NamedTuple):
    """The result of one comparison: relative errors or, for `BY_MEANS`, the largest excesses."""

    encoder: str
    objective: str  # or, for `BY_MEANS`, which states are read
    path: str
    loss: float  # for `BY_MEANS`, of the states
    gradient: float
    fine: bool


def encoder_config(name: str, dropout: float = 0.0) -> PreTrainedConfig:
    """Return the configuration of an encoder with three layers.

    ModernBERT's attention window is shorter than the sentences, so that the window matters.
    """
    if name == "modernbert":
        more = {"local_attention": 8, "embedding_dropout": dropout, "mlp_dropout": dropout}
        more |= {"attention_dropout": dropout, "bos_token_id": 0, "cls_token_id": 0}
        more |= {"eos_token_id": 2, "sep_token_id": 2}
    else:
        more = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return AutoConfig.for_model(
        name,
        vocab_size=WORDS,
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=80,
        pad_token_id=PAD,
        **more,
    )


def build(name: str, objective: str, dropout: float = 0.0) -> DAPForPreTraining:
    """Return a model in training mode, with the same random weights in every call.

    The weights are so large that an error in any of them changes the loss.
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


def uneven_batch() -> Batch:
    """Return random pairs whose sentences have 3 to `LONGEST` tokens.

    The batch also has the random numbers that choose masked tokens, so all paths mask the same
    tokens.
    """
    generator = torch.Generator().manual_seed(0)
    batch: Batch = {}
    for side in ("source", "target"):
        lengths = torch.randint(3, LONGEST + 1, (PAIRS, 1), generator=generator)
        mask = (torch.arange(LONGEST) < lengths).long()  # (B, S)
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


def relative_error(ours: Tensor, wanted: Tensor) -> float:
    """Return the Euclidean distance of two vectors, divided by the length of the second."""
    return ((ours - wanted).norm() / wanted.norm()).item()


def stacks(model: DAPForPreTraining) -> list[PreTrainedModel]:
    """Return the parts of a model that have transformer layers: encoder and RTL head."""
    if model.rtl_head is None:
        return [model.dap.encoder]
    return [model.dap.encoder, model.rtl_head.blocks]


def padded(model: DAPForPreTraining) -> DAPForPreTraining:
    """Return a copy of a model that computes padded rows with torch's attention ("sdpa").

    Transformers' eager attention is not used, because it gives NaN for ModernBERT.
    """
    copied = copy.deepcopy(model)
    for encoder in stacks(copied):
        encoder.set_attn_implementation("sdpa")
    return copied


def compile_layers(model: DAPForPreTraining) -> None:
    """Compile each layer of a model, as `--torch_compile` of the training does."""
    for encoder in stacks(model):
        for layer in layer_stack(encoder)[1]:
            layer.compile(dynamic=True)


# --------------------------------------------------------------------------------- no dropout


def compare(name: str, args: argparse.Namespace) -> Iterator[Line]:
    """Compare loss and gradients of the paths of `ALLOWED` with float64 on padded rows."""
    batch = uneven_batch()
    on_device = {key: value.to(args.device) for key, value in batch.items()}
    for short, objective in OBJECTIVES.items():
        model = build(name, objective)
        plain = padded(model).double()
        loss = backward(plain, batch).item()
        wanted = gradient(plain)
        for path in [path for path in args.paths if path in ALLOWED]:
            copied = copy.deepcopy(model).to(args.device)
            loss_error = 0.0  # of GradCache, which computes the loss in parts
            if path == "cached":
                cached_backward(copied, CHUNK, on_device)
            else:
                if path == "compiled":
                    compile_layers(copied)
                ours = backward(copied, on_device, bf16=path == "bf16").item()
                loss_error = abs(ours / loss - 1)
            error = relative_error(gradient(copied), wanted)
            most_loss, most = ALLOWED[path]
            fine = loss_error <= most_loss and error <= most
            yield Line(name, short, path, loss_error, error, fine)


# ------------------------------------------------------------------ dropout, by means of draws


class Computation(NamedTuple):
    """A part of a model that draws dropout masks, and its input."""

    #: Computes states (N·B, S', D) of N copies of the input: `embeds` is (N·B, S, D).
    run: Callable[[Tensor], Tensor]
    embeds: Tensor  # (B, S, D)
    mask: Tensor  # (B, S) bool, the real tokens of the input
    read: Tensor  # (B, S') bool, the states that are read


def computations(model: DAPForPreTraining, batch: Batch, draws: int) -> dict[str, Computation]:
    """Return what to compute with `draws` copies of each pair, by the states that are read.

    For the RTL head, the word embeddings of the sources stand for the encoder's states, and those
    of the targets for the queries.
    """
    encoder = model.dap.encoder
    words = model.get_input_embeddings()
    embeds = words(batch["source_input_ids"]).detach()  # (B, S, D)
    queries = words(batch["target_input_ids"]).detach().repeat(draws, 1, 1)  # (N·B, S', D)
    mask, targets = batch["source_attention_mask"], batch["target_attention_mask"]
    masks, target_masks = mask.repeat(draws, 1), targets.repeat(draws, 1)
    first = first_tokens(mask)  # (B, S)
    firsts = first.repeat(draws, 1)

    def all_states(embeds: Tensor) -> Tensor:
        return last_states(encoder, masks, None, inputs_embeds=embeds)

    def first_states(embeds: Tensor) -> Tensor:
        return last_states(encoder, masks, firsts, inputs_embeds=embeds)

    def head_states(embeds: Tensor) -> Tensor:
        return model.rtl_head(embeds, masks, queries, target_masks, None)

    return {
        "all tokens": Computation(all_states, embeds, mask.bool(), mask.bool()),
        "first token": Computation(first_states, embeds, mask.bool(), first),
        "RTL head": Computation(head_states, embeds, mask.bool(), targets.bool()),
    }


def draw(computation: Computation, draws: int, bf16: bool = False) -> list[Tensor]:
    """Compute states with many dropout masks, and return what each draw gives.

    Squares and products are returned as well, so that means over the draws can be compared.

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
    values = [found[:, read], slopes[:, mask]]
    first_product = found[:, first_tokens(read)] * slopes[:, first_tokens(mask)]
    moments = [*values, *(value.square() for value in values), first_product]
    return [moment.flatten(1) for moment in moments]


def excess(ours: Tensor, theirs: Tensor) -> float:
    """Return the squared distance of two means, divided by its expectation for equal means.

    It is near 1 if both computations (draws, values) are the same, and larger if one is wrong.
    """
    distance = (ours.mean(0) - theirs.mean(0)).square().sum()
    expected = (ours.var(0) + theirs.var(0)).sum() / len(ours)
    return (distance / expected).item()


def compare_with_dropout(name: str, args: argparse.Namespace) -> Iterator[Line]:
    """Compare the paths of `BY_MEANS` with padded rows: encoder and RTL head under dropout."""
    batch = {key: value.to(args.device) for key, value in uneven_batch().items()}
    model = build(name, "tr+rtl", DROPOUT).to(args.device)
    reference = computations(padded(model), batch, args.draws)
    for path in [path for path in args.paths if path in BY_MEANS]:
        copied = copy.deepcopy(model)
        if path == "dropout, compiled":
            compile_layers(copied)
        bf16 = path == "dropout, bf16"
        for what, ours in computations(copied, batch, args.draws).items():
            moments = draw(ours, args.draws, bf16)
            theirs = draw(reference[what], args.draws, bf16)
            excesses = [excess(*pair) for pair in zip(moments, theirs, strict=True)]
            fine = all(each <= ALLOWED_EXCESS for each in excesses)  # False for NaN
            yield Line(name, what, path, max(excesses[0::2]), max(excesses[1::2]), fine)


# ------------------------------------------------------------------------ dropout of GradCache


def compare_cached(name: str, args: argparse.Namespace) -> Iterator[Line]:
    """Compare GradCache in a single chunk with a plain step that has the dropout of its seed."""
    from dap_transformers.training.grad_cache import CachedBatch, seeded

    batch = {key: value.to(args.device) for key, value in uneven_batch().items()}
    for short, objective in OBJECTIVES.items():
        model = build(name, objective, DROPOUT).to(args.device)
        cached = CachedBatch(model, model, batch, PAIRS)
        (part,) = cached.parts
        with seeded(part.seed, torch.device(args.device)):
            backward(model, part.inputs)
        wanted = gradient(model)
        model.zero_grad()
        cached.run(part).backward()
        error = relative_error(gradient(model), wanted)
        yield Line(name, short, CACHED[0], 0.0, error, error <= ALLOWED["cached"][1])


def main(argv: list[str] | None = None) -> None:
    """Compare the fast paths with the padded computation, print a table, and write `--json`."""
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=ENCODERS)
    paths = [*ALLOWED, *BY_MEANS, *CACHED]
    parser.add_argument("--paths", nargs="+", choices=paths, default=paths)
    parser.add_argument("--draws", type=int, default=200, help="draws of dropout masks")
    args = parser.parse_args(argv)
    found: list[Line] = []
    kinds = ((ALLOWED, compare), (BY_MEANS, compare_with_dropout), (CACHED, compare_cached))
    for name in args.encoders:
        for paths, comparison in kinds:
            if set(args.paths) & set(paths):
                found += comparison(name, args)

    rows = []
    for line in found:
        verdict = "ok" if line.fine else "WRONG"
        rows.append([*line[:3], f"{line.loss:.1e}", f"{line.gradient:.1e}", verdict])
    print(text_table(["encoder", "objective", "path", "loss", "gradient", ""], rows))
    save(args, {"lines": [line._asdict() for line in found]})
    wrong = [" ".join(line[:3]) for line in found if not line.fine]
    if wrong:
        raise ValueError(f"differs from padded rows: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
