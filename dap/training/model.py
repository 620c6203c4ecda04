"""What a training starts from: tokenizer, configuration, what the text says about the model, and the model itself."""

import json
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from dap.errors import UserError, refusals
from dap.training.arguments import CHANGEABLE, CONFIG_DEFAULTS, ModelArguments, given_fields
from modeling_dap import DAPConfig, DAPForPreTraining

logger = logging.getLogger(__name__)


@dataclass
class Start:
    """What a training starts from.

    Attributes:
        name: of the checkpoint, or of the configuration.
        config: of the checkpoint, or of the encoder that is to have random weights.
        goes_on: whether training goes on from a DAP checkpoint with its heads; one of "mlm" is an encoder to the
            other objectives.
        settings: every field of `DAPConfig`: what is given, over the checkpoint's where it goes on, over the defaults.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    tokenizer_name: str
    config: PreTrainedConfig
    goes_on: bool
    settings: dict[str, Any]

    @property
    def predicts(self) -> set[str]:
        """Which of "rtl", "tlm" and "mlm" the objective has, for which a head predicts tokens."""
        return {*self.settings["objective"].split("+")} - {"tr"}


@refusals()
def read_start(args: ModelArguments) -> Start:
    """The tokenizer and the configuration that the arguments name.

    Raises:
        ValueError: no tokenizer, one that pooling and masking cannot use, or a configuration with fewer token ids than
            a tokenizer that is not its own.
    """
    source = {"trust_remote_code": args.trust_remote_code, "revision": args.revision}
    name = args.model_name_or_path or args.config_name
    tokenizer_name = args.tokenizer_name or (str(Path(name).parent) if Path(name).is_file() else name)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, **source)
    config, given = AutoConfig.from_pretrained(name, **source), given_fields(args)
    is_dap = config.model_type == DAPConfig.model_type and args.config_name is None
    goes_on = is_dap and (config.objective != "mlm" or args.objective in (None, "mlm"))
    saved = {name: getattr(config, name) for name in CONFIG_DEFAULTS} if goes_on else {}
    if config.model_type == DAPConfig.model_type and not is_dap:
        config = config.encoder_config  # another encoder of this shape
    start = Start(name, tokenizer, tokenizer_name, config, goes_on, CONFIG_DEFAULTS | saved | given)
    check_tokenizer(start, is_own=args.config_name is None and args.tokenizer_name is None)
    return start


def check_tokenizer(start: Start, is_own: bool) -> None:
    """Raise `ValueError` for a tokenizer without tokens, or one that does not fit the objective or the model."""
    tokenizer, name = start.tokenizer, start.tokenizer_name
    if len(tokenizer) <= len(tokenizer.all_special_ids):  # Transformers makes one without tokens where there is none
        raise UserError(f"{name} holds no tokenizer: name one with --tokenizer_name.")
    ids, special = tokenizer("a").input_ids, tokenizer.all_special_ids
    if ids[0] not in special or ids[-1] not in special:
        raise UserError(
            f"{name} makes {tokenizer.convert_ids_to_tokens(ids)} of 'a', but pooling and masking count on a special "
            "token before and after each sentence: give it a post-processor that adds them."
        )
    if not is_own and start.config.vocab_size < len(tokenizer):
        raise UserError(
            f"{start.name} has vocab_size={start.config.vocab_size}, the tokenizer {name} has {len(tokenizer)} "
            "tokens: give a configuration with as many or more, or another --tokenizer_name."
        )
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

    Args:
        train: tokenised pairs by language.

    Raises:
        ValueError: an argument, or the text, that contradicts the weights of the DAP checkpoint or does nothing.
    """
    given, attention = given_fields(args), {"attn_implementation": args.attn_implementation}
    source = {"trust_remote_code": args.trust_remote_code, "revision": args.revision}
    fields = vocabulary_of_text(args, start, train) | frequencies_of_text(args, start, train)
    if start.goes_on:
        check_changes(start, given, train)
        model = model_class.from_pretrained(start.name, dtype="float32", **attention, **source)
        for key, value in given.items():
            setattr(model.config, key, value)
        model.config.check()
        return model
    mask = start.tokenizer.mask_token_id if start.predicts else None
    given = {"mask_token_id": mask, **given, **fields, **attention}
    if args.config_name is None:
        return model_class.from_encoder(start.name, **given, **source)
    start.config.pad_token_id = start.tokenizer.pad_token_id
    return model_class.from_scratch(start.config, **given)


def check_changes(start: Start, given: Mapping[str, Any], train: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a field or a language that the weights of a DAP checkpoint were not made for."""
    for key, value in given.items():
        saved = getattr(start.config, key)
        if value != saved and key not in CHANGEABLE:
            raise UserError(
                f"{start.name} was trained with {key}={saved!r}, not {value!r}: leave --{key} out (of the recipe, "
                "too), or start from a plain encoder."
            )
    known = start.config.rtl_languages
    if known is not None and (new := sorted(set(train) - set(known))):
        raise UserError(
            f"{start.name} was trained with rtl_direction={start.config.rtl_direction!r} on {' '.join(known)}, the "
            f"text has {' '.join(new)} too: leave it out, or start from a plain encoder."
        )


# ------------------------------------------------------------------------ what the text says about a model


def vocabulary_of_text(args: ModelArguments, start: Start, train: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a new model: the ids that RTL predicts, or the languages whose sources it predicts.

    Raises:
        ValueError: a target vocabulary for a model that has one, or has no use for it.
    """
    direction, file = start.settings["rtl_direction"], args.target_vocabulary_file
    forward = "rtl" in start.predicts and direction == "source-to-target"
    if file is not None and start.goes_on:
        raise UserError(
            f"{start.name} has its target vocabulary already: leave --target_vocabulary_file {file} out, or start "
            "from a plain encoder."
        )
    if file is not None and not forward:
        raise UserError(
            f"--target_vocabulary_file {file} does nothing with objective={start.settings['objective']!r} and "
            f"rtl_direction={direction!r}: it is for RTL from source to target; leave it out."
        )
    if start.goes_on or "rtl" not in start.predicts:
        return {}
    if not forward:
        return {"rtl_languages": sorted(train)}
    if file is not None:
        return {"target_token_ids": read_target_vocabulary(file, start.tokenizer)}
    restricted = args.restrict_target_vocabulary and not streams(train)
    return {"target_token_ids": target_vocabulary(train, start.tokenizer)} if restricted else {}


def frequencies_of_text(args: ModelArguments, start: Start, train: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """How often a new model is to predict each id, where the bias of its prediction head is to start from that.

    Raises:
        ValueError: another `prediction_bias` than there is, or nothing that could be counted.
    """
    if args.prediction_bias == "zeros":
        return {}
    if args.prediction_bias != "frequencies":
        raise UserError(f"prediction_bias={args.prediction_bias!r}: give 'zeros' or 'frequencies'.")
    if streams(train) or not start.predicts:
        why = "a stream cannot be counted" if streams(train) else "objective 'tr' predicts no tokens"
        raise UserError(f"--prediction_bias frequencies does nothing, as {why}: leave it out.")
    if start.goes_on:
        logger.warning("%s has its prediction head already: its bias stays", start.name)
        return {}
    only_rtl = start.predicts == {"rtl"}
    one_side = {"source-to-target": ("target",), "target-to-source": ("source",)} if only_rtl else {}
    sides = one_side.get(start.settings["rtl_direction"], ("source", "target"))
    counts = torch.from_numpy(token_counts(train, start.tokenizer, sides))  # (V,)
    if "rtl" not in start.predicts:  # which alone predicts the token that ends a sentence
        for last in {start.tokenizer.sep_token_id, start.tokenizer.eos_token_id} - {None}:
            counts[last] = 0
    return {"token_counts": counts}


def streams(datasets: Mapping[str, Any]) -> bool:
    """Whether any language is read as it is needed."""
    return any(isinstance(dataset, IterableDataset) for dataset in datasets.values())


def token_counts(
    datasets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase, sides: Sequence[str] = ("target",)
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


def target_vocabulary(datasets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Sorted ids that occur on the target sides of tokenised pairs, SEP included, CLS and padding left out.

    These are the ids that RTL predicts, so its softmax need not run over any other.
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
        size, ids = content["vocab_size"], sorted(set(map(operator.index, content["target_token_ids"])))
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not written by prepare_data.py --target_vocabulary ({error!r})") from error
    if size != len(tokenizer) or not ids or not 0 <= ids[0] <= ids[-1] < size:
        raise UserError(
            f"{path} is for the {size} ids of {content.get('tokenizer')}, the tokenizer here has {len(tokenizer)}: "
            "run prepare_data.py --target_vocabulary with it"
        )
    return ids
