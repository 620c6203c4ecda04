"""A checkpoint in a folder or on the Hub: its settings, and methods that load its weights."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from configuration_dap import is_causal, own_pooling
from dap_transformers.errors import UserError, reading
from dap_transformers.tokenizer import load_tokenizer
from encoder_dap import auto_class, load_config, load_pretrained
from modules_dap import LibrarySettings, library_settings, load_modules


@dataclass
class Checkpoint:
    """The settings of a checkpoint. Everything that loads a model begins here.

    Attributes:
        name: folder or Hub id.
        hub: arguments of `from_pretrained`: `revision` and `trust_remote_code`.
        library: settings of a sentence-transformers folder. A LoRA adapter without such files has
            those of its base, and other checkpoints have the defaults.
        config: of the model, or of the model that a LoRA adapter was trained on.
        commit: hash of the commit on the Hub. None for a folder.
    """

    name: str
    hub: dict[str, Any]
    library: LibrarySettings
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    commit: str | None

    @classmethod
    def read(
        cls,
        name: str | Path,
        tokenizer_name: str | None = None,
        has_weights: bool = True,
        **hub: Any,
    ) -> "Checkpoint":
        """Read the settings, the configuration and the tokenizer of a folder or Hub id.

        Args:
            tokenizer_name: folder or Hub id of another tokenizer.
            has_weights: False if only the configuration counts. Then `name` may also be a file, and
                settings of a sentence-transformers folder are not read.

        Raises:
            UserError: if a file is missing or damaged, or if the tokenizer has too many ids.
        """
        name = str(name)
        revision = hub.get("revision")
        with reading(name):
            library = library_settings(name, revision) if has_weights else LibrarySettings()
            inside = hub | {"subfolder": library.subfolder}
            config = load_config(name, **inside)
        if tokenizer_name is not None:
            tokenizer = load_tokenizer(tokenizer_name, **hub)
        else:
            folder = Path(name).parent if Path(name).is_file() else name
            tokenizer = load_tokenizer(folder, **inside)

        highest = max(tokenizer.get_vocab().values())
        size = getattr(config, "vocab_size", None)
        if size is not None and highest >= size:
            raise UserError(
                f"{name} has vocab_size={size}, its tokenizer has ids up to {highest}: give a "
                "configuration with as many ids or more, or another tokenizer"
            )
        return cls(name, hub, library, config, tokenizer, hub_commit(name, revision))

    @property
    def pooling(self) -> str | None:
        """Return how the checkpoint says it pools, None if it does not say."""
        return own_pooling(self.config) or self.library.pooling

    def load_encoder(self) -> tuple[PreTrainedModel, nn.Sequential]:
        """Load the encoder without heads, and the modules behind its pooling.

        Of T5 it takes the class without a decoder.
        """
        encoder_config = getattr(self.config, "encoder_config", self.config)
        if is_causal(encoder_config):
            # It would keep the keys and values of a whole batch, for tokens that never follow.
            encoder_config.use_cache = False
        model = self.load(auto_class(self.config), config=self.config)
        is_elsewhere = self.library.place[0] != self.name  # of an adapter's base, or nowhere
        if is_elsewhere and isinstance(getattr(model, "after", None), nn.Module):
            return model, model.after  # of a DAP model
        with reading(f"the weights of {self.name}"):
            return model, load_modules(self.library)

    def load(self, kind: type, **options: Any) -> PreTrainedModel:
        """Load the model in float32 as the class `kind`.

        Raises:
            UserError: if the checkpoint lacks weights of that class, except those of a pooler.
        """
        with reading(f"the weights of {self.name}"):
            options |= self.hub | {"subfolder": self.library.subfolder, "dtype": torch.float32}
            model, missing = load_pretrained(self.name, kind, **options)
        needed = sorted(name for name in missing if "pooler" not in name)  # it is never used
        if needed:
            raise UserError(f"{self.name} lacks {len(needed)} weights, such as {needed[0]!r}")
        return model

    def library_length(self, model: PreTrainedModel) -> int | None:
        """Return how many tokens per sentence the sentence-transformers library keeps.

        None without settings of that library. It takes the length in the folder's files or, if
        they do not say, the smaller of the limits in the tokenizer and the model's config. Limits
        of 0 or below mean no limit, as in XLNet's config. The result is never above the model's
        number of positions: XLM-R's folders say 514, but the model takes 512.

        Args:
            model: the encoder, or one without weights (on the device "meta").
        """
        if self.library.pooling is None:
            return None
        named = self.library.max_seq_length
        # Tokenizers call "no limit" 1e30, but do not take that number.
        lengths = [named or self.tokenizer.model_max_length, longest_input(model), sys.maxsize]
        if not named:
            lengths.append(getattr(model.config, "max_position_embeddings", None))
        return min(length for length in lengths if length is not None and length > 0)


def hub_commit(name_or_path: str, revision: str | None) -> str | None:
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
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - unused
    return None
