"""BUCC: its files, and precision, recall and F1 of mined pairs against its gold.

A split is three files of one folder: `fr-en.training.fr` and `fr-en.training.en` with lines `id<TAB>sentence`, and
`fr-en.training.gold` with the ids of one true pair a line, `fr-000000057<TAB>en-000008530`.

A mined pair of sentences stands for all pairs of ids that hold them. So each gold pair can be found, also where its
sentence is repeated, and each of its copies that gold does not name counts as an error.

Legend: `P` pairs mined, `G` gold pairs, `L` lines.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dap.errors import UserError
from dap.mining.margin import Pairs
from dap.text import read_sentences

#: Protocol -> what it means, and the splits for the threshold and for the numbers, by the names that files give them.
PROTOCOLS: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "training-optimal": ("the threshold of best F1 on the training split itself", (("training",),)),
    "training-threshold-on-test": (
        "the threshold of best F1 on the training split, applied to the test split",
        (("training",), ("test",)),
    ),
    "sample": (
        "the threshold of best F1 on the sample split itself; not the paper's",
        (("sample", "dev"),),
    ),
}
SUFFIXES = ("", ".gz", ".xz")


@dataclass(frozen=True)
class Split:
    """The files of one split of a language pair."""

    name: str
    source: Path
    target: Path
    gold: Path


@dataclass(frozen=True)
class MiningScore:
    """How well mined pairs fit the gold.

    Attributes:
        precision, recall, f1: percent.
        threshold: pairs with a score of at least this are extracted.
        extracted, correct, gold: pairs of ids.
    """

    precision: float
    recall: float
    f1: float
    threshold: float
    extracted: int
    correct: int
    gold: int


def find_splits(folder: str | Path, pair: str, protocol: str) -> list[Split]:
    """The splits that the protocol needs: the threshold's first, last the one whose numbers it reports.

    The files are in the folder, or in a folder of it that has the pair's name; `.gz` and `.xz` are found too.

    Raises:
        ValueError: an unknown protocol, or a pair that is not two languages.
        FileNotFoundError: a file is missing; says which, and which pairs and splits there are.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol={protocol!r}: choose one of {', '.join(PROTOCOLS)}")
    languages = pair.split("-")
    if len(languages) != 2 or not all(languages):
        raise UserError(f"pair={pair!r}: give two languages such as fr-en")
    return [_find_split(Path(folder), pair, names) for names in PROTOCOLS[protocol][1]]


def default_protocol(folder: str | Path, pair: str) -> str:
    """The protocol "training-optimal", or "sample" where there is a sample and no file of a training split.

    Raises:
        FileNotFoundError: neither split is there, or a file of it is missing; says which.
    """
    names = [
        path.name
        for place in (Path(folder), Path(folder) / pair)
        for path in place.glob(f"{pair}.*")
    ]
    splits = {name.removeprefix(f"{pair}.").split(".")[0] for name in names}
    protocol = (
        "sample" if splits & {"sample", "dev"} and "training" not in splits else "training-optimal"
    )
    find_splits(folder, pair, protocol)
    return protocol


def _find_split(folder: Path, pair: str, names: tuple[str, ...]) -> Split:
    sides = (*pair.split("-"), "gold")
    found = [
        (name, [_existing(place / f"{pair}.{name}.{side}") for side in sides])
        for place in (folder, folder / pair)
        for name in names
    ]
    name, paths = max(found, key=lambda each: sum(map(bool, each[1])))  # of equal ones the first
    missing = [
        f"{pair}.{name}.{side}" for side, path in zip(sides, paths, strict=True) if path is None
    ]
    if missing:
        there = sorted(
            {path.name for place in (folder, folder / pair) for path in place.glob("*-*.*.*")}
        )
        raise FileNotFoundError(
            f"{folder} has no {', '.join(missing)}; {' '.join(there[:12]) or 'no such files'} are there"
        )
    return Split(name, *paths)


def _existing(path: Path) -> Path | None:
    return next(
        (
            each
            for each in (path.with_name(path.name + suffix) for suffix in SUFFIXES)
            if each.is_file()
        ),
        None,
    )


def read_text(path: Path, ids: dict[str, int]) -> Iterator[str]:
    """The sentences of one side, line by line; `ids` is filled on the way: id -> index of its line, from 0.

    Raises:
        ValueError: a line without an id, without a tab, or with the id of another line.
    """
    for index, line in enumerate(read_sentences(path)):
        name, tab, sentence = line.partition("\t")
        if not name or not tab:
            raise UserError(
                f"{path}, line {index + 1}: {line[:60]!r} is not an id, a tab and a sentence"
            )
        if ids.setdefault(name, index) != index:
            raise UserError(
                f"{path}, line {index + 1}: the id {name} is that of line {ids[name] + 1}, too"
            )
        yield sentence


def read_gold(
    split: Split, source_ids: Mapping[str, int], target_ids: Mapping[str, int]
) -> np.ndarray:
    """The gold pairs as indices of lines, (G, 2) int64.

    Raises:
        ValueError: a line that is not two ids, an id that its side does not have, a repeated pair, or no pairs.
    """
    gold: dict[tuple[int, int], int] = {}
    for number, line in enumerate(read_sentences(split.gold), 1):
        place, names = f"{split.gold}, line {number}", line.split("\t")
        if len(names) != 2:
            raise UserError(f"{place}: {line[:60]!r} is not two ids and a tab between them")
        source, target = (names[0], source_ids, split.source), (names[1], target_ids, split.target)
        for (name, ids, path), (_, other, _) in ((source, target), (target, source)):
            if name not in ids:
                hint = (
                    "of the other side: are the languages swapped?"
                    if name in other
                    else "nor of the other side"
                )
                raise UserError(f"{place}: {name} is no id of {path}, {hint}")
        first = gold.setdefault((source_ids[names[0]], target_ids[names[1]]), number)
        if first != number:
            raise UserError(f"{place}: {line!r} is on line {first}, too")
    if not gold:
        raise UserError(f"{split.gold} is empty: there is nothing to compare with")
    return np.array(list(gold), np.int64)


def judge(
    pairs: Pairs, gold: np.ndarray, source_rows: np.ndarray, target_rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """How many pairs of ids each mined pair stands for, and how many of those are gold: two (P,) int64.

    Args:
        gold: (G, 2) indices of lines.
        source_rows, target_rows: (L,) sentence of each line, -1 for none (`DistinctSentences.rows`).
    """
    source_copies, target_copies = (
        np.bincount(rows[rows >= 0]) for rows in (source_rows, target_rows)
    )
    extracted = source_copies[pairs.source] * target_copies[pairs.target]
    gold_source, gold_target = source_rows[gold[:, 0]], target_rows[gold[:, 1]]
    reachable = (gold_source >= 0) & (gold_target >= 0)
    width = len(target_copies)
    keys, counts = np.unique(
        gold_source[reachable] * width + gold_target[reachable], return_counts=True
    )
    wanted = pairs.source * width + pairs.target
    place = np.searchsorted(keys, wanted)  # len(keys) where all are less
    return extracted, np.where(np.append(keys, -1)[place] == wanted, np.append(counts, 0)[place], 0)


def best_threshold(
    scores: np.ndarray, extracted: np.ndarray, correct: np.ndarray, gold: int
) -> float:
    """The threshold of highest F1: the middle of two consecutive different scores (appendix "Scoring Function ...").

    If all pairs together are best it is the lowest score; of thresholds with equal F1 it is the highest. O(P log P).

    >>> best_threshold(np.array([3.0, 2.0, 1.0]), np.ones(3), np.array([1, 1, 0]), gold=2)
    1.5

    Args:
        scores: (P,) in any order, equal ones included.
        extracted, correct: (P,) pairs of ids that each stands for, and how many of those are gold.
        gold: number of gold pairs.

    Raises:
        ValueError: no pairs.
    """
    if len(scores) == 0:
        raise UserError("no pairs were mined: there is no threshold")
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    ends = np.append(
        np.flatnonzero(np.diff(ranked)), len(ranked) - 1
    )  # a threshold cannot part equal scores
    f1 = 2 * correct[order].cumsum()[ends] / (extracted[order].cumsum()[ends] + gold)
    best = int(f1.argmax())
    lowest = float(ranked[ends[best]])
    if best == len(ends) - 1:
        return lowest
    below = float(ranked[ends[best + 1]])
    middle = below + (lowest - below) / 2
    return middle if middle > below else lowest  # neighbouring floats have no middle


def score_at(
    threshold: float, scores: np.ndarray, extracted: np.ndarray, correct: np.ndarray, gold: int
) -> MiningScore:
    """Precision, recall and F1 of the pairs with a score of at least `threshold`; arguments as `best_threshold`."""
    chosen = scores >= threshold
    found, right = int(extracted[chosen].sum()), int(correct[chosen].sum())
    precision = 100 * right / found if found else 0.0
    return MiningScore(
        precision, 100 * right / gold, 200 * right / (found + gold), threshold, found, right, gold
    )
