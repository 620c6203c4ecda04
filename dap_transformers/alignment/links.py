"""Links between the words of a sentence and those of its translation, from the states of tokens.

Legend: `S` source tokens or words, `T` target tokens or words, `W` words, `D` hidden size, `L`
links.
"""

from collections.abc import Sequence

import numpy as np

from dap_transformers.alignment.words import Span
from dap_transformers.search.exact import unit_rows

LINKED_FACTOR = 0.9  # of tokens that already have a link, in Itermax of SimAlign


def align_tokens(
    source_states: np.ndarray, target_states: np.ndarray, method: str = "argmax"
) -> tuple[np.ndarray, np.ndarray]:
    """Link the tokens, or words, that are each other's nearest by cosine.

    The methods are those of SimAlign (Jalili Sabet et al. 2020): "argmax" links mutual nearest
    ones, "itermax" adds links in a second round. Of equal cosines the first is nearest. A zero
    state has cosine 0 with everything, and no link. States (S, D) and (T, D) may be of any length.

    >>> links, similarity = align_tokens(np.eye(3), np.eye(3)[[1, 0]])
    >>> links.tolist(), similarity[2].tolist()
    ([[0, 1], [1, 0]], [0.0, 0.0])

    Returns:
        Links (L, 2) int64 in ascending order, and all cosines, (S, T) float32.
    """
    # float64 products, so that equal states have equal cosines
    source = unit_rows(source_states, "source states").double().numpy()
    target = unit_rows(target_states, "target states").double().numpy()
    similarity = (source @ target.T).astype(np.float32)  # (S, T)
    has_source = np.flatnonzero(source.any(1))
    has_target = np.flatnonzero(target.any(1))
    comparable = similarity[np.ix_(has_source, has_target)]
    if not comparable.size:
        return np.empty((0, 2), np.int64), similarity

    linked = METHODS[method](comparable)
    rows, columns = np.nonzero(linked)  # (L,) each
    return np.stack([has_source[rows], has_target[columns]], 1).astype(np.int64), similarity


def itermax(similarity: np.ndarray) -> np.ndarray:
    """Link tokens by cosines (S, T) in two rounds, as "Itermax" of SimAlign: (S, T) bool.

    The second round adds links. There a pair counts with its similarity, (cosine + 1) / 2, if
    neither token has a link so far, with 0.9 times that if one token has, and not at all if both
    have. There is none if a side has at most two tokens, or has no token without a link.
    """
    positive = (similarity.astype(np.float64) + 1) / 2
    linked = _mutual(positive)
    free_source = ~linked.any(1, keepdims=True)  # (S, 1)
    free_target = ~linked.any(0, keepdims=True)  # (1, T)
    if min(linked.shape) <= 2 or not free_source.any() or not free_target.any():
        return linked

    both_are_free = free_source & free_target
    one_is_free = free_source | free_target
    factor = np.where(both_are_free, 1.0, np.where(one_is_free, LINKED_FACTOR, 0.0))
    return linked | (_mutual(positive * factor) & one_is_free)


def _mutual(similarity: np.ndarray) -> np.ndarray:
    """Tell which values are the highest, or the first such, of both row and column: (S, T) bool."""
    nearest_target = similarity.argmax(1)  # (S,)
    nearest_source = similarity.argmax(0)  # (T,)
    sources = np.arange(len(similarity))
    is_mutual = nearest_source[nearest_target] == sources  # (S,)
    linked = np.zeros(similarity.shape, bool)
    linked[sources[is_mutual], nearest_target[is_mutual]] = True
    return linked


#: How the links are found: name -> function of the cosines (S, T).
METHODS = {"argmax": _mutual, "itermax": itermax}


def word_states(token_states: np.ndarray, is_part: np.ndarray) -> np.ndarray:
    """Average the states (S, D) of the tokens of each word: (W, D) float64, 0 without tokens.

    >>> is_part = overlaps([(0, 4), (5, 7)], [(0, 2), (2, 4), (5, 7)])
    >>> word_states(np.array([[1.0], [3.0], [5.0]]), is_part).tolist()
    [[2.0], [5.0]]
    """
    states = np.asarray(token_states, np.float64)
    return is_part @ states / np.maximum(is_part.sum(1, keepdims=True), 1)


def overlaps(word_spans: Sequence[Span], token_spans: Sequence[Span]) -> np.ndarray:
    """Tell which of S tokens share a character with each of W words: (W, S) bool."""
    words = np.array(word_spans, np.int64).reshape(-1, 2)
    tokens = np.array(token_spans, np.int64).reshape(-1, 2)
    first_shared = np.maximum(words[:, None, 0], tokens[:, 0])  # (W, S)
    end_of_shared = np.minimum(words[:, None, 1], tokens[:, 1])  # (W, S)
    return end_of_shared > first_shared
