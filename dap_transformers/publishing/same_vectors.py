"""Check that an exported or published model gives the same sentence vectors as its checkpoint."""

import numpy as np

from dap_transformers.errors import UserError
from dap_transformers.search.exact import unit_rows

TEXT = "Guten Morgen! Доброе утро, мир. 我喜欢喝茶。 Habari ya asubuhi? "
#: Sentences in several scripts, from one character to more tokens than any model has positions.
PROBE = (*(TEXT[:end] for end in (1, 5, 12, 30, 60)), TEXT * 3, TEXT * 400)
#: Largest allowed difference of an entry, for vectors of length 1.
TOLERANCE = 1e-4


def require_same_vectors(expected: np.ndarray, found: np.ndarray, what: str) -> float:
    """Check that a model gives the same sentence vectors as its checkpoint.

    The vectors are scaled to length 1 before they are compared.

    Args:
        expected: vectors of the checkpoint, (N, D).
        found: vectors to compare, (N, D).
        what: name of the model that made them, for the error message.

    Returns:
        The largest absolute difference between an entry of `expected` and of `found`.
    """
    expected = unit_rows(expected, "vectors").numpy()
    found = unit_rows(found, "vectors").numpy()
    difference = float(np.abs(expected - found).max())
    if not difference <= TOLERANCE:  # also refuses NaN
        raise UserError(
            f"the vectors of {what} differ from the checkpoint's by {difference:.1e}, "
            f"above {TOLERANCE}: nothing was written"
        )
    return difference
