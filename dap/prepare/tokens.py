"""Subword tokenizers by name, the tokens of many texts, and the vocabulary of texts (no models).

Shapes: N texts, W words, V ids of a tokenizer.
"""

import json
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from dap.errors import UserError

KNOWN_WORDS = 300_000  # kept with their tokens: some 50 MB
#: Normalisers that make of each word what they make of it alone, but for `_odd` text.
_BY_WORD = ("Precompiled", "Replace", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "StripAccents", "BertNormalizer")
_TOKENS = pl.List(pl.UInt32)
_SPACE = "▁"  # as SentencePiece writes one
#: Letters that Unicode joins with whatever follows (grapheme break property Prepend), a space included.
_PREPENDED = r"\x{D4E}\x{111C2}\x{111C3}\x{1193F}\x{11941}\x{11A3A}\x{11A84}-\x{11A89}\x{11D46}\x{11F02}"


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


@cache
def load_tokens(name: str) -> "Tokens":
    """What counts tokens of the tokenizer of this name; raises as `load_tokenizer`."""
    return Tokens(load_tokenizer(name))


def special_ids(name: str) -> list[int]:
    """Ids of a tokenizer that no sentence's text gives, CLS and padding; SEP, which RTL predicts, is not of them."""
    tokenizer = _fast_tokenizer(name)
    return sorted({tokenizer.cls_token_id, tokenizer.pad_token_id} - {tokenizer.sep_token_id, None})


def vocabulary_size(name: str) -> int:
    """Ids of a tokenizer, `len` of it.

    Raises:
        ValueError: as `load_tokenizer`; ids are left out, so that some are beyond this number.
    """
    ids = load_tokenizer(name).get_vocab(with_added_tokens=True).values()
    if max(ids) >= len(set(ids)):
        raise UserError(f"tokenizer {name} has {len(set(ids))} tokens, but ids up to {max(ids)}: number them 0, 1, …")
    return len(set(ids))


class Vocabulary:
    """Ids that a tokenizer gives texts, with its special tokens."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = load_tokenizer(tokenizer) if tokenizer else None
        self._seen = np.zeros(vocabulary_size(tokenizer) if tokenizer else 0, dtype=bool)

    def add(self, texts: list[str]) -> None:
        if self._tokenizer is not None:
            for code in self._tokenizer.encode_batch_fast(texts):
                self._seen[code.ids] = True

    def save(self, path: Path) -> None:
        np.save(path, self._seen)


class Tokens:
    """The token ids of texts that `dap.prepare.filters.repair` has left, without special tokens.

    A tokenizer that splits at spaces gives a text the tokens of its words, so that a word which comes again is looked
    up, not encoded, which takes most of the time. Texts where a word may depend on its neighbours (`_odd`) are encoded
    whole, and so is every text of another tokenizer.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, free of truncation and padding.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._by_word = splits_at_spaces(tokenizer)
        self._odd = _odd(tokenizer.normalizer) if self._by_word else None
        self._added = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        self._known = pl.DataFrame(schema={"word": pl.String, "tokens": _TOKENS})

    def __call__(self, texts: pl.Series) -> pl.Series:
        """Ids of each text: (N,) lists of uint32."""
        if not self._by_word:
            return self._encode(texts)
        whole = texts.str.contains(self._odd)
        if self._added:
            whole |= texts.str.contains_any(self._added)
        tokens = self._look_up(texts.filter(~whole))
        if not whole.any():
            return tokens
        places = pl.concat([(~whole).arg_true(), whole.arg_true()])
        return pl.concat([tokens, self._encode(texts.filter(whole))]).gather(places.arg_sort())

    def _encode(self, texts: pl.Series) -> pl.Series:
        codes = self._tokenizer.encode_batch_fast(texts.to_list(), add_special_tokens=False)
        return pl.Series([code.ids for code in codes], dtype=_TOKENS)

    def _look_up(self, texts: pl.Series) -> pl.Series:
        words = texts.str.split(" ")
        flat = words.explode().alias("word").to_frame()  # (W, 1)
        self._learn(flat.unique())
        tokens = flat.join(self._known, on="word", how="left", maintain_order="left")["tokens"].to_arrow()
        ends = np.append(0, np.cumsum(words.list.len().to_numpy(), dtype=np.int64))  # (N + 1,) words
        offsets = tokens.offsets.take(pa.array(ends))
        return pl.Series(pl.from_arrow(pa.LargeListArray.from_arrays(offsets, tokens.values)), dtype=_TOKENS)

    def _learn(self, words: pl.DataFrame) -> None:
        new = words.join(self._known, on="word", how="anti")
        if len(self._known) + len(new) > KNOWN_WORDS:
            self._known, new = self._known.clear(), words
        self._known = pl.concat([self._known, new.with_columns(tokens=self._encode(new["word"]))])


def splits_at_spaces(tokenizer: Any) -> bool:
    """Whether the tokens of a text are those of its words, one word after the other, as far as its parts tell."""
    parts = json.loads(tokenizer.to_str())
    normalizers, splitters = (_flat(parts[name]) for name in ("normalizer", "pre_tokenizer"))
    if any(token["normalized"] or " " in token["content"] for token in parts["added_tokens"]):
        return False
    if not splitters or not all(part["type"] in _BY_WORD for part in normalizers):
        return False
    if any(part["type"] == "Replace" and not _keeps_words(part) for part in normalizers):
        return False
    joint = [part for part in splitters if part["type"] == "Metaspace"]
    if any(part["prepend_scheme"] != "always" or not part.get("split", True) for part in joint):
        return False
    return splitters[0]["type"] in ("Metaspace", "WhitespaceSplit", "Whitespace", "BertPreTokenizer")


def _flat(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The parts of a sequence of them, or the part alone."""
    if part is None:
        return []
    inner = part.get("normalizers") or part.get("pretokenizers")
    return [below for item in inner for below in _flat(item)] if part["type"] == "Sequence" else [part]


def _keeps_words(replace: dict[str, Any]) -> bool:
    """Whether a replacement changes nothing but runs of spaces, which repaired text does not have."""
    return replace["pattern"] in ({"Regex": " {2,}"}, {"String": "  "})


def _odd(normalizer: Any | None) -> str:
    """What may join a word with its neighbour: marks at its start, formats, untidy spaces, and what the tokenizer's
    normaliser makes a space or nothing of (of U+FFFD, for one).
    """
    spaces = [rf"\x{{{code:X}}}" for code in _codes() if _parts(chr(code), normalizer)]
    return (
        rf"[^\p{{L}}\p{{M}}\p{{N}}\p{{P}}\p{{S}} ]|[{''.join(spaces)}]|(?:^| )[\p{{M}}\x{{1F3FB}}-\x{{1F3FF}}]"
        rf"|[{_PREPENDED}](?: |$)|^ |  | $"
    )


def _codes() -> list[int]:
    """Letters, marks, numbers, punctuation and symbols."""
    return [code for code in range(0x21, sys.maxunicode + 1) if unicodedata.category(chr(code))[0] in "LMNPS"]


def _parts(character: str, normalizer: Any | None) -> bool:
    text = f"x{character}x"
    normal = normalizer.normalize_str(text) if normalizer else text
    return " " in normal or _SPACE in normal or normal == "xx"
