"""A tokenizer as it is by itself, without the truncation and padding that each call leaves in a fast one."""

import copy

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """A copy of a fast tokenizer's Rust tokenizer, which neither cuts nor pads."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """Text that is the same for tokenizers that give the same tokens."""
    if not getattr(tokenizer, "is_fast", False):
        return repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))
    return f"{plain_backend(tokenizer).to_str()} {tokenizer.truncation_side} {tokenizer.model_input_names}"
