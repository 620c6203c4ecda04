"""Dual-alignment pre-training (DAP, ACL 2023): a sentence encoder and the heads that only training needs.

It ships with a checkpoint as it is, beside configuration_dap.py and losses_dap.py. Shapes in the comments: `B` pairs
of one process, `W` processes, `S` tokens (`S_x` of the source, `S_y` of the target), `D` hidden size, `E` width of the
word embeddings, `V` predicted vocabulary, `T` tokens with a label, `K` layers of the RTL head. Every sequence starts
with its CLS token, ends with a separator, and is padded on the right.
"""

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_outputs import BaseModelOutputWithPooling, ModelOutput, SequenceClassifierOutput
from transformers.utils import logging

try:
    from .configuration_dap import DAPConfig
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
        vocabulary_cross_entropy,
        world_size,
    )
except ImportError:  # a checkout or an installed wheel, where these files are top-level modules
    from configuration_dap import DAPConfig
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
        vocabulary_cross_entropy,
        world_size,
    )

logger = logging.get_logger(__name__)

TOKENS_PER_GROUP = 128  # on CPU, rows of like length run together once they have this many tokens


# ------------------------------------------------------------------------------------------- the encoder


def require_encoder(config: PreTrainedConfig, name: str) -> None:
    """Raise `ValueError` unless the configuration is that of a bidirectional encoder with a masked-LM class."""
    remedy = "Give an encoder such as bert, xlm-roberta, roberta, deberta-v2 or modernbert."
    if config.model_type == "dap":
        raise ValueError(f"{name} is a DAP checkpoint already: load it with DAPForPreTraining.from_pretrained.")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder (model_type {config.model_type!r}). {remedy}")
    if type(config).__module__.startswith("transformers_modules."):
        raise ValueError(
            f"{name} (model_type {config.model_type!r}) runs code of its own; a DAP checkpoint nests only encoders "
            f"that are part of Transformers. {remedy}"
        )
    if getattr(config, "is_decoder", False) or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(f"{name} is not a bidirectional encoder (model_type {config.model_type!r}). {remedy}")


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """The encoder of a configuration with random weights, and without a pooler, whose weights nothing would train."""
    accepted = inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in accepted else {}
    return AutoModel.from_config(config, **options)


def layer_stack(encoder: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of an encoder's transformer blocks."""
    for name, module in encoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == encoder.config.num_hidden_layers:
            return name, module
    raise ValueError(f"no list of {encoder.config.num_hidden_layers} layers in {type(encoder).__name__}")


def length_groups(lengths: list[int], tokens: int) -> list[list[int]]:
    """Row numbers, shortest rows first, in groups that end where the length changes once they have enough tokens.

    >>> length_groups([9, 2, 2, 9, 3], tokens=4)
    [[1, 2], [4, 0, 3]]
    """
    groups: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        current = groups[-1]
        if current and lengths[row] > lengths[current[-1]] and sum(lengths[i] for i in current) >= tokens:
            groups.append([])
        groups[-1].append(row)
    return groups


def last_states(encoder: PreTrainedModel, mask: Tensor, **inputs: Tensor) -> Tensor:
    """Last hidden states (B, S, D) of rows padded on the right, given their mask (B, S) and inputs (B, S, ...).

    On CPU rows of like length run together, so that next to no padding is computed; the states of padding are zeros.
    """
    if mask.device.type != "cpu" or torch.compiler.is_compiling():
        return encoder(attention_mask=mask, **inputs).last_hidden_state
    lengths = mask.sum(1).tolist()
    groups = length_groups(lengths, TOKENS_PER_GROUP)
    parts = []
    for rows in groups:
        width = lengths[rows[-1]]
        part = {key: value[rows, :width] for key, value in inputs.items()}
        states = encoder(attention_mask=mask[rows, :width], **part).last_hidden_state  # (rows, width, D)
        parts.append(F.pad(states, (0, 0, 0, mask.shape[1] - width)))
    order = torch.tensor([row for rows in groups for row in rows])
    return torch.cat(parts)[order.argsort()]


def position_offset(encoder: PreTrainedModel) -> int | None:
    """Position id of the first token, or None where the encoder has no absolute position embeddings."""
    table = getattr(encoder.embeddings, "position_embeddings", None)
    if table is None:
        return None
    return 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa and XLM-R start after the padding id


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


# ------------------------------------------------------------------------------------------- heads


class _PassThrough(nn.Module):
    """Stands where an encoder has its embeddings, for input that is embedded already."""

    word_embeddings = tok_embeddings = None  # what encoders return from get_input_embeddings

    def forward(self, input_ids: None = None, inputs_embeds: Tensor | None = None, *_: Any, **others: Any) -> Tensor:
        return inputs_embeds


class RTLHead(nn.Module):
    """g of section 3.2: K transformer blocks of the encoder's own class over (source states, [MASK] embeddings)."""

    def __init__(self, config: DAPConfig) -> None:
        super().__init__()
        self.blocks = self._build_blocks(config)
        names = config.rtl_languages if config.rtl_direction != "source-to-target" else None
        # row 0 is the target language, row i + 1 is rtl_languages[i]
        self.language_embeddings = None if names is None else nn.Embedding(len(names) + 1, config.hidden_size)

    @staticmethod
    def _build_blocks(config: DAPConfig) -> PreTrainedModel:
        own = copy.deepcopy(config.encoder_config)
        own.vocab_size = (getattr(own, "pad_token_id", None) or 0) + 1  # word embeddings are about to go
        if own.model_type == "deberta-v2":
            own.conv_kernel_size = 0  # its convolution comes after the first layer only
        blocks = build_encoder(own)
        _, layers = layer_stack(blocks)
        del layers[: len(layers) - config.rtl_layers]
        blocks.config.num_hidden_layers = config.rtl_layers
        if not hasattr(blocks, "embeddings"):
            raise ValueError(f"the RTL head needs an encoder with `.embeddings`; {type(blocks).__name__} has none.")
        blocks.embeddings = _PassThrough()
        return blocks

    @torch.no_grad()
    def copy_last_layers(self, encoder: PreTrainedModel) -> None:
        """Start from the encoder's last K layers and whatever else stands outside its embeddings (section 4.2)."""
        prefix, layers = layer_stack(encoder)
        dropped = len(layers) - self.blocks.config.num_hidden_layers
        state = {}
        for key, value in encoder.state_dict().items():
            if key.startswith(prefix + "."):
                index, rest = key[len(prefix) + 1 :].split(".", 1)
                key = f"{prefix}.{int(index) - dropped}.{rest}"
            state[key] = value
        wanted = self.blocks.state_dict()
        self.blocks.load_state_dict({key: value for key, value in state.items() if key in wanted}, strict=True)

    def forward(
        self, context: Tensor, context_mask: Tensor, queries: Tensor, query_mask: Tensor, languages: Tensor | None
    ) -> Tensor:
        """States (B, Q, D) of the queries (B, Q, D), which see the context (B, C, D) and each other.

        Each pair's real tokens stand next to each other, as relative positions would otherwise count the padding.
        `languages` (B, 2) are the embedding rows of the context's and the queries' language.
        """
        if self.language_embeddings is not None:
            vectors = self.language_embeddings(languages)  # (B, 2, D)
            context, queries = context + vectors[:, :1], queries + vectors[:, 1:]
        states = torch.cat([context, queries], 1)  # (B, C+Q, D), eq. g^0
        mask = torch.cat([context_mask, query_mask], 1)  # (B, C+Q)
        order = real_tokens_first(mask)
        states = gather_columns(states, order)
        out = last_states(self.blocks, gather_columns(mask, order), inputs_embeds=states)
        return gather_columns(out, order.argsort(1))[:, context.shape[1] :]


class PredictionHead(nn.Module):
    """Vocabulary prediction head: dense, activation, norm, then the encoder's word embeddings as W of section 3.2."""

    def __init__(self, config: DAPConfig) -> None:
        super().__init__()
        encoder = config.encoder_config
        width = getattr(encoder, "embedding_size", None) or encoder.hidden_size
        bias = getattr(encoder, "classifier_bias", True)  # ModernBERT's head has none
        eps = getattr(encoder, "layer_norm_eps", None) or getattr(encoder, "norm_eps", 1e-12)
        self.dense = nn.Linear(encoder.hidden_size, width, bias=bias)
        self.norm = nn.LayerNorm(width, eps=eps, bias=getattr(encoder, "norm_bias", True))
        activation = getattr(encoder, "classifier_activation", None) or getattr(encoder, "hidden_act", "gelu")
        self.activation = ACT2FN[activation] if isinstance(activation, str) else activation
        size = config.target_vocab_size if config.uses_rtl else None
        self.bias = nn.Parameter(torch.zeros(size or config.vocab_size))  # (V,)
        if size is not None:  # sorted token ids of the target side
            self.register_buffer("token_ids", torch.arange(size))  # (V,)
        self.has_target_vocabulary = size is not None

    @torch.no_grad()
    def resize(self, size: int) -> None:
        """Predict `size` ids, those that are new with bias 0, unless a target vocabulary says which."""
        if not self.has_target_vocabulary:
            kept = self.bias[:size]
            self.bias = nn.Parameter(F.pad(kept, (0, size - len(kept))))

    @torch.no_grad()
    def copy_masked_lm_head(self, model: PreTrainedModel) -> bool:
        """Take over dense, norm and bias of a masked-LM model, whatever it calls them; False where it has no such."""
        body = {id(module) for module in model.base_model.modules()}
        output = model.get_output_embeddings()
        own = [module for module in model.modules() if id(module) not in body and module is not output]
        dense = next((module for module in own if isinstance(module, nn.Linear)), None)
        norm = next((module for module in own if isinstance(module, nn.LayerNorm)), None)
        if dense is None or norm is None or dense.weight.shape != self.dense.weight.shape:
            return False
        self.dense.load_state_dict(dense.state_dict())
        self.norm.load_state_dict(norm.state_dict())
        if output.bias is not None:
            self.bias.copy_(output.bias[self.token_ids] if self.has_target_vocabulary else output.bias)
        return True

    def loss_sum(self, hidden: Tensor, labels: Tensor, word_embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Summed cross entropy and number of the labels (T,) that are in the vocabulary; `hidden` is (T, D)."""
        weight = word_embeddings
        if self.has_target_vocabulary:
            weight = word_embeddings[self.token_ids]  # (V, E)
            rows = torch.searchsorted(self.token_ids, labels).clamp(max=len(self.token_ids) - 1)  # (T,)
            known = self.token_ids[rows] == labels
            hidden, labels = hidden[known], rows[known]
        states = self.norm(self.activation(self.dense(hidden)))  # (T, E)
        count = torch.tensor(float(len(labels)), device=labels.device)  # not in the states' type, which may be coarse
        return vocabulary_cross_entropy(states, weight, self.bias, labels), count


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
