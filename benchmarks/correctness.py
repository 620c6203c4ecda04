"""Compare loss and gradients of every fast path with the padded computation in float64.

    python -m benchmarks.correctness --device cuda

It takes small encoders of four classes, every objective and pairs of uneven lengths, without
dropout. The paths are float32, bfloat16 autocast, `torch.compile`, and GradCache in float32. The
command fails if one of them is wrong. The float64 computation runs on the CPU.
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
    """Return a configuration with three layers and without dropout.

    ModernBERT's attention window is shorter than the sentences, so that it matters.
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
        return AutoConfig.for_model(
            name, **shape, **ids, local_attention=8, global_attn_every_n_layers=3
        )
    return AutoConfig.for_model(
        name, **shape, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def build(name: str, objective: str) -> DAPForPreTraining:
    """Return a model whose random weights are large enough for every part to matter."""
    torch.manual_seed(0)
    config = DAPConfig(encoder_config(name), objective=objective, mask_token_id=MASK)
    model = DAPForPreTraining(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
        else:
            parameter.data.add_(0.1)
    return model.train()


def uneven_batch(pairs: int = 12, longest: int = 24) -> Batch:
    """Return random pairs of 3 to 24 tokens."""
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
    """Return all gradients as one float64 vector on the CPU, zeros for missing gradients."""
    parts = []
    for parameter in model.parameters():
        part = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parts.append(part.flatten().double().cpu())
    return torch.cat(parts)


def reference(model: DAPForPreTraining, batch: Batch) -> tuple[float, Tensor]:
    """Return loss and gradients with padded rows and torch's attention, in float64.

    Transformers' eager attention is not used, because it gives NaN for ModernBERT.
    """
    plain = copy.deepcopy(model).double()
    for encoder in [plain.dap.encoder, *([plain.rtl_head.blocks] if plain.rtl_head else [])]:
        encoder.set_attn_implementation("sdpa")
    loss = backward(lambda batch: plain(**batch).loss, batch)
    return loss.item(), gradient(plain)


def by_path(path: str, model: DAPForPreTraining, batch: Batch) -> tuple[float | None, Tensor]:
    """Return loss and gradients of one of the fast paths.

    The loss is None for GradCache, which computes it in shares.
    """
    if path == "cached":
        cached_backward(model, 5, batch)
        return None, gradient(model)
    if path == "compiled":
        for layer in layer_stack(model.dap.encoder)[1]:  # as the trainer's --torch_compile
            layer.compile(dynamic=True)
    loss = backward(lambda batch: model(**batch).loss, batch, bf16=path == "bf16")
    return loss.item(), gradient(model)


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return relative errors, and whether they are small, for each encoder, objective and path."""
    batch = uneven_batch()
    on_device = {key: value.to(args.device) for key, value in batch.items()}
    found = []
    for name in args.encoders:
        for short, objective in OBJECTIVES.items():
            model = build(name, objective)
            loss, wanted = reference(model, batch)
            for path in args.paths:
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
    """Compare all paths and print a table."""
    parser = machine_parser(__doc__, repeats=1)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=ENCODERS)
    parser.add_argument("--paths", nargs="+", choices=list(ALLOWED), default=list(ALLOWED))
    args = parser.parse_args(argv)
    prepare_machine(args)
    found = compare(args)
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
        raise ValueError(f"differs from padded rows in float64: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
