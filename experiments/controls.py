"""Objectives that differ from the project's own in one thing, to find out what teaches.

Each control leaves out one thing:

- `OwnWordsBOW`: only the target's vector predicts the target's words. It teaches what words a
  sentence has, but nothing about its translation.
- `TranslatedWordsBOW`: only the source's vector predicts the target's words.
- `ShuffledRTL`: RTL reads the token states of another pair's source. It can regularise the
  encoder, but it cannot teach alignment.

One class is not a control, but a new idea:

- `VectorRTL`: RTL reads the source's sentence vector in place of its token states.

Before the run, heads are trained with each pair's own source. Even the head of `OwnWordsBOW`
learns from the source's vector. For each class, a module `experiments.control_...` trains with it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import train_dap
from configuration_dap import DAPConfig
from objectives_dap import (
    OBJECTIVES,
    BagOfWords,
    Chunk,
    Encoded,
    Measures,
    Objective,
    Pairs,
    RepresentationTranslation,
    Sentences,
)


class OneSidedBOW(BagOfWords):
    """BOW that predicts the target's words only from the vector of one side.

    The other side's vector is replaced by this one.
    """

    #: Side whose vector predicts the words, "source" or "target".
    side: str

    def loss(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, chunk: Chunk | None = None
    ) -> tuple[Tensor, Measures]:
        """Return the loss of predicting the target's words from the vector of one side.

        Arguments and results are those of `Objective.loss`.
        """
        embeds = encoded.target_embeds if self.side == "target" else encoded.source_embeds
        one_sided = encoded._replace(source_embeds=embeds, target_embeds=embeds)
        return super().loss(pairs, one_sided, model, chunk)


class OwnWordsBOW(OneSidedBOW):
    """BOW in which a target predicts its own words, so it teaches nothing about translation."""

    side = "target"


class TranslatedWordsBOW(OneSidedBOW):
    """BOW in which a source predicts the words of its target, and no sentence its own words."""

    side = "source"


class ShuffledRTL(RepresentationTranslation):
    """RTL that reconstructs each target from the source of another pair of the batch.

    The sources are moved on by one pair, so the loss can teach no alignment.
    """

    def loss(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, chunk: Chunk | None = None
    ) -> tuple[Tensor, Measures]:
        """Return the loss of reconstructing each target from the source of another pair.

        Arguments and results are those of `Objective.loss`.
        """
        ids, mask, noise = pairs.source
        other = Sentences(torch.roll(ids, 1, 0), torch.roll(mask, 1, 0), noise)
        states = torch.roll(encoded.source_states, 1, 0)
        shuffled = encoded._replace(source_states=states)
        return super().loss(pairs._replace(source=other), shuffled, model, chunk)


class VectorRTL(RepresentationTranslation):
    """RTL that reconstructs the target from the source's sentence vector.

    The head sees this vector as its only context token, so the vector must hold everything about
    the source. With `rtl_ratio` below 1, it also sees the word embeddings of the other target
    tokens, where RTL would show their states. Targets are always reconstructed from sources.
    MEXMA (arXiv 2409.12737) trains in a similar way.
    """

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        self.needs = frozenset({"embeds", "noise", "mask_token", "target_vocabulary"})

    def loss_sum(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, Measures]:
        """Reconstruct the target's tokens from the source's vector (see `Objective.loss_sum`).

        Returns:
            The summed cross entropy of the labels (1,), and nothing to log.
        """
        (predicted,) = labels  # (B, Q)
        answer = self.answer(pairs)
        chosen = self.chosen(answer)  # (B, Q)
        words = F.embedding(answer.ids, encoded.words.table.detach())  # (B, S, E)
        words[:, 1:][chosen] = encoded.words.mask_token.to(words.dtype)
        embedder = model.dap.encoder
        queries = embedder.embeddings(input_ids=None, inputs_embeds=words)[:, 1:]  # (B, Q, D)

        # Length 1, as retrieval compares vectors, then as large as a token's state.
        vectors = F.normalize(encoded.source_embeds, dim=-1)
        context = (vectors * vectors.shape[-1] ** 0.5).unsqueeze(1).to(queries.dtype)  # (B, 1, D)
        is_real = pairs.source.mask[:, :1]  # (B, 1), all ones
        states = model.rtl_head(context, is_real, queries, answer.mask[:, 1:], None)  # (B, Q, D)

        places = predicted.nonzero(as_tuple=True)
        total = model.prediction_head.target_loss_sum(
            states[places], answer.ids[:, 1:][places], encoded.words
        )
        return total.unsqueeze(0), {}


def train_with(kind: type[Objective]) -> None:
    """Run `train_dap.py` on this process's command line, with another class for one objective.

    Args:
        kind: the class to use. It replaces the objective that has the same `name`.
    """
    OBJECTIVES[kind.name] = kind
    train_dap.main()
