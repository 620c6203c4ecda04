"""What several tests compare with: plain loops in float64."""

import numpy as np


def cosines(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Compute the cosines (N, M) column by column, so that equal rows have equal cosines.

    A row of zeros has the cosine 0 with every row.
    """
    queries = queries.astype(np.float64)
    found = np.zeros((len(queries), len(keys)))
    query_lengths = np.linalg.norm(queries, axis=1)
    for column, key in enumerate(keys.astype(np.float64)):
        lengths = query_lengths * np.linalg.norm(key)
        np.divide((queries * key).sum(1), lengths, out=found[:, column], where=lengths > 0)
    return found
