"""What training starts from: the tokenizer, the configuration, and the model with its heads.

`read_start` reads the tokenizer and the configuration, with which the text is tokenised. Then
`load_model` loads the model, which may need the tokenised text for its vocabulary.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from transformers import AutoModel, PreTrainedConfig, PreTrainedTokenizerBase

from configuration_dap import FIELDS
from dap_transformers.encoding.load import load_complete, load_config, longest_input
from dap_transformers.encoding.modules import LibrarySettings, library_length, library_settings
from dap_transformers.errors import UserError, reading, refusals
from dap_transformers.files import read_json
from dap_transformers.tokenizers import (
    load_tokenizer,
    never_predicted,
    require_embeddings,
    require_padding,
)
from dap_transformers.training.arguments import (
    CONFIG_DEFAULTS,
    DAPTrainingArguments,
    PretrainingModelArguments,
    given_fields,
    no_heads,
)
from modeling_dap import DAPConfig, DAPForPreTraining
from objectives_dap import OBJECTIVES, Objective, objectives_of

logger = logging.getLogger(__name__)

#: How the names of a prediction head's weights begin: those of its transform and of its output.
TRANSFORM = ("dense.", "norm.")
OUTPUT = ("bias", "decoder.", "token_ids")
#: What a file of `--target_vocabulary_file` must hold.
OF_VOCABULARY = {"vocab_size": int, "target_token_ids": [int]}


@dataclass
class Start:
    """Everything that is known before the model is loaded: tokenizer, configuration and settings.

    Attributes:
        name: folder or Hub id of the checkpoint or of the configuration.
        tokenizer: the tokenizer of the text.
        tokenizer_name: folder or Hub id of the tokenizer.
        config: configuration of the checkpoint, or of an encoder that gets random weights.
        continues: whether a DAP checkpoint is trained further with its heads. A checkpoint of
            masked language modelling ("mlm") counts as a plain encoder for other objectives.
        settings: the value of every field of `DAPConfig`. Given values come first, then those of
            the checkpoint, then the defaults.
        heads: the model of `--init_heads_from`, or None.
        library: pooling, prefix and length that a sentence-transformers folder gives as defaults.
        positions: largest number of tokens that the encoder has positions for. None if there is
            no limit.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    tokenizer_name: str
    config: PreTrainedConfig
    continues: bool
    settings: dict[str, Any]
    heads: DAPForPreTraining | None
    library: LibrarySettings
    positions: int | None

    @property
    def predicting(self) -> dict[str, type[Objective]]:
        """Return the objectives that predict tokens, by name. The model refuses unknown names."""
        names = self.settings["objective"].split("+")
        kinds = {name: OBJECTIVES[name] for name in names if name in OBJECTIVES}
        return {name: kind for name, kind in kinds.items() if kind.predicts}


# ---------------------------------------------------------------------- tokenizer and configuration


def read_start(args: PretrainingModelArguments) -> Start:
    """Read all that training starts from, except the weights of the model itself.

    This is the tokenizer, the configuration, the settings of a sentence-transformers folder, and
    the model of `--init_heads_from`. Given arguments go before saved settings, and these before
    defaults.

    Args:
        args: arguments of `train_dap.py` that name a checkpoint or a configuration.

    Returns:
        The tokenizer, the configuration and the settings, which `load_model` needs.
    """
    hub = {"trust_remote_code": args.trust_remote_code, "revision": args.revision}
    name = args.model_name_or_path or args.config_name
    tokenizer_name = args.tokenizer_name
    if tokenizer_name is None:
        tokenizer_name = str(Path(name).parent) if Path(name).is_file() else name

    library = LibrarySettings()
    if args.model_name_or_path is not None:
        library = read_library(name, args.revision)

    # A sentence-transformers folder may hold its encoder in a subfolder.
    inside = hub | {"subfolder": library.subfolder}
    config = load_config(name, **inside)
    tokenizer = load_tokenizer(tokenizer_name, **(hub if args.tokenizer_name else inside))
    if args.config_name is not None:
        # Only the shape is wanted, so of a DAP configuration take that of its encoder.
        config = getattr(config, "encoder_config", config)
        config.pad_token_id = tokenizer.pad_token_id

    # Build the encoder without memory for its weights, to read its limits from its shape.
    with torch.device("meta"), reading(f"the weights of {name}"):
        shape = AutoModel.from_config(config, trust_remote_code=args.trust_remote_code)
    if library.pooling is not None:
        length = library_length(library.max_seq_length, shape, tokenizer)
        library = replace(library, max_seq_length=length)
        logger.info(
            "%s: pooling %r, prefix %r, %d tokens, unless an argument says otherwise",
            name,
            library.pooling,
            library.prefix,
            library.max_seq_length,
        )

    is_dap = config.model_type == DAPConfig.model_type
    continues = is_dap and (config.objective != "mlm" or args.objective in (None, "mlm"))
    saved: dict[str, Any] = {}
    if continues:
        saved = {field: getattr(config, field) for field in CONFIG_DEFAULTS}
    elif is_dap:
        saved = {"pooling": config.pooling}
    elif library.pooling is not None:
        saved = {"pooling": library.pooling}

    start = Start(
        name=name,
        tokenizer=tokenizer,
        tokenizer_name=tokenizer_name,
        config=config,
        continues=continues,
        settings=CONFIG_DEFAULTS | saved | given_fields(args),
        heads=None if args.init_heads_from is None else read_heads(args.init_heads_from),
        library=library,
        positions=longest_input(shape),
    )
    check_tokenizer(start)
    return start


def read_library(name: str, revision: str | None) -> LibrarySettings:
    """Read the pooling, prefix and length that a sentence-transformers folder is used with.

    Args:
        name: folder or Hub id of a model.
        revision: commit, tag or branch of the Hub. None is the main branch.

    Returns:
        The settings. All of them have their defaults if the model has no sentence-transformers
        files.
    """
    with reading(f"the sentence-transformers files of {name}"):
        library = library_settings(name, revision) or LibrarySettings()
    if "Dense" in dict(library.after):
        raise UserError(
            f"{name} has the module Dense, which cannot be trained: save its encoder by itself, "
            "and give that"
        )
    return library


def check_tokenizer(start: Start) -> None:
    """Check that the tokenizer fits the objective and the model.

    Args:
        start: what training starts from, with the tokenizer.
    """
    tokenizer = start.tokenizer
    name = start.tokenizer_name
    ids = tokenizer("a").input_ids
    special = tokenizer.all_special_ids
    if ids[0] not in special or ids[-1] not in special:
        raise UserError(
            f"{name} makes {tokenizer.convert_ids_to_tokens(ids)} of 'a', but pooling and masking "
            "need a special token before and after each sentence: give it a post-processor that "
            "adds them."
        )
    require_embeddings(tokenizer, start.config, start.name)
    require_padding(tokenizer, name)
    masks = any(each.masks for each in start.predicting.values())
    if masks and tokenizer.mask_token_id is None:
        raise UserError(
            f"the tokenizer of {name} has no mask token, which objective "
            f"{start.settings['objective']!r} needs: give another --tokenizer_name, or "
            "--objective tr+bow."
        )
    if start.continues and start.config.mask_token_id not in (None, tokenizer.mask_token_id):
        raise UserError(
            f"{start.name} was trained with mask token {start.config.mask_token_id}, the tokenizer "
            f"{name} has {tokenizer.mask_token_id}: leave --tokenizer_name out, or start from a "
            "plain encoder."
        )


@refusals()
def check_settings(start: Start, training: DAPTrainingArguments) -> None:
    """Check the model's settings early, because reading the text may take minutes.

    Args:
        start: what training starts from, with the settings.
        training: arguments of the training. `--freeze_encoder` and `--head_learning_rate` need an
            objective with heads.
    """
    settings = dict(start.settings)
    if settings["rtl_direction"] != "source-to-target" and not settings["rtl_languages"]:
        settings["rtl_languages"] = ["of the text"]  # any name: the text will tell the languages
    encoder = getattr(start.config, "encoder_config", start.config)
    config = DAPConfig(encoder, **settings)
    has_heads = any(objective.heads for objective in objectives_of(config))
    # A teacher's vectors may have another size, and then distillation has a head.
    if has_heads or "distill" in config.objectives:
        return
    if training.freeze_encoder:
        raise no_heads("--freeze_encoder", config)
    if training.head_learning_rate is not None:
        raise no_heads(f"--head_learning_rate {training.head_learning_rate}", config)


# ---------------------------------------------------------------------------------------- the model


@refusals()
def load_model(
    args: PretrainingModelArguments,
    start: Start,
    train: Mapping[str, Any],
    teacher_size: int | None = None,
) -> DAPForPreTraining:
    """Load a DAP checkpoint, or build a new model around an encoder.

    The encoder comes from a checkpoint, or has random weights (`--config_name`). Heads are copied
    from `--init_heads_from` if that is given.

    Args:
        args: the model's arguments of `train_dap.py`.
        start: the result of `read_start` for these arguments.
        train: tokenised pairs by language, map-style or streamed. A new model may take its
            languages, the token ids that it predicts, and their frequencies from them.
        teacher_size: size of the vectors of a teacher (`--distill_from`), or None without one.
    """
    given = given_fields(args)
    attention = {"attn_implementation": args.attn_implementation}
    hub = {"trust_remote_code": args.trust_remote_code, "revision": args.revision}
    from_text = vocabulary_of_text(args, start, train)
    counts = frequencies_of_text(args, start, train).get("token_counts")

    if start.continues:
        check_changes(start, given, train)
        model = load_complete(start.name, DAPForPreTraining, **attention, **hub)
        for key, value in given.items():
            setattr(model.config, key, value)
        model.config.validate()
        own_size = model.config.distill_size or model.config.hidden_size
        if teacher_size not in (None, own_size):
            raise UserError(
                f"{start.name} was trained with a teacher whose vectors have {own_size} numbers, "
                f"those of --distill_from have {teacher_size}: give a teacher of the same size, or "
                "start from a plain encoder."
            )
    else:
        fields = {
            "mask_token_id": start.tokenizer.mask_token_id if start.predicting else None,
            "pooling": start.settings["pooling"],
            **given,
            **from_text,
            "distill_size": teacher_size,
            **attention,
        }
        if args.config_name is not None:
            model = DAPForPreTraining.from_scratch(start.config, **fields)
        else:
            subfolder = start.library.subfolder
            with reading(f"the weights of {start.name}"):
                model = DAPForPreTraining.from_encoder(
                    start.name, subfolder=subfolder, **fields, **hub
                )
        if counts is not None and (args.config_name is not None or model.has_random_head):
            model.prediction_head.start_bias(counts)
        elif counts is not None:
            logger.warning("%s has a masked-LM head: its bias is taken", start.name)

    # Otherwise `Trainer` does this, and prints a notice.
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(start.tokenizer, token) is not None:
            setattr(model.config, token, getattr(start.tokenizer, token))

    if start.heads is not None:
        with refusals(f"--init_heads_from {args.init_heads_from}"):
            taken = copy_heads(model, start.heads)
        logger.info("%s taken from %s", " and ".join(taken), args.init_heads_from)
    return model


def is_changeable(field: str) -> bool:
    """Tell whether a field of `DAPConfig` may change when a checkpoint is trained further.

    The weight of an objective that is not ours is no such field, and may change.
    """
    return field not in FIELDS or FIELDS[field].metadata.get("changeable", False)


def check_changes(start: Start, given: Mapping[str, Any], train: Mapping[str, Any]) -> None:
    """Check that a DAP checkpoint can be trained further with the given settings and languages.

    Args:
        start: what training starts from. Its checkpoint is a DAP checkpoint.
        given: the fields of `DAPConfig` that the user gave, by name.
        train: tokenised pairs by language.
    """
    for key, value in given.items():
        saved = getattr(start.config, key, None)
        if value != saved and not is_changeable(key):
            raise UserError(
                f"{start.name} was trained with {key}={saved!r}, not {value!r}: leave --{key} out "
                "(also of the recipe), or start from a plain encoder."
            )
    check_languages(start.name, start.config, train)


def check_languages(name: str, config: DAPConfig, train: Mapping[str, Any]) -> None:
    """Check that the RTL head has an embedding for every language of the text, if it needs one.

    It needs language embeddings only if it predicts source tokens. Otherwise
    `config.rtl_languages` is None, and nothing is checked.

    Args:
        name: folder or Hub id of the checkpoint with the RTL head, for the message.
        config: the checkpoint's configuration.
        train: tokenised pairs by language.
    """
    known = config.rtl_languages
    if known is None:
        return
    new = sorted(set(train) - set(known))
    if new:
        raise UserError(
            f"{name} was trained with rtl_direction={config.rtl_direction!r} on {' '.join(known)}, "
            f"but the text also has {' '.join(new)}: leave it out, or start from a plain encoder."
        )


# ------------------------------------------------------------------------ heads of another training


def read_heads(name: str) -> DAPForPreTraining:
    """Load the DAP checkpoint that heads are copied from.

    Args:
        name: folder or Hub id.

    Returns:
        The whole model, with its encoder.
    """
    kind = load_config(name).model_type
    if kind != DAPConfig.model_type:
        raise UserError(
            f"--init_heads_from {name}: a plain {kind!r} checkpoint: train heads by "
            "configs/head.yaml."
        )
    return load_complete(name, DAPForPreTraining)


def copy_heads(model: DAPForPreTraining, other: DAPForPreTraining) -> list[str]:
    """Copy the weights of all heads that both models have.

    A prediction head consists of a transform and an output. The transform reads either token
    states (RTL, TLM, MLM) or sentence vectors (BOW), and is copied to the transform of the same
    kind. BOW can also start from a transform for token states, and then has to learn. If the
    encoders have different word embeddings, a warning says so.

    Args:
        model: the model to copy into.
        other: the model to copy from.

    Returns:
        The names of the copied heads.
    """
    copied = heads_to_copy(model, other)
    taken = [name for name, _ in model.named_children() if name in copied]
    if not taken:
        raise UserError(
            f"objective {other.config.objective!r} there has no head that objective "
            f"{model.config.objective!r} here has: leave it out."
        )
    check_same_tasks(model, other, taken)
    own = transforms(model)
    for name in taken:
        parts = TRANSFORM if name in own.values() else ("",)
        copy_head(name, getattr(model, name), copied[name], parts)
    if set(taken) & set(own.values()):
        copy_head("prediction_head", model.prediction_head, other.prediction_head, OUTPUT)
    if own.keys() <= transforms(other).keys():
        model.has_random_head = False

    words = other.get_input_embeddings().weight
    if not torch.equal(words, model.get_input_embeddings().weight):
        logger.warning(
            "the heads were trained with another encoder than this one, so they may have to learn "
            "anew"
        )
    return taken


def heads_to_copy(model: DAPForPreTraining, other: DAPForPreTraining) -> dict[str, torch.nn.Module]:
    """Find the head of another model from which each head of a model can be copied.

    If a head reads sentence vectors (BOW) and the other model has none of this kind, its head for
    token states is taken.

    Args:
        model: the model to copy into.
        other: the model to copy from.

    Returns:
        Name of a head of `model` -> the head of `other`. Heads without a counterpart are left out.
    """
    found = {}
    for name in ("rtl_head", "projection", "teacher_projection"):
        if None not in (getattr(model, name), getattr(other, name)):
            found[name] = getattr(other, name)

    theirs = transforms(other)
    for kind, name in transforms(model).items():
        if kind in theirs:
            found[name] = getattr(other, theirs[kind])
        elif kind == "sentences" and theirs:
            found[name] = getattr(other, theirs["tokens"])
    return found


def transforms(model: DAPForPreTraining) -> dict[str, str]:
    """Return which head of a model transforms token states, and which sentence vectors.

    BOW reads sentence vectors, all other objectives that predict tokens read token states. If a
    model has both, BOW has a head of its own. Otherwise its only kind uses `prediction_head`.

    Returns:
        Maps "tokens" and "sentences" to the name of the head, "prediction_head" or
        "bow_transform". A kind that the model does not need is left out.
    """
    found = {}
    if model.prediction_head is None:
        return found
    if any(each.predicts and each.name != "bow" for each in model.objectives):
        found["tokens"] = "prediction_head"
    if "bow" in model.config.objectives:
        has_own = model.bow_transform is not None
        found["sentences"] = "bow_transform" if has_own else "prediction_head"
    return found


def copy_head(
    name: str, head: torch.nn.Module, other: torch.nn.Module, parts: tuple[str, ...] = ("",)
) -> None:
    """Copy the weights of one head into another, or only some of them.

    Args:
        name: the head's name, for the error message.
        head: the head to copy into.
        other: the head to copy from.
        parts: only weights whose names begin with one of these texts are copied. The default
            copies all.
    """
    own = {key: value for key, value in head.state_dict().items() if key.startswith(parts)}
    theirs = {key: value for key, value in other.state_dict().items() if key.startswith(parts)}
    for key in {**theirs, **own}:
        here = tuple(own[key].shape) if key in own else None
        there = tuple(theirs[key].shape) if key in theirs else None
        if here != there:
            raise UserError(
                f"{name}.{key} has shape {there} there, {here} here: give the encoder of that run."
            )
    head.load_state_dict(theirs, strict=False)


def check_same_tasks(
    model: DAPForPreTraining, other: DAPForPreTraining, taken: Sequence[str]
) -> None:
    """Check that the heads to copy were made for the same prediction task in both models.

    Args:
        model: the model to copy into.
        other: the model to copy from.
        taken: names of the heads to copy.
    """
    fields = []
    if "rtl_head" in taken:
        rtl_fields = [field for field in CONFIG_DEFAULTS if field.startswith("rtl_")]
        fields = [field for field in rtl_fields if not is_changeable(field)]
    elif {"prediction_head", "bow_transform"} & set(taken):
        fields = ["rtl_tied"]  # decides whether the prediction head has a matrix of its own
    for field in fields:
        theirs = getattr(other.config, field)
        own = getattr(model.config, field)
        if theirs != own:
            raise UserError(f"{field}={theirs!r} there, but {own!r} here: give --{field} {theirs}.")

    if {"prediction_head", "bow_transform"} & set(taken):
        theirs = other.prediction_head.token_ids
        own = model.prediction_head.token_ids
        if theirs is None and own is None:
            return
        if theirs is None or own is None or not torch.equal(theirs, own):
            there = describe_vocabulary(other)
            here = describe_vocabulary(model)
            raise UserError(
                f"its heads predict {there}, these {here}{' of other ids' * (there == here)}: "
                "leave --target_vocabulary_file and --restrict_target_vocabulary out, or train "
                "its heads with the same."
            )


def describe_vocabulary(model: DAPForPreTraining) -> str:
    """Return a text for errors: the model's `target_vocab_size`, or "the whole vocabulary"."""
    size = model.config.target_vocab_size
    return f"target_vocab_size={size}" if size else "the whole vocabulary"


# ------------------------------------------------------------------------------- read from the text


def vocabulary_of_text(
    args: PretrainingModelArguments, start: Start, train: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of a new model that depend on the training text.

    Args:
        args: the model's arguments of `train_dap.py`.
        start: what training starts from.
        train: tokenised pairs by language, map-style or streamed.

    Returns:
        One of

        - `{"rtl_languages": language codes}`, if RTL predicts source tokens,
        - `{"target_token_ids": ids}`, if only target tokens are predicted, from a restricted
          vocabulary. The ids come from `--target_vocabulary_file`, from `--init_heads_from` or
          from the text.
        - `{}` otherwise, such as for a DAP checkpoint that is trained further, or for streamed
          text.
    """
    predicts_targets = "targets" in {each.predicts for each in start.predicting.values()}
    predicts_only_targets = predicts_targets and (
        "rtl" not in start.predicting or start.settings["rtl_direction"] == "source-to-target"
    )
    file = args.target_vocabulary_file
    if file is not None:
        check_target_vocabulary(file, start, predicts_only_targets)

    if start.continues or not predicts_targets:
        return {}
    heads = start.heads
    if heads is not None and all(each.predicts != "targets" for each in heads.objectives):
        heads = None
    if not predicts_only_targets:
        if heads is not None:
            check_languages(args.init_heads_from, heads.config, train)
        languages = None if heads is None else heads.config.rtl_languages
        return {"rtl_languages": languages or sorted(train)}
    if file is not None:
        return {"target_token_ids": read_target_vocabulary(file, start.tokenizer)}
    if not args.restrict_target_vocabulary:
        return {}
    if heads is not None:
        ids = heads.prediction_head.token_ids
        return {} if ids is None else {"target_token_ids": ids.tolist()}
    if is_streamed(train):
        return {}
    return {"target_token_ids": target_vocabulary(train, start.tokenizer)}


def check_target_vocabulary(file: str, start: Start, has_use: bool) -> None:
    """Check that `--target_vocabulary_file` would have an effect on the model.

    Args:
        file: the value of `--target_vocabulary_file`.
        start: what training starts from.
        has_use: whether the objectives predict only target tokens.
    """
    if start.continues:
        raise UserError(
            f"{start.name} has its target vocabulary already: leave --target_vocabulary_file "
            f"{file} out, or start from a plain encoder."
        )
    if not has_use:
        raise UserError(
            f"--target_vocabulary_file {file} does nothing with "
            f"objective={start.settings['objective']!r} and "
            f"rtl_direction={start.settings['rtl_direction']!r}: it is for RTL from source to "
            "target, and for BOW; leave it out."
        )


def frequencies_of_text(
    args: PretrainingModelArguments, start: Start, train: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Count the tokens that a new prediction head predicts, for `--prediction_bias frequencies`.

    Args:
        args: the model's arguments of `train_dap.py`.
        start: what training starts from. Its objectives decide which sides are counted.
        train: tokenised pairs by language.

    Returns:
        `{"token_counts": counts}`, the number of occurrences of each of V token ids, (V,). Tokens
        that are never predicted count 0: CLS, padding and, without RTL, the end of a sentence. An
        empty dictionary if the bias starts from zeros or comes from a checkpoint.
    """
    if args.prediction_bias == "zeros":
        return {}
    if args.prediction_bias != "frequencies":
        raise UserError(f"prediction_bias={args.prediction_bias!r}: give 'zeros' or 'frequencies'.")
    why = None
    objective = start.settings["objective"]
    objectives = objectives_of(DAPConfig(objective=objective))
    if is_streamed(train):
        why = "a stream cannot be counted"
    elif not any("prediction_head" in each.heads for each in objectives):
        why = f"objective {objective!r} has no prediction head"
    if why is not None:
        raise UserError(f"--prediction_bias frequencies does nothing, as {why}: leave it out.")
    if start.continues or (start.heads is not None and start.heads.prediction_head is not None):
        has = start.name if start.heads is None else args.init_heads_from
        logger.warning("%s has its prediction head already: its bias stays", has)
        return {}

    sides = predicted_sides(start)
    counts = torch.from_numpy(count_tokens(train, start.tokenizer, sides))  # (V,)
    if "rtl" not in start.predicting:
        # Only RTL predicts the token that ends a sentence.
        for last in (start.tokenizer.sep_token_id, start.tokenizer.eos_token_id):
            if last is not None:
                counts[last] = 0
    return {"token_counts": counts}


def predicted_sides(start: Start) -> tuple[str, ...]:
    """Return the sides of a pair whose tokens are predicted: "source", "target" or both.

    BOW predicts targets. RTL predicts the side or sides that the setting `rtl_direction` names. All
    other objectives that predict tokens, such as MLM, predict both sides.

    Args:
        start: what training starts from. At least one of its objectives must predict tokens.
    """
    if any(each.predicts == "tokens" for each in start.predicting.values()):
        return ("source", "target")
    direction = start.settings["rtl_direction"]
    if "rtl" not in start.predicting or direction == "source-to-target":
        return ("target",)
    if direction == "target-to-source":
        return ("source",)
    return ("source", "target")


def is_streamed(datasets: Mapping[str, Any]) -> bool:
    """Tell whether any language's text is streamed."""
    return any(isinstance(dataset, IterableDataset) for dataset in datasets.values())


def count_tokens(
    datasets: Mapping[str, Dataset],
    tokenizer: PreTrainedTokenizerBase,
    sides: Sequence[str] = ("target",),
) -> np.ndarray:
    """Count how often each token id occurs in tokenised pairs.

    Args:
        datasets: tokenised pairs by language, map-style.
        tokenizer: the tokenizer of the pairs, with V token ids.
        sides: "source", "target" or both: where to count.

    Returns:
        Counts (V,) int64, over all languages. Tokens that are never predicted, CLS and padding,
        count 0.
    """
    if is_streamed(datasets):
        raise UserError(
            "the tokens of a stream are unknown before it ends: count a sample of the text, or do "
            "not stream"
        )
    counts = np.zeros(len(tokenizer), dtype=np.int64)  # (V,)
    columns = [f"{side}_input_ids" for side in sides]
    for dataset in datasets.values():
        for batch in dataset.select_columns(columns).with_format("arrow").iter(100_000):
            for name in columns:
                ids = batch[name].combine_chunks().flatten().to_numpy()
                counts += np.bincount(ids, minlength=len(counts))
    counts[sorted(never_predicted(tokenizer))] = 0
    return counts


def target_vocabulary(
    datasets: Mapping[str, Dataset], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Return the sorted token ids that occur in the targets, without CLS and padding.

    If RTL and BOW predict only these ids, their softmax is smaller.

    Args:
        datasets: tokenised pairs by language, map-style.
        tokenizer: the tokenizer of the pairs.
    """
    return np.flatnonzero(count_tokens(datasets, tokenizer)).tolist()


def read_target_vocabulary(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Read a target vocabulary: the sorted token ids that RTL and BOW may predict.

    Args:
        path: JSON file, as `prepare-data --target_vocabulary` writes it.
        tokenizer: the tokenizer of the training. It must have as many ids as the one that made
            the file.
    """
    try:
        content = read_json(path)
    except UserError as error:
        raise UserError(
            f"{error}; give a file that prepare-data --target_vocabulary wrote"
        ) from error
    size = content["vocab_size"]
    ids = sorted(set(content["target_token_ids"]))
    if size != len(tokenizer) or not ids or ids[0] < 0 or ids[-1] >= size:
        raise UserError(
            f"{path} is for the {size} ids of {content.get('tokenizer')}, the tokenizer here has "
            f"{len(tokenizer)}: run prepare-data --target_vocabulary with it"
        )
    return ids
