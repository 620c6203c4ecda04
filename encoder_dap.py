"""The encoder inside a DAP model: which encoders are supported, and how they are loaded.

The file ships with every checkpoint, beside modeling_dap.py. How an encoder runs without computing
padding is in states_dap.py.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pickle import UnpicklingError
from typing import Any

from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

try:
    from .configuration_dap import DAPConfig
except ImportError:  # a checkout, where these files are top-level modules
    from configuration_dap import DAPConfig

#: Types of encoders with which every objective is tested.
TESTED = ("bert", "deberta-v2", "distilbert", "modernbert", "roberta", "xlm-roberta")


# ------------------------------------------------------------------------------------------- which


def require_encoder(config: PreTrainedConfig, name: str) -> None:
    """Raise `ValueError` unless `config` describes a bidirectional encoder with a masked-LM class.

    The encoder must also be part of Transformers, and no DAP checkpoint.

    Args:
        config: configuration of the encoder.
        name: what to call it in the message: a folder, a Hub id or an argument.
    """
    remedy = "Give an encoder such as bert, xlm-roberta, roberta, deberta-v2 or modernbert."
    kind = f"model_type {config.model_type!r}"
    if config.model_type == "dap":
        raise ValueError(
            f"{name} is a DAP checkpoint already: load it with DAPForPreTraining.from_pretrained."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder ({kind}). {remedy}")
    if type(config).__module__.startswith("transformers_modules."):
        raise ValueError(
            f"{name} ({kind}) runs code of its own, but a DAP checkpoint can only hold an encoder "
            f"that is part of Transformers. {remedy}"
        )
    if getattr(config, "is_decoder", False) or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(f"{name} is not a bidirectional encoder ({kind}). {remedy}")


@contextmanager
def refusals_of_encoder(name: str, config: DAPConfig) -> Iterator[None]:
    """Within this block, turn any error of an untested encoder class into a `ValueError`.

    The message names the encoder's type, the objective and a remedy. Errors of a class in `TESTED`
    are bugs of this project, and pass unchanged.

    Args:
        name: what to call the encoder in the message: a folder, a Hub id or an argument.
        config: configuration of the DAP model.
    """
    try:
        yield
    except Exception as error:  # a class that nobody tested may fail in any way
        if config.encoder_config.model_type in TESTED:
            raise
        reason = " ".join(str(error).split())
        remedy = "use objective='tr', or another encoder"
        if config.objectives == {"tr"}:
            remedy = "give another encoder"
        raise ValueError(
            f"{name}: objective {config.objective!r} does not work with an encoder of model_type "
            f"{config.encoder_config.model_type!r} ({reason}): {remedy}."
        ) from error


# -------------------------------------------------------------------------------------------- load


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """Return an encoder with random weights, and without a pooler, which nothing would train.

    Args:
        config: configuration of the encoder.
    """
    accepted = inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in accepted else {}
    encoder = AutoModel.from_config(config, **options)
    if "attention_mask" not in inspect.signature(encoder.forward).parameters:
        raise ValueError("it takes no attention_mask, so that padding would change the embeddings")
    return encoder


def load_masked_lm(
    name_or_path: str, kind: type = AutoModelForMaskedLM, **options: Any
) -> tuple[PreTrainedModel, set[str]]:
    """Load a checkpoint, as a masked-LM model by default, and find the weights that it lacks.

    Args:
        name_or_path: folder or Hub id.
        kind: class whose `from_pretrained` loads it.
        options: arguments of `from_pretrained`.

    Returns:
        The model, and the names of the weights that the checkpoint lacks. These weights are random
        in the model. No warning is printed, so the caller should report them.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, report = kind.from_pretrained(name_or_path, output_loading_info=True, **options)
    except Exception as error:  # libraries raise anything for damaged files
        raise ValueError(
            f"the weights of {name_or_path} cannot be loaded ({_reason(error)}): "
            "repair the files, or give another checkpoint"
        ) from error
    finally:
        logging.set_verbosity(verbosity)

    missing = set(report["missing_keys"])
    prefix = model.base_model_prefix + "."  # files of plain encoders have names without it
    lost = sorted(key.removeprefix(prefix) for key in missing if key.startswith(prefix))
    if lost:
        raise ValueError(
            f"{name_or_path} lacks {len(lost)} weights of its encoder, the first is {lost[0]!r}: "
            "give a complete checkpoint."
        )
    return model, missing


def _reason(error: Exception) -> str:
    """Return on one line why weights could not be loaded, for use inside an error message.

    It is the error's type and its whole message. A damaged pickle and wrong shapes have a text of
    our own, because the advice in the original message does not fit here.
    """
    if isinstance(error, UnpicklingError):  # its own text recommends to run the pickle
        return "a pickle that is damaged or would run code"
    if "ignore_mismatched_sizes" in str(error):
        return "their shapes are not those of the configuration"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def find_mask_token_id(name_or_path: str, **hub: Any) -> int:
    """Load a checkpoint's tokenizer, and return the id of its mask token.

    Args:
        name_or_path: folder or Hub id.
        hub: arguments of `AutoTokenizer.from_pretrained`, such as `revision`.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **hub)
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"the tokenizer of {name_or_path} has no mask token, which RTL, TLM and MLM "
            "need: use objective='tr', or give mask_token_id."
        )
    return tokenizer.mask_token_id
