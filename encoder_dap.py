"""The encoder inside a DAP model: which encoders are supported, and how they are loaded.

The file ships with every checkpoint, beside modeling_dap.py. How an encoder runs without computing
padding is in states_dap.py.
"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_TEXT_ENCODING_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForTextEncoding,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, is_peft_available, logging

logger = logging.get_logger(__name__)

#: Types of encoders whose states are tested to be those of each sentence by itself.
TESTED = (
    *("bert", "deberta-v2", "distilbert", "eurobert", "gemma3_text", "gte", "llama", "mistral"),
    *("modernbert", "nomic_bert", "qwen3", "roberta", "t5", "xlm-roberta"),
)


def auto_class(config: PreTrainedConfig) -> type:
    """Return the Auto class of an encoder without heads. Of T5 and its kind, only the encoder."""
    is_listed = type(config) in MODEL_FOR_TEXT_ENCODING_MAPPING
    return AutoModelForTextEncoding if is_listed else AutoModel


def without_decoder(model: PreTrainedModel) -> PreTrainedModel:
    """Return the encoder of an encoder-decoder model, and any other model unchanged."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return model
    has_decoder = any(name.endswith("decoder") for name, _ in model.named_modules())
    return model.get_encoder() if has_decoder else model


def pretrained_class(config: PreTrainedConfig) -> type:
    """Return the Auto class that loads a checkpoint with its masked-LM head, if there is one."""
    has_head = type(config) in MODEL_FOR_MASKED_LM_MAPPING
    return AutoModelForMaskedLM if has_head else auto_class(config)


def require_encoder(config: PreTrainedConfig, name: str) -> None:
    """Raise `ValueError` unless `config` describes a model of Transformers that reads text.

    A DAP checkpoint has only the code of DAP, so code of other repositories would be missing.
    """
    has_decoder = getattr(config, "is_encoder_decoder", False)
    mapping = MODEL_FOR_TEXT_ENCODING_MAPPING if has_decoder else MODEL_MAPPING
    is_known = type(config) in mapping and type(config).__module__.startswith("transformers.")
    reads_text = hasattr(config, "vocab_size") and hasattr(config, "hidden_size")
    if getattr(config, "is_decoder", False) or not (is_known and reads_text):
        raise ValueError(
            f"{name} (model_type {config.model_type!r}) is not a text encoder of Transformers: "
            "give one such as bert, xlm-roberta, t5 or qwen3. To train a DAP checkpoint further, "
            "load it with DAPForPreTraining.from_pretrained."
        )


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """Return an encoder with random weights, and without a pooler, which nothing would train."""
    accepted = inspect.signature(auto_class(config)._model_mapping[type(config)]).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in accepted else {}
    return auto_class(config).from_config(config, **options)


@torch.no_grad()
def depends_on_padding(
    encoder: PreTrainedModel, states_of: Callable[[Tensor, Tensor], Tensor]
) -> bool:
    """Tell whether an encoder computes other states beside padding than without it.

    Encoders in `TESTED` do not, so nothing is computed for them.

    Args:
        states_of: function that runs the encoder in the caller's way. It returns token states
            (B, S, D), given token ids (B, S) and their mask (B, S).
    """
    config = encoder.config
    if config.model_type in TESTED:
        return False
    real = [number for number in range(17) if number != getattr(config, "pad_token_id", None)]
    ids = torch.tensor(real[:16], device=encoder.device).view(2, 8)  # (2, 8)
    ids %= getattr(config, "vocab_size", 17)
    mask = (torch.arange(8) < torch.tensor([[5], [7]])).long().to(encoder.device)  # (2, 8)

    was_training = encoder.training
    encoder.eval()  # without dropout
    alone = encoder(input_ids=ids[:1, :5], attention_mask=mask[:1, :5]).last_hidden_state
    beside = states_of(ids, mask).view(2, 8, config.hidden_size)[:1, :5]
    encoder.train(was_training)
    tolerance = torch.finfo(alone.dtype).eps ** 0.5 * alone.norm()
    return not (beside - alone).norm() < tolerance


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the fields of `DAPConfig` that describe the special tokens of a tokenizer."""
    mask = tokenizer("a", return_special_tokens_mask=True).special_tokens_mask
    before = mask.index(0)  # 1 for BERT
    return {
        "mask_token_id": tokenizer.mask_token_id,
        "special_tokens_before": before,
        "special_tokens_after": sum(mask) - before,
    }


def adapter_base(name_or_path: str, **place: str | None) -> str | None:
    """Return the folder or Hub id that a LoRA adapter was trained on. None for other checkpoints.

    Args:
        place: `revision` and `subfolder`.

    Raises:
        ValueError: if the adapter cannot be loaded, because it does not name that model, or because
            peft is not installed. Transformers would leave it out without a word.
    """
    path = cached_file(
        name_or_path, "adapter_config.json", _raise_exceptions_for_missing_entries=False, **place
    )
    if path is None:
        return None
    base = json.loads(Path(path).read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not base or not is_peft_available():
        raise ValueError(
            f"{name_or_path} is an adapter of {base}: install peft, and have "
            "base_model_name_or_path in adapter_config.json"
        )
    return base


def load_config(
    name_or_path: str,
    revision: str | None = None,
    subfolder: str = "",
    trust_remote_code: bool | None = None,
) -> PreTrainedConfig:
    """Load a configuration. For a LoRA adapter, load the one of its base model."""
    place = {"revision": revision, "subfolder": subfolder}
    base = adapter_base(name_or_path, **place)
    if base is not None:
        return AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(name_or_path, trust_remote_code=trust_remote_code, **place)
    if config.dtype not in (None, torch.float32):
        logger.warning_once("%s holds %s, but float32 runs", name_or_path, config.dtype)
    return config


def load_pretrained(
    name_or_path: str,
    kind: type,
    revision: str | None = None,
    subfolder: str = "",
    **options: Any,
) -> tuple[PreTrainedModel, set[str]]:
    """Load a checkpoint as a model of the class `kind`, and name the weights that it lacks.

    These weights are random in the model. No warning is printed, so the caller should report them.
    Weights of the encoder are never missing, because that is a `ValueError`. The weights of a LoRA
    adapter are added to those of the model that it was trained on.
    """
    place = {"revision": revision, "subfolder": subfolder}
    base = adapter_base(name_or_path, **place)
    if base is not None:
        model, missing = load_pretrained(base, kind, **options)
        merge_adapter(model.base_model, name_or_path, **place)
        return model, missing

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, report = kind.from_pretrained(
            name_or_path, output_loading_info=True, **place, **options
        )
    finally:
        logging.set_verbosity(verbosity)

    missing = set(report["missing_keys"])
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    lost = sorted(key for key in missing if key.startswith(prefix) and "pooler" not in key)
    if lost:
        raise ValueError(
            f"{name_or_path} lacks {len(lost)} weights of its encoder, the first is {lost[0]!r}: "
            "give a complete checkpoint."
        )
    return model, missing


def merge_adapter(encoder: PreTrainedModel, name_or_path: str, **place: str | None) -> None:
    """Add the weights of a LoRA adapter to those of an encoder.

    The adapter may have been trained on a model with a head. Weights of the head are ignored.

    Args:
        place: `revision` and `subfolder`.

    Raises:
        ValueError: if weights of the adapter are missing, or fit no layer of the encoder.
    """
    from peft import PeftConfig, PeftModel, load_peft_weights, set_peft_model_state_dict

    weights = load_peft_weights(name_or_path, device="cpu", **place)
    config = PeftConfig.from_pretrained(name_or_path, **place)
    config.task_type = None  # of the head
    root = "base_model.model."
    prefix = encoder.base_model_prefix
    whole = encoder
    if any(name.startswith(f"{root}{prefix}.") for name in weights):
        whole = nn.Module()  # gives the encoder the name that it had, which `config` may use
        setattr(whole, prefix, encoder)
        whole.config = encoder.config
        whole.get_input_embeddings = encoder.get_input_embeddings
        whole.is_gradient_checkpointing = False  # else peft leaves a hook on the embeddings
    parts = tuple(f"{root}{name}." for name, _ in whole.named_children())
    for name in list(weights):
        if name.startswith(root) and not name.startswith(parts):
            del weights[name]  # of the head
    adapted = PeftModel(whole, config)
    report = set_peft_model_state_dict(adapted, weights)
    missing = {name for name in report.missing_keys if adapted.base_model.prefix in name}
    wrong = {*missing, *report.unexpected_keys}
    wrong = sorted(name for name in wrong if "pooler." not in name)  # it is never used
    if wrong:
        raise ValueError(
            f"{name_or_path}: {len(wrong)} weights of the adapter are missing or fit no layer of "
            f"the encoder, such as {wrong[0]!r}"
        )
    adapted.merge_and_unload()
