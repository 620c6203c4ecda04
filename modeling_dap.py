"""Dual-alignment pre-training (DAP, ACL 2023): a sentence encoder and the heads that only training needs.

It ships with a checkpoint as it is, beside the files it imports. Shapes in the comments: `B` pairs of one process, `W`
processes, `S` tokens (`S_x` of the source, `S_y` of the target), `D` hidden size, `T` tokens with a label, `Q` query
tokens. Every sequence starts with its CLS token, ends with a separator, and is padded on the right.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
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
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    ModelOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple, logging

try:
    from .configuration_dap import DAPConfig
    from .encoder_dap import (
        absolute_positions,
        build_encoder,
        encoder_named,
        find_mask_token_id,
        last_states,
        load_masked_lm,
        packed_states,
        pool,
        pooled_tokens,
        require_encoder,
        takes_packed,
        use_packing,
    )
    from .heads_dap import OF_TARGETS, PredictionHead, Words
    from .losses_dap import first_row, whole
    from .objectives_dap import (
        Batch,
        Chunk,
        Comparison,
        Objective,
        Side,
        Text,
        objectives_of,
        stacked,
    )
except ImportError:  # a checkout or an installed wheel, where these files are top-level modules
    from configuration_dap import DAPConfig
    from encoder_dap import (
        absolute_positions,
        build_encoder,
        encoder_named,
        find_mask_token_id,
        last_states,
        load_masked_lm,
        packed_states,
        pool,
        pooled_tokens,
        require_encoder,
        takes_packed,
        use_packing,
    )
    from heads_dap import OF_TARGETS, PredictionHead, Words
    from losses_dap import first_row, whole
    from objectives_dap import (
        Batch,
        Chunk,
        Comparison,
        Objective,
        Side,
        Text,
        objectives_of,
        stacked,
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

    def save_pretrained(
        self, save_directory: str | PathLike, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """As in Transformers, of which `push_to_hub` comes here, and of a folder that `save_modules` describes."""
        super().save_pretrained(save_directory, is_main_process, **kwargs)
        if is_main_process:
            save_modules(Path(save_directory), self.config.pooling, self.config.hidden_size)


def save_modules(folder: Path, pooling: str, hidden_size: int, normalize: bool = False) -> None:
    """Write what sentence-transformers makes of an encoder's folder: without it the library averages token states.

    The types have the legacy names that servers know.

    Args:
        pooling: "cls" or "mean".
        hidden_size: D.
        normalize: the library gives vectors of length 1.
    """
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")] + [
        ("2_Normalize", "Normalize")
    ] * normalize
    modules = [
        {
            "idx": number,
            "name": str(number),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for number, (path, kind) in enumerate(kinds)
    ]
    modes = (
        "cls_token",
        "mean_tokens",
        "max_tokens",
        "mean_sqrt_len_tokens",
        "weightedmean_tokens",
        "lasttoken",
    )
    own = {"cls": "cls_token", "mean": "mean_tokens"}[pooling]
    settings = {"word_embedding_dimension": hidden_size}
    settings |= {f"pooling_mode_{mode}": mode == own for mode in modes} | {"include_prompt": True}
    files = {"modules.json": modules, "1_Pooling/config.json": settings}
    files |= (
        {"2_Normalize/config.json": {}} if normalize else {}
    )  # a repository holds no empty folders
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


class DAPModel(DAPPreTrainedModel):
    """The sentence encoder f: token states and, as `pooler_output`, the sentence embedding f_s(x) (section 3.2)."""

    _keys_to_ignore_on_load_unexpected = [r"^(?!dap\.|encoder\.)"]  # heads

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

    @can_return_tuple
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
        for wanted in ("output_hidden_states", "output_attentions"):
            if kwargs.get(wanted) is None:
                kwargs[wanted] = getattr(self.config, wanted)
        given = input_ids if input_ids is not None else inputs_embeds
        if attention_mask is None and given is not None:
            attention_mask = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)
        optional = {"token_type_ids": token_type_ids, "position_ids": position_ids}
        kwargs |= {
            key: value for key, value in optional.items() if value is not None
        }  # not every encoder has them
        out = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        return BaseModelOutputWithPooling(
            last_hidden_state=out.last_hidden_state,
            pooler_output=pool(out.last_hidden_state, attention_mask, self.config.pooling),
            hidden_states=out.hidden_states,
            attentions=out.attentions,
        )


# ------------------------------------------------------------------------------------------- pre-training


@dataclass
class DAPForPreTrainingOutput(ModelOutput):
    """Output of `DAPForPreTraining`.

    What is in `measures` is an attribute, too (`tr_loss`), or None where the model's objectives do not give it. Under
    several processes every loss is scaled such that the mean over the processes is the loss of the global batch.

    Args:
        loss: scalar, float32: the sum of the objectives' losses with their weights.
        source_embeds: (B, D) sentence embeddings, neither projected nor normalised; None where no objective reads the
            pairs as they are, such as MLM alone.
        target_embeds: (B, D) likewise.
        measures: scalars by name.
            `tr_loss`: translation ranking, eq. L_TR, nats a pair.
            `rtl_loss`: representation translation learning, eq. L_RTL, nats a token.
            `tlm_loss`: translation language modelling, eq. L_TLM, nats a masked token.
            `mlm_loss`: masked language modelling of each side by itself, nats a masked token.
            `xum_loss`: cross-unmasking, nats a masked token.
            `bow_loss`: bags of words, nats a token of the target.
            `accuracy`: share of the pairs whose own target ranks first, of the changed copies, too (TR).
            `negatives`: mean number of negatives a pair had, with changed copies, without duplicates (TR).
            `ignored_tokens`: tokens to reconstruct whose ids are not in the target vocabulary, on this process (RTL).
        compared: what each comparison compares, alone in the first pass of GradCache.
        hidden_states: if asked for, of the embeddings and each layer (2·B, S, D): sources, then targets (and then
            changed copies), padded to one length; None where no objective reads the pairs as they are.
        attentions: likewise of each layer, (2·B, heads, S, S).
    """

    loss: Tensor | None = None
    source_embeds: Tensor | None = None
    target_embeds: Tensor | None = None
    measures: dict[str, Tensor] | None = None
    compared: dict[str, tuple[Tensor, ...]] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None

    def __getattr__(self, name: str) -> Tensor | None:
        if name.endswith("_loss") or name in ("accuracy", "negatives", "ignored_tokens"):
            return (self.measures or {}).get(name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


class DAPForPreTraining(DAPPreTrainedModel):
    """Encoder with the heads of its objectives (section 3.3): translation ranking with RTL (= DAP), TLM, XUM, ..."""

    main_input_name = "source_input_ids"
    accepts_loss_kwargs = False  # the Trainer divides the loss by the accumulation steps itself

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        self.dap = DAPModel(config)
        use_packing(self.dap.encoder)
        self.projection = self.rtl_head = self.prediction_head = self.bow_transform = None
        for objective in self.objectives:
            if objective.needs_mask_token and config.mask_token_id is None:
                raise ValueError(
                    f"DAPConfig: mask_token_id=None, but objective {config.objective!r} needs it; "
                    "give the tokenizer's mask_token_id."
                )
            for name, head in objective.heads.items():
                if getattr(self, name, None) is None:
                    setattr(self, name, head(config))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PredictionHead):
            init.zeros_(module.bias)
            if module.token_ids is not None:
                init.copy_(module.token_ids, torch.arange(len(module.token_ids)))

    @property
    def objectives(self) -> list[Objective]:
        """What the model is trained for; they follow `config`."""
        return objectives_of(self.config)

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
        subfolder: str = "",
        **config: Any,
    ) -> "DAPForPreTraining":
        """Start pre-training from an encoder: a plain checkpoint, or one of this class made with objective `"mlm"`.

        The RTL head starts as the encoder's last K layers, and the prediction head as its masked-LM head where the
        checkpoint has one (else from random weights, with a warning).

        Args:
            name_or_path: folder or Hub id of an encoder (BERT, RoBERTa, XLM-R, DeBERTa-v2, ModernBERT, ...).
            target_token_ids: token ids that RTL and BOW predict; the whole vocabulary when absent.
            token_counts: (V,) how often each id is to be predicted. A prediction head that starts from random weights
                then has the log of their shares as its bias, not zeros.
            config: fields of `DAPConfig`. When not given, `mask_token_id` is read from the checkpoint's tokenizer, and
                the pooling of an `"mlm"` checkpoint stays.

        Raises:
            ValueError: a decoder or encoder-decoder, a checkpoint without the encoder's weights, a tokenizer without
                mask token, a field that `DAPConfig` refuses, or ids or counts that the objective has no use for.
        """
        source = {
            "trust_remote_code": trust_remote_code,
            "revision": revision,
            "subfolder": subfolder,
        }
        encoder_config, kind = (
            AutoConfig.from_pretrained(name_or_path, **source),
            AutoModelForMaskedLM,
        )
        if encoder_config.model_type == DAPConfig.model_type and encoder_config.objective == "mlm":
            saved, encoder_config, kind = encoder_config, encoder_config.encoder_config, cls
            config = {"pooling": saved.pooling, "mask_token_id": saved.mask_token_id} | config
        require_encoder(encoder_config, name_or_path)
        dap_config = cls._configure(encoder_config, target_token_ids, token_counts, config)
        if dap_config.mask_token_id is None and any(
            own.needs_mask_token for own in objectives_of(dap_config)
        ):
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
        encoder_config.dtype, attention = (
            dtype,
            attn_implementation or encoder_config._attn_implementation,
        )
        dap_config = cls._configure(encoder_config, target_token_ids, token_counts, config)
        dap_config.encoder_config._attn_implementation = attention
        with encoder_named(name, dap_config):
            model = cls._new(dap_config, dtype, target_token_ids)
            if token_counts is not None:
                model.prediction_head.start_bias(token_counts)
            if model.prediction_head is not None:
                model.prediction_head.start_decoder(model.get_input_embeddings().weight)
            model._try_out()
        return model

    @staticmethod
    def _configure(
        encoder_config: PreTrainedConfig,
        target_token_ids: list[int] | None,
        token_counts: Tensor | None,
        fields: dict[str, Any],
    ) -> DAPConfig:
        """The configuration; raises `ValueError` for ids or counts that its objectives have no use for."""
        if target_token_ids is not None:
            fields = {"target_vocab_size": len(set(target_token_ids)), **fields}
        config = DAPConfig(encoder_config, **fields)
        given = f"objective={config.objective!r}"
        if target_token_ids is not None and not config.objectives & OF_TARGETS:
            raise ValueError(
                f"target_token_ids are what RTL and BOW predict, not {given}: leave them out."
            )
        if token_counts is not None and not any(
            "prediction_head" in own.heads for own in objectives_of(config)
        ):
            raise ValueError(
                f"token_counts are for a prediction head, which {given} has not: leave them out."
            )
        return config

    @classmethod
    def _new(
        cls, config: DAPConfig, dtype: torch.dtype | str, target_token_ids: list[int] | None
    ) -> "DAPForPreTraining":
        """A model with random weights, and the target vocabulary where that is not all."""
        kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"dtype={dtype!r}: give one of torch's, such as 'bfloat16'.")
        model = cls(config).to(kind)
        if target_token_ids is not None:
            model.set_target_vocabulary(target_token_ids)
        return model

    def _copy_weights(
        self, pretrained: PreTrainedModel, missing: set[str], name: str, token_counts: Tensor | None
    ) -> None:
        encoder = (
            pretrained.dap.encoder
            if isinstance(pretrained, DAPForPreTraining)
            else pretrained.base_model
        )
        weights = encoder.state_dict()  # some masked-LM models keep a pooler
        self.dap.encoder.load_state_dict(
            {name: weights[name] for name in weights if not name.startswith("pooler.")}
        )
        if self.rtl_head is not None:
            self.rtl_head.copy_last_layers(encoder)
        if self.prediction_head is None:
            return
        if missing or not self.prediction_head.copy_masked_lm_head(pretrained):
            lacking = (
                f"{name} has no masked-LM head to take, or none that ends in its word embeddings"
            )
            logger.warning(f"{lacking}: the prediction head starts from random weights.")
            if token_counts is not None:
                self.prediction_head.start_bias(token_counts)
        elif token_counts is not None:
            logger.warning(
                f"{name} has a masked-LM head: its bias is taken, not one from token frequencies."
            )
        self.prediction_head.start_decoder(self.get_input_embeddings().weight)
        if self.bow_transform is not None:
            self.bow_transform.dense.load_state_dict(self.prediction_head.dense.state_dict())
            self.bow_transform.norm.load_state_dict(self.prediction_head.norm.state_dict())

    @torch.no_grad()
    def _try_out(self) -> None:
        """Take two pairs of uneven lengths through encoder and heads, but through no other process.

        Raises:
            ValueError: the states of a sentence depend on the padding beside it, or on how its words are embedded.
        """
        padding = getattr(self.config.encoder_config, "pad_token_id", None)
        real = [number for number in range(17) if number != padding]
        ids = torch.tensor(real[:16]).view(2, 8) % self.config.vocab_size  # (2, 8)
        masks = [
            (torch.arange(8) < torch.tensor(lengths)[:, None]).long()
            for lengths in ([5, 7], [6, 8])
        ]
        encoder = self.dap.encoder.eval()  # without dropout
        alone = encoder(input_ids=ids[:1, :5], attention_mask=masks[0][:1, :5]).last_hidden_state
        padded = last_states(encoder, masks[0], inputs_embeds=self.get_input_embeddings()(ids))[
            :1, :5
        ]
        if not (padded - alone).norm() < torch.finfo(alone.dtype).eps ** 0.5 * alone.norm():
            raise ValueError(
                "a sentence has other states alone, by its ids, than beside padding, by embeddings"
            )
        self.train(self.training)
        with torch.random.fork_rng(devices=[]):
            sides = (Side(ids, mask, self.draw_noise(ids)) for mask in masks)
            batch = Batch(*sides, torch.zeros(2, dtype=torch.long))
            labels = {own.name: torch.ones(1) for own in self.objectives}
            self._losses(batch, Chunk(0, (None, None), self._compared(batch).compared, labels))

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As in Transformers; the prediction head's bias grows with the vocabulary, a target vocabulary stays."""
        table = super().resize_token_embeddings(*args, **kwargs)
        if self.prediction_head is not None:
            self.prediction_head.resize(table.weight)
        return table

    def set_target_vocabulary(self, token_ids: list[int]) -> None:
        """Set the token ids that RTL and BOW predict; as many as `config.target_vocab_size`."""
        size, ids = self.config.target_vocab_size, sorted(set(token_ids))
        outside = [number for number in ids if not 0 <= number < self.config.vocab_size]
        if len(ids) != size or outside:
            found = f"{len(ids)} ids, {len(outside)} of them outside of the vocabulary"
            allowed = f"{size} different ids from 0 to {self.config.vocab_size - 1} (target_vocab_size={size})"
            raise ValueError(f"target vocabulary of {found}: give {allowed}.")
        self.prediction_head.token_ids.copy_(torch.tensor(ids))

    def draw_noise(self, ids: Tensor) -> Tensor | None:
        """(B, S), uniform in [0, 1), that decides which tokens are masked; None where all or none are."""
        masks_some = any(own.masks for own in self.objectives)
        return torch.rand(ids.shape, device=ids.device) if masks_some else None

    @can_return_tuple
    def forward(
        self,
        source_input_ids: Tensor,
        source_attention_mask: Tensor,
        target_input_ids: Tensor,
        target_attention_mask: Tensor,
        language_ids: Tensor | None = None,
        source_noise: Tensor | None = None,
        target_noise: Tensor | None = None,
        negative_input_ids: Tensor | None = None,
        negative_attention_mask: Tensor | None = None,
        chunk: Chunk | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_loss: bool = True,
    ) -> DAPForPreTrainingOutput:
        """Losses of B translation pairs.

        Args:
            source_input_ids: (B, S_x) token ids of the sources, CLS first, padded on the right.
            source_attention_mask: (B, S_x), 1 for real tokens.
            target_input_ids: (B, S_y) token ids of the translations.
            target_attention_mask: (B, S_y).
            language_ids: (B,) indices into `config.rtl_languages`, wherever a source is reconstructed.
            source_noise, target_noise: (B, S_x) and (B, S_y), as `draw_noise` gives them; drawn when absent.
            negative_input_ids, negative_attention_mask: (B, S_n), changed copies of the targets, which TR ranks beside
                them (`tr_hard_negatives`); the mask is 0 throughout for a pair that brings none.
            chunk: these pairs are some of a larger batch; `loss` is then their share, which has its gradients.
            output_hidden_states, output_attentions: also give what the encoder does on its way, for which padding is
                computed, too; the config decides when absent. Attentions need `attn_implementation="eager"`.
            return_loss: it always is; named, as it tells a stock `Trainer` that there is one to evaluate by.
        """
        if len(source_input_ids) != len(target_input_ids):
            raise ValueError(
                f"{len(source_input_ids)} sources, {len(target_input_ids)} targets: give pairs."
            )
        asked = {
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        asked = {
            name: getattr(self.config, name) if value is None else value
            for name, value in asked.items()
        }
        noise = (source_noise, target_noise) if chunk is None else chunk.noise
        ids, masks = (
            (source_input_ids, target_input_ids),
            (source_attention_mask, target_attention_mask),
        )
        drawn = (self.draw_noise(own) if given is None else given for own, given in zip(ids, noise))
        first = first_row(len(source_input_ids)) if chunk is None else chunk.first
        negatives = (
            None
            if negative_input_ids is None
            else Side(negative_input_ids, negative_attention_mask)
        )
        batch = Batch(*map(Side, ids, masks, drawn), language_ids, first, negatives=negatives)
        if chunk is not None and chunk.gradients is None:
            return self._compared(batch)
        return self._losses(batch, chunk, asked)

    def _losses(
        self, batch: Batch, chunk: Chunk | None, asked: dict[str, Any] | None = None
    ) -> DAPForPreTrainingOutput:
        """The losses of these pairs, or of a chunk its shares of the batch's."""
        objectives = self.objectives
        batch, texts, seen = self.read(batch, objectives, asked)
        loss, measures = 0.0, {}
        for objective in objectives:
            own, found = objective.loss(batch._replace(text=texts.get(objective.name)), self, chunk)
            loss, measures = loss + objective.weight * own, measures | found
        return DAPForPreTrainingOutput(
            loss, batch.source.embeds, batch.target.embeds, measures, **seen
        )

    def _compared(self, batch: Batch) -> DAPForPreTrainingOutput:
        """What comparisons compare, and nothing else: the first pass of GradCache."""
        comparisons = [
            objective for objective in self.objectives if isinstance(objective, Comparison)
        ]
        if comparisons:
            batch, *_ = self.read(batch, comparisons)
        return DAPForPreTrainingOutput(
            compared={own.name: own.compared(batch, self) for own in comparisons}
        )

    def read(
        self, batch: Batch, objectives: Sequence[Objective], asked: dict[str, Any] | None = None
    ) -> tuple[Batch, dict[str, Text], dict[str, tuple[Tensor, ...]]]:
        """The batch with all that these objectives need of the encoder, their own texts with states, by name, and what
        is asked for of the encoder's way through the pairs."""
        ids, mask = stacked(batch.read)  # (2·B or 3·B, S)
        if not torch.compiler.is_compiling() and not bool((mask[:, :-1] >= mask[:, 1:]).all()):
            raise ValueError("an attention mask has padding before a real token: pad on the right.")
        texts = {own.name: text for own in objectives if (text := own.text(batch)) is not None}
        if any(own.reads_pairs for own in objectives):
            texts = {"pairs": Text(ids, mask, wanted=self._wanted(batch, mask, objectives))} | texts
        words, embedded = self._look_up([text.ids for text in texts.values()], objectives)
        by_name, seen = {own.name: own for own in objectives}, {}
        for (name, text), rows in zip(list(texts.items()), embedded):  # the pairs first
            rows = rows if name == "pairs" else by_name[name].embed(rows, batch)
            inputs = {"inputs_embeds": rows, **absolute_positions(self.dap.encoder, text.columns)}
            if name == "pairs" and any((asked or {}).values()):
                out = self.dap.encoder(attention_mask=text.mask, **inputs, **asked)
                states = out.last_hidden_state.masked_fill(text.mask.unsqueeze(-1) == 0, 0.0)
                seen = {"hidden_states": out.hidden_states, "attentions": out.attentions}
            else:
                states = last_states(self.dap.encoder, text.mask, text.wanted, **inputs)
            texts[name] = text._replace(states=states)
            batch = batch.with_states(states, self.config.pooling) if name == "pairs" else batch
        return batch._replace(words=words), texts, seen

    def _wanted(self, batch: Batch, mask: Tensor, objectives: Sequence[Objective]) -> Tensor | None:
        """Of the pairs' tokens (2·B or 3·B, S) those whose states are read, bool; None for all.

        Those of all the model's objectives are among them, so that dropout is the same in both passes of GradCache.
        """
        pooled, size = pooled_tokens(mask, self.config.pooling), len(batch.source.ids)
        readers = [own for own in (*self.objectives, *objectives) if own.reads_pairs]
        whole = [any(own.reads_tokens[side] for own in readers) for side in (0, 1)]
        if pooled is None or all(whole):
            return None
        parts = zip([*whole, False], pooled.split(size), mask.bool().split(size))
        return torch.cat([real if everything else first for everything, first, real in parts])

    def _look_up(
        self, texts: list[Tensor], objectives: Sequence[Objective]
    ) -> tuple[Words, list[Tensor]]:
        """Word embeddings that the heads need, and those of texts (R, S) as (R, S, E).

        By one lookup: each has a gradient of (V, E).
        """
        table, others = whole(self.get_input_embeddings().weight), {}
        if any(own.needs_mask_token for own in objectives):
            others["mask"] = torch.tensor([self.config.mask_token_id], device=table.device)
        if (
            OF_TARGETS & {own.name for own in objectives}
            and self.prediction_head.looked_up is not None
        ):
            others["predicted"] = self.prediction_head.looked_up
        wanted = [*texts, *others.values()]
        rows = F.embedding(torch.cat([ids.flatten() for ids in wanted]), table).split(
            [i.numel() for i in wanted]
        )
        found = [part.unflatten(0, ids.shape) for part, ids in zip(rows, wanted)]
        words = {"mask": None, "predicted": table} | dict(zip(others, found[len(texts) :]))
        module = self.get_input_embeddings()
        if (
            type(module).forward is not nn.Embedding.forward or module._forward_hooks
        ):  # an adapter, noise, a scale
            return Words(table, **words), [module(ids) for ids in texts]
        return Words(table, **words), found[: len(texts)]


# ------------------------------------------------------------------------------------------- classification


class DAPForSequenceClassification(DAPPreTrainedModel):
    """Encoder with dense + tanh and a classifier on its sentence embedding, for XNLI (section 4.6)."""

    _keys_to_ignore_on_load_unexpected = [r"^(?!dap\.|classifier\.)"]  # heads of pre-training
    accepts_loss_kwargs = False  # the Trainer divides the loss by the accumulation steps itself

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"  # whatever a subclass is named
        self.dap = DAPModel(config)
        use_packing(self.dap.encoder)
        rate = getattr(config.encoder_config, "classifier_dropout", None)
        rate = getattr(config.encoder_config, "hidden_dropout_prob", 0.0) if rate is None else rate
        dense = nn.Linear(config.hidden_size, config.hidden_size)
        output = nn.Linear(config.hidden_size, config.num_labels)
        self.classifier = nn.Sequential(
            nn.Dropout(rate), dense, nn.Tanh(), nn.Dropout(rate), output
        )
        self.post_init()

    @can_return_tuple
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
        kwargs |= {
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        given = {key: value for key, value in kwargs.items() if value is not None}
        out = self._encode(input_ids, attention_mask, given)
        logits = self.classifier(out.pooler_output)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutput(
            loss=loss, logits=logits, hidden_states=out.hidden_states, attentions=out.attentions
        )

    def _encode(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, others: dict[str, Any]
    ) -> BaseModelOutputWithPooling:
        """What `DAPModel` gives; without padding where only the embedding is asked for and the encoder allows it."""
        encoder, asks_more = (
            self.dap.encoder,
            self.config.output_hidden_states or self.config.output_attentions,
        )
        asks_more |= (
            torch.jit.is_tracing() or torch.compiler.is_exporting()
        )  # lengths would be constants
        if (
            attention_mask is None
            or asks_more
            or others.keys() - {"token_type_ids"}
            or not takes_packed(encoder)
        ):
            return self.dap(
                input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **others
            )
        pooling, inputs = self.config.pooling, {"input_ids": input_ids, **others}
        states = packed_states(
            encoder, attention_mask, inputs, pooled_tokens(attention_mask, pooling)
        )  # (B, S, D)
        return BaseModelOutputWithPooling(pooler_output=pool(states, attention_mask, pooling))


DAPConfig.register_for_auto_class()
for _auto, _model in (
    (AutoModel, DAPModel),
    (AutoModelForPreTraining, DAPForPreTraining),
    (AutoModelForSequenceClassification, DAPForSequenceClassification),
):
    _model.register_for_auto_class(_auto.__name__)
    # Not as a checkpoint's own code: a process may load checkpoints of several versions, and each runs its own.
    if __name__ == "modeling_dap":
        _auto.register(DAPConfig, _model, exist_ok=True)
