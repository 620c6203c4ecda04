"""How much the heads of RTL and BOW learn from the source.

A head that only knows the target language also reaches a low loss, and then teaches the encoder
nothing. So the loss on dev pairs is compared with the loss with sources of other pairs. The
difference is the *information from the source*, in nats per token.

Shapes in the comments: `N` pairs, `S` tokens, `D` hidden size, `G` groups of labels.
"""

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dap_transformers.training.batches import BitextCollator, cutting_backend, tokenize_pairs
from modeling_dap import DAPForPreTraining
from objectives_dap import Encoded, Objective, Pairs, Sentences, needs_of, objectives_of

#: Number of pairs that are measured, and how many of them run at a time.
MEASURED_PAIRS = 512
PAIRS_AT_A_TIME = 64
#: Values of `rtl_ratio` that are measured beside the configured one, on every fourth pair.
RATIOS = (0.25, 0.5, 0.75)
#: Information from the source, in nats per token, below which a head hardly uses it.
HARDLY = 0.1

Bitext = Mapping[str, tuple[Sequence[str], Sequence[str]]]  # language -> sources and targets


@torch.no_grad()
def source_reading(
    model: DAPForPreTraining,
    tokenizer: PreTrainedTokenizerBase,
    bitext: Bitext,
    max_seq_length: int,
    prefix: str = "",
    count: int = MEASURED_PAIRS,
    ratios: Sequence[float] = RATIOS,
) -> dict[str, float]:
    """Measure how much the heads of RTL and BOW use the source, on dev pairs.

    The loss with each pair's own source is compared with the loss with another pair's source.

    There is no dropout, and every call masks the same tokens. In a group of processes, all call
    it and do the same work. The other pair is the next one of the same language. If a language
    has only one pair, it is the next one of any language.

    Args:
        model: the model, not sharded. It is left in evaluation mode.
        tokenizer: the model's tokenizer.
        bitext: sources and targets by language. Languages for which the RTL head has no embedding
            are left out.
        max_seq_length: largest number of tokens of a sentence, with special tokens.
        prefix: text to put before every sentence.
        count: about how many pairs are measured over all languages. Every language gives the same
            number, at least two, or all its pairs if it has fewer.
        ratios: values of `rtl_ratio` (the share of the target tokens to reconstruct) that are
            measured beside the configured one, on every fourth pair.

    Returns:
        Values in nats per token: `rtl_loss`, `rtl_loss_shuffled` (with other sources), and their
        difference `rtl_source_nats`. For a ratio of 0.25 the difference is
        `rtl_source_nats_rho25`. BOW has the same three values, but none for other ratios. An
        empty dictionary if there are fewer than two pairs, or neither objective.
    """
    known = model.config.rtl_languages
    used = {}
    for language, pairs in bitext.items():
        if known is None or language in known:
            used[language] = pairs
    # The readers have a configuration of their own, in which the ratio can be changed. The smallest
    # ratio shows the most targets, so everything is encoded that any ratio needs.
    config = copy.copy(model.config)
    config.rtl_ratio = min(ratios, default=config.rtl_ratio)
    readers = [each for each in objectives_of(config) if each.from_source is not None]
    if not readers or sum(len(sources) for sources, _ in used.values()) < 2:
        return {}

    model.eval()
    languages = known or list(used)
    inputs, others = sample_pairs(used, tokenizer, max_seq_length, languages, prefix, count)
    others = others.to(model.device)
    pairs, encoded = encode_all(model, readers, inputs)

    found = {}
    configured = model.config.rtl_ratio
    for reader in readers:
        name = reader.name
        measured = dict.fromkeys((configured, *ratios)) if name == "rtl" else (configured,)
        for ratio in measured:
            config.rtl_ratio = ratio
            step = 1 if ratio == configured else 4
            rows = torch.arange(0, len(others), step, device=others.device)
            loss = mean_loss(model, reader, pairs, encoded, rows, rows)
            shuffled = mean_loss(model, reader, pairs, encoded, rows, others[rows])
            if ratio == configured:
                found[f"{name}_loss"] = loss
                found[f"{name}_loss_shuffled"] = shuffled
                found[f"{name}_source_nats"] = shuffled - loss
            if name == "rtl" and ratio in ratios:
                found[f"rtl_source_nats_rho{100 * ratio:.0f}"] = shuffled - loss
    return {name: round(value, 4) + 0.0 for name, value in found.items()}


def sample_pairs(
    bitext: Bitext,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    languages: Sequence[str],
    prefix: str = "",
    count: int = MEASURED_PAIRS,
) -> tuple[dict[str, Tensor], Tensor]:
    """Take the same number of pairs of each language, evenly spread, or all if it has fewer.

    Args:
        bitext: sources and targets by language.
        tokenizer: the model's tokenizer.
        max_seq_length: largest number of tokens of a sentence, with special tokens.
        languages: all languages that the model knows, in the order of its language ids.
        prefix: text to put before every sentence.
        count: number of pairs over all languages, as in `source_reading`.

    Returns:
        Arguments of `DAPForPreTraining.forward` for N pairs, with noise that does not depend on
        the seed of the run. Also a tensor (N,): for each pair, the row of another pair whose
        source replaces its own in the comparison.
    """
    backend = cutting_backend(tokenizer, max_seq_length)
    rows, blocks = [], []
    for language, (sources, targets) in bitext.items():
        own = min(len(sources), max(2, count // len(bitext)))
        chosen = np.linspace(0, len(sources) - 1, own).astype(int)
        texts = [sources[row] for row in chosen], [targets[row] for row in chosen]
        rows += tokenize_pairs(*texts, language, backend, prefix)
        blocks.append(torch.arange(len(rows) - own, len(rows)))

    inputs = BitextCollator(tokenizer.pad_token_id, languages)(rows)
    del inputs["pair_ids"]
    generator = torch.Generator().manual_seed(0)
    for side in ("source", "target"):
        shape = inputs[f"{side}_input_ids"].shape
        inputs[f"{side}_noise"] = torch.rand(shape, generator=generator)

    others = []
    for block in blocks:
        others.append(block.roll(-1) if len(block) > 1 else (block + 1) % len(rows))
    return inputs, torch.cat(others)


def encode_all(
    model: DAPForPreTraining, readers: Sequence[Objective], inputs: Mapping[str, Tensor]
) -> tuple[Pairs, Encoded]:
    """Encode N pairs, `PAIRS_AT_A_TIME` at a time.

    Args:
        model: the model.
        readers: the objectives RTL and BOW, as far as the model has them. They decide which
            outputs of the encoder are kept.
        inputs: the first result of `sample_pairs`.

    Returns:
        The pairs on the model's device, and the encoder's outputs for them.
    """
    device = model.device
    pairs = Pairs(
        *(
            Sentences(
                inputs[f"{side}_input_ids"].to(device),
                inputs[f"{side}_attention_mask"].to(device),
                inputs[f"{side}_noise"].to(device),
            )
            for side in ("source", "target")
        ),
        language_ids=inputs["language_ids"].to(device),
    )
    parts = []
    for rows in torch.arange(len(pairs.source.ids), device=device).split(PAIRS_AT_A_TIME):
        parts.append(model.encode(take_rows(pairs, rows, rows), needs_of(readers)))
    encoded = Encoded(
        words=parts[0].words,
        source_states=torch.cat([part.source_states for part in parts]),
        target_states=torch.cat([part.target_states for part in parts]),
        source_embeds=torch.cat([part.source_embeds for part in parts]),
        target_embeds=torch.cat([part.target_embeds for part in parts]),
    )
    return pairs, encoded


def take_rows(pairs: Pairs, sources: Tensor, targets: Tensor) -> Pairs:
    """Return n pairs that combine the sources of some pairs with the targets of others.

    Args:
        pairs: N pairs.
        sources: rows (n,) of the pairs that give the sources and languages.
        targets: rows (n,) of the pairs that give the targets.
    """
    return Pairs(
        source=Sentences(*(value[sources] for value in pairs.source)),
        target=Sentences(*(value[targets] for value in pairs.target)),
        language_ids=pairs.language_ids[sources],
    )


def mean_loss(
    model: DAPForPreTraining,
    reader: Objective,
    pairs: Pairs,
    encoded: Encoded,
    targets: Tensor,
    sources: Tensor,
) -> float:
    """Compute the mean loss of predicting targets from sources, in nats per token.

    Only predictions of one side from the other count. For RTL in both directions, sources are
    predicted from targets as well.

    Args:
        model: the model.
        reader: the objective that predicts, RTL or BOW.
        pairs: N pairs.
        encoded: the encoder's outputs for them.
        targets: rows (n,) of the pairs whose targets are predicted.
        sources: rows (n,) of the pairs whose sources they are predicted from.
    """
    totals = []  # loss and tokens of each part
    for target_rows, source_rows in zip(
        targets.split(PAIRS_AT_A_TIME), sources.split(PAIRS_AT_A_TIME)
    ):
        part = take_rows(pairs, source_rows, target_rows)
        states = Encoded(
            words=encoded.words,
            source_states=encoded.source_states[source_rows],
            target_states=encoded.target_states[target_rows],
            source_embeds=encoded.source_embeds[source_rows],
            target_embeds=encoded.target_embeds[target_rows],
        )
        sums, counts = reader.loss_from_source(part, states, model)
        loss_and_tokens = torch.stack([sums, counts]).cpu().double()  # (2, G)
        totals.append(loss_and_tokens.sum(1))
    loss, tokens = torch.stack(totals).sum(0).tolist()
    return loss / max(tokens, 1)
