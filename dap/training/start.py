"""What a training starts from: tokenizer, configuration, and a model that is new or goes on."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from dap.errors import UserError, refusals
from dap.training.arguments import CONFIG_DEFAULTS, ModelArguments, given_fields
from modeling_dap import DAPConfig, DAPForPreTraining

# What may change when training goes on from a DAP checkpoint; its weights were made for everything else.
CHANGEABLE = {"tr_temperature", "tr_margin", "tr_bidirectional", "tr_mask_duplicates"}
CHANGEABLE |= {"rtl_ratio", "rtl_weight", "rtl_sampled_negatives", "tlm_probability", "tlm_weight"}
CHANGEABLE |= {"mlm_probability"}


@refusals()
def load_tokenizer(args: ModelArguments) -> PreTrainedTokenizerBase:
    """The tokenizer that is named, or else that of the model or the configuration.

    Raises:
        ValueError: there is none, of which Transformers makes one without tokens, or it adds none to a sentence.
    """
    start = args.model_name_or_path or args.config_name
    beside = str(Path(start).parent) if Path(start).is_file() else start
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name or beside, **source_of(args))
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise UserError(f"{args.tokenizer_name or beside} holds no tokenizer: name one with --tokenizer_name.")
    ids, special = tokenizer("a").input_ids, tokenizer.all_special_ids
    if ids[0] not in special or ids[-1] not in special:
        raise UserError(
            f"{args.tokenizer_name or beside} makes {tokenizer.convert_ids_to_tokens(ids)} of 'a', but pooling and "
            "masking count on a special token before and after each sentence: give it a post-processor that adds them."
        )
    return tokenizer


def mask_token_id(args: ModelArguments, objective: str, tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The id that masked tokens get, None where the objective masks nothing.

    Raises:
        ValueError: it does, and the tokenizer has no such token.
    """
    if objective == "tr":
        return None
    if tokenizer.mask_token_id is None:
        name = args.tokenizer_name or args.model_name_or_path or args.config_name
        raise UserError(
            f"the tokenizer of {name} has no mask token, which objective {objective!r} needs: give another "
            "--tokenizer_name, or --objective tr."
        )
    return tokenizer.mask_token_id


def source_of(args: ModelArguments) -> dict[str, Any]:
    """How everything of the model is to be read."""
    return {"trust_remote_code": args.trust_remote_code, "revision": args.revision}


@refusals()
def load_start_config(args: ModelArguments, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The configuration of the checkpoint to start from, or of the encoder that is to have random weights.

    Raises:
        ValueError: it has fewer token ids than a tokenizer that is not its own.
    """
    name = args.model_name_or_path or args.config_name
    config = AutoConfig.from_pretrained(name, **source_of(args))
    if args.config_name is not None and config.model_type == DAPConfig.model_type:
        config = config.encoder_config  # another encoder of this shape
    apart = args.config_name is not None or args.tokenizer_name is not None
    if apart and config.vocab_size < len(tokenizer):
        raise UserError(
            f"{name} has vocab_size={config.vocab_size}, the tokenizer {args.tokenizer_name or name} has "
            f"{len(tokenizer)} tokens: give a configuration with as many or more, or another --tokenizer_name."
        )
    return config


def goes_on(config: PreTrainedConfig, args: ModelArguments) -> bool:
    """Whether training goes on from a DAP checkpoint with its heads; one of "mlm" is an encoder to the others."""
    if config.model_type != DAPConfig.model_type or args.config_name is not None:
        return False
    return config.objective != "mlm" or args.objective in (None, "mlm")


@refusals()
def load_model(
    args: ModelArguments,
    start: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    fields: dict[str, Any],
    model_class: type[DAPForPreTraining] = DAPForPreTraining,
) -> DAPForPreTraining:
    """A DAP checkpoint to go on with, or a new model around an encoder, or around one from scratch.

    Raises:
        ValueError: an argument, or the tokenizer, that contradicts the weights of the DAP checkpoint.
    """
    attention, wanted = {"attn_implementation": args.attn_implementation}, given_fields(args)
    if goes_on(start, args):
        model = load_dap_checkpoint(args.model_name_or_path, wanted, model_class, **attention, **source_of(args))
        if model.config.mask_token_id not in (None, tokenizer.mask_token_id):
            raise UserError(
                f"{args.model_name_or_path} was trained with mask token {model.config.mask_token_id}, the tokenizer "
                f"{args.tokenizer_name or args.model_name_or_path} has {tokenizer.mask_token_id}: leave "
                "--tokenizer_name out, or start from a plain encoder."
            )
        return model
    objective = (CONFIG_DEFAULTS | wanted)["objective"]
    wanted = {"mask_token_id": mask_token_id(args, objective, tokenizer), **wanted, **fields, **attention}
    if args.config_name is None:
        return model_class.from_encoder(args.model_name_or_path, **wanted, **source_of(args))
    start.pad_token_id = tokenizer.pad_token_id
    return model_class.from_scratch(start, **wanted)


def load_dap_checkpoint(
    name: str, wanted: dict[str, Any], model_class: type[DAPForPreTraining], **options: Any
) -> DAPForPreTraining:
    """A DAP checkpoint with the given fields changed; raises `ValueError` where its weights do not allow that."""
    model = model_class.from_pretrained(name, dtype="float32", **options)
    for key, value in wanted.items():
        saved = getattr(model.config, key)
        if value != saved and key not in CHANGEABLE:
            raise UserError(
                f"{name} was trained with {key}={saved!r}, not {value!r}: leave --{key} out (of the recipe, too), or "
                "start from a plain encoder."
            )
        setattr(model.config, key, value)
    model.config.check()
    return model
