"""Dual-alignment pre-training (DAP, ACL 2023): a sentence encoder and the heads that only training needs.

It ships with a checkpoint as it is, beside the files it imports. Shapes in the comments: `B` pairs of one process, `W`
processes, `S` tokens (`S_x` of the source, `S_y` of the target), `D` hidden size, `T` tokens with a label, `Q` query
tokens. Every sequence starts with its CLS token, ends with a separator, and is padded on the right.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutputWithPooling, ModelOutput, SequenceClassifierOutput
from transformers.utils import logging

try:
    from .configuration_dap import DAPConfig
    from .encoder_dap import build_encoder, last_states, position_offset, require_encoder
    from .heads_dap import PredictionHead, RTLHead
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
        world_size,
    )
except ImportError:  # a checkout or an installed wheel, where these files are top-level modules
    from configuration_dap import DAPConfig
    from encoder_dap import build_encoder, last_states, position_offset, require_encoder
    from heads_dap import PredictionHead, RTLHead
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
        world_size,
    )

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
        source_embeds: (B, D) sentence embeddings, neither projected nor normalised.
        target_embeds: (B, D) likewise.
        accuracy: scalar: share of the pairs whose own target ranks first.
        negatives: scalar: mean number of negatives a pair had, duplicates not counted.
        ignored_tokens: scalar: tokens to reconstruct whose ids are not in the target vocabulary, on this process.
    """

    loss: Tensor | None = None
    tr_loss: Tensor | None = None
    rtl_loss: Tensor | None = None
    tlm_loss: Tensor | None = None
    source_embeds: Tensor | None = None
    target_embeds: Tensor | None = None
    accuracy: Tensor | None = None
    negatives: Tensor | None = None
    ignored_tokens: Tensor | None = None


class Side(NamedTuple):
    """One side of the pairs: token ids (B, S), mask (B, S), states (B, S, D), embeddings (B, D), noise (B, S)."""

    ids: Tensor
    mask: Tensor
    states: Tensor
    embeds: Tensor
    noise: Tensor | None


class DAPForPreTraining(DAPPreTrainedModel):
    """Encoder with the objectives of section 3.3: translation ranking, alone or with RTL (= DAP) or TLM."""

    accepts_loss_kwargs = False  # the Trainer divides the loss by the accumulation steps itself

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        self.dap = DAPModel(config)
        predicts = config.uses_rtl or config.uses_tlm
        if predicts and config.mask_token_id is None:
            raise ValueError(
                f"DAPConfig: mask_token_id=None, but objective {config.objective!r} needs it; "
                "give the tokenizer's mask_token_id."
            )
        width = config.hidden_size
        self.projection = nn.Sequential(nn.Linear(width, width), nn.Tanh()) if config.projection else None
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
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        **config: Any,
    ) -> "DAPForPreTraining":
        """Start pre-training from a plain encoder checkpoint.

        The RTL head starts as the encoder's last K layers, and the prediction head as its masked-LM head where the
        checkpoint has one (else from random weights, with a warning).

        Args:
            name_or_path: folder or Hub id of an encoder (BERT, RoBERTa, XLM-R, DeBERTa-v2, ModernBERT, ...).
            target_token_ids: token ids that RTL predicts; the whole vocabulary when absent.
            config: fields of `DAPConfig`. `mask_token_id` is read from the checkpoint's tokenizer when not given.

        Raises:
            ValueError: a decoder or encoder-decoder, a checkpoint without the encoder's weights, a tokenizer without
                mask token, or a field that `DAPConfig` refuses.
        """
        source = {"trust_remote_code": trust_remote_code, "revision": revision}
        encoder_config = AutoConfig.from_pretrained(name_or_path, **source)
        require_encoder(encoder_config, name_or_path)
        if target_token_ids is not None:
            target_token_ids = sorted(set(target_token_ids))
            config["target_vocab_size"] = len(target_token_ids)
        dap_config = DAPConfig(encoder_config, **config)
        if dap_config.objective != "tr" and dap_config.mask_token_id is None:
            dap_config.mask_token_id = find_mask_token_id(name_or_path, **source)
        options = {"dtype": dtype, "attn_implementation": attn_implementation, **source}
        pretrained, missing = load_masked_lm(name_or_path, **options)
        encoder_config._attn_implementation = pretrained.config._attn_implementation
        lost = sorted(key for key in missing if key.startswith(pretrained.base_model_prefix + "."))
        if lost:
            raise ValueError(
                f"{name_or_path} lacks {len(lost)} weights of its encoder, the first is {lost[0]!r}: not usable."
            )
        with encoder_named(name_or_path, dap_config):
            model = cls(dap_config).to(dtype)
            if target_token_ids is not None:
                model.set_target_vocabulary(target_token_ids)
            model._copy_weights(pretrained, missing, name_or_path)
            model._try_out()
        return model

    def _copy_weights(self, pretrained: PreTrainedModel, missing: set[str], name: str) -> None:
        self.dap.encoder.load_state_dict(pretrained.base_model.state_dict())
        if self.rtl_head is not None:
            self.rtl_head.copy_last_layers(pretrained.base_model)
        if self.prediction_head is None:
            return
        if missing or not self.prediction_head.copy_masked_lm_head(pretrained):
            logger.warning(f"{name} has no masked-LM head to take: the prediction head starts from random weights.")

    @torch.no_grad()
    def _try_out(self) -> None:
        """Take two pairs of uneven lengths through encoder and heads, but through no other process."""
        ids = torch.arange(16).view(2, 8) % self.config.vocab_size  # (2, 8)
        masks = [(torch.arange(8) < torch.tensor(lengths)[:, None]).long() for lengths in ([5, 7], [6, 8])]
        with torch.random.fork_rng(devices=[]):
            source, target = (self._encode(ids, mask, None) for mask in masks)
            for hidden, labels in self._predictions(source, target, torch.zeros(2, dtype=torch.long)):
                self.prediction_head.loss_sum(hidden, labels, self.get_input_embeddings().weight)

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
    ) -> DAPForPreTrainingOutput:
        """Losses of B translation pairs.

        Args:
            source_input_ids: (B, S_x) token ids of the sources, CLS first, padded on the right.
            source_attention_mask: (B, S_x), 1 for real tokens.
            target_input_ids: (B, S_y) token ids of the translations.
            target_attention_mask: (B, S_y).
            language_ids: (B,) indices into `config.rtl_languages`, wherever a source is reconstructed.
            source_noise: (B, S_x) float64, uniform in [0, 1): decides which tokens TLM masks (and RTL, if rho < 1);
                drawn when absent.
            target_noise: (B, S_y) likewise.
        """
        source = self._encode(source_input_ids, source_attention_mask, source_noise)
        target = self._encode(target_input_ids, target_attention_mask, target_noise)
        ranking = self._translation_ranking(source, target)
        out = DAPForPreTrainingOutput(loss=ranking.loss, tr_loss=ranking.loss)
        predictions = self._predictions(source, target, language_ids)
        if self.config.uses_rtl:
            out.rtl_loss, out.ignored_tokens = self._predict(predictions)
            out.loss = out.loss + self.config.rtl_weight * out.rtl_loss
        if self.config.uses_tlm:
            out.tlm_loss, _ = self._predict(predictions)
            out.loss = out.loss + self.config.tlm_weight * out.tlm_loss
        out.source_embeds, out.target_embeds = source.embeds, target.embeds
        out.accuracy, out.negatives = ranking.accuracy, ranking.negatives
        return out

    def _encode(self, ids: Tensor, mask: Tensor, noise: Tensor | None) -> Side:
        if not torch.compiler.is_compiling() and not bool((mask[:, :-1] >= mask[:, 1:]).all()):
            raise ValueError("an attention mask has padding before a real token: pad on the right.")
        states = last_states(self.dap.encoder, mask, input_ids=ids)
        masks_some = self.config.uses_tlm or (self.config.uses_rtl and self.config.rtl_ratio < 1)
        if noise is None and masks_some:
            noise = torch.rand(ids.shape, dtype=torch.float64, device=ids.device)
        return Side(ids, mask, states, pool(states, mask, self.config.pooling), noise)

    def _translation_ranking(self, source: Side, target: Side) -> RankingResult:
        config = self.config
        queries, answers = source.embeds, target.embeds  # (B, D)
        if self.projection is not None:
            queries, answers = self.projection(queries), self.projection(answers)
        first = first_row(len(queries))
        excluded = None
        if config.tr_mask_duplicates:
            own = text_hash(target.ids, target.mask)  # (B,)
            excluded = own[:, None] == gather_rows(own)[None, :]  # (B, W·B): the same target text
        options = (config.tr_similarity, config.tr_temperature, config.tr_margin, first, excluded)
        forward = translation_ranking_loss(queries, gather_rows(answers), *options)
        if not config.tr_bidirectional:
            return forward
        backward = translation_ranking_loss(answers, gather_rows(queries), *options)
        return RankingResult(*((a + b) / 2 for a, b in zip(forward, backward)))

    def _predictions(self, source: Side, target: Side, language_ids: Tensor | None) -> list[tuple[Tensor, Tensor]]:
        """What the prediction head is given: states (T, D) and labels (T,), for "both" of each direction apart."""
        if self.config.uses_tlm:
            return [self._translation_language_modelling(source, target)]
        if not self.config.uses_rtl:
            return []
        states, labels, chosen = self._representation_translation(source, target, language_ids)
        return [(states[part], labels[part]) for part in self._directions(chosen)]

    def _representation_translation(
        self, source: Side, target: Side, language_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """g of eq. L_RTL: states (B, Q, D), labels (B, Q), and which of them are to be reconstructed (B, Q)."""
        context, answer, languages = self._directed(source, target, language_ids)
        real = answer.mask.bool()
        chosen = real if answer.noise is None else real & (answer.noise < self.config.rtl_ratio)  # (B, S)
        chosen = chosen[:, 1:]  # (B, Q): CLS takes no part on either side
        queries = self._embed_queries(answer.ids)[:, 1:]  # (B, Q, D)
        if self.config.rtl_ratio < 1:  # the other tokens show their representations (section 5.2)
            queries = torch.where(chosen.unsqueeze(-1), queries, answer.states[:, 1:])
        states = self.rtl_head(context.states[:, 1:], context.mask[:, 1:], queries, answer.mask[:, 1:], languages)
        return states, answer.ids[:, 1:], chosen

    def _directions(self, chosen: Tensor) -> list[Tensor]:
        """The chosen tokens (B, Q) of each direction apart, whose means are averaged (Table 5)."""
        if self.config.rtl_direction != "both":
            return [chosen]
        odd = odd_rows(len(chosen), chosen.device).unsqueeze(-1)  # (B, 1)
        return [chosen & ~odd, chosen & odd]

    def _directed(self, source: Side, target: Side, language_ids: Tensor | None) -> tuple[Side, Side, Tensor | None]:
        """Context, the side to reconstruct, and their language embedding rows (B, 2), by `rtl_direction`."""
        direction = self.config.rtl_direction
        if direction == "source-to-target":
            return source, target, None
        if language_ids is None:
            raise ValueError(f"language_ids=None, but rtl_direction {direction!r} needs each pair's source language.")
        languages = torch.stack([language_ids + 1, torch.zeros_like(language_ids)], 1)  # (B, 2): source, target
        if direction == "target-to-source":
            return target, source, languages.flip(1)
        odd = odd_rows(len(language_ids), language_ids.device)  # (B,)
        source, target = pad_to_same_length(source, target)
        context, answer = swap_rows(source, target, odd), swap_rows(target, source, odd)
        return context, answer, torch.where(odd[:, None], languages.flip(1), languages)

    def _embed_queries(self, ids: Tensor) -> Tensor:
        """[MASK] embeddings (B, Q, D) with the positions of the tokens (B, Q)."""
        masked = torch.full_like(ids, self.config.mask_token_id)
        return self.dap.encoder.embeddings(input_ids=masked, **self._positions(ids))

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

    def _predict(self, predictions: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Mean cross entropy over the labels of all processes, and how many of this process have no prediction.

        The loss is a share that averages to the mean over processes. Where there are two directions, it is the average
        of their means (Table 5); one without labels does not count.
        """
        words = self.get_input_embeddings().weight  # (V, E)
        sums, counts = zip(*(self.prediction_head.loss_sum(*given, words) for given in predictions))
        everywhere = sum_over_processes(torch.stack(counts))  # (directions,)
        means = torch.stack(sums) * world_size() / everywhere.clamp(min=1)  # (directions,)
        labels = sum(len(given[1]) for given in predictions)
        return means.sum() / (everywhere > 0).sum().clamp(min=1), labels - torch.stack(counts).sum()


def pad_to_same_length(source: Side, target: Side) -> tuple[Side, Side]:
    """Both sides with as many columns as the longer one has; what is added is padding."""
    length = max(source.ids.shape[1], target.ids.shape[1])

    def padded(side: Side) -> Side:
        missing = length - side.ids.shape[1]
        noise = None if side.noise is None else F.pad(side.noise, (0, missing), value=1.0)
        states = F.pad(side.states, (0, 0, 0, missing))
        return Side(F.pad(side.ids, (0, missing)), F.pad(side.mask, (0, missing)), states, side.embeds, noise)

    return padded(source), padded(target)


def odd_rows(count: int, device: torch.device) -> Tensor:
    """(B,) bool: whether a row's number in the gathered batch is odd."""
    return (torch.arange(count, device=device) + first_row(count)) % 2 == 1


def swap_rows(side: Side, other: Side, swapped: Tensor) -> Side:
    """The side with the rows of the other where `swapped` (B,) is True."""

    def choose(a: Tensor | None, b: Tensor | None) -> Tensor | None:
        return None if a is None else torch.where(swapped.view(-1, *[1] * (a.dim() - 1)), b, a)

    return Side(*(choose(a, b) for a, b in zip(side, other)))


@contextmanager
def encoder_named(name: str, config: DAPConfig) -> Iterator[None]:
    """Errors of an encoder that is built in another way than this file expects become a `ValueError` that names it."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        remedy = "give another encoder" if config.objective == "tr" else "use objective='tr', or another encoder"
        raise ValueError(
            f"{name}: objective {config.objective!r} does not work with an encoder of model_type "
            f"{config.encoder_config.model_type!r} ({reason}): {remedy}."
        ) from error


def load_masked_lm(name_or_path: str, **options: Any) -> tuple[PreTrainedModel, set[str]]:
    """A checkpoint as a masked-LM model, and the names of the weights that it lacks (reported by the caller)."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, report = AutoModelForMaskedLM.from_pretrained(name_or_path, output_loading_info=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    return model, set(report["missing_keys"])


def find_mask_token_id(name_or_path: str, **source: Any) -> int:
    """The mask token's id of a checkpoint's tokenizer.

    Raises:
        ValueError: the tokenizer has no mask token.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **source)
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"the tokenizer of {name_or_path} has no mask token, which RTL and TLM need: "
            "use objective='tr', or give mask_token_id."
        )
    return tokenizer.mask_token_id


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
