"""How the losses of a training step come about: what is masked, embedded, compared and predicted, by objective.

The methods are those of `modeling_dap.DAPForPreTraining`, whose parts they use: `dap` (the encoder), `projection`,
`rtl_head`, `prediction_head` and `config`. Shapes as in modeling_dap.py.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    from .encoder_dap import last_states, pool, position_offset
    from .losses_dap import (
        RankingResult,
        columns_of,
        first_row,
        gather_columns,
        gather_rows,
        mask_tokens,
        maskable,
        real_tokens_first,
        sum_over_processes,
        translation_ranking_loss,
        whole,
        world_size,
    )
except ImportError:  # a checkout or an installed wheel, where these files are top-level modules
    from encoder_dap import last_states, pool, position_offset
    from losses_dap import (
        RankingResult,
        columns_of,
        first_row,
        gather_columns,
        gather_rows,
        mask_tokens,
        maskable,
        real_tokens_first,
        sum_over_processes,
        translation_ranking_loss,
        whole,
        world_size,
    )


class Side(NamedTuple):
    """One side of the pairs; the last two come with `_encode`."""

    ids: Tensor  # (B, S) token ids
    mask: Tensor  # (B, S), 1 for real tokens
    noise: Tensor | None  # (B, S), uniform in [0, 1): which tokens are masked; None where all or none are
    states: Tensor | None = None  # (B, S, D)
    embeds: Tensor | None = None  # (B, D)


Sides = tuple[Side, Side]  # source and target


class Words(NamedTuple):
    """Word embeddings of sources (B, S_x, E) and targets (B, S_y, E), of [MASK] (1, E), and of what is predicted."""

    source: Tensor
    target: Tensor
    mask: Tensor | None
    predicted: Tensor


@dataclass
class Chunk:
    """Some pairs of a larger batch, and what their losses need to be the share of these pairs (GradCache).

    A plain object, not a tuple, so that a wrapper that casts forward's tensors leaves its own as they are.

    Args:
        first: row of the first pair in the batch of all processes.
        noise: for the source (B, S_x) and the target (B, S_y), or None where none is needed.
        gradients: of L_TR of the whole batch for the compared embeddings of sources and targets, (B, D) each; `()`
            where nothing is ranked. With None, forward only gives these embeddings.
        labels: (1,), or (2,) with two directions: labels of the whole batch.
    """

    first: int
    noise: tuple[Tensor | None, Tensor | None]
    gradients: tuple[Tensor, ...] | None = None
    labels: Tensor | None = None


def pad_to_same_length(source: Side, target: Side) -> Sides:
    """Both sides with as many columns as the longer one has; what is added is padding."""
    length = max(source.ids.shape[1], target.ids.shape[1])

    def padded(side: Side) -> Side:
        missing = length - side.ids.shape[1]
        ids, mask = F.pad(side.ids, (0, missing)), F.pad(side.mask, (0, missing))
        noise = None if side.noise is None else F.pad(side.noise, (0, missing), value=1.0)
        return Side(ids, mask, noise, F.pad(side.states, (0, 0, 0, missing)), side.embeds)

    return padded(source), padded(target)


def odd_rows(count: int, device: torch.device, first: int) -> Tensor:
    """(B,) bool: whether a row's number in the batch of all processes, where these begin at `first`, is odd."""
    return (torch.arange(count, device=device) + first) % 2 == 1


def swap_rows(side: Side, other: Side, swapped: Tensor) -> Side:
    """The side with the rows of the other where `swapped` (B,) is True."""

    def choose(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None else torch.where(swapped.view(-1, *[1] * (a.dim() - 1)), b, a)

    return Side(*(choose(a, b) for a, b in zip(side, other)))


class ObjectivesMixin:
    """Translation ranking, RTL, TLM and MLM (sections 3.2 and 3.3), from token ids to what the heads are given."""

    def _look_up(self, ids: tuple[Tensor, ...], only_texts: bool = False) -> Words:
        """Word embeddings of both sides and of what the heads need, by one lookup: each has a gradient of (V, E)."""
        table = whole(self.get_input_embeddings().weight)
        wanted = [*ids]
        if self.config.uses_rtl and not only_texts:
            wanted.append(ids[0].new_tensor([self.config.mask_token_id]))
            if self.prediction_head.has_target_vocabulary and not self.prediction_head.samples:
                wanted.append(self.prediction_head.token_ids)
        rows = F.embedding(torch.cat([part.flatten() for part in wanted]), table)
        rows = rows.split([part.numel() for part in wanted])
        source, target, *others = (part.unflatten(0, like.shape) for part, like in zip(rows, wanted))
        mask, predicted = [*others, None, None][:2]
        return Words(source, target, mask, table if predicted is None else predicted)

    def _encode(self, sides: Sides, words: Words) -> Sides:
        """The sides with states and embeddings, by one pass of the encoder over their words (some masked for MLM)."""
        length = max(side.mask.shape[1] for side in sides)
        mask = torch.cat([F.pad(side.mask, (0, length - side.mask.shape[1])) for side in sides])  # (2·B, S)
        if not torch.compiler.is_compiling() and not bool((mask[:, :-1] >= mask[:, 1:]).all()):
            raise ValueError("an attention mask has padding before a real token: pad on the right.")
        embedded = (words.source, words.target)
        rows = torch.cat([F.pad(rows, (0, 0, 0, length - rows.shape[1])) for rows in embedded])  # (2·B, S, E)
        states = last_states(self.dap.encoder, mask, inputs_embeds=rows).chunk(2)  # (B, S, D) each
        source, target = (
            side._replace(states=own[:, : side.mask.shape[1]], embeds=pool(own, side_mask, self.config.pooling))
            for side, own, side_mask in zip(sides, states, mask.chunk(2))
        )
        return source, target

    def draw_noise(self, ids: Tensor) -> Tensor | None:
        """(B, S) float64, uniform in [0, 1), that decides which tokens are masked; None where all or none are."""
        config = self.config
        masks_some = config.uses_tlm or config.uses_mlm or (config.uses_rtl and config.rtl_ratio < 1)
        return torch.rand(ids.shape, dtype=torch.float64, device=ids.device) if masks_some else None

    def _compared(self, side: Side) -> Tensor:
        """The embeddings (B, D) that translation ranking compares."""
        return side.embeds if self.projection is None else self.projection(side.embeds)

    def _translation_ranking(self, queries: Tensor, answers: Tensor, texts: Tensor) -> RankingResult:
        """L_TR of this process's embeddings (B, D), given the targets' hashes (B,)."""
        config = self.config
        excluded = None
        if config.tr_mask_duplicates:
            excluded = texts[:, None] == gather_rows(texts)[None, :]  # (B, W·B): the same target text
        options = (config.tr_similarity, config.tr_temperature, config.tr_margin, first_row(len(queries)), excluded)
        forward = translation_ranking_loss(queries, gather_rows(answers), *options)
        if not config.tr_bidirectional:
            return forward
        backward = translation_ranking_loss(answers, gather_rows(queries), *options)
        return RankingResult(*((a + b) / 2 for a, b in zip(forward, backward)))

    @torch.no_grad()
    def count_labels(self, sides: Sides, first: int) -> Tensor:
        """Labels of these pairs, whose first is row `first` of the batch: (1,), or (2,) with two directions."""
        if self.config.uses_tlm or self.config.uses_mlm:
            share = self.config.mlm_probability if self.config.uses_mlm else self.config.tlm_probability
            return sum((maskable(side.mask) & (side.noise < share)).sum() for side in sides).view(1)
        source, target = map(self._count_to_reconstruct, sides)  # (B,) each
        if self.config.rtl_direction == "both":
            odd = odd_rows(len(source), source.device, first)
            return torch.stack([target[~odd].sum(), source[odd].sum()])
        return (target if self.config.rtl_direction == "source-to-target" else source).sum().view(1)

    def _count_to_reconstruct(self, side: Side) -> Tensor:
        """Labels (B,) of one side where RTL reconstructs it."""
        chosen = self._chosen(side)  # (B, Q)
        if self.prediction_head.has_target_vocabulary:
            chosen = chosen & torch.isin(side.ids[:, 1:], self.prediction_head.token_ids)
        return chosen.sum(1)

    def _predictions(
        self, source: Side, target: Side, words: Words, language_ids: Tensor | None, first: int
    ) -> list[tuple[Tensor, Tensor]]:
        """What the prediction head is given: states (T, D) and labels (T,), for "both" of each direction apart."""
        if self.config.uses_tlm:
            return [self._translation_language_modelling(source, target)]
        if self.config.uses_mlm:
            return [self._masked_language_modelling(source, target)]
        if not self.config.uses_rtl:
            return []
        states, labels, chosen = self._representation_translation(source, target, words, language_ids, first)
        return [(states[part], labels[part]) for part in self._directions(chosen, first)]

    def _representation_translation(
        self, source: Side, target: Side, words: Words, language_ids: Tensor | None, first: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """g of eq. L_RTL: states (B, Q, D), labels (B, Q), and which of them are to be reconstructed (B, Q)."""
        context, answer, languages = self._directed(source, target, language_ids, first)
        chosen = self._chosen(answer)  # (B, Q): CLS takes no part on either side
        queries = self._embed_queries(answer.ids, words.mask)[:, 1:]  # (B, Q, D)
        if self.config.rtl_ratio < 1:  # the other tokens show their representations (section 5.2)
            queries = torch.where(chosen.unsqueeze(-1), queries, answer.states[:, 1:])
        states = self.rtl_head(context.states[:, 1:], context.mask[:, 1:], queries, answer.mask[:, 1:], languages)
        return states, answer.ids[:, 1:], chosen

    def _chosen(self, side: Side) -> Tensor:
        """Which tokens after CLS are to be reconstructed, (B, S-1) bool."""
        real = side.mask.bool()
        return (real if side.noise is None else real & (side.noise < self.config.rtl_ratio))[:, 1:]

    def _directions(self, chosen: Tensor, first: int) -> list[Tensor]:
        """The chosen tokens (B, Q) of each direction apart, whose means are averaged (Table 5)."""
        if self.config.rtl_direction != "both":
            return [chosen]
        odd = odd_rows(len(chosen), chosen.device, first).unsqueeze(-1)  # (B, 1)
        return [chosen & ~odd, chosen & odd]

    def _directed(
        self, source: Side, target: Side, language_ids: Tensor | None, first: int
    ) -> tuple[Side, Side, Tensor | None]:
        """Context, the side to reconstruct, and their language embedding rows (B, 2), by `rtl_direction`."""
        direction = self.config.rtl_direction
        if direction == "source-to-target":
            return source, target, None
        if language_ids is None:
            raise ValueError(f"language_ids=None, but rtl_direction {direction!r} needs each pair's source language.")
        languages = torch.stack([language_ids + 1, torch.zeros_like(language_ids)], 1)  # (B, 2): source, target
        if direction == "target-to-source":
            return target, source, languages.flip(1)
        odd = odd_rows(len(language_ids), language_ids.device, first)  # (B,)
        source, target = pad_to_same_length(source, target)
        context, answer = swap_rows(source, target, odd), swap_rows(target, source, odd)
        return context, answer, torch.where(odd[:, None], languages.flip(1), languages)

    def _embed_queries(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[MASK] embeddings (B, Q, D) with the positions of the tokens (B, Q), given its word embedding (1, E)."""
        masked = mask.expand(*ids.shape, -1)  # (B, Q, E)
        return self.dap.encoder.embeddings(input_ids=None, inputs_embeds=masked, **self._positions(ids))

    def _positions(self, ids: Tensor, columns: Tensor | None = None) -> dict[str, Tensor]:
        """Explicit position ids (B, S) for encoders with absolute positions, so that padding changes nothing."""
        offset = position_offset(self.dap.encoder)
        if offset is None:
            return {}
        if columns is None:
            columns = columns_of(ids)
        return {"position_ids": columns + offset}

    def _translation_language_modelling(self, source: Side, target: Side) -> tuple[Tensor, Tensor]:
        """States (T, D) and labels (T,) of eq. L_TLM: x and y masked side by side, y's positions restarting."""
        x, y = (
            (side.ids, side.mask, columns_of(side.ids), side.noise, maskable(side.mask)) for side in (source, target)
        )
        joined = [torch.cat([a, b[:, 1:]], 1) for a, b in zip(x, y)]  # each (B, S_x+S_y-1): y without its CLS
        order = real_tokens_first(joined[1])
        ids, mask, column, noise, allowed = (gather_columns(value, order) for value in joined)
        noise = noise.masked_fill(~allowed, 1.0)
        chosen = noise < self.config.tlm_probability  # (B, S_x+S_y-1)
        masked = mask_tokens(
            ids, noise, self.config.tlm_probability, self.config.mask_token_id, self.config.vocab_size
        )
        states = last_states(self.dap.encoder, mask, input_ids=masked, **self._positions(ids, column))
        return states[chosen], ids[chosen]

    def _shown(self, sides: Sides) -> tuple[Tensor, ...]:
        """The token ids (B, S) of both sides that the encoder sees: masked where MLM predicts them."""
        config = self.config
        if not config.uses_mlm:
            return tuple(side.ids for side in sides)
        options = config.mlm_probability, config.mask_token_id, config.vocab_size
        noises = (side.noise.masked_fill(~maskable(side.mask), 1.0) for side in sides)
        return tuple(mask_tokens(side.ids, noise, *options) for side, noise in zip(sides, noises))

    def _masked_language_modelling(self, source: Side, target: Side) -> tuple[Tensor, Tensor]:
        """States (T, D) and labels (T,) of the tokens of both sides that `_shown` masks."""
        sides = source, target
        chosen = [maskable(side.mask) & (side.noise < self.config.mlm_probability) for side in sides]
        states = torch.cat([side.states[where] for side, where in zip(sides, chosen)])
        return states, torch.cat([side.ids[where] for side, where in zip(sides, chosen)])

    def _predict(
        self, predictions: list[tuple[Tensor, Tensor]], words: Words, everywhere: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean cross entropy over the labels of all processes, and how many of this process have no prediction.

        The loss is a share that averages to the mean over processes. Where there are two directions, it is the average
        of their means (Table 5); one without labels does not count. `everywhere` (directions,) is the number of labels
        where these are not all of them.
        """
        sums, counts = zip(*(self.prediction_head.loss_sum(*given, words.predicted) for given in predictions))
        if everywhere is None:
            everywhere = sum_over_processes(torch.stack(counts))  # (directions,)
        means = torch.stack(sums) * world_size() / everywhere.clamp(min=1)  # (directions,)
        labels = sum(len(given[1]) for given in predictions)
        return means.sum() / (everywhere > 0).sum().clamp(min=1), labels - torch.stack(counts).sum()
