"""The paper's Table 6 with ours beside it, from what `python -m benchmarks.flops --json` wrote."""

from pathlib import Path
from typing import Any

from dap.errors import UserError
from dap.file_io import read_object
from dap.reports import PAPER_COST
from experiments.markdown import paragraph, table

HEADER = ["", "GFLOPs", "/ TR", "paper", "/ TR", "CPU ms a pair", "/ TR", "paper, ms", "/ TR"]


def cost_block(path: Path) -> str:
    """A row an objective: forward GFLOPs of a pair, and the time of a training step by the pair.

    Raises:
        ValueError: a file that `benchmarks.flops` did not write.
    """
    if not path.is_file():
        return "Not run yet."
    content = read_object(path)
    if not {"pair", "arguments", "machine"} <= set(content):
        raise UserError(f"{path}: not written by `python -m benchmarks.flops --json`; make it anew")
    arguments, machine = content["arguments"], content["machine"]
    note = f"""Forward products of one pair of {arguments["tokens"]} tokens a sentence, encoder of
    size `{arguments["size"]}`; CPU time of a step, forward and backward, of {arguments["batch_size"]} such pairs,
    medians of {arguments["repeats"]} turns on {machine["cpu"]}, {machine["threads"]} thread. The paper's
    latency is of 8 V100."""
    rows = cost_rows(content["pair"], arguments["batch_size"])
    return f"{table(HEADER, rows)}\n\n{paragraph(note)}"


def cost_rows(found: dict[str, dict[str, Any]], pairs: int) -> list[list[str]]:
    """Ours, the paper's, and each in units of TR's, of what `benchmarks.flops` found for steps of so many pairs."""
    rows = []
    for name, (gflops, latency) in PAPER_COST.items():
        ours, base = (
            (found[each]["flops"] / 1e9, 1000 * found[each]["cpu"] / pairs, *PAPER_COST[each])
            for each in (name, "TR")
        )
        ratios = [f"{a / b:.2f}" for a, b in zip(ours, base, strict=True)]
        label = "TR+TLM" if name == "TLM" else name
        numbers = [f"{ours[0]:.2f}", ratios[0], f"{gflops:.1f}", ratios[2]]
        rows.append([label, *numbers, f"{ours[1]:.0f}", ratios[1], f"{latency:.2f}", ratios[3]])
    return rows
