"""The paper's Table 6 (cost of the objectives) beside the numbers of `benchmarks.flops`."""

from typing import Any

from dap.reports import PAPER_COST

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
    """Return a row per objective: our numbers, the paper's, and each divided by TR's.

    Args:
        found: objective -> `flops` of a pair's forward pass and `cpu` seconds of a step.
        pairs: pairs of a step.
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
    """Return the paper's cost of an objective, also divided by TR's, or empty cells for BOW."""
    if name not in PAPER_COST:
        return ["", ""]
    cost = PAPER_COST[name][column]
    return [f"{cost:{form}}", f"{cost / PAPER_COST['TR'][column]:.2f}"]
