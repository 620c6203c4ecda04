"""BUCC 2018: its files, and precision, recall and F1 of mined pairs against its gold pairs.

Gold pairs are the true pairs of sentences, as published with the data.

A split is three files in one folder. `fr-en.training.fr` and `fr-en.training.en` have lines
`id<TAB>sentence`. `fr-en.training.gold` has one true pair per line,
`fr-000000057<TAB>en-000008530`.

Which splits the paper uses: its Table 2, "BUCC training set", is BUCC's *sample* split at that
split's own best threshold. Its Table 3, "BUCC test set", is the *training* split at the sample's
threshold. The released scripts rename `sample` to `dev` and `training` to `test`, so both names are
found here. The gold pairs of BUCC's real test split are not public.

A mined pair of sentences stands for all pairs of ids that hold these two sentences. So every gold
pair can be found, even if its sentence is repeated. Each repetition that gold does not list is an
error.

Legend: `P` mined pairs, `G` gold pairs, `L` lines.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dap_transformers.errors import UserError
from dap_transformers.mining.margin import MinedPairs
from dap_transformers.text.archives import read_sentences

SAMPLE = ("sample", "dev")
TRAINING = ("training", "test")
TEST = ("test",)

#: Protocol -> its meaning, and the splits that it needs. Each split is given by the names that its
#: files may have. The threshold is chosen on the first split. The numbers are those of the last.
PROTOCOLS: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "sample": (
        "the threshold of best F1 on the sample split itself (the paper's Table 2)",
        (SAMPLE,),
    ),
    "sample-threshold-on-training": (
        "the threshold of best F1 on the sample split, applied to the training split "
        "(the paper's Table 3)",
        (SAMPLE, TRAINING),
    ),
    "training-optimal": (
        "the threshold of best F1 on the training split itself",
        (TRAINING,),
    ),
    "training-threshold-on-test": (
        "the threshold of best F1 on the training split, applied to the test split",
        (("training",), TEST),
    ),
}
SUFFIXES = ("", ".gz", ".xz")


@dataclass(frozen=True)
class Split:
    """The files of one split of a BUCC language pair. Each may be compressed.

    Attributes:
        name: name of the split in its files, such as "sample".
        source: file of the source text, with lines `id<TAB>sentence`.
        target: file of the target text, with lines `id<TAB>sentence`.
        gold: file of the true pairs, with lines `source id<TAB>target id`.
    """

    name: str
    source: Path
    target: Path
    gold: Path


@dataclass(frozen=True)
class MiningScore:
    """How well mined pairs agree with the gold pairs.

    All numbers count pairs of ids. A mined pair of sentences stands for all pairs of a source id
    and a target id that have these two sentences.

    Attributes:
        precision: share of the extracted pairs that are gold, in percent.
        recall: share of the gold pairs that were extracted, in percent.
        f1: harmonic mean of both, in percent.
        threshold: pairs with at least this score are extracted.
        extracted: number of extracted pairs of ids.
        correct: number of extracted pairs of ids that are gold.
        gold: number of gold pairs.
    """

    precision: float
    recall: float
    f1: float
    threshold: float
    extracted: int
    correct: int
    gold: int


def find_splits(folder: str | Path, pair: str, protocol: str) -> list[Split]:
    """Find the files of the splits that a protocol needs, as plain text, `.gz` or `.xz`.

    Args:
        folder: holds the files, or a folder with the name of the pair that holds them.
        pair: two languages, such as "fr-en".
        protocol: one of `PROTOCOLS`.

    Returns:
        One or two splits. The threshold is chosen on the first one, and the last one is evaluated.
    """
    if protocol not in PROTOCOLS:
        raise UserError(f"protocol={protocol!r}: choose one of {', '.join(PROTOCOLS)}")
    languages = pair.split("-")
    if len(languages) != 2 or not all(languages):
        raise UserError(f"pair={pair!r}: give two languages such as fr-en")
    _, splits = PROTOCOLS[protocol]
    return [_find_split(Path(folder), pair, names) for names in splits]


def default_protocol(folder: str | Path, pair: str) -> str:
    """Choose a protocol by the files that are there.

    Args:
        folder: holds the files, or a folder with the name of the pair that holds them.
        pair: two languages, such as "fr-en".

    Returns:
        "sample" if only the sample split is there, otherwise "training-optimal".
    """
    found = set()
    for place in (Path(folder), Path(folder) / pair):
        for path in place.glob(f"{pair}.*"):
            found.add(path.name.removeprefix(f"{pair}.").split(".")[0])
    has_sample_only = "training" not in found and not found.isdisjoint(SAMPLE)
    protocol = "sample" if has_sample_only else "training-optimal"
    find_splits(folder, pair, protocol)
    return protocol


def _find_split(folder: Path, pair: str, names: tuple[str, ...]) -> Split:
    """Find the three files of a split.

    Returns:
        The split, with the name that its files have.
    """
    languages_and_gold = (*pair.split("-"), "gold")
    places = (folder, folder / pair)

    best: tuple[str, list[Path | None]] = (names[0], [None] * 3)
    most = -1
    for place in places:
        for name in names:
            files = [_existing(place / f"{pair}.{name}.{ending}") for ending in languages_and_gold]
            count = sum(file is not None for file in files)
            if count > most:
                best = (name, files)
                most = count

    name, files = best
    missing = []
    for file, ending in zip(files, languages_and_gold, strict=True):
        if file is None:
            missing.append(f"{pair}.{name}.{ending}")
    if missing:
        present = set()
        for place in places:
            present |= {path.name for path in place.glob("*-*.*.*")}
        raise FileNotFoundError(
            f"{folder} has no {', '.join(missing)}; it has "
            f"{' '.join(sorted(present)[:12]) or 'no such files'}"
        )
    source, target, gold = files
    return Split(name, source, target, gold)


def _existing(path: Path) -> Path | None:
    """Return the file with this name, or with `.gz` or `.xz` behind it. None if there is none."""
    for suffix in SUFFIXES:
        file = path.with_name(path.name + suffix)
        if file.is_file():
            return file
    return None


def read_text(path: Path, ids: dict[str, int]) -> Iterator[str]:
    """Yield the sentences of a BUCC text, line by line, and collect their ids.

    Args:
        path: a file with lines `id<TAB>sentence`.
        ids: a dictionary that is filled while the lines are read. It maps each id to the index of
            its line, from 0.
    """
    for index, line in enumerate(read_sentences(path)):
        name, tab, sentence = line.partition("\t")
        if not name or not tab:
            raise UserError(
                f"{path}, line {index + 1}: {line[:60]!r} is not an id, a tab and a sentence"
            )
        first = ids.setdefault(name, index)
        if first != index:
            raise UserError(
                f"{path}, line {index + 1}: the id {name} is already on line {first + 1}"
            )
        yield sentence


def read_gold(
    split: Split, source_ids: Mapping[str, int], target_ids: Mapping[str, int]
) -> np.ndarray:
    """Read the gold pairs of a split, and look up the lines of their ids.

    Args:
        split: the split whose gold file is read.
        source_ids: maps an id to the index of its line in the source, from 0.
        target_ids: maps an id to the index of its line in the target, from 0.

    Returns:
        (G, 2) int64: source line and target line of each gold pair, from 0.
    """
    first_line: dict[tuple[int, int], int] = {}
    for number, line in enumerate(read_sentences(split.gold), 1):
        place = f"{split.gold}, line {number}"
        names = line.split("\t")
        if len(names) != 2:
            raise UserError(f"{place}: {line[:60]!r} is not two ids with a tab between them")
        source, target = names
        _require_id(source, split.source, source_ids, target_ids, place)
        _require_id(target, split.target, target_ids, source_ids, place)
        pair = (source_ids[source], target_ids[target])
        first = first_line.setdefault(pair, number)
        if first != number:
            raise UserError(f"{place}: {line!r} is already on line {first}")
    if not first_line:
        raise UserError(f"{split.gold} is empty: there is nothing to compare with")
    return np.array(list(first_line), np.int64)


def _require_id(
    name: str, path: Path, ids: Mapping[str, int], other_ids: Mapping[str, int], place: str
) -> None:
    """Raise `UserError` if a text has no such id. The message says if the other text has it."""
    if name in ids:
        return
    if name in other_ids:
        hint = "but of the other side: are the languages swapped?"
    else:
        hint = "nor of the other side"
    raise UserError(f"{place}: {name} is no id of {path}, {hint}")


def count_gold(
    pairs: MinedPairs, gold: np.ndarray, source_rows: np.ndarray, target_rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Count the pairs of ids that each mined pair of sentences stands for, and how many are gold.

    A sentence may be on several lines, each of which has an id.

    Args:
        pairs: P pairs of distinct sentences.
        gold: (G, 2) source line and target line of each gold pair, from 0.
        source_rows: number of the distinct sentence on each source line, -1 for an empty line
            (`DistinctSentences.rows`).
        target_rows: number of the distinct sentence on each target line, -1 for an empty line.

    Returns:
        (P,) the number of pairs of ids, and (P,) how many of them are gold, both int64.
    """
    # a sentence on a lines paired with a sentence on b lines stands for a·b pairs of ids
    source_copies = np.bincount(source_rows[source_rows >= 0])
    target_copies = np.bincount(target_rows[target_rows >= 0])
    extracted = source_copies[pairs.source] * target_copies[pairs.target]

    # count the gold pairs of each pair of sentences, which is numbered by one integer key
    width = len(target_copies)
    gold_source = source_rows[gold[:, 0]]
    gold_target = target_rows[gold[:, 1]]
    is_filled = (gold_source >= 0) & (gold_target >= 0)
    gold_keys = gold_source[is_filled] * width + gold_target[is_filled]
    keys, counts = np.unique(gold_keys, return_counts=True)

    # look up the count of each mined pair
    mined_keys = pairs.source * width + pairs.target
    position = np.searchsorted(keys, mined_keys)  # len(keys) if all keys are smaller
    is_found = np.append(keys, -1)[position] == mined_keys
    return extracted, np.where(is_found, np.append(counts, 0)[position], 0)


def best_threshold(
    scores: np.ndarray, extracted: np.ndarray, correct: np.ndarray, gold: int
) -> float:
    """Return the lowest score of pairs to extract that gives the highest F1, in O(P log P).

    As in the paper's appendix "Scoring Function For BUCC", it lies in the middle between two
    consecutive different scores. If all pairs together have the highest F1, it is the lowest score.
    Of thresholds with equal F1 the highest is chosen.

    >>> best_threshold(np.array([3.0, 2.0, 1.0]), np.ones(3), np.array([1, 1, 0]), gold=2)
    1.5

    Args:
        scores: (P,) scores of the mined pairs, in any order.
        extracted: (P,) number of pairs of ids that each mined pair stands for.
        correct: (P,) how many of those are gold.
        gold: number of gold pairs.
    """
    if len(scores) == 0:
        raise UserError("no pairs were mined: there is no threshold")
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]

    # a threshold cannot separate equal scores, so only the last one of each run is a possible end
    ends = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    correct_so_far = correct[order].cumsum()[ends]
    extracted_so_far = extracted[order].cumsum()[ends]
    f1 = 2 * correct_so_far / (extracted_so_far + gold)

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
    """Compute precision, recall and F1 of the pairs that score at least `threshold`.

    If there is no such pair, all three are 0.

    Args:
        threshold: lowest score of a pair that counts as extracted.
        scores: (P,) scores of the mined pairs, in any order.
        extracted: (P,) number of pairs of ids that each mined pair stands for.
        correct: (P,) how many of those are gold.
        gold: number of gold pairs.
    """
    chosen = scores >= threshold
    found = int(extracted[chosen].sum())
    right = int(correct[chosen].sum())
    return MiningScore(
        precision=100 * right / found if found else 0.0,
        recall=100 * right / gold,
        f1=200 * right / (found + gold),
        threshold=threshold,
        extracted=found,
        correct=right,
        gold=gold,
    )
