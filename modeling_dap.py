"""Dual-alignment pre-training (DAP, ACL 2023): a sentence encoder and its training objectives.

The file ships with every checkpoint, beside the files it imports. Read
`DAPForPreTraining.forward` first: it is the method.

- `DAPModel`: the sentence encoder f. `pooler_output` is the sentence vector.
- `DAPForPreTraining`: the encoder with the heads of its objectives.
- `DAPForSequenceClassification`: the encoder with a classifier, for XNLI.

Shapes in the comments: `B` pairs of one process, `W` processes, `S` tokens (`S_x` of the source,
`S_y` of the target), `D` hidden size, `E` width of the word embeddings, `V` vocabulary, `R` rows
of text. Behind the entry of `forward`, all sentences are padded on the right.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers import initialization as init
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    ModelOutput,
    SequenceClassifierOutput,
)
from transformers.utils import can_return_tuple, logging

try:
    from .configuration_dap import DAPConfig, default_pooling, own_pooling
    from .encoder_dap import (
        TESTED,
        build_encoder,
        depends_on_padding,
        load_config,
        load_pretrained,
        pretrained_class,
        require_encoder,
        special_tokens,
    )
    from .heads_dap import PredictionHead, RTLHead, look_up
    from .losses_dap import world_size
    from .modules_dap import (
        LibrarySettings,
        VectorLinear,
        build_modules,
        library_settings,
        load_modules,
        save_modules,
    )
    from .objectives_dap import (
        OBJECTIVES,
        Chunk,
        Comparison,
        Encoded,
        Objective,
        Pairs,
        needs_of,
        objectives_of,
        pad_to,
        pairs_of,
    )
    from .states_dap import (
        POOLINGS,
        absolute_positions,
        last_states,
        sentence_vectors,
        takes_packed,
        use_packing,
    )
except ImportError:  # a checkout, where these files are top-level modules
    from configuration_dap import DAPConfig, default_pooling, own_pooling
    from encoder_dap import (
        TESTED,
        build_encoder,
        depends_on_padding,
        load_config,
        load_pretrained,
        pretrained_class,
        require_encoder,
        special_tokens,
    )
    from heads_dap import PredictionHead, RTLHead, look_up
    from losses_dap import world_size
    from modules_dap import (
        LibrarySettings,
        VectorLinear,
        build_modules,
        library_settings,
        load_modules,
        save_modules,
    )
    from objectives_dap import (
        OBJECTIVES,
        Chunk,
        Comparison,
        Encoded,
        Objective,
        Pairs,
        needs_of,
        objectives_of,
        pad_to,
        pairs_of,
    )
    from states_dap import (
        POOLINGS,
        absolute_positions,
        last_states,
        sentence_vectors,
        takes_packed,
        use_packing,
    )

logger = logging.get_logger(__name__)

#: Arguments of `save_pretrained` that `push_to_hub` also takes.
HUB_OPTIONS = (
    "commit_message",
    "commit_description",
    "private",
    "revision",
    "create_pr",
    "tags",
    "token",
)


class DAPPreTrainedModel(PreTrainedModel):
    """Base class of the three models: configuration class, attention support and saving."""

    config: DAPConfig
    config_class = DAPConfig
    base_model_prefix = "dap"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def save_pretrained(
        self,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Save the model, and the files that sentence-transformers needs to pool it correctly.

        The Hub's `push_to_hub` uses this method. Only the main process writes these files, and
        uploads.
        """
        super().save_pretrained(save_directory, is_main_process, state_dict, **kwargs)
        if is_main_process:
            config = self.config
            after = self.base_model.after
            save_modules(Path(save_directory), config.pooling, config.hidden_size, after)
        # Not in `super()`, which would upload before the files of sentence-transformers are there.
        if push_to_hub and is_main_process:
            repo_id = kwargs.get("repo_id", Path(save_directory).name)
            hub = {name: kwargs[name] for name in HUB_OPTIONS if name in kwargs}
            self.push_to_hub(repo_id, **hub)


class DAPModel(DAPPreTrainedModel):
    """Sentence encoder f of section 3.2: `pooler_output` is the sentence vector f_s(x)."""

    _keys_to_ignore_on_load_unexpected = [r"^(?!dap\.|encoder\.)"]  # heads

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        config.validate()
        require_encoder(config.encoder_config, "encoder_config")
        self.encoder = build_encoder(config.encoder_config)
        self.after = build_modules(config.modules)
        self.post_init()

    def pool(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return sentence vectors (B, D') of token states (B, S, D), given their mask (B, S).

        D' is `config.vector_size`.
        """
        return self.after(POOLINGS[self.config.pooling].pool(states, mask))

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
            input_ids: (B, S) token ids. Give these or `inputs_embeds`.
            attention_mask: (B, S), 1 for real tokens. None means that all tokens are real.
            token_type_ids: (B, S), for encoders that have token types.
            position_ids: (B, S), for encoders with absolute positions.
            inputs_embeds: (B, S, E) word embeddings.
            kwargs: passed to the encoder (`output_hidden_states`, ...).

        Returns:
            `last_hidden_state` (B, S, D) and `pooler_output` (B, D'), the sentence vectors. Their
            length is 1 only if `config.modules` has Normalize.
        """
        for option in ("output_hidden_states", "output_attentions"):
            if kwargs.get(option) is None:
                kwargs[option] = getattr(self.config, option)
        # Not every encoder takes these two.
        if token_type_ids is not None:
            kwargs["token_type_ids"] = token_type_ids
        if position_ids is not None:
            kwargs["position_ids"] = position_ids
        given = input_ids if input_ids is not None else inputs_embeds
        if attention_mask is None and given is not None:
            attention_mask = torch.ones(given.shape[:2], dtype=torch.long, device=given.device)

        out = self.encoder(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            return_dict=True,
            **kwargs,
        )
        return BaseModelOutputWithPooling(
            last_hidden_state=out.last_hidden_state,
            pooler_output=self.pool(out.last_hidden_state, attention_mask),
            hidden_states=getattr(out, "hidden_states", None),
            attentions=getattr(out, "attentions", None),  # Mamba has none
        )


# ----------------------------------------------------------------------------------- pre-training


@dataclass
class DAPForPreTrainingOutput(ModelOutput):
    """Losses and sentence vectors that `DAPForPreTraining` returns for a batch.

    Each entry of `measures` is also an attribute, such as `out.tr_loss`. The attribute is None if
    the model does not compute that measure. With several processes, every loss is scaled so that
    the mean over processes is the loss of the global batch.

    Args:
        loss: float32 scalar, the weighted sum of the objectives' losses. None in the first pass of
            GradCache.
        source_embeds: (B, D') sentence vectors, as `DAPModel` returns them: without the projection.
            None if no objective needs them, as with `"mlm"`.
        target_embeds: (B, D') the same of the targets.
        measures: scalars by name.
            `tr_loss`: translation ranking, eq. L_TR, nats per pair.
            `rtl_loss`: representation translation learning, eq. L_RTL, nats per token.
            `tlm_loss`: translation language modelling, eq. L_TLM, nats per masked token.
            `mlm_loss`: masked language modelling of each side, nats per masked token.
            `bow_loss`: bag-of-words prediction, nats per target token.
            `distill_loss`: distillation, 1 - cosine per sentence.
            `accuracy`: share of the pairs whose own target ranks first (TR). Hard negatives count.
            `negatives`: mean number of negatives per pair (TR). Hard negatives count, pairs with
                the same source or target do not.
            `ignored_tokens`: tokens of this process that RTL leaves out, because they are not in
                the target vocabulary.
        compared: vectors that an objective such as TR compares, by the objective's name. This is
            the only field that is set in the first pass of GradCache; otherwise it is None.
    """

    loss: Tensor | None = None
    source_embeds: Tensor | None = None
    target_embeds: Tensor | None = None
    measures: dict[str, Tensor] | None = None
    compared: dict[str, tuple[Tensor, ...]] | None = None

    def __getattr__(self, name: str) -> Tensor | None:
        is_loss = name.endswith("_loss") and name.removesuffix("_loss") in OBJECTIVES
        if is_loss or name in ("accuracy", "negatives", "ignored_tokens"):
            return (self.measures or {}).get(name)
        raise AttributeError(f"{type(self).__name__} has no {name!r}")


class DAPForPreTraining(DAPPreTrainedModel):
    """Encoder with the heads of its training objectives (section 3.3). With TR + RTL it is DAP.

    The weights are random. `from_encoder` starts from a checkpoint.

    Attributes:
        dap: the `DAPModel`, which holds the encoder.
        projection, rtl_head, prediction_head, bow_transform, teacher_projection: heads. None if no
            objective uses them.
        has_random_head: whether a prediction head on a pretrained encoder has random weights.
    """

    main_input_name = "source_input_ids"
    accepts_loss_kwargs = False  # the Trainer divides the loss by the accumulation steps itself

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        self.dap = DAPModel(config)
        use_packing(self.dap.encoder)
        self.projection = self.rtl_head = self.prediction_head = self.bow_transform = None
        self.teacher_projection = None
        self.has_random_head = False
        for objective in self.objectives:
            for name, build in objective.heads.items():
                if getattr(self, name, None) is None:  # objectives can share a head
                    setattr(self, name, build(config))
            config.update(objective.fields)  # also defaults, which may change in the user's file
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, PredictionHead):
            init.zeros_(module.bias)
            if module.token_ids is not None:
                init.copy_(module.token_ids, torch.arange(len(module.token_ids)))
        if isinstance(module, RTLHead) and module.mask_token is not None:
            init.normal_(module.mask_token, std=0.02)

    @property
    def objectives(self) -> list[Objective]:
        """Build the objectives that `config` describes at the moment of the call."""
        return objectives_of(self.config)

    def get_input_embeddings(self) -> nn.Module:
        return self.dap.get_input_embeddings()

    # ------------------------------------------------------------------------------- the method

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
        teacher_embeds: Tensor | None = None,
        chunk: Chunk | None = None,
        pair_ids: Sequence[str] | None = None,
        return_loss: bool = True,
    ) -> DAPForPreTrainingOutput:
        """Compute the losses of B translation pairs.

        Args:
            source_input_ids: (B, S_x) token ids, padded on either side.
            source_attention_mask: (B, S_x), 1 for real tokens.
            target_input_ids: (B, S_y) token ids of the translations.
            target_attention_mask: (B, S_y), 1 for real tokens.
            language_ids: (B,) indices into `config.rtl_languages`; needed if sources are
                reconstructed.
            source_noise, target_noise: (B, S_x) and (B, S_y), the random numbers that choose masked
                tokens, as `draw_noise` returns them. None draws them here.
            negative_input_ids: (B, S_n) changed copies of the targets (hard negatives), which TR
                ranks beside the targets.
            negative_attention_mask: (B, S_n), all zeros in the row of a pair without a copy.
            teacher_embeds: (B, 2, T) where the vectors of source and target should point, for
                distillation.
            chunk: given if these pairs are a chunk of a larger batch (GradCache). In the first pass
                only the vectors to compare are returned (`compared`). In the second pass the
                gradient of `loss` is the chunk's share of the gradient of the batch's loss.
            pair_ids: have no effect. They are in a batch of `BitextCollator`, for messages.
            return_loss: has no effect. Its presence tells the `Trainer` of Transformers that the
                model can be evaluated by its loss.
        """
        objectives = self.objectives
        needs = needs_of(objectives)
        inputs = {
            "source_input_ids": source_input_ids,
            "source_attention_mask": source_attention_mask,
            "source_noise": source_noise,
            "target_input_ids": target_input_ids,
            "target_attention_mask": target_attention_mask,
            "target_noise": target_noise,
            "negative_input_ids": negative_input_ids,
            "negative_attention_mask": negative_attention_mask,
            "language_ids": language_ids,
            "teacher_embeds": teacher_embeds,
        }
        pairs = pairs_of(inputs, needs, None if chunk is None else chunk.first_pair)

        # First pass of GradCache: only the vectors that are compared with those of other chunks.
        if chunk is not None and chunk.gradients is None:
            return self._vectors_to_compare(pairs, objectives)

        # The shared encoder f: token states f(x), f(y) and sentence vectors f_s(x), f_s(y).
        encoded = self.encode(pairs, needs)

        # L = sum of weight · loss over the objectives (eq. L_DAP for TR and RTL).
        total, measures = 0.0, {}
        for objective in objectives:
            loss, found = objective.loss(pairs, encoded, self, chunk)
            total = total + objective.weight * loss
            measures |= found
        return DAPForPreTrainingOutput(
            loss=total,
            source_embeds=encoded.source_embeds,
            target_embeds=encoded.target_embeds,
            measures=measures,
        )

    def encode(self, pairs: Pairs, needs: frozenset[str]) -> Encoded:
        """Run the encoder over sources, targets and hard negatives (if any), in one batch.

        States of tokens that `needs` does not name may be zeros (see `Objective.needs`). If neither
        states nor vectors are needed, the encoder does not run, and only word embeddings are
        returned.
        """
        ids, mask = _stack(pairs)  # (2·B or 3·B, S)

        # Word embeddings of the sentences and for the heads.
        reads_sentences = bool(needs & {"source_states", "target_states", "embeds"})
        words, embedded = look_up(
            self.get_input_embeddings(),
            ids if reads_sentences else ids[:0],
            self.prediction_head if "target_vocabulary" in needs else None,
            self.config.mask_token_id if "mask_token" in needs else None,
        )
        if not reads_sentences:  # as with "mlm"
            return Encoded(words)

        # f(x), f(y): the last states of all tokens that are read.
        read = self._tokens_read(pairs, mask, needs)
        states = last_states(self.dap.encoder, mask, read, inputs_embeds=embedded)

        # f_s(x), f_s(y): one vector per sentence.
        embeds = self.dap.pool(states, mask)  # (2·B or 3·B, D')

        source_states, target_states, *_ = states.split(len(pairs.source.ids))
        source_embeds, target_embeds, *negative_embeds = embeds.split(len(pairs.source.ids))
        return Encoded(
            words=words,
            source_states=source_states[:, : pairs.source.ids.shape[1]],
            target_states=target_states[:, : pairs.target.ids.shape[1]],
            source_embeds=source_embeds,
            target_embeds=target_embeds,
            negative_embeds=negative_embeds[0] if negative_embeds else None,
        )

    def encode_text(
        self, ids: Tensor, mask: Tensor, columns: Tensor | None = None, read: Tensor | None = None
    ) -> Tensor:
        """Return the last hidden states (R, S, D) of text that an objective has made.

        Args:
            mask: (R, S), 1 for real tokens.
            columns: (R, S) position of each token in its sentence. None takes the column number.
            read: (R, S) bool, the tokens whose states the caller uses, at least one per row. None
                means all tokens. The states of other tokens may be zeros.
        """
        _, embedded = look_up(self.get_input_embeddings(), ids)  # (R, S, E)
        positions = absolute_positions(self.dap.encoder, columns)
        return last_states(self.dap.encoder, mask, read, inputs_embeds=embedded, **positions)

    def _vectors_to_compare(
        self, pairs: Pairs, objectives: list[Objective]
    ) -> DAPForPreTrainingOutput:
        """Return only the vectors that objectives such as TR compare: GradCache's first pass.

        It reads the same tokens as the second pass, so that both draw the same dropout.
        """
        comparisons = [each for each in objectives if isinstance(each, Comparison)]
        compared = {}
        if comparisons:
            encoded = self.encode(pairs, needs_of(objectives) - {"mask_token", "target_vocabulary"})
            for objective in comparisons:
                compared[objective.name] = objective.vectors(pairs, encoded, self)
        return DAPForPreTrainingOutput(compared=compared)

    def _tokens_read(self, pairs: Pairs, mask: Tensor, needs: frozenset[str]) -> Tensor | None:
        """Return True for each token whose state is read, None if all are. Others may be skipped.

        Only the pooling reads tokens of a side whose token states no objective needs.
        """
        reads = POOLINGS[self.config.pooling].reads
        if reads is None or needs >= {"source_states", "target_states"}:
            return None
        read = reads(mask)
        count = len(pairs.source.ids)
        if "source_states" in needs:
            read[:count] = mask[:count].bool()
        if "target_states" in needs:
            read[count : 2 * count] = mask[count : 2 * count].bool()
        return read

    # ---------------------------------------------------------------------------- making a model

    @classmethod
    def from_encoder(
        cls,
        name_or_path: str,
        target_token_ids: list[int] | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **fields: Any,
    ) -> "DAPForPreTraining":
        """Make a model for pre-training whose encoder has the weights of a checkpoint.

        The RTL head starts as the encoder's last K layers. The prediction head starts as the
        checkpoint's masked-LM head. If it has none, the prediction head starts from random
        weights and has to be trained before it can teach the encoder; a warning says so.

        Args:
            name_or_path: folder or Hub id of an encoder (BERT, RoBERTa, XLM-R, DeBERTa-v2,
                ModernBERT, ...), or of a `DAPForPreTraining` made with objective `"mlm"`.
            target_token_ids: token ids that RTL and BOW predict. None means the whole vocabulary.
            tokenizer: says which special tokens there are, such as [MASK]. None loads the
                checkpoint's own.
            fields: fields of `DAPConfig`. Those that are not given are the checkpoint's
                (`fields_of_checkpoint`), or have their defaults.
        """
        library = library_settings(name_or_path, revision)
        source = {
            "trust_remote_code": trust_remote_code,
            "revision": revision,
            "subfolder": library.subfolder,
        }
        saved = load_config(name_or_path, **source)
        is_mlm = saved.model_type == DAPConfig.model_type and saved.objective == "mlm"
        encoder_config = saved.encoder_config if is_mlm else saved
        require_encoder(encoder_config, name_or_path)
        if tokenizer is None:
            tokenizer = AutoTokenizer.from_pretrained(name_or_path, **source)
        fields = fields_of_checkpoint(saved, library, tokenizer) | fields
        config = DAPConfig(encoder_config, **fields)

        kind = cls if is_mlm else pretrained_class(saved)
        pretrained, missing = load_pretrained(
            name_or_path,
            kind,
            dtype=torch.float32,
            attn_implementation=attn_implementation,
            **source,
        )
        if not is_mlm:  # what Transformers has chosen for this encoder
            attn_implementation = pretrained.config._attn_implementation
        encoder_config._attn_implementation = attn_implementation

        model = cls._new(config, target_token_ids)
        model._copy_weights(pretrained, missing, name_or_path)
        if library.modules and config.modules == list(library.modules):
            is_adapter = library.place[0] != name_or_path
            after = pretrained.dap.after if is_mlm and is_adapter else load_modules(library)
            model.dap.after.load_state_dict(after.state_dict())
        model._require_trainable(name_or_path)
        return model

    @classmethod
    def from_scratch(
        cls,
        encoder_config: PreTrainedConfig,
        target_token_ids: list[int] | None = None,
        attn_implementation: str | None = None,
        **fields: Any,
    ) -> "DAPForPreTraining":
        """Make a model for pre-training with random weights.

        Args:
            encoder_config: configuration of the encoder to build. It is not changed.
            target_token_ids: token ids that RTL and BOW predict. None means the whole vocabulary.
            fields: fields of `DAPConfig`. Most objectives need `mask_token_id`.
        """
        name = encoder_config.name_or_path or "encoder_config"
        require_encoder(encoder_config, name)
        attention = attn_implementation or encoder_config._attn_implementation
        encoder_config = copy.deepcopy(encoder_config)
        config = DAPConfig(encoder_config, **fields)
        config.encoder_config._attn_implementation = attention

        model = cls._new(config, target_token_ids)
        if model.prediction_head is not None:
            model.prediction_head.start_decoder(model.get_input_embeddings().weight)
        model._require_trainable(name)
        return model

    @classmethod
    def _new(cls, config: DAPConfig, target_token_ids: list[int] | None) -> "DAPForPreTraining":
        """Return a model with random weights, and with a target vocabulary if one is given."""
        if target_token_ids is not None and config.target_vocab_size is None:
            config.target_vocab_size = len(set(target_token_ids))
        config.encoder_config.dtype = torch.float32  # Gemma rounds a constant to it
        model = cls(config).float()
        if target_token_ids is not None:
            model.set_target_vocabulary(target_token_ids)
        return model

    def _copy_weights(self, pretrained: PreTrainedModel, missing: set[str], name: str) -> None:
        """Copy a checkpoint's weights. If a head stays random, warn, and set `has_random_head`."""
        is_dap = isinstance(pretrained, DAPForPreTraining)
        encoder = pretrained.dap.encoder if is_dap else pretrained.base_model
        weights = {
            key: value
            for key, value in encoder.state_dict().items()
            if not key.startswith("pooler.")  # some masked-LM models keep one
        }
        self.dap.encoder.load_state_dict(weights)
        if self.rtl_head is not None:
            self.rtl_head.copy_last_layers(encoder)
        head = self.prediction_head
        if head is None:
            return

        is_copied = not missing and head.copy_masked_lm_head(pretrained)
        head.start_decoder(self.get_input_embeddings().weight)
        if self.bow_transform is not None:
            if self.config.vector_size == self.config.hidden_size:
                self.bow_transform.dense.load_state_dict(head.dense.state_dict())
                self.bow_transform.norm.load_state_dict(head.norm.state_dict())
            else:
                is_copied = False
        if not is_copied:
            logger.warning(
                f"{name}: the masked-LM head is missing, or does not fit objective "
                f"{self.config.objective!r}, so a prediction head starts from random weights."
            )
            self.has_random_head = True

    def _require_trainable(self, name: str) -> None:
        """Raise `ValueError` if the encoder does not fit the training.

        That is if a sentence beside padding gets other states than by itself, if word embeddings
        give other states than token ids, or if the objectives fail on two made-up pairs. Encoders
        in `TESTED` are not tried. The objectives are only tried in a single process.
        """

        def states_of(ids: Tensor, mask: Tensor) -> Tensor:
            embedded = self.get_input_embeddings()(ids)
            return last_states(self.dap.encoder, mask, inputs_embeds=embedded)

        kind = self.config.encoder_config.model_type
        try:
            depends = depends_on_padding(self.dap.encoder, states_of)
            if kind not in TESTED and world_size() == 1:  # losses wait for other processes
                self._try_objectives()
        except Exception as error:
            raise ValueError(
                f"{name}: an encoder of model_type {kind!r} cannot train "
                f"{self.config.objective!r}: {type(error).__name__}: {error}"
            ) from error
        if depends:
            raise ValueError(
                f"{name}: an encoder of model_type {kind!r} computes other states for a sentence "
                "alone than beside padding: give another encoder"
            )

    @torch.no_grad()
    def _try_objectives(self) -> None:
        """Compute the loss of two made-up pairs, to see that it raises no error.

        The random numbers of the CPU stay the same.
        """
        ids = torch.arange(16, device=self.device).view(2, 8) % self.config.vocab_size
        inputs = {"language_ids": ids[:, 0] * 0}
        for side in ("source", "target"):
            inputs |= {f"{side}_input_ids": ids, f"{side}_attention_mask": torch.ones_like(ids)}
        if "distill" in self.config.objectives:
            size = self.config.distill_size or self.config.vector_size
            inputs["teacher_embeds"] = torch.ones(2, 2, size, device=self.device)
        with torch.random.fork_rng(devices=[]):
            self(**inputs)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize word embeddings and prediction head, but leave a target vocabulary unchanged."""
        table = super().resize_token_embeddings(*args, **kwargs)
        if self.prediction_head is not None:
            self.prediction_head.resize(table.weight)
        return table

    def set_target_vocabulary(self, token_ids: list[int]) -> None:
        """Set the ids that RTL and BOW predict, `config.target_vocab_size` ones in any order."""
        own = getattr(self.prediction_head, "token_ids", None)
        ids = sorted(set(token_ids))
        if own is None or len(own) != len(ids):
            raise ValueError(
                f"{len(ids)} target tokens do not fit objective {self.config.objective!r} with "
                f"target_vocab_size={self.config.target_vocab_size}"
            )
        own.copy_(torch.tensor(ids))


def fields_of_checkpoint(
    saved: PreTrainedConfig, library: LibrarySettings, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return the fields of `DAPConfig` that a new model takes from the checkpoint it starts from.

    These are the special tokens and the pooling, and the modules of a sentence-transformers folder.
    A folder that does not say how it pools gets the mean, and a decoder the last token.
    """
    pooling = own_pooling(saved) or library.pooling or default_pooling(saved)
    return special_tokens(tokenizer) | {"pooling": pooling, "modules": list(library.modules)}


def _stack(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return ids and mask (2·B or 3·B, S): sources, targets and negatives (if any), in this order.

    The first token of every row counts as real, because an encoder cannot read an empty row.
    """
    sides = [pairs.source, pairs.target]
    if pairs.negatives is not None:
        sides.append(pairs.negatives)
    counts = [len(side.ids) for side in sides]
    if len(set(counts)) > 1:
        raise ValueError(f"{counts} sources, targets and hard negatives: give as many of each")
    length = max(side.ids.shape[1] for side in sides)
    ids = torch.cat([pad_to(side.ids, length) for side in sides])
    mask = torch.cat([pad_to(side.mask, length) for side in sides])
    mask[:, 0] = 1
    return ids, mask


# --------------------------------------------------------------------------------- classification


class DAPForSequenceClassification(DAPPreTrainedModel):
    """Encoder with a classifier on its vector, dense + tanh + linear, as for XNLI (section 4.6)."""

    _keys_to_ignore_on_load_unexpected = [r"^(?!dap\.|classifier\.)"]  # heads of pre-training
    accepts_loss_kwargs = False  # the Trainer divides the loss by the accumulation steps itself

    def __init__(self, config: DAPConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.loss_type = "ForSequenceClassification"  # not by the name of a subclass
        self.dap = DAPModel(config)
        use_packing(self.dap.encoder)
        rate = getattr(config.encoder_config, "classifier_dropout", None)
        if rate is None:
            rate = getattr(config.encoder_config, "hidden_dropout_prob", 0.0)
        self.classifier = nn.Sequential(
            nn.Dropout(rate),
            VectorLinear(config.vector_size, config.hidden_size),
            nn.Tanh(),
            nn.Dropout(rate),
            nn.Linear(config.hidden_size, config.num_labels),
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
        """Classify sentences or sentence pairs: `logits` (B, num_labels) and, with labels, `loss`.

        Labels are class indices (B,), or (B, num_labels) for regression and multi-label problems.
        The rest is as in `DAPModel`, and in the signature because `Trainer` drops columns that it
        does not name.
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
        """Return the encoder's output, without token states if they are not needed."""
        asks_for_more = self.config.output_hidden_states or self.config.output_attentions
        # A graph would hold the lengths of the example's rows as constants.
        is_recorded = torch.jit.is_tracing() or torch.compiler.is_exporting()
        can_pack = attention_mask is not None and takes_packed(self.dap.encoder)
        if is_recorded or asks_for_more or not can_pack or others.keys() - {"token_type_ids"}:
            return self.dap(
                input_ids=input_ids, attention_mask=attention_mask, return_dict=True, **others
            )
        vectors = sentence_vectors(
            self.dap.encoder, attention_mask, self.config.pooling, input_ids=input_ids, **others
        )
        return BaseModelOutputWithPooling(pooler_output=self.dap.after(vectors))


# ----------------------------------------------------------------------------------- registration


DAPConfig.register_for_auto_class()
for _auto, _model in (
    (AutoModel, DAPModel),
    (AutoModelForPreTraining, DAPForPreTraining),
    (AutoModelForSequenceClassification, DAPForSequenceClassification),
):
    _model.register_for_auto_class(_auto.__name__)
    # Not for a checkpoint's own code: a process may load checkpoints of several versions, and each
    # runs its own.
    if __name__ == "modeling_dap":
        _auto.register(DAPConfig, _model, exist_ok=True)
