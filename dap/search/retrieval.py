"""Bitext retrieval accuracy as on Tatoeba: line i of one side must find line i of the other."""

from collections.abc import Mapping

import numpy as np

from dap.errors import UserError
from dap.languages import TATOEBA_14, TATOEBA_28, TATOEBA_36
from dap.search.similarity import Array, nearest

GROUPS: dict[int, tuple[str, ...]] = {14: TATOEBA_14, 28: TATOEBA_28, 36: TATOEBA_36}


def retrieval_accuracy(source_embeds: Array, target_embeds: Array) -> tuple[float, float]:
    """Accuracy in percent of nearest-neighbour retrieval by cosine, source→target and target→source.

    With English as the target these are the paper's "xx→en" (queries xx, retrieval over the English side) and
    "en→xx". As on Tatoeba only the same line counts: an equal sentence on another line is a miss, and of equal
    scores the lowest line is taken.

    >>> retrieval_accuracy(np.eye(4), np.eye(4)[[0, 1, 2, 2]])
    (75.0, 75.0)

    Args:
        source_embeds: (N, D) numpy or torch; need not be normalised.
        target_embeds: (N, D), row i the translation of row i.

    Raises:
        ValueError: unequal numbers of rows, no rows, or rows that are not finite.
    """
    if len(source_embeds) != len(target_embeds) or len(source_embeds) == 0:
        raise UserError(
            f"{len(source_embeds)} source and {len(target_embeds)} target rows: retrieval needs pairs"
        )
    found = nearest(source_embeds, target_embeds), nearest(target_embeds, source_embeds)  # 2 × (N,)
    forward, backward = (
        100 * int((lines == np.arange(len(lines))).sum()) / len(lines) for lines in found
    )
    return forward, backward


def group_averages(accuracies: Mapping[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Macro averages of the paper's 14-, 28- and 36-language groups whose languages are all present.

    With fewer than the 36, or with languages beyond them, the mean over what there is comes too, under a name that
    says so.

    >>> group_averages({"de": (90.0, 80.0), "fr": (100.0, 100.0)})
    {'2 of 36 languages': (95.0, 90.0)}

    Args:
        accuracies: language code -> (xx→en, en→xx) in percent.
    """
    complete = {
        f"{n} languages": group for n, group in GROUPS.items() if set(group) <= set(accuracies)
    }
    benchmark = [code for code in accuracies if code in TATOEBA_36]
    if benchmark and len(benchmark) < len(TATOEBA_36):
        complete[f"{len(benchmark)} of {len(TATOEBA_36)} languages"] = tuple(benchmark)
    if len(benchmark) < len(accuracies):
        complete[f"all {len(accuracies)} languages given"] = tuple(accuracies)
    means = {
        name: np.mean([accuracies[code] for code in group], axis=0)
        for name, group in complete.items()
    }
    return {name: (float(forward), float(backward)) for name, (forward, backward) in means.items()}
