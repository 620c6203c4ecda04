"""How much a training changes which sentences of the target language are near each other.

Legend: `N` sentences, `D` dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from dap_transformers.encoding.encoder import Encoder
from dap_transformers.evaluation.evaluator import Evaluator, Numbers, PairsByLanguage
from dap_transformers.search.exact import nearest_neighbours

#: Neighbours of a sentence that are compared.
NEIGHBOURS = 10
#: Fewest and most targets of a language.
FEWEST, MOST = 2 * NEIGHBOURS, 200


@dataclass
class KeptNeighbours(Evaluator):
    """Share of each target's ten nearest targets that are as before training.

    Without any questions, it tells what a training does to search within a language
    (docs/search.md). Sources are left out, because they shall move to their targets.

    Attributes:
        pairs: language code -> (source, target) sentences.
        before: the encoder as it is before training. It is only called at once.
    """

    pairs: PairsByLanguage
    before: Encoder
    name = "kept_neighbours"
    task = "neighbours as before training"
    primary = "kept_neighbours"

    def __post_init__(self) -> None:
        self.targets: list[list[str]] = []  # of each language of the sources
        for rows in self.pairs.values():
            distinct = list(dict.fromkeys(target for _, target in rows))[:MOST]
            if len(distinct) >= FEWEST:
                self.targets.append(distinct)
        self.kept = self.neighbours(self.before)

    def sentences(self) -> Iterator[str]:
        return chain.from_iterable(self.targets)

    def neighbours(self, encoder: Encoder) -> list[np.ndarray]:
        """Return the rows of each target's nearest targets, (N, 10) for each language."""
        found = []
        for targets in self.targets:
            vectors = encoder.encode(targets)  # (N, D)
            _, rows = nearest_neighbours(vectors, vectors, NEIGHBOURS + 1)  # (N, 11)
            found.append(np.array([without(own, row) for own, row in enumerate(rows.tolist())]))
        return found

    def __call__(self, encoder: Encoder) -> Numbers:
        shares = []
        for kept, now in zip(self.kept, self.neighbours(encoder), strict=True):
            is_kept = (kept[:, :, None] == now[:, None, :]).any(2)  # (N, 10)
            shares.append(is_kept.mean())
        return {"kept_neighbours": 100 * float(np.mean(shares))} if shares else {}


def without(own: int, rows: list[int]) -> list[int]:
    """Return the first ten rows, best first, without a sentence's own row."""
    return [row for row in rows if row != own][:NEIGHBOURS]
