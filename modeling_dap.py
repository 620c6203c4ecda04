"""Dual-alignment pre-training (DAP, ACL 2023): a sentence encoder and the heads that only training needs.

It ships with a checkpoint as it is, beside the files it imports. Shapes in the comments: `B` pairs of one process, `W`
processes, `S` tokens (`S_x` of the source, `S_y` of the target), `D` hidden size, `T` tokens with a label, `Q` query
tokens. Every sequence starts with its CLS token, ends with a separator, and is padded on the right.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ModelOutput, SequenceClassifierOutput
from transformers.utils import logging

try:
    from .configuration_dap import DAPConfig
    from .encoder_dap import (
        build_encoder,
        encoder_named,
        find_mask_token_id,
        last_states,
        load_masked_lm,
        position_offset,
        require_encoder,
    )
    from .heads_dap import PredictionHead, RTLHead, check_predicted
    from .losses_dap import (
        RankingResult,
        columns_of,
        first_row,
        gather_columns,
        gather_rows,
        mask_tokens,
        maskable,
        pool,
        real_tokens_first,
        sum_over_processes,
        text_hash,
        translation_ranking_loss,
        whole,
        world_size,
    )
    from .packing_dap import use_packing
    from .pairs_dap import Chunk, Side, Words, odd_rows, pad_to_same_length, swap_rows
except ImportError:  # a checkout or an installed wheel, where these files are top-level modules
    from configuration_dap import DAPConfig
    from encoder_dap import (
        build_encoder,
        encoder_named,
        find_mask_token_id,
        last_states,
        load_masked_lm,
        position_offset,
        require_encoder,
    )
    from heads_dap import PredictionHead, RTLHead, check_predicted
    from losses_dap import (
        RankingResult,
        columns_of,
        first_row,
        gather_columns,
        gather_rows,
        mask_tokens,
        maskable,
        pool,
        real_tokens_first,
        sum_over_processes,
        text_hash,
        translation_ranking_loss,
        whole,
        world_size,
    )
    from packing_dap import use_packing
    from pairs_dap import Chunk, Side, Words, odd_rows, pad_to_same_length, swap_rows

logger = logging.get_logger(__name__)


class DAPPreTrainedModel(PreTrainedModel):
    config_class = DAPConfig
    base_model_prefix = "dap"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True


class DAPModel(DAPPreTrainedModel):
    """The sentence encoder f: token states and, as `pooler_output`, the sentence embedding f_s(x) (section 3.2)."""

    _keys_to_ignore_on_load_unexpected = [r"^rtl_head\.", r"^prediction_head\.", r"^projection\.", r"^classifier\."]

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        config.check()
        require_encoder(config.encoder_config, "encoder_config")
        self.encoder = build_encoder(config.encoder_config)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.encoder.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.set_input_embeddings(value)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPooling:
        """Encode sentences.

        Args:
            input_ids: (B, S) token ids, or `inputs_embeds` (B, S, D) in their place.
            attention_mask: (B, S), 1 for real tokens; all of them when absent.
            token_type_ids: (B, S), for encoders that tell the sentences of a pair apart.
            position_ids: (B, S), for encoders with absolute positions.
            kwargs: passed to the encoder (`output_hidden_states`, ...).

        Returns:
            `last_hidden_state` (B, S, D) and `pooler_output` (B, D), the embedding as it is, not normalised.
        """
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = self.config.return_dict
        for wanted in ("output_hidden_states", "output_attentions"):
            if kwargs.get(wanted) is None:
                kwargs[wanted] = getattr(self.config, wanted)
        given = input_ids if input_ids is not None else inputs_embeds
        if attention_mask is None and given is not None:
            attention_mask = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)
        optional = {"token_type_ids": token_type_ids, "position_ids": position_ids}
        kwargs |= {key: value for key, value in optional.items() if value is not None}  # not every encoder has them
        out = self.encoder(
            input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, return_dict=True, **kwargs
        )
        result = BaseModelOutputWithPooling(
            last_hidden_state=out.last_hidden_state,
            pooler_output=pool(out.last_hidden_state, attention_mask, self.config.pooling),
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )
        return result if return_dict is not False else result.to_tuple()


# ------------------------------------------------------------------------------------------- pre-training


@dataclass
class DAPForPreTrainingOutput(ModelOutput):
    """Output of `DAPForPreTraining`.

    Under several processes every loss is scaled such that the mean over the processes is the loss of the global batch.

    Args:
        loss: scalar, float32: the sum of the objective's losses with their weights.
        tr_loss: scalar: translation ranking, eq. L_TR, nats a pair.
        rtl_loss: scalar: representation translation learning, eq. L_RTL, nats a token.
        tlm_loss: scalar: translation language modelling, eq. L_TLM, nats a masked token.
        mlm_loss: scalar: masked language modelling of each side by itself, nats a masked token.
        source_embeds: (B, D) sentence embeddings, neither projected nor normalised; with `"mlm"` of the masked text.
        target_embeds: (B, D) likewise.
        accuracy: scalar: share of the pairs whose own target ranks first.
        negatives: scalar: mean number of negatives a pair had, duplicates not counted.
        ignored_tokens: scalar: tokens to reconstruct whose ids are not in the target vocabulary, on this process.
    """

    loss: Tensor | None = None
    tr_loss: Tensor | None = None
    rtl_loss: Tensor | None = None
    tlm_loss: Tensor | None = None
    mlm_loss: Tensor | None = None
    source_embeds: Tensor | None = None
    target_embeds: Tensor | None = None
    accuracy: Tensor | None = None
    negatives: Tensor | None = None
    ignored_tokens: Tensor | None = None


class DAPForPreTraining(DAPPreTrainedModel):
    """Encoder with the objectives of section 3.3: translation ranking, alone or with RTL (= DAP) or TLM; or MLM."""

    accepts_loss_kwargs = False  # the Trainer divides the loss by the accumulation steps itself

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        self.dap = DAPModel(config)
        use_packing(self.dap.encoder)
        predicts = config.objective != "tr"
        if predicts and config.mask_token_id is None:
            raise ValueError(
                f"DAPConfig: mask_token_id=None, but objective {config.objective!r} needs it; "
                "give the tokenizer's mask_token_id."
            )
        width = config.hidden_size
        projected = config.projection and config.uses_tr
        self.projection = nn.Sequential(nn.Linear(width, width), nn.Tanh()) if projected else None
        self.rtl_head = RTLHead(config) if config.uses_rtl else None
        self.prediction_head = PredictionHead(config) if predicts else None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PredictionHead):
            init.zeros_(module.bias)
            if module.has_target_vocabulary:
                init.copy_(module.token_ids, torch.arange(len(module.token_ids)))

    def get_input_embeddings(self) -> nn.Module:
        return self.dap.get_input_embeddings()

    @classmethod
    def from_encoder(
        cls,
        name_or_path: str,
        target_token_ids: list[int] | None = None,
        token_counts: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        **config: Any,
    ) -> "DAPForPreTraining":
        """Start pre-training from an encoder: a plain checkpoint, or one of this class made with objective `"mlm"`.

        The RTL head starts as the encoder's last K layers, and the prediction head as its masked-LM head where the
        checkpoint has one (else from random weights, with a warning).

        Args:
            name_or_path: folder or Hub id of an encoder (BERT, RoBERTa, XLM-R, DeBERTa-v2, ModernBERT, ...).
            target_token_ids: token ids that RTL predicts; the whole vocabulary when absent.
            token_counts: (V,) how often each id is to be predicted. A prediction head that starts from random weights
                then has the log of their shares as its bias, not zeros.
            config: fields of `DAPConfig`. When not given, `mask_token_id` is read from the checkpoint's tokenizer, and
                the pooling of an `"mlm"` checkpoint stays.

        Raises:
            ValueError: a decoder or encoder-decoder, a checkpoint without the encoder's weights, a tokenizer without
                mask token, a field that `DAPConfig` refuses, or ids or counts that the objective has no use for.
        """
        source = {"trust_remote_code": trust_remote_code, "revision": revision}
        encoder_config, kind = AutoConfig.from_pretrained(name_or_path, **source), AutoModelForMaskedLM
        if encoder_config.model_type == DAPConfig.model_type and encoder_config.objective == "mlm":
            saved, encoder_config, kind = encoder_config, encoder_config.encoder_config, cls
            config = {"pooling": saved.pooling, "mask_token_id": saved.mask_token_id} | config
        require_encoder(encoder_config, name_or_path)
        if target_token_ids is not None:
            config["target_vocab_size"] = len(set(target_token_ids))
        dap_config = DAPConfig(encoder_config, **config)
        check_predicted(dap_config, target_token_ids, token_counts)
        if dap_config.objective != "tr" and dap_config.mask_token_id is None:
            dap_config.mask_token_id = find_mask_token_id(name_or_path, **source)
        options = {"dtype": dtype, "attn_implementation": attn_implementation, **source}
        pretrained, missing = load_masked_lm(name_or_path, kind, **options)
        found = attn_implementation if kind is cls else pretrained.config._attn_implementation
        encoder_config._attn_implementation = found
        with encoder_named(name_or_path, dap_config):
            model = cls._new(dap_config, dtype, target_token_ids)
            model._copy_weights(pretrained, missing, name_or_path, token_counts)
            model._try_out()
        return model

    @classmethod
    def from_scratch(
        cls,
        encoder_config: PreTrainedConfig,
        target_token_ids: list[int] | None = None,
        token_counts: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
        **config: Any,
    ) -> "DAPForPreTraining":
        """Start pre-training from random weights; arguments and errors as in `from_encoder`."""
        name = encoder_config.name_or_path or "encoder_config"
        require_encoder(encoder_config, name)
        encoder_config = copy.deepcopy(encoder_config)
        encoder_config.dtype, attention = dtype, attn_implementation or encoder_config._attn_implementation
        if target_token_ids is not None:
            config["target_vocab_size"] = len(set(target_token_ids))
        dap_config = DAPConfig(encoder_config, **config)
        check_predicted(dap_config, target_token_ids, token_counts)
        dap_config.encoder_config._attn_implementation = attention
        with encoder_named(name, dap_config):
            model = cls._new(dap_config, dtype, target_token_ids)
            if token_counts is not None:
                model.prediction_head.start_bias(token_counts)
            model._try_out()
        return model

    @classmethod
    def _new(cls, config: DAPConfig, dtype: torch.dtype, target_token_ids: list[int] | None) -> "DAPForPreTraining":
        """A model with random weights, and the ids that RTL predicts where they are not all."""
        model = cls(config).to(dtype)
        if target_token_ids is not None:
            model.set_target_vocabulary(target_token_ids)
        return model

    def _copy_weights(
        self, pretrained: PreTrainedModel, missing: set[str], name: str, token_counts: Tensor | None
    ) -> None:
        encoder = pretrained.dap.encoder if isinstance(pretrained, DAPForPreTraining) else pretrained.base_model
        weights = encoder.state_dict()  # some masked-LM models keep a pooler
        self.dap.encoder.load_state_dict({name: weights[name] for name in weights if not name.startswith("pooler.")})
        if self.rtl_head is not None:
            self.rtl_head.copy_last_layers(encoder)
        if self.prediction_head is None:
            return
        if missing or not self.prediction_head.copy_masked_lm_head(pretrained):
            lacking = f"{name} has no masked-LM head to take, or none that ends in its word embeddings"
            logger.warning(f"{lacking}: the prediction head starts from random weights.")
            if token_counts is not None:
                self.prediction_head.start_bias(token_counts)
        elif token_counts is not None:
            logger.warning(f"{name} has a masked-LM head: its bias is taken, not one from token frequencies.")

    @torch.no_grad()
    def _try_out(self) -> None:
        """Take two pairs of uneven lengths through encoder and heads, but through no other process."""
        ids = torch.arange(16).view(2, 8) % self.config.vocab_size  # (2, 8)
        masks = tuple((torch.arange(8) < torch.tensor(lengths)[:, None]).long() for lengths in ([5, 7], [6, 8]))
        with torch.random.fork_rng(devices=[]):
            words = self._look_up((ids, ids))
            source, target = self._encode((ids, ids), masks, (None, None), words)
            for hidden, labels in self._predictions(source, target, words, torch.zeros(2, dtype=torch.long), 0):
                self.prediction_head.loss_sum(hidden, labels, words.predicted)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in Transformers; the prediction head's bias grows with the vocabulary, a target vocabulary stays."""
        table = super().resize_token_embeddings(*args, **kwargs)
        if self.prediction_head is not None:
            self.prediction_head.resize(len(table.weight))
        return table

    def set_target_vocabulary(self, token_ids: list[int]) -> None:
        """Set the token ids that RTL predicts; as many as `config.target_vocab_size`."""
        size = self.config.target_vocab_size
        ids = torch.tensor(sorted(set(token_ids)), dtype=torch.long)
        if len(ids) != size or ids[0] < 0 or ids[-1] >= self.config.vocab_size:
            allowed = f"{size} different ids from 0 to {self.config.vocab_size - 1} (target_vocab_size={size})"
            raise ValueError(f"target vocabulary of {len(ids)} ids from {ids[0]} to {ids[-1]}: give {allowed}.")
        self.prediction_head.token_ids.copy_(ids)

    def forward(
        self,
        source_input_ids: Tensor,
        source_attention_mask: Tensor,
        target_input_ids: Tensor,
        target_attention_mask: Tensor,
        language_ids: Tensor | None = None,
        source_noise: Tensor | None = None,
        target_noise: Tensor | None = None,
        chunk: Chunk | None = None,
    ) -> DAPForPreTrainingOutput:
        """Losses of B translation pairs.

        Args:
            source_input_ids: (B, S_x) token ids of the sources, CLS first, padded on the right.
            source_attention_mask: (B, S_x), 1 for real tokens.
            target_input_ids: (B, S_y) token ids of the translations.
            target_attention_mask: (B, S_y).
            language_ids: (B,) indices into `config.rtl_languages`, wherever a source is reconstructed.
            source_noise, target_noise: (B, S_x) and (B, S_y), as `draw_noise` gives them; drawn when absent.
            chunk: these pairs are some of a larger batch; `loss` is then their share, which has its gradients.
        """
        first = first_row(len(source_input_ids)) if chunk is None else chunk.first
        noise = (source_noise, target_noise) if chunk is None else chunk.noise
        only_embeds = chunk is not None and chunk.gradients is None
        ids, masks = (source_input_ids, target_input_ids), (source_attention_mask, target_attention_mask)
        shown, noise = self._mask(ids, masks, noise)
        words = self._look_up(shown, only_embeds)
        source, target = self._encode(ids, masks, noise, words)
        compared = self._compared(source), self._compared(target)  # (B, D) each
        if only_embeds:
            return DAPForPreTrainingOutput(source_embeds=compared[0], target_embeds=compared[1])
        out = DAPForPreTrainingOutput(source_embeds=source.embeds, target_embeds=target.embeds)
        if chunk is not None:
            out.loss = sum((embeds * gradient).sum() for embeds, gradient in zip(compared, chunk.gradients))
        elif self.config.uses_tr:
            ranking = self._translation_ranking(*compared, text_hash(target.ids, target.mask))
            out.loss = out.tr_loss = ranking.loss
            out.accuracy, out.negatives = ranking.accuracy, ranking.negatives
        predictions = self._predictions(source, target, words, language_ids, first)
        everywhere = None if chunk is None else chunk.labels
        if self.config.uses_rtl:
            out.rtl_loss, out.ignored_tokens = self._predict(predictions, words, everywhere)
            out.loss = out.loss + self.config.rtl_weight * out.rtl_loss
        if self.config.uses_tlm:
            out.tlm_loss, _ = self._predict(predictions, words, everywhere)
            out.loss = out.loss + self.config.tlm_weight * out.tlm_loss
        if self.config.uses_mlm:
            out.loss = out.mlm_loss = self._predict(predictions, words, everywhere)[0]
        return out

    def _look_up(self, ids: tuple[Tensor, Tensor], only_texts: bool = False) -> Words:
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

    def _encode(
        self,
        ids: tuple[Tensor, Tensor],
        masks: tuple[Tensor, Tensor],
        noise: tuple[Tensor | None, Tensor | None],
        words: Words,
    ) -> tuple[Side, Side]:
        """Source and target by one pass of the encoder, whose input are the words: of other ids where MLM masks."""
        length = max(mask.shape[1] for mask in masks)
        mask = torch.cat([F.pad(mask, (0, length - mask.shape[1])) for mask in masks])  # (2·B, S)
        if not torch.compiler.is_compiling() and not bool((mask[:, :-1] >= mask[:, 1:]).all()):
            raise ValueError("an attention mask has padding before a real token: pad on the right.")
        embedded = (words.source, words.target)
        rows = torch.cat([F.pad(rows, (0, 0, 0, length - rows.shape[1])) for rows in embedded])  # (2·B, S, E)
        states = last_states(self.dap.encoder, mask, inputs_embeds=rows).chunk(2)  # (B, S, D) each
        sides = []
        for side_ids, side_mask, side_states, side_noise in zip(ids, masks, states, noise):
            side_states = side_states[:, : side_mask.shape[1]]  # (B, S_x) or (B, S_y)
            embeds = pool(side_states, side_mask, self.config.pooling)
            side_noise = self.draw_noise(side_ids) if side_noise is None else side_noise
            sides.append(Side(side_ids, side_mask, side_states, embeds, side_noise))
        return sides[0], sides[1]

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
    def count_labels(
        self, ids: tuple[Tensor, ...], masks: tuple[Tensor, ...], noise: tuple[Tensor | None, ...], first: int
    ) -> Tensor:
        """Labels of these pairs, whose first is row `first` of the batch: (1,), or (2,) with two directions.

        Each argument is of the source and of the target: (B, S_x) and (B, S_y).
        """
        if self.config.uses_tlm or self.config.uses_mlm:
            share = self.config.mlm_probability if self.config.uses_mlm else self.config.tlm_probability
            masked = [(maskable(a) & (b < share)).sum() for a, b in zip(masks, noise)]
            return sum(masked).view(1)
        source, target = (self._count_to_reconstruct(*side) for side in zip(ids, masks, noise))  # (B,) each
        if self.config.rtl_direction == "both":
            odd = odd_rows(len(source), source.device, first)
            return torch.stack([target[~odd].sum(), source[odd].sum()])
        return (target if self.config.rtl_direction == "source-to-target" else source).sum().view(1)

    def _count_to_reconstruct(self, ids: Tensor, mask: Tensor, noise: Tensor | None) -> Tensor:
        """Labels (B,) of one side where RTL reconstructs it."""
        chosen = self._chosen(mask, noise)  # (B, Q)
        if self.prediction_head.has_target_vocabulary:
            chosen = chosen & torch.isin(ids[:, 1:], self.prediction_head.token_ids)
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
        chosen = self._chosen(answer.mask, answer.noise)  # (B, Q): CLS takes no part on either side
        queries = self._embed_queries(answer.ids, words.mask)[:, 1:]  # (B, Q, D)
        if self.config.rtl_ratio < 1:  # the other tokens show their representations (section 5.2)
            queries = torch.where(chosen.unsqueeze(-1), queries, answer.states[:, 1:])
        states = self.rtl_head(context.states[:, 1:], context.mask[:, 1:], queries, answer.mask[:, 1:], languages)
        return states, answer.ids[:, 1:], chosen

    def _chosen(self, mask: Tensor, noise: Tensor | None) -> Tensor:
        """Which tokens after CLS are to be reconstructed, (B, S-1) bool."""
        real = mask.bool()
        return (real if noise is None else real & (noise < self.config.rtl_ratio))[:, 1:]

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

    def _mask(
        self, ids: tuple[Tensor, Tensor], masks: tuple[Tensor, Tensor], noise: tuple[Tensor | None, Tensor | None]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]:
        """What MLM shows the encoder in place of both sides' token ids (B, S), and the noise that decided it."""
        config = self.config
        if not config.uses_mlm:
            return ids, noise
        noise = tuple(self.draw_noise(own) if drawn is None else drawn for own, drawn in zip(ids, noise))
        allowed = (drawn.masked_fill(~maskable(mask), 1.0) for drawn, mask in zip(noise, masks))
        options = config.mlm_probability, config.mask_token_id, config.vocab_size
        return tuple(mask_tokens(own, drawn, *options) for own, drawn in zip(ids, allowed)), noise

    def _masked_language_modelling(self, source: Side, target: Side) -> tuple[Tensor, Tensor]:
        """States (T, D) and labels (T,) of the tokens of both sides that `_mask` chose."""
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


# ------------------------------------------------------------------------------------------- classification


class DAPForSequenceClassification(DAPPreTrainedModel):
    """Encoder with dense + tanh and a classifier on its sentence embedding, for XNLI (section 4.6)."""

    _keys_to_ignore_on_load_unexpected = [r"^rtl_head\.", r"^prediction_head\.", r"^projection\."]
    accepts_loss_kwargs = False  # the Trainer divides the loss by the accumulation steps itself

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.dap = DAPModel(config)
        rate = getattr(config.encoder_config, "classifier_dropout", None)
        rate = getattr(config.encoder_config, "hidden_dropout_prob", 0.0) if rate is None else rate
        dense = nn.Linear(config.hidden_size, config.hidden_size)
        output = nn.Linear(config.hidden_size, config.num_labels)
        self.classifier = nn.Sequential(nn.Dropout(rate), dense, nn.Tanh(), nn.Dropout(rate), output)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutput:
        """Classify sentences or sentence pairs.

        Args:
            input_ids: (B, S) token ids.
            attention_mask: (B, S).
            labels: (B,) class indices, or (B, num_labels) for regression and multi-label problems.
            token_type_ids, position_ids, inputs_embeds: as in `DAPModel`; named here so that `Trainer` keeps them.

        Returns:
            `logits` (B, num_labels) and, with labels, `loss`.
        """
        return_dict = kwargs.pop("return_dict", None)
        kwargs |= {"token_type_ids": token_type_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        out = self.dap(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
        logits = self.classifier(out.pooler_output)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        result = SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions
        )
        return result if return_dict is not False else result.to_tuple()


AutoModel.register(DAPConfig, DAPModel, exist_ok=True)
AutoModelForPreTraining.register(DAPConfig, DAPForPreTraining, exist_ok=True)
AutoModelForSequenceClassification.register(DAPConfig, DAPForSequenceClassification, exist_ok=True)
for _model, _auto in (
    (DAPModel, "AutoModel"),
    (DAPForPreTraining, "AutoModelForPreTraining"),
    (DAPForSequenceClassification, "AutoModelForSequenceClassification"),
):
    _model.register_for_auto_class(_auto)
DAPConfig.register_for_auto_class()
