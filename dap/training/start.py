"""What a training starts from: tokenizer, configuration, what the text says about the model, and the model itself."""

import json
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoModel, PreTrainedConfig, PreTrainedTokenizerBase

from dap.encoding import (
    LibrarySettings,
    NeedsSentenceTransformers,
    library_length,
    library_settings,
    load_complete,
    load_config,
    longest_input,
)
from dap.errors import UserError, loading, refusals
from dap.tokenizers import load_tokenizer, require_embeddings, require_padding
from dap.training.training_arguments import (
    CHANGEABLE,
    CONFIG_DEFAULTS,
    ModelArguments,
    given_fields,
)
from heads_dap import OF_TARGETS
from modeling_dap import DAPConfig, DAPForPreTraining

logger = logging.getLogger(__name__)

#: Attributes of `DAPForPreTraining`, None where not used.
HEADS = ("rtl_head", "prediction_head", "bow_transform", "projection")


@dataclass
class Start:
    """What a training starts from.

    Attributes:
        name: of the checkpoint, or of the configuration.
        config: of the checkpoint, or of the encoder that is to have random weights.
        goes_on: whether training goes on from a DAP checkpoint with its heads; one of "mlm" is an encoder to the
            other objectives.
        settings: every field of `DAPConfig`: what is given, over the checkpoint's where it goes on, over the defaults.
        heads: the model of `--init_heads_from`, if given.
        library: what a sentence-transformers folder says about itself; its pooling, prefix and length are defaults.
        positions: tokens that the encoder's table of positions has room for, None where it has no table.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    tokenizer_name: str
    config: PreTrainedConfig
    goes_on: bool
    settings: dict[str, Any]
    heads: DAPForPreTraining | None
    library: LibrarySettings
    positions: int | None

    @property
    def predicts(self) -> set[str]:
        """Which objectives there are but "tr": a head predicts tokens for them."""
        return {*self.settings["objective"].split("+")} - {"tr"}


def read_start(args: ModelArguments) -> Start:
    """The tokenizer and the configuration that the arguments name.

    Raises:
        ValueError: no tokenizer, one that pooling and masking cannot use, or a configuration with fewer token ids.
    """
    hub = {"trust_remote_code": args.trust_remote_code, "revision": args.revision}
    name = args.model_name_or_path or args.config_name
    tokenizer_name = args.tokenizer_name or (
        str(Path(name).parent) if Path(name).is_file() else name
    )
    library = (
        LibrarySettings() if args.model_name_or_path is None else read_library(name, args.revision)
    )
    inside = hub | {"subfolder": library.subfolder}
    config, given = load_config(name, **inside), given_fields(args)
    tokenizer = load_tokenizer(tokenizer_name, **(hub if args.tokenizer_name else inside))
    if args.config_name is not None:  # another encoder of this shape
        config = getattr(config, "encoder_config", config)
        config.pad_token_id = tokenizer.pad_token_id
    with torch.device("meta"), loading("weights", name):  # for its shape alone
        shape = AutoModel.from_config(config, trust_remote_code=args.trust_remote_code)
    if library.pooling is not None:
        library = replace(
            library, max_seq_length=library_length(library.max_seq_length, shape, tokenizer)
        )
        taken = name, library.pooling, library.prefix, library.max_seq_length
        logger.info(
            "%s: pooling %r, prefix %r, %d tokens, where no argument says otherwise", *taken
        )
    is_dap = config.model_type == DAPConfig.model_type
    goes_on = is_dap and (config.objective != "mlm" or args.objective in (None, "mlm"))
    saved = {} if library.pooling is None else {"pooling": library.pooling}
    if is_dap:
        saved = {
            name: getattr(config, name) for name in (CONFIG_DEFAULTS if goes_on else ["pooling"])
        }
    heads = None if args.init_heads_from is None else read_heads(args.init_heads_from)
    settings, longest = CONFIG_DEFAULTS | saved | given, longest_input(shape)
    start = Start(
        name, tokenizer, tokenizer_name, config, goes_on, settings, heads, library, longest
    )
    check_tokenizer(start)
    return start


def read_library(name: str, revision: str | None) -> LibrarySettings:
    """What a sentence-transformers folder says about itself, if it is one.

    Raises:
        ValueError: it has modules, or a pooling, that cannot be trained.
    """
    try:
        with loading("sentence-transformers files", name):
            return library_settings(name, revision) or LibrarySettings()
    except NeedsSentenceTransformers as reason:
        raise UserError(
            f"{reason}, which cannot be trained: give its encoder, saved by itself"
        ) from reason


def check_tokenizer(start: Start) -> None:
    """Raise `ValueError` for a tokenizer that does not fit the objective or the model."""
    tokenizer, name = start.tokenizer, start.tokenizer_name
    ids, special = tokenizer("a").input_ids, tokenizer.all_special_ids
    if ids[0] not in special or ids[-1] not in special:
        raise UserError(
            f"{name} makes {tokenizer.convert_ids_to_tokens(ids)} of 'a', but pooling and masking count on a special "
            "token before and after each sentence: give it a post-processor that adds them."
        )
    require_embeddings(tokenizer, start.config, start.name)
    require_padding(tokenizer, name)
    if start.predicts and tokenizer.mask_token_id is None:
        raise UserError(
            f"the tokenizer of {name} has no mask token, which objective {start.settings['objective']!r} needs: give "
            "another --tokenizer_name, or --objective tr."
        )
    if start.goes_on and start.config.mask_token_id not in (None, tokenizer.mask_token_id):
        raise UserError(
            f"{start.name} was trained with mask token {start.config.mask_token_id}, the tokenizer {name} has "
            f"{tokenizer.mask_token_id}: leave --tokenizer_name out, or start from a plain encoder."
        )


@refusals()
def load_model(
    args: ModelArguments,
    start: Start,
    train: Mapping[str, Any],
    model_class: type[DAPForPreTraining] = DAPForPreTraining,
) -> DAPForPreTraining:
    """A DAP checkpoint to go on with, or a new model around an encoder, or around one from scratch.

    Its heads are those of `--init_heads_from`, where that is given.

    Args:
        train: tokenised pairs by language.

    Raises:
        ValueError: an argument, or the text, that contradicts the weights of a DAP checkpoint or does nothing.
    """
    given, attention = given_fields(args), {"attn_implementation": args.attn_implementation}
    hub = {"trust_remote_code": args.trust_remote_code, "revision": args.revision}
    fields = vocabulary_of_text(args, start, train) | frequencies_of_text(args, start, train)
    if start.goes_on:
        check_changes(start, given, train)
        model = load_complete(start.name, model_class, **attention, **hub)
        for key, value in given.items():
            setattr(model.config, key, value)
        model.config.check()
    else:
        mask = start.tokenizer.mask_token_id if start.predicts else None
        given = {
            "mask_token_id": mask,
            "pooling": start.settings["pooling"],
            **given,
            **fields,
            **attention,
        }
        if args.config_name is None:
            model = model_class.from_encoder(
                start.name, subfolder=start.library.subfolder, **given, **hub
            )
        else:
            model = model_class.from_scratch(start.config, **given)
    if start.heads is not None:
        with refusals(f"--init_heads_from {args.init_heads_from}"):
            taken = take_heads(model, start.heads)
        logger.info("%s taken from %s", " and ".join(taken), args.init_heads_from)
    return model


def check_changes(start: Start, given: Mapping[str, Any], train: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a field or a language that the weights of a DAP checkpoint were not made for."""
    for key, value in given.items():
        saved = getattr(start.config, key)
        if value != saved and key not in CHANGEABLE:
            raise UserError(
                f"{start.name} was trained with {key}={saved!r}, not {value!r}: leave --{key} out (of the recipe, "
                "too), or start from a plain encoder."
            )
    check_languages(start.name, start.config, train)


def check_languages(name: str, config: DAPConfig, train: Mapping[str, Any]) -> None:
    """Raise `ValueError` for text in a language for which the heads of a DAP checkpoint have no embedding."""
    known = config.rtl_languages
    if known is not None and (new := sorted(set(train) - set(known))):
        raise UserError(
            f"{name} was trained with rtl_direction={config.rtl_direction!r} on {' '.join(known)}, the "
            f"text has {' '.join(new)} too: leave it out, or start from a plain encoder."
        )


# ------------------------------------------------------------------------ heads of another training


def read_heads(name: str) -> DAPForPreTraining:
    """The DAP checkpoint, a folder or a Hub id, whose heads a new model is to have.

    Raises:
        ValueError: no DAP checkpoint, or one without the weights of its heads.
    """
    kind = load_config(name).model_type
    if kind != DAPConfig.model_type:
        raise UserError(
            f"--init_heads_from {name}: a plain {kind!r} checkpoint: train heads by configs/head.yaml."
        )
    return load_complete(name, DAPForPreTraining)


def take_heads(model: DAPForPreTraining, other: DAPForPreTraining) -> list[str]:
    """Give a model the weights of those heads that both models have; their names.

    Raises:
        ValueError: no such head, or one that was made for another K, direction, target vocabulary or encoder.
    """
    taken = [head for head in HEADS if None not in (getattr(model, head), getattr(other, head))]
    if not taken:
        theirs, own = other.config.objective, model.config.objective
        raise UserError(
            f"objective {theirs!r} there has no head that objective {own!r} here has: leave it out."
        )
    check_same_tasks(model, other, taken)
    for head in taken:
        weights, own = getattr(other, head).state_dict(), getattr(model, head).state_dict()
        for name in {**weights, **own}:
            there, here = (
                tuple(each[name].shape) if name in each else None for each in (weights, own)
            )
            if there != here:
                raise UserError(
                    f"{head}.{name} has shape {there} there, {here} here: give the encoder of that run."
                )
        getattr(model, head).load_state_dict(weights)
    if not torch.equal(other.get_input_embeddings().weight, model.get_input_embeddings().weight):
        logger.warning(
            "the encoder is not the one that the heads were trained around: they may have to learn anew"
        )
    return taken


def check_same_tasks(
    model: DAPForPreTraining, other: DAPForPreTraining, taken: Sequence[str]
) -> None:
    """Raise `ValueError` where the heads to take and the model's own are of another shape or predict other ids."""
    for field in CONFIG_DEFAULTS if "rtl_head" in taken else ():
        theirs, own = getattr(other.config, field), getattr(model.config, field)
        if field.startswith("rtl_") and field not in CHANGEABLE and theirs != own:
            raise UserError(f"{field}={theirs!r} there, but {own!r} here: give --{field} {theirs}.")
    if "prediction_head" not in taken:
        return
    theirs, own = (each.prediction_head.token_ids for each in (other, model))
    if (theirs is None) != (own is None) or (theirs is not None and not torch.equal(theirs, own)):
        sizes = (each.config.target_vocab_size for each in (other, model))
        there, here = (
            f"target_vocab_size={size}" if size else "the whole vocabulary" for size in sizes
        )
        raise UserError(
            f"its heads predict {there}, these {here}{' of other ids' * (there == here)}: leave "
            "--target_vocabulary_file and --restrict_target_vocabulary out, or train its heads with the same."
        )


# ------------------------------------------------------------------------ what the text says about a model


def vocabulary_of_text(
    args: ModelArguments, start: Start, train: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of a new model: the target vocabulary, or the languages whose sources it predicts.

    Raises:
        ValueError: a target vocabulary for a model that has one, or has no use for it.
    """
    heads = (
        None
        if start.heads is None or not start.heads.config.objectives & OF_TARGETS
        else start.heads
    )
    direction, file = start.settings["rtl_direction"], args.target_vocabulary_file
    of_targets = bool(start.predicts & OF_TARGETS) and (
        "rtl" not in start.predicts or direction == "source-to-target"
    )
    if file is not None and start.goes_on:
        raise UserError(
            f"{start.name} has its target vocabulary already: leave --target_vocabulary_file {file} out, or start "
            "from a plain encoder."
        )
    if file is not None and not of_targets:
        raise UserError(
            f"--target_vocabulary_file {file} does nothing with objective={start.settings['objective']!r} and "
            f"rtl_direction={direction!r}: it is for RTL from source to target, and for BOW; leave it out."
        )
    if start.goes_on or not start.predicts & OF_TARGETS:
        return {}
    if not of_targets:
        if heads is not None:
            check_languages(args.init_heads_from, heads.config, train)
        return {"rtl_languages": (heads and heads.config.rtl_languages) or sorted(train)}
    if file is not None:
        return {"target_token_ids": read_target_vocabulary(file, start.tokenizer)}
    if heads is not None and args.restrict_target_vocabulary:
        ids = heads.prediction_head.token_ids
        return {} if ids is None else {"target_token_ids": ids.tolist()}
    restricted = args.restrict_target_vocabulary and not streams(train)
    return {"target_token_ids": target_vocabulary(train, start.tokenizer)} if restricted else {}


def frequencies_of_text(
    args: ModelArguments, start: Start, train: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """How often a new model is to predict each id, where the bias of its prediction head is to start from that.

    Raises:
        ValueError: another `prediction_bias` than there is, or nothing that could be counted.
    """
    if args.prediction_bias == "zeros":
        return {}
    if args.prediction_bias != "frequencies":
        raise UserError(f"prediction_bias={args.prediction_bias!r}: give 'zeros' or 'frequencies'.")
    if streams(train) or not start.predicts:
        why = (
            "a stream cannot be counted" if streams(train) else "objective 'tr' predicts no tokens"
        )
        raise UserError(f"--prediction_bias frequencies does nothing, as {why}: leave it out.")
    if start.goes_on or (start.heads is not None and start.heads.prediction_head is not None):
        has = start.name if start.heads is None else args.init_heads_from
        logger.warning("%s has its prediction head already: its bias stays", has)
        return {}
    direction = start.settings["rtl_direction"] if "rtl" in start.predicts else "source-to-target"
    one_side = (
        {"source-to-target": ("target",), "target-to-source": ("source",)}
        if start.predicts <= OF_TARGETS
        else {}
    )
    sides = one_side.get(direction, ("source", "target"))
    counts = torch.from_numpy(token_counts(train, start.tokenizer, sides))  # (V,)
    if "rtl" not in start.predicts:  # which alone predicts the token that ends a sentence
        for last in {start.tokenizer.sep_token_id, start.tokenizer.eos_token_id} - {None}:
            counts[last] = 0
    return {"token_counts": counts}


def streams(datasets: Mapping[str, Any]) -> bool:
    """Whether any language is read as it is needed."""
    return any(isinstance(dataset, IterableDataset) for dataset in datasets.values())


def token_counts(
    datasets: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    sides: Sequence[str] = ("target",),
) -> np.ndarray:
    """How often each id occurs on these sides of tokenised pairs, (V,) int64; 0 for CLS and padding, SEP is counted.

    Raises:
        ValueError: the datasets stream: their tokens are known only after a whole pass.
    """
    if streams(datasets):
        raise UserError(
            "the tokens of a stream are unknown before it ends: count a map-style sample, or do not stream"
        )
    counts = np.zeros(len(tokenizer), dtype=np.int64)  # (V,)
    columns = [f"{side}_input_ids" for side in sides]
    for dataset in datasets.values():
        for batch in dataset.select_columns(columns).with_format("arrow").iter(100_000):
            for name in columns:
                ids = batch[name].combine_chunks().flatten().to_numpy()
                counts += np.bincount(ids, minlength=len(counts))
    for token in {tokenizer.cls_token_id, tokenizer.pad_token_id} - {tokenizer.sep_token_id, None}:
        counts[token] = 0
    return counts


def target_vocabulary(
    datasets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Sorted ids that occur on the target sides of tokenised pairs, SEP included, CLS and padding left out.

    These are the ids that RTL and BOW predict, so their softmax need not run over any other.
    """
    return np.flatnonzero(token_counts(datasets, tokenizer)).tolist()


def read_target_vocabulary(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Sorted ids of the file that `prepare_data.py --target_vocabulary` writes.

    Raises:
        ValueError: not such a file, or one of another tokenizer.
        FileNotFoundError: no such file.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        size, ids = (
            content["vocab_size"],
            sorted(set(map(operator.index, content["target_token_ids"]))),
        )
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: not written by prepare_data.py --target_vocabulary ({error!r})"
        ) from error
    if size != len(tokenizer) or not ids or not 0 <= ids[0] <= ids[-1] < size:
        raise UserError(
            f"{path} is for the {size} ids of {content.get('tokenizer')}, the tokenizer here has {len(tokenizer)}: "
            "run prepare_data.py --target_vocabulary with it"
        )
    return ids
