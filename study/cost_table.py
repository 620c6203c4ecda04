"""The paper's Table 6 (cost of the objectives) beside the numbers of `benchmarks.flops`."""

from typing import Any

#: The paper's Table 6: objective -> (forward GFLOPs per pair of sentences of 32 tokens,
#: milliseconds per pair on 8 V100 GPUs).
PAPER_COST = {"TR": (11.0, 0.51), "TLM": (33.7, 1.34), "DAP": (16.5, 0.88)}
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


#: For GFLOPs and for milliseconds, as in `PAPER_COST`: the formats of our cost and the paper's.
FORMATS = ((".2f", ".1f"), (".0f", ".2f"))


def cost_rows(found: dict[str, dict[str, Any]], pairs: int) -> list[list[str]]:
    """Return a table's rows, one per objective: our cost, the paper's, and each divided by TR's.

    Args:
        found: objective -> "flops" of a pair's forward pass, and "cpu", the CPU seconds of a
            training step. It must have all objectives of the paper.
        pairs: number of pairs of a step.

    Returns:
        The cells of each row, in the order of `HEADER`.
    """
    costs = {}
    for name, part in found.items():
        costs[name] = part["flops"] / 1e9, 1000 * part["cpu"] / pairs
    rows = []
    for name in [*PAPER_COST, *(name for name in found if name not in PAPER_COST)]:
        row = [f"TR+{name}" if name in ("TLM", "BOW") else name]
        for column, forms in enumerate(FORMATS):
            for cost, form in zip((costs, PAPER_COST), forms, strict=True):
                if name in cost:
                    value = cost[name][column]
                    row += [f"{value:{form}}", f"{value / cost['TR'][column]:.2f}"]
                else:
                    row += ["", ""]
        rows.append(row)
    return rows
