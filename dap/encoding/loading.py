"""What lies in a model's folder or Hub repository: configuration, weights, positions, sentence-transformers files."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError, HFValidationError
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from configuration_dap import CHOICES
from dap.errors import UserError, loading, refusals
from dap.file_io import read_json
from encoder_dap import load_masked_lm
from modeling_dap import DAPForPreTraining

POOLINGS = CHOICES["pooling"]
MOST_LAYERS = 1000  # far above any encoder's; of a nonsensical number Transformers would build layers for days


def load_config(name_or_path: str, **hub: Any) -> PreTrainedConfig:
    """The configuration of a folder or Hub id; raises `UserError` for one that cannot be read or built."""
    with loading("configuration", name_or_path):
        config = AutoConfig.from_pretrained(name_or_path, **hub)
        own = getattr(config, "encoder_config", config)
        counts = {
            name: getattr(own, name, 1) for name in ("num_hidden_layers", "num_attention_heads")
        }
        for name, value in (own.to_dict() | counts).items():
            no_count = name in counts and isinstance(value, int) and not 0 < value <= MOST_LAYERS
            if no_count or value != value:
                raise UserError(
                    f"{name_or_path} has {name}={value} in its configuration: no encoder is so"
                )
    return config


def load_complete(name_or_path: str | Path, kind: type = AutoModel, **options: Any) -> Any:
    """The model of a class in float32, without heads that the class has not.

    Raises:
        UserError: weights that cannot be read, are of another shape, or are missing (but a pooler's).
    """
    with refusals():
        model, names = load_masked_lm(name_or_path, kind, dtype=torch.float32, **options)
        if isinstance(model, DAPForPreTraining) and model.config.target_vocab_size:
            model.set_target_vocabulary(
                model.prediction_head.token_ids.tolist()
            )  # refuses ids that are out of range
    if missing := sorted(name for name in names if "pooler" not in name):
        part = "encoder" if kind is AutoModel else "heads"
        raise UserError(
            f"{name_or_path} lacks {len(missing)} weights of its {part}, such as {missing[0]!r}"
        )
    return model


def hub_commit(name_or_path: str, revision: str | None = None) -> str | None:
    """The commit of a model that was loaded from the Hub, as its folder in the cache is named; else None."""
    if Path(name_or_path).exists():
        return None
    found = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def longest_input(model: PreTrainedModel) -> int | None:
    """The tokens that the model's table of absolute positions has room for; None where there is no such table.

    RoBERTa's family counts positions from the padding id on, so its table of 514 holds 512 tokens.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            return module.num_embeddings - (
                0 if module.padding_idx is None else module.padding_idx + 1
            )
    return None


class NeedsSentenceTransformers(UserError):
    """The folder's sentence-transformers modules do more than transformer + cls/mean pooling (+ normalisation)."""


@dataclass(frozen=True)
class LibrarySettings:
    """What a sentence-transformers folder says about itself; `prefix` is the default one of its prompts."""

    subfolder: str = ""
    pooling: str | None = None
    prefix: str = ""
    max_seq_length: int | None = None
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    similarity: str | None = None


def library_settings(name_or_path: str, revision: str | None) -> LibrarySettings | None:
    """Reads modules.json and the files it names; None where there is no modules.json."""
    modules = _read_json(name_or_path, "modules.json", revision)
    if modules is None:
        return None
    kinds = [_module_kind(module["type"]) for module in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise NeedsSentenceTransformers(
            f"{name_or_path} consists of the modules {', '.join(kinds)}"
        )
    folders = [module["path"] for module in modules]
    transformer = (
        _read_json(name_or_path, str(Path(folders[0], "sentence_bert_config.json")), revision) or {}
    )
    pooling = _read_json(name_or_path, f"{folders[1]}/config.json", revision) or {}
    library = _read_json(name_or_path, "config_sentence_transformers.json", revision) or {}
    mode, prompts = pooling_mode(pooling), library.get("prompts") or {}
    prefix = prompts.get(library.get("default_prompt_name"), "")
    changes_text = (
        transformer.get("do_lower_case") or prefix and not pooling.get("include_prompt", True)
    )
    if mode not in POOLINGS or changes_text:
        raise NeedsSentenceTransformers(
            f"{name_or_path} pools by {mode!r} or changes its text in a way of its own"
        )
    length = transformer.get("max_seq_length")
    if not isinstance(prefix, str) or not isinstance(length, int | None):
        raise UserError(
            f"{name_or_path} has max_seq_length={length!r} and the prompt {prefix!r}: no number, no text"
        )
    similarity = library.get("similarity_fn_name")
    return LibrarySettings(folders[0], mode, prefix, length, len(kinds) == 3, prompts, similarity)


def _read_json(name_or_path: str, filename: str, revision: str | None) -> Any | None:
    """The parsed file of a local folder or a Hub repository; None where it does not exist."""
    if Path(name_or_path).is_dir():
        path = Path(name_or_path) / filename
        return read_json(path) if path.is_file() else None
    try:
        return read_json(hf_hub_download(name_or_path, filename, revision=revision))
    except EntryNotFoundError:
        return None
    except HFValidationError as error:
        raise UserError(
            f"{name_or_path}: no such folder, and not the id of a Hub repository"
        ) from error


def _module_kind(dotted: str) -> str:
    """Class name of the library's own modules, under their old and new paths; others keep their full name.

    >>> _module_kind("sentence_transformers.models.Pooling")
    'Pooling'
    >>> _module_kind("sentence_transformers.base.modules.transformer.Transformer")
    'Transformer'
    """
    return dotted.rsplit(".", 1)[-1] if dotted.startswith("sentence_transformers.") else dotted


def pooling_mode(config: dict[str, Any]) -> str:
    """One pooling mode of either spelling of the pooling config; several joined by '+'."""
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        return modes if isinstance(modes, str) else "+".join(modes)
    legacy = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean"}
    active = [
        key for key, value in config.items() if key.startswith("pooling_mode_") and value is True
    ]
    return "+".join(legacy.get(key, key.removeprefix("pooling_mode_")) for key in active)


def library_length(
    named: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int:
    """The tokens that the sentence-transformers library keeps, as far as the model has positions for them.

    That is the length that the folder names, else the lower of what its tokenizer and the model's config say. Folders
    of XLM-R say 514, where the table holds 512; XLNet's config says -1, for no limit.
    """
    lengths = [named or tokenizer.model_max_length, longest_input(model)]
    if not named:
        lengths.append(getattr(model.config, "max_position_embeddings", None))
    return min(length for length in lengths if length is not None and length > 0)
