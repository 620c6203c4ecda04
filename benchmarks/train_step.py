"""Time a training step of TR, TLM, DAP and BOW beside the ranking loss of sentence-transformers.

    OMP_NUM_THREADS=1 python -m benchmarks.train_step --repeats 5 --json step.json
    python -m benchmarks.train_step --device cuda --bf16 --size xlmr --batch_size 1024 --optimizer

All contenders train the same weights on the same token ids, and run in turn. A step is forward and
backward; with `--optimizer` it includes fused AdamW. Before the timing, our TR must give the same
loss and gradients as sentence-transformers.

Each contender's share of the machine's rates compares it with plain matrix products in float32 and
in bfloat16. The useful work is three times the forward products of the real tokens, without
padding. The rates are those of an encoder layer's weight products over as many tokens, measured in
turn with the contenders.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity

from benchmarks.flops import real_token_flops
from benchmarks.timing import (
    CPU,
    WALL,
    LayerProducts,
    alternate,
    machine_parser,
    save,
    synchronise,
)
from benchmarks.workload import (
    OBJECTIVES,
    Batch,
    Workload,
    add_workload_arguments,
    backward,
    token_counts,
    word_tokenizer,
)
from dap_transformers.memory import keep_freed_memory
from dap_transformers.tables import text_table
from states_dap import layer_stack

LIBRARY = "sentence-transformers"
#: Plain matrix products, by the name of their contender.
PRODUCTS = {"float32 products": torch.float32, "bfloat16 products": torch.bfloat16}
SCALE = 20.0  # 1 / tr_temperature


class LibraryModel(nn.Module):
    """The ranking loss of sentence-transformers, on the parameters of our encoder."""

    def __init__(self, workload: Workload) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        super().__init__()
        with tempfile.TemporaryDirectory(prefix="dap-step-") as folder:
            workload.encoder.save_pretrained(folder)
            word_tokenizer().save_pretrained(folder)
            transformer = Transformer(
                folder, model_kwargs={"add_pooling_layer": False, "attn_implementation": "sdpa"}
            )
        self.encoder = transformer.auto_model
        for name, parameter in workload.encoder.named_parameters():
            place, _, leaf = name.rpartition(".")
            setattr(self.encoder.get_submodule(place), leaf, parameter)
        pooling = Pooling(workload.config.hidden_size, pooling_mode="cls")
        model = SentenceTransformer(modules=[transformer, pooling], device="cpu")
        self.loss = MultipleNegativesRankingLoss(model, scale=SCALE)

    def forward(self, **batch: Tensor) -> SimpleNamespace:
        """Return an output that has the loss of a batch of ours."""
        names = ("input_ids", "attention_mask")
        features = []
        for side in ("source", "target"):
            features.append({name: batch[f"{side}_{name}"] for name in names})
        return SimpleNamespace(loss=self.loss(features, None))


def compile_layers(models: nn.ModuleDict) -> None:
    """Compile our layers as the trainer's `--torch_compile` does, and the library's encoder."""
    for model in models.values():
        if isinstance(model, LibraryModel):
            model.encoder.compile(dynamic=True)
        else:
            for layer in layer_stack(model.dap.encoder)[1]:
                layer.compile(dynamic=True)


def check_equal(models: nn.ModuleDict, workload: Workload, batch: Batch) -> dict[str, float]:
    """Check that our TR and sentence-transformers have the same loss and gradients.

    Dropout is off during the check.

    Returns:
        "loss" is our loss. "gradient" is the Euclidean length of our gradient. "gradient_error" is
        the relative difference of the two gradients.
    """
    models.eval()
    losses = []
    gradients = []
    for name in ("TR", LIBRARY):
        losses.append(backward(models[name], batch).item())
        used = [part.grad for part in workload.encoder.parameters() if part.grad is not None]
        gradients.append(torch.cat([part.flatten() for part in used]))
        models.zero_grad()
    models.train()
    (ours, theirs), (gradient, wanted) = losses, gradients
    error = ((gradient - wanted).norm() / wanted.norm()).item()
    if not (abs(ours / theirs - 1) <= 1e-4 and error <= 1e-2):  # also for NaN
        raise ValueError(
            f"our TR gives {ours:.6f} and {LIBRARY} {theirs:.6f}, gradients {error:.1e} off"
        )
    return {"loss": ours, "gradient": gradient.norm().item(), "gradient_error": error}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Time a training step of all contenders.

    Returns:
        "check" -> the result of `check_equal`, or None with `--no_library`. "contenders" -> for
        each contender and each of `PRODUCTS`, `WALL` and `CPU` (median seconds), "runs" (the single
        times), "flops" (useful FLOPs of a step, without padding), "rate" (useful GFLOP per second
        of wall-clock time), and "of float32 products" and "of bfloat16 products" (its rate, as a
        share of theirs).
    """
    workload = Workload(args)
    models = workload.models
    if args.library:
        models[LIBRARY] = LibraryModel(workload)
    lengths = token_counts(workload.batch(args.batch_size))
    useful = {}
    for name, model in models.items():
        useful[name] = 3 * real_token_flops(model, workload, lengths)

    models.to(args.device)
    batch = workload.batch(args.batch_size)
    check = check_equal(models, workload, batch) if args.library else None
    if args.compile:
        compile_layers(models)
    # One optimizer for all contenders: it skips parameters without gradient.
    optimizer = AdamW(models.parameters(), lr=1e-12, fused=True)

    def step(model: nn.Module) -> None:
        optimizer.zero_grad()
        backward(model, batch, args.bf16)
        if args.optimizer:
            optimizer.step()

    steps: dict[str, Callable[[], None]] = {}
    for name, model in models.items():
        steps[name] = partial(step, model)
    for name, dtype in PRODUCTS.items():
        products = LayerProducts(workload.config, sum(map(sum, lengths)), args.device, dtype)
        steps[name] = products
        useful[name] = products.flops
    found = alternate(steps, args.repeats, args.device, args.warm_up)
    if args.profile:
        print(profile(steps[args.profile], args.device))
    add_rates(found, useful)
    return {"check": check, "contenders": found}


def add_rates(found: dict[str, dict[str, Any]], useful: dict[str, int]) -> None:
    """Add to each contender its useful FLOPs, its rate, and this as a share of all `PRODUCTS`."""
    for name, part in found.items():
        part["flops"] = useful[name]
        part["rate"] = useful[name] / part[WALL] / 1e9
    for part in found.values():
        for products in PRODUCTS:
            part[f"of {products}"] = part["rate"] / found[products]["rate"]


def profile(step: Callable[[], None], device: str) -> str:
    """Profile one step, and return tables of the 15 operations with the most time of their own.

    On a GPU a second table is sorted by the GPU's own time.
    """
    activities = [ProfilerActivity.CPU]
    orders = ["self_cpu_time_total"]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        orders.append("self_device_time_total")
    with torch.profiler.profile(activities=activities) as found:
        step()
        synchronise(device)
    operations = found.key_averages()
    tables = []
    for order in orders:
        tables.append(operations.table(sort_by=order, row_limit=15, max_name_column_width=40))
    return "\n".join(tables)


def table(found: dict[str, dict[str, Any]], pairs: int) -> str:
    """Format times, ratios and shares of the machine's rates of a step of so many pairs."""
    bases = [name for name in ("TR", LIBRARY) if name in found]
    header = [f"step of {pairs} pairs"]
    for clock in (WALL, CPU):
        header += [f"{clock} ms / pair", *(f"/ {base}" for base in bases)]
    header += ["GFLOPs / pair", "GFLOP / s"]
    for name in PRODUCTS:
        header.append(f"of {name} ({found[name]['rate']:.0f})")
    lines = []
    for name, part in found.items():
        if name in PRODUCTS:
            continue
        line = [name]
        for clock in (WALL, CPU):
            line.append(f"{1e3 * part[clock] / pairs:.2f}")
            line += [f"{part[clock] / found[base][clock]:.2f}" for base in bases]
        line += [f"{part['flops'] / pairs / 1e9:.2f}", f"{part['rate']:.0f}"]
        line += [f"{part[f'of {products}']:.0%}" for products in PRODUCTS]
        lines.append(line)
    return text_table(header, lines)


def main(argv: list[str] | None = None) -> None:
    """Time all contenders, print the table, and write everything to `--json`."""
    parser = machine_parser(__doc__, repeats=7)
    add_workload_arguments(parser)
    parser.add_argument("--optimizer", action="store_true", help="also a fused AdamW step")
    parser.add_argument("--compile", action="store_true", help="torch.compile for every contender")
    parser.add_argument(
        "--warm_up", type=int, default=1, help="steps of each contender before the first round"
    )
    parser.add_argument(
        "--no_library", dest="library", action="store_false", help=f"without {LIBRARY}"
    )
    parser.add_argument("--profile", choices=list(OBJECTIVES), help="then profile a step of it")
    args = parser.parse_args(argv)
    keep_freed_memory()  # as all our commands do
    found = compare(args)
    print(table(found["contenders"], args.batch_size))
    save(args, found)


if __name__ == "__main__":
    main()
