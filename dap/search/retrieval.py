"""Bitext retrieval accuracy as on Tatoeba: line i of one side must find line i of the other."""

from collections.abc import Mapping

import numpy as np

from dap.errors import UserError
from dap.languages import TATOEBA_14, TATOEBA_28, TATOEBA_36
from dap.search.similarity import Array, nearest

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
    if len(source_embeds) != len(target_embeds) or len(source_embeds) == 0:
        raise UserError(
            f"{len(source_embeds)} source and {len(target_embeds)} target rows: "
            "retrieval needs pairs"
        )
    forward = _share_of_own_lines(nearest(source_embeds, target_embeds))
    backward = _share_of_own_lines(nearest(target_embeds, source_embeds))
    return forward, backward


def _share_of_own_lines(found: np.ndarray) -> float:
    """Return how many lines (N,) have found themselves, in percent."""
    return 100 * int((found == np.arange(len(found))).sum()) / len(found)


def group_averages(accuracies: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Average over each of the paper's groups of 14, 28 and 36 languages that is complete.

    If some of the 36 languages are missing, or there are other languages, their means are added
    under names that say so.

    >>> group_averages({"de": (90.0, 80.0), "fr": (100.0, 100.0)})
    {'2 of 36 languages': (95.0, 90.0)}

    Args:
        accuracies: language code -> (xx→en, en→xx) in percent.
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
        forward, backward = np.mean([accuracies[code] for code in group], axis=0)
        averages[name] = (float(forward), float(backward))
    return averages
