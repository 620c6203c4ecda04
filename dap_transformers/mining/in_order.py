"""Align two translations of one text, in order: groups of sentences that translate each other.

A group of source sentences with vector x and of target sentences with vector y gains

    (cos(x, y) - (cos(x, y') + cos(x', y)) / 2) log2(1 + r).

x' stands for the two sentences before and the two after the source group: their cosines are
averaged. So a group that lacks a sentence, or has one too many, gains less. r is the ratio of the
groups' numbers of characters, the smaller one divided by the larger one, after the target's was
scaled such that both texts are equally long from the first anchor to the last (see below), without
what only one text has. This is the score of Bertalign (Liu & Zhu 2022), which takes one sentence
before and one after. A sentence
without a translation costs a share of what a typical pair of sentences gains. The share is
estimated from the texts (`cost_of_skipping`).

A dynamic programme finds the groups of highest total gain. It looks only near the anchors: the
sentences that are each other's nearest neighbours, in one order. So its time and memory grow in
proportion to the length of the texts. Only the exact search for anchors compares all sentences.

Legend: `N`, `M` sentences of source and target, `S` sizes of groups, `V` distinct groups of a text,
`D` dimensions, `G` groups of the alignment, `A` anchors, `R` rows, `C` columns. Row i and column j
of the dynamic programme stand for i source and j target sentences that are aligned.
"""

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import Tensor
from torch.nn.functional import embedding_bag

from dap_transformers.errors import counted
from dap_transformers.mining.margin import PAIR, Vectors, select
from dap_transformers.mining.mine_pairs import MiningResult
from dap_transformers.mining.texts import GroupedText, group_table
from dap_transformers.search.exact import NeighbourSearch, mutual_neighbours, unit_rows

logger = logging.getLogger(__name__)

#: A pair of groups: the first sentence of each side, from 0, and the numbers of sentences.
GROUP = np.dtype([*PAIR.descr, ("sources", np.int64), ("targets", np.int64)])
#: The path may leave the line through the anchors by this many sentences of each text.
BAND = 50
#: Rows of the dynamic programme whose gains are computed at a time.
BLOCK = 128
#: Places of a group's neighbours: two before its first sentence and two after its last one. Places
#: from 0 on are counted from the group's end.
NEAR = np.array([-2, -1, 0, 1])
#: A sentence without a translation costs `SKIP_SHARE` · (share of extra sentences that join a group
#: - `SKIPPED`) · median gain of an anchor (`cost_of_skipping`). Both were chosen on vecalign's
#: development text, a manual, a Gospel and the changed texts of our benchmark.
SKIP_SHARE = 0.25
SKIPPED = 0.2
#: Most groups of each size that this cost is estimated from.
SAMPLE = 500
#: Below this share of nearest pairs in one order, the texts are reported as not in order. Real
#: translations have 0.9 and more. Texts with two parts in another order have the larger part.
IN_ORDER = 0.75
#: A line gets no translation if it is this many times as frequent as its nearest line in the other
#: text. Such lines are page footers. Lines that differ in digits only are counted together.
#: Numbered headings are kept, because each has its own nearest line.
ONE_SIDED = 5
#: A text that is longer by more than this factor is reported.
LONGER_BY = 3


class Groups(NamedTuple):
    """What a gain needs of R groups of one text.

    Attributes:
        units: (R, D) unit vectors of the groups.
        near: (R, D) half the mean of the unit vectors of the sentences before and after each group.
        length: (R,) number of characters. It is NaN if one of the sentences must stay without
            a translation.
    """

    units: Tensor
    near: Tensor
    length: np.ndarray


class Side:
    """The source or the target, with the vectors of all its groups.

    Args:
        vectors: (V, D) of the distinct groups. Single sentences come first, in the order of the
            text.
        is_one_sided: (N,) which sentences must stay without a translation.
        scale: factor of the numbers of characters.
    """

    def __init__(
        self, vectors: np.ndarray, text: GroupedText, is_one_sided: np.ndarray, scale: float = 1.0
    ) -> None:
        self.vectors = vectors
        self.rows = text.groups  # (N, S)
        self.singles = self.units(slice(None), 1)  # (N, D) unit vectors of the sentences
        most = self.rows.shape[1]
        self.sizes = range(1, most + 1)
        lengths = np.where(is_one_sided, np.nan, text.lengths)
        padded = np.append(lengths, np.zeros(most - 1))  # the text ends
        # number of characters of each group, (N, S). It is NaN if one of the sentences is ungrouped
        self.lengths = sliding_window_view(padded, most).cumsum(1) * scale

    def units(self, starts: np.ndarray | slice, sizes: np.ndarray | int) -> Tensor:
        """Return the unit vectors (R, D) of groups, given their first sentences and sizes."""
        return unit_rows(self.vectors[self.rows[starts, sizes - 1]])

    def groups(self, starts: np.ndarray, sizes: np.ndarray | int) -> Groups:
        """Return what a gain needs of R groups, given their first sentences and sizes.

        At an end of the text, the mean is of the sentences there are. If the group is the whole
        text, it is of its first and last sentence.
        """
        starts, sizes = (array.ravel() for array in np.broadcast_arrays(starts.clip(0), sizes))
        last = len(self.rows) - 1
        places = starts + NEAR[:, None] + sizes * (NEAR >= 0)[:, None]  # (4, R)
        counts = (places >= 0) & (places <= last)
        counts |= ~counts.any(0)  # of a group that is the whole text, its first and last sentence
        weights = torch.from_numpy(counts / counts.sum(0) / 2).float()  # (4, R)
        # the weighted sum of the vectors of a group's neighbours
        near = embedding_bag(
            torch.from_numpy(places.clip(0, last)).T,
            self.singles,
            per_sample_weights=weights.T,
            mode="sum",
        )
        length = self.lengths[starts, sizes - 1].astype(np.float32)
        return Groups(self.units(starts, sizes), near, length)


def gains(source: Groups, target: Groups) -> np.ndarray:
    """Return what each of R groups of the source gains with each of C groups of the target."""
    ratio = source.length[:, None] / target.length  # (R, C)
    agreement = np.log2(1 + np.minimum(ratio, 1 / ratio))
    gain = source.units @ (target.units - target.near).T - source.near @ target.units.T
    return np.nan_to_num(gain.numpy() * agreement, copy=False, nan=-np.inf)


def gains_of_pairs(
    source: Side, target: Side, pairs: np.ndarray, sources: int = 1, targets: int = 1
) -> np.ndarray:
    """Return the gains of groups with these sizes, given their first sentences (A, 2).

    Of many pairs, it takes at most `SAMPLE`, at equal distances.
    """
    first, second = pairs[:: len(pairs) // SAMPLE + 1].T
    return gains(source.groups(first, sources), target.groups(second, targets)).diagonal()


# ---------------------------------------------------------------------------- where the path may be


def nearest_pairs(
    vectors: Vectors, texts: Sequence[GroupedText], search: NeighbourSearch
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Find the sentences that are each other's nearest neighbours: (pairs, 2), by source.

    Also tell which sentences, (N,) and (M,), must stay without a translation, because their lines
    are much more frequent in this text than in the other (`ONE_SIDED`).
    """
    # the number of each sentence's distinct string, and the first sentence with each string
    singles = [text.groups[:, 0] for text in texts]  # (N,) and (M,)
    first = [np.unique(rows, return_index=True)[1] for rows in singles]
    near = search(*(side[: len(own)] for side, own in zip(vectors, first)), 1)
    forward, backward = (found.indices[:, 0] for found in near)

    rows = np.flatnonzero(backward[forward] == np.arange(len(forward)))
    pairs = np.stack([first[0][rows], first[1][forward[rows]]], 1)

    # how often each sentence occurs if digits are ignored: (N,) and (M,)
    counts = [np.bincount(text.kinds)[text.kinds] for text in texts]
    is_one_sided = []
    for side, nearest in enumerate((forward, backward)):
        kinds = texts[side].kinds
        paired = np.bincount(kinds[pairs[:, side]], minlength=len(kinds))[kinds]
        of_nearest = counts[1 - side][first[1 - side][nearest]][singles[side]]
        is_one_sided.append(counts[side] >= ONE_SIDED * np.maximum(paired, of_nearest))
    return pairs, is_one_sided


def longest_ascending(values: Sequence[int]) -> list[int]:
    """Return the places of a longest ascending part of a sequence (patience sorting).

    >>> longest_ascending([7, 1, 9, 3, 2, 5])
    [1, 4, 5]
    """
    lowest: list[int] = []  # the lowest last value of a part, by the part's length
    parts: list[tuple | None] = [None]  # such a part: its last place, and the part before
    for place, value in enumerate(values):
        length = bisect_left(lowest, value)
        lowest[length : length + 1] = [value]
        parts[length + 1 : length + 2] = [(place, parts[length])]

    found = []
    part = parts[-1]
    while part:
        place, part = part
        found.append(place)
    return found[::-1]


def band_around(anchors: np.ndarray, n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last column (N + 1,) of each row, given the anchors (A, 2).

    `n` and `m` are the numbers of sentences N and M. All rows together have about 2 · `BAND` ·
    (N + M) columns, wherever the anchors are.
    """
    corners = np.concatenate([[(0, 0)], anchors, [(n, m)]])
    rows = np.arange(n + 1)
    low = np.interp(rows - BAND, *corners.T).astype(int) - BAND
    high = np.interp(rows + BAND, *corners.T).astype(int) + BAND
    return np.maximum(low, 0), np.minimum(high, m)


def cost_of_skipping(source: Side, target: Side, anchors: np.ndarray) -> float:
    """Estimate what a sentence without a translation costs, given the anchors (A, 2).

    It looks at each place where one text has exactly one extra sentence between two anchors. Such a
    sentence joins the group of one of them if the group's gain does not fall. In texts where most
    join, the others are probably free translations, so skipping costs more.
    """
    gain_of = partial(gains_of_pairs, source, target)
    gaps = np.diff(anchors, axis=0)
    joins = [True]  # without such sentences, the cost is high
    for sizes in ((2, 1), (1, 2)) if 2 in source.sizes else ():
        pairs = anchors[:-1][(gaps == sizes).all(1)]
        with_first = gain_of(pairs, *sizes)
        joins_first = with_first >= gain_of(pairs)
        joins_second = gain_of(pairs + 1, *sizes) >= gain_of(pairs + sizes)
        may_join = np.isfinite(with_first)  # not a line that is in no group
        joins += (joins_first | joins_second)[may_join].tolist()
    typical = max(0.0, float(np.median(gain_of(anchors))))
    return max(0.0, SKIP_SHARE * (np.mean(joins) - SKIPPED) * typical)


# --------------------------------------------------------------------------------- the best groups


def best_groups(
    source: Side, target: Side, skip: float, low: np.ndarray, high: np.ndarray
) -> np.ndarray:
    """Find the groups (G,) of `GROUP` with the highest total gain less costs, in order.

    Each sentence is in one group. A sentence without a translation is a group whose other side is
    empty, and costs `skip`. All scores are still NaN.

    Args:
        low, high: (N + 1,) the first and the last column that the path may visit in each row.
            Neither falls from row to row.
    """
    n, m = len(low) - 1, high[-1]
    moves = [*product(source.sizes, repeat=2), (1, 0), (0, 1)]  # of equal gains the first
    sizes = np.array(source.sizes)[:, None]  # (S, 1)
    largest = len(sizes)
    # highest gains of the last rows, behind `largest` columns that no path reaches
    best = np.full((largest + 1, largest + m + 1), -np.inf)
    steps = []  # for each row and column the number of the move that leads there

    for row in range(n + 1):
        if row % BLOCK == 0:
            rows = np.arange(row, min(row + BLOCK, n + 1))
            columns = np.arange(low[row], high[rows[-1]] + 1)
            sources = source.groups(rows - sizes, sizes)  # the groups that end before each row
            targets = target.groups(columns - sizes, sizes)
            block = gains(sources, targets).reshape(largest, len(rows), largest, -1)

        # come from an earlier row: add a group, or skip a source sentence
        start, end = low[row] + largest, high[row] + largest + 1
        before = [best[(row - a) % len(best), start - b : end - b] for a, b in moves[:-1]]
        in_row = slice(low[row] - columns[0], high[row] - columns[0] + 1)
        total = np.stack(before)  # (moves - 1, C)
        total[:-1] += block[:, row % BLOCK, :, in_row].reshape(-1, total.shape[1])
        total[-1] -= skip
        step = total.argmax(0)
        total = total.max(0)
        if row == 0:
            total[0] = 0

        # skip target sentences: the highest gain of any column before, less the cost of the way
        way = skip * np.arange(len(total))
        highest = np.maximum.accumulate(total + way)
        step[highest > total + way] = len(moves) - 1
        best[row % len(best), start - largest : start] = -np.inf
        best[row % len(best), start:end] = highest - way
        steps.append(step.astype(np.min_scalar_type(len(moves))))

    # follow the moves back
    found = []
    i, j = n, m
    while i or j:
        a, b = moves[steps[i][j - low[i]]]
        i -= a
        j -= b
        found.append((np.nan, i, j, a, b))
    return np.array(found[::-1], GROUP)


def sides_of(
    vectors: Vectors,
    texts: Sequence[GroupedText],
    is_one_sided: Sequence[np.ndarray],
    anchors: np.ndarray,
) -> tuple[Side, Side]:
    """Return both sides. The target's lengths are scaled such that the totals are equal.

    The totals run from the first to the last of the anchors (A, 2). They leave out the sentences
    between two anchors if one text has too many to group them with those of the other.
    """
    steps = np.diff(anchors, axis=0, append=anchors[-1:] + 1)  # (A, 2) sentences to the next anchor
    is_whole = steps.max(1) <= texts[0].groups.shape[1] * steps.min(1)
    own, other = (
        np.add.reduceat(text.lengths[: rows[-1] + 1], rows)[is_whole].sum()
        for text, rows in zip(texts, anchors.T)
    )
    source = Side(vectors[0], texts[0], is_one_sided[0])
    return source, Side(vectors[1], texts[1], is_one_sided[1], scale=own / other)


def align(
    vectors: Vectors, texts: Sequence[GroupedText], search: NeighbourSearch = mutual_neighbours
) -> tuple[np.ndarray, list[str]]:
    """Align two texts, near the pairs of nearest sentences that `search` finds.

    `vectors` are of the distinct groups.

    Returns:
        Groups (G,) of `GROUP` in order, which hold each sentence once. The score is the cosine of a
        group's two vectors, and NaN if a side is empty. Also remarks on what may be wrong with the
        texts.
    """
    pairs, is_one_sided = nearest_pairs(vectors, texts, search)
    anchors = pairs[longest_ascending(pairs[:, 1].tolist())]
    lengths = [len(text.groups) for text in texts]
    remarks = []
    if len(anchors) < IN_ORDER * len(pairs):
        remarks.append(
            f"only {len(anchors)} of {len(pairs)} nearest pairs are in one order: are these "
            "translations of each other, in the same order? Without --in_order, pairs are found in "
            "any order"
        )
    if max(lengths) > LONGER_BY * min(lengths):
        remarks.append(f"one text has {max(lengths):,} sentences, the other {min(lengths):,}")

    source, target = sides_of(vectors, texts, is_one_sided, anchors)
    skip = cost_of_skipping(source, target, anchors)
    groups = best_groups(source, target, skip, *band_around(anchors, *lengths))
    has_both = (groups["sources"] > 0) & (groups["targets"] > 0)
    found = groups[has_both]
    x = source.units(found["source"], found["sources"])
    y = target.units(found["target"], found["targets"])
    groups["score"][has_both] = (x * y).sum(1)
    return groups, remarks


def single_sentences(groups: np.ndarray) -> np.ndarray:
    """Return each sentence of `groups` as a group of its own, whose other side is empty."""
    rows = []
    for _, source, target, sources, targets in groups.tolist():
        rows += [(np.nan, source + place, target, 1, 0) for place in range(sources)]
        rows += [(np.nan, source + sources, target + place, 0, 1) for place in range(targets)]
    return np.array(rows, GROUP)


def align_texts(
    texts: Mapping[str, GroupedText],
    vectors: Vectors,
    lowest: float | None,
    search: NeighbourSearch,
) -> MiningResult:
    """Find the groups of sentences of two texts that translate each other, in their order.

    `vectors` are of the distinct groups. Groups with a cosine below `lowest` are not kept. The
    result also holds every other sentence, as a group with an empty side.
    """
    groups, remarks = align(vectors, list(texts.values()), search)
    for remark in remarks:
        logger.warning("%s", remark)
    found = groups[~np.isnan(groups["score"])]
    kept = select(found, lowest)
    is_kept = groups["score"] >= (-np.inf if lowest is None else lowest)
    rows = np.concatenate([kept, single_sentences(groups[~is_kept])])
    rows.sort(order=["source", "target"])

    numbers = {"candidates": len(found), "kept": len(kept), "remarks": remarks}
    left = []
    for name, text in texts.items():
        count = len(text.groups) - int(kept[f"{name}s"].sum())
        numbers[f"{name}_without_translation"] = count
        left.append(counted(count, f"{name} sentence"))
    summary = f"{counted(len(kept), 'group')} kept of {len(found):,}; without a translation: "
    summary += ", ".join(left)
    protocol = "alignment of sentences in order"
    return MiningResult(protocol, None, group_table(rows, texts), summary, numbers)
