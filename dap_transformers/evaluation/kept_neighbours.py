"""How much a training changes which sentences of the target language are near each other.

Legend: `N` sentences, `D` dimensions.
"""

from dataclasses import dataclass

import numpy as np

from dap_transformers.encoding.encoder import Encoder
from dap_transformers.evaluation.evaluator import Evaluator, Numbers, PairsByLanguage, as_pairs
from dap_transformers.search.exact import nearest_neighbours

#: Neighbours of a sentence that are compared.
NEIGHBOURS = 10
#: Fewest and most sentences to compare.
FEWEST, MOST = 2 * NEIGHBOURS, 1000


@dataclass
class KeptNeighbours(Evaluator):
    """Share of each target's ten nearest targets that were among its ten nearest before training.

    Without any questions, it tells what a training does to search within a language
    (docs/search.md). Sources are left out, because they shall move to their targets.

    Attributes:
        pairs: language code -> (source, target) sentences. The first 1,000 distinct targets count.
        before: the encoder before training. It is called when the evaluator is made, not later.
    """

    pairs: PairsByLanguage
    before: Encoder
    name = "kept_neighbours"
    primary = "kept_neighbours"

    def __post_init__(self) -> None:
        self.pairs = as_pairs(self.pairs)
        targets = dict.fromkeys(target for rows in self.pairs.values() for _, target in rows)
        self.targets = list(targets)[:MOST] if len(targets) >= FEWEST else []
        self.kept = self.neighbours(self.before)

    def sentences(self) -> list[str]:
        return self.targets

    def neighbours(self, encoder: Encoder) -> np.ndarray:
        """Return the rows of each target's ten nearest other targets, best first: (N, 10)."""
        if not self.targets:
            return np.empty((0, NEIGHBOURS))
        vectors = encoder.encode(self.targets)  # (N, D)
        _, found = nearest_neighbours(vectors, vectors, NEIGHBOURS + 1)  # (N, 11)
        rows = []
        for own, near in enumerate(found.tolist()):
            rows.append([row for row in near if row != own][:NEIGHBOURS])
        return np.array(rows)

    def __call__(self, encoder: Encoder) -> Numbers:
        if not self.targets:
            return {}
        now = self.neighbours(encoder)
        is_kept = (self.kept[:, :, None] == now[:, None, :]).any(2)  # (N, 10)
        return {"kept_neighbours": 100 * float(is_kept.mean())}
