"""Train the heads of RTL and BOW before the joint training, on outputs of the unchanged encoder.

An encoder without a masked-LM head, such as E5 or LaBSE, starts with a prediction head of random
weights. At the encoder's learning rate such a head learns too slowly to teach the encoder anything.
`train_missing_heads` trains it first:

1. Take the first pairs of the training, in the language mix of the run.
2. Encode them once and keep what the heads read: sentence vectors (BOW) or token states (RTL).
3. Train the heads on what was kept. The encoder does not run again, so a step is cheap.
4. Save the heads in the output folder, where the run finds them if it is started again.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast
from safetensors import safe_open
from safetensors.torch import save
from torch.nn.utils import clip_grad_norm_
from tqdm.auto import tqdm
from transformers import BatchEncoding, get_linear_schedule_with_warmup

from dap_transformers.files import whole_file, write_json
from dap_transformers.training.batches import BitextCollator
from dap_transformers.training.grad_cache import seeded
from dap_transformers.training.resume import differences
from dap_transformers.training.source_information import KeptPairs, SourceInformation, encode_once
from dap_transformers.training.step_log import readable
from dap_transformers.training.trainer import DAPTrainer
from modeling_dap import DAPForPreTraining
from objectives_dap import Objective, pairs_of

logger = logging.getLogger(__name__)

#: The trained heads and what their training reached, in the output folder.
HEADS_FILE = "trained_heads.safetensors"
RESULTS_FILE = "head_results.json"

#: How the heads are trained. `head_steps` and `head_pairs` decide how long.
LEARNING_RATE = 2e-3
BETAS = (0.9, 0.98)
WARMUP_STEPS = 50
PAIRS_PER_STEP = 96
LARGEST_GRADIENT_NORM = 1.0
#: Number of dev pairs that are measured before and after.
MEASURED_PAIRS = 256

Rows = list[dict[str, Any]]  # tokenised pairs, as `tokenize_bitext` makes them


def train_missing_heads(trainer: DAPTrainer, run: Mapping[str, Any]) -> None:
    """Train the heads of RTL and BOW on the frozen encoder if they have random weights.

    If an earlier start of the same run has trained them already, load them from the output
    folder. Nothing is done if `head_steps` is 0.

    With several processes, the first one trains and sends the heads to the others. Neither the
    encoder's weights nor the random numbers of the joint training change. The heads and the results
    are written to the output folder.

    Args:
        run: record of the run (`describe_run`). Only heads that were saved with an equal record are
            loaded.
    """
    model = trainer.model
    args = trainer.args
    token_objectives = [each for each in model.objectives if each.from_source is not None]
    if not model.has_random_head or not token_objectives or args.head_steps == 0:
        return

    if args.process_index == 0:
        file = Path(args.output_dir) / HEADS_FILE
        begins_anew = str(args.resume_from_checkpoint).lower() == "false"
        if begins_anew or not load_heads(model, file, run):
            home = model.device
            learning = [each for each in model.dap.parameters() if each.requires_grad]
            model.to(args.device)
            model.dap.requires_grad_(False)
            with seeded(args.seed, args.device):
                results = train_heads(trainer, token_objectives)
            for parameter in learning:
                parameter.requires_grad_(True)
            model.to(home)
            write_json(results, file.with_name(RESULTS_FILE))
            save_heads(model, file, run)
    if args.world_size > 1:
        share_heads(model, args.device)
    model.has_random_head = False


def train_heads(trainer: DAPTrainer, token_objectives: Sequence[Objective]) -> dict[str, float]:
    """Train the heads, and measure before and after how much they use the source.

    The result has the numbers of pairs and steps, the seconds, and the mean loss of the last steps.
    It also has the values of `SourceInformation` as "…_before" and "…_after", if there are dev
    pairs.
    """
    args = trainer.args
    steps = args.head_steps
    if steps is None:
        steps = 200 if "rtl" in trainer.model.config.objectives else 400
    before = measure(trainer)
    rows = first_pairs(trainer, args.head_pairs)
    start_bias(trainer.model, rows)

    cpu_began = time.process_time()
    encoding_began = time.perf_counter()
    collator = BitextCollator(trainer.data_collator.pad_token_id, trainer.data_collator.languages)
    pairs = pairs_of(BatchEncoding(collator(rows)).to(args.device))
    with mixed_precision(args.device):
        model = trainer.model.eval()
        shows_progress = not args.disable_tqdm
        kept = encode_once(model, token_objectives, pairs, "cpu", torch.bfloat16, shows_progress)
    training_began = time.perf_counter()
    loss = train_on_kept(trainer, token_objectives, kept, steps)
    training_ended = time.perf_counter()
    results = {
        "pairs": len(rows),
        "steps": steps,
        "loss": round(loss, 4),
        "encoding_seconds": round(training_began - encoding_began, 1),
        "training_seconds": round(training_ended - training_began, 1),
        "cpu_seconds": round(time.process_time() - cpu_began, 1),
    }

    after = measure(trainer)
    results |= {f"{name}_before": value for name, value in before.items()}
    results |= {f"{name}_after": value for name, value in after.items()}
    logger.info("heads trained: %s", readable(results))
    trainer.model.train()
    return results


# ------------------------------------------------------------------------- 1. pairs to learn from


def first_pairs(trainer: DAPTrainer, count: int) -> Rows:
    """Return the first tokenised pairs that the joint training will draw, `count` or fewer."""
    numbers = list(islice(iter(trainer.train_sampler), count))
    return trainer.train_dataset.select(numbers).to_list()


def start_bias(model: DAPForPreTraining, rows: Rows) -> None:
    """Set the bias of the head's output to the logarithm of the targets' token frequencies.

    The head then does not spend its first steps on learning them. Nothing is done if the bias is
    not all zeros, because it was copied, or if the head also predicts source tokens.
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


# -------------------------------------------------------------- 2 and 3. train on kept outputs


def train_on_kept(
    trainer: DAPTrainer, token_objectives: Sequence[Objective], kept: KeptPairs, steps: int
) -> float:
    """Train the heads, and return the mean loss of the last tenth of the steps, in nats per token.

    Losses of several objectives are added up.
    """
    args = trainer.args
    model = trainer.model
    heads = list(head_parameters(model).values())
    optimizer = torch.optim.AdamW(heads, lr=LEARNING_RATE, betas=BETAS)
    warmup = min(WARMUP_STEPS, steps // 4)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    draws = endless_batches(len(kept.embeds))
    losses = []

    model.train()
    model.dap.eval()
    for step in tqdm(range(1, steps + 1), desc="train the heads", disable=args.disable_tqdm):
        rows = torch.tensor(next(draws), device=args.device)
        pairs, encoded = kept.batch(rows, rows)
        with mixed_precision(args.device):
            loss = 0.0
            for objective in token_objectives:
                loss += objective.mean(*objective.loss_from_source(pairs, encoded, model))
        loss.backward()
        clip_grad_norm_(heads, LARGEST_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if (step % 20 == 0 or step == steps) and not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"the loss of the heads is {loss.item()} at step {step} of their training: check "
                "the weights of the start model, or leave this training out (head_steps=0)"
            )
    last = losses[-max(1, steps // 10) :]
    return torch.stack(last).mean().item()


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


def measure(trainer: DAPTrainer) -> dict[str, float]:
    """Measure how much the heads use the source, if the trainer has an evaluator for it."""
    for each in trainer.evaluators:
        if isinstance(each, SourceInformation):
            with mixed_precision(trainer.args.device):
                return replace(each, count=MEASURED_PAIRS)(trainer.encoder())
    return {}


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return autocast for bfloat16, which is on only if the device is fast at bfloat16."""
    is_fast = False
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        is_fast = torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=is_fast)


def head_parameters(model: DAPForPreTraining) -> dict[str, torch.nn.Parameter]:
    """Return the parameters of the heads that predict one side from the other, by name."""
    token_objectives = [each for each in model.objectives if each.from_source is not None]
    heads = tuple(f"{head}." for objective in token_objectives for head in objective.heads)
    return {name: own for name, own in model.named_parameters() if name.startswith(heads)}


# -------------------------------------------------------------------------- 4. store and share them


def save_heads(model: DAPForPreTraining, file: Path, run: Mapping[str, Any]) -> None:
    """Save the trained heads in a safetensors file, with the record of the run in its metadata."""
    heads = {name: value.detach().cpu() for name, value in head_parameters(model).items()}
    with whole_file(file) as opened:
        opened.write(save(heads, metadata={"run": json.dumps(run)}))


@torch.no_grad()
def load_heads(model: DAPForPreTraining, file: Path, run: Mapping[str, Any]) -> bool:
    """Load heads that an earlier start of the same run has trained. Tell whether there are any."""
    if not file.exists():
        return False
    with safe_open(file, "pt") as stored:
        if differences(json.loads(stored.metadata()["run"]), run):
            logger.info("%s is of a run with other arguments: the heads are trained anew", file)
            return False
        for name, parameter in head_parameters(model).items():
            parameter.copy_(stored.get_tensor(name))
    logger.info("trained heads loaded from %s", file)
    return True


@torch.no_grad()
def share_heads(model: DAPForPreTraining, device: torch.device) -> None:
    """Copy the weights of the first process's heads to all others, which call this together."""
    for parameter in head_parameters(model).values():
        parameter.copy_(broadcast(parameter.to(device)))
