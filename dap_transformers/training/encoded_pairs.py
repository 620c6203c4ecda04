"""Pairs that are encoded once, for heads that are trained or measured on the encoder's outputs.

Shapes in the comments: `N` pairs, `n` pairs of a batch, `S` tokens, `D` hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm

from modeling_dap import DAPForPreTraining
from objectives_dap import Encoded, Pairs, Sentences, Words, draw_noise

#: Number of pairs that are encoded at a time.
PAIRS_AT_A_TIME = 128
#: Fields of `Encoded` with the token states of a pair's two sides.
STATES = ("source_states", "target_states")


class EncodedPairs(NamedTuple):
    """N pairs after the encoder: what heads read.

    The token states are a tensor per pair, which is as long as the longest sentence that was
    encoded with it. One tensor for all pairs would be as long as the longest sentence of all.
    """

    words: Words  # word embeddings for the heads
    source_embeds: Tensor  # (N, D) sentence vectors
    states: dict[str, list[Tensor]]  # names in `STATES` -> (S, D) of each pair, in main memory


@torch.no_grad()
def encode_once(
    model: DAPForPreTraining,
    pairs: Pairs,
    needs: frozenset[str],
    dtype: torch.dtype,
    shows_progress: bool = False,
) -> EncodedPairs:
    """Encode N pairs, and keep what heads read: token states and the sources' sentence vectors.

    Args:
        needs: the token states to keep, and what heads look up, as `needs_of` returns them.
        dtype: type of the token states.
    """
    states = {name: [] for name in STATES if name in needs}
    embeds = []
    firsts = range(0, len(pairs.source.ids), PAIRS_AT_A_TIME)
    for first in tqdm(firsts, "encode pairs for the heads", disable=not shows_progress):
        rows = slice(first, first + PAIRS_AT_A_TIME)
        part = take_pairs(pairs, rows)
        if "target_states" not in needs:
            # Do not spend time on targets that nobody reads: encode only their first token.
            part = part._replace(target=Sentences(*(value[:, :1] for value in part.target)))
        found = model.encode(part, needs)
        embeds.append(found.source_embeds.to(model.dtype))
        for name, kept in states.items():
            kept += getattr(found, name).to("cpu", dtype)  # (n, S, D)

    words = found.words._replace(table=found.words.table.detach())  # only heads have gradients
    return EncodedPairs(words, torch.cat(embeds), states)


def take_batch(pairs: Pairs, encoded: EncodedPairs, rows: Tensor) -> tuple[Pairs, Encoded]:
    """Return n of N pairs with their outputs, given their rows (n,)."""
    part = take_pairs(pairs, rows)
    embeds = encoded.source_embeds[rows]  # (n, D)
    states = {}
    for name, side in zip(STATES, (part.source, part.target)):
        if name in encoded.states:
            kept = [encoded.states[name][row] for row in rows.tolist()]
            values = pad_sequence(kept, batch_first=True)[:, : side.ids.shape[1]]  # (n, S, D)
            states[name] = values.to(embeds.device, embeds.dtype, non_blocking=True)
    return part, Encoded(encoded.words, source_embeds=embeds, **states)


def take_pairs(pairs: Pairs, rows: Tensor | slice) -> Pairs:
    """Return some of the pairs. Each side is cut to its longest sentence.

    Noise is drawn if the pairs have none.
    """
    sides = []
    for side in (pairs.source, pairs.target):
        longest = int(side.mask[rows].sum(1).max())
        ids = side.ids[rows, :longest]
        noise = draw_noise(ids) if side.noise is None else side.noise[rows, :longest]
        sides.append(Sentences(ids, side.mask[rows, :longest], noise))
    return Pairs(*sides, language_ids=pairs.language_ids[rows])
