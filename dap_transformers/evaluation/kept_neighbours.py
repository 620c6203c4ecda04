"""How much a training changes which sentences of a language are near each other.

Legend: `N` sentences, `D` dimensions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from dap_transformers.encoding.encoder import Encoder
from dap_transformers.evaluation.evaluator import Evaluator, Numbers, PairsByLanguage
from dap_transformers.search.exact import nearest_neighbours

#: Neighbours of a sentence that are compared.
NEIGHBOURS = 10
#: Fewest and most sentences of a language and side.
FEWEST, MOST = 2 * NEIGHBOURS, 200


@dataclass
class KeptNeighbours(Evaluator):
    """Share of each sentence's ten nearest sentences of its language that are as before training.

    Without any questions, it tells what a training does to search within a language
    (docs/search.md).

    Attributes:
        pairs: language code -> (source, target) sentences.
        before: the encoder as it is before training. It is only called at once.
    """

    pairs: PairsByLanguage
    before: Encoder
    name = "kept_neighbours"
    primary = "kept_neighbours"

    def __post_init__(self) -> None:
        self.sides: list[list[str]] = []
        for rows in self.pairs.values():
            for side in zip(*rows, strict=True):
                distinct = list(dict.fromkeys(side))[:MOST]
                if len(distinct) >= FEWEST:
                    self.sides.append(distinct)
        self.kept = self.neighbours(self.before)

    def sentences(self) -> Iterator[str]:
        for side in self.sides:
            yield from side

    def neighbours(self, encoder: Encoder) -> list[np.ndarray]:
        """Return the rows of each sentence's nearest sentences, (N, 10) for each side."""
        found = []
        for side in self.sides:
            vectors = encoder.encode(side)  # (N, D)
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
