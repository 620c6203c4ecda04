"""A training step of TR, TLM and DAP beside sentence-transformers' ranking loss on the same weights, ids and threads.

    OMP_NUM_THREADS=1 python -m benchmarks.train_step --repeats 5 --json step.json
    python -m benchmarks.train_step --size small --batch_size 256 --mini_batch_size 32 --optimizer
    python -m benchmarks.train_step --device cuda --bf16 --size xlmr --batch_size 1024 --mini_batch_size 1024

A step is forward and backward from empty gradients, with `--optimizer` also fused AdamW. All contenders train the same
parameters and take turns; before that, our TR has to give the loss and the gradients of sentence-transformers'. The
share of the matrix rate counts three times the forward products of the real tokens (not padding) as the useful work;
the rate is that of an encoder layer's weight products over as many tokens, measured in turn with the contenders.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from benchmarks.flops import real_token_flops
from benchmarks.timing import CPU, WALL, MatrixWork, add_machine_arguments, alternate, prepare_machine, save
from benchmarks.workload import Workload, add_workload_arguments, share_weights, token_counts
from dap.reports import text_table
from dap.training import CachedBatch
from encoder_dap import layer_stack
from modeling_dap import DAPForPreTraining

LIBRARY, MATRIX = "sentence-transformers", "matrix products"
CACHED = " cached"  # ends the names of what GradCache computes
SCALE = 20.0  # 1 / tr_temperature

Loss = Callable[[dict[str, Tensor]], Tensor]


class LibraryLoss(nn.Module):
    """MultipleNegativesRankingLoss, or its cached form, over the workload's encoder in a SentenceTransformer."""

    def __init__(self, workload: Workload, mini_batch_size: int | None = None) -> None:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer import losses
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

        super().__init__()
        with tempfile.TemporaryDirectory(prefix="dap-step-") as folder:
            workload.encoder.save_pretrained(folder)
            workload.tokenizer().save_pretrained(folder)
            transformer = Transformer(folder, model_kwargs={"add_pooling_layer": False, "attn_implementation": "sdpa"})
        pooling = Pooling(workload.config.hidden_size, pooling_mode="cls")
        self.model = SentenceTransformer(modules=[transformer, pooling], device=workload.device)
        self.follow(workload)
        cached = {"mini_batch_size": mini_batch_size} if mini_batch_size else {}
        kind = losses.CachedMultipleNegativesRankingLoss if cached else losses.MultipleNegativesRankingLoss
        self.loss = kind(self.model, scale=SCALE, **cached)

    def follow(self, workload: Workload) -> None:
        """Stand where the workload stands, and use its parameters."""
        self.to(workload.device)
        share_weights(self.model[0].auto_model, workload.encoder)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The loss of a batch of ours."""
        names = ("input_ids", "attention_mask")
        features = [{name: batch[f"{side}_{name}"] for name in names} for side in ("source", "target")]
        return self.loss(features, None)


class Gradients:
    """Forward and backward of one loss."""

    def __init__(self, loss: Loss, bf16: bool = False) -> None:
        self.loss, self.bf16 = loss, bf16

    def __call__(self, batch: dict[str, Tensor]) -> None:
        with torch.autocast(batch["source_input_ids"].device.type, torch.bfloat16, enabled=self.bf16):
            loss = self.loss(batch)
        loss.backward()


class CachedGradients:
    """The same gradients by GradCache, a chunk of pairs at a time."""

    def __init__(self, model: DAPForPreTraining, size: int, bf16: bool = False) -> None:
        self.model, self.size, self.bf16 = model, size, bf16

    def __call__(self, batch: dict[str, Tensor]) -> None:
        autocast = torch.autocast(batch["source_input_ids"].device.type, torch.bfloat16, enabled=self.bf16)
        with autocast:
            cached = CachedBatch(self.model, self.model, batch, self.size)
        for part in cached.parts:
            with autocast:
                loss = cached.run(part)
            loss.backward()


def losses_of(workload: Workload, library: bool) -> dict[str, Loss]:
    """Contender -> the loss of a batch, a scalar."""
    found: dict[str, Loss] = {
        name: (lambda batch, model=model: model(**batch).loss) for name, model in workload.models.items()
    }
    if library:
        found[LIBRARY] = LibraryLoss(workload)
    return found


def contenders(workload: Workload, losses: dict[str, Loss], args: argparse.Namespace) -> dict[str, Any]:
    """Contender -> what gives the gradients of a batch; those of GradCache too where the batch is above a chunk."""
    found: dict[str, Any] = {name: Gradients(loss, args.bf16) for name, loss in losses.items()}
    size = args.mini_batch_size
    if args.batch_size > size:
        found |= {name + CACHED: CachedGradients(model, size, args.bf16) for name, model in workload.models.items()}
        if args.library:
            found[LIBRARY + CACHED] = Gradients(LibraryLoss(workload, size), args.bf16)
    return found


def check_equal(losses: dict[str, Loss], workload: Workload, batch: dict[str, Tensor]) -> dict[str, float]:
    """Loss and norm of the encoder's gradients of our TR, without dropout.

    Raises:
        ValueError: sentence-transformers' are not equal: the contenders would not do the same work.
    """
    ours, theirs = (_loss_and_gradient(losses[name], workload, batch) for name in ("TR", LIBRARY))
    loss_error = abs(ours[0] - theirs[0]) / theirs[0]
    gradient_error = ((ours[1] - theirs[1]).norm() / theirs[1].norm()).item()
    if loss_error > 1e-4 or gradient_error > 1e-2:
        raise ValueError(
            f"our TR gives {ours[0]:.6f} and {LIBRARY} {theirs[0]:.6f}, gradients {gradient_error:.1e} off"
        )
    return {"loss": ours[0], "gradient": ours[1].norm().item(), "gradient_error": gradient_error}


def _loss_and_gradient(loss: Loss, workload: Workload, batch: dict[str, Tensor]) -> tuple[float, Tensor]:
    with without_dropout(loss, workload):
        value = loss(batch)
        value.backward()
    layers = [parameter.grad.flatten() for parameter in workload.encoder.parameters() if parameter.grad is not None]
    gradient = torch.cat(layers)
    workload.encoder.zero_grad(set_to_none=True)
    return value.item(), gradient


@contextmanager
def without_dropout(loss: Loss, workload: Workload) -> Iterator[None]:
    """All contenders in evaluation mode."""
    modules = [*workload.models.values(), *([loss] if isinstance(loss, nn.Module) else [])]
    for module in modules:
        module.eval()
    yield
    for module in modules:
        module.train()


class TrainStep:
    """What is timed: gradients emptied, forward, backward and, where there is one, the optimiser's step."""

    def __init__(self, gradients: Any, batch: dict[str, Tensor], optimizer: AdamW, update: bool) -> None:
        self.gradients, self.batch, self.optimizer, self.update = gradients, batch, optimizer, update

    def __call__(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients(self.batch)
        if self.update:
            self.optimizer.step()


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Contender -> medians, pairs a step and useful FLOPs a step; and the check that TR is the same work."""
    workload = Workload(args)
    losses = losses_of(workload, args.library)
    lengths = token_counts(workload.batch(args.batch_size))
    useful = {name: 3 * real_token_flops(loss, workload, lengths) for name, loss in losses.items()}
    batch = workload.to(args.device).batch(args.batch_size)
    check = None
    if args.library:
        losses[LIBRARY].follow(workload)
        check = check_equal(losses, workload, batch)
    found = contenders(workload, losses, args)
    if args.compile:
        compile_all(workload, found)
    parameters = {id(p): p for model in workload.models.values() for p in model.parameters()}
    optimizer = AdamW(parameters.values(), lr=1e-12, fused=True)  # one for all: what has no gradient is left alone
    steps = {name: TrainStep(gradients, batch, optimizer, args.optimizer) for name, gradients in found.items()}
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    matrix = MatrixWork(workload.config, sum(map(sum, lengths)), args.device, dtype, args.matrix_seconds)
    timed = alternate(steps, args.repeats, args.device, args.warm_up, between={MATRIX: matrix})
    flops = {name: useful[name.removesuffix(CACHED)] for name in steps} | {MATRIX: matrix.flops}
    return {"check": check, "contenders": {name: part | {"flops": flops[name]} for name, part in timed.items()}}


def compile_all(workload: Workload, found: dict[str, Any]) -> None:
    """`torch.compile` for our models and for the library's encoders."""
    for model in workload.models.values():
        for layer in layer_stack(model.dap.encoder)[1]:  # as the trainer's --torch_compile
            layer.compile(dynamic=True)
    for gradients in found.values():
        if isinstance(loss := getattr(gradients, "loss", None), LibraryLoss):
            loss.model[0].auto_model.compile(dynamic=True)


def ratios(found: dict[str, dict[str, Any]], clock: str) -> dict[str, float]:
    """The goals' ratios by one clock, as far as their contenders ran."""
    wanted = [("DAP", LIBRARY), ("DAP", "TR"), ("TLM", "TR"), ("TR", LIBRARY)]
    wanted += [(a + CACHED, b + CACHED) for a, b in wanted] + [("DAP" + CACHED, "DAP")]
    return {f"{a} / {b}": found[a][clock] / found[b][clock] for a, b in wanted if a in found and b in found}


def shares(found: dict[str, dict[str, Any]], clock: str) -> dict[str, float]:
    """Contender -> its useful FLOPs a second over those of the matrix products."""
    rates = {name: part["flops"] / part[clock] for name, part in found.items()}
    return {name: rate / rates[MATRIX] for name, rate in rates.items()}


def table(found: dict[str, dict[str, Any]], pairs: int) -> str:
    """Medians and ratios as text."""
    base = found.get(LIBRARY) or found["TR"]
    wall, cpu = shares(found, WALL), shares(found, CPU)
    lines = [
        [name]
        + [f"{1e3 * part[clock] / pairs:.2f}" for clock in (WALL, CPU)]
        + [f"{part[clock] / base[clock]:.2f}" for clock in (WALL, CPU)]
        + [f"{100 * share[name]:.0f}%" for share in (wall, cpu)]
        + [f"{part['flops'] / pairs / 1e9:.2f}"]
        for name, part in found.items()
        if name != MATRIX
    ]
    first = LIBRARY if LIBRARY in found else "TR"
    header = [f"step of {pairs} pairs", "wall ms / pair", "CPU ms / pair", f"/ {first}", "by CPU", "of matrix rate"]
    rate = found[MATRIX]["flops"] / found[MATRIX][WALL] / 1e9
    notes = [f"matrix rate {rate:.0f} GFLOP/s"]
    for clock in (WALL, CPU):
        notes.append(f"{clock}: " + ", ".join(f"{name} {value:.2f}" for name, value in ratios(found, clock).items()))
    return "\n".join([text_table([*header, "by CPU", "GFLOPs / pair"], lines), *notes])


def main(argv: list[str] | None = None) -> None:
    """Prints a table; `--json` keeps everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_workload_arguments(parser)
    add_machine_arguments(parser, repeats=7)
    parser.add_argument("--mini_batch_size", type=int, default=32, help="of the cached losses, if the batch is larger")
    parser.add_argument("--optimizer", action="store_true", help="also a fused AdamW step")
    parser.add_argument("--bf16", action="store_true", help="bfloat16 autocast")
    parser.add_argument("--compile", action="store_true", help="torch.compile for every contender")
    parser.add_argument("--warm_up", type=int, default=1, help="steps of each contender before the first round")
    parser.add_argument("--matrix_seconds", type=float, default=0.5, help="of a measurement of the matrix rate")
    parser.add_argument("--no_library", dest="library", action="store_false", help=f"without {LIBRARY}")
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = compare(args)
    print(table(found["contenders"], args.batch_size))
    save(args, found | {clock: ratios(found["contenders"], clock) for clock in (WALL, CPU)})


if __name__ == "__main__":
    main()
