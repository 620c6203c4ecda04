"""Filters that repair or drop pairs of parallel text, a block at a time (polars; no models).

A pair that fails is counted under the first reason that applies, in the order of `REASONS`. The filters and their
defaults are those of the paper's release; the script and the language are checked beyond it.

*Tokens* are those of a subword tokenizer where one is given, as in the paper's release. Else they are words: what
stands between spaces, and in the scripts of `CHARACTERS_PER_WORD`, which put no spaces, so many characters (1.5 Han,
3 kana or 5 Thai ones make a word; a pair's other side would seem too short otherwise).

Shapes: N pairs of the block.
"""

import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import Any
from unicodedata import normalize

import polars as pl

from dap.errors import UserError, loading
from dap.languages import CHARACTERS_PER_WORD, SCRIPTS, base_language
from dap.prepare.options import PrepareOptions

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
    "language": "another language, by the identifier",
}
#: What is repaired in a pair that may stay.
REPAIRS = ("control_characters", "nfc")
SIDES = ("source", "target")

_CONTROL = r"[\p{Cc}\x{FEFF}\x{2028}\x{2029}]"  # zero-width joiners and marks of direction are text
_BLANK = r"[\s\p{Cc}\x{FEFF}]"
_UNTIDY = rf"{_BLANK}*[{_BLANK}--\x20]{_BLANK}*|\x20{{2,}}"  # all runs of blanks but a single space
_NO_SPACES = "".join(rf"\p{{{script}}}" for script in CHARACTERS_PER_WORD)
_WIDE_PUNCTUATION = r"\x{3000}-\x{303F}\x{FF00}-\x{FF0F}\x{FF1A}-\x{FF20}"
_RUN = rf"[^\s{_NO_SPACES}{_WIDE_PUNCTUATION}]+"


def clean(
    pairs: pl.DataFrame, language: str, options: PrepareOptions
) -> tuple[pl.DataFrame, dict[str, int]]:
    """The repaired pairs that pass, other columns kept, and the count of each repair and reason.

    Args:
        language: code of the source; a code without known script is not checked for it.

    Raises:
        ValueError: as `load_tokenizer` and `identified`, which is asked for the pairs alone that pass all else.
    """
    languages = {"source": language, "target": options.target_language}
    if options.strip_quotes:
        pairs = pairs.with_columns(pl.col(*SIDES).str.replace_all('"', "", literal=True))
    pairs, counts = repair(pairs)
    measured = [_measure(pairs[side], code, options) for side, code in languages.items()]
    reason = _reason(pairs.with_columns(**measured[0], **measured[1]), options)
    dropped = dict(reason.drop_nulls().value_counts().iter_rows())
    passed = kept = pairs.filter(reason.is_null())
    for side, code in languages.items() if options.language_identifier else ():
        codes = identified(options.language_identifier, kept[side].to_list())
        kept = kept.filter([base_language(found) == base_language(code) for found in codes])
    dropped["language"] = len(passed) - len(kept)
    return kept, counts | {reason: dropped.get(reason, 0) for reason in REASONS}


def _measure(texts: pl.Series, language: str, options: PrepareOptions) -> dict[str, pl.Series]:
    """A side's tokens (N,) lists, their number (N,) ints, and whether the script is wrong (N,) bool."""
    scripts = SCRIPTS.get(language, ())
    if options.tokenizer is None:
        tokens, count = words(texts, scripts)
    else:
        backend = load_tokenizer(options.tokenizer).backend_tokenizer
        codes = backend.encode_batch_fast(texts.to_list(), add_special_tokens=False)
        tokens = pl.Series([code.ids for code in codes], dtype=pl.List(pl.UInt32))
        count = tokens.list.len()
    foreign = wrong_script(texts, scripts, options.min_script)
    return {
        f"{texts.name}_tokens": tokens,
        f"{texts.name}_count": count,
        f"{texts.name}_foreign": foreign,
    }


def _reason(measured: pl.DataFrame, options: PrepareOptions) -> pl.Series:
    """The first reason to drop each pair, null for none: (N,) str."""
    source, target = pl.col("source"), pl.col("target")
    source_tokens, target_tokens = pl.col("source_tokens"), pl.col("target_tokens")
    shortest = pl.min_horizontal("source_count", "target_count")
    longest = pl.max_horizontal("source_count", "target_count")
    common = source_tokens.list.set_intersection(target_tokens).list.len()
    fewest = pl.min_horizontal(source_tokens.list.n_unique(), target_tokens.list.n_unique())
    failures = {
        "empty": (source == "") | (target == ""),
        "url": pl.any_horizontal(pl.col(*SIDES).str.contains(options.url_pattern)),
        "short": shortest < options.min_tokens,
        "length_ratio": (longest > options.ratio_beyond) & (longest > options.max_ratio * shortest),
        "long": shortest > options.max_tokens,
        "identical": source == target,
        "shared": (shortest > options.shared_beyond)
        & (common > 0)
        & (common >= options.max_shared * fewest),
        "script": pl.col("source_foreign") | pl.col("target_foreign"),
    }
    reasons = pl.coalesce(
        *(pl.when(fails).then(pl.lit(reason)) for reason, fails in failures.items()), None
    )
    return measured.select(reason=reasons.cast(pl.String)).to_series()


def repair(pairs: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """Pairs in Unicode NFC, with each run of white space and control characters as one space, and none at the ends.

    Returns the pairs and how many of them held control characters (tabs within a side included) or were not NFC.
    """
    composed = pairs.with_columns(_compose(pairs[side]) for side in SIDES)
    changed = (composed["source"] != pairs["source"]) | (composed["target"] != pairs["target"])
    control = pairs.select(pl.any_horizontal(pl.col(*SIDES).str.contains(_CONTROL)).sum()).item()
    tidy = composed.with_columns(_tidy(composed[side]) for side in SIDES)
    return tidy, {"control_characters": control, "nfc": int(changed.sum())}


def repair_texts(texts: pl.Series) -> pl.Series:
    """Texts of no pair, such as evaluation sentences, as `repair` leaves those of a side: (N,) str."""
    return _tidy(_compose(texts))


def _compose(texts: pl.Series) -> pl.Series:
    return pl.Series(texts.name, [normalize("NFC", text) for text in texts.to_list()], pl.String)


def _tidy(texts: pl.Series) -> pl.Series:
    return texts.str.replace_all(_UNTIDY, " ").str.strip_chars(" ")


def words(texts: pl.Series, scripts: Sequence[str]) -> tuple[pl.Series, pl.Series]:
    """Words of repaired texts of a language with these scripts, and their number (see the module's docstring).

    In a script without spaces the tokens are its characters and the runs of others.

    >>> texts = pl.Series(["他们在 Windows 10 上工作。"])
    >>> [column.to_list() for column in words(texts, ["Han"])]
    [[['他', '们', '在', 'Windows', '10', '上', '工', '作']], [6]]
    """
    if not CHARACTERS_PER_WORD.keys() & set(scripts):
        return texts.str.split(" "), texts.str.count_matches(" ", literal=True) + (
            texts != ""
        ).cast(pl.UInt32)
    count = texts.str.count_matches(_RUN).cast(pl.Float64)
    for script, characters in CHARACTERS_PER_WORD.items():
        count = count + texts.str.count_matches(rf"\p{{{script}}}") / characters
    return texts.str.extract_all(rf"[{_NO_SPACES}]|{_RUN}"), count.ceil().cast(pl.UInt32)


def wrong_script(texts: pl.Series, scripts: Sequence[str], least: float) -> pl.Series:
    """Whether less than `least` of the letters is in the scripts, or there is no letter: (N,) bool.

    Texts without a foreign letter, which are most, are not counted through.
    """
    if not scripts or not least:
        return pl.Series([False] * len(texts), dtype=pl.Boolean)
    own = "".join(rf"\p{{{script}}}" for script in scripts)
    doubtful = texts.str.contains(rf"[\p{{L}}--[{own}]]") | ~texts.str.contains(
        rf"[\p{{L}}&&[{own}]]"
    )
    letters = texts.filter(doubtful).str.replace_all(r"\P{L}+", "")
    native = letters.str.replace_all(f"[^{own}]+", "").str.len_chars()
    wrong = (letters == "") | (native < least * letters.str.len_chars())
    return doubtful.scatter(doubtful.arg_true(), wrong)


@cache
def load_tokenizer(name: str) -> Any:
    """A fast tokenizer, whose `backend_tokenizer` (a `tokenizers.Tokenizer`) neither truncates nor pads.

    Raises:
        ValueError: there is no such tokenizer, or it is a slow one.
    """
    from dap.tokenizers import forget_calls  # Transformers takes seconds to import
    from dap.tokenizers import load_tokenizer as load

    tokenizer = load(name)
    if not tokenizer.is_fast:
        raise UserError(
            f"tokenizer {name} is a slow one ({type(tokenizer).__name__}); give a fast one"
        )
    forget_calls(tokenizer)
    return tokenizer


def identified(name: str, texts: list[str]) -> list[str]:
    """The codes that the language identifier `module:function` gives N texts: N str.

    Raises:
        ValueError: there is no such function, it fails, or does not give one code, a str, a text.
    """
    named = f"language_identifier {name!r}"
    with loading("function", named):
        identify = pkgutil.resolve_name(name)
    try:
        codes = list(identify(texts)) if texts else []
    except Exception as error:  # whatever a plug-in raises
        raise UserError(f"{named} failed: {error!r}") from error
    if len(codes) != len(texts):
        raise UserError(f"{named} gave {len(codes)} codes for {len(texts)} texts; give one each")
    if odd := [code for code in codes if not isinstance(code, str)]:
        raise UserError(
            f"{named} gave {odd[0]!r} for a text; give a language code such as 'de', a str"
        )
    return codes
