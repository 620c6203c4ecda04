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
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from accelerate.utils import broadcast
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import BatchSampler, RandomSampler
from tqdm.auto import tqdm
from transformers import BatchEncoding, get_linear_schedule_with_warmup

from dap_transformers.files import write_json
from dap_transformers.training.encoded_pairs import encode_once, take_batch
from dap_transformers.training.grad_cache import seeded
from dap_transformers.training.step_log import readable
from dap_transformers.training.trainer import DAPTrainer
from modeling_dap import DAPForPreTraining
from objectives_dap import Objective, Pairs, maskable, needs_of, pairs_of

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

    Nothing is done if `head_steps` is 0 or no head has random weights. With several processes, the
    first one trains and sends the heads to the others. Neither the encoder's weights nor the random
    numbers of the joint training change. So a run that is stopped before its first checkpoint
    trains the same heads again. The results are written to the output folder.
    """
    model = trainer.model
    args = trainer.args
    translating = [each for each in model.objectives if each.from_other_side is not None]
    has_work = model.has_random_head and translating
    if args.head_steps and not has_work:
        logger.warning("head_steps has no effect: no head of RTL or BOW has random weights")
    if args.head_steps == 0 or not has_work:
        return

    names = tuple(f"{head}." for objective in translating for head in objective.heads)
    heads = [parameter for name, parameter in model.named_parameters() if name.startswith(names)]
    if args.process_index == 0:
        home = model.device
        model.to(args.device)
        with seeded(args.seed, args.device):
            results = train_heads(trainer, translating, heads)
        model.to(home)
        logger.info("heads trained: %s", readable(results))
        write_json(results, Path(args.output_dir) / RESULTS_FILE)
    if args.world_size > 1:
        for parameter in heads:
            parameter.data.copy_(broadcast(parameter.data.to(args.device)))
    model.has_random_head = False


def train_heads(
    trainer: DAPTrainer, translating: Sequence[Objective], heads: Sequence[Parameter]
) -> dict[str, float]:
    """Train the heads. The losses of several objectives are added up.

    Returns:
        The numbers of pairs and steps, the mean loss of the last tenth of the steps in nats per
        token, and the seconds.

    Raises:
        FloatingPointError: if the loss is not finite.
    """
    args = trainer.args
    model = trainer.model
    steps = args.head_steps
    if steps is None:
        steps = 200 if "rtl" in model.config.objectives else 400
    shows_progress = not args.disable_tqdm
    started = time.perf_counter()

    # 1. The first pairs that the joint training will draw.
    numbers = list(islice(trainer.train_sampler, args.head_pairs))
    collator = replace(trainer.data_collator, negatives=None, teacher=None)
    inputs = collator(trainer.train_dataset.select(numbers).to_list())
    pairs = pairs_of(BatchEncoding(inputs).to(args.device))
    start_with_frequencies(model, pairs)

    # 2. Encode them once.
    model.eval()
    with mixed_precision(args.device):
        needs = needs_of(translating)
        encoded = encode_once(model, pairs, needs, torch.bfloat16, shows_progress)

    # 3. Train on what was kept.
    optimizer = torch.optim.AdamW(heads, lr=LEARNING_RATE, betas=BETAS)
    warmup = min(WARMUP_STEPS, steps // 4)
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, steps)
    count = steps * PAIRS_PER_STEP
    drawn = RandomSampler(numbers, num_samples=count, generator=torch.default_generator)
    batches = BatchSampler(drawn, PAIRS_PER_STEP, drop_last=False)
    losses = []
    model.train()
    model.dap.eval()
    for rows in tqdm(batches, "train the heads", disable=not shows_progress):
        part, outputs = take_batch(pairs, encoded, torch.tensor(rows))
        with mixed_precision(args.device):
            loss = 0.0
            for objective in translating:
                sums, counts = objective.loss_from_other_side(part, outputs, model)
                loss += objective.mean(sums, counts)
        loss.backward()
        clip_grad_norm_(heads, LARGEST_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())

    loss = torch.stack(losses[-max(1, steps // 10) :]).mean().item()
    if not math.isfinite(loss):
        raise FloatingPointError(
            f"the loss of the heads is {loss}: check the start model's weights"
        )
    seconds = round(time.perf_counter() - started, 1)
    return {"pairs": len(numbers), "steps": steps, "loss": round(loss, 4), "seconds": seconds}


def start_with_frequencies(model: DAPForPreTraining, pairs: Pairs) -> None:
    """Set the bias of the head's output to the logarithm of the targets' token frequencies.

    The head then does not spend its first steps on learning them. A bias that is
    not zero was copied, and stays. So does the bias of a head that also predicts source tokens.
    """
    config = model.config
    predicts_sources = any(each.predicts == "tokens" for each in model.objectives)
    if predicts_sources or config.reconstructs_sources or model.prediction_head.bias.any():
        return

    ids, mask, _ = pairs.target  # (N, S)
    counted = maskable(mask, config)
    if "rtl" in config.objectives:  # it also predicts the token that ends a sentence
        counted = mask.bool()
        counted[:, : config.special_tokens_before] = False
    model.prediction_head.start_bias(torch.bincount(ids[counted]).cpu())


def mixed_precision(device: torch.device) -> torch.autocast:
    """Return autocast for bfloat16, which is on only if the device is fast at bfloat16.

    The setting `bf16` does not matter here: the weights of the heads stay in float32.
    """
    is_fast = False
    if device.type == "cuda":
        is_fast = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        is_fast = torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, torch.bfloat16, enabled=is_fast)
