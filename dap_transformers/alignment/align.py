"""Align the words of sentences with those of their translations, with any encoder.

Legend: `P` sentence pairs, `S` source words, `T` target words, `W` words of a sentence, `N` tokens
of a sentence, `L` links, `D` hidden size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dap_transformers.alignment.links import METHODS, align_tokens, overlaps, word_states
from dap_transformers.alignment.pharaoh import format_links
from dap_transformers.alignment.words import (
    WORDS,
    Span,
    space_words,
    tokenizer_words,
    with_word_marks,
)
from dap_transformers.encoding.encoder import SentenceEncoder
from dap_transformers.errors import UserError

#: How the states of a word's subwords become links of words.
SUBWORDS = ("mean", "first", "link")
#: Pairs that are encoded at a time. This bounds the memory of the token states.
CHUNK = 512


@dataclass(frozen=True)
class WordAlignment:
    """The words of a sentence pair and their links.

    Attributes:
        source: S words.
        target: T words.
        links: (L, 2) int64, numbers of a source and a target word, from 0, in ascending order.
        similarity: (S, T) float32, cosines of the words. With `subwords="link"` it is the highest
            cosine of their subwords. A word without tokens has cosine 0.
        without_state: number of words of both sides that have no tokens and so no state, because
            the sentence was cut or the tokenizer dropped them. These words get no link.
    """

    source: list[str]
    target: list[str]
    links: np.ndarray
    similarity: np.ndarray
    without_state: int

    @property
    def cosines(self) -> np.ndarray:
        """Return the cosine of the two words of each link, (L,) float32."""
        return self.similarity[self.links[:, 0], self.links[:, 1]]

    def pharaoh(self) -> str:
        """Return the links of the sentence pair in Pharaoh format, such as `0-1 2-0`."""
        return format_links(self.links)


@dataclass(frozen=True)
class _Tokens:
    """The words and tokens of a sentence.

    A span is two numbers: the position of the first character, and the position after the last one.

    Attributes:
        words: W words.
        word_spans: (W, 2) int64, span of each word in the sentence.
        states: (N, D), the encoder's vector of each token.
        token_spans: (N, 2) int64, span of each token in the sentence.
    """

    words: list[str]
    word_spans: np.ndarray
    states: np.ndarray
    token_spans: np.ndarray


def align_words(
    encoder: SentenceEncoder,
    source: Sequence[str],
    target: Sequence[str],
    method: str = "argmax",
    subwords: str = "mean",
    words: str = "spaces",
    token_budget: int = 4096,
    layer: int | None = None,
) -> list[WordAlignment]:
    """Link the words of each sentence with the words of its translation.

    Example:
        encoder = SentenceEncoder.from_pretrained("out")
        [aligned] = align_words(encoder, ["Wo ist der Bahnhof?"], ["Where is the station?"])
        print(aligned.pharaoh())  # 0-0 1-1 2-2 3-3

    Args:
        encoder: makes the token states.
        source: P sentences.
        target: P translations.
        method: "argmax" links words that are each other's nearest. "itermax" adds links in a second
            round (`dap_transformers.alignment.itermax`).
        subwords: "mean" and "first" give a word the mean state of its subwords or the first one.
            "link" links subwords, and with them their words, as SimAlign does by default.
        words: "spaces" takes the words between spaces. "tokenizer" takes the tokenizer's words. Use
            it for text without spaces between words, such as Chinese.
        token_budget: most tokens of a batch, padding included.
        layer: hidden layer of the token states, from 0 (embeddings). None takes the last.

    Returns:
        The alignment of each of the P pairs.
    """
    if isinstance(source, str) or isinstance(target, str):
        raise UserError("a single string is given: pass lists of sentences")
    if len(source) != len(target):
        raise UserError(
            f"{len(source)} source and {len(target)} target sentences: give one translation each"
        )
    pairs = zip(source, target, strict=True)
    return list(stream_alignments(encoder, pairs, method, subwords, words, token_budget, layer))


def stream_alignments(
    encoder: SentenceEncoder,
    pairs: Iterable[tuple[str, str]],
    method: str = "argmax",
    subwords: str = "mean",
    words: str = "spaces",
    token_budget: int = 4096,
    layer: int | None = None,
) -> Iterator[WordAlignment]:
    """Yield the word alignment of each pair of sentences, in the order of the pairs.

    Memory does not grow with the number of pairs: `CHUNK` pairs are read and encoded at a time.

    Args:
        encoder: makes the token states.
        pairs: sentences with their translations.
        method: "argmax" or "itermax", as in `align_words`.
        subwords: "mean", "first" or "link", as in `align_words`.
        words: what counts as a word, "spaces" or "tokenizer", as in `align_words`.
        token_budget: most tokens of a batch, padding included.
        layer: hidden layer of the token states, as in `align_words`.
    """
    for name, value, choices in (
        ("method", method, METHODS),
        ("subwords", subwords, SUBWORDS),
        ("words", words, WORDS),
    ):
        if value not in choices:
            raise UserError(f"{name}={value!r}: choose one of {', '.join(choices)}")

    pairs = iter(pairs)
    number = 0
    while chunk := list(islice(pairs, CHUNK)):
        sentences = [source for source, _ in chunk] + [target for _, target in chunk]
        tokens = _tokens_of(encoder, sentences, words, token_budget, layer)
        for source, target in zip(tokens[: len(chunk)], tokens[len(chunk) :], strict=True):
            number += 1
            try:
                yield _align(source, target, method, subwords)
            except ValueError as error:
                raise UserError(f"pair {number}: {error}") from error


def _tokens_of(
    encoder: SentenceEncoder,
    sentences: Sequence[str],
    words: str,
    token_budget: int,
    layer: int | None,
) -> list[_Tokens]:
    """Encode sentences, and find their words.

    Returns:
        Words and tokens of each sentence, in the order of the sentences.
    """
    token_states, places = encoder.encode_located_tokens(sentences, token_budget, layer)
    found = []
    for sentence, states, own in zip(sentences, token_states, places, strict=True):
        if words == "tokenizer":
            word_spans = tokenizer_words(sentence, own.spans, own.words)
        else:
            word_spans = space_words(sentence)
        spans = with_word_marks(sentence, own.spans)
        texts = [sentence[start:end] for start, end in word_spans]
        found.append(_Tokens(texts, _array(word_spans), states, _array(spans)))
    return found


def _align(source: _Tokens, target: _Tokens, method: str, subwords: str) -> WordAlignment:
    """Align the words of one sentence pair.

    Returns:
        The words of both sentences, their links and their cosines.
    """
    missing = 0
    for side in (source, target):
        missing += int((~_is_part(side).any(1)).sum())
    if subwords == "link":
        links, similarity = _align_by_subwords(source, target, method)
    else:
        pooled = word_states if subwords == "mean" else _first_states
        source_states = pooled(source.states, source.token_spans, source.word_spans)
        target_states = pooled(target.states, target.token_spans, target.word_spans)
        links, similarity = align_tokens(source_states, target_states, method)
    return WordAlignment(source.words, target.words, links, similarity, missing)


def _align_by_subwords(
    source: _Tokens, target: _Tokens, method: str
) -> tuple[np.ndarray, np.ndarray]:
    """Link two words if one of the source word's subwords is linked with one of the target word's.

    Returns:
        Links of words (L, 2) int64. And for each source word and target word the highest cosine of
        their subwords, (S, T) float32. It is 0 for a word without tokens.
    """
    token_links, token_similarity = align_tokens(source.states, target.states, method)
    of_source = _is_part(source)  # (S, N)
    of_target = _is_part(target)  # (T, N)
    links = set()
    for i, j in token_links.tolist():
        for source_word in np.flatnonzero(of_source[:, i]).tolist():
            for target_word in np.flatnonzero(of_target[:, j]).tolist():
                links.add((source_word, target_word))

    similarity = np.zeros((len(source.words), len(target.words)), np.float32)
    for source_word, own_source in enumerate(of_source):
        for target_word, own_target in enumerate(of_target):
            cosines = token_similarity[np.ix_(own_source, own_target)]
            if cosines.size:
                similarity[source_word, target_word] = cosines.max()
    return _array(sorted(links)), similarity


def _first_states(
    token_states: np.ndarray, token_spans: np.ndarray, word_spans: np.ndarray
) -> np.ndarray:
    """Return the state of each word's first token, (W, D) float64.

    A word without tokens gets zeros.

    Args:
        token_states: state of each token, (N, D).
        token_spans: (N, 2), span of each token.
        word_spans: (W, 2), span of each word.
    """
    is_part = overlaps(word_spans, token_spans)
    states = np.zeros((len(word_spans), token_states.shape[1]))
    has_token = is_part.any(1)
    states[has_token] = token_states[is_part.argmax(1)[has_token]]
    return states


def _is_part(tokens: _Tokens) -> np.ndarray:
    """Tell which tokens belong to which word: (W, N) bool. They do if they share a character."""
    return overlaps(tokens.word_spans, tokens.token_spans)


def _array(spans: Sequence[Span]) -> np.ndarray:
    """Return spans or links as an array (N, 2) int64."""
    return np.array(spans, np.int64).reshape(-1, 2)
