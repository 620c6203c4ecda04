"""Bitext retrieval accuracy as on Tatoeba: line i of one side must find line i of the other.

The candidates are the other side only, or a multilingual pool that also holds the query's language.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dap_transformers.errors import UserError
from dap_transformers.languages import TATOEBA_14, TATOEBA_28, TATOEBA_36
from dap_transformers.search.exact import Array, first_equal_rows, nearest, nearest_neighbours

GROUPS: dict[int, tuple[str, ...]] = {14: TATOEBA_14, 28: TATOEBA_28, 36: TATOEBA_36}


def retrieval_accuracy(source_embeds: Array, target_embeds: Array) -> tuple[float, float]:
    """Compute the accuracy of nearest-neighbour retrieval by cosine, in both directions.

    Every row of one side looks for the nearest row of the other side. It is right if it finds the
    row of its own number. With English as the target, the two directions are the paper's "xx→en"
    and "en→xx".

    As on Tatoeba, only the same line counts: an equal sentence on another line is a miss. Of equal
    cosines the lowest line is taken.

    >>> retrieval_accuracy(np.eye(4), np.eye(4)[[0, 1, 2, 2]])
    (75.0, 75.0)

    Args:
        source_embeds: (N, D) numpy or torch, need not be normalised.
        target_embeds: (N, D). Row i is the translation of source row i.

    Returns:
        Accuracy of source→target and of target→source, in percent.
    """
    require_pairs(source_embeds, target_embeds)
    forward = _share_of_own_lines(nearest(source_embeds, target_embeds))
    backward = _share_of_own_lines(nearest(target_embeds, source_embeds))
    return forward, backward


def require_pairs(source_embeds: Array, target_embeds: Array) -> None:
    """Raise `UserError` unless both sides have the same number of rows, at least one."""
    if len(source_embeds) != len(target_embeds) or len(source_embeds) == 0:
        raise UserError(
            f"{len(source_embeds)} source and {len(target_embeds)} target rows: "
            "retrieval needs pairs"
        )


def _share_of_own_lines(found: np.ndarray) -> float:
    """Return the share of lines that have found the line of their own number, in percent.

    Args:
        found: (N,), at least one line: number of the line that each line has found.
    """
    return 100 * int((found == np.arange(len(found))).sum()) / len(found)


@dataclass(frozen=True)
class PoolAccuracy:
    """Results of one direction of `multilingual_pool_accuracy`.

    The rest of the queries, up to 100 percent, finds a wrong sentence of the other language.

    Attributes:
        accuracy: share of the queries whose nearest candidate is their translation, in percent.
        own_language: share of the queries whose nearest candidate is in their own language, in
            percent.
    """

    accuracy: float
    own_language: float


def multilingual_pool_accuracy(
    source_embeds: Array, target_embeds: Array
) -> tuple[PoolAccuracy, PoolAccuracy]:
    """Compute retrieval accuracy in a pool that also holds the query's own language.

    A query's candidates are all sentences of the other side and all other sentences of its own
    side. An encoder that groups sentences by language prefers sentences of the query's own side.
    LAReQA (arXiv 2004.05484) calls this language bias, and calls an encoder without it strongly
    aligned.

    A sentence of the query's language wins a tie with the translation. A sentence with exactly the
    query's vector counts as the query itself, so it is no candidate. Within the other side, ties
    and equal sentences count as in `retrieval_accuracy`. So the accuracy is never above the
    accuracy of that function.

    >>> german = np.array([[3.0, 1.0], [1.0, 3.0], [1.0, 2.0]])
    >>> english = np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    >>> to_english, to_german = multilingual_pool_accuracy(german, english)
    >>> round(to_english.accuracy, 1), round(to_english.own_language, 1)
    (33.3, 66.7)

    Args:
        source_embeds: (N, D) numpy or torch, need not be normalised.
        target_embeds: (N, D). Row i is the translation of source row i.

    Returns:
        The results if source rows are the queries, and those if target rows are the queries.
    """
    require_pairs(source_embeds, target_embeds)
    forward = _pool_accuracy(source_embeds, target_embeds)
    backward = _pool_accuracy(target_embeds, source_embeds)
    return forward, backward


def _pool_accuracy(queries: Array, others: Array) -> PoolAccuracy:
    """Compute one direction of `multilingual_pool_accuracy`.

    Args:
        queries: (N, D), all sentences of one language.
        others: (N, D), the sentences of the other language. Row i is the translation of query i.

    Returns:
        Shares of the queries, in percent.
    """
    is_translation, prefers_own = _pool_outcomes(queries, others)
    is_right = is_translation & ~prefers_own
    return PoolAccuracy(100 * float(is_right.mean()), 100 * float(prefers_own.mean()))


def multilingual_pool_hits(queries: Array, others: Array) -> np.ndarray:
    """Tell for each query whether it finds its translation in the multilingual pool.

    The candidates are all sentences of the other language and the other sentences of the query's
    own language. The share of True is the accuracy of `multilingual_pool_accuracy` in this
    direction.

    >>> german = np.array([[3.0, 1.0], [1.0, 3.0], [1.0, 2.0]])
    >>> multilingual_pool_hits(german, np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 1.0]]))
    array([ True, False, False])

    Args:
        queries: (N, D), all sentences of one language.
        others: (N, D), the sentences of the other language. Row i is the translation of query i.

    Returns:
        (N,) bool, True where the translation is found.
    """
    is_translation, prefers_own = _pool_outcomes(queries, others)
    return is_translation & ~prefers_own


def _pool_outcomes(queries: Array, others: Array) -> tuple[np.ndarray, np.ndarray]:
    """Compute for each query what is nearest in the other language and in its own language.

    Args:
        queries: (N, D), all sentences of one language.
        others: (N, D), the sentences of the other language. Row i is the translation of query i.

    Returns:
        Two bool arrays (N,). First, whether the nearest sentence of the other language is the
        translation. Second, whether a sentence of the query's own language is at least as near as
        that sentence.
    """
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
    return is_translation, prefers_own


def group_averages(
    accuracies: Mapping[str, tuple[float, ...]],
) -> dict[str, tuple[float, ...]]:
    """Average results over each of the paper's groups of 14, 28 and 36 languages.

    A group appears only if all of its languages are there. If only some of the 36 languages are
    there, their mean has a name such as "2 of 36 languages". If there are languages outside the
    36, a further mean is over all languages given.

    >>> group_averages({"de": (90.0, 80.0), "fr": (100.0, 100.0)})
    {'2 of 36 languages': (95.0, 90.0)}

    Args:
        accuracies: language code -> results in percent, such as (xx→en, en→xx). All languages have
            equally many.

    Returns:
        Name of the group -> mean of each result over the languages of the group, in percent.
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
