"""Load a checkpoint's tokenizer, check that it fits, and undo what calls leave behind in it."""

import copy
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import cached_file

from dap_transformers.errors import UserError, reading

logger = logging.getLogger(__name__)

#: Text that wrong normalisation, wrong splitting or a wrong kind of vocabulary shows in.
PROBE = (
    "Über 12 Façades, don't e-mail: İstanbul ¿qué? Ελλάδα Привет שלום مرحبا नमस्ते ไทย 日本語の漢字 "
    "한국어 ﬁve  ＡＢＣ 😀\u200b x₂ I'M “OK”…"
)


def load_tokenizer(name: str | Path, **hub: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or Hub id, and check that it works (`as_in_file`)."""
    with reading(f"the tokenizer of {name}"):
        tokenizer = AutoTokenizer.from_pretrained(name, **hub)
        # Some damage only shows in use.
        int(tokenizer.model_max_length)
        tokenizer("a, b")
        tokenizer = as_in_file(tokenizer, name, **hub)
    # Without any files Transformers makes up a tokenizer of special tokens and blanks.
    if len(tokenizer) - len(tokenizer.all_special_ids) < 3:
        raise UserError(f"{name} holds no tokenizer: add its files, or name another")
    return tokenizer


def as_in_file(
    tokenizer: PreTrainedTokenizerBase, name: str | Path, **hub: Any
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that gives the tokens of the folder's `tokenizer.json`, if there is one.

    Transformers builds some tokenizers anew from their vocabulary, by the rules of their class.
    Without a `tokenizer_class` it takes the class of the model, such as WordPiece for BERT, even
    if the vocabulary was made for other rules. Then a tokenizer is made from the file, with a
    warning, unless its class comes with the checkpoint.
    """
    is_of_repository = type(tokenizer).__module__.startswith("transformers_modules")
    where = {key: hub[key] for key in ("revision", "subfolder") if hub.get(key)}
    own_file = cached_file(
        name, "tokenizer.json", _raise_exceptions_for_missing_entries=False, **where
    )
    if own_file is None or is_of_repository or _agree(tokenizer, own_file):
        return tokenizer

    own = PreTrainedTokenizerFast.from_pretrained(name, **hub)
    if not _agree(own, own_file):
        raise UserError(
            f"{name} gives other tokens than its tokenizer.json: repair tokenizer_config.json, "
            "such as its tokenizer_class"
        )
    logger.warning(
        "%s: %s gives other tokens than tokenizer.json, so the file is used as it is",
        name,
        type(tokenizer).__name__,
    )
    return own


def _agree(tokenizer: PreTrainedTokenizerBase, own_file: str) -> bool:
    """Tell whether a tokenizer and a `tokenizer.json` give the same tokens for the text `PROBE`."""
    own = _unlimited(Tokenizer.from_file(own_file))
    # Tokens that only tokenizer_config.json names.
    own.add_tokens(list(tokenizer.added_tokens_decoder.values()))
    adds_special = own.num_special_tokens_to_add(is_pair=False) > 0
    expected = own.encode(PROBE, add_special_tokens=adds_special).ids
    return tokenizer(PROBE, add_special_tokens=adds_special, verbose=False).input_ids == expected


def require_room(tokenizer: PreTrainedTokenizerBase, max_seq_length: int, prefix: str) -> None:
    """Raise `UserError` if special tokens and prefix leave no room for the text of a sentence.

    Args:
        max_seq_length: largest number of tokens of a sentence, with special tokens and prefix.
        prefix: text before every sentence.
    """
    # A fast tokenizer cuts as its last call has asked. Another thread may be encoding with it, so
    # this call asks for the same.
    tokens = tokenizer(prefix, truncation=True, max_length=max_seq_length)
    if len(tokens.input_ids) >= max_seq_length:
        raise UserError(
            f"max_seq_length={max_seq_length} leaves no token of the text behind "
            f"prefix={prefix!r}: give more"
        )


def require_padding(tokenizer: PreTrainedTokenizerBase, name: str | Path) -> None:
    """Raise `UserError` if the tokenizer has no padding token, which batches need."""
    if tokenizer.pad_token is None:
        raise UserError(f"the tokenizer of {name} has no padding token: give it one")


def never_predicted(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that no head predicts: CLS and padding, unless one of them is also SEP."""
    ids = {tokenizer.cls_token_id, tokenizer.pad_token_id}
    return ids - {tokenizer.sep_token_id, None}


def forget_calls(tokenizer: PreTrainedTokenizerBase) -> None:
    """Switch off the padding and truncation that the last call has set in a fast tokenizer.

    Otherwise saving the tokenizer would save these settings with it. Slow tokenizers are not
    changed, because they keep no such settings.
    """
    if tokenizer.is_fast:
        _unlimited(tokenizer.backend_tokenizer)


def plain_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return a copy of a fast tokenizer's Rust tokenizer, without truncation and padding."""
    return _unlimited(copy.deepcopy(tokenizer.backend_tokenizer))


def cutting(
    tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> Callable[[list[str]], list[list[int]]]:
    """Return a function that tokenises texts and cuts each to `max_seq_length` tokens.

    Later calls of a fast tokenizer may change its truncation, so the function uses a copy of it.
    """
    if not tokenizer.is_fast:
        return lambda texts: tokenizer(texts, truncation=True, max_length=max_seq_length).input_ids
    backend = plain_backend(tokenizer)
    backend.encode_special_tokens = tokenizer.split_special_tokens
    backend.enable_truncation(max_seq_length, direction=tokenizer.truncation_side)
    return lambda texts: [each.ids for each in backend.encode_batch_fast(texts)]


def _unlimited(backend: Tokenizer) -> Tokenizer:
    """Switch off the padding and truncation of a Rust tokenizer, and return it."""
    backend.no_padding()
    backend.no_truncation()
    return backend


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a text that describes everything that decides a tokenizer's tokens.

    Tokenizers with the same text give the same tokens, so the text can be part of a cache's key.
    Of a slow tokenizer it has the class, the vocabulary and the settings, without paths.
    """
    if not tokenizer.is_fast:
        given = tokenizer.init_kwargs.items()
        settings = sorted(each for each in given if not re.search("file|path|local", each[0]))
        words = sorted(tokenizer.get_vocab().items())
        return repr((type(tokenizer).__name__, words, settings, tokenizer.truncation_side))
    backend = plain_backend(tokenizer).to_str()
    return f"{backend} {tokenizer.truncation_side} {tokenizer.model_input_names}"
