"""Links between the words of a sentence and those of its translation.

A sentence's tokens have states, the encoder's vectors. Tokens that are each other's nearest by
cosine are linked (token alignment). For word alignment the states of a word's tokens are averaged
first (`word_states`). The functions take arrays only, not a model.

Legend: `S` source tokens or words, `T` target tokens or words, `W` words, `D` hidden size, `L`
links.
"""

import numpy as np

from dap_transformers.search.exact import unit_rows

#: Itermax of SimAlign: rounds, and the factor for tokens that already have a link.
ROUNDS = 2
LINKED_FACTOR = 0.9


def align_tokens(
    source_states: np.ndarray, target_states: np.ndarray, method: str = "argmax"
) -> tuple[np.ndarray, np.ndarray]:
    """Link the tokens that are each other's nearest by cosine.

    The methods are those of SimAlign (Jalili Sabet et al. 2020). "argmax" links mutual nearest
    tokens. "itermax" adds links in a second round (`itermax`). The rows may be tokens, as
    `SentenceEncoder.encode_tokens` gives them, or words (`word_states`). Of equal cosines the first
    token is nearest. A zero state has cosine 0 with everything, and no link.

    >>> links, similarity = align_tokens(np.eye(3), np.eye(3)[[1, 0]])
    >>> links.tolist(), similarity[2].tolist()
    ([[0, 1], [1, 0]], [0.0, 0.0])

    Args:
        source_states: (S, D), need not be normalised. S may be 0.
        target_states: (T, D), need not be normalised. T may be 0.
        method: "argmax" or "itermax".

    Returns:
        Links (L, 2) int64, pairs of source row and target row in ascending order. And the cosines
        of all rows, (S, T) float32.
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
    """Link tokens by cosine in two rounds, as "Itermax" of SimAlign does.

    The first round links tokens that are each other's nearest. The second round does so again and
    adds the new links. There a pair counts with its similarity if neither token has a link so far,
    with 0.9 times its similarity if one token has, and not at all if both have. Similarities are
    (cosine + 1) / 2, as in SimAlign's code.

    There is no second round if one side has at most two tokens, or if all tokens of a side have a
    link.

    >>> similarity = np.array([[0.9, 0.1, 0.8], [0.2, 0.7, 0.1], [0.3, 0.1, 0.2]])
    >>> itermax(similarity).astype(int).tolist()
    [[1, 0, 1], [0, 1, 0], [0, 0, 0]]

    Args:
        similarity: cosines (S, T) of source and target tokens.

    Returns:
        True for each link, (S, T) bool.
    """
    positive = (similarity.astype(np.float64) + 1) / 2
    linked = _mutual(positive)
    if min(linked.shape) <= 2:
        return linked
    for _ in range(ROUNDS - 1):
        free_source = ~linked.any(1, keepdims=True)  # (S, 1)
        free_target = ~linked.any(0, keepdims=True)  # (1, T)
        if not free_source.any() or not free_target.any():
            break
        both_are_free = free_source & free_target
        one_is_free = free_source | free_target
        factor = np.where(both_are_free, 1.0, np.where(one_is_free, LINKED_FACTOR, 0.0))
        linked = linked | (_mutual(positive * factor) & one_is_free)
    return linked


def _mutual(similarity: np.ndarray) -> np.ndarray:
    """Return True for each value that is the highest of both its row and its column, (S, T) bool.

    Of equal values the first counts as the highest.
    """
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
    """Average the states of the tokens of each word.

    A token that belongs to several words counts for each of them. A word without tokens (cut off,
    or dropped by the tokenizer) has a zero state.

    >>> is_part = overlaps(np.array([[0, 4], [5, 7]]), np.array([[0, 2], [2, 4], [5, 7]]))
    >>> word_states(np.array([[1.0], [3.0], [5.0]]), is_part)
    array([[2.],
           [5.]])

    Args:
        token_states: (S, D).
        is_part: (W, S) bool, which tokens belong to which word (`overlaps`).

    Returns:
        State of each word, (W, D) float64.
    """
    states = np.asarray(token_states, np.float64)
    return is_part @ states / np.maximum(is_part.sum(1, keepdims=True), 1)


def overlaps(word_spans: np.ndarray, token_spans: np.ndarray) -> np.ndarray:
    """Tell which tokens share a character with each word: (W, S) bool.

    Args:
        word_spans: (W, 2), first character of each word and the character after its last one.
        token_spans: (S, 2), first character of each token and the character after its last one.
    """
    first_shared = np.maximum(word_spans[:, None, 0], token_spans[:, 0])  # (W, S)
    end_of_shared = np.minimum(word_spans[:, None, 1], token_spans[:, 1])  # (W, S)
    return end_of_shared > first_shared
