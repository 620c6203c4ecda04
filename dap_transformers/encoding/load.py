"""Load a model's configuration and weights from a folder or from the Hub."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

import encoder_dap
from configuration_dap import is_causal
from dap_transformers.errors import UserError, reading


def load_config(name_or_path: str | Path, **hub: Any) -> PreTrainedConfig:
    """Load a configuration. `hub` are arguments of `from_pretrained`, such as `revision`."""
    with reading(f"the configuration of {name_or_path}"):
        return encoder_dap.load_config(str(name_or_path), **hub)


def load_backbone(name_or_path: str, config: PreTrainedConfig, **hub: Any) -> PreTrainedModel:
    """Load the encoder of a checkpoint. Of T5 and its kind the decoder may be missing."""
    encoder_config = getattr(config, "encoder_config", config)
    if is_causal(encoder_config):
        # It would keep the keys and values of a whole batch, for tokens that never follow.
        encoder_config.use_cache = False
    return load_complete(name_or_path, encoder_dap.auto_class(config), config=config, **hub)


def load_complete(name_or_path: str | Path, kind: type = AutoModel, **options: Any) -> Any:
    """Load a model in float32 as the class `kind`, and require all weights that it has."""
    with reading(f"the weights of {name_or_path}"):
        name = str(name_or_path)
        model, missing = encoder_dap.load_pretrained(name, kind, dtype=torch.float32, **options)
    needed = sorted(name for name in missing if "pooler" not in name)
    if needed:
        raise UserError(f"{name_or_path} lacks {len(needed)} weights, such as {needed[0]!r}")
    return model


def hub_commit(name_or_path: str, revision: str | None = None) -> str | None:
    """Return the full hash of the commit of a model from the Hub's cache, or None."""
    if Path(name_or_path).exists():
        return None
    # The cache has a folder per commit, which is named after it.
    found = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def longest_input(model: PreTrainedModel) -> int | None:
    """Return the most tokens that the model's table of absolute positions allows. None without one.

    RoBERTa's family counts positions from the padding id on, so its table of 514 holds 512 tokens.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return None


def library_length(
    named: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return how many tokens per sentence the sentence-transformers library keeps.

    It takes the length in the folder's files or, if that is None, the smaller of the limits in the
    tokenizer and the model's config. Limits of 0 or below mean no limit, as in XLNet's config. The
    result is never above the model's number of positions. XLM-R's folders name 514 for 512.
    """
    lengths = [named or tokenizer.model_max_length, longest_input(model)]
    if not named:
        lengths.append(getattr(model.config, "max_position_embeddings", None))
    return min(length for length in lengths if length is not None and length > 0)
