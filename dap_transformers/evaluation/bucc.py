"""BUCC 2018: its files, and precision, recall and F1 of mined pairs against its gold pairs.

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

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dap_transformers.encoding.encoder import Encoder
from dap_transformers.errors import UserError, reading
from dap_transformers.evaluation.evaluator import Evaluator, Metric, Numbers, by_name
from dap_transformers.evaluation.paper import bucc_table
from dap_transformers.mining.margin import candidate_pairs, neighbourhoods
from dap_transformers.mining.texts import DistinctSentences
from dap_transformers.text.archives import decoded_lines

SAMPLE = ("sample", "dev")
TRAINING = ("training", "test")

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
}


class Split(NamedTuple):
    """The two texts of a split, and its true pairs.

    Attributes:
        gold: (G, 2) int64, source line and target line of each true pair, from 0.
    """

    source: DistinctSentences
    target: DistinctSentences
    gold: np.ndarray


@dataclass
class Bucc(Evaluator):
    """Precision, recall and F1 of the pairs that are mined in language pairs of BUCC.

    Attributes:
        folders: a folder per language pair, named after it, such as `bucc/fr-en`. The files may
            also lie in the folder above it.
        protocol: one of `PROTOCOLS`. None is "training-optimal" if every language pair has
            the gold file of a training split, else "sample".
    """

    folders: Sequence[str | Path]
    protocol: str | None = None
    name = "bucc"
    task = "bitext mining"
    primary = "mean_f1"

    def __post_init__(self) -> None:
        folders = by_name(self.folders)
        if self.protocol is None:
            has_training = all(has_gold(folder, TRAINING) for folder in folders.values())
            self.protocol = "training-optimal" if has_training else "sample"
        meaning, splits = PROTOCOLS[self.protocol]
        self.description = f"BUCC {self.protocol}: {meaning}"
        self.texts: dict[str, list[Split]] = {}
        for pair, folder in folders.items():
            self.texts[pair] = [read_split(folder, names) for names in splits]

    def sentences(self) -> Iterator[str]:
        for splits in self.texts.values():
            for split in splits:
                yield from chain(split.source, split.target)

    def __call__(self, encoder: Encoder) -> Numbers:
        """Mine each split, and score its pairs at the best threshold of the first split.

        Returns:
            The numbers of the last split by language pair, under "pairs". With two splits, the
            numbers of the first one are under "threshold_split".
        """
        numbers: Numbers = {}
        for pair, splits in self.texts.items():
            threshold = None
            names = ("threshold_split", "pairs")[-len(splits) :]
            for name, split in zip(names, splits, strict=True):
                source, target = (encoder.encode(list(side)) for side in split[:2])
                neighbours = neighbourhoods(source, target)
                pairs = candidate_pairs(neighbours)
                counts = pairs["score"], *count_gold(pairs, split), len(split.gold)
                if threshold is None:
                    threshold = best_threshold(*counts)
                numbers.setdefault(name, {})[pair] = score_at(threshold, *counts)
        return numbers

    def logged(self, numbers: Numbers) -> dict[str, float]:
        found = {f"{pair}_f1": each["f1"] for pair, each in numbers["pairs"].items()}
        return found | {"mean_f1": float(np.mean(list(found.values())))}

    def metrics(self, numbers: Numbers) -> list[Metric]:
        found = []
        for pair, each in numbers["pairs"].items():
            for name in ("precision", "recall", "F1"):
                found.append(Metric(name, each[name.lower()], pair, name.lower()))
            found.append(Metric("true pairs", each["gold"], pair))
        return found

    def table(self, numbers: Numbers) -> str:
        """Format the numbers below the protocol, and above the paper's values if it has them."""
        text = f"{self.description}\n{super().table(numbers)}"
        paper = bucc_table(numbers["pairs"], self.protocol)
        return f"{text}\n\n{paper}" if paper else text


# The files


def has_gold(folder: Path, names: tuple[str, ...]) -> bool:
    """Tell whether the gold file of a split exists. BUCC's own "test" has none.

    If only the texts are missing, `read_split` raises an error. Another split would give other
    numbers.
    """
    places = product((folder, folder.parent), names)
    return any((place / f"{folder.name}.{name}.gold").is_file() for place, name in places)


def find_split(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """Find the files of a split in a pair's folder or above it: source, target and gold."""
    endings = (*folder.name.split("-"), "gold")
    for place, name in product((folder, folder.parent), names):
        files = [place / f"{folder.name}.{name}.{ending}" for ending in endings]
        if all(file.is_file() for file in files):
            return files
    raise FileNotFoundError(
        f"{folder} has no {folder.name}.{names[0]}.gold with its two texts: name the languages as "
        "well, such as bucc/fr-en"
    )


def read_split(folder: Path, names: tuple[str, ...]) -> Split:
    """Read the two texts and the gold pairs of a split that `find_split` finds."""
    *texts, gold = find_split(folder, names)
    sides = []
    lines = []
    for path in texts:
        sentences = read_text(path)
        sides.append(DistinctSentences(sentences.values(), path))
        lines.append({name: line for line, name in enumerate(sentences)})
    pairs = read_gold(gold, *lines)
    if not len(pairs):
        raise UserError(f"{gold} is empty")
    return Split(*sides, pairs)


def read_text(path: Path) -> dict[str, str]:
    """Read lines `id<TAB>sentence`: id -> sentence, in the order of the lines."""
    sentences: dict[str, str] = {}
    for number, line in enumerate(decoded_lines(path), 1):
        with reading(f"{path}, line {number}: id and sentence"):
            name, sentence = line.split("\t", 1)
        if name in sentences:
            raise UserError(f"{path}, line {number}: the id {name} is repeated")
        sentences[name] = sentence
    return sentences


def read_gold(
    path: Path, source_lines: Mapping[str, int], target_lines: Mapping[str, int]
) -> np.ndarray:
    """Read source and target lines, from 0, of the gold pairs (G, 2). Repeated pairs count once.

    `source_lines` and `target_lines` give the line of each id.
    """
    pairs: dict[tuple[int, int], None] = {}
    for number, line in enumerate(decoded_lines(path), 1):
        with reading(f"{path}, line {number}"):
            source, target = line.split("\t")
            pairs[source_lines[source], target_lines[target]] = None
    return np.array(list(pairs), np.int64).reshape(-1, 2)


# From pairs to numbers


def count_gold(pairs: np.ndarray, split: Split) -> tuple[np.ndarray, np.ndarray]:
    """Return how many pairs of ids each mined pair (P,) stands for, and how many are gold (P,).

    A sentence may be on several lines, each of which has an id.
    """
    # a sentence on a lines paired with a sentence on b lines stands for a·b pairs of ids
    source_rows, target_rows = split.source.rows, split.target.rows
    source_copies = np.bincount(source_rows[source_rows >= 0])
    target_copies = np.bincount(target_rows[target_rows >= 0])
    extracted = source_copies[pairs["source"]] * target_copies[pairs["target"]]

    # gold pairs with an empty sentence have a row of -1, which is never mined
    source_lines, target_lines = split.gold.T
    gold = Counter(zip(source_rows[source_lines].tolist(), target_rows[target_lines].tolist()))
    mined = zip(pairs["source"].tolist(), pairs["target"].tolist())
    return extracted, np.array([gold[pair] for pair in mined], int)


def best_threshold(
    scores: np.ndarray, extracted: np.ndarray, correct: np.ndarray, gold: int
) -> float:
    """Return the threshold with the highest F1. Pairs that score at least this are extracted.

    As in the paper's appendix "Scoring Function For BUCC", it lies in the middle between two
    consecutive different scores. If all pairs together have the highest F1, it is the lowest score.
    Of thresholds with equal F1, the highest is returned. Scores may be in any order.

    >>> best_threshold(np.array([3.0, 2.0, 1.0]), np.ones(3), np.array([1, 1, 0]), gold=2)
    1.5
    """
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
) -> dict[str, float]:
    """Compute the rates, in percent, and the counts of the pairs that score at least `threshold`.

    Scores (P,) may be in any order. The counts (P,) are those of `count_gold`. Without any pair,
    all rates are 0.
    """
    chosen = scores >= threshold
    found = int(extracted[chosen].sum())
    right = int(correct[chosen].sum())
    return {
        "precision": round(100 * right / max(found, 1), 4),
        "recall": round(100 * right / gold, 4),
        "f1": round(200 * right / (found + gold), 4),
        "threshold": threshold,
        "extracted": found,
        "correct": right,
        "gold": gold,
    }
