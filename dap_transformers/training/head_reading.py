"""How much the heads of RTL and BOW learn from the source.

A head that only knows the target language also reaches a low loss, and then teaches the encoder
nothing. So the loss on dev pairs is compared with the loss with sources of other pairs. The
difference is the *information from the source*, in nats per token.

Shapes in the comments: `N` pairs, `S` tokens, `D` hidden size, `G` groups of labels.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.evaluation.evaluator import Evaluator, PairsByLanguage
from dap_transformers.training.batches import BitextCollator, cutting_backend, tokenize_pairs
from modeling_dap import DAPForPreTraining, needs_of
from objectives_dap import Encoded, Objective, Pairs, Sentences, objectives_of

#: Number of pairs that are encoded at a time.
PAIRS_AT_A_TIME = 64
#: Information from the source, in nats per token, below which a head hardly uses it.
HARDLY = 0.1


class EncoderWithHeads(SentenceEncoder):
    """A sentence encoder that also has the prediction heads of its model.

    Args:
        model: the model with its heads, not sharded.
        tokenizer: its tokenizer.
        options: further options of `SentenceEncoder`.
    """

    def __init__(
        self, model: DAPForPreTraining, tokenizer: PreTrainedTokenizerBase, **options: Any
    ) -> None:
        super().__init__(model.dap, tokenizer, **options)
        self.with_heads = model


@dataclass
class HeadReading(Evaluator):
    """How much the heads of RTL and BOW use the source, on dev pairs.

    The loss with each pair's own source is compared with the loss with another pair's source. The
    other pair is the next one of the same language. If a language has only one pair, it is the next
    one of any language. There is no dropout, and every call masks the same tokens.

    Attributes:
        pairs: language code -> (source, target) sentences. Languages for which the RTL head has no
            embedding are left out.
        count: about how many pairs are measured over all languages. Every language gives the same
            number, at least two, or all its pairs if it has fewer.
        ratios: values of `rtl_ratio` (the share of the target tokens to reconstruct) that are
            measured beside the configured one, on every fourth pair.
    """

    pairs: PairsByLanguage
    count: int = 512
    ratios: Sequence[float] = (0.25, 0.5, 0.75)
    name = "head_reading"
    primary = "rtl_loss"

    @torch.no_grad()
    def __call__(self, encoder: EncoderWithHeads) -> dict[str, float]:
        """Measure the heads of an encoder. Its model is left in evaluation mode.

        Returns:
            Values in nats per token: `rtl_loss`, `rtl_loss_shuffled` (with other sources), and
            their difference `rtl_source_nats`. For a ratio of 0.25 the difference is
            `rtl_source_nats_rho25`. BOW has the same three values, but none for other ratios. An
            empty dictionary if there are fewer than two pairs, or neither objective.
        """
        model = encoder.with_heads.eval()
        known = model.config.rtl_languages
        used = {}
        for language, rows in self.pairs.items():
            if known is None or language in known:
                used[language] = rows
        # The readers have a configuration of their own, in which the ratio can be changed. The
        # smallest ratio shows the most targets, so everything is encoded that any ratio needs.
        config = copy.copy(model.config)
        config.rtl_ratio = min(self.ratios, default=config.rtl_ratio)
        readers = [each for each in objectives_of(config) if each.from_source is not None]
        if not readers or sum(map(len, used.values())) < 2:
            return {}

        inputs, others = sample_pairs(used, encoder, known or list(used), self.count)
        others = others.to(model.device)
        autocast = torch.autocast(model.device.type, torch.bfloat16)
        with autocast if encoder.bf16 else nullcontext():
            pairs, encoded = encode_all(model, readers, inputs)
            found = {}
            for reader in readers:
                found |= self._read(model, reader, pairs, encoded, others)
        return {name: round(value, 4) + 0.0 for name, value in found.items()}

    def _read(
        self,
        model: DAPForPreTraining,
        reader: Objective,
        pairs: Pairs,
        encoded: Encoded,
        others: Tensor,
    ) -> dict[str, float]:
        """Return the values of one objective. `others` (N,) has the rows of the other pairs."""
        name = reader.name
        configured = model.config.rtl_ratio
        found = {}
        ratios = (configured, *self.ratios) if name == "rtl" else (configured,)
        for ratio in dict.fromkeys(ratios):
            reader.config.rtl_ratio = ratio
            step = 1 if ratio == configured else 4
            rows = torch.arange(0, len(others), step, device=others.device)
            loss = mean_loss(model, reader, pairs, encoded, rows, rows)
            shuffled = mean_loss(model, reader, pairs, encoded, rows, others[rows])
            if ratio == configured:
                found |= {f"{name}_loss": loss, f"{name}_loss_shuffled": shuffled}
                found[f"{name}_source_nats"] = shuffled - loss
            if name == "rtl" and ratio in self.ratios:
                found[f"rtl_source_nats_rho{100 * ratio:.0f}"] = shuffled - loss
        return found


def sample_pairs(
    pairs: PairsByLanguage, encoder: SentenceEncoder, languages: Sequence[str], count: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Take the same number of pairs of each language, evenly spread, or all if it has fewer.

    Args:
        pairs: language code -> (source, target) sentences.
        encoder: has the tokenizer, the prefix and the number of tokens of a sentence.
        languages: all languages that the model knows, in the order of its language ids.
        count: number of pairs over all languages, as in `HeadReading`.

    Returns:
        Arguments of `DAPForPreTraining.forward` for N pairs, with noise that does not depend on
        the seed of the run. Also a tensor (N,): for each pair, the row of another pair whose
        source replaces its own in the comparison.
    """
    backend = cutting_backend(encoder.tokenizer, encoder.max_seq_length)
    rows, blocks = [], []
    for language, own_pairs in pairs.items():
        own = min(len(own_pairs), max(2, count // len(pairs)))
        chosen = np.linspace(0, len(own_pairs) - 1, own).astype(int)
        texts = zip(*(own_pairs[row] for row in chosen), strict=True)
        rows += tokenize_pairs(*texts, language, backend, encoder.prefix)
        blocks.append(torch.arange(len(rows) - own, len(rows)))

    inputs = BitextCollator(encoder.tokenizer.pad_token_id, languages)(rows)
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
    """Encode N pairs, `PAIRS_AT_A_TIME` at a time, and keep what the readers need.

    Args:
        inputs: the first result of `sample_pairs`.

    Returns:
        The pairs on the model's device, and the encoder's outputs for them.
    """
    inputs = {name: value.to(model.device) for name, value in inputs.items()}
    sides = []
    for side in ("source", "target"):
        parts = (inputs[f"{side}_{part}"] for part in ("input_ids", "attention_mask", "noise"))
        sides.append(Sentences(*parts))
    pairs = Pairs(*sides, language_ids=inputs["language_ids"])
    parts = []
    for rows in torch.arange(len(pairs.source.ids), device=model.device).split(PAIRS_AT_A_TIME):
        parts.append(model.encode(take_rows(pairs, rows, rows), needs_of(readers))[:5])
    words, *outputs = zip(*parts, strict=True)
    return pairs, Encoded(words[0], *map(torch.cat, outputs))


def take_rows(pairs: Pairs, sources: Tensor, targets: Tensor) -> Pairs:
    """Combine the sources of some of N pairs, rows (n,), with the targets of others, rows (n,)."""
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

    For RTL in both directions, sources are predicted from targets as well.

    Args:
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
