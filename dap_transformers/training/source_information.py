"""How much the heads of RTL and BOW learn from the source.

A head that only knows the target language also reaches a low loss, and then teaches the encoder
nothing. So the loss on dev pairs is compared with the loss with sources of other pairs. The
difference is the *information from the source*, in nats per token.

Shapes in the comments: `N` pairs, `n` pairs of a batch, `S` tokens, `D` hidden size, `G` groups of
labels.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import BatchEncoding, PreTrainedTokenizerBase

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.evaluation.evaluator import Evaluator, PairsByLanguage, as_pairs
from dap_transformers.training.batches import BitextCollator
from modeling_dap import DAPForPreTraining
from objectives_dap import (
    Encoded,
    Objective,
    Pairs,
    Sentences,
    Words,
    draw_noise,
    needs_of,
    pairs_of,
)

#: About how many dev pairs are measured over all languages.
MEASURED_PAIRS = 512
#: Number of pairs that are encoded at a time.
PAIRS_AT_A_TIME = 128
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
        token_objectives = [each for each in model.objectives if each.from_source is not None]
        if not token_objectives or not used:
            return {}

        inputs, others = sample_pairs(used, encoder, known or list(used))
        rows = torch.arange(len(others))
        found = {}
        device = model.device.type  # a GPU without bfloat16 refuses even the context
        with torch.autocast(device, torch.bfloat16) if encoder.bf16 else nullcontext():
            pairs = pairs_of(BatchEncoding(inputs).to(model.device))
            kept = encode_once(model, token_objectives, pairs, model.dtype)
            for objective in token_objectives:
                loss = kept.mean_loss(objective, rows, rows)
                shuffled = kept.mean_loss(objective, others, rows)
                found[f"{objective.name}_loss"] = loss
                found[f"{objective.name}_loss_shuffled"] = shuffled
                found[f"{objective.name}_source_nats"] = shuffled - loss
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


@dataclass
class KeptPairs:
    """N pairs with those outputs of the encoder that heads read.

    Attributes:
        model: has the heads.
        pairs: the pairs. If they have no noise, each batch draws its own.
        words: word embeddings for the heads.
        states: "source_states" or "target_states" -> (S, D) of each pair, in main memory. Only
            those that a head reads.
        embeds: sentence vectors of the sources, (N, D).
    """

    model: DAPForPreTraining
    pairs: Pairs
    words: Words
    states: dict[str, list[Tensor]]
    embeds: Tensor

    def batch(self, sources: Tensor, targets: Tensor) -> tuple[Pairs, Encoded]:
        """Combine the sources of some pairs, rows (n,), with the targets of others, rows (n,)."""
        pairs = take_rows(self.pairs, sources, targets)
        states = {}
        for name, kept in self.states.items():
            is_source = name == "source_states"
            rows, side = (sources, pairs.source) if is_source else (targets, pairs.target)
            padded = pad_sequence([kept[row] for row in rows.tolist()], batch_first=True)
            padded = padded[:, : side.ids.shape[1]]  # (n, S, D)
            states[name] = padded.to(self.model.device, self.model.dtype, non_blocking=True)
        return pairs, Encoded(self.words, source_embeds=self.embeds[sources], **states)

    def mean_loss(self, objective: Objective, sources: Tensor, targets: Tensor) -> float:
        """Compute the mean loss of predicting targets from sources, in nats per token.

        For RTL in both directions, sources are predicted from targets as well. `sources` and
        `targets` are rows of pairs, as for `batch`.
        """
        totals = []  # loss and tokens of each part
        for rows in zip(sources.split(PAIRS_AT_A_TIME), targets.split(PAIRS_AT_A_TIME)):
            sums, counts = objective.loss_from_source(*self.batch(*rows), self.model)
            loss_and_tokens = torch.stack([sums, counts]).cpu().double()  # (2, G)
            totals.append(loss_and_tokens.sum(1))
        loss, tokens = torch.stack(totals).sum(0).tolist()
        return loss / max(tokens, 1)


def take_rows(pairs: Pairs, sources: Tensor, targets: Tensor) -> Pairs:
    """Combine the sources of some of N pairs with the targets of others, as `KeptPairs.batch`.

    Each side is cut to its longest sentence.
    """
    sides = []
    for side, rows in ((pairs.source, sources), (pairs.target, targets)):
        longest = int(side.mask[rows].sum(1).max())
        ids = side.ids[rows, :longest]
        noise = draw_noise(ids) if side.noise is None else side.noise[rows, :longest]
        sides.append(Sentences(ids, side.mask[rows, :longest], noise))
    return Pairs(*sides, language_ids=pairs.language_ids[sources])


@torch.no_grad()
def encode_once(
    model: DAPForPreTraining,
    token_objectives: Sequence[Objective],
    pairs: Pairs,
    dtype: torch.dtype,
    shows_progress: bool = False,
) -> KeptPairs:
    """Encode N pairs, and keep the token states that these objectives' heads need, as `dtype`."""
    needs = needs_of(token_objectives)
    states = {name: [] for name in ("source_states", "target_states") if name in needs}
    embeds = []
    chunks = torch.arange(len(pairs.source.ids)).split(PAIRS_AT_A_TIME)
    for rows in tqdm(chunks, desc="encode pairs for the heads", disable=not shows_progress):
        part = take_rows(pairs, rows, rows)
        if "target_states" not in needs:
            # Do not spend time on targets that nobody reads: encode only their first token.
            part = part._replace(target=Sentences(*(value[:, :1] for value in part.target)))
        found = model.encode(part, needs)
        embeds.append(found.source_embeds.to(model.dtype))
        for name, kept in states.items():
            kept += getattr(found, name).to("cpu", dtype)

    words = found.words._replace(table=found.words.table.detach())  # only heads have gradients
    return KeptPairs(model, pairs, words, states, torch.cat(embeds))
