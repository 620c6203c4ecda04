"""Plain loops that more than one test file compares with."""

import numpy as np


def naive_alignment(source: np.ndarray, target: np.ndarray) -> tuple[list[list[int]], list[list[float]]]:
    """Links between rows that are each other's nearest, and the cosine of each row with each, all in plain loops."""

    def cosine(a: list[float], b: list[float]) -> float:
        lengths = sum(x * x for x in a) ** 0.5 * sum(x * x for x in b) ** 0.5
        return sum(x * y for x, y in zip(a, b, strict=True)) / lengths if lengths else 0.0

    table = [[cosine(a, b) for b in target.tolist()] for a in source.tolist()]
    links = []
    for s, row in enumerate(table):
        t = row.index(max(row))
        column = [other[t] for other in table]
        if column.index(max(column)) == s and source[s].any() and target[t].any():
            links.append([s, t])
    return links, table
