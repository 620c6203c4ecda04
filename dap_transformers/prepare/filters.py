"""Repair or drop pairs of parallel text, a table at a time.

A pair that fails several filters is counted under the first reason in the order of `REASONS`. The
filters and their defaults are those of the paper's released code. The checks of the script and the
language are additions.

*Tokens* are those of a subword tokenizer if one is given, as in the released code. Otherwise they
are words: runs of characters between spaces. The scripts of `CHARACTERS_PER_WORD` put no spaces
between words. There a fixed number of characters counts as one word: 1.5 Han, 3 kana or 5 Thai
characters. Otherwise these sentences would seem too short beside their translations.

Shapes: N pairs of the table.
"""

import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import Any
from unicodedata import normalize

import polars as pl

from dap_transformers.errors import UserError
from dap_transformers.languages import BLANKS, CHARACTERS_PER_WORD, SCRIPTS, base_language
from dap_transformers.prepare.options import PrepareOptions

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

#: Control characters, byte order marks, and line and paragraph separators. Zero-width joiners and
#: direction marks are text.
_CONTROL = r"[\p{Cc}\x{FEFF}\x{2028}\x{2029}]"
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
        language: code of the source language. If it is not one of the 36 languages, the script of
            its text is not checked.
        options: which filters are used, and their limits.

    Returns:
        The pairs that pass, and counts by name. `control_characters` and `nfc` count repaired
        pairs (`repair`), also those that are then dropped. The keys of `REASONS` count dropped
        pairs, each under the first reason.
    """
    languages = {"source": language, "target": options.target_language}
    if options.strip_quotes:
        pairs = pairs.with_columns(pl.col(*SIDES).str.replace_all('"', "", literal=True))
    pairs, counts = repair(pairs)

    measures: dict[str, pl.Series] = {}
    for side, code in languages.items():
        measures |= _measure(pairs[side], code, options)
    reason = _reason(pairs.with_columns(**measures), options)
    passed = pairs.filter(reason.is_null())
    dropped = dict(reason.drop_nulls().value_counts().iter_rows())

    # The language identifier is slow, so it sees only the pairs that pass the filters above.
    kept = passed
    if options.language_identifier:
        for side, code in languages.items():
            codes = identified(options.language_identifier, kept[side].to_list())
            kept = kept.filter([_is_language(found, code) for found in codes])
    dropped["language"] = len(passed) - len(kept)

    for name in REASONS:
        counts[name] = dropped.get(name, 0)
    return kept, counts


def _is_language(found: str, wanted: str) -> bool:
    """Tell whether a code means the wanted language, in any region or script."""
    try:
        return base_language(found) == wanted
    except UserError:
        return False


def _measure(texts: pl.Series, language: str, options: PrepareOptions) -> dict[str, pl.Series]:
    """Compute the tokens and the check of the script for one side of the pairs.

    Args:
        texts: (N,) str. The series is named "source" or "target".

    Returns:
        Three series by name. For the source they are:

        - `source_tokens`: the tokens, (N,) lists of words, or of ids if a tokenizer is given.
        - `source_count`: the number of tokens or words, (N,) int.
        - `source_foreign`: whether too many letters are of other scripts, (N,) bool.
    """
    scripts = SCRIPTS.get(language, ())
    if options.tokenizer is None:
        tokens, count = words(texts, scripts)
    else:
        backend = load_tokenizer(options.tokenizer).backend_tokenizer
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
    """Find the first reason to drop each pair, in the order of `REASONS`.

    The last reason, "language", is slow. `clean` tries it later.

    Returns:
        (N,) str: a key of `REASONS`, or null for a pair that passes.
    """
    source, target = pl.col("source"), pl.col("target")
    shorter = pl.min_horizontal("source_count", "target_count")
    longer = pl.max_horizontal("source_count", "target_count")

    source_tokens = pl.col("source_tokens").list
    target_tokens = pl.col("target_tokens").list
    common = source_tokens.set_intersection(pl.col("target_tokens")).list.len()
    fewer_different = pl.min_horizontal(source_tokens.n_unique(), target_tokens.n_unique())
    share_is_too_large = (common > 0) & (common >= options.max_shared * fewer_different)

    failures = {
        "empty": ~pl.all_horizontal(pl.col(*SIDES).str.contains(f"[^{BLANKS}]")),
        "url": pl.any_horizontal(pl.col(*SIDES).str.contains(options.url_pattern)),
        "short": shorter < options.min_tokens,
        "length_ratio": (longer > options.ratio_beyond) & (longer > options.max_ratio * shorter),
        "long": shorter > options.max_tokens,
        "identical": source == target,
        "shared": (shorter > options.shared_beyond) & share_is_too_large,
        "script": pl.col("source_foreign") | pl.col("target_foreign"),
    }
    reasons = [pl.when(fails).then(pl.lit(reason)) for reason, fails in failures.items()]
    first = pl.coalesce(*reasons, None).cast(pl.String)
    return measured.select(reason=first).to_series()


def repair(pairs: pl.DataFrame) -> tuple[pl.DataFrame, dict[str, int]]:
    """Compose characters (Unicode NFC) and tidy white space.

    Each run of white space and control characters becomes one space, and none stays at the ends.

    Args:
        pairs: a table with the columns `source` and `target`.

    Returns:
        The repaired pairs, and two counts: `control_characters`, the pairs that held control
        characters such as tabs, and `nfc`, the pairs that were not in form NFC.
    """
    composed = pairs.with_columns(_compose(pairs[side]) for side in SIDES)
    changed = (composed["source"] != pairs["source"]) | (composed["target"] != pairs["target"])
    has_control = pl.any_horizontal(pl.col(*SIDES).str.contains(_CONTROL))
    control = pairs.select(has_control.sum()).item()
    tidy = composed.with_columns(_tidy(composed[side]) for side in SIDES)
    return tidy, {"control_characters": control, "nfc": int(changed.sum())}


def repair_texts(texts: pl.Series) -> pl.Series:
    """Return repaired texts, such as evaluation sentences: (N,) str.

    Characters are composed (NFC), and white space is tidied as in `repair`.
    """
    return _tidy(_compose(texts))


def _compose(texts: pl.Series) -> pl.Series:
    """Return each text with its characters composed (Unicode NFC): (N,) str."""
    return pl.Series(texts.name, [normalize("NFC", text) for text in texts.to_list()], pl.String)


def _tidy(texts: pl.Series) -> pl.Series:
    """Replace each run of white space and control characters by one space, and strip both ends."""
    return texts.str.replace_all(_UNTIDY, " ").str.strip_chars(" ")


def words(texts: pl.Series, scripts: Sequence[str]) -> tuple[pl.Series, pl.Series]:
    """Split repaired texts into words, to compare sentence lengths across languages.

    Words are what stands between spaces. Scripts without spaces between words are those of
    `CHARACTERS_PER_WORD`: Chinese characters, kana and Thai. There the tokens are single
    characters, and the runs of other characters between them. The number of words is then
    estimated from the number of characters, and smaller than the number of tokens.

    Args:
        texts: (N,) str.
        scripts: names of the Unicode scripts of their language, such as "Han".

    Returns:
        The tokens, (N,) lists, and the number of words, (N,) int.

    >>> texts = pl.Series(["他们在 Windows 10 上工作。"])
    >>> [column.to_list() for column in words(texts, ["Han"])]
    [[['他', '们', '在', 'Windows', '10', '上', '工', '作']], [6]]
    """
    if not CHARACTERS_PER_WORD.keys() & set(scripts):
        spaces = texts.str.count_matches(" ", literal=True)
        is_not_empty = (texts != "").cast(pl.UInt32)
        return texts.str.split(" "), spaces + is_not_empty

    count = texts.str.count_matches(_RUN).cast(pl.Float64)
    for script, characters in CHARACTERS_PER_WORD.items():
        count = count + texts.str.count_matches(rf"\p{{{script}}}") / characters
    tokens = texts.str.extract_all(rf"[{_NO_SPACES}]|{_RUN}")
    return tokens, count.ceil().cast(pl.UInt32)


def wrong_script(texts: pl.Series, scripts: Sequence[str], least: float) -> pl.Series:
    """Tell for each text whether too few of its letters are in the scripts of its language.

    Args:
        texts: (N,) str.
        scripts: names of the Unicode scripts of their language. If empty, all results are False.
        least: share of the letters that must be in these scripts, 0 to 1. With 0 all results are
            False.

    Returns:
        (N,) bool, True for a text to drop. A text without letters is also True.
    """
    if not scripts or not least:
        return pl.Series([False] * len(texts), dtype=pl.Boolean)

    # Most texts have no foreign letter. Only the letters of the others are counted.
    own = "".join(rf"\p{{{script}}}" for script in scripts)
    has_foreign = texts.str.contains(rf"[\p{{L}}--[{own}]]")
    has_own = texts.str.contains(rf"[\p{{L}}&&[{own}]]")
    doubtful = has_foreign | ~has_own

    letters = texts.filter(doubtful).str.replace_all(r"\P{L}+", "")
    own_count = letters.str.replace_all(f"[^{own}]+", "").str.len_chars()
    is_wrong = (letters == "") | (own_count < least * letters.str.len_chars())
    return doubtful.scatter(doubtful.arg_true(), is_wrong)


@cache
def load_tokenizer(name: str) -> Any:
    """Load a fast tokenizer whose `backend_tokenizer` neither truncates nor pads.

    The result is cached for further calls with the same name.
    """
    from dap_transformers.tokenizers import forget_calls
    from dap_transformers.tokenizers import load_tokenizer as load

    tokenizer = load(name)
    forget_calls(tokenizer)
    return tokenizer


def load_helpers(options: PrepareOptions) -> None:
    """Load the tokenizer and try the language identifier, so that wrong names are found at once."""
    if options.tokenizer:
        load_tokenizer(options.tokenizer)
    if options.language_identifier:
        identified(options.language_identifier, ["One sentence."])


def identified(name: str, texts: list[str]) -> list[str]:
    """Return the language codes that the user's language identifier gives for some texts.

    Args:
        name: `module:function`. The function takes a list of texts and returns their codes. It is
            not called if there are no texts.
        texts: N texts.

    Returns:
        N codes as the function returned them, which need not be valid language codes.
    """
    identify = pkgutil.resolve_name(name)
    codes = list(identify(texts)) if texts else []
    if len(codes) != len(texts):
        raise UserError(f"{name} gave {len(codes)} codes for {len(texts)} texts; give one each")
    return codes
