"""Align two translations of one text, in order: groups of sentences that translate each other.

The cost of a group is that of vecalign (Thompson & Koehn 2019, section 3.1): the cosine distance of
the group's two vectors, divided by their mean distance to the other text, times the number of
sentences on both sides. A dynamic programme finds the groups of lowest total cost. It looks only
near the sentences that are each other's nearest neighbours, so it takes time and memory in
proportion to the length of the texts.

Legend: `N`, `M` sentences of source and target, `D` dimensions, `G` groups, `R` rows, `C` columns.
"""

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dap_transformers.disk_arrays import row_blocks
from dap_transformers.errors import UserError, counted
from dap_transformers.mining.mine import MiningResult, TwoTexts
from dap_transformers.mining.texts import DistinctSentences, TextPair, Vectors, read_texts
from dap_transformers.search.exact import Neighbours, Search, mutual_neighbours, unit_rows

logger = logging.getLogger(__name__)

#: A group of neighbouring sentences: the first one of each side, from 0, and their numbers.
GROUP = np.dtype(
    [
        ("score", np.float64),
        ("source", np.int64),
        ("target", np.int64),
        ("sources", np.int64),
        ("targets", np.int64),
    ]
)
#: The path lies within this many anchors, and this many sentences beyond them.
ANCHORS_AROUND = 5
MARGIN = 20
#: Most places (source sentence, target sentence) that are looked at, a byte each.
MOST_PLACES = 1_000_000_000
#: Rows of the dynamic programme whose costs are computed at a time.
BLOCK = 128
#: Cost of a sentence without a translation: this quantile of the costs of random pairs, as in
#: vecalign.
SKIP_QUANTILE = 0.2
RANDOM_PAIRS = 20_000
#: Below this share of nearest pairs in one order, the texts are reported as not in order.
IN_ORDER = 0.5
#: A text that is longer by more than this factor is reported.
LONGER = 3
#: Marks of a sentence without a translation, in the table of steps.
SKIP_SOURCE, SKIP_TARGET = -1, -2


class Side:
    """The vectors of all groups of neighbouring sentences in one text.

    Args:
        vectors: for groups of 1, 2, … sentences, the vectors of the distinct groups (…, D).
        rows: for each size, the row of each group's vector, by the group's first sentence.
    """

    def __init__(self, vectors: Sequence[np.ndarray], rows: Sequence[np.ndarray]) -> None:
        self.vectors = vectors
        self.rows = rows
        self.sizes = range(1, len(vectors) + 1)

    def __len__(self) -> int:
        return len(self.rows[0])

    def units(self, size: int, starts: np.ndarray | slice) -> np.ndarray:
        """Return the unit vectors (R, D) of the groups that begin with these sentences."""
        rows = self.rows[size - 1][starts]
        return unit_rows(self.vectors[size - 1][rows], "sentences").numpy()

    def mean(self) -> np.ndarray:
        """Return the mean of the unit vectors of all groups, (D,) float64."""
        total = np.zeros(self.vectors[0].shape[1])
        for size in self.sizes:
            for block in row_blocks(len(self.rows[size - 1]), BLOCK):
                total += self.units(size, block).sum(0, dtype=np.float64)
        return total / sum(map(len, self.rows))


class Costs:
    """The cost of a group: 2 a b (1 - cos(x, y)) / (d(x) + d(y)).

    a and b are the numbers of source and target sentences, x and y the vectors of the group. d(x)
    is the mean cosine distance of x to all groups of the other text. vecalign takes a sample.
    """

    def __init__(self, source: Side, target: Side) -> None:
        self.source = source
        self.target = target
        self.source_mean = source.mean()
        self.target_mean = target.mean()

    def block(self, rows: slice, columns: slice) -> dict[tuple[int, int], np.ndarray]:
        """Return the costs of the groups that begin in R source and C target sentences.

        The result has (R, C) costs by the size of the group. Near the end of a text there are
        fewer groups.
        """
        costs = {}
        targets = {b: self.target.units(b, columns) for b in self.target.sizes}
        for a in self.source.sizes:
            x = self.source.units(a, rows)
            of_x = 1 - x @ self.target_mean
            for b, y in targets.items():
                of_y = 1 - y @ self.source_mean
                distance = 1 - (x @ y.T).astype(np.float64)
                costs[a, b] = 2 * a * b * distance / (of_x[:, None] + of_y)
        return costs

    def skip(self) -> float:
        """Return the cost of a sentence without a translation, from random pairs of sentences."""
        rng = np.random.default_rng(0)
        x = self.source.units(1, rng.integers(len(self.source), size=RANDOM_PAIRS))
        y = self.target.units(1, rng.integers(len(self.target), size=RANDOM_PAIRS))
        distance = 1 - (x * y).sum(1)
        costs = 2 * distance / (2 - x @ self.target_mean - y @ self.source_mean)
        return float(np.quantile(costs, SKIP_QUANTILE))


# ---------------------------------------------------------------------------- where the path may be


def anchors_of(source: Side, target: Side, neighbours: Neighbours) -> tuple[np.ndarray, int]:
    """Find pairs of sentences that are each other's nearest neighbours and follow in order.

    Sentences that are repeated in their text are left out.

    Returns:
        The longest chain of pairs, (A, 2) positions in source and target, both ascending. Also the
        number of all such pairs, in any order.
    """
    places = []
    for side in (source, target):
        rows, first, counts = np.unique(side.rows[0], return_index=True, return_counts=True)
        place = np.full(rows[-1] + 1, -1)
        place[rows[counts == 1]] = first[counts == 1]
        places.append(place)
    forward = neighbours.forward_indices[:, 0]
    rows = np.arange(len(forward))
    rows = rows[neighbours.backward_indices[forward, 0] == rows]
    pairs = np.stack([places[0][rows], places[1][forward[rows]]], 1)
    pairs = pairs[(pairs >= 0).all(1)]
    pairs = pairs[np.argsort(pairs[:, 0])]
    return pairs[longest_ascending(pairs[:, 1].tolist())], len(pairs)


def longest_ascending(values: Sequence[int]) -> list[int]:
    """Return the places of a longest ascending part of a sequence (patience sorting).

    >>> longest_ascending([7, 1, 9, 3, 2, 5])
    [1, 4, 5]
    """
    lowest: list[int] = []  # the lowest last value of a part, by the part's length
    last: list[int] = []  # the place of that value
    before: list[int] = []
    for place, value in enumerate(values):
        length = bisect_left(lowest, value)
        before.append(last[length - 1] if length else -1)
        lowest[length : length + 1] = [value]
        last[length : length + 1] = [place]

    found = []
    place = last[-1] if last else -1
    while place >= 0:
        found.append(place)
        place = before[place]
    return found[::-1]


def band_around(anchors: np.ndarray, n: int, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last column (N + 1,) of each row of the dynamic programme, inclusive.

    Row i and column j stand for i source and j target sentences that are aligned.
    """
    rows = np.concatenate([[0], anchors[:, 0], [n]])
    columns = np.concatenate([[0], anchors[:, 1], [m]])
    place = np.searchsorted(rows, np.arange(n + 1))
    low = columns[np.maximum(place - ANCHORS_AROUND, 0)] - MARGIN
    high = columns[np.minimum(place + ANCHORS_AROUND, len(columns) - 1)] + MARGIN
    low, high = np.maximum(low, 0), np.minimum(high, m)
    if (high - low + 1).sum() > MOST_PLACES:
        raise UserError("too few sentences are each other's nearest ones to align texts this long")
    return low, high


# --------------------------------------------------------------------------------- the best groups


def best_groups(costs: Costs, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Find the groups of lowest total cost whose path stays between two columns in every row.

    Returns:
        Groups (G,) of `GROUP` in order, without scores. Skipped sentences are in none.
    """
    n, m = len(costs.source), len(costs.target)
    skip = costs.skip()
    sizes = [(a, b) for a in costs.source.sizes for b in costs.target.sizes]
    # for each place the step that leads there: a number of `sizes`, or a skip
    steps = [np.empty(last - first + 1, np.int8) for first, last in zip(low, high)]
    # the lowest costs so far, of this row and of those that a group can reach from here
    best = [np.full(len(step), np.inf) for step in steps[: costs.source.sizes[-1] + 1]]
    best[0][0] = 0.0

    def offer(ahead: int, column: int, values: np.ndarray, step: int) -> None:
        """Take the lower costs for the places from a column on, in a row ahead of this one."""
        first = low[row + ahead]
        begin = max(column, first)
        end = min(column + len(values), high[row + ahead] + 1)
        if begin < end:
            present = best[ahead][begin - first : end - first]
            values = values[begin - column : end - column]
            is_lower = values < present
            present[is_lower] = values[is_lower]
            steps[row + ahead][begin - first : end - first][is_lower] = step

    for row in range(n + 1):
        # skip target sentences: the lowest cost of any column before, and the cost of the way
        reached = best[0]
        way = skip * np.arange(len(reached))
        lowest = np.minimum.accumulate(reached - way)
        steps[row][lowest < reached - way] = SKIP_TARGET
        reached = lowest + way
        if row == n:
            break

        if row % BLOCK == 0:
            rows = slice(row, row + BLOCK)
            columns = slice(low[row], high[min(row + BLOCK, n)] + 1)
            block = costs.block(rows, columns)
        offer(1, low[row], reached + skip, SKIP_SOURCE)
        for number, (a, b) in enumerate(sizes):
            values = block[a, b]
            if row % BLOCK < len(values):
                own = values[row % BLOCK, low[row] - columns.start :][: len(reached)]
                offer(a, low[row] + b, reached[: len(own)] + own, number)
        best.pop(0)
        for step in steps[row + 1 + costs.source.sizes[-1] :][:1]:
            best.append(np.full(len(step), np.inf))

    return _trace(steps, low, sizes, n, m)


def _trace(
    steps: list[np.ndarray], low: np.ndarray, sizes: list[tuple[int, int]], row: int, column: int
) -> np.ndarray:
    """Follow the steps back from the last row and column, and return the groups in order."""
    found = []
    while row or column:
        step = steps[row][column - low[row]]
        if step == SKIP_SOURCE:
            row -= 1
        elif step == SKIP_TARGET:
            column -= 1
        else:
            a, b = sizes[step]
            row -= a
            column -= b
            found.append((0.0, row, column, a, b))
    return np.array(found[::-1], GROUP)


def align(source: Side, target: Side, neighbours: Neighbours) -> tuple[np.ndarray, list[str]]:
    """Align two texts, given the nearest neighbours of their distinct sentences.

    Returns:
        Groups (G,) of `GROUP` in order. The score is the cosine of a group's two vectors. Also
        remarks on what may be wrong with the texts.
    """
    anchors, pairs = anchors_of(source, target, neighbours)
    remarks = []
    if len(anchors) < IN_ORDER * pairs:
        remarks.append(
            f"only {len(anchors)} of {pairs} nearest pairs are in one order: are these "
            "translations of each other, in the same order? Without --in_order, pairs are found in "
            "any order"
        )
    fewer, more = sorted([len(source), len(target)])
    if more > LONGER * fewer:
        remarks.append(f"one text has {more:,} sentences, the other only {fewer:,}")

    low, high = band_around(anchors, len(source), len(target))
    groups = best_groups(Costs(source, target), low, high)
    for a in source.sizes:
        for b in target.sizes:
            of_size = np.flatnonzero((groups["sources"] == a) & (groups["targets"] == b))
            for rows in np.array_split(of_size, len(of_size) // BLOCK + 1):
                x = source.units(a, groups["source"][rows])
                y = target.units(b, groups["target"][rows])
                groups["score"][rows] = (x * y).sum(1)
    return groups, remarks


# ----------------------------------------------------------------------------- from files to groups


@dataclass(frozen=True)
class TextsInOrder(TextPair):
    """Two texts whose pairs are groups of neighbouring sentences."""

    schema = pa.schema(
        {
            "score": pa.float64(),
            "source": pa.string(),
            "target": pa.string(),
            "source_lines": pa.list_(pa.int64()),
            "target_lines": pa.list_(pa.int64()),
        }
    )

    def table(self, pairs: np.ndarray) -> pa.Table:
        """Return groups with their sentences, joined by blanks, and their lines, from 1."""
        columns = {"score": pairs["score"].round(6)}
        for name, text in self.sides().items():
            lines = np.flatnonzero(text.rows >= 0)
            starts = pairs[name]
            ends = starts + pairs[f"{name}s"]
            own = [lines[start:end] for start, end in zip(starts, ends)]
            columns[name] = [" ".join(text[row] for row in text.rows[each]) for each in own]
            columns[f"{name}_lines"] = [each + 1 for each in own]
        return pa.table(columns, schema=self.schema)


@dataclass
class InOrder(TwoTexts):
    """Alignment: find the groups of up to `largest_group` sentences that translate each other.

    The texts are translations of each other in the same order. The groups keep this order.
    """

    largest_group: int = 3
    description = "alignment of sentences in order"

    def read(self) -> list[TextPair]:
        """Read the two texts. Their groups of 2 and more sentences come first."""
        texts = read_texts(self.source, self.target)
        groups = []
        for size in range(2, self.largest_group + 1):
            sides = []
            for text in texts.sides().values():
                name = f"{text.name} in groups of {size}"
                sides.append(DistinctSentences(_joined(text, size), name))
            groups.append(TextPair(*sides))
        return [*groups, TextsInOrder(texts.source, texts.target)]

    def mine(
        self,
        texts: Sequence[TextPair],
        vectors: Sequence[Vectors],
        search: Search = mutual_neighbours,
    ) -> MiningResult:
        """Align the sentences, given the vectors of the distinct texts of what `read` returned."""
        ordered = [texts[-1], *texts[:-1]]
        ordered_vectors = [vectors[-1], *vectors[:-1]]
        sides = []
        for number, name in enumerate(("source", "target")):
            rows = [getattr(pair, name).rows for pair in ordered]
            used = [(each[number], own[own >= 0]) for each, own in zip(ordered_vectors, rows)]
            used = [(found, own) for found, own in used if len(own)]  # a text of one sentence
            sides.append(Side(*zip(*used)))
        neighbours = search(*vectors[-1], 1)
        groups, remarks = align(*sides, neighbours)
        for remark in remarks:
            logger.warning("%s", remark)

        kept = groups
        if self.options.lowest is not None:
            kept = groups[groups["score"] >= self.options.lowest]
        numbers = {"remarks": remarks}
        for name, side in zip(("source", "target"), sides):
            numbers[f"{name}_without_translation"] = len(side) - int(groups[f"{name}s"].sum())
        summary = (
            f"{counted(len(kept), 'group')} kept of {len(groups):,}; without a translation: "
            f"{numbers['source_without_translation']:,} source sentences, "
            f"{numbers['target_without_translation']:,} target sentences"
        )
        return MiningResult(neighbours, len(groups), kept, summary, numbers)


def _joined(text: DistinctSentences, size: int) -> Iterator[str]:
    """Yield each group of neighbouring sentences of a text, joined by blanks."""
    rows = text.rows[text.rows >= 0].tolist()
    for first in range(len(rows) - size + 1):
        yield " ".join(text[row] for row in rows[first : first + size])
