"""What a model is trained for: one class an objective, and `OBJECTIVES`, from which `config.objective` combines them.

Ships with a checkpoint beside modeling_dap.py. Shapes in the comments: `B` pairs of one process, `W` processes, `S`
tokens (`S_x` of the source, `S_y` of the target), `D` hidden size, `E` width of the word embeddings, `Q` query tokens,
`R` rows, `G` groups of labels, each with a mean of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from .configuration_dap import DAPConfig
    from .encoder_dap import pool
    from .heads_dap import PredictionHead, PredictionTransform, Projection, RTLHead, Words
    from .losses_dap import (
        columns_of,
        first_row,
        rank_in_blocks,
        sum_over_processes,
        text_hash,
        world_size,
    )
except ImportError:  # a checkout or an installed wheel, where these files are top-level modules
    from configuration_dap import DAPConfig
    from encoder_dap import pool
    from heads_dap import PredictionHead, PredictionTransform, Projection, RTLHead, Words
    from losses_dap import (
        columns_of,
        first_row,
        rank_in_blocks,
        sum_over_processes,
        text_hash,
        world_size,
    )

SCATTER = 10368889  # 2**24 times the golden ratio: its multiples, modulo 2**24, lie evenly


# ----------------------------------------------------------------------------------------- what objectives are given


class Side(NamedTuple):
    """One side of the pairs; states and embeddings are there once the encoder has read it."""

    ids: Tensor  # (B, S) token ids
    mask: Tensor  # (B, S), 1 for real tokens
    noise: Tensor | None = (
        None  # (B, S), uniform in [0, 1): which tokens are masked; None where none or all are
    )
    states: Tensor | None = None  # (B, S, D)
    embeds: Tensor | None = None  # (B, D)


class Text(NamedTuple):
    """Rows for the encoder."""

    ids: Tensor  # (R, S) token ids that it sees
    mask: Tensor  # (R, S), 1 for real tokens
    columns: Tensor | None = None  # (R, S) position of each token, where it is not its column
    labels: Tensor | None = None  # (R, S) token ids before masking
    chosen: Tensor | None = None  # (R, S) bool: which of them are predicted
    wanted: Tensor | None = (
        None  # (R, S) bool: whose states are read; those of all real tokens where absent
    )
    states: Tensor | None = None  # (R, S, D), once the encoder has read it


class Batch(NamedTuple):
    """Translation pairs, and once the encoder has read, what else an objective needs."""

    source: Side
    target: Side
    language_ids: Tensor | None = None  # (B,) of the sources
    first: int = 0  # number of the first pair in the batch of all processes
    words: Words | None = None
    text: Text | None = None  # that of the objective at work
    negatives: Side | None = (
        None  # changed copies of targets, for TR; without real tokens for a pair that has none
    )

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.source, self.target

    @property
    def read(self) -> tuple[Side, ...]:
        """What the encoder reads as it is."""
        return self.sides if self.negatives is None else (*self.sides, self.negatives)

    def with_states(self, states: Tensor, pooling: str) -> "Batch":
        """The batch with what the encoder made of `stacked(batch.read)`, (2·B or 3·B, S, D)."""
        sides = []
        for side, own in zip(self.read, states.split(len(self.source.ids))):
            own = own[:, : side.ids.shape[1]]  # (B, S, D)
            sides.append(side._replace(states=own, embeds=pool(own, side.mask, pooling)))
        return self._replace(
            source=sides[0], target=sides[1], negatives=sides[2] if sides[2:] else None
        )


@dataclass
class Chunk:
    """Some pairs of a larger batch, and what the objectives need to give the share of these pairs (GradCache).

    A plain object, not a tuple, so that a wrapper that casts forward's tensors leaves its own as they are. Without
    gradients, forward gives only what is compared.
    """

    first: int  # number of the first pair in the batch of all processes
    noise: tuple[Tensor | None, Tensor | None]  # of source (B, S_x) and target (B, S_y)
    gradients: dict[str, tuple[Tensor, ...]] | None = (
        None  # of each comparison's loss for what it compares
    )
    labels: dict[str, Tensor] | None = None  # (G,) numbers of all labels of each other objective


# ----------------------------------------------------------------------------------------- what an objective is


class Objective:
    """A mean over labels: tokens, pairs or anything else of which each belongs to one pair.

    It reads its configuration and has no weights; what it computes with are the heads of the model that it is handed.
    Labels can be in several groups, such as directions: the loss is then the average of the groups' means.
    """

    name: str  # in `OBJECTIVES`, in `config.objective`, and before `_weight` and `_loss`
    heads: dict[
        str, Callable[[DAPConfig], nn.Module]
    ] = {}  # parts of the model beside the encoder, by attribute
    reads_pairs = True  # needs what the encoder makes of the pairs as they are
    reads_tokens: tuple[bool, bool] = (
        True,
        True,
    )  # of each token of the sources and the targets, or only embeddings
    needs_mask_token = False
    masks = False  # needs noise

    def __init__(self, config: DAPConfig) -> None:
        self.config = config

    @property
    def weight(self) -> float:
        """Factor of the loss in the sum of all."""
        return getattr(self.config, f"{self.name}_weight", 1.0)

    def text(self, batch: Batch) -> Text | None:
        """What the encoder is to read for this objective alone."""
        return None

    def embed(self, embedded: Tensor, batch: Batch) -> Tensor:
        """What the encoder is to read for the words of that text, (R, S, E), given the pairs with their states."""
        return embedded

    def labels(self, batch: Batch, model: nn.Module) -> Tensor:
        """Which labels count, (G, ...) bool, told without any states: `source.states` and the like are None."""
        raise NotImplementedError

    def sums(
        self, batch: Batch, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the loss over the labels of each group, (G,), and what else is measured, which adds up over pairs."""
        raise NotImplementedError

    def loss(
        self, batch: Batch, model: nn.Module, chunk: Chunk | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, or of a chunk its share, and what is logged. The mean over processes is that of all pairs."""
        labels = self.labels(batch, model)
        everywhere = self.count(labels) if chunk is None else chunk.labels[self.name]  # (G,)
        sums, measures = self.sums(batch, model, labels)
        means = sums * world_size() / everywhere.clamp(min=1)
        loss = means.sum() / (everywhere > 0).sum().clamp(min=1)
        return loss, {f"{self.name}_loss": loss, **measures}

    @staticmethod
    def count(labels: Tensor) -> Tensor:
        """Labels of each group on all processes, (G,)."""
        return sum_over_processes(labels.flatten(1).sum(1))


class Comparison(Objective):
    """A loss of embeddings that depends on those of other pairs, too."""

    def compared(self, batch: Batch, model: nn.Module) -> tuple[Tensor, ...]:
        """What is compared, each with B rows."""
        raise NotImplementedError

    def compare(
        self, compared: tuple[Tensor, ...], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and what is logged, given what all pairs of this process bring; `batch` has no states."""
        raise NotImplementedError

    def loss(
        self, batch: Batch, model: nn.Module, chunk: Chunk | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As of any objective; a chunk's share has the gradients, not the value."""
        compared = self.compared(batch, model)
        if chunk is None:
            return self.compare(compared, batch)
        return sum(
            (rows * gradient).sum() for rows, gradient in zip(compared, chunk.gradients[self.name])
        ), {}


# ----------------------------------------------------------------------------------------- the objectives


class TranslationRanking(Comparison):
    """TR (section 3.2): the target of a source is to rank before all others."""

    name = "tr"
    reads_tokens = (False, False)

    @property
    def heads(self) -> dict[str, Callable[[DAPConfig], nn.Module]]:
        return {"projection": Projection} if self.config.projection else {}

    def compared(self, batch: Batch, model: nn.Module) -> tuple[Tensor, ...]:
        embeds = tuple(side.embeds for side in batch.read)  # (B, D) each
        return embeds if model.projection is None else tuple(map(model.projection, embeds))

    def compare(
        self, compared: tuple[Tensor, ...], batch: Batch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config, (source, *answers) = self.config, compared
        texts = [text_hash(side.ids, side.mask) for side in batch.read[1:]]  # (B,) each
        if not config.tr_mask_duplicates:  # all targets are different then
            texts[0] = columns_of(texts[0][None])[0] + first_row(len(source)) + 1
        how = config.tr_similarity, config.tr_temperature, config.tr_margin
        results = [rank_in_blocks(source, answers, texts, *how)]
        if config.tr_bidirectional:  # the sources alone are ranked for a target
            results.append(rank_in_blocks(answers[0], [source], texts[:1], *how))
        loss, accuracy, negatives = (sum(values) / len(results) for values in zip(*results))
        return loss, {"tr_loss": loss, "accuracy": accuracy, "negatives": negatives}


class RepresentationTranslation(Objective):
    """RTL (section 3.3.2): reconstruct the target's tokens from the source's states."""

    name = "rtl"
    heads = {"rtl_head": RTLHead, "prediction_head": PredictionHead}
    needs_mask_token = True

    @property
    def masks(self) -> bool:
        return self.config.rtl_ratio < 1

    @property
    def reads_tokens(self) -> tuple[bool, bool]:
        """Those of the context, and those that are shown of the side to reconstruct."""
        direction = self.config.rtl_direction
        return (
            self.masks or direction != "target-to-source",
            self.masks or direction != "source-to-target",
        )

    def labels(self, batch: Batch, model: nn.Module) -> Tensor:
        _, answer, _ = self._directed(batch)
        known = model.prediction_head.knows(answer.ids[:, 1:])  # (B, Q)
        return self.groups(self.chosen(answer) & known, batch.first)

    def sums(
        self, batch: Batch, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        context, answer, languages = self._directed(batch)
        chosen, ids = (
            self.chosen(answer),
            answer.ids[:, 1:],
        )  # (B, Q): CLS takes no part on either side
        mask = batch.words.mask.expand(*answer.ids.shape, -1)  # (B, S, E)
        queries = model.rtl_head.embed(mask, model.dap.encoder)[
            :, 1:
        ]  # (B, Q, D), with the tokens' positions
        if self.config.rtl_ratio < 1:  # the other tokens show their representations (section 5.2)
            queries = torch.where(chosen.unsqueeze(-1), queries, answer.states[:, 1:])
        states = model.rtl_head(
            context.states[:, 1:], context.mask[:, 1:], queries, answer.mask[:, 1:], languages
        )
        places = [
            part.nonzero(as_tuple=True) for part in labels
        ]  # a GPU is waited for once a group
        sums = [
            model.prediction_head.rtl_loss_sum(states[own], ids[own], batch.words) for own in places
        ]
        return torch.stack(sums), {"ignored_tokens": chosen.sum() - labels.sum()}

    def chosen(self, answer: Side) -> Tensor:
        """Which tokens after CLS are to be reconstructed, (B, Q) bool."""
        real = answer.mask.bool()
        return (real if answer.noise is None else real & (answer.noise < self.config.rtl_ratio))[
            :, 1:
        ]

    def groups(self, labels: Tensor, first: int) -> Tensor:
        """The labels (B, Q) as (G, B, Q): each direction apart, whose means are averaged (Table 5)."""
        if self.config.rtl_direction != "both":
            return labels.unsqueeze(0)
        odd = odd_rows(len(labels), labels.device, first).unsqueeze(-1)  # (B, 1)
        return torch.stack([labels & ~odd, labels & odd])

    def _directed(self, batch: Batch) -> tuple[Side, Side, Tensor | None]:
        """Context, the side to reconstruct, and their rows of language embeddings (B, 2), by `rtl_direction`."""
        source, target, ids, first, *_ = batch
        direction = self.config.rtl_direction
        if direction == "source-to-target":
            return source, target, None
        if ids is None:
            raise ValueError(
                f"language_ids=None, but rtl_direction {direction!r} needs each pair's source language."
            )
        languages = torch.stack([ids + 1, torch.zeros_like(ids)], 1)  # (B, 2): source, target
        if direction == "target-to-source":
            return target, source, languages.flip(1)
        odd = odd_rows(len(ids), ids.device, first)  # (B,)
        length = max(source.ids.shape[1], target.ids.shape[1])
        source, target = pad_to(source, length), pad_to(target, length)
        context, answer = swap_rows(source, target, odd), swap_rows(target, source, odd)
        return context, answer, torch.where(odd[:, None], languages.flip(1), languages)


class _MaskedText(Objective):
    """Predicts the tokens that its own text masks."""

    heads = {"prediction_head": PredictionHead}
    reads_pairs = False
    needs_mask_token = masks = True

    def labels(self, batch: Batch, model: nn.Module) -> Tensor:
        return batch.text.chosen.unsqueeze(0)  # (1, R, S)

    def sums(
        self, batch: Batch, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        text, chosen = batch.text, labels[0].nonzero(as_tuple=True)
        total = model.prediction_head.loss_sum(
            text.states[chosen], text.labels[chosen], batch.words.table
        )
        return total.unsqueeze(0), {}

    def _masked(
        self, ids: Tensor, mask: Tensor, noise: Tensor, share: float, columns: Tensor | None = None
    ) -> Text:
        """The text of ids (R, S) in which a share of the tokens is masked, given noise of 1 where none may be."""
        shown = mask_tokens(ids, noise, share, self.config.mask_token_id, self.config.vocab_size)
        chosen = noise < share
        return Text(
            shown, mask, columns, ids, chosen, chosen | (columns_of(ids) == 0)
        )  # no row without any


class TranslationLanguageModelling(_MaskedText):
    """TLM (Conneau and Lample 2019): masked tokens of source and target side by side."""

    name = "tlm"

    def text(self, batch: Batch) -> Text:
        """x and y of eq. L_TLM in one row (B, S_x+S_y-1), y without its CLS, its positions restarting."""
        x, y = ((side.ids, side.mask, columns_of(side.ids), quiet(side)) for side in batch.sides)
        ids, mask, columns, noise = (torch.cat([a, b[:, 1:]], 1) for a, b in zip(x, y))
        return self._masked(ids, mask, noise, self.config.tlm_probability, columns)


class MaskedLanguageModelling(_MaskedText):
    """MLM (Devlin et al. 2019): masked tokens of each side by itself."""

    name = "mlm"

    def text(self, batch: Batch) -> Text:
        """Sources, then targets, (2·B, S)."""
        ids, mask = stacked(batch.sides)
        noises = [
            F.pad(quiet(side), (0, ids.shape[1] - side.ids.shape[1]), value=1.0)
            for side in batch.sides
        ]
        return self._masked(
            ids, mask, torch.cat(noises), getattr(self.config, f"{self.name}_probability")
        )


class CrossUnmasking(MaskedLanguageModelling):
    """Masked tokens of each side from its visible ones and the other side's sentence vector (MEXMA, arXiv 2409.12737).

    The vector, as it is, takes the place of the word embedding of CLS, so that the loss of tokens reaches it. No row
    is longer than its sentence, and positions stay, packed or not.
    """

    name = "xum"
    reads_pairs, reads_tokens = True, (False, False)

    def embed(self, embedded: Tensor, batch: Batch) -> Tensor:
        vectors = torch.cat([batch.target.embeds, batch.source.embeds]).unsqueeze(
            1
        )  # (2·B, 1, D): each the other's
        if vectors.shape[-1] != embedded.shape[-1]:
            raise ValueError(
                f"objective 'xum' puts a sentence vector ({vectors.shape[-1]} dimensions) in the place of a word "
                f"embedding ({embedded.shape[-1]}): give an encoder where they are as wide, or leave 'xum' out."
            )
        return torch.cat([vectors.to(embedded.dtype), embedded[:, 1:]], 1)


class BagOfWords(Objective):
    """Which tokens the target has, in whatever order, from the sentence vector of either side.

    Bag-of-words prediction (Ma et al. 2024, arXiv 2401.11248) across languages: each vector, of length 1 as retrieval
    compares it, is to tell the words of the translation. A softmax a sentence costs little beside one a token.
    """

    name = "bow"
    reads_tokens = (False, False)

    @property
    def heads(self) -> dict[str, Callable[[DAPConfig], nn.Module]]:
        """A transform of its own beside objectives that predict from the states of tokens."""
        alone = self.config.objectives <= {"tr", self.name}
        return {"prediction_head": PredictionHead} | (
            {} if alone else {"bow_transform": PredictionTransform}
        )

    def labels(self, batch: Batch, model: nn.Module) -> Tensor:
        ids, mask, *_ = batch.target
        counted = maskable(mask) & model.prediction_head.knows(ids)  # (B, S)
        return counted.expand(2, *counted.shape)  # the same for both sides

    def sums(
        self, batch: Batch, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        head, own, sums = model.prediction_head, model.bow_transform, []
        for side, counted in zip(batch.sides, labels):
            vectors = (
                F.normalize(side.embeds, dim=-1) * side.embeds.shape[-1] ** 0.5
            )  # (B, D), as large as a state
            states = (head if own is None else own).transform(vectors)  # (B, E)
            sums.append(head.bag_loss_sum(states, batch.target.ids, counted, batch.words))
        return torch.stack(sums), {}


#: Every objective by its name; `config.objective` joins some of them with "+".
OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind
    for kind in (
        TranslationRanking,
        RepresentationTranslation,
        TranslationLanguageModelling,
        MaskedLanguageModelling,
        CrossUnmasking,
        BagOfWords,
    )
}


def objectives_of(config: DAPConfig) -> list[Objective]:
    """The objectives that `config.objective` names, in the order of `OBJECTIVES`.

    Raises:
        ValueError: a name that is not there.
    """
    if unknown := sorted(config.objectives - OBJECTIVES.keys()):
        raise ValueError(
            f"DAPConfig: objective={config.objective!r}: there is no {', '.join(unknown)}; give one of "
            f"{', '.join(OBJECTIVES)}, or several with '+'."
        )
    return [kind(config) for name, kind in OBJECTIVES.items() if name in config.objectives]


# ----------------------------------------------------------------------------------------- rows of pairs


def stacked(sides: Sequence[Side]) -> tuple[Tensor, Tensor]:
    """Ids and mask of some sides one after the other, (2·B, S) each for two.

    The first token of a row counts as real even where none is, as an encoder cannot read an empty row.
    """
    length = max(side.ids.shape[1] for side in sides)
    sides = [pad_to(side, length) for side in sides]
    ids, mask = torch.cat([side.ids for side in sides]), torch.cat([side.mask for side in sides])
    mask[:, 0] = 1
    return ids, mask


def quiet(side: Side) -> Tensor:
    """The noise (B, S), and 1 at special tokens and padding, which are not masked."""
    return side.noise.masked_fill(~maskable(side.mask), 1.0)


def mask_tokens(
    ids: Tensor, noise: Tensor, probability: float, mask_id: int, vocab_size: int
) -> Tensor:
    """m of eq. L_TLM: of the tokens with `noise < probability`, 80% become [MASK], 10% a random id, 10% stay.

    Args:
        ids: (B, S) token ids.
        noise: (B, S), uniform in [0, 1); scattered, it also chooses the random id.

    >>> mask_tokens(torch.tensor([[7, 8]]), torch.tensor([[0.1, 0.9]]), 0.2, 4, 10)
    tensor([[4, 8]])
    """
    share = noise / probability  # (B, S), uniform in [0, 1) where the token is chosen
    random_ids = (noise * 2**24).long() * SCATTER % 2**24 * vocab_size // 2**24
    masked = torch.where(share < 0.8, mask_id, ids)
    return torch.where((share >= 0.8) & (share < 0.9), random_ids, masked)


def maskable(attention_mask: Tensor) -> Tensor:
    """(B, S) bool: real tokens but the first (CLS) and the last (the separator).

    >>> maskable(torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]))
    tensor([[False,  True, False, False],
            [False,  True,  True, False]])
    """
    mask = attention_mask.bool()
    following = F.pad(mask[:, 1:], (0, 1))  # (B, S): the next token is real
    return mask & following & (torch.arange(mask.shape[1], device=mask.device) > 0)


def pad_to(side: Side, length: int) -> Side:
    """The side with so many columns; what is added is padding."""
    missing = length - side.ids.shape[1]
    ids, mask = F.pad(side.ids, (0, missing)), F.pad(side.mask, (0, missing))
    noise = None if side.noise is None else F.pad(side.noise, (0, missing), value=1.0)
    states = None if side.states is None else F.pad(side.states, (0, 0, 0, missing))
    return Side(ids, mask, noise, states, side.embeds)


def odd_rows(count: int, device: torch.device, first: int) -> Tensor:
    """(B,) bool: whether a pair's number in the batch of all processes, where these begin at `first`, is odd."""
    return (torch.arange(count, device=device) + first) % 2 == 1


def swap_rows(side: Side, other: Side, swapped: Tensor) -> Side:
    """The side with the rows of the other where `swapped` (B,) is True."""

    def choose(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None else torch.where(swapped.view(-1, *[1] * (a.dim() - 1)), b, a)

    return Side(*(choose(a, b) for a, b in zip(side, other)))
