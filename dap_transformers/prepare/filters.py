"""Repair or drop pairs of parallel text, a table at a time.

A pair that fails several filters is counted under the first reason in the order of `REASONS`. The
filters and their defaults are those of the paper's released code. The check of the script is an
addition.

*Tokens* are those of a subword tokenizer if one is given, as in the released code. Otherwise they
are words: runs of characters between spaces. In scripts without spaces between words, a fixed
number of characters counts as one word (`CHARACTERS_PER_WORD`).

Shapes: N pairs of the table.
"""

import re
from collections.abc import Sequence
from functools import cache
from html import unescape
from html.entities import html5
from typing import Any
from unicodedata import normalize

import polars as pl

from dap_transformers.errors import UserError
from dap_transformers.languages import CHARACTERS_PER_WORD, SCRIPTS
from dap_transformers.prepare.options import PrepareOptions
from dap_transformers.text_keys import BLANKS

#: Why a pair is dropped, in the order in which the reasons are tried.
REASONS = {
    "empty": "a side was empty after the repair",
    "url": "URL or e-mail address",
    "short": "too few tokens",
    "length_ratio": "one side much longer than the other",
    "long": "both sides too long",
    "identical": "source = target",
    "shared": "too many tokens shared by both sides",
    "script": "letters of another script than the language's",
}
SIDES = ("source", "target")

#: Character reference of HTML, such as `&amp;` or `&#39;`.
_REFERENCE = re.compile(r"&(#\d{1,7};|#[xX][0-9A-Fa-f]{1,6};|\w+;)", re.ASCII)
#: Blanks, control characters and byte order marks. Zero-width joiners and direction marks are text.
_BLANK = r"[\s\p{Cc}\x{FEFF}]"
#: All runs of blanks except a single space.
_UNTIDY = rf"{_BLANK}*[{_BLANK}--\x20]{_BLANK}*|\x20{{2,}}"
#: A character of a script without spaces between words.
_NO_SPACES = "".join(rf"\p{{{script}}}" for script in CHARACTERS_PER_WORD)
_WIDE_PUNCTUATION = r"\x{3000}-\x{303F}\x{FF00}-\x{FF0F}\x{FF1A}-\x{FF20}"
#: A word in another script, such as "Windows" in a Chinese sentence.
_RUN = rf"[^\s{_NO_SPACES}{_WIDE_PUNCTUATION}]+"


def clean(
    pairs: pl.DataFrame, language: str, options: PrepareOptions
) -> tuple[pl.DataFrame, dict[str, int]]:
    """Repair pairs, and drop pairs that fail a filter.

    Args:
        pairs: a table with the columns `source` and `target`. Other columns are kept.
        language: code of the source language.

    Returns:
        The pairs that pass, and the counts of dropped pairs by their first reason (`REASONS`).
    """
    languages = {"source": language, "target": options.target_language}
    pairs = pairs.with_columns(repair(pairs[side], options.strip_quotes) for side in SIDES)

    measured = pairs
    for side, code in languages.items():
        measured = measured.with_columns(**_measures(pairs[side], code, options))
    reason = _reason(measured, options)
    counts = dict.fromkeys(REASONS, 0) | dict(reason.drop_nulls().value_counts().iter_rows())
    return pairs.filter(reason.is_null()), counts


def _measures(texts: pl.Series, language: str, options: PrepareOptions) -> dict[str, pl.Series]:
    """Compute the tokens, their number, and whether the script is wrong, for one side: (N,) each.

    The names begin with the series' own name, as in `source_tokens`.
    """
    scripts = SCRIPTS.get(language, ())
    if options.tokenizer is None:
        tokens, count = words(texts, scripts)
    else:
        backend = plain_tokenizer(options.tokenizer).backend_tokenizer
        encodings = backend.encode_batch_fast(texts.to_list(), add_special_tokens=False)
        tokens = pl.Series([each.ids for each in encodings], dtype=pl.List(pl.UInt32))
        count = tokens.list.len()

    side = texts.name
    return {
        f"{side}_tokens": tokens,
        f"{side}_count": count,
        f"{side}_foreign": wrong_script(texts, scripts, options.min_script),
    }


def _reason(measured: pl.DataFrame, options: PrepareOptions) -> pl.Series:
    """Find the first reason to drop each pair, or null: (N,) str."""
    sides = pl.col(*SIDES)
    shorter = pl.min_horizontal("source_count", "target_count")
    longer = pl.max_horizontal("source_count", "target_count")

    source_tokens = pl.col("source_tokens").list
    target_tokens = pl.col("target_tokens").list
    common = source_tokens.set_intersection(pl.col("target_tokens")).list.len()
    fewer_different = pl.min_horizontal(source_tokens.n_unique(), target_tokens.n_unique())
    share_is_too_large = (common > 0) & (common >= options.max_shared * fewer_different)

    failures = {
        "empty": ~pl.all_horizontal(sides.str.contains(f"[^{BLANKS}]")),
        "url": pl.any_horizontal(sides.str.contains(options.url_pattern)),
        "short": shorter < options.min_tokens,
        "length_ratio": (longer > options.ratio_beyond) & (longer > options.max_ratio * shorter),
        "long": shorter > options.max_tokens,
        "identical": pl.col("source") == pl.col("target"),
        "shared": (shorter > options.shared_beyond) & share_is_too_large,
        "script": pl.col("source_foreign") | pl.col("target_foreign"),
    }
    reasons = [pl.when(fails).then(pl.lit(reason)) for reason, fails in failures.items()]
    first = pl.coalesce(*reasons, None).cast(pl.String)
    return measured.select(reason=first).to_series()


def repair(texts: pl.Series, strip_quotes: bool = False) -> pl.Series:
    """Decode HTML's character references, compose characters (Unicode NFC) and tidy white space.

    Each run of white space and control characters becomes one space, and none stays at the ends.
    With `strip_quotes`, straight double quotes are removed.
    """
    decoded = (_REFERENCE.sub(_character, text) if "&" in text else text for text in texts)
    if strip_quotes:
        decoded = (text.replace('"', "") for text in decoded)
    composed = [normalize("NFC", text) for text in decoded]  # polars takes twice the time
    tidied = pl.Series(texts.name, composed, pl.String).str.replace_all(_UNTIDY, " ")
    return tidied.str.strip_chars(" ")


def _character(reference: re.Match[str]) -> str:
    """Return the character that a reference stands for, or the reference if HTML has none."""
    whole, name = reference.group(0, 1)
    character = unescape(whole) if name in html5 or name.startswith("#") else whole
    return whole if character in ("", "\ufffd") else character  # the number of no character


def words(texts: pl.Series, scripts: Sequence[str]) -> tuple[pl.Series, pl.Series]:
    """Split repaired texts into words, to compare sentence lengths across languages.

    In the scripts of `CHARACTERS_PER_WORD`, the tokens are single characters and the runs of other
    characters between them. The number of words is then smaller than the number of tokens. Without
    `scripts`, a text may be in any script.

    Returns:
        The tokens, (N,) lists, and the number of words, (N,) int.

    >>> texts = pl.Series(["他们在 Windows 10 上工作。"])
    >>> [column.to_list() for column in words(texts, ["Han"])]
    [[['他', '们', '在', 'Windows', '10', '上', '工', '作']], [6]]
    """
    if scripts and not CHARACTERS_PER_WORD.keys() & set(scripts):
        spaces = texts.str.count_matches(" ", literal=True)
        is_not_empty = (texts != "").cast(pl.UInt32)
        return texts.str.split(" "), spaces + is_not_empty

    count = texts.str.count_matches(_RUN).cast(pl.Float64)
    for script, characters in CHARACTERS_PER_WORD.items():
        count = count + texts.str.count_matches(rf"\p{{{script}}}") / characters
    tokens = texts.str.extract_all(rf"[{_NO_SPACES}]|{_RUN}")
    return tokens, count.ceil().cast(pl.UInt32)


def wrong_script(texts: pl.Series, scripts: Sequence[str], least: float) -> pl.Series:
    """Tell for each text whether less than the share `least` of its letters is in some scripts.

    A text without letters is also True: (N,) bool. Without scripts, or if `least` is 0, all are
    False.
    """
    if not scripts or not least:
        return pl.repeat(False, len(texts), eager=True)
    own = "".join(rf"\p{{{script}}}" for script in scripts)
    is_wrong = ~texts.str.contains(rf"[\p{{L}}&&[{own}]]")
    # Few texts have letters of another script. Only in these the letters are counted.
    mixed = texts.str.contains(rf"[\p{{L}}--[{own}]]").arg_true()
    native = texts[mixed].str.count_matches(rf"[\p{{L}}&&[{own}]]")
    return is_wrong.scatter(mixed, native < least * texts[mixed].str.count_matches(r"\p{L}"))


@cache
def plain_tokenizer(name: str) -> Any:
    """Load a fast tokenizer whose `backend_tokenizer` neither truncates nor pads."""
    from dap_transformers.tokenizer import forget_calls, load_tokenizer

    tokenizer = load_tokenizer(name)
    if not tokenizer.is_fast:
        raise UserError(f"{name} has a slow tokenizer (without tokenizer.json): give another")
    forget_calls(tokenizer)
    return tokenizer
