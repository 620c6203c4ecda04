"""A step on two processes against the same step on one with all pairs: every objective, GradCache, accumulation."""

import contextlib
import itertools
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from forked import run_two
from tiny_models import ALL, gradients, make_batch, tiny_model, with_negatives
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import losses_dap
from dap.training.grad_cache import CachedBatch
from modeling_dap import DAPForPreTraining
from objectives_dap import OBJECTIVES

MASKING = {"tlm_probability": 0.5, "mlm_probability": 0.5}
# accumulation steps, activation checkpointing, pairs of a chunk (GradCache)
VARIANTS = [(1, False, None), (2, True, None), (1, False, 2), (2, True, 2)]
#: Every loss at once, and the losses with options that change how they are divided: in every variant.
EVERY_WAY = [
    {"objective": ALL, "target_vocab_size": 140, "rtl_ratio": 0.6, **MASKING},
    {
        "objective": "tr+rtl",
        "projection": "mlp",
        "rtl_direction": "both",
        "rtl_languages": ["de", "fr", "sw"],
    },
]
#: The others in one variant each, in turn.
IN_TURN = [
    *({"objective": objective, **MASKING} for objective in OBJECTIVES),
    {"objective": "tr", "tr_bidirectional": True, "tr_weight": 0.3},
    {"objective": "tr+rtl", "tr_bidirectional": True, "tr_hard_negatives": 0.7},
    {"objective": "tr+rtl", "projection": "mlp", "rtl_ratio": 0.6, "tr_bidirectional": True},
    {"objective": "tr+rtl", "target_vocab_size": 140, "rtl_tied": False, "rtl_reembed": True},
    {"objective": "tr+rtl+tlm", "target_vocab_size": 140, "rtl_ratio": 0.6, **MASKING},
    {
        "objective": "tr+rtl",
        "rtl_direction": "target-to-source",
        "rtl_languages": ["de", "fr", "sw"],
    },
]
CASES = [*EVERY_WAY, *IN_TURN]
RUNS = [
    *itertools.product(EVERY_WAY, VARIANTS),
    *zip(IN_TURN, itertools.cycle(VARIANTS), strict=False),
]
PAIRS = 10  # in all processes together: an odd number in each of two


def micro_batch(step: int, case: dict) -> dict[str, Tensor]:
    """Pairs with uneven numbers of tokens; the first and the last, on different processes, have the same target."""
    batch = make_batch(PAIRS, longest=11, seed=step)
    for key in ("target_input_ids", "target_attention_mask", "target_noise"):
        batch[key][-1] = batch[key][0]
    batch = with_negatives(batch) if "tr_hard_negatives" in case else batch
    return batch | {"language_ids": torch.arange(PAIRS) % 3}


def share_of(batch: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """The rows of one process, without the columns that are padding in all of them."""
    rows = {
        key: value[rank * PAIRS // world : (rank + 1) * PAIRS // world]
        for key, value in batch.items()
    }
    languages = rows.pop("language_ids")
    sides = [key.split("_")[0] for key in rows if key.endswith("mask")]
    width = {side: int(rows[f"{side}_attention_mask"].sum(1).max()) for side in sides}
    cut = {key: value[:, : width[key.split("_")[0]]] for key, value in rows.items()}
    return cut | {"language_ids": languages}


def step_gradients(
    case: dict,
    accumulation: int,
    checkpointing: bool,
    size: int | None = None,
    rank: int = 0,
    world: int = 1,
) -> Tensor:
    """Parameter gradients after one optimizer step's backward passes."""
    model = tiny_model("xlm-roberta", **case)
    if model.config.target_vocab_size:
        model.set_target_vocabulary([2, *range(60, 199)])
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    wrapped = DistributedDataParallel(model) if world > 1 else model
    for step in range(accumulation):
        losses = chunk_losses(model, wrapped, share_of(micro_batch(step, case), rank, world), size)
        for number, loss in enumerate(losses, 1):
            waits = step < accumulation - 1 or number < len(losses)
            with wrapped.no_sync() if waits and world > 1 else contextlib.nullcontext():
                (loss() / accumulation).backward()
    return gradients(model)


def chunk_losses(
    model: DAPForPreTraining, wrapped: torch.nn.Module, batch: dict[str, Tensor], size: int | None
) -> list[Callable[[], Tensor]]:
    """What gives the losses that are to go back one after the other: of the batch, or of its chunks."""
    if size is None:
        return [lambda: wrapped(**batch).loss]
    cached = CachedBatch(model, wrapped, batch, size)
    return [partial(cached.run, part) for part in cached.parts]


def save_gradients(rank: int, folder: Path) -> None:
    """One process of two; the first writes the gradients of every run."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    found = [step_gradients(case, *variant, rank, 2) for case, variant in RUNS]
    if rank == 0:
        torch.save(found, folder / "gradients.pt")
    dist.destroy_process_group()


def test_two_processes_give_the_gradients_of_one_with_all_pairs(tmp_path: Path) -> None:
    run_two(save_gradients, tmp_path)
    found = torch.load(tmp_path / "gradients.pt")
    for (case, (accumulation, *variant)), gradient in zip(RUNS, found, strict=True):
        whole = step_gradients(case, accumulation, False)
        assert (gradient - whole).norm() / whole.norm() < 1e-5, (case, accumulation, variant)


def test_gather_is_the_identity_in_one_process() -> None:
    rows = torch.randn(3, 2, requires_grad=True)
    assert losses_dap.gather_rows(rows) is rows
    assert losses_dap.sum_over_processes(rows) is rows
