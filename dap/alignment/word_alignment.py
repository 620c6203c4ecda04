"""Token alignment of sentences and their translations, and how good it is. Arrays only, no model.

Which tokens are each other's nearest, the states of words from those of their subwords, and two measures against
reference links: retrieval of the linked token, and precision, recall and error rate of the links.

Legend: `P` sentence pairs, `S` source tokens, `T` target tokens, `W` words, `D` hidden size, `L` links, `Q` queries.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dap.errors import UserError
from dap.search import nearest

Arrays = Sequence[np.ndarray]


@dataclass(frozen=True)
class TokenRetrieval:
    """How often the nearest token by cosine is a linked one, in percent of the tokens that have a link.

    Attributes:
        pool: (source→target, target→source), among the other side's tokens of all pairs.
        sentence: the same, among the tokens of the sentence's own translation.
        queries: number of linked tokens on the source side and on the target side.
    """

    pool: tuple[float, float]
    sentence: tuple[float, float]
    queries: tuple[int, int]


@dataclass(frozen=True)
class AlignmentQuality:
    """Links against a reference, in percent; `error_rate` is the lower the better.

    Attributes:
        precision: share of the links that the reference has as possible.
        recall: share of the reference's sure links that were found.
        error_rate: AER.
    """

    precision: float
    recall: float
    error_rate: float


def align_tokens(
    source_states: np.ndarray, target_states: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Links the tokens that are each other's nearest by cosine, such as those of `SentenceEncoder.encode_tokens`.

    Of equal cosines the token of the lowest number is nearest. A zero state has cosine 0 with everything, and no link.
    A sentence without tokens has no links.

    >>> links, similarity = align_tokens(np.eye(3), np.eye(3)[[1, 0]])
    >>> links.tolist(), similarity[2].tolist()
    ([[0, 1], [1, 0]], [0.0, 0.0])

    Args:
        source_states: (S, D), need not be normalised.
        target_states: (T, D).

    Returns:
        links (L, 2) int64, token numbers of source and target, ascending; and similarity (S, T) float32, the cosines.

    Raises:
        ValueError: not two-dimensional, unequal D, or a state that is not finite (side and token are named).
    """
    source, target = _unit(source_states, "source"), _unit(target_states, "target")
    if source.shape[1] != target.shape[1]:
        raise UserError(
            f"source states have {source.shape[1]} dimensions, target states {target.shape[1]}: "
            f"use one encoder for both"
        )
    similarity = (source @ target.T).astype(np.float32)  # (S, T)
    if not similarity.size:
        return np.empty((0, 2), np.int64), similarity
    forward, backward = similarity.argmax(1), similarity.argmax(0)  # (S,), (T,)
    says = source.any(1) & target.any(1)[forward]  # (S,)
    linked = np.flatnonzero(says & (backward[forward] == np.arange(len(forward))))  # (L,)
    return np.stack([linked, forward[linked]], 1).astype(np.int64), similarity


def word_states(
    token_states: np.ndarray, token_spans: np.ndarray, word_spans: np.ndarray
) -> np.ndarray:
    """A word's state: the mean over the subwords that share a character with it, (W, D) float64.

    A subword of several words counts for each. A word without subwords (cut off, or dropped by the tokenizer) has a
    zero state.

    >>> word_states(np.array([[1.0], [3.0], [5.0]]), np.array([[0, 2], [2, 4], [5, 7]]), np.array([[0, 4], [5, 7]]))
    array([[2.],
           [5.]])

    Args:
        token_states: (S, D).
        token_spans: (S, 2), first character and the one after the last, such as a tokenizer's offsets.
        word_spans: (W, 2), the same of the words.

    Raises:
        ValueError: unequal numbers of states and spans.
    """
    states = np.asarray(token_states, np.float64)
    tokens, words = (
        np.asarray(spans, np.int64).reshape(-1, 2) for spans in (token_spans, word_spans)
    )
    if len(states) != len(tokens):
        raise UserError(
            f"{len(states)} token states and {len(tokens)} spans: give one span a token"
        )
    shared = np.minimum(words[:, None, 1], tokens[:, 1]) > np.maximum(
        words[:, None, 0], tokens[:, 0]
    )  # (W, S)
    return shared @ states / np.maximum(shared.sum(1, keepdims=True), 1)


def token_retrieval_accuracy(
    source_states: Arrays, target_states: Arrays, links: Arrays
) -> TokenRetrieval:
    """For each linked token: is its nearest token of the other side, by cosine, one that it is linked to?

    The pool is the other side's tokens of all pairs, as sentence retrieval on Tatoeba searches all sentences; equal
    tokens elsewhere in it are misses, and so is a token with a zero state. Of equal cosines the first token is taken.

    >>> states = [np.eye(3)[:2], np.eye(3)[[2, 0]]]
    >>> token_retrieval_accuracy(states, states, [np.array([[0, 0], [1, 1]]), np.array([[0, 0], [1, 1]])])
    TokenRetrieval(pool=(75.0, 75.0), sentence=(100.0, 100.0), queries=(4, 4))

    Args:
        source_states: P arrays (S_i, D), need not be normalised.
        target_states: P arrays (T_i, D).
        links: P arrays (L_i, 2), token numbers of source and target.

    Raises:
        ValueError: unequal numbers of pairs, no links at all, a link beyond the tokens, or a state that is not finite.
    """
    _require_pairs(source_states, target_states, links)
    _require_links(links)
    turned = [np.asarray(pair).reshape(-1, 2)[:, ::-1] for pair in links]
    forward, backward = (
        _hits(source_states, target_states, links),
        _hits(target_states, source_states, turned),
    )
    pool, sentence, queries = zip(forward, backward, strict=True)
    return TokenRetrieval(pool, sentence, queries)


def alignment_quality(
    links: Arrays, sure: Arrays, possible: Arrays | None = None
) -> AlignmentQuality:
    """Precision, recall and alignment error rate over all pairs (Och and Ney 2003, section 5.2).

    With links A, sure links S and possible links P (which include S): precision |A ∩ P| / |A|, recall |A ∩ S| / |S|,
    AER 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|). No link at all has precision 0.

    >>> alignment_quality([np.array([[0, 0], [1, 1]])], [np.array([[0, 0], [2, 2]])], [np.array([[1, 1]])])
    AlignmentQuality(precision=100.0, recall=50.0, error_rate=25.0)

    Args:
        links: P arrays (L_i, 2) of distinct links, such as those of `align_tokens` (SimAlign's "Argmax", Jalili
            Sabet et al. 2020).
        sure: P arrays (L_i, 2), the reference.
        possible: P arrays (L_i, 2) of further links that are no mistakes; None where the reference knows only one
            kind.

    Raises:
        ValueError: unequal numbers of pairs, or no sure links.
    """
    possible = sure if possible is None else possible
    _require_pairs(links, sure, possible)
    _require_links(sure)
    found, certain, allowed = _link_set(links), _link_set(sure), _link_set(possible)
    right, correct = len(found & certain), len(found & (allowed | certain))
    error = 1 - (right + correct) / (len(found) + len(certain))
    return AlignmentQuality(
        100 * correct / max(len(found), 1), 100 * right / len(certain), 100 * error
    )


def _require_pairs(*sides: Arrays) -> None:
    if len({len(side) for side in sides}) > 1:
        raise UserError(
            f"{' and '.join(str(len(side)) for side in sides)} pairs: give as many of each"
        )


def _require_links(links: Arrays) -> None:
    if not any(len(pair) for pair in links):
        raise UserError(
            f"the reference has no link in {len(links)} pairs: there is nothing to measure against"
        )


def _link_set(links: Arrays) -> set[tuple[int, int, int]]:
    return {(row, int(i), int(j)) for row, pair in enumerate(links) for i, j in pair}


def _hits(queries: Arrays, keys: Arrays, links: Arrays) -> tuple[float, float, int]:
    """Accuracy in percent of the linked queries, in the pool and in the sentence, and their number Q."""
    first_query, first_key = (
        np.cumsum([0, *map(len, side)]) for side in (queries, keys)
    )  # (P + 1,)
    linked = set()
    for row, i, j in _link_set(links):
        if not (0 <= i < len(queries[row]) and 0 <= j < len(keys[row])):
            sizes = f"{len(queries[row])} and {len(keys[row])} tokens"
            raise UserError(
                f"pair {row}: a link ({i}, {j}) between sentences of {sizes}: count both from 0"
            )
        linked.add((first_query[row] + i, first_key[row] + j))
    asked = np.array(sorted({query for query, _ in linked}), np.int64)  # (Q,)
    states = np.concatenate(queries)[asked]  # (Q, D)
    in_pool = nearest(states, np.concatenate(keys))  # (Q,)
    in_sentence = np.full(int(first_query[-1]), -1)
    for row in range(len(links)):
        if len(links[row]):
            found = align_tokens(queries[row], keys[row])[1].argmax(1)  # (S,)
            in_sentence[first_query[row] : first_query[row + 1]] = first_key[row] + found
    accuracies = [
        100
        * sum((i, j) in linked and says for i, j, says in zip(asked, found, states.any(1).tolist()))
        / len(asked)
        for found in (in_pool, in_sentence[asked])
    ]
    return accuracies[0], accuracies[1], len(asked)


def _unit(states: np.ndarray, side: str) -> np.ndarray:
    """The states divided by their length, float64; zero states stay zero."""
    states = np.asarray(states, np.float64)
    if states.ndim != 2 or states.shape[1] == 0:
        raise UserError(f"{side} states have shape {states.shape}: expected (tokens, dimensions)")
    if len(bad := np.flatnonzero(~np.isfinite(states).all(1))):
        raise UserError(
            f"{side} states: token {bad[0]} has NaN or infinite values; check the model's weights"
        )
    largest = np.abs(states).max(1, keepdims=True)  # (N, 1): squares cannot overflow
    states = states / np.where(largest > 0, largest, 1)
    length = np.linalg.norm(states, axis=1, keepdims=True)  # (N, 1)
    return states / np.where(length > 0, length, 1)
