"""Load a checkpoint's tokenizer, check that it fits, and undo what calls leave behind in it."""

import copy
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from dap.errors import UserError, loading


def load_tokenizer(name: str | Path, **hub: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or Hub id.

    Args:
        hub: arguments of `AutoTokenizer.from_pretrained`, such as `revision`.

    Raises:
        UserError: there is no tokenizer, or it cannot be read.
    """
    with loading("tokenizer", name):
        tokenizer = AutoTokenizer.from_pretrained(name, **hub)
        # Some damage only shows in use.
        int(tokenizer.model_max_length)
        tokenizer("a, b")
    # Without any files Transformers makes up a tokenizer of special tokens and blanks.
    if len(tokenizer) - len(tokenizer.all_special_ids) < 3:
        raise UserError(
            f"{name} holds no tokenizer: add its files, or to train give --tokenizer_name"
        )
    return tokenizer


def require_room(tokenizer: PreTrainedTokenizerBase, max_seq_length: int, prefix: str = "") -> None:
    """Raise `UserError` if CLS, the prefix and SEP leave no token for the text."""
    needed = 3
    if prefix:
        needed += len(tokenizer(prefix, add_special_tokens=False).input_ids)
    if max_seq_length < needed:
        behind = f" behind prefix={prefix!r}" if prefix else ""
        raise UserError(
            f"max_seq_length={max_seq_length} leaves no token of the text{behind}: give {needed} "
            "or more"
        )


def require_embeddings(
    tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig, name: str
) -> None:
    """Raise `UserError` if the tokenizer has ids for which the model has no embedding."""
    highest = max(tokenizer.get_vocab().values())
    size = getattr(config, "vocab_size", None)
    if size is not None and highest >= size:
        raise UserError(
            f"{name} has vocab_size={size}, its tokenizer has ids up to {highest}: give a "
            "configuration with as many ids or more, or another tokenizer"
        )


def require_padding(tokenizer: PreTrainedTokenizerBase, name: str | Path) -> None:
    """Raise `UserError` if the tokenizer cannot pad sentences to a batch."""
    if tokenizer.pad_token is None:
        raise UserError(f"the tokenizer of {name} has no padding token: give it one")


def never_predicted(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that no head predicts: CLS and padding, unless they also end sentences."""
    ids = {tokenizer.cls_token_id, tokenizer.pad_token_id}
    return ids - {tokenizer.sep_token_id, None}


def forget_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    """Reset the padding and truncation of a fast tokenizer.

    The last call leaves them in the tokenizer, and saving would keep them.
    """
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Copy the Rust tokenizer of a fast tokenizer, without truncation and padding."""
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    return backend


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text that is equal for tokenizers that give equal tokens."""
    if not getattr(tokenizer, "is_fast", False):
        return repr((type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())))
    backend = plain_backend(tokenizer).to_str()
    return f"{backend} {tokenizer.truncation_side} {tokenizer.model_input_names}"
