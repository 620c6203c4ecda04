"""The paper's Table 6 (cost of the objectives) beside the numbers of `benchmarks.flops`."""

from typing import Any

from dap_transformers.evaluation.paper import PAPER_COST

HEADER = [
    "",
    "GFLOPs",
    "/ TR",
    "paper",
    "/ TR",
    "CPU ms per pair",
    "/ TR",
    "paper, ms",
    "/ TR",
]


def cost_rows(found: dict[str, dict[str, Any]], pairs: int) -> list[list[str]]:
    """Return a table's rows, one per objective: our cost, the paper's, and each divided by TR's.

    Args:
        found: objective -> "flops" of a pair's forward pass, and "cpu", the CPU seconds of a
            training step. It must have all objectives of the paper.
        pairs: number of pairs of a step.

    Returns:
        The cells of each row, in the order of `HEADER`.
    """
    rows = []
    for name in [*PAPER_COST, *(name for name in found if name not in PAPER_COST)]:
        gflops = found[name]["flops"] / 1e9
        milliseconds = 1000 * found[name]["cpu"] / pairs
        tr_gflops = found["TR"]["flops"] / 1e9
        tr_milliseconds = 1000 * found["TR"]["cpu"] / pairs
        row = [
            f"TR+{name}" if name in ("TLM", "BOW") else name,
            f"{gflops:.2f}",
            f"{gflops / tr_gflops:.2f}",
            *paper_cells(name, 0, ".1f"),
            f"{milliseconds:.0f}",
            f"{milliseconds / tr_milliseconds:.2f}",
            *paper_cells(name, 1, ".2f"),
        ]
        rows.append(row)
    return rows


def paper_cells(name: str, column: int, form: str) -> list[str]:
    """Return two cells: the paper's cost of an objective, and the same divided by TR's.

    Both are empty for an objective that the paper does not have.

    Args:
        name: objective.
        column: which cost of `PAPER_COST`: 0 for GFLOPs, 1 for milliseconds.
        form: format of the first cell, such as ".1f".
    """
    if name not in PAPER_COST:
        return ["", ""]
    cost = PAPER_COST[name][column]
    return [f"{cost:{form}}", f"{cost / PAPER_COST['TR'][column]:.2f}"]
