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
    for name, (paper_gflops, paper_ms) in PAPER_COST.items():
        gflops = found[name]["flops"] / 1e9
        milliseconds = 1000 * found[name]["cpu"] / pairs
        tr_gflops = found["TR"]["flops"] / 1e9
        tr_milliseconds = 1000 * found["TR"]["cpu"] / pairs
        paper_tr_gflops, paper_tr_ms = PAPER_COST["TR"]
        row = [
            "TR+TLM" if name == "TLM" else name,
            f"{gflops:.2f}",
            f"{gflops / tr_gflops:.2f}",
            f"{paper_gflops:.1f}",
            f"{paper_gflops / paper_tr_gflops:.2f}",
            f"{milliseconds:.0f}",
            f"{milliseconds / tr_milliseconds:.2f}",
            f"{paper_ms:.2f}",
            f"{paper_ms / paper_tr_ms:.2f}",
        ]
        rows.append(row)
    return rows
