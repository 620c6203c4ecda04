"""Where the words of a sentence stand: at spaces and punctuation, or as the tokenizer sees them."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import regex
from regex import Pattern

from dap_transformers.languages import UNSPACED

#: First character of a word or token, and the character after its last one.
Span = tuple[int, int]

#: A letter of a script that puts no spaces between words.
_UNSPACED = regex.compile(f"[{UNSPACED}]")
#: What stands between two neighbouring letters of such scripts: nothing, or spaces.
_GAP = regex.compile(rf"[{UNSPACED}](\s*)(?=[{UNSPACED}])")
#: Where words have spaces between them, a larger share of these places has spaces.
SPACED_GAPS = 0.1
#: Words between spaces, as SimAlign and fast_align count them.
SPACED = regex.compile(r"\S+")
#: An opening bracket, up to 50 characters without blanks, and a closing bracket. There may be other
#: brackets inside.
BRACKETS = r"\p{Ps}(?>[^\s\p{Ps}\p{Pe}]|\p{Ps}[^\s\p{Ps}\p{Pe}]{0,50}\p{Pe}){0,50}\p{Pe}"
#: Words between spaces, with the punctuation around them split off. Brackets that a word opens and
#: ends with belong to it, such as "chmod(1)".
PUNCTUATED = regex.compile(rf"\p{{P}}+|[^\p{{P}}\s]((?>{BRACKETS}|\S)*([^\p{{P}}\s]|{BRACKETS}))?")


def words_like(pattern: Pattern, sentence: str, *_: Any) -> list[Span]:
    """Return the spans of the words that a pattern matches.

    >>> words_like(SPACED, "Ya, Caín's..."), words_like(PUNCTUATED, "Ya, Caín's...")
    ([(0, 3), (4, 13)], [(0, 2), (2, 3), (4, 10), (10, 13)])
    >>> words_like(PUNCTUATED, "(see f(x(1)))")
    [(0, 1), (1, 4), (5, 12), (12, 13)]
    """
    return [match.span() for match in pattern.finditer(sentence)]


def tokenizer_words(
    sentence: str, token_spans: Sequence[Span], token_words: Sequence[int | None]
) -> list[Span]:
    """Return the spans of the words into which the tokenizer divides a sentence.

    A word starts at the first token after a space, and at a token to which the tokenizer gives
    another word number. In scripts without spaces between words, such as Chinese or Thai, every
    token starts a word. Spaces are left out. Spans and numbers (S) are those of `TokenPlaces`.

    >>> tokenizer_words("er lief", [(0, 2), (3, 5), (5, 7)], [0, 1, 1])
    [(0, 2), (3, 7)]
    """
    words: list[Span] = []
    last_number: int | None = None
    for (start, end), number in zip(token_spans, token_words, strict=True):
        # leave out the spaces that some tokenizers count to the token
        text = sentence[start:end]
        start += len(text) - len(text.lstrip())
        end = start + len(text.strip())
        if start == end:
            continue

        begins = not words or start > words[-1][1] or number != last_number
        if not begins and start == words[-1][1]:
            begins = bool(_UNSPACED.search(sentence[start - 1 : start + 1]))
        if begins and not (words and start < words[-1][1]):
            words.append((start, end))
        else:  # also a token that shares a character with the one before
            first, last = words[-1]
            words[-1] = (first, max(last, end))
        last_number = number
    return words


def with_word_marks(sentence: str, token_spans: Sequence[Span]) -> list[Span]:
    """Extend the span of each token that covers only spaces by the next token's first character.

    SentencePiece has such tokens. They mark where a word starts, so they belong to that word.
    """
    spans = list(token_spans)
    for number, (start, end) in enumerate(spans[:-1]):
        if sentence[start:end].isspace():
            spans[number] = (start, spans[number + 1][0] + 1)
    return spans


def is_unsegmented(sentences: Iterable[str]) -> bool:
    """Tell whether most sentences are in scripts without spaces, and have hardly any spaces.

    "Most" counts sentences with two neighbouring letters of such scripts. "Hardly any" means that
    less than `SPACED_GAPS` of these neighbours have spaces between them.

    >>> is_unsegmented(["打开文件"]), is_unsegmented(["他们 在 车站"])
    (True, False)
    """
    gaps = [_GAP.findall(sentence) for sentence in sentences]
    found = list(chain.from_iterable(gaps))
    is_most = sum(map(bool, gaps)) > len(gaps) / 2
    return is_most and sum(map(bool, found)) < SPACED_GAPS * len(found)
