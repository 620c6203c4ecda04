"""Read a model from a folder or from the Hub: its config, weights and sentence-transformers
files."""

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

from dap_transformers.errors import UserError, reading, refusals
from dap_transformers.files import read_json
from encoder_dap import load_masked_lm
from modeling_dap import DAPForPreTraining
from states_dap import POOLINGS

#: Layers or attention heads that no encoder reaches. Transformers would build absurd numbers for
#: days.
MOST_LAYERS = 1000

# ------------------------------------------------------------------------------ config and weights


def load_config(name_or_path: str, **hub: Any) -> PreTrainedConfig:
    """Load the configuration of a model, and refuse impossible numbers in it.

    Impossible are NaN, and numbers of layers or attention heads below 1 or above `MOST_LAYERS`.

    Args:
        name_or_path: a folder or Hub id.
        hub: arguments of `AutoConfig.from_pretrained`, such as `revision`.

    Returns:
        The configuration, of the class that its `model_type` names.
    """
    folder = Path(name_or_path, hub.get("subfolder") or "")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"{folder} holds no config.json, so it is no model; if its training was stopped, give "
            "the training command again"
        )
    with reading(f"the configuration of {name_or_path}"):
        config = AutoConfig.from_pretrained(name_or_path, **hub)
        encoder = getattr(config, "encoder_config", config)
        values = encoder.to_dict()
        for name in ("num_hidden_layers", "num_attention_heads"):
            # Some configs keep the number under another name, and map this one to it.
            values[name] = getattr(encoder, name, 1)
            if isinstance(values[name], int) and not 0 < values[name] <= MOST_LAYERS:
                _refuse_config(name_or_path, name, values[name])
        for name, value in values.items():
            if value != value:  # NaN
                _refuse_config(name_or_path, name, value)
    return config


def _refuse_config(name_or_path: str, name: str, value: Any) -> None:
    """Raise a `UserError` that names a field of the configuration and its impossible value."""
    raise UserError(f"{name_or_path} has {name}={value} in its configuration: no encoder is so")


def load_complete(name_or_path: str | Path, kind: type = AutoModel, **options: Any) -> Any:
    """Load a model in float32, and make sure that the checkpoint has all of its weights.

    Args:
        name_or_path: a folder or Hub id.
        kind: class of the model, such as `AutoModel` or `DAPForPreTraining`. Heads that this class
            does not have are not loaded.
        options: arguments of the class's `from_pretrained`.

    Returns:
        The model, an instance of `kind` or, for `AutoModel`, of the class that the config names.
    """
    with refusals():
        model, missing = load_masked_lm(name_or_path, kind, dtype=torch.float32, **options)
        if isinstance(model, DAPForPreTraining) and model.config.target_vocab_size:
            # Setting the vocabulary once more refuses token ids that are out of range.
            model.set_target_vocabulary(model.prediction_head.token_ids.tolist())
    needed = sorted(name for name in missing if "pooler" not in name)
    if needed:
        part = "encoder" if kind is AutoModel else "heads"
        raise UserError(
            f"{name_or_path} lacks {len(needed)} weights of its {part}, such as {needed[0]!r}"
        )
    return model


def hub_commit(name_or_path: str, revision: str | None = None) -> str | None:
    """Return the commit of a model that was loaded from the Hub.

    The Hub's local cache has a folder per commit, which is named after it.

    Args:
        name_or_path: a folder or Hub id.
        revision: branch, tag or commit that was loaded. None means the main branch.

    Returns:
        The full hash of the commit. None for a local folder, or if the cache lacks the model.
    """
    if Path(name_or_path).exists():
        return None
    found = try_to_load_from_cache(name_or_path, "config.json", revision=revision)
    return Path(found).parent.name if isinstance(found, str) else None


def longest_input(model: PreTrainedModel) -> int | None:
    """Return the most tokens that the model's table of absolute positions allows.

    RoBERTa's family counts positions from the padding id on, so its table of 514 holds 512 tokens.

    Returns:
        Number of tokens, or None if the model has no such table.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return None


# -------------------------------------------------------------------- sentence-transformers files


class NeedsSentenceTransformers(UserError):
    """Raised for a folder with modules that `SentenceEncoder` cannot run, such as Dense.

    It runs a transformer, CLS or mean pooling, and normalisation.
    """


@dataclass(frozen=True)
class LibrarySettings:
    """Settings in the sentence-transformers files of a folder.

    The defaults stand for a folder without such files.

    Attributes:
        subfolder: where the transformer's files are, within the folder.
        pooling: "cls" or "mean". None in a folder without such files.
        prefix: the default prompt, which is put before every sentence. "" if there is none.
        max_seq_length: most tokens per sentence. None if the files do not say.
        normalize: whether the library divides vectors by their Euclidean length.
        prompts: name -> prompt, all prompts of the folder.
        similarity: name of the similarity function, such as "cosine". None if the files do not say.
    """

    subfolder: str = ""
    pooling: str | None = None
    prefix: str = ""
    max_seq_length: int | None = None
    normalize: bool = False
    prompts: dict[str, str] = field(default_factory=dict)
    similarity: str | None = None


def library_settings(
    name_or_path: str, revision: str | None, only_transformer: bool = False
) -> LibrarySettings | None:
    """Read the sentence-transformers files of a folder or Hub repository.

    Args:
        name_or_path: a folder or Hub id.
        revision: branch, tag or commit of a Hub repository.
        only_transformer: accept modules after the pooling, such as Dense, that will not be run.

    Returns:
        The settings. None if there is no modules.json, so that this is no sentence-transformers
        folder.
    """
    modules = _read_json(name_or_path, "modules.json", revision)
    if modules is None:
        return None
    kinds = [_module_kind(module["type"]) for module in modules]
    run = kinds[:2] if only_transformer else kinds
    if run not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise NeedsSentenceTransformers(
            f"{name_or_path} consists of the modules {', '.join(kinds)}"
        )
    subfolder = modules[0]["path"]
    own_config = str(Path(subfolder, "sentence_bert_config.json"))
    transformer = _read_json(name_or_path, own_config, revision) or {}
    pooling = _read_json(name_or_path, f"{modules[1]['path']}/config.json", revision) or {}
    library = _read_json(name_or_path, "config_sentence_transformers.json", revision) or {}

    mode = pooling_mode(pooling)
    prompts = library.get("prompts") or {}
    prefix = prompts.get(library.get("default_prompt_name"), "")
    leaves_prompt_out = prefix and not pooling.get("include_prompt", True)
    if mode not in POOLINGS or transformer.get("do_lower_case") or leaves_prompt_out:
        raise NeedsSentenceTransformers(
            f"{name_or_path} pools by {mode!r}, lower-cases its text, or leaves its prompt out of "
            "pooling"
        )
    length = transformer.get("max_seq_length")
    if not isinstance(prefix, str) or not isinstance(length, int | None):
        raise UserError(
            f"{name_or_path} has max_seq_length={length!r} and the prompt {prefix!r}: give a "
            "number and a text"
        )
    return LibrarySettings(
        subfolder,
        mode,
        prefix,
        length,
        normalize="Normalize" in kinds,
        prompts=prompts,
        similarity=library.get("similarity_fn_name"),
    )


def _read_json(name_or_path: str, filename: str, revision: str | None) -> Any | None:
    """Read a JSON file of a folder or a Hub repository.

    Returns:
        The parsed content. None if the folder or repository has no such file.
    """
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
    """Return the class name of a module of sentence-transformers, given its dotted path.

    The library has moved its modules, so its older and newer paths must give the same name. For
    modules that are not the library's own, the full path is returned.

    >>> _module_kind("sentence_transformers.models.Pooling")
    'Pooling'
    >>> _module_kind("sentence_transformers.base.modules.transformer.Transformer")
    'Transformer'
    """
    return dotted.rsplit(".", 1)[-1] if dotted.startswith("sentence_transformers.") else dotted


def pooling_mode(config: dict[str, Any]) -> str:
    """Return the pooling mode that a sentence-transformers pooling config sets.

    The library writes it in two ways: as one name, and in old folders as one flag per mode.
    Several modes are joined by "+", such as "cls+mean". If no mode is set, the result is "".

    >>> pooling_mode({"pooling_mode": "cls"}), pooling_mode({"pooling_mode_mean_tokens": True})
    ('cls', 'mean')
    """
    if "pooling_mode" in config:
        modes = config["pooling_mode"]
        return modes if isinstance(modes, str) else "+".join(modes)
    names = {f"pooling_mode_{pooling.flag}": name for name, pooling in POOLINGS.items()}
    modes = []
    for key, value in config.items():
        if key.startswith("pooling_mode_") and value is True:
            modes.append(names.get(key, key.removeprefix("pooling_mode_")))
    return "+".join(modes)


def library_length(
    named: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> int:
    """Return how many tokens per sentence the sentence-transformers library keeps.

    The library takes the length in the folder's files. Without one it takes the smaller of the
    limits in the tokenizer and in the model's config. Limits of 0 or below are ignored, because
    some configs, such as XLNet's, say -1 for no limit.

    In both cases the result is never above the model's number of positions (`longest_input`).
    Folders of XLM-R name 514 tokens, for example, but the model has positions for 512.

    Args:
        named: length in the folder's sentence-transformers files. None if they do not say.
        model: the transformer.
        tokenizer: its tokenizer.
    """
    lengths = [named or tokenizer.model_max_length, longest_input(model)]
    if not named:
        lengths.append(getattr(model.config, "max_position_embeddings", None))
    return min(length for length in lengths if length is not None and length > 0)
