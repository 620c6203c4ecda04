"""Objectives that lack one thing, to find out what teaches the encoder.

- `OwnWordsBOW`: only the target's vector predicts the target's words. It teaches what words a
  sentence has, but nothing about its translation.
- `ShuffledRTL`: RTL reads the token states of another pair's source. It regularises the encoder,
  but its alignment can teach nothing.

Heads are trained beforehand as always, on the right sources. `experiments.control_own_words` and
`experiments.control_shuffled` train with them.
"""

import torch
from torch import Tensor, nn

import train_dap
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


class OwnWordsBOW(BagOfWords):
    """BOW that predicts the target's words only from the target's own vector.

    The source's vector is replaced by the target's, so the loss teaches nothing about translation.
    """

    def loss(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, chunk: Chunk | None = None
    ) -> tuple[Tensor, Measures]:
        """Return the loss of predicting the target's words from the target's own vector.

        Arguments and results are those of `Objective.loss`.
        """
        own = encoded._replace(source_embeds=encoded.target_embeds)
        return super().loss(pairs, own, model, chunk)


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


def train_with(kind: type[Objective]) -> None:
    """Run `train_dap.py` on this process's command line, with another class for one objective.

    Args:
        kind: the class to use. It replaces the objective that has the same `name`.
    """
    OBJECTIVES[kind.name] = kind
    train_dap.main()
