"""Word alignment of sentences and their translations, and two measures of its quality.

A sentence's tokens have states, the encoder's vectors. Tokens that are each other's nearest by
cosine are linked (token alignment). For word alignment the states of a word's tokens are averaged
first (`word_states`). The functions take arrays only, not a model.

Legend: `P` sentence pairs, `S` source tokens or words, `T` target tokens or words, `W` words, `D`
hidden size, `L` links, `Q` linked tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dap_transformers.errors import UserError, counted
from dap_transformers.search.exact import nearest, unit_rows

Arrays = Sequence[np.ndarray]
#: Number of the sentence pair, of the source token and of the target token.
Link = tuple[int, int, int]

#: How the links are found.
METHODS = ("argmax", "itermax")
#: Itermax of SimAlign: rounds, and the factor for tokens that already have a link.
ROUNDS = 2
LINKED_FACTOR = 0.9


@dataclass(frozen=True)
class TokenRetrieval:
    """How often a token's nearest token of the other side is one that it is linked to.

    The links are given by a reference. Only tokens with a link are queries. Accuracies are in
    percent of these.

    Attributes:
        pool: accuracy (source→target, target→source) if the tokens of all pairs are candidates.
        sentence: accuracy (source→target, target→source) if only the tokens of the sentence's own
            translation are candidates.
        queries: number of linked tokens on the source side and on the target side.
    """

    pool: tuple[float, float]
    sentence: tuple[float, float]
    queries: tuple[int, int]


@dataclass(frozen=True)
class AlignmentQuality:
    """How well links agree with a reference, in percent.

    Attributes:
        precision: share of the links that are sure or possible links of the reference.
        recall: share of the reference's sure links that were found.
        error_rate: alignment error rate (AER), from 0 (perfect) to 100.
    """

    precision: float
    recall: float
    error_rate: float


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
    if method not in METHODS:
        raise UserError(f"method={method!r}: choose one of {', '.join(METHODS)}")
    # float64 products, so that equal states have equal cosines
    source = unit_rows(source_states, "source states").double().numpy()
    target = unit_rows(target_states, "target states").double().numpy()
    if source.shape[1] != target.shape[1]:
        raise UserError(
            f"source states have {source.shape[1]} dimensions, target states {target.shape[1]}: "
            "use one encoder for both"
        )
    similarity = (source @ target.T).astype(np.float32)  # (S, T)
    has_source = np.flatnonzero(source.any(1))
    has_target = np.flatnonzero(target.any(1))
    comparable = similarity[np.ix_(has_source, has_target)]
    if not comparable.size:
        return np.empty((0, 2), np.int64), similarity

    linked = _mutual(comparable) if method == "argmax" else itermax(comparable)
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


def word_states(
    token_states: np.ndarray, token_spans: np.ndarray, word_spans: np.ndarray
) -> np.ndarray:
    """Average the states of the tokens of each word.

    A token belongs to a word if they share a character. A token that belongs to several words
    counts for each of them. A word without tokens (cut off, or dropped by the tokenizer) has a zero
    state.

    >>> token_spans = np.array([[0, 2], [2, 4], [5, 7]])
    >>> word_spans = np.array([[0, 4], [5, 7]])
    >>> word_states(np.array([[1.0], [3.0], [5.0]]), token_spans, word_spans)
    array([[2.],
           [5.]])

    Args:
        token_states: (S, D).
        token_spans: (S, 2), first character of each token and the character after its last one, as
            a tokenizer's offset mapping has them.
        word_spans: (W, 2), first character of each word and the character after its last one.

    Returns:
        State of each word, (W, D) float64.
    """
    states = np.asarray(token_states, np.float64)
    token_spans = np.asarray(token_spans, np.int64).reshape(-1, 2)
    word_spans = np.asarray(word_spans, np.int64).reshape(-1, 2)
    if len(states) != len(token_spans):
        raise UserError(
            f"{len(states)} token states and {len(token_spans)} spans: give one span per token"
        )
    is_part = overlaps(word_spans, token_spans)
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


def token_retrieval_accuracy(
    source_states: Arrays, target_states: Arrays, links: Arrays
) -> TokenRetrieval:
    """Measure how often a token's nearest token of the other side is one that it is linked to.

    Only tokens with a link are queries. The candidates are first the tokens of all pairs, as
    sentence retrieval on Tatoeba searches all sentences. Second they are the tokens of the
    sentence's own translation. Finding the same token in another pair is a miss. A query with a
    zero state is also a miss. Of equal cosines the first token is taken.

    >>> states = [np.eye(3)[:2], np.eye(3)[[2, 0]]]
    >>> links = [np.array([[0, 0], [1, 1]]), np.array([[0, 0], [1, 1]])]
    >>> token_retrieval_accuracy(states, states, links)
    TokenRetrieval(pool=(75.0, 75.0), sentence=(100.0, 100.0), queries=(4, 4))

    Args:
        source_states: P arrays (S_i, D), need not be normalised.
        target_states: P arrays (T_i, D), need not be normalised.
        links: P arrays (L_i, 2) with the right links: pairs of source and target token, from 0.

    Returns:
        Accuracies in percent and numbers of queries, in both directions.
    """
    _require_pairs(source_states, target_states, links)
    _require_links(links)
    swapped = [np.asarray(pair).reshape(-1, 2)[:, ::-1] for pair in links]
    forward_pool, forward_sentence, sources = _hits(source_states, target_states, links)
    backward_pool, backward_sentence, targets = _hits(target_states, source_states, swapped)
    return TokenRetrieval(
        pool=(forward_pool, backward_pool),
        sentence=(forward_sentence, backward_sentence),
        queries=(sources, targets),
    )


def alignment_quality(
    links: Arrays, sure: Arrays, possible: Arrays | None = None
) -> AlignmentQuality:
    """Compute precision, recall and alignment error rate (AER) over all pairs.

    See Och and Ney (2003), section 5.2. With links A, sure links S and possible links P, which
    include S:

    - precision = |A ∩ P| / |A|, or 0 if there are no links
    - recall = |A ∩ S| / |S|
    - AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|)

    >>> sure, possible = np.array([[0, 0], [2, 2]]), np.array([[1, 1]])
    >>> alignment_quality([np.array([[0, 0], [1, 1]])], [sure], [possible])
    AlignmentQuality(precision=100.0, recall=50.0, error_rate=25.0)

    Args:
        links: P arrays (L_i, 2) of the links to judge, as `align_tokens` gives them.
        sure: P arrays (L_i, 2), the links of the reference that should be found.
        possible: P arrays (L_i, 2) of further links that are no mistakes. None if the reference has
            only sure links.

    Returns:
        The three numbers, in percent.
    """
    possible = sure if possible is None else possible
    _require_pairs(links, sure, possible)
    _require_links(sure)
    found = set(_all_links(links))
    sure_links = set(_all_links(sure))
    possible_links = set(_all_links(possible)) | sure_links
    found_sure = len(found & sure_links)
    found_possible = len(found & possible_links)
    error = 1 - (found_sure + found_possible) / (len(found) + len(sure_links))
    return AlignmentQuality(
        precision=100 * found_possible / max(len(found), 1),
        recall=100 * found_sure / len(sure_links),
        error_rate=100 * error,
    )


def _require_pairs(*sides: Arrays) -> None:
    """Raise `UserError` unless all lists have the same number of pairs."""
    if len({len(side) for side in sides}) > 1:
        counts = " and ".join(str(len(side)) for side in sides)
        raise UserError(f"{counts} pairs: give the same number of each")


def _require_links(links: Arrays) -> None:
    """Raise `UserError` if no sentence pair of the reference has a link."""
    if not any(len(pair) for pair in links):
        raise UserError(
            f"the reference has no link in {counted(len(links), 'pair')}: there is nothing to "
            "measure against"
        )


def _all_links(links: Arrays) -> Iterable[Link]:
    """Yield (pair, source token, target token) for the links of all pairs."""
    for row, pair in enumerate(links):
        for i, j in pair:
            yield row, int(i), int(j)


def _hits(queries: Arrays, keys: Arrays, links: Arrays) -> tuple[float, float, int]:
    """Measure one direction of `token_retrieval_accuracy`.

    Args:
        queries: P arrays (S_i, D), states of the tokens whose translation is looked for.
        keys: P arrays (T_i, D), states of the tokens of the other side.
        links: P arrays (L_i, 2), pairs of query and key, from 0.

    Returns:
        Accuracy in percent among the keys of all pairs, accuracy in percent among the keys of the
        query's own pair, and the number of linked queries, Q.
    """
    # number the tokens of all pairs in one row
    first_query = np.cumsum([0, *map(len, queries)])  # (P + 1,)
    first_key = np.cumsum([0, *map(len, keys)])  # (P + 1,)
    linked = set()
    for row, i, j in _all_links(links):
        if not (0 <= i < len(queries[row]) and 0 <= j < len(keys[row])):
            raise UserError(
                f"pair {row}: a link ({i}, {j}) between sentences of {len(queries[row])} and "
                f"{len(keys[row])} tokens: count both from 0"
            )
        linked.add((first_query[row] + i, first_key[row] + j))
    asked = np.array(sorted({query for query, _ in linked}), np.int64)  # (Q,)

    # find the nearest key of each linked query, among all keys and among those of its pair
    states = np.concatenate(queries)[asked]  # (Q, D)
    in_pool = nearest(states, np.concatenate(keys))  # (Q,)
    in_sentence = np.full(int(first_query[-1]), -1)  # of all queries
    for row in range(len(links)):
        if len(links[row]):
            _, similarity = align_tokens(queries[row], keys[row])
            own_keys = first_key[row] + similarity.argmax(1)  # (S,)
            in_sentence[first_query[row] : first_query[row + 1]] = own_keys

    has_state = states.any(1)  # (Q,)

    def accuracy(found: np.ndarray) -> float:
        hits = sum(has_state[at] and (asked[at], found[at]) in linked for at in range(len(asked)))
        return 100 * int(hits) / len(asked)

    return accuracy(in_pool), accuracy(in_sentence[asked]), len(asked)
