"""How much the heads of RTL and BOW learn from the source.

A head that only knows the target language also reaches a low loss, and then teaches the encoder
nothing. So the loss on dev pairs is compared with the loss with sources of other pairs. The
difference is the *information from the source*, in nats per token.

Shapes in the comments: `N` pairs, `n` of them, `S` tokens, `D` hidden size, `G` groups of labels.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm
from transformers import BatchEncoding, PreTrainedTokenizerBase

from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.evaluation.evaluator import Evaluator, PairsByLanguage
from dap_transformers.training.batches import BitextCollator, cutting_backend, tokenize_pairs
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
        saved: SentenceEncoder | None = None,
        **options: Any,
    ) -> None:
        super().__init__(model.dap, tokenizer, **options)
        self.with_heads = model
        self.saved = saved

    def for_task(self, task: str) -> SentenceEncoder:
        return super().for_task(task) if self.saved is None else self.saved.for_task(task)


@dataclass
class SourceInformation(Evaluator):
    """How much the heads of RTL and BOW use the source, on dev pairs.

    The loss with each pair's own source is compared with the loss with another pair's source. The
    other pair is the next one of the same language. If a language has only one pair, it is the next
    one of any language. There is no dropout, and every call masks the same tokens.

    Attributes:
        pairs: language code -> (source, target) sentences. Languages for which the RTL head has no
            embedding are left out.
        count: about how many pairs are measured over all languages. Every language gives the same
            number, at least two, or all its pairs if it has fewer.
    """

    pairs: PairsByLanguage
    count: int = 512
    name = "source_information"
    task = "information from the source"
    primary = "rtl_loss"

    @torch.no_grad()
    def __call__(self, encoder: EncoderWithHeads) -> dict[str, float]:
        """Measure the heads of an encoder. Its model is left in evaluation mode.

        Returns:
            Values in nats per token: `rtl_loss`, `rtl_loss_shuffled` (with other sources), and
            their difference `rtl_source_nats`. BOW has the same three values. An empty dictionary
            if there are fewer than two pairs, or neither objective.
        """
        model = encoder.with_heads.eval()
        known = model.config.rtl_languages
        used = {}
        for language, rows in self.pairs.items():
            if known is None or language in known:
                used[language] = rows
        token_objectives = [each for each in model.objectives if each.from_source is not None]
        if not token_objectives or sum(map(len, used.values())) < 2:
            return {}

        inputs, others = sample_pairs(used, encoder, known or list(used), self.count)
        others = others.to(model.device)
        rows = torch.arange(len(others), device=model.device)
        found = {}
        device = model.device.type  # a GPU without bfloat16 refuses even the context
        with torch.autocast(device, torch.bfloat16) if encoder.bf16 else nullcontext():
            kept = encode_once(
                model, token_objectives, pairs_of(BatchEncoding(inputs).to(model.device))
            )
            for objective in token_objectives:
                loss = mean_loss(kept, objective, rows, rows)
                shuffled = mean_loss(kept, objective, others, rows)
                found[f"{objective.name}_loss"] = loss
                found[f"{objective.name}_loss_shuffled"] = shuffled
                found[f"{objective.name}_source_nats"] = shuffled - loss
        return {name: round(value, 4) + 0.0 for name, value in found.items()}


def sample_pairs(
    pairs: PairsByLanguage, encoder: SentenceEncoder, languages: Sequence[str], count: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Take the same number of pairs of each language, evenly spread, or all if it has fewer.

    Args:
        languages: all languages that the model knows, in the order of its language ids.
        count: number of pairs over all languages, as in `SourceInformation`.

    Returns:
        Arguments of `DAPForPreTraining.forward` for N pairs, with noise that does not depend on
        the seed of the run. Also, for each pair, the row of another pair whose source replaces its
        own in the comparison: (N,).
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


@dataclass
class KeptPairs:
    """N pairs with those outputs of the encoder that heads read.

    Attributes:
        pairs: the pairs. If they have no noise, each batch draws its own.
        words: word embeddings for the heads.
        states: "source_states" or "target_states" -> (N, S, D). Only those that a head reads.
        embeds: sentence vectors of the sources, (N, D).
    """

    model: DAPForPreTraining
    pairs: Pairs
    words: Words
    states: dict[str, Tensor]
    embeds: Tensor

    def batch(self, sources: Tensor, targets: Tensor) -> tuple[Pairs, Encoded]:
        """Combine the sources of some pairs, rows (n,), with the targets of others, rows (n,)."""
        pairs = take_rows(self.pairs, sources, targets)
        states = {}
        for name, values in self.states.items():
            is_source = name == "source_states"
            rows, side = (sources, pairs.source) if is_source else (targets, pairs.target)
            own = values[rows.to(values.device), : side.ids.shape[1]]
            states[name] = own.to(self.model.device, self.model.dtype, non_blocking=True)
        return pairs, Encoded(self.words, source_embeds=self.embeds[sources], **states)


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
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    shows_progress: bool = False,
) -> KeptPairs:
    """Encode N pairs, and keep the token states that the heads of these objectives need.

    They are kept on `device` as `dtype`. By default these are the model's.
    """
    needs = needs_of(token_objectives)
    states = {name: [] for name in ("source_states", "target_states") if name in needs}
    embeds = []
    chunks = torch.arange(len(pairs.source.ids), device=model.device).split(PAIRS_AT_A_TIME)
    for rows in tqdm(chunks, desc="encode pairs for the heads", disable=not shows_progress):
        part = take_rows(pairs, rows, rows)
        if "target_states" not in needs:
            # Do not spend time on targets that nobody reads: encode only their first token.
            part = part._replace(target=Sentences(*(value[:, :1] for value in part.target)))
        found = model.encode(part, needs)
        embeds.append(found.source_embeds.to(model.dtype))
        for name, kept in states.items():
            side = pairs.source if name == "source_states" else pairs.target
            values = getattr(found, name).to(device or model.device, dtype or model.dtype)
            kept.append(F.pad(values, (0, 0, 0, side.ids.shape[1] - values.shape[1])))

    whole = {name: torch.cat(kept) for name, kept in states.items()}
    words = found.words._replace(table=found.words.table.detach())  # only heads have gradients
    return KeptPairs(model, pairs, words, whole, torch.cat(embeds))


def mean_loss(kept: KeptPairs, objective: Objective, sources: Tensor, targets: Tensor) -> float:
    """Compute the mean loss of predicting targets from sources, in nats per token.

    For RTL in both directions, sources are predicted from targets as well. `sources` (n,) and
    `targets` (n,) are rows of the kept pairs.
    """
    totals = []  # loss and tokens of each part
    for rows in zip(sources.split(PAIRS_AT_A_TIME), targets.split(PAIRS_AT_A_TIME)):
        sums, counts = objective.loss_from_source(*kept.batch(*rows), kept.model)
        loss_and_tokens = torch.stack([sums, counts]).cpu().double()  # (2, G)
        totals.append(loss_and_tokens.sum(1))
    loss, tokens = torch.stack(totals).sum(0).tolist()
    return loss / max(tokens, 1)
