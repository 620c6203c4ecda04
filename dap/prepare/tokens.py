"""Subword tokenizers by name: the Rust one that counts tokens, its size, its special ids."""

from functools import cache
from typing import Any

from dap.errors import UserError


@cache
def _fast_tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer {name}: {error}") from error
    if not tokenizer.is_fast:
        raise UserError(f"tokenizer {name} is a slow one ({type(tokenizer).__name__}); give a fast one")
    return tokenizer


@cache
def load_tokenizer(name: str) -> Any:
    """The Rust tokenizer (`tokenizers.Tokenizer`) behind a fast tokenizer, without truncation and padding.

    Raises:
        ValueError: there is no such tokenizer, or it is a slow one.
    """
    backend = _fast_tokenizer(name).backend_tokenizer
    backend.no_padding()
    backend.no_truncation()
    return backend


def special_ids(name: str) -> set[int]:
    """Ids of a tokenizer that no sentence's text gives, CLS and padding; SEP, which RTL predicts, is not of them."""
    tokenizer = _fast_tokenizer(name)
    return {tokenizer.cls_token_id, tokenizer.pad_token_id} - {tokenizer.sep_token_id, None}


def vocabulary_size(name: str) -> int:
    """Ids of a tokenizer, `len` of it.

    Raises:
        ValueError: as `load_tokenizer`; ids are left out, so that some are beyond this number.
    """
    ids = load_tokenizer(name).get_vocab(with_added_tokens=True).values()
    if max(ids) >= len(set(ids)):
        raise UserError(f"tokenizer {name} has {len(set(ids))} tokens, but ids up to {max(ids)}: number them 0, 1, …")
    return len(set(ids))
