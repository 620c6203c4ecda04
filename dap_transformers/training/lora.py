"""LoRA with the package peft: train small adapters in the encoder instead of its own weights.

An adapter adds the product of two narrow matrices to a matrix of the encoder, which stays frozen.
The state dict of an adapted encoder is the merged one: each product is added to its matrix, and no
name of peft occurs. So every saved model and checkpoint loads without peft. A checkpoint also has
the adapters themselves (`ADAPTERS_FILE`), from which a run resumes exactly.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from dap_transformers.errors import UserError, reading

#: File of a checkpoint with the two matrices of each adapter.
ADAPTERS_FILE = "lora.safetensors"
#: Name of the part of an adapted layer that is the original layer.
ORIGINAL = "base_layer"


def add_adapters(encoder: PreTrainedModel, rank: int) -> None:
    """Add LoRA adapters to an encoder, and freeze all its other weights.

    The adapted layers are those that peft chooses for the encoder's class, such as the queries and
    values of attention in BERT and XLM-R. For a class that peft does not know, they are all linear
    layers. An adapter starts as zero, so the encoder's outputs do not change.

    Args:
        encoder: the encoder, changed in place.
        rank: width of the narrow matrices.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    layers = None if encoder.config.model_type in KNOWN else "all-linear"
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=layers)
    kind = encoder.config.model_type
    with reading(f"LoRA for an encoder of model_type {kind!r}"):
        inject_adapter_in_model(settings, encoder)
    for name, layer in _adapted_layers(encoder, ""):
        if not hasattr(layer, "weight"):  # experts, which are parameters of one module
            raise UserError(f"LoRA cannot be merged into {name[:-1]} of model_type {kind!r}")
    encoder.register_state_dict_post_hook(_merge)
    encoder.register_load_state_dict_pre_hook(_unmerge)


def adapter_parameters(encoder: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of all adapters of an encoder by name."""
    return {name: value for name, value in encoder.named_parameters() if ".lora_" in name}


def save_adapters(encoder: nn.Module, folder: Path) -> None:
    """Write the adapters of an encoder into the folder of a checkpoint, which must exist."""
    save_file(adapter_parameters(encoder), folder / ADAPTERS_FILE)


@torch.no_grad()
def load_adapters(encoder: nn.Module, folder: Path) -> None:
    """Load the adapters of a checkpoint's folder into an adapted encoder."""
    parameters = adapter_parameters(encoder)
    weights = load_file(folder / ADAPTERS_FILE)
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def _adapted_layers(encoder: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name and the module of each layer with an adapter. A name ends with a dot."""
    for name, module in encoder.named_modules():
        if hasattr(module, ORIGINAL) and hasattr(module, "lora_A"):
            yield f"{prefix}{name}.", module


@torch.no_grad()
def _merge(encoder: nn.Module, weights: dict[str, Tensor], prefix: str, _: Any) -> None:
    """Replace the weights of adapted layers by the merged ones, in place.

    This is a hook of torch, which is called at the end of `state_dict`.
    """
    for name, layer in _adapted_layers(encoder, prefix):
        for key in [key for key in weights if key.startswith(name)]:
            value = weights.pop(key)
            if key.startswith(f"{name}{ORIGINAL}."):
                weights[name + key.removeprefix(f"{name}{ORIGINAL}.")] = value
        update = layer.get_delta_weight("default")
        weights[f"{name}weight"] = weights[f"{name}weight"] + update


def _unmerge(encoder: nn.Module, weights: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Replace the merged weights of adapted layers by the present ones of layer and adapter.

    This is a hook of torch, which is called at the beginning of `load_state_dict`. The original
    weights are frozen, so they have not changed. `load_adapters` loads the adapters.
    """
    for name, layer in _adapted_layers(encoder, prefix):
        merged = [key for key in weights if key.startswith(name)]
        for key in merged:
            del weights[key]
        if merged:
            for own, value in (*layer.named_parameters(), *layer.named_buffers()):
                weights[name + own] = value.detach()
