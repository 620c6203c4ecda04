"""Find translations in two texts, by margin scores over nearest neighbours.

Mined pairs are a structured array (P,) of `PAIR`.

Legend: `N` source rows, `M` target rows, `D` dimensions, `k` neighbours, `P` pairs, `K` known
translations.
"""

import logging

import numpy as np

from dap_transformers.errors import UserError
from dap_transformers.search.exact import (
    Found,
    Neighbours,
    NeighbourSearch,
    mutual_neighbours,
    nearest_neighbours,
    unit_rows,
)

logger = logging.getLogger(__name__)

#: Vectors of source and target.
Vectors = tuple[np.ndarray, np.ndarray]
#: A pair of a source row and a target row (or line, from 0) with its margin score.
PAIR = np.dtype([("score", np.float64), ("source", np.int64), ("target", np.int64)])


def neighbourhoods(
    source: np.ndarray,
    target: np.ndarray,
    k: int = 4,
    search: NeighbourSearch = mutual_neighbours,
    extra: int = 0,
) -> Neighbours:
    """Find the k + `extra` nearest neighbours of all source rows (N, D) and target rows (M, D).

    If a text has fewer than k sentences, k is reduced to their number, with a warning.
    """
    fewest = min(len(source), len(target))
    if k > fewest:
        text = "k=%d neighbours, but a text has only %d distinct sentences: k=%d is used"
        logger.warning(text, k, fewest, fewest)
    return search(source, target, min(k + extra, fewest))


def margin_of(cosine: np.ndarray, source_mean: np.ndarray, target_mean: np.ndarray) -> np.ndarray:
    """Compute the margin of pairs: how their cosine compares with the sentences' neighbourhoods.

    The score is cosine / b, as in Artetxe & Schwenk (2019), section 3, or 0 where b is not
    positive. b is the mean of the mean cosines of both sentences and their k nearest. Arrays are
    broadcast, the result is float64.

    The paper's appendix "Scoring Function For BUCC" prints the ratio without the factor ½ in b, and
    φ(x, y) where φ(x, z) is meant.

    >>> margin_of(np.array([0.9]), np.array([0.7]), np.array([0.5])).round(6).tolist()
    [1.5]
    """
    cosine = np.asarray(cosine, np.float64)
    mean = (source_mean + target_mean) / 2
    return np.divide(cosine, mean, out=np.zeros_like(cosine), where=mean > 0)


def candidate_pairs(neighbours: Neighbours) -> np.ndarray:
    """Choose the pairs (P,) that may be translations, best first, then by source and target row.

    The candidate of a sentence is the one of its k neighbours with the best margin. Of the
    candidates of both sides the best are kept, and no sentence twice ("max" retrieval, Artetxe &
    Schwenk 2019, section 3.2, as in LASER).

    >>> found = mutual_neighbours(np.eye(3), np.eye(3)[[1, 2, 0]], k=2)
    >>> candidate_pairs(found).tolist()
    [(2.0, 0, 2), (2.0, 1, 0), (2.0, 2, 1)]
    """
    near_source, near_target = neighbours
    forward = _best_candidates(near_source, near_target, "source", "target")
    backward = _best_candidates(near_target, near_source, "target", "source")
    both = np.concatenate([forward, backward])
    both = both[np.lexsort((both["target"], both["source"], -both["score"]))]
    return _without_repeated_sentences(both, len(forward), len(backward))


def _best_candidates(near: Found, near_other: Found, own: str, other: str) -> np.ndarray:
    """Pair each row of the side `own` with its neighbour of best margin: (N,) of `PAIR`.

    `near` are the neighbours (N, k) of its rows, and `near_other` those (M, k) of the other side.
    """
    cosines, indices = near
    own_means = cosines.mean(1, dtype=np.float64, keepdims=True)
    other_means = near_other.scores.mean(1, dtype=np.float64)  # (M,)
    scores = margin_of(cosines, own_means, other_means[indices])  # (N, k)
    rows = np.arange(len(scores))
    best = scores.argmax(1)
    pairs = np.empty(len(scores), PAIR)
    pairs["score"] = scores[rows, best]
    pairs[own] = rows
    pairs[other] = indices[rows, best]
    return pairs


def _without_repeated_sentences(
    pairs: np.ndarray, source_count: int, target_count: int
) -> np.ndarray:
    """Keep the pairs in their order, each sentence only in the first one that can be kept."""
    source_taken = bytearray(source_count)
    target_taken = bytearray(target_count)
    is_kept = np.zeros(len(pairs), bool)
    # single numbers are read faster from a memoryview than through numpy
    sides = (memoryview(pairs[name].copy()) for name in ("source", "target"))
    for place, (i, j) in enumerate(zip(*sides)):
        if not (source_taken[i] or target_taken[j]):
            source_taken[i] = target_taken[j] = is_kept[place] = True
    return pairs[is_kept]


def score_pairs(
    source: np.ndarray,
    target: np.ndarray,
    source_rows: np.ndarray,
    target_rows: np.ndarray,
    neighbours: Neighbours,
) -> np.ndarray:
    """Return the margins (P,) of given pairs of rows, over the neighbourhoods in both texts.

    Vectors (N, D) and (M, D) need not be normalised. Those of all P pairs are in memory.
    """
    source_means = neighbours.forward.scores[source_rows].mean(1, dtype=np.float64)
    target_means = neighbours.backward.scores[target_rows].mean(1, dtype=np.float64)
    products = unit_rows(source[source_rows]) * unit_rows(target[target_rows])
    return margin_of(products.sum(1).numpy(), source_means, target_means)


def score_known(known: Vectors, vectors: Vectors, k: int = 4) -> np.ndarray:
    """Return the margins of known translations, as if their sentences were in the two texts.

    Each sentence's neighbours are those in the other text and its own translation, which is counted
    once if the other text also holds it.

    A pair is left out if each of its sentences has a neighbour in the other text with a higher
    cosine. Mining seldom finds such a pair, so its low score would mislead.
    """
    products = unit_rows(known[0]) * unit_rows(known[1])
    cosine = products.sum(1).numpy().astype(np.float64)  # (K,)
    means = []
    is_nearest = np.zeros(len(cosine), bool)
    for sentences, text in ((known[0], vectors[1]), (known[1], vectors[0])):
        near, _ = nearest_neighbours(sentences, text, min(k, len(text)))  # (K, k)
        is_nearest |= cosine >= near[:, 0] - 1e-6
        is_in_text = np.isclose(near, cosine[:, None], atol=1e-6).any(1)
        partner = np.where(is_in_text, -np.inf, cosine)
        with_partner = np.sort(np.column_stack([near, partner]))[:, ::-1]
        means.append(with_partner[:, :k].mean(1))
    return margin_of(cosine, *means)[is_nearest]


def select(pairs: np.ndarray, threshold: float | None) -> np.ndarray:
    """Keep the pairs (P,) that score at least `threshold`, in their order. None keeps all.

    Raises:
        UserError: if no pair is left.
    """
    if threshold is None:
        return pairs
    kept = pairs[pairs["score"] >= threshold]
    if not len(kept):
        best = pairs["score"].max(initial=-np.inf)
        raise UserError(
            f"threshold={threshold}: no pair scores so high, the best of {len(pairs)} has "
            f"{best:.6f}; give a lower one"
        )
    return kept
