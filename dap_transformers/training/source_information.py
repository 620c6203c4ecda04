"""How much the heads of RTL and BOW learn from the source.

A head that only knows the target language also reaches a low loss, and then teaches the encoder
nothing. So the loss on dev pairs is compared with the loss with sources of other pairs. The
difference is the *information from the source*, in nats per token.

Shapes in the comments: `N` pairs, `G` groups of labels.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import BatchEncoding, PreTrainedTokenizerBase

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.evaluation.evaluator import Evaluator, PairsByLanguage, as_pairs
from dap_transformers.training.batches import BitextCollator
from dap_transformers.training.encoded_pairs import (
    PAIRS_AT_A_TIME,
    EncodedPairs,
    encode_once,
    take_batch,
)
from modeling_dap import DAPForPreTraining
from objectives_dap import Objective, Pairs, Sentences, needs_of, pairs_of

#: About how many dev pairs are measured over all languages.
MEASURED_PAIRS = 512
#: Information from the source, in nats per token, below which a head hardly uses it.
LEAST_INFORMATION = 0.1


class EncoderWithHeads(SentenceEncoder):
    """A sentence encoder that also has the prediction heads of its model, which is not sharded.

    Args:
        saved: the encoder that the training saves, which encodes queries and documents. They are
            often longer than the sentences of the training.
    """

    def __init__(
        self,
        model: DAPForPreTraining,
        tokenizer: PreTrainedTokenizerBase,
        saved: SentenceEncoder,
        **options: Any,
    ) -> None:
        super().__init__(model.dap, tokenizer, **options)
        self.with_heads = model
        self.saved = saved

    def for_task(self, task: str) -> SentenceEncoder:
        return self.saved.for_task(task)


class SourceInformation(Evaluator):
    """How much the heads of RTL and BOW use the source, on dev pairs.

    The loss with each pair's own source is compared with the loss with the source of the next pair
    of the same language. There is no dropout, and every call masks the same tokens.

    Args:
        pairs: language code -> (source, target) sentences. Languages with one pair, and those for
            which the RTL head has no embedding, are left out.
    """

    name = "source_information"
    task = "information from the source"
    primary = "rtl_loss"

    def __init__(self, pairs: PairsByLanguage) -> None:
        self.pairs = as_pairs(pairs)

    @torch.no_grad()
    def __call__(self, encoder: EncoderWithHeads) -> dict[str, float]:
        """Measure the heads of an encoder. Its model is left in evaluation mode.

        Returns:
            Values in nats per token: `rtl_loss`, `rtl_loss_shuffled` (with other sources), and
            their difference `rtl_source_nats`. BOW has the same three values. An empty dictionary
            if no language has two pairs, or the model has neither objective.
        """
        model = encoder.with_heads.eval()
        known = model.config.rtl_languages
        used = {}
        for language, rows in self.pairs.items():
            if len(rows) > 1 and (known is None or language in known):
                used[language] = rows
        translating = [each for each in model.objectives if each.from_other_side is not None]
        if not translating or not used:
            return {}

        inputs, others = sample_pairs(used, encoder, known or list(used))
        found = {}
        device = model.device.type  # a GPU without bfloat16 refuses even the context
        with torch.autocast(device, torch.bfloat16) if encoder.bf16 else nullcontext():
            pairs = pairs_of(BatchEncoding(inputs).to(model.device))
            encoded = encode_once(model, pairs, needs_of(translating), model.dtype)
            shuffled = exchange_sources(pairs, encoded, others)
            for objective in translating:
                loss = mean_loss(model, objective, pairs, encoded)
                loss_shuffled = mean_loss(model, objective, *shuffled)
                found[f"{objective.name}_loss"] = loss
                found[f"{objective.name}_loss_shuffled"] = loss_shuffled
                found[f"{objective.name}_source_nats"] = loss_shuffled - loss
        return {name: round(value, 4) + 0.0 for name, value in found.items()}


def sample_pairs(
    pairs: PairsByLanguage, encoder: SentenceEncoder, languages: Sequence[str]
) -> tuple[dict[str, Tensor], Tensor]:
    """Take `MEASURED_PAIRS` pairs, as many of each language, evenly spread.

    Every language gives at least two pairs, or all that it has.

    Args:
        languages: all languages that the model knows, in the order of its language ids.

    Returns:
        Arguments of `DAPForPreTraining.forward` for N pairs, with noise that does not depend on
        the seed of the run. Also, for each pair, the row of another pair whose source replaces its
        own in the comparison: (N,).
    """
    tokenize = partial(encoder.tokenizer, truncation=True, max_length=encoder.max_seq_length)
    rows: list[dict[str, Any]] = []
    others: list[int] = []
    for language, own_pairs in pairs.items():
        count = min(len(own_pairs), max(2, MEASURED_PAIRS // len(pairs)))
        chosen = np.linspace(0, len(own_pairs) - 1, count).astype(int)
        first = len(rows)
        for row in chosen:
            source, target = (tokenize(encoder.prefix + text).input_ids for text in own_pairs[row])
            ids = {"source_input_ids": source, "target_input_ids": target}
            rows.append(ids | {"language": language, "pair_id": ""})
        others += [*range(first + 1, len(rows)), first]

    inputs = BitextCollator(encoder.tokenizer.pad_token_id, languages)(rows)
    del inputs["pair_ids"]
    generator = torch.Generator().manual_seed(0)
    for side in ("source", "target"):
        shape = inputs[f"{side}_input_ids"].shape
        inputs[f"{side}_noise"] = torch.rand(shape, generator=generator)
    return inputs, torch.tensor(others)


def exchange_sources(
    pairs: Pairs, encoded: EncodedPairs, rows: Tensor
) -> tuple[Pairs, EncodedPairs]:
    """Give each of N targets the source of another pair of its language, given their rows (N,)."""
    states = dict(encoded.states)
    if "source_states" in states:
        states["source_states"] = [states["source_states"][row] for row in rows.tolist()]
    return (
        pairs._replace(source=Sentences(*(values[rows] for values in pairs.source))),
        encoded._replace(source_embeds=encoded.source_embeds[rows], states=states),
    )


def mean_loss(
    model: DAPForPreTraining, objective: Objective, pairs: Pairs, encoded: EncodedPairs
) -> float:
    """Compute the mean loss of predicting the targets of N pairs, in nats per token.

    For RTL in both directions, sources are predicted from targets as well.
    """
    totals = []  # loss and tokens of each batch
    for rows in torch.arange(len(pairs.source.ids)).split(PAIRS_AT_A_TIME):
        sums, counts = objective.loss_from_other_side(*take_batch(pairs, encoded, rows), model)
        loss_and_tokens = torch.stack([sums, counts]).cpu().double()  # (2, G)
        totals.append(loss_and_tokens.sum(1))
    loss, tokens = torch.stack(totals).sum(0).tolist()
    return loss / max(tokens, 1)
