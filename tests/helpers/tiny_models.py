"""Build tiny DAP models of every supported encoder class, and batches for them."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import tiny_config
from torch import Tensor

from dap_transformers.training.grad_cache import CachedBatch
from modeling_dap import DAPConfig, DAPForPreTraining
from objectives_dap import OBJECTIVES

#: The head of the released code.
RELEASED = {"rtl_tied": False, "rtl_reembed": True}
ENCODERS = ("bert", "xlm-roberta", "roberta", "deberta-v2", "modernbert", "distilbert")
#: Encoders without a masked-LM head, and those that few objectives are tested with.
MORE_ENCODERS = ("eurobert", "gemma3_text", "gte", "llama", "mistral", "nomic_bert", "qwen3", "t5")
ALL = "+".join(OBJECTIVES)
#: Every objective by itself, the paper's two, and all together: a new one is tested by being
#: registered.
COMBINATIONS = (*OBJECTIVES, "tr+rtl", ALL)
MASK, PAD = 4, 1
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
#: A small shape for configurations of classes that `tiny_config` does not have.
SHAPE = {"vocab_size": 250, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"intermediate_size": 48, "pad_token_id": 1}
#: Names of inputs -> their rows (B, ...).
Batch = dict[str, Tensor]
LETTERS = "abcdefghijklmnopqrst"


def tiny_model(model_type: str = "bert", **config: object) -> DAPForPreTraining:
    torch.default_generator.manual_seed(0)  # as `_repeatable` in conftest.py
    options = {"mask_token_id": MASK, "objective": "tr+rtl", **config}
    model = DAPForPreTraining(DAPConfig(tiny_config(model_type), **options))
    for parameter in model.parameters():  # biases and norms too: equal values would hide mistakes
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.train()


def start_from(folder: Path, **options: Any) -> DAPForPreTraining:
    return DAPForPreTraining.from_encoder(str(folder), **options)


def cipher(count: int, seed: int = 0, is_true: bool = True) -> list[tuple[str, str]]:
    """Two letters and the letters that follow them in the alphabet, or any two in their place."""
    rng = random.Random(seed)
    targets = [rng.choices(LETTERS, k=2) for _ in range(count)]
    kept = targets if is_true else [rng.choices(LETTERS, k=2) for _ in range(count)]
    pairs = []
    for source, target in zip(kept, targets):
        pairs.append((" ".join(chr(ord(letter) + 1) for letter in source), " ".join(target)))
    return pairs


def make_batch(pairs: int = 6, longest: int = 9, seed: int = 0, has_noise: bool = True) -> Batch:
    """Pairs of random ids: CLS 0, SEP 2, padded on the right, every length from 4 tokens on."""
    generator = torch.Generator().manual_seed(seed)
    batch = {}
    for side, shift in (("source", 0), ("target", 2)):
        lengths = torch.tensor([4 + (3 * row + shift) % (longest - 3) for row in range(pairs)])
        mask = (torch.arange(longest) < lengths[:, None]).long()
        ids = torch.randint(5, 250, mask.shape, generator=generator)
        ids[:, 0], ids[torch.arange(pairs), lengths - 1] = 0, 2
        batch[f"{side}_input_ids"] = ids.masked_fill(mask == 0, PAD)
        batch[f"{side}_attention_mask"] = mask
        if has_noise:
            batch[f"{side}_noise"] = torch.rand(mask.shape, generator=generator)
    batch["teacher_embeds"] = torch.randn(pairs, 2, 32, generator=generator)
    return batch


def with_negatives(batch: Batch) -> Batch:
    """Add a copy of each target with another second token, except for every third pair.

    The copy of the second pair is the target of the first.
    """
    ids, mask = batch["target_input_ids"].clone(), batch["target_attention_mask"].clone()
    ids[:, 1] = 254 - ids[:, 1]
    ids[1], mask[1] = batch["target_input_ids"][0], batch["target_attention_mask"][0]
    mask[2::3] = 0
    return batch | {
        "negative_input_ids": ids.masked_fill(mask == 0, PAD),
        "negative_attention_mask": mask,
    }


def widen(batch: Batch, extra: int) -> Batch:
    """The same batch with more padding."""
    fill = {"input_ids": PAD, "attention_mask": 0, "noise": 0.01}
    wide = {}
    for key, value in batch.items():
        what = key.split("_", 1)[1]
        wide[key] = F.pad(value, (0, extra), value=fill[what]) if what in fill else value
    return wide


def padded_left(batch: Batch) -> Batch:
    """The same batch with its padding before the sentences, all but the teacher's vectors."""
    moved = {}
    for key, value in batch.items():
        side = key.split("_", 1)[0]
        mask = batch.get(f"{side}_attention_mask")
        moved[key] = value if mask is None else value.gather(1, mask.argsort(dim=1, stable=True))
    return moved


def tokens_of(batch: Batch, side: str, row: int) -> Tensor:
    """The real tokens of one sentence."""
    return batch[f"{side}_input_ids"][row][batch[f"{side}_attention_mask"][row].bool()]


def gradients(model: torch.nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def step(model: torch.nn.Module, batch: Batch, size: int | None = None) -> tuple[float, Tensor]:
    """Loss and gradients of a plain step, or of one in chunks of `size` pairs."""
    model.zero_grad()
    if size is None:
        out = model(**batch)
        out.loss.backward()
    else:
        cached = CachedBatch(model, model, batch, size)
        for part in cached.parts:
            cached.run(part).backward()
        out = cached.output()
    return out.loss.item(), gradients(model)


def distance(found: Tensor, expected: Tensor) -> float:
    """The length of the difference, as a share of the length of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def require_step(
    expected: tuple[float, Tensor], model: torch.nn.Module, batch: Batch, size: int | None = None
) -> None:
    """A step has this loss and these gradients."""
    loss, found = step(model, batch, size)
    assert loss == pytest.approx(expected[0], rel=1e-5)
    assert distance(found, expected[1]) < 1e-4
