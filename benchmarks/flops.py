"""Count the forward FLOPs of a pair and time a training step. The study compares them with Table 6.

    python -m benchmarks.flops --repeats 5 --json flops.json

FLOPs are those of the products that PyTorch runs for one pair without padding. A multiplication
with addition counts as 2. The time is that of a training step (forward and backward) of
`--batch_size` such pairs. The objectives take turns.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from benchmarks.timing import alternate, machine_parser, save
from benchmarks.workload import Batch, Model, Workload, add_workload_arguments, backward
from dap_transformers.tables import text_table

#: Lengths whose fifth is whole. So the number of masked tokens, and with it the FLOPs, are an exact
#: form of both lengths.
FITTED_LENGTHS = ((7, 7), (7, 12), (12, 7), (17, 7), (7, 17), (17, 17), (22, 12))


#: Attention that torch.utils.flop_counter does not know, and its FLOPs by the shapes of its inputs.
MORE = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda query, key, value, *_, **__: sdpa_flop_count(query, key, value)
    )
}


def with_noise(batch: Batch) -> Batch:
    """Return a copy of the batch with the numbers that choose the masked tokens.

    Training draws these numbers at random. The FLOPs must not depend on chance, so every fifth
    token of a pair is masked here. CLS and separators are never masked.
    """
    noisy = dict(batch)
    seen = 0
    for side in ("source", "target"):
        mask = batch[f"{side}_attention_mask"]
        noise = torch.full(mask.shape, 0.9, device=mask.device)  # (B, S), below 1 for RTL
        inner = torch.arange(mask.shape[1] - 2, device=mask.device) + seen
        noise[:, 1:-1] = torch.where(inner % 5 == 0, 0.1, 0.9)
        seen += len(inner)
        noisy[f"{side}_noise"] = noise
    return noisy


def pair_flops(model: Model, workload: Workload, source: int, target: int) -> int:
    """Count the forward FLOPs of products and attention for one pair of so many tokens."""
    batch = with_noise(workload.batch_of([source], [target]))
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=MORE) as counter:
        model(**batch)
    return counter.get_total_flops()


def real_token_flops(model: Model, workload: Workload, lengths: list[tuple[int, int]]) -> float:
    """Compute the forward FLOPs of many pairs together, as if nothing were padded.

    Without padding, the FLOPs of a pair are a quadratic form of both lengths. So a few lengths are
    measured, and the form is fitted to them.

    Args:
        lengths: numbers of tokens (source, target) of each pair.
    """
    measured = np.array([pair_flops(model, workload, *pair) for pair in FITTED_LENGTHS], float)
    form = np.linalg.lstsq(_terms(FITTED_LENGTHS), measured, rcond=None)[0]
    return float((_terms(lengths) @ form).sum())


def _terms(lengths: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the terms 1, x, y, x², xy and y² for each pair of lengths (x, y): (pairs, 6)."""
    x, y = np.array(lengths, float).T
    return np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], 1)


def step(model: torch.nn.Module, batch: Batch, bf16: bool) -> None:
    """Run a forward and a backward pass, after the gradients are cleared."""
    model.zero_grad()
    backward(model, batch, bf16)


def measure(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Count the FLOPs of a pair, and time a training step of many pairs, for each objective.

    Returns:
        Objective -> "flops" of a pair's forward pass, "wall" and "cpu" (median seconds of a
        training step), and "runs" (the single times).
    """
    workload = Workload(args)
    counted = {}
    for name, model in workload.models.items():
        counted[name] = pair_flops(model, workload, args.tokens, args.tokens)

    workload.models.to(args.device)
    lengths = [args.tokens] * args.batch_size
    batch = workload.batch_of(lengths, lengths)
    steps = {}
    for name, model in workload.models.items():
        steps[name] = partial(step, model, batch, args.bf16)
    timed = alternate(steps, args.repeats, args.device)
    return {name: {"flops": flops} | timed[name] for name, flops in counted.items()}


def main(argv: list[str] | None = None) -> None:
    """Count FLOPs and time a step of each objective, print a table, and write it to `--json`."""
    parser = machine_parser(__doc__, repeats=5)
    add_workload_arguments(parser)
    parser.set_defaults(batch_size=8)
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each sentence")
    args = parser.parse_args(argv)
    found = measure(args)
    rows = []
    for name, part in found.items():
        milliseconds = 1000 * part["cpu"] / args.batch_size
        rows.append([name, f"{part['flops'] / 1e9:.2f}", f"{milliseconds:.0f}"])
    print(text_table(["", "GFLOPs", "CPU ms per pair"], rows))
    save(args, {"pair": found})


if __name__ == "__main__":
    main()
