"""Whether the heads of RTL and BOW read the source: their loss on dev pairs, and that with sources of other pairs."""

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dap.training.batches import BitextCollator, tokenize_pairs
from modeling_dap import DAPForPreTraining
from objectives_dap import Batch, Objective, Side

PAIRS, AT_A_TIME = 512, 64
RATIOS = (
    0.25,
    0.5,
    0.75,
)  # rho of RTL that are measured beside the configured one, on every fourth pair
#: Objectives that predict a side from the other, and which groups of their labels do.
READERS = {"rtl": slice(None), "bow": slice(1)}
SIDES, PARTS = ("source", "target"), ("input_ids", "attention_mask", "noise")
HARDLY = 0.1  # nats a token from the source

Bitext = Mapping[str, tuple[Sequence[str], Sequence[str]]]  # sources and targets by language


@torch.no_grad()
def source_reading(
    model: DAPForPreTraining,
    tokenizer: PreTrainedTokenizerBase,
    bitext: Bitext,
    max_seq_length: int,
    prefix: str = "",
) -> dict[str, float]:
    """The losses of RTL and BOW on up to `PAIRS` pairs, the same with shuffled sources, and the difference.

    In nats a token, without dropout and with the same masks in every call. All processes call it together and do the
    same work. A pair's shuffled source is that of the next pair of its language, or of any if its language has but
    one. Every sentence is encoded once.

    Args:
        model: it is left in evaluation mode.
        bitext: languages for which the RTL head has no embedding are left out.

    Returns:
        `rtl_loss`, `rtl_loss_shuffled` and `rtl_source_nats`; `rtl_source_nats_rho25` and so on for the `RATIOS`;
        `bow_loss` and so on, of the words that the source's vector tells. Nothing for fewer than two pairs.
    """
    known = model.config.rtl_languages
    read = {
        language: pairs for language, pairs in bitext.items() if known is None or language in known
    }
    readers = [objective for objective in model.objectives if objective.name in READERS]
    if not readers or sum(len(sources) for sources, _ in read.values()) < 2:
        return {}
    model.eval()
    batch, others = sample_pairs(read, tokenizer, max_seq_length, known or list(read), prefix)
    configured, config, found = model.config.rtl_ratio, copy.copy(model.config), {}
    config.rtl_ratio = min(RATIOS)  # shows targets, so that they are encoded whole
    for reader in readers:
        reader.config = config
    batch = encoded(model, readers, batch)
    for reader in readers:
        name = reader.name
        for ratio in dict.fromkeys((configured, *RATIOS) if name == "rtl" else (configured,)):
            config.rtl_ratio = ratio
            rows = torch.arange(0, len(others), 1 if ratio == configured else 4)
            own, shuffled = (
                mean_loss(model, reader, batch, rows, sources) for sources in (rows, others[rows])
            )
            if ratio == configured:
                found |= {
                    f"{name}_loss": own,
                    f"{name}_loss_shuffled": shuffled,
                    f"{name}_source_nats": shuffled - own,
                }
            if name == "rtl" and ratio in RATIOS:
                found[f"rtl_source_nats_rho{100 * ratio:.0f}"] = shuffled - own
    return {name: round(value, 4) + 0.0 for name, value in found.items()}


def sample_pairs(
    bitext: Bitext,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    languages: Sequence[str],
    prefix: str = "",
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
    for side in SIDES:
        shape = batch[f"{side}_input_ids"].shape
        batch[f"{side}_noise"] = torch.rand(shape, generator=generator)
    others = [block.roll(-1) if len(block) > 1 else (block + 1) % len(rows) for block in blocks]
    return batch, torch.cat(others)


def encoded(
    model: DAPForPreTraining, readers: Sequence[Objective], pairs: Mapping[str, Tensor]
) -> Batch:
    """These pairs with the states of both sides and the words that the heads need."""
    parts = []
    for rows in torch.arange(len(pairs["language_ids"])).split(AT_A_TIME):
        part = {name: value[rows].to(model.device) for name, value in pairs.items()}
        sides = (Side(*(part[f"{side}_{name}"] for name in PARTS)) for side in SIDES)
        parts.append(model.read(Batch(*sides, part["language_ids"]), readers)[0])
    sides = (Side(*map(torch.cat, zip(*(getattr(part, side) for part in parts)))) for side in SIDES)
    return Batch(*sides, torch.cat([part.language_ids for part in parts]), words=parts[0].words)


def mean_loss(
    model: DAPForPreTraining, reader: Objective, batch: Batch, rows: Tensor, sources: Tensor
) -> float:
    """The loss of these rows of a batch with the sources of those, in nats a token."""
    totals = []  # of the losses, and of the tokens
    for own, other in zip(rows.split(AT_A_TIME), sources.split(AT_A_TIME)):
        source, target = (
            Side(*(value[which] for value in side))
            for side, which in zip(batch.sides, (other, own))
        )
        part = batch._replace(source=source, target=target, language_ids=batch.language_ids[other])
        labels = reader.labels(part, model)
        sums, _ = reader.sums(part, model, labels)
        pair = torch.stack([sums, labels.flatten(1).sum(1)]).cpu().double()  # (2, G)
        totals.append(pair[:, READERS[reader.name]].sum(1))
    loss, tokens = torch.stack(totals).sum(0).tolist()
    return loss / max(tokens, 1)
