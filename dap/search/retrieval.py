"""Bitext retrieval accuracy as on Tatoeba: line i of one side must find line i of the other.

The candidates are the other side only, or a multilingual pool that also holds the query's language.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dap.errors import UserError
from dap.languages import TATOEBA_14, TATOEBA_28, TATOEBA_36
from dap.search.similarity import Array, first_equal_rows, nearest, nearest_neighbours

GROUPS: dict[int, tuple[str, ...]] = {14: TATOEBA_14, 28: TATOEBA_28, 36: TATOEBA_36}


def retrieval_accuracy(source_embeds: Array, target_embeds: Array) -> tuple[float, float]:
    """Compute the accuracy of nearest-neighbour retrieval by cosine, in both directions.

    With English as the target these are the paper's "xx→en" (queries xx, retrieval from the English
    side) and "en→xx". As on Tatoeba, only the same line counts: an equal sentence on another line
    is a miss. Of equal scores the lowest line is taken.

    >>> retrieval_accuracy(np.eye(4), np.eye(4)[[0, 1, 2, 2]])
    (75.0, 75.0)

    Args:
        source_embeds: (N, D) numpy or torch; need not be normalised.
        target_embeds: (N, D), row i the translation of row i.

    Returns:
        source→target and target→source, in percent.

    Raises:
        ValueError: unequal numbers of rows, no rows, or rows with NaN or infinity.
    """
    _require_pairs(source_embeds, target_embeds)
    forward = _share_of_own_lines(nearest(source_embeds, target_embeds))
    backward = _share_of_own_lines(nearest(target_embeds, source_embeds))
    return forward, backward


def _require_pairs(source_embeds: Array, target_embeds: Array) -> None:
    if len(source_embeds) != len(target_embeds) or len(source_embeds) == 0:
        raise UserError(
            f"{len(source_embeds)} source and {len(target_embeds)} target rows: "
            "retrieval needs pairs"
        )


def _share_of_own_lines(found: np.ndarray) -> float:
    """Return how many lines (N,) have found themselves, in percent."""
    return 100 * int((found == np.arange(len(found))).sum()) / len(found)


@dataclass(frozen=True)
class PoolAccuracy:
    """Where the queries of one direction find their nearest candidate in a multilingual pool.

    The rest of the queries finds a wrong sentence of the other language.

    Attributes:
        accuracy: queries that find their translation, in percent.
        own_language: queries that find a sentence of their own language, in percent.
    """

    accuracy: float
    own_language: float


def multilingual_pool_accuracy(
    source_embeds: Array, target_embeds: Array
) -> tuple[PoolAccuracy, PoolAccuracy]:
    """Compute retrieval accuracy in a pool that also holds the query's own language.

    A query's candidates are all sentences of the other side and all other sentences of its own
    side. An encoder that groups sentences by language prefers the latter. LAReQA (arXiv 2004.05484)
    calls this language bias, and calls an encoder without it strongly aligned.

    A sentence of the query's language wins a tie with the translation. A sentence with exactly the
    query's vector is the query again, so it is no candidate. Within the other side, ties and equal
    sentences count as in `retrieval_accuracy`. So the accuracy is never above the one there.

    >>> german = np.array([[3.0, 1.0], [1.0, 3.0], [1.0, 2.0]])
    >>> english = np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    >>> to_english, to_german = multilingual_pool_accuracy(german, english)
    >>> round(to_english.accuracy, 1), round(to_english.own_language, 1)
    (33.3, 66.7)

    Args:
        source_embeds: (N, D) numpy or torch; need not be normalised.
        target_embeds: (N, D), row i the translation of row i.

    Returns:
        The shares for source queries, and those for target queries.

    Raises:
        ValueError: unequal numbers of rows, no rows, or rows with NaN or infinity.
    """
    _require_pairs(source_embeds, target_embeds)
    forward = _pool_accuracy(source_embeds, target_embeds)
    backward = _pool_accuracy(target_embeds, source_embeds)
    return forward, backward


def _pool_accuracy(queries: Array, others: Array) -> PoolAccuracy:
    """Measure one direction of `multilingual_pool_accuracy`."""
    # the nearest sentence of the other language
    distinct = np.unique(first_equal_rows(others))
    cosines, found = nearest_neighbours(queries, others[distinct])  # (N, 1)
    is_translation = distinct[found[:, 0]] == np.arange(len(queries))  # (N,)

    # the nearest sentence of the query's language, among two because one may be the query
    own_row = first_equal_rows(queries)  # (N,)
    distinct = np.unique(own_row)
    own_cosines, found = nearest_neighbours(queries, queries[distinct], min(2, len(distinct)))
    is_query = distinct[found] == own_row[:, None]  # (N, 2)
    own_cosines = np.where(is_query, -np.inf, own_cosines).max(1)  # (N,)

    prefers_own = own_cosines >= cosines[:, 0]
    is_right = is_translation & ~prefers_own
    return PoolAccuracy(100 * float(is_right.mean()), 100 * float(prefers_own.mean()))


def group_averages(
    accuracies: Mapping[str, tuple[float, ...]],
) -> dict[str, tuple[float, ...]]:
    """Average over each of the paper's groups of 14, 28 and 36 languages that is complete.

    If some of the 36 languages are missing, or there are other languages, their means are added
    under names that say so.

    >>> group_averages({"de": (90.0, 80.0), "fr": (100.0, 100.0)})
    {'2 of 36 languages': (95.0, 90.0)}

    Args:
        accuracies: language code -> numbers in percent, such as (xx→en, en→xx).
    """
    groups: dict[str, tuple[str, ...]] = {}
    for size, group in GROUPS.items():
        if set(group) <= set(accuracies):
            groups[f"{size} languages"] = group

    benchmark = tuple(code for code in accuracies if code in TATOEBA_36)
    if benchmark and len(benchmark) < len(TATOEBA_36):
        groups[f"{len(benchmark)} of {len(TATOEBA_36)} languages"] = benchmark
    if len(benchmark) < len(accuracies):
        groups[f"all {len(accuracies)} languages given"] = tuple(accuracies)

    averages = {}
    for name, group in groups.items():
        means = np.mean([accuracies[code] for code in group], axis=0)
        averages[name] = tuple(means.tolist())
    return averages
