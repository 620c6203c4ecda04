"""The objectives: one class for each of TR, RTL, TLM, MLM, BOW and distillation.

- TR, translation ranking: rank a source's own target before all other targets.
- RTL, representation translation learning: reconstruct a target's tokens from the source's states.
- MLM, masked language modelling: predict masked tokens of a sentence.
- TLM, translation language modelling: predict masked tokens of a pair that is read as one text.
- BOW, bag of words: predict a target's tokens from a sentence vector.
- Distillation: pull the sentence vectors of both sides towards a teacher's vectors.

The file ships with every checkpoint, beside modeling_dap.py. `config.objective` combines the
names of `OBJECTIVES` by "+", such as "tr+rtl" (= DAP). The total loss is the weighted sum of the
objectives' losses.

Data before and after the encoder has two types: `Pairs` holds what comes in, `Encoded` what the
encoder returned for it.

Shapes in the comments: `B` pairs of one process, `W` processes, `S` tokens (`S_x` of the source,
`S_y` of the target), `D` hidden size, `E` width of the word embeddings, `Q` query tokens, `R`
rows of text, `G` groups of labels.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from .configuration_dap import DAPConfig, is_plugin, unknown_keys
    from .heads_dap import (
        PredictionHead,
        PredictionTransform,
        Projection,
        RTLHead,
        TeacherProjection,
        Words,
    )
    from .losses_dap import (
        RankingResult,
        at_least_float32,
        columns_of,
        first_row,
        mean_over_processes,
        ranking_loss_over_processes,
    )
    from .states_dap import embed, gather_columns, real_tokens_first
except ImportError:  # a checkout, where these files are top-level modules
    from configuration_dap import DAPConfig, is_plugin, unknown_keys
    from heads_dap import (
        PredictionHead,
        PredictionTransform,
        Projection,
        RTLHead,
        TeacherProjection,
        Words,
    )
    from losses_dap import (
        RankingResult,
        at_least_float32,
        columns_of,
        first_row,
        mean_over_processes,
        ranking_loss_over_processes,
    )
    from states_dap import embed, gather_columns, real_tokens_first

Measures = dict[str, Tensor]  # scalars to log, by name


# ------------------------------------------------------------------ before and after the encoder


class Sentences(NamedTuple):
    """One side of the pairs as token ids: sources, targets or hard negatives."""

    ids: Tensor  # (B, S), CLS first, a separator last, padded on the right
    mask: Tensor  # (B, S), 1 for real tokens
    noise: Tensor | None = None  # (B, S) random in [0, 1), choose masked tokens. None: no masks

    def padded_right(self) -> "Sentences":
        """Return the sentences with their padding, which may stand anywhere, on the right."""
        order = real_tokens_first(self.mask)  # (B, S)
        parts = [part if part is None else gather_columns(part, order) for part in self]
        return Sentences(*parts)


class Pairs(NamedTuple):
    """B translation pairs before the encoder. Target i is the translation of source i.

    Attributes:
        negatives: hard negatives, changed copies of the targets. The row of a pair without a copy
            has a mask of zeros. None if there are none at all.
        language_ids: (B,) languages of the sources, indices into `config.rtl_languages`, or None.
        first_pair: number, from 0, of the first pair in the batch of all processes. None if these
            are all pairs of this process.
        teacher: (B, 2, T) where the vectors of both sides should point, for distillation. None if
            there is no teacher.
    """

    source: Sentences
    target: Sentences
    negatives: Sentences | None = None
    language_ids: Tensor | None = None
    first_pair: int | None = None
    teacher: Tensor | None = None


def pairs_of(
    inputs: Mapping[str, Any], needs: Collection[str] = (), first_pair: int | None = None
) -> Pairs:
    """Return the pairs in arguments of `DAPForPreTraining.forward`, padded on the right.

    If noise is among the `needs` and not given, it is drawn: for sources, then for targets.
    """
    sides = {}
    for side in ("source", "target", "negative"):
        ids = inputs.get(f"{side}_input_ids")
        if ids is None:
            continue
        noise = inputs.get(f"{side}_noise")
        if "noise" in needs and noise is None and side != "negative":
            noise = draw_noise(ids)
        sides[side] = Sentences(ids, inputs[f"{side}_attention_mask"], noise).padded_right()
    return Pairs(
        source=sides["source"],
        target=sides["target"],
        negatives=sides.get("negative"),
        language_ids=inputs.get("language_ids"),
        first_pair=first_pair,
        teacher=inputs.get("teacher_embeds"),
    )


def draw_noise(ids: Tensor) -> Tensor:
    """Draw random numbers that decide which of the tokens (B, S) are masked: uniform in [0, 1)."""
    return torch.rand(ids.shape, device=ids.device)


class Encoded(NamedTuple):
    """B translation pairs after the encoder.

    If no objective needs states or vectors, the encoder does not run and only `words` is set.
    States f(x), f(y) may be zeros for tokens that no objective reads. Vectors have length 1 only if
    a module Normalize follows the pooling.
    """

    words: Words  # word embeddings for the heads
    source_states: Tensor | None = None  # (B, S_x, D) token states f(x)
    target_states: Tensor | None = None  # (B, S_y, D) token states f(y)
    source_embeds: Tensor | None = None  # (B, D') sentence vectors f_s(x), D' behind Dense layers
    target_embeds: Tensor | None = None  # (B, D') sentence vectors f_s(y)
    negative_embeds: Tensor | None = None  # (B, D') of the hard negatives


@dataclass
class Chunk:
    """Facts about the batch that `forward` needs if its pairs are a chunk of it (GradCache).

    It is a plain object, not a tuple: wrappers that cast forward's tensors then leave it alone.

    Attributes:
        first_pair: number, from 0, of the chunk's first pair in the batch of all processes.
        gradients: name of each objective that compares vectors -> gradients of its loss with
            respect to the chunk's vectors. None in the first pass, which returns these vectors.
        label_counts: name of each other objective -> number of its labels in the batch of a
            process, the mean over processes, (G,) for G groups. None in the first pass.
    """

    first_pair: int
    gradients: dict[str, tuple[Tensor, ...]] | None = None
    label_counts: dict[str, Tensor] | None = None


# -------------------------------------------------------------------------- what an objective is


class Objective:
    """Base class of the objectives: a loss that is a mean over labels, such as tokens to predict.

    A subclass overrides `labels`, `loss_sum`, and those of the facts below that differ. It has no
    weights: it computes with the heads of the model that its methods are given. Then GradCache,
    packing and several processes work without more code.

    Labels can be in several groups, such as directions. The loss is then the average of the groups'
    means.
    """

    #: Name in `OBJECTIVES` and `config.objective`, and in `{name}_weight` and `{name}_loss`.
    name: str
    #: What pages and model cards call it. Empty: its name.
    title: str = ""
    #: What its head predicts: "targets" (only tokens of the target side, so that a smaller target
    #: vocabulary is enough), "tokens" (any tokens), or None.
    predicts: Literal["targets", "tokens"] | None = "tokens"
    #: Groups of labels that are predicted from the other side of the pair, such as the target's
    #: tokens from the source: G' of G. None: there are none.
    from_other_side: slice | None = None
    #: Modules that the model has beside the encoder: attribute -> function that builds it.
    heads: dict[str, Callable[[DAPConfig], nn.Module]] = {}
    #: What the model prepares: "source_states", "target_states" (all token states of a side),
    #: "embeds" (sentence vectors), "noise" (for masking), "mask_token" (its embedding). `needs_of`
    #: adds "target_vocabulary", which `predicts` implies.
    needs: frozenset[str] = frozenset({"source_states", "target_states", "embeds"})

    #: Options of an objective of your own: option -> default. The default gives the type: a number,
    #: a truth value, a text, or a list that is not empty. The configuration's field
    #: `{name}_{option}` sets the option.
    options: Mapping[str, Any] = {}

    def __init__(self, config: DAPConfig) -> None:
        self.config = config
        defaults = self.default_fields()
        #: The configuration's fields of an objective of your own, with the defaults filled in.
        self.fields = {key: getattr(config, key, default) for key, default in defaults.items()}
        prefix = f"{self.name}_"
        self.options = {key.removeprefix(prefix): value for key, value in self.fields.items()}
        weight = f"{prefix}weight"
        #: Factor of this loss in the total loss.
        self.weight: float = getattr(config, weight, defaults.get(weight))

    @classmethod
    def default_fields(cls) -> dict[str, Any]:
        """Return the default of each field `{name}_weight` and `{name}_{option}` of a plug-in.

        It is empty for an objective of this project, whose fields are in `DAPConfig`.
        """
        if not is_plugin(cls.name):
            return {}
        options = {"weight": 1.0, **cls.options}
        return {f"{cls.name}_{option}": default for option, default in options.items()}

    def labels(self, pairs: Pairs, model: nn.Module) -> Tensor:
        """Return True for each label that counts, (G, ...) for G groups of labels.

        This is called before the encoder runs.
        """
        raise NotImplementedError

    def loss_sum(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, Measures]:
        """Return the sums (G,) of the loss over each group's labels, and other sums to log.

        Those of several chunks (`mini_batch_size`) are added up. The log has their mean over
        batches and processes.
        """
        raise NotImplementedError

    def loss(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, chunk: Chunk | None = None
    ) -> tuple[Tensor, Measures]:
        """Compute the loss of this process's pairs, a scalar without its weight, and values to log.

        The loss is scaled so that its mean over processes is the loss of the batch of all
        processes. Given a `chunk` of a larger batch, it is the chunk's share of the batch's loss.
        """
        labels = self.labels(pairs, model)
        counts = self.count(labels) if chunk is None else chunk.label_counts[self.name]  # (G,)
        sums, measures = self.loss_sum(pairs, encoded, model, labels)
        if sums.shape != counts.shape:
            raise ValueError(
                f"objective {self.name}: labels of shape {tuple(labels.shape)}, but loss sums of "
                f"shape {tuple(sums.shape)}: give (G, ...) and (G,) for G groups of labels"
            )
        loss = self.mean(sums, counts)
        return loss, {f"{self.name}_loss": loss, **measures}

    def loss_from_other_side(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module
    ) -> tuple[Tensor, Tensor]:
        """Return loss sums and label counts of the groups `from_other_side`, (G',) each."""
        labels = self.labels(pairs, model)[self.from_other_side]
        sums, _ = self.loss_sum(pairs, encoded, model, labels)
        return sums, labels.flatten(1).sum(1)

    @staticmethod
    def mean(sums: Tensor, counts: Tensor) -> Tensor:
        """Return the average of the means, sums (G,) / counts (G,), of groups with labels."""
        has_labels = counts > 0
        means = sums / counts.where(has_labels, 1)
        return means.sum() / has_labels.sum().clamp(min=1)

    def count(self, labels: Tensor) -> Tensor:
        """Return the number of True labels in each group, (G,), averaged over processes."""
        if labels.ndim < 2:
            raise ValueError(
                f"objective {self.name}: labels of shape {tuple(labels.shape)}, expected (G, ...) "
                "for G groups of labels, such as (1, B)"
            )
        return mean_over_processes(labels.flatten(1).sum(1))


class Comparison(Objective):
    """Base class of objectives that compare the sentence vectors of all pairs in the batch.

    A subclass overrides `vectors` and `compare` instead of `labels` and `loss_sum`. GradCache calls
    `vectors` for every chunk and `compare` once for the whole batch.
    """

    predicts = None
    needs = frozenset({"embeds"})

    def vectors(self, pairs: Pairs, encoded: Encoded, model: nn.Module) -> tuple[Tensor, ...]:
        """Return the vectors to compare, as tensors with one row per pair."""
        raise NotImplementedError

    def compare(self, vectors: tuple[Tensor, ...], pairs: Pairs) -> tuple[Tensor, Measures]:
        """Return the loss of all pairs of this process, a scalar, and other values to log."""
        raise NotImplementedError

    def loss_of(self, vectors: tuple[Tensor, ...], pairs: Pairs) -> tuple[Tensor, Measures]:
        """Call `compare`, and add the loss to the values to log, as `{name}_loss`."""
        loss, measures = self.compare(vectors, pairs)
        return loss, {f"{self.name}_loss": loss, **measures}

    def loss(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, chunk: Chunk | None = None
    ) -> tuple[Tensor, Measures]:
        """Return the loss, a scalar, and the values to log by name.

        With a chunk, the vectors of the whole batch were compared before (GradCache). Then the loss
        only passes on the gradients of the chunk's vectors. Its value has no meaning.
        """
        vectors = self.vectors(pairs, encoded, model)
        if chunk is None:
            return self.loss_of(vectors, pairs)
        gradients = chunk.gradients[self.name]
        loss = sum((rows * gradient).sum() for rows, gradient in zip(vectors, gradients))
        return loss, {}


# -------------------------------------------------------------------------------- the objectives


def shared_prediction_head(config: DAPConfig) -> PredictionHead:
    """Build the prediction head that all objectives of a model share."""
    predicting = [each for each in objectives_of(config) if each.predicts]
    reads_vectors = all(each.needs == {"embeds"} for each in predicting)
    return PredictionHead(config, {each.predicts for each in predicting}, reads_vectors)


class TranslationRanking(Comparison):
    """TR, translation ranking (section 3.2, eq. L_TR): rank each source's own target first.

    The other candidates are the targets of the batch's other pairs and the hard negatives, if any.

    With the default options this is `MultipleNegativesRankingLoss` of sentence-transformers with
    `scale=20`. One thing differs: pairs with the same source or the same target are no negatives of
    each other. `tr_same_side_negatives` is the direction "query_to_query" there.
    """

    name = "tr"
    title = "translation ranking (TR)"

    @property
    def heads(self) -> dict[str, Callable[[DAPConfig], nn.Module]]:
        return {"projection": Projection} if self.config.projection else {}

    def vectors(self, pairs: Pairs, encoded: Encoded, model: nn.Module) -> tuple[Tensor, ...]:
        """Return the projected vectors (B, D) of sources, targets and, if any, hard negatives."""
        vectors = [encoded.source_embeds, encoded.target_embeds]
        if encoded.negative_embeds is not None:
            vectors.append(encoded.negative_embeds)
        if model.projection is not None:
            vectors = [model.projection(rows) for rows in vectors]
        return tuple(vectors)

    def compare(self, vectors: tuple[Tensor, ...], pairs: Pairs) -> tuple[Tensor, Measures]:
        """Compute L_TR of this process's sources over the candidates of all processes.

        A source's candidates are all targets, the hard negatives and, with
        `tr_same_side_negatives`, the other sources. With `tr_bidirectional`, all sources are also
        ranked for each target, without hard negatives. The loss is the mean over the directions and
        the `tr_matryoshka_dims`. Accuracy and the number of negatives are measured on whole vectors
        only.
        """
        hashes = self.hashes(pairs)
        full = self.rank(vectors, hashes)  # of vectors that are not shortened
        results = list(full)
        for size in self.config.tr_matryoshka_dims or ():
            shortened = tuple(rows[:, :size] for rows in vectors)
            results += self.rank(shortened, hashes)

        loss = sum(result.loss for result in results) / len(results)
        accuracy = sum(result.accuracy for result in full) / len(full)
        negatives = sum(result.negatives for result in full) / len(full)
        return loss, {"accuracy": accuracy, "negatives": negatives}

    def rank(self, vectors: tuple[Tensor, ...], hashes: list[Tensor]) -> list[RankingResult]:
        """Rank targets for each source and, if `tr_bidirectional`, sources for each target."""
        config = self.config
        options = (config.tr_similarity, config.tr_temperature)
        source, target, *_ = vectors
        of_pairs = hashes[0]

        candidates = list(vectors[1:])
        of_candidates = list(hashes)
        if config.tr_same_side_negatives:  # by its hash, a source is no negative of itself
            candidates.append(source)
            of_candidates.append(of_pairs)
        results = [ranking_loss_over_processes(source, candidates, of_candidates, *options)]

        if config.tr_bidirectional:
            candidates = [source, target] if config.tr_same_side_negatives else [source]
            of_candidates = [of_pairs] * len(candidates)
            results.append(ranking_loss_over_processes(target, candidates, of_candidates, *options))
        return results

    def hashes(self, pairs: Pairs) -> list[Tensor]:
        """Return hashes by which pairs with the same target or the same source are recognised.

        Such pairs are not negatives of each other (see `ranking_loss_over_processes`). The first
        tensor (B, 2) has the hashes of each pair's target and source. If there are hard negatives,
        the second has the hash of each negative (0 if a pair has none), and 0, because a negative
        has no source. Without `tr_mask_duplicates`, both hashes are the pair's number, so no two
        are equal.
        """
        target = text_hash(pairs.target.ids, pairs.target.mask)
        source = text_hash(pairs.source.ids, pairs.source.mask)
        if not self.config.tr_mask_duplicates:  # as if all texts were different
            numbers = torch.arange(len(target), device=target.device)
            target = source = numbers + first_row(len(target)) + 1
        hashes = [torch.stack([target, source], 1)]
        if pairs.negatives is not None:
            negative = text_hash(pairs.negatives.ids, pairs.negatives.mask)
            hashes.append(torch.stack([negative, torch.zeros_like(negative)], 1))
        return hashes


class RepresentationTranslation(Objective):
    """RTL (section 3.3.2, eq. L_RTL): reconstruct the target's tokens from the source's states.

    `rtl_direction` can turn the roles of the sides around (Table 5). Below, the *context* is the
    side whose states are given, and the *answer* is the side to reconstruct.
    """

    name = "rtl"
    title = "representation translation learning (RTL)"
    predicts = "targets"
    from_other_side = slice(None)
    heads = {"rtl_head": RTLHead, "prediction_head": shared_prediction_head}

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        needs = {"mask_token"}
        if config.rtl_direction != "target-to-source":
            needs.add("source_states")
        if config.rtl_direction != "source-to-target":
            needs.add("target_states")
        if config.rtl_ratio < 1:  # some tokens of the answer stay visible
            needs |= {"source_states", "target_states", "noise"}
        self.needs = frozenset(needs)
        #: First token that takes part: CLS, if there is one, does not.
        self.first_token = config.special_tokens_before

    def labels(self, pairs: Pairs, model: nn.Module) -> Tensor:
        """Return True for each token of the answer that RTL predicts: (G, B, Q) bool.

        These are the `chosen` tokens that are in the target vocabulary. G is 1. With
        `rtl_direction="both"` it is 2: pairs that reconstruct the target, and the others.
        """
        answer = self.answer(pairs)
        labels = self.chosen(answer)  # (B, Q)
        if model.prediction_head.token_ids is not None:
            labels = labels & model.prediction_head.knows(answer.ids[:, self.first_token :])
        if self.config.rtl_direction != "both":
            return labels.unsqueeze(0)
        odd = odd_rows(pairs)[:, None]  # (B, 1)
        return torch.stack([labels & ~odd, labels & odd])  # one group per direction

    def loss_sum(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, Measures]:
        """Reconstruct the answer's tokens from the context's states: the summed cross entropy (G,).

        "ignored_tokens" to log are left out because they are not in the target vocabulary.
        """
        answer = self.answer(pairs)
        chosen = self.chosen(answer)  # (B, Q): CLS takes no part on either side
        ids = answer.ids[:, self.first_token :]  # (B, Q)
        # The context is the other side: the source's, if the target is reconstructed.
        # context: (B, C, D)
        context = self.by_direction(pairs, encoded.source_states, encoded.target_states)
        context_mask = self.by_direction(pairs, pairs.source.mask, pairs.target.mask)  # (B, C)

        # One [MASK] embedding per answer token. CLS is cut off afterwards, so that the other tokens
        # have the positions 1, 2, ...
        mask_token = encoded.words.mask_token
        if mask_token is None:  # the tokenizer has none
            mask_token = model.rtl_head.mask_token
        masks = mask_token.expand(*answer.ids.shape, -1)  # (B, S, E)
        embedder = model.rtl_head.blocks if self.config.rtl_reembed else model.dap.encoder
        queries = embed(embedder, masks)[:, self.first_token :]  # (B, Q, D)
        if self.config.rtl_ratio < 1:  # the other tokens stay visible (section 5.2)
            visible = self.by_direction(pairs, encoded.target_states, encoded.source_states)
            queries = torch.where(chosen.unsqueeze(-1), queries, visible[:, self.first_token :])

        # eq. g^0: source states and queries through the head.
        states = model.rtl_head(
            context[:, self.first_token :],
            context_mask[:, self.first_token :],
            queries,
            answer.mask[:, self.first_token :],
            self.languages(pairs),
        )  # (B, Q, D)

        # eq. L_RTL: cross entropy of the chosen tokens.
        sums = []
        for group in labels:
            places = group.nonzero(as_tuple=True)
            sums.append(
                model.prediction_head.target_loss_sum(states[places], ids[places], encoded.words)
            )
        return torch.stack(sums), {"ignored_tokens": chosen.sum() - labels.sum()}

    def answer(self, pairs: Pairs) -> Sentences:
        """Return the side to reconstruct: the targets, unless `rtl_direction` says otherwise."""
        source, target = pairs.source, pairs.target
        ids = self.by_direction(pairs, target.ids, source.ids)
        mask = self.by_direction(pairs, target.mask, source.mask)
        noise = None
        if self.config.rtl_ratio < 1:
            noise = self.by_direction(pairs, target.noise, source.noise)
        return Sentences(ids, mask, noise)

    def chosen(self, answer: Sentences) -> Tensor:
        """Return True for tokens (B, Q) to reconstruct: a share `rtl_ratio`, without CLS."""
        chosen = answer.mask.bool()
        if answer.noise is not None:
            chosen = chosen & (answer.noise < self.config.rtl_ratio)
        return chosen[:, self.first_token :]

    def by_direction(self, pairs: Pairs, to_target: Tensor, to_source: Tensor) -> Tensor:
        """Choose each pair's row: of `to_target` if its target is reconstructed, else `to_source`.

        With "both", the sources of `odd_rows` are reconstructed. Zeros fill the shorter of (B, S,
        ...) and (B, S', ...).
        """
        if self.config.rtl_direction == "source-to-target":
            return to_target
        if self.config.rtl_direction == "target-to-source":
            return to_source
        length = max(to_target.shape[1], to_source.shape[1])
        odd = odd_rows(pairs).view(-1, *[1] * (to_target.dim() - 1))
        return torch.where(odd, pad_to(to_source, length), pad_to(to_target, length))

    def languages(self, pairs: Pairs) -> Tensor | None:
        """Return the rows (B, 2) of the language embeddings for each pair's context and answer.

        Row 0 is the target language. None if only targets are reconstructed, because the head then
        has no such embeddings.
        """
        direction = self.config.rtl_direction
        if direction == "source-to-target":
            return None
        if pairs.language_ids is None:
            raise ValueError(f"rtl_direction {direction!r} needs language_ids, which are None")
        source = pairs.language_ids + 1  # (B,)
        target = torch.zeros_like(source)
        to_target = torch.stack([source, target], 1)  # (B, 2)
        return self.by_direction(pairs, to_target, to_target.flip(1))


class MaskedText(NamedTuple):
    """Rows of text of which some tokens are to be masked and predicted."""

    ids: Tensor  # (R, S) token ids before masking
    mask: Tensor  # (R, S), 1 for real tokens
    noise: Tensor  # (R, S) in [0, 1) choose masked tokens, 1 at special tokens and padding
    columns: Tensor | None = None  # (R, S) position in the sentence. None: column numbers


class MaskedLanguageModelling(Objective):
    """MLM (Devlin et al. 2019): predict masked tokens of each sentence by itself."""

    name = "mlm"
    title = "masked language modelling (MLM)"
    heads = {"prediction_head": shared_prediction_head}
    needs = frozenset({"noise"})

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        if config.mask_token_id is None:
            raise ValueError(f"objective {self.name} needs a mask token: mask_token_id=None")

    @property
    def probability(self) -> float:
        """Return the share of the tokens that are masked, `config.{name}_probability`."""
        return getattr(self.config, f"{self.name}_probability")

    def text(self, pairs: Pairs) -> MaskedText:
        """Return the text to mask: the sources, followed by the targets, (2·B, S)."""
        source, target = pairs.source, pairs.target
        length = max(source.ids.shape[1], target.ids.shape[1])
        ids = torch.cat([pad_to(source.ids, length), pad_to(target.ids, length)])
        mask = torch.cat([pad_to(source.mask, length), pad_to(target.mask, length)])
        noise = [pad_to(self.noise(side), length, value=1.0) for side in (source, target)]
        return MaskedText(ids, mask, torch.cat(noise))

    def noise(self, side: Sentences) -> Tensor:
        """Return a side's noise (B, S), with 1 at special tokens and padding: no masks there."""
        return side.noise.masked_fill(~maskable(side.mask, self.config), 1.0)

    def labels(self, pairs: Pairs, model: nn.Module) -> Tensor:
        """Return True for each masked token of the text: (1, R, S) bool."""
        return (self.text(pairs).noise < self.probability).unsqueeze(0)

    def loss_sum(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, Measures]:
        """Mask the text, encode it, and predict the masked tokens among the whole vocabulary."""
        text = self.text(pairs)
        (chosen,) = labels  # (R, S)
        config = self.config
        shown = mask_tokens(
            text.ids, text.noise, self.probability, config.mask_token_id, config.vocab_size
        )
        read = chosen | (columns_of(shown) == 0)  # no row without a token to read
        states = model.encode_text(shown, text.mask, text.columns, read)  # (R, S, D)
        places = chosen.nonzero(as_tuple=True)
        total = model.prediction_head.loss_sum(
            states[places], text.ids[places], encoded.words.table
        )
        return total.unsqueeze(0), {}


class TranslationLanguageModelling(MaskedLanguageModelling):
    """TLM (eq. L_TLM; Conneau and Lample 2019): MLM with source and target in one row."""

    name = "tlm"
    title = "translation language modelling (TLM)"

    def text(self, pairs: Pairs) -> MaskedText:
        """Return rows of a source and its target without CLS: (B, S_x+S_y-1).

        The positions of the target count from its own beginning.
        """
        x, y = pairs.source, pairs.target
        first = self.config.special_tokens_before
        ids = torch.cat([x.ids, y.ids[:, first:]], 1)
        mask = torch.cat([x.mask, y.mask[:, first:]], 1)
        noise = torch.cat([self.noise(x), self.noise(y)[:, first:]], 1)
        columns = torch.cat([columns_of(x.ids), columns_of(y.ids)[:, first:]], 1)
        return MaskedText(ids, mask, noise, columns)


class BagOfWords(Objective):
    """BOW: predict the target's tokens, in any order, from the sentence vector of either side.

    This is the bag-of-words prediction of Ma et al. 2024 (arXiv 2401.11248) across languages. One
    softmax per sentence costs little beside one per token.
    """

    name = "bow"
    title = "bag-of-words prediction (BOW)"
    predicts = "targets"
    from_other_side = slice(1)  # the second group predicts the target from itself
    needs = frozenset({"embeds"})

    @property
    def heads(self) -> dict[str, Callable[[DAPConfig], nn.Module]]:
        """Return the heads. The transform is shared unless others predict from token states."""
        heads = {"prediction_head": shared_prediction_head}
        predicting = [each.name for each in objectives_of(self.config) if each.predicts]
        if predicting != [self.name]:
            heads["bow_transform"] = PredictionTransform
        return heads

    def labels(self, pairs: Pairs, model: nn.Module) -> Tensor:
        """Return True for each token of the target to predict: (2, B, S_y), equal for both vectors.

        Special tokens do not count, nor do tokens outside the target vocabulary.
        """
        ids, mask, _ = pairs.target
        counted = maskable(mask, self.config)  # (B, S_y)
        if model.prediction_head.token_ids is not None:
            counted = counted & model.prediction_head.knows(ids)
        return counted.expand(2, *counted.shape)

    def loss_sum(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, Measures]:
        """Predict the target's tokens twice: from the source's vector and from the target's."""
        head = model.prediction_head
        transform = head if model.bow_transform is None else model.bow_transform
        sums = []
        for embeds, counted in zip((encoded.source_embeds, encoded.target_embeds), labels):
            # Cosines compare vectors of length 1. Token states have about the length sqrt(D).
            vectors = F.normalize(embeds, dim=-1) * embeds.shape[-1] ** 0.5  # (B, D)
            states = transform.transform(vectors)  # (B, E)
            sums.append(head.bag_loss_sum(states, pairs.target.ids, counted, encoded.words))
        return torch.stack(sums), {}


class Distillation(Objective):
    """Pull both sides' sentence vectors towards a teacher's vectors.

    The loss is 1 - cosine, the mean over both sides. With another encoder as the teacher, both
    sides go to its vector of the target. This is multilingual distillation (Reimers and Gurevych
    2020, arXiv 2004.09813) with the cosine instead of the squared distance. It teaches new
    languages to an encoder, if the teacher knows the language of the targets well. If the teacher
    is the model itself before the training, each side goes to its own old vector, that of the
    source after a shift (`dap_transformers.training.teacher`).
    """

    name = "distill"
    title = "distillation from a teacher"
    predicts = None
    needs = frozenset({"embeds"})

    @property
    def heads(self) -> dict[str, Callable[[DAPConfig], nn.Module]]:
        """Return a linear head if the teacher's vectors have another size, else none."""
        if self.config.distill_size in (None, self.config.vector_size):
            return {}
        return {"teacher_projection": TeacherProjection}

    def labels(self, pairs: Pairs, model: nn.Module) -> Tensor:
        """Mark both sides of each pair: (2, B)."""
        pairs_of_process = len(pairs.source.ids)
        return torch.ones(2, pairs_of_process, dtype=torch.bool, device=pairs.source.ids.device)

    def loss_sum(
        self, pairs: Pairs, encoded: Encoded, model: nn.Module, labels: Tensor
    ) -> tuple[Tensor, Measures]:
        """Sum 1 - cosine of each side's vectors and the teacher's: (2,)."""
        if pairs.teacher is None:
            raise ValueError("distill needs teacher_embeds: give BitextCollator a teacher")
        source, target = at_least_float32(pairs.teacher).unbind(1)  # (B, T) each
        sums = []
        for embeds, goal in ((encoded.source_embeds, source), (encoded.target_embeds, target)):
            if model.teacher_projection is not None:
                embeds = model.teacher_projection(embeds)
            cosines = F.cosine_similarity(at_least_float32(embeds), goal, dim=-1)  # (B,)
            sums.append((1 - cosines).sum())
        return torch.stack(sums), {}


#: Every objective by its name. A class that is added here can be named in `config.objective`.
OBJECTIVES: dict[str, type[Objective]] = {
    kind.name: kind
    for kind in (
        TranslationRanking,
        RepresentationTranslation,
        TranslationLanguageModelling,
        MaskedLanguageModelling,
        BagOfWords,
        Distillation,
    )
}


def objectives_of(config: DAPConfig) -> list[Objective]:
    """Build the objectives that `config.objective` names, in the order of `OBJECTIVES`."""
    unknown = sorted(config.objectives - OBJECTIVES.keys())
    if unknown:
        raise ValueError(
            f"objective={config.objective!r}: there is no {', '.join(unknown)}, but "
            f"{', '.join(OBJECTIVES)}. If it is your own, give its file by --plugin, or import it."
        )
    for name in config.objectives:
        own = OBJECTIVES[name].name
        if own != name:
            raise ValueError(f"OBJECTIVES[{name!r}] has the name {own!r}: give it one name")
    check_options(config)
    return [kind(config) for name, kind in OBJECTIVES.items() if name in config.objectives]


def check_options(config: DAPConfig) -> None:
    """Raise `ValueError` if an option of a plug-in has a wrong name or type.

    `DAPConfig` accepts every field that begins with the name of a plug-in's objective, because it
    can be loaded without the plug-in.
    """
    defaults = {}
    for kind in OBJECTIVES.values():
        defaults |= kind.default_fields()
    prefixes = tuple(f"{name}_" for name in config.objectives)
    given = [key for key in unknown_keys(vars(config)) if key.startswith(prefixes)]
    for key in given:
        if key not in defaults:
            raise ValueError(f"no objective has an option {key}: there are {', '.join(defaults)}")
        value = getattr(config, key)
        if not has_type_of(defaults[key], value):
            raise ValueError(f"{key}={value!r}: give a value like its default {defaults[key]!r}")


def has_type_of(default: Any, value: Any) -> bool:
    """Tell whether a value has the type of a default. None allows all types.

    An int may stand for a float, and a tuple for a list. The items of a list are checked, too.

    >>> has_type_of(1.0, 2), has_type_of(1.0, True), has_type_of((1,), [2]), has_type_of([1], ["2"])
    (True, False, True, False)
    >>> has_type_of([0, 0.5], [0.5, 1])
    True
    """
    if isinstance(default, (list, tuple)):
        is_list = isinstance(value, (list, tuple))
        return is_list and all(any(has_type_of(item, each) for item in default) for each in value)
    kinds = (float, int) if isinstance(default, float) else (type(default),)
    return default is None or type(value) in kinds


def needs_of(objectives: Sequence[Objective]) -> frozenset[str]:
    """Return what several objectives need from the model: their `needs`, and what heads look up."""
    needs = set()
    for objective in objectives:
        needs |= objective.needs
        if objective.predicts == "targets":
            needs.add("target_vocabulary")
    return frozenset(needs)


# -------------------------------------------------------------------------- tokens and directions


def mask_tokens(
    ids: Tensor, noise: Tensor, probability: float, mask_id: int, vocab_size: int
) -> Tensor:
    """Mask the tokens (R, S) with `noise < probability` (m of eq. L_TLM).

    80% of them become [MASK], 10% a random id, and 10% stay. The noise, uniform in [0, 1), also
    decides between the three kinds and, scrambled, gives the random id.

    >>> mask_tokens(torch.tensor([[7, 8]]), torch.tensor([[0.1, 0.9]]), 0.2, 4, 10)
    tensor([[4, 8]])
    """
    share = noise / probability  # (R, S), uniform in [0, 1) where a token is chosen
    # 10368889 is 2**24 times the golden ratio: its multiples modulo 2**24 are spread evenly.
    scrambled = (noise * 2**24).long() * 10368889 % 2**24
    random_ids = scrambled * vocab_size // 2**24
    masked = torch.where(share < 0.8, mask_id, ids)
    return torch.where((share >= 0.8) & (share < 0.9), random_ids, masked)


def text_hash(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return a 64-bit hash of each row's real tokens in their order: (B,) int64.

    Padding on the left changes the hash, on the right not. A row without real tokens has hash 0.

    >>> a, b = torch.tensor([[5, 6, 7, 0]]), torch.tensor([[5, 6, 7], [6, 5, 7]])
    >>> text_hash(a, (a > 0).long()) == text_hash(b, torch.ones_like(b))
    tensor([ True, False])
    """
    position = torch.arange(1, input_ids.shape[1] + 1, device=input_ids.device)  # (S,)
    # (B, S). The products and sums are modulo 2^64.
    mixed = input_ids * -7046029254386353131 + position * -4417276706812531889
    mixed = (mixed ^ (mixed >> 31)) * -49064778989728563
    mixed = mixed ^ (mixed >> 29)
    return (mixed * attention_mask.long()).sum(-1)


def maskable(attention_mask: Tensor, config: DAPConfig) -> Tensor:
    """Return True for each real token (B, S) but special ones at the ends, such as CLS: bool.

    >>> mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    >>> maskable(mask, DAPConfig()).int().tolist()
    [[0, 1, 0, 0], [0, 1, 1, 0]]
    """
    mask = attention_mask.bool()
    behind = config.special_tokens_after
    is_followed = F.pad(mask[:, behind:], (0, behind))  # (B, S)
    return mask & is_followed & (columns_of(mask) >= config.special_tokens_before)


def odd_rows(pairs: Pairs) -> Tensor:
    """Return True for the pairs (B,) of odd number, counted from 0 through all processes."""
    count = len(pairs.source.ids)
    first = first_row(count) if pairs.first_pair is None else pairs.first_pair
    numbers = torch.arange(count, device=pairs.source.ids.device)
    return (numbers + first) % 2 == 1


def pad_to(values: Tensor, length: int, value: float = 0) -> Tensor:
    """Pad values (B, S, ...) on the right to (B, length, ...), filling with `value`."""
    missing = length - values.shape[1]
    unpadded_dimensions = (0, 0) * (values.dim() - 2)
    return F.pad(values, (*unpadded_dimensions, 0, missing), value=value)
