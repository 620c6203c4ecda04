"""Word links against a reference: precision, recall and alignment error rate (AER).

Legend: `P` sentence pairs, `L` links.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dap_transformers.alignment.pharaoh import GoldLinks, read_links
from dap_transformers.alignment.word_alignment import WordAlignment
from dap_transformers.errors import UserError


def judge(aligned: Iterable[WordAlignment], gold: Sequence[GoldLinks]) -> dict[str, float]:
    """Return the `alignment_quality` of P sentence pairs, after a check that the words fit."""
    found = []
    for number, (each, links) in enumerate(zip(aligned, gold, strict=True), 1):
        size = (len(each.source), len(each.target))
        if (np.concatenate([links.sure, links.possible]) >= size).any():
            raise UserError(
                f"line {number} of the reference: a link beyond the {size[0]} and {size[1]} words "
                "of the sentences: use the same words, and say whether it counts them from 0 or 1"
            )
        found.append(each.links)
    return alignment_quality(found, gold)


def read_reference(path: str | Path, pairs: int, first: int = 0) -> list[GoldLinks]:
    """Read a reference in Pharaoh format, one line per sentence pair. Words count from `first`."""
    gold = read_links(path, first)
    if len(gold) != pairs:
        raise UserError(f"{path} has {len(gold)} lines, the text has {pairs} pairs")
    if not any(len(links.sure) for links in gold):
        raise UserError(f"{path} has no sure link such as 0-1: there is no recall")
    return gold


def alignment_quality(links: Sequence[np.ndarray], gold: Sequence[GoldLinks]) -> dict[str, float]:
    """Compute precision, recall and alignment error rate (AER) over all pairs, in percent.

    See Och and Ney (2003), section 5.2. With distinct links A (L, 2) of each pair, sure links S, at
    least one, and possible links P, which include S:

    - precision = |A ∩ P| / |A|, or 0 if there are no links
    - recall = |A ∩ S| / |S|
    - AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|)

    >>> gold = GoldLinks(sure=np.array([[0, 0], [2, 2]]), possible=np.array([[1, 1]]))
    >>> alignment_quality([np.array([[0, 0], [1, 1]])], [gold])
    {'aer': 25.0, 'precision': 100.0, 'recall': 50.0}
    """
    counts = np.zeros(4, int)  # |A|, |S|, |A ∩ S|, |A ∩ P|
    for pair_links, reference in zip(links, gold, strict=True):
        found = set(map(tuple, pair_links.tolist()))
        sure = set(map(tuple, reference.sure.tolist()))
        allowed = sure | set(map(tuple, reference.possible.tolist()))
        counts += (len(found), len(sure), len(found & sure), len(found & allowed))
    all_found, all_sure, found_sure, found_allowed = counts.tolist()
    error = 1 - (found_sure + found_allowed) / (all_found + all_sure)
    return {
        "aer": round(100 * error, 4),
        "precision": round(100 * found_allowed / max(all_found, 1), 4),
        "recall": round(100 * found_sure / all_sure, 4),
    }
