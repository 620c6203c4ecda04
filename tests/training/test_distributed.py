"""A step on two processes gives the gradients of a step on one process with all pairs.

This holds for every objective, with GradCache, gradient accumulation and activation checkpointing.
"""

import contextlib
import itertools
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from forked import run_two
from tiny_models import ALL, Batch, distance, gradients, make_batch, tiny_model, with_negatives
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dap_transformers.training.grad_cache import CachedBatch
from modeling_dap import DAPForPreTraining
from objectives_dap import OBJECTIVES

PAIRS = 10  # of all processes together: an odd number in each of two


class Variant(NamedTuple):
    """How a step is computed."""

    accumulation: int  # micro-batches per step
    checkpointing: bool  # activation checkpointing
    size: int | None  # pairs per chunk (GradCache)


VARIANTS = [
    Variant(1, False, None),
    Variant(2, True, None),
    Variant(1, False, 2),
    Variant(2, True, 2),
]
MASKING = {"tlm_probability": 0.5, "mlm_probability": 0.5}
LANGUAGES = ["de", "fr", "sw"]

#: Tested in every variant: all losses at once, and options that change how losses are divided.
IN_EVERY_VARIANT = [
    {"objective": ALL, "target_vocab_size": 140, "rtl_ratio": 0.6, **MASKING},
    {
        "objective": "tr+rtl",
        "projection": "mlp",
        "rtl_direction": "both",
        "rtl_languages": LANGUAGES,
    },
]
#: Tested in one variant each.
IN_ONE_VARIANT = [
    *({"objective": objective, **MASKING} for objective in OBJECTIVES),
    {"objective": "tr", "tr_bidirectional": True, "tr_same_side_negatives": True, "tr_weight": 0.3},
    {"objective": "tr+rtl", "tr_bidirectional": True, "tr_hard_negatives": 0.7},
    {"objective": "tr+rtl", "projection": "mlp", "rtl_ratio": 0.6, "tr_bidirectional": True},
    {"objective": "tr+rtl", "target_vocab_size": 140, "rtl_tied": False, "rtl_reembed": True},
    {"objective": "tr+rtl+tlm", "target_vocab_size": 140, "rtl_ratio": 0.6, **MASKING},
    {"objective": "tr+rtl", "rtl_direction": "target-to-source", "rtl_languages": LANGUAGES},
]
CASES = [*IN_EVERY_VARIANT, *IN_ONE_VARIANT]
RUNS = [
    *itertools.product(IN_EVERY_VARIANT, VARIANTS),
    *zip(IN_ONE_VARIANT, itertools.cycle(VARIANTS), strict=False),
]


def micro_batch(step: int, case: dict) -> Batch:
    """Make pairs of different lengths.

    The first and the last pair have the same target. They are on different processes.
    """
    batch = make_batch(PAIRS, longest=11, seed=step)
    for key in ("target_input_ids", "target_attention_mask", "target_noise"):
        batch[key][-1] = batch[key][0]
    if "tr_hard_negatives" in case:
        batch = with_negatives(batch)
    return batch | {"language_ids": torch.arange(PAIRS) % 3}


def share_of(batch: Batch, rank: int, world: int) -> Batch:
    """Take the rows of one process, without columns that only have padding."""
    rows = slice(rank * PAIRS // world, (rank + 1) * PAIRS // world)
    share = {}
    for key, value in batch.items():
        share[key] = value[rows]
        if key not in ("language_ids", "teacher_embeds"):
            side = key.split("_")[0]
            longest = int(batch[f"{side}_attention_mask"][rows].sum(1).max())
            share[key] = share[key][:, :longest]
    return share


def step_gradients(case: dict, variant: Variant, rank: int = 0, world: int = 1) -> Tensor:
    """Compute the gradients of all parameters after the backward passes of one optimizer step."""
    model = tiny_model("xlm-roberta", **case)
    if model.config.target_vocab_size:
        model.set_target_vocabulary([2, *range(60, 199)])
    if variant.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = DistributedDataParallel(model) if world > 1 else model

    for step in range(variant.accumulation):
        batch = share_of(micro_batch(step, case), rank, world)
        losses = chunk_losses(model, wrapped, batch, variant.size)
        for number, loss in enumerate(losses, 1):
            is_last = step == variant.accumulation - 1 and number == len(losses)
            no_sync = world > 1 and not is_last
            with wrapped.no_sync() if no_sync else contextlib.nullcontext():
                (loss() / variant.accumulation).backward()
    return gradients(model)


def chunk_losses(
    model: DAPForPreTraining, wrapped: torch.nn.Module, batch: Batch, size: int | None
) -> list[Callable]:
    """Return functions that compute the loss of the batch, or of each of its chunks."""
    if size is None:
        return [lambda: wrapped(**batch).loss]
    cached = CachedBatch(model, wrapped, batch, size)
    return [partial(cached.run, part) for part in cached.parts]


def save_gradients(rank: int, folder: Path) -> None:
    """Compute the gradients of every run in one process of two. The first process saves them."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    found = [step_gradients(case, variant, rank, 2) for case, variant in RUNS]
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    dist.destroy_process_group()


def test_two_processes_give_the_gradients_of_one_with_all_pairs(tmp_path: Path) -> None:
    run_two(save_gradients, tmp_path)
    found = torch.load(tmp_path / "gradients.pt")
    for (case, variant), gradient in zip(RUNS, found, strict=True):
        plain = Variant(variant.accumulation, checkpointing=False, size=None)
        assert distance(gradient, step_gradients(case, plain)) < 1e-5, (case, variant)
