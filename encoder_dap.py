"""The encoder inside a DAP model, from any class of Transformers, and its states without work on padding.

Ships with a checkpoint beside modeling_dap.py. Shapes in the comments: `B` rows, `S` tokens of the longest, `T` real
tokens of all rows, `D` hidden size.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
    from .packing_dap import attention_arguments, pack, takes_packed
except ImportError:  # a checkout or an installed wheel, where these files are top-level modules
    from configuration_dap import DAPConfig
    from packing_dap import attention_arguments, pack, takes_packed

TOKENS_PER_GROUP = 128  # padded rows of like length run together once they have this many tokens


def require_encoder(config: PreTrainedConfig, name: str) -> None:
    """Raise `ValueError` unless the configuration is that of a bidirectional encoder with a masked-LM class."""
    remedy = "Give an encoder such as bert, xlm-roberta, roberta, deberta-v2 or modernbert."
    if config.model_type == "dap":
        raise ValueError(f"{name} is a DAP checkpoint already: load it with DAPForPreTraining.from_pretrained.")
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder (model_type {config.model_type!r}). {remedy}")
    if type(config).__module__.startswith("transformers_modules."):
        raise ValueError(
            f"{name} (model_type {config.model_type!r}) runs code of its own; a DAP checkpoint nests only encoders "
            f"that are part of Transformers. {remedy}"
        )
    if getattr(config, "is_decoder", False) or type(config) not in MODEL_FOR_MASKED_LM_MAPPING:
        raise ValueError(f"{name} is not a bidirectional encoder (model_type {config.model_type!r}). {remedy}")


def build_encoder(config: PreTrainedConfig) -> PreTrainedModel:
    """The encoder of a configuration with random weights, and without a pooler, whose weights nothing would train.

    Raises:
        ValueError: an encoder whose states depend on padding, as it is not told of any.
    """
    accepted = inspect.signature(MODEL_MAPPING[type(config)].__init__).parameters
    options = {"add_pooling_layer": False} if "add_pooling_layer" in accepted else {}
    encoder = AutoModel.from_config(config, **options)
    if "attention_mask" not in inspect.signature(encoder.forward).parameters:
        raise ValueError("it takes no attention_mask, so that padding would change the embeddings")
    return encoder


@contextmanager
def encoder_named(name: str, config: DAPConfig) -> Iterator[None]:
    """Errors of an encoder that is built in another way than this file expects become a `ValueError` that names it."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        remedy = "give another encoder" if config.objective == "tr" else "use objective='tr', or another encoder"
        raise ValueError(
            f"{name}: objective {config.objective!r} does not work with an encoder of model_type "
            f"{config.encoder_config.model_type!r} ({reason}): {remedy}."
        ) from error


def load_masked_lm(
    name_or_path: str, kind: type = AutoModelForMaskedLM, **options: Any
) -> tuple[PreTrainedModel, set[str]]:
    """A checkpoint as a masked-LM model, and the names of the weights that it lacks (reported by the caller).

    Raises:
        ValueError: some of these are the encoder's.
    """
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, report = kind.from_pretrained(name_or_path, output_loading_info=True, **options)
    finally:
        logging.set_verbosity(verbosity)
    missing = set(report["missing_keys"])
    if lost := sorted(key for key in missing if key.startswith(model.base_model_prefix + ".")):
        raise ValueError(
            f"{name_or_path} lacks {len(lost)} weights of its encoder, the first is {lost[0]!r}: not usable."
        )
    return model, missing


def find_mask_token_id(name_or_path: str, **source: Any) -> int:
    """The mask token's id of a checkpoint's tokenizer.

    Raises:
        ValueError: the tokenizer has no mask token.
    """
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **source)
    if tokenizer.mask_token_id is None:
        raise ValueError(
            f"the tokenizer of {name_or_path} has no mask token, which every objective but 'tr' needs: "
            "use objective='tr', or give mask_token_id."
        )
    return tokenizer.mask_token_id


def layer_stack(encoder: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Name and list of an encoder's transformer blocks."""
    for name, module in encoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == encoder.config.num_hidden_layers:
            return name, module
    raise ValueError(f"no list of {encoder.config.num_hidden_layers} layers in {type(encoder).__name__}")


def last_states(encoder: PreTrainedModel, mask: Tensor, **inputs: Tensor) -> Tensor:
    """Last hidden states (B, S, D) of rows padded on the right, given their mask (B, S) and inputs (B, S, ...).

    The states of padding are zeros, and next to nothing is computed for them: rows are packed for an attention that
    takes them so, else run in groups of like length on CPU. Any other encoder is given padded rows.
    """
    if takes_packed(encoder):
        return packed_states(encoder, mask, inputs)
    if mask.device.type == "cpu":
        states = grouped_states(encoder, mask, inputs)
    else:
        states = encoder(attention_mask=mask, **inputs).last_hidden_state
    return states.masked_fill(mask.unsqueeze(-1) == 0, 0.0)


def packed_states(encoder: PreTrainedModel, mask: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """`last_states` by one long row without padding."""
    packing = pack(mask)
    packed = {"position_ids": packing.columns + (position_offset(encoder) or 0)}  # (1, T)
    packed |= {key: packing.take(value) for key, value in inputs.items()}  # (1, T, ...)
    states = encoder(**packed, **attention_arguments(encoder, packing)).last_hidden_state  # (1, T, D)
    return packing.put_back(states)


def grouped_states(encoder: PreTrainedModel, mask: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """`last_states` by groups of padded rows of like length; those of padding have no meaning."""
    lengths = mask.sum(1).tolist()
    groups = length_groups(lengths, TOKENS_PER_GROUP)
    parts = []
    for rows in groups:
        width = lengths[rows[-1]]
        part = {key: value[rows, :width] for key, value in inputs.items()}
        states = encoder(attention_mask=mask[rows, :width], **part).last_hidden_state  # (rows, width, D)
        parts.append(F.pad(states, (0, 0, 0, mask.shape[1] - width)))
    order = torch.tensor([row for rows in groups for row in rows])
    return torch.cat(parts)[order.argsort()]


def length_groups(lengths: list[int], tokens: int) -> list[list[int]]:
    """Row numbers, shortest rows first, in groups that end where the length changes once they have enough tokens.

    >>> length_groups([9, 2, 2, 9, 3], tokens=4)
    [[1, 2], [4, 0, 3]]
    """
    groups: list[list[int]] = [[]]
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        current = groups[-1]
        if current and lengths[row] > lengths[current[-1]] and sum(lengths[i] for i in current) >= tokens:
            groups.append([])
        groups[-1].append(row)
    return groups


def position_offset(encoder: PreTrainedModel) -> int | None:
    """Position id of the first token, or None where the encoder has no absolute position embeddings."""
    table = getattr(getattr(encoder, "embeddings", None), "position_embeddings", None)
    if table is None:
        return None
    return 0 if table.padding_idx is None else table.padding_idx + 1  # RoBERTa and XLM-R start after the padding id
