"""Train the heads of RTL and BOW before the joint training, on outputs of the unchanged encoder.

An encoder without a masked-LM head, such as E5 or LaBSE, starts with a prediction head of random
weights. At the encoder's learning rate such a head learns too slowly to teach the encoder anything.
`train_missing_heads` trains it first:

1. Take the first pairs of the training, in the language mix of the run.
2. Encode them once and keep what the heads read: sentence vectors (BOW) or token states (RTL).
3. Train the heads on what was kept. The encoder does not run again, so a step is cheap. A `Trainer`
   that runs the frozen encoder in each step takes more than twice the CPU time for RTL.
"""

import logging
import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from tqdm.auto import tqdm
from transformers import BatchEncoding, get_linear_schedule_with_warmup

from dap_transformers.files import write_json
from dap_transformers.training.batches import BitextCollator
from dap_transformers.training.grad_cache import seeded
from dap_transformers.training.source_information import KeptPairs, encode_once
from dap_transformers.training.step_log import readable
from dap_transformers.training.trainer import DAPTrainer
from modeling_dap import DAPForPreTraining
from objectives_dap import Objective, pairs_of

logger = logging.getLogger(__name__)

#: What the training of the heads reached, in the output folder.
RESULTS_FILE = "head_results.json"

#: How the heads are trained. `head_steps` and `head_pairs` decide how long.
LEARNING_RATE = 2e-3
BETAS = (0.9, 0.98)
WARMUP_STEPS = 50
PAIRS_PER_STEP = 96
LARGEST_GRADIENT_NORM = 1.0


def train_missing_heads(trainer: DAPTrainer) -> None:
    """Train the heads of RTL and BOW on the frozen encoder if they have random weights.

    Nothing is done if `head_steps` is 0. With several processes, the first one trains and sends the
    heads to the others. Neither the encoder's weights nor the random numbers of the joint training
    change. So a run that is stopped before its first checkpoint trains the same heads again. The
    results are written to the output folder.
    """
    model = trainer.model
    args = trainer.args
    token_objectives = [each for each in model.objectives if each.from_source is not None]
    if not model.has_random_head or not token_objectives or args.head_steps == 0:
        if args.head_steps:
            logger.warning("head_steps has no effect: no head of RTL or BOW has random weights")
        return

    names = tuple(f"{head}." for objective in token_objectives for head in objective.heads)
    heads = [parameter for name, parameter in model.named_parameters() if name.startswith(names)]
    if args.process_index == 0:
        home = model.device
        model.to(args.device)
        with seeded(args.seed, args.device):
            results = train_heads(trainer, token_objectives, heads)
        model.to(home)
        logger.info("heads trained: %s", readable(results))
        write_json(results, Path(args.output_dir) / RESULTS_FILE)
    if args.world_size > 1:
        for parameter in heads:
            parameter.data.copy_(broadcast(parameter.data.to(args.device)))
    model.has_random_head = False


def train_heads(
    trainer: DAPTrainer, token_objectives: Sequence[Objective], heads: Sequence[Parameter]
) -> dict[str, float]:
    """Train the heads. Return the numbers of pairs and steps, the loss and the seconds.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    args = trainer.args
    model = trainer.model
    steps = args.head_steps
    if steps is None:
        steps = 200 if "rtl" in model.config.objectives else 400
    started = time.perf_counter()

    # 1. The first pairs that the joint training will draw.
    numbers = list(islice(trainer.train_sampler, args.head_pairs))
    rows = trainer.train_dataset.select(numbers).to_list()
    start_bias(model, rows)

    # 2. Encode them once.
    collator = BitextCollator(trainer.data_collator.pad_token_id, trainer.data_collator.languages)
    pairs = pairs_of(BatchEncoding(collator(rows)).to(args.device))
    shows_progress = not args.disable_tqdm
    with mixed_precision(args.device):
        model.eval()
        kept = encode_once(model, token_objectives, pairs, torch.bfloat16, shows_progress)

    # 3. Train on what was kept.
    loss = train_on_kept(kept, token_objectives, heads, steps, shows_progress)
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss of the heads is {loss}: check the start model's weights"
        )
    seconds = round(time.perf_counter() - started, 1)
    return {"pairs": len(rows), "steps": steps, "loss": round(loss, 4), "seconds": seconds}


def start_bias(model: DAPForPreTraining, rows: Sequence[dict[str, Any]]) -> None:
    """Set the bias of the head's output to the logarithm of the targets' token frequencies.

    The head then does not spend its first steps on learning them. Nothing is done if the bias is
    not all zeros, because it was copied, or if the head also predicts source tokens.

    Args:
        rows: tokenised pairs, as `tokenize_bitext` makes them.
    """
    config = model.config
    predicts_sources = any(each.predicts == "tokens" for each in model.objectives)
    if predicts_sources or config.reconstructs_sources or model.prediction_head.bias.any():
        return

    # Only RTL predicts the token that ends a sentence.
    first = config.special_tokens_before
    behind = 0 if "rtl" in config.objectives else config.special_tokens_after
    targets = [row["target_input_ids"] for row in rows]
    ids = np.concatenate([ids[first : len(ids) - behind] for ids in targets]).astype(np.int64)
    counts = np.bincount(ids, minlength=config.vocab_size)
    model.prediction_head.start_bias(torch.from_numpy(counts))


def train_on_kept(
    kept: KeptPairs,
    token_objectives: Sequence[Objective],
    heads: Sequence[Parameter],
    steps: int,
    shows_progress: bool,
) -> float:
    """Train the heads, and return the mean loss of the last tenth of the steps, in nats per token.

    Losses of several objectives are added up.
    """
    model = kept.model
    optimizer = torch.optim.AdamW(heads, lr=LEARNING_RATE, betas=BETAS)
    warmup = min(WARMUP_STEPS, steps // 4)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    draws = islice(endless_batches(len(kept.embeds)), steps)
    losses = []

    model.train()
    model.dap.eval()
    for draw in tqdm(draws, "train the heads", steps, disable=not shows_progress):
        rows = torch.tensor(draw)
        pairs, encoded = kept.batch(rows, rows)
        with mixed_precision(model.device):
            loss = 0.0
            for objective in token_objectives:
                loss += objective.mean(*objective.loss_from_source(pairs, encoded, model))
        loss.backward()
        clip_grad_norm_(heads, LARGEST_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    return torch.stack(losses[-max(1, steps // 10) :]).mean().item()


def endless_batches(count: int) -> Iterator[list[int]]:
    """Yield random batches of `PAIRS_PER_STEP` numbers from 0 to `count - 1`, without end.

    Every number is drawn once before any is drawn again. A batch may hold a number twice where
    one round ends and the next begins.
    """
    waiting: list[int] = []
    while True:
        while len(waiting) < PAIRS_PER_STEP:
            waiting += torch.randperm(count).tolist()
        yield waiting[:PAIRS_PER_STEP]
        del waiting[:PAIRS_PER_STEP]


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return autocast for bfloat16, which is on only if the device is fast at bfloat16."""
    is_fast = False
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        is_fast = torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=is_fast)
