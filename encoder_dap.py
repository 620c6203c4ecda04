"""The encoder inside a DAP model: which encoders are supported, and how they are loaded.

The file ships with every checkpoint, beside modeling_dap.py. How an encoder runs without computing
padding is in states_dap.py.
"""

import inspect
from typing import Any

from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_MAPPING,
    AutoModel,
    AutoModelForMaskedLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

#: Types of encoders with which every objective is tested.
TESTED = ("bert", "deberta-v2", "distilbert", "modernbert", "roberta", "xlm-roberta")


def require_encoder(config: PreTrainedConfig, name: str) -> None:
    """Raise `ValueError` unless `config` describes a bidirectional encoder with a masked-LM class.

    The encoder must be part of Transformers, because a DAP checkpoint has only the code of DAP.
    """
    is_decoder = getattr(config, "is_decoder", False) or getattr(
        config, "is_encoder_decoder", False
    )
    if is_decoder or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(
            f"{name} (model_type {config.model_type!r}) is not a bidirectional encoder of "
            "Transformers: give one such as bert, xlm-roberta or modernbert. To train a DAP "
            "checkpoint further, load it with DAPForPreTraining.from_pretrained."
        )


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """Return an encoder with random weights, and without a pooler, which nothing would train."""
    accepted = inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in accepted else {}
    return AutoModel.from_config(config, **options)


def load_masked_lm(
    name_or_path: str, kind: type = AutoModelForMaskedLM, **options: Any
) -> tuple[PreTrainedModel, set[str]]:
    """Load a checkpoint, as a masked-LM model by default, and name the weights that it lacks.

    These weights are random in the model. No warning is printed, so the caller should report them.
    Weights of the encoder are never missing, because that is a `ValueError`.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, report = kind.from_pretrained(name_or_path, output_loading_info=True, **options)
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
