"""Whether the RTL head reads the source: its loss on dev pairs beside that with the sources of other pairs."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dap.training.data import BitextCollator, tokenize_pairs
from modeling_dap import DAPForPreTraining

PAIRS, AT_A_TIME = 512, 64
RATIOS = (0.25, 0.5, 0.75)  # rho that are measured beside the configured one, on every fourth pair
ANSWERS = {"source-to-target": ("target",), "target-to-source": ("source",), "both": ("source", "target")}
HARDLY = 0.1  # nats a token from the source

Bitext = Mapping[str, tuple[Sequence[str], Sequence[str]]]  # sources and targets by language


@torch.no_grad()
def source_reading(
    model: DAPForPreTraining, tokenizer: PreTrainedTokenizerBase, bitext: Bitext, max_seq_length: int, prefix: str = ""
) -> dict[str, float]:
    """The RTL loss of up to `PAIRS` pairs, the same with shuffled sources, and the difference: nats a token.

    Without dropout and with the same masks in every call. All processes call it together and do the same work. A
    pair's shuffled source is that of the next pair of its language, or of any if its language has but one.

    Args:
        model: one with an RTL head; it is left in evaluation mode.
        bitext: languages for which the head has no embedding are left out.

    Returns:
        `rtl_loss`, `rtl_loss_shuffled` and `rtl_source_nats`; `rtl_source_nats_rho25` and so on for the `RATIOS`.
        Nothing for fewer than two pairs.
    """
    known = model.config.rtl_languages
    read = {language: pairs for language, pairs in bitext.items() if known is None or language in known}
    if sum(len(sources) for sources, _ in read.values()) < 2:
        return {}
    model.eval()
    batch, others = sample_pairs(read, tokenizer, max_seq_length, known or list(read), prefix)
    configured, found = model.config.rtl_ratio, {}
    try:
        for ratio in {configured: None, **dict.fromkeys(RATIOS)}:
            model.config.rtl_ratio = ratio
            rows = torch.arange(0, len(others), 1 if ratio == configured else 4)
            own, shuffled = (mean_loss(model, batch, rows, sources) for sources in (rows, others[rows]))
            if ratio == configured:
                found |= {"rtl_loss": own, "rtl_loss_shuffled": shuffled, "rtl_source_nats": shuffled - own}
            if ratio in RATIOS:
                found[f"rtl_source_nats_rho{100 * ratio:.0f}"] = shuffled - own
    finally:
        model.config.rtl_ratio = configured
    return {name: round(value, 4) + 0.0 for name, value in found.items()}


def sample_pairs(
    bitext: Bitext, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, languages: Sequence[str], prefix: str = ""
) -> tuple[dict[str, Tensor], Tensor]:
    """Forward's arguments for N pairs, as many of each language, and the row of each one's shuffled source (N,)."""
    rows, blocks = [], []
    for language, sides in bitext.items():
        count = min(len(sides[0]), max(2, PAIRS // len(bitext)))
        chosen = np.linspace(0, len(sides[0]) - 1, count).astype(int)
        texts = ([side[row] for row in chosen] for side in sides)
        rows += tokenize_pairs(*texts, language, tokenizer, max_seq_length, prefix)
        blocks.append(torch.arange(len(rows) - count, len(rows)))
    batch = BitextCollator(tokenizer.pad_token_id, languages)(rows)
    del batch["pair_ids"]
    generator = torch.Generator().manual_seed(0)
    for side in ("source", "target"):
        shape = batch[f"{side}_input_ids"].shape
        batch[f"{side}_noise"] = torch.rand(shape, dtype=torch.float64, generator=generator)
    others = [block.roll(-1) if len(block) > 1 else (block + 1) % len(rows) for block in blocks]
    return batch, torch.cat(others)


def mean_loss(model: DAPForPreTraining, batch: Mapping[str, Tensor], rows: Tensor, sources: Tensor) -> float:
    """The RTL loss of these rows of a batch with the sources of those, in nats a token."""
    sums = []  # of the losses, and of the tokens
    for pair in zip(rows.split(AT_A_TIME), sources.split(AT_A_TIME)):
        inputs = {name: value[pair[not name.startswith("target")]].to(model.device) for name, value in batch.items()}
        out, tokens = model(**inputs), 0
        for side in ANSWERS[model.config.rtl_direction]:
            chosen = inputs[f"{side}_attention_mask"].bool() & (inputs[f"{side}_noise"] < model.config.rtl_ratio)
            tokens = tokens + chosen[:, 1:].sum()
        tokens = tokens - out.ignored_tokens
        sums.append(torch.stack([out.rtl_loss.double() * tokens, tokens.double()]))
    loss, tokens = torch.stack(sums).sum(0).tolist()
    return loss / max(tokens, 1)
