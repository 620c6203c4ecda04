"""A tokenizer as a checkpoint holds it: loaded or refused, and without what each call leaves in a fast one."""

import copy
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from dap.errors import UserError, loading


def load_tokenizer(name: str | Path, **hub: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id; raises `UserError` where there is none, or one that cannot be read."""
    with loading("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(name, **hub)
        int(tokenizer.model_max_length), tokenizer("a, b")  # some damage shows in use alone
    if (
        len(tokenizer) - len(tokenizer.all_special_ids) < 3
    ):  # Transformers makes up one of special tokens and blanks
        raise UserError(
            f"{name} holds no tokenizer: add its files, or to train give --tokenizer_name"
        )
    return tokenizer


def require_room(tokenizer: PreTrainedTokenizerBase, max_seq_length: int, prefix: str = "") -> None:
    """Raise `UserError` for a length that leaves no token of the text between CLS, a prefix and SEP."""
    needed = 3 + len(tokenizer(prefix, add_special_tokens=False).input_ids if prefix else "")
    if max_seq_length < needed:
        behind = f" behind prefix={prefix!r}" if prefix else ""
        raise UserError(
            f"max_seq_length={max_seq_length} leaves no token of the text{behind}: give {needed} or more"
        )


def require_embeddings(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str
) -> None:
    """Raise `UserError` for token ids that a model has no embedding for."""
    highest, size = max(tokenizer.get_vocab().values()), getattr(config, "vocab_size", None)
    if size is not None and highest >= size:
        raise UserError(
            f"{name} has vocab_size={size}, its tokenizer has ids up to {highest}: give a configuration with as many "
            "ids or more, or another tokenizer"
        )


def require_padding(tokenizer: PreTrainedTokenizerBase, name: str | Path) -> None:
    """Raise `UserError` for a tokenizer that cannot make a batch of sentences."""
    if tokenizer.pad_token is None:
        raise UserError(f"the tokenizer of {name} has no padding token: give it one")


def never_predicted(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the token ids that no head predicts: CLS and padding, unless they also end sentences."""
    ids = {tokenizer.cls_token_id, tokenizer.pad_token_id}
    return ids - {tokenizer.sep_token_id, None}


def forget_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    """Reset a fast tokenizer's padding and truncation, which its last call has left in it and saving would keep."""
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()


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
