"""What training starts from: the tokenizer, the configuration, and the model with its heads.

`read_start` reads the tokenizer and the configuration, with which the text is tokenised. Then
`load_model` loads the model, which may need the tokenised text for its vocabulary.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from configuration_dap import unknown_keys
from dap_transformers.encoding.checkpoint import Checkpoint, longest_input
from dap_transformers.errors import UserError, reading
from dap_transformers.tokenizer import never_predicted, require_padding
from dap_transformers.training.arguments import (
    CONFIG_FIELDS,
    PretrainingModelArguments,
    fields_of,
    given_fields,
)
from encoder_dap import auto_class, special_tokens
from modeling_dap import DAPConfig, DAPForPreTraining, fields_of_checkpoint
from objectives_dap import objectives_of

logger = logging.getLogger(__name__)


@dataclass
class Start:
    """Everything that is known before the model is loaded.

    Attributes:
        checkpoint: the files that training starts from: a DAP checkpoint, an encoder, or only the
            configuration of an encoder that gets random weights.
        continues: whether a DAP checkpoint is trained further with its heads. A checkpoint of
            masked language modelling ("mlm") counts as a plain encoder for other objectives.
        planned: the model's configuration, except what the text decides. Given values come first,
            then those of the checkpoint, then the defaults.
        library_length: most tokens per sentence, of a sentence-transformers folder. None for other
            checkpoints.
        positions: most tokens that the encoder has positions for. None if there is no limit.
        has_vectors: whether the sentence vectors may be good before any training.
    """

    checkpoint: Checkpoint
    continues: bool
    planned: DAPConfig
    library_length: int | None
    positions: int | None
    has_vectors: bool

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.checkpoint.tokenizer


# ---------------------------------------------------------------------- tokenizer and configuration


def read_start(args: PretrainingModelArguments) -> Start:
    """Read all that training starts from, except the weights of the model itself.

    Given arguments go before saved settings, and these before defaults.
    """
    checkpoint = Checkpoint.read(
        args.model_name_or_path or args.config_name,
        args.tokenizer_name,
        has_weights=args.config_name is None,
        trust_remote_code=args.trust_remote_code,
        revision=args.revision,
    )
    name = checkpoint.name
    library = checkpoint.library
    config = checkpoint.config
    if args.config_name is not None:
        # Only the shape is wanted, so of a DAP configuration take that of its encoder.
        config = getattr(config, "encoder_config", config)
        config.pad_token_id = checkpoint.tokenizer.pad_token_id
        config.architectures = None  # of weights that are not loaded
        checkpoint.config = config
    require_padding(checkpoint.tokenizer, args.tokenizer_name or name)

    # Build the encoder without memory for its weights, to read its limits from its shape.
    with torch.device("meta"), reading(f"the weights of {name}"):
        kind = auto_class(config)
        shape = kind.from_config(config, trust_remote_code=args.trust_remote_code)
    length = checkpoint.library_length(shape)
    if library.pooling is not None:
        logger.info(
            "%s: pooling %r, prefix %r, unless an argument says otherwise",
            name,
            library.pooling,
            library.prefix,
        )

    is_dap = config.model_type == DAPConfig.model_type
    continues = is_dap and (config.objective != "mlm" or args.objective in (None, "mlm"))
    has_vectors = continues
    if not is_dap:
        has_vectors = library.pooling is not None or is_sentence_encoder(config)
    given = given_fields(args)
    if args.distill_from is None and not has_vectors:
        leave_out_anchor(given, name)

    # Build the model's configuration now, because reading the text may take minutes.
    planned = plan(checkpoint, given, continues, has_weights=args.config_name is None)
    return Start(checkpoint, continues, planned, length, longest_input(shape), has_vectors)


def plan(
    checkpoint: Checkpoint, given: Mapping[str, Any], continues: bool, has_weights: bool
) -> DAPConfig:
    """Return the model's configuration: given fields, then those of the checkpoint, then defaults.

    With `continues`, the checkpoint is a DAP model whose training goes on. Without weights, only
    the encoder's shape and the special tokens come from the checkpoint.
    """
    name = checkpoint.name
    config = checkpoint.config
    if continues:
        with reading(name):
            saved = fields_of(config)
        for key in unknown_keys(saved, given.get("objective", config.objective)):
            del saved[key]  # an option of a plug-in whose objective is no longer trained
    elif has_weights:
        saved = fields_of_checkpoint(config, checkpoint.library, checkpoint.tokenizer)
    else:
        saved = special_tokens(checkpoint.tokenizer)
    languages = saved.get("rtl_languages")
    # The text decides the languages. This placeholder makes the configuration valid until then.
    settings = saved | given | {"rtl_languages": languages or ["of the text"]}
    with reading("the settings of the model"):
        planned = DAPConfig(getattr(config, "encoder_config", config), **settings)
        objectives_of(planned)  # checks the options of plug-ins
    planned.rtl_languages = languages
    if continues and planned.objectives != config.objectives:
        logger.info("%s: objective %s, before %s", name, planned.objective, config.objective)
    return planned


def is_sentence_encoder(config: PreTrainedConfig) -> bool:
    """Tell whether a plain checkpoint may give good sentence vectors.

    This is a guess: its class is a bare encoder (`BertModel`), no language model or classifier.
    """
    classes = config.architectures or [""]
    return all(name.endswith("Model") and not name.endswith("LMHeadModel") for name in classes)


def leave_out_anchor(given: dict[str, Any], name: str) -> None:
    """Remove "distill" from the given objective: the encoder has no sentence vectors to keep.

    Raises:
        UserError: if there is no other objective.
    """
    parts = given.get("objective", "").split("+")
    if "distill" not in parts:
        return
    parts.remove("distill")
    if not parts:
        raise UserError(f"{name} is no sentence encoder: give a teacher (distill_from)")
    given["objective"] = "+".join(parts)
    logger.info(
        "%s is no sentence encoder yet, so there are no vectors to keep: the objective is %s",
        name,
        given["objective"],
    )


# ---------------------------------------------------------------------------------------- the model


def load_model(
    args: PretrainingModelArguments,
    start: Start,
    train: Mapping[str, Any],
    teacher_size: int | None,
) -> DAPForPreTraining:
    """Load a DAP checkpoint, or build a new model around an encoder.

    Args:
        train: tokenised pairs by language. A new model takes from them its languages, or the token
            ids that it predicts.
        teacher_size: size of the vectors of a teacher, or None without one.
    """
    checkpoint = start.checkpoint
    attention = {"attn_implementation": args.attn_implementation}

    if start.continues:
        check_changes(start, train, teacher_size)
        model = checkpoint.load(DAPForPreTraining, config=start.planned, **attention)
    else:
        fields = fields_of(start.planned) | attention | {"distill_size": teacher_size}
        predicts = {each.predicts for each in objectives_of(start.planned)}
        if start.planned.reconstructs_sources:
            fields["rtl_languages"] = sorted(train)
        elif "targets" in predicts:
            # The softmax is smaller if RTL and BOW only predict what occurs in the text.
            fields["target_token_ids"] = target_vocabulary(train, start.tokenizer)
        if predicts == {None}:
            fields["mask_token_id"] = None  # no head needs it
        if args.config_name is not None:
            model = DAPForPreTraining.from_scratch(checkpoint.config, **fields)
        else:
            fields |= checkpoint.hub
            with reading(f"the weights of {checkpoint.name}"):
                model = DAPForPreTraining.from_encoder(
                    checkpoint.name, tokenizer=start.tokenizer, **fields
                )

    # Copy the ids of special tokens. Otherwise `Trainer` does it, and prints a notice.
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(start.tokenizer, token) is not None:
            setattr(model.config, token, getattr(start.tokenizer, token))
    return model


def check_changes(start: Start, train: Mapping[str, Any], teacher_size: int | None) -> None:
    """Raise `UserError` if settings, text, tokenizer or teacher do not fit a checkpoint's heads."""
    name = start.checkpoint.name
    config = start.checkpoint.config
    for key, field in CONFIG_FIELDS.items():
        saved = getattr(config, key)
        value = getattr(start.planned, key)
        is_fixed = not field.metadata.get("changeable", False)
        if key == "objective":
            is_fixed = heads_of(start.planned) != heads_of(config)
        if value != saved and is_fixed:
            raise UserError(
                f"{name} was trained with {key}={saved!r}, not {value!r}: keep the "
                "checkpoint's, or start from its published folder."
            )

    mask = start.tokenizer.mask_token_id
    if config.mask_token_id not in (None, mask):
        raise UserError(
            f"{name} was trained with mask token {config.mask_token_id}, the tokenizer has {mask}: "
            "give the tokenizer of the checkpoint."
        )

    known = config.rtl_languages or train
    if unknown := set(train) - set(known):
        raise UserError(
            f"the RTL head knows {' '.join(known)}, but the text also has "
            f"{' '.join(sorted(unknown))}: leave it out, or start from a plain encoder"
        )

    # Without a teacher, the model teaches itself.
    size = teacher_size or config.vector_size
    trained_size = config.distill_size or config.vector_size
    if "distill" in start.planned.objectives and size != trained_size:
        raise UserError(
            f"{name} learns from vectors of {trained_size} numbers, and the teacher's have {size}: "
            "give another teacher (distill_from), or another objective"
        )


def heads_of(config: DAPConfig) -> set[str]:
    """Return the names of all heads of a model's objectives."""
    return {head for objective in objectives_of(config) for head in objective.heads}


def target_vocabulary(
    datasets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return the sorted token ids that occur in the targets, without CLS and padding.

    Args:
        datasets: tokenised pairs by language.
    """
    occurs = np.zeros(len(tokenizer), dtype=bool)  # (V,)
    for dataset in datasets.values():
        for batch in dataset.with_format("arrow").iter(100_000):
            occurs[batch["target_input_ids"].combine_chunks().flatten().to_numpy()] = True
    occurs[sorted(never_predicted(tokenizer))] = False
    return np.flatnonzero(occurs).tolist()
