"""Loss and gradients of every fast path on a device, beside the padded computation in float64 on the CPU.

    python -m benchmarks.correctness --device cuda

Small encoders of four classes, every objective, pairs of uneven lengths, no dropout. Paths: float32, bf16 autocast,
`torch.compile`, and GradCache in float32. Ends with `ValueError` where one of them is off.
"""

import argparse
import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from benchmarks.timing import machine_parser, prepare_machine, save
from benchmarks.workload import OBJECTIVES, Batch, backward, cached_backward
from dap.reports import text_table
from encoder_dap import layer_stack
from modeling_dap import DAPConfig, DAPForPreTraining

ENCODERS = ("bert", "roberta", "xlm-roberta", "modernbert")
WORDS, MASK, PAD = 300, 4, 1
#: Path -> largest relative error of the loss, and of the gradients as one vector.
ALLOWED = {
    "float32": (1e-4, 1e-3),
    "bf16": (2e-2, 1e-1),
    "compiled": (1e-4, 1e-3),
    "cached": (1e-4, 1e-3),
}


def encoder_config(name: str) -> PreTrainedConfig:
    """Three layers without dropout; ModernBERT's window is shorter than the sentences."""
    shape = {
        "vocab_size": WORDS,
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
    }
    shape |= {"intermediate_size": 256, "max_position_embeddings": 80, "pad_token_id": PAD}
    if name == "modernbert":
        ids = {"bos_token_id": 0, "eos_token_id": 2, "cls_token_id": 0, "sep_token_id": 2}
        return AutoConfig.for_model(
            name, **shape, **ids, local_attention=8, global_attn_every_n_layers=3
        )
    return AutoConfig.for_model(
        name, **shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def build(name: str, objective: str) -> DAPForPreTraining:
    """A model whose random weights are large enough for every part to matter."""
    torch.manual_seed(0)
    model = DAPForPreTraining(
        DAPConfig(encoder_config(name), objective=objective, mask_token_id=MASK)
    )
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else parameter.data.add_(
            0.1
        )
    return model.train()


def uneven_batch(pairs: int = 12, longest: int = 24) -> Batch:
    """Random pairs of 3 to 24 tokens."""
    generator = torch.Generator().manual_seed(0)
    batch: Batch = {}
    for side in ("source", "target"):
        lengths = torch.randint(3, longest + 1, (pairs, 1), generator=generator)
        mask = (torch.arange(longest) < lengths).long()  # (B, S)
        ids = torch.randint(5, WORDS, mask.shape, generator=generator).masked_fill(mask == 0, PAD)
        noise = torch.rand(mask.shape, generator=generator)
        batch |= {f"{side}_input_ids": ids, f"{side}_attention_mask": mask, f"{side}_noise": noise}
    return batch


def gradient(model: DAPForPreTraining) -> Tensor:
    """All gradients as one float64 vector on the CPU; what has none counts as zeros."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return torch.cat([part.flatten().double().cpu() for part in parts])


def reference(model: DAPForPreTraining, batch: Batch) -> tuple[float, Tensor]:
    """Loss and gradients by padded rows and torch's attention (Transformers' eager one gives ModernBERT NaN)."""
    plain = copy.deepcopy(model).double()
    for encoder in [plain.dap.encoder, *([plain.rtl_head.blocks] if plain.rtl_head else [])]:
        encoder.set_attn_implementation("sdpa")
    loss = backward(lambda batch: plain(**batch).loss, batch)
    return loss.item(), gradient(plain)


def by_path(path: str, model: DAPForPreTraining, batch: Batch) -> tuple[float | None, Tensor]:
    """Loss (None from GradCache, which has it in shares) and gradients by one of the fast paths."""
    if path == "cached":
        cached_backward(model, 5, batch)
        return None, gradient(model)
    if path == "compiled":
        for layer in layer_stack(model.dap.encoder)[1]:  # as the trainer's --torch_compile
            layer.compile(dynamic=True)
    loss = backward(lambda batch: model(**batch).loss, batch, bf16=path == "bf16")
    return loss.item(), gradient(model)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each encoder, objective and path: relative errors, and whether they are allowed."""
    batch, found = uneven_batch(), []
    there = {key: value.to(args.device) for key, value in batch.items()}
    for name in args.encoders:
        for short, objective in OBJECTIVES.items():
            model = build(name, objective)
            loss, wanted = reference(model, batch)
            for path in args.paths:
                ours, gradients = by_path(path, copy.deepcopy(model).to(args.device), there)
                off = 0.0 if ours is None else abs(ours / loss - 1)
                apart = ((gradients - wanted).norm() / wanted.norm()).item()
                line = {
                    "encoder": name,
                    "objective": short,
                    "path": path,
                    "loss": off,
                    "gradient": apart,
                }
                found.append(line | {"fine": off <= ALLOWED[path][0] and apart <= ALLOWED[path][1]})
    return found


def main(argv: list[str] | None = None) -> None:
    """Prints a table; `--json` keeps it."""
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=ENCODERS)
    parser.add_argument("--paths", nargs="+", choices=list(ALLOWED), default=list(ALLOWED))
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = compare(args)
    rows, wrong = [], []
    for part in found:
        case = [part["encoder"], part["objective"], part["path"]]
        rows.append(
            [
                *case,
                f"{part['loss']:.1e}",
                f"{part['gradient']:.1e}",
                "ok" if part["fine"] else "OFF",
            ]
        )
        wrong += [] if part["fine"] else [" ".join(case)]
    print(text_table(["encoder", "objective", "path", "loss", "gradient", ""], rows))
    save(args, {"lines": found})
    if wrong:
        raise ValueError(
            f"off from padded rows in float64: {', '.join(wrong)}; nothing measured on them counts"
        )


if __name__ == "__main__":
    main()
