"""Time a training step of TR, TLM and DAP beside the ranking loss of sentence-transformers.

    OMP_NUM_THREADS=1 python -m benchmarks.train_step --repeats 5 --json step.json
    python -m benchmarks.train_step --size small --batch_size 256 --mini_batch_size 32 --optimizer
    python -m benchmarks.train_step --device cuda --bf16 --size xlmr --batch_size 1024 \\
        --mini_batch_size 1024

All contenders train the same weights on the same token ids, and run in turn. A step is forward and
backward; with `--optimizer` it includes fused AdamW. Before the timing, our TR must give the same
loss and gradients as sentence-transformers.

The share of the matrix rate compares a step with plain matrix products. The useful work is three
times the forward products of the real tokens, without padding. The rate is that of an encoder
layer's weight products over as many tokens, measured in turn with the contenders.
"""

import argparse
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.profiler import ProfilerActivity

from benchmarks.flops import real_token_flops
from benchmarks.timing import (
    CPU,
    WALL,
    MatrixWork,
    alternate,
    machine_parser,
    prepare_machine,
    save,
)
from benchmarks.workload import (
    Batch,
    Loss,
    Workload,
    add_workload_arguments,
    backward,
    cached_backward,
    share_weights,
    token_counts,
    word_tokenizer,
)
from dap_transformers.errors import UserError
from dap_transformers.tables import text_table
from states_dap import layer_stack

LIBRARY, MATRIX = "sentence-transformers", "matrix products"
CACHED = " cached"  # ending of a contender's name if it runs in chunks
SCALE = 20.0  # 1 / tr_temperature


class LibraryLoss(nn.Module):
    """The ranking loss of sentence-transformers, on the parameters of our encoder.

    Args:
        workload: our models. The loss uses and trains the parameters of their encoder.
        mini_batch_size: pairs of a chunk for `CachedMultipleNegativesRankingLoss`. None takes
            `MultipleNegativesRankingLoss`.
    """

    def __init__(self, workload: Workload, mini_batch_size: int | None = None) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import losses
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        super().__init__()
        with tempfile.TemporaryDirectory(prefix="dap-step-") as folder:
            workload.encoder.save_pretrained(folder)
            word_tokenizer().save_pretrained(folder)
            transformer = Transformer(
                folder, model_kwargs={"add_pooling_layer": False, "attn_implementation": "sdpa"}
            )
        pooling = Pooling(workload.config.hidden_size, pooling_mode="cls")
        self.model = SentenceTransformer(modules=[transformer, pooling], device=workload.device)
        self.follow(workload)
        cached = {"mini_batch_size": mini_batch_size} if mini_batch_size else {}
        kind = (
            losses.CachedMultipleNegativesRankingLoss
            if cached
            else losses.MultipleNegativesRankingLoss
        )
        self.loss = kind(self.model, scale=SCALE, **cached)

    def follow(self, workload: Workload) -> None:
        """Move this loss to the workload's device, and let it use the parameters of its encoder."""
        self.to(workload.device)
        share_weights(self.model[0].auto_model, workload.encoder)

    def forward(self, batch: Batch) -> Tensor:
        """Return the ranking loss of sentence-transformers for a batch, a scalar.

        Args:
            batch: name of an input of our models, such as "source_input_ids" -> tensor.
        """
        names = ("input_ids", "attention_mask")
        features = []
        for side in ("source", "target"):
            features.append({name: batch[f"{side}_{name}"] for name in names})
        return self.loss(features, None)


def contenders(
    workload: Workload, losses: dict[str, Loss], batch: Batch, args: argparse.Namespace
) -> dict[str, Callable[[], object]]:
    """Return the contenders of the timing, each a forward and backward pass.

    If the batch is larger than `--mini_batch_size`, there are also cached contenders, which compute
    it in chunks. With `--compile`, the models are compiled in place.

    Args:
        workload: our models.
        losses: name -> function that computes the loss of a batch.
        batch: the pairs that all contenders train on.
        args: the command line.

    Returns:
        Name -> function without arguments, which computes the gradients of the batch and adds them
        to the parameters' `grad`.
    """
    size = args.mini_batch_size
    found: dict[str, Callable[..., object]] = {
        name: partial(backward, loss) for name, loss in losses.items()
    }
    if args.batch_size > size:
        found |= {
            name + CACHED: partial(cached_backward, model, size)
            for name, model in workload.models.items()
        }
        if args.library:
            losses = losses | {CACHED: LibraryLoss(workload, size)}
            found[LIBRARY + CACHED] = partial(backward, losses[CACHED])
    if args.compile:  # our layers as the trainer's --torch_compile, and the library's encoders
        for model in workload.models.values():
            for layer in layer_stack(model.dap.encoder)[1]:
                layer.compile(dynamic=True)
        for loss in losses.values():
            if isinstance(loss, LibraryLoss):
                loss.model[0].auto_model.compile(dynamic=True)
    return {
        name: partial(gradients, batch=batch, bf16=args.bf16) for name, gradients in found.items()
    }


def check_equal(losses: dict[str, Loss], workload: Workload, batch: Batch) -> dict[str, float]:
    """Check that our TR and sentence-transformers have the same loss and gradients.

    Dropout is off during the check.

    Args:
        losses: name -> function that computes the loss of a batch.
        workload: our models.
        batch: the pairs.

    Returns:
        "loss" is our loss. "gradient" is the Euclidean length of our gradient. "gradient_error" is
        the relative difference of the two gradients.
    """
    found = []
    modules = [
        *workload.models.values(),
        *(loss for loss in losses.values() if isinstance(loss, nn.Module)),
    ]
    for module in modules:
        module.eval()
    for name in ("TR", LIBRARY):
        loss = backward(losses[name], batch).item()
        parts = [
            parameter.grad.flatten()
            for parameter in workload.encoder.parameters()
            if parameter.grad is not None
        ]
        found.append((loss, torch.cat(parts)))
        workload.encoder.zero_grad(set_to_none=True)
    for module in modules:
        module.train()
    (ours, gradient), (theirs, wanted) = found
    error = ((gradient - wanted).norm() / wanted.norm()).item()
    if abs(ours / theirs - 1) > 1e-4 or error > 1e-2:
        raise ValueError(
            f"our TR gives {ours:.6f} and {LIBRARY} {theirs:.6f}, gradients {error:.1e} off"
        )
    return {"loss": ours, "gradient": gradient.norm().item(), "gradient_error": error}


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Time a training step of all contenders.

    Args:
        args: the command line.

    Returns:
        "check" -> the result of `check_equal`, or None with `--no_library`. "contenders" -> for
        each contender `WALL` and `CPU` (median seconds), "runs" (the single times), and "flops"
        (useful FLOPs of a step, without padding). `MATRIX`, plain matrix products, is one of them.
    """
    workload = Workload(args)
    losses = workload.losses() | ({LIBRARY: LibraryLoss(workload)} if args.library else {})
    lengths = token_counts(workload.batch(args.batch_size))
    useful = {name: 3 * real_token_flops(loss, workload, lengths) for name, loss in losses.items()}
    batch = workload.to(args.device).batch(args.batch_size)
    check = None
    if args.library:
        losses[LIBRARY].follow(workload)
        check = check_equal(losses, workload, batch)
    parameters = {id(p): p for model in workload.models.values() for p in model.parameters()}
    # One optimizer for all contenders: it skips parameters without gradient.
    optimizer = AdamW(parameters.values(), lr=1e-12, fused=True)

    def step(gradients: Callable[[], object]) -> None:
        optimizer.zero_grad(set_to_none=True)
        gradients()
        if args.optimizer:
            optimizer.step()

    steps: dict[str, Callable[[], None]] = {
        name: partial(step, gradients)
        for name, gradients in contenders(workload, losses, batch, args).items()
    }
    if args.profile is not None and args.profile not in steps:
        raise UserError(f"--profile {args.profile}: give one of {', '.join(steps)}")
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    steps[MATRIX] = matrix = MatrixWork(
        workload.config, sum(map(sum, lengths)), args.device, dtype, args.matrix_seconds
    )
    timed = alternate(steps, args.repeats, args.device, args.warm_up)
    if args.profile:
        print(profile(steps[args.profile], args.device))
    useful[MATRIX] = matrix.flops
    parts = {
        name: part | {"flops": useful[name.removesuffix(CACHED)]} for name, part in timed.items()
    }
    return {"check": check, "contenders": parts}


def profile(step: Callable[[], None], device: str) -> str:
    """Profile one step, and return tables of the 15 operations with the most time of their own.

    Args:
        step: the step. Run it once before, so that its warm-up is not measured.
        device: "cpu" or "cuda". On a GPU a second table is sorted by the GPU's own time.
    """
    activities, orders = [ProfilerActivity.CPU], ["self_cpu_time_total"]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
        orders.append("self_device_time_total")
    with torch.profiler.profile(activities=activities) as found:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    operations = found.key_averages()
    tables = []
    for order in orders:
        tables.append(operations.table(sort_by=order, row_limit=15, max_name_column_width=40))
    return "\n".join(tables)


def ratios(found: dict[str, dict[str, Any]], clock: str) -> dict[str, float]:
    """Divide the times of some contenders by the times of others.

    Args:
        found: contender -> its times, as in the result of `compare`.
        clock: `WALL` or `CPU`.

    Returns:
        Text such as "DAP / TR" -> ratio, for each two contenders of interest that both ran.
    """
    wanted = [("DAP", LIBRARY), ("DAP", "TR"), ("TLM", "TR"), ("TR", LIBRARY)]
    wanted += [(a + CACHED, b + CACHED) for a, b in wanted] + [("DAP" + CACHED, "DAP")]
    return {
        f"{a} / {b}": found[a][clock] / found[b][clock]
        for a, b in wanted
        if a in found and b in found
    }


def shares(found: dict[str, dict[str, Any]], clock: str) -> dict[str, float]:
    """Divide each contender's useful FLOPs per second by the rate of plain matrix products.

    Args:
        found: contender -> its times and FLOPs, as in the result of `compare`. `MATRIX` is one of
            them.
        clock: `WALL` or `CPU`.

    Returns:
        Contender -> share. 1 means as fast as plain matrix products.
    """
    rates = {name: part["flops"] / part[clock] for name, part in found.items()}
    return {name: rate / rates[MATRIX] for name, rate in rates.items()}


def table(found: dict[str, dict[str, Any]], pairs: int) -> str:
    """Format median times, ratios and shares of the matrix rate as a text table.

    Args:
        found: contender -> its times and FLOPs, as in the result of `compare`.
        pairs: number of pairs of a step.
    """
    base = found.get(LIBRARY) or found["TR"]
    wall, cpu = shares(found, WALL), shares(found, CPU)
    lines = []
    for name, part in found.items():
        if name == MATRIX:
            continue
        line = [name]
        line += [f"{1e3 * part[clock] / pairs:.2f}" for clock in (WALL, CPU)]
        line += [f"{part[clock] / base[clock]:.2f}" for clock in (WALL, CPU)]
        line += [f"{100 * share[name]:.0f}%" for share in (wall, cpu)]
        line.append(f"{part['flops'] / pairs / 1e9:.2f}")
        lines.append(line)
    first = LIBRARY if LIBRARY in found else "TR"
    header = [
        f"step of {pairs} pairs",
        "wall ms / pair",
        "CPU ms / pair",
        f"/ {first}",
        "by CPU",
        "of matrix rate",
    ]
    rate = found[MATRIX]["flops"] / found[MATRIX][WALL] / 1e9
    notes = [f"matrix rate {rate:.0f} GFLOP/s"]
    for clock in (WALL, CPU):
        listed = [f"{name} {value:.2f}" for name, value in ratios(found, clock).items()]
        notes.append(f"{clock}: {', '.join(listed)}")
    return "\n".join([text_table([*header, "by CPU", "GFLOPs / pair"], lines), *notes])


def main(argv: list[str] | None = None) -> None:
    """Time all contenders, print the table, and write everything to `--json`.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = machine_parser(__doc__, repeats=7)
    add_workload_arguments(parser)
    parser.add_argument(
        "--mini_batch_size",
        type=int,
        default=32,
        help="of the cached losses, if the batch is larger",
    )
    parser.add_argument("--optimizer", action="store_true", help="also a fused AdamW step")
    parser.add_argument("--compile", action="store_true", help="torch.compile for every contender")
    parser.add_argument(
        "--warm_up", type=int, default=1, help="steps of each contender before the first round"
    )
    parser.add_argument(
        "--matrix_seconds", type=float, default=0.5, help="of a measurement of the matrix rate"
    )
    parser.add_argument(
        "--no_library", dest="library", action="store_false", help=f"without {LIBRARY}"
    )
    parser.add_argument(
        "--profile", metavar="NAME", help="then profile a step of this contender, such as TR"
    )
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = compare(args)
    print(table(found["contenders"], args.batch_size))
    save(args, found | {clock: ratios(found["contenders"], clock) for clock in (WALL, CPU)})


if __name__ == "__main__":
    main()
