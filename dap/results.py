"""Results as a JSON report and as a text table, with the paper's numbers to stand beside them."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

#: Table "Average accuracy on Tatoeba" of the paper: model -> direction -> accuracy of the 14, 28 and 36 languages.
PAPER_TATOEBA: dict[str, dict[str, tuple[float, float, float]]] = {
    "mBERT": {"xx-en": (42.5, 42.2, 36.9), "en-xx": (43.8, 43.3, 37.2)},
    "mBERT+TR": {"xx-en": (94.0, 93.8, 90.1), "en-xx": (93.2, 93.4, 90.1)},
    "mBERT+TR+TLM": {"xx-en": (94.1, 93.8, 90.2), "en-xx": (93.5, 93.5, 90.3)},
    "mBERT+DAP": {"xx-en": (94.7, 94.7, 90.9), "en-xx": (94.2, 94.6, 91.2)},
    "XLM-R": {"xx-en": (59.4, 60.1, 55.3), "en-xx": (57.5, 58.9, 53.3)},
    "XLM-R+TR": {"xx-en": (93.8, 94.2, 91.6), "en-xx": (91.2, 91.2, 86.4)},
    "XLM-R+TR+TLM": {"xx-en": (93.2, 92.8, 89.2), "en-xx": (94.4, 94.5, 92.4)},
    "XLM-R+DAP": {"xx-en": (95.0, 94.7, 91.3), "en-xx": (95.1, 95.2, 92.7)},
}
#: Libraries whose version can move a number.
LIBRARIES = ("dap-transformers", "torch", "transformers", "tokenizers", "datasets", "accelerate", "numpy")


def report(
    model: str,
    protocol: str,
    results: Mapping[str, Any],
    settings: Mapping[str, Any],
    seconds: float,
    revision: str | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """One result with what is needed to get it again, ready for `write_json`.

    Args:
        model: name or path of the checkpoint.
        protocol: how the number came about, such as "Tatoeba, cosine, index match".
        results: the numbers, named with their unit or direction.
        settings: what was chosen for the run: pooling, prefix, lengths, data.
        seconds: wall-clock time of the measured part.
        revision: commit of the checkpoint on the Hub.
        seed: of training or sampling, where there was one.
    """
    head = {"model": model, "revision": revision, "protocol": protocol, "seed": seed, "settings": dict(settings)}
    time = datetime.now(timezone.utc).isoformat(timespec="seconds")
    tail = {"seconds": round(seconds, 2), "time": time, "machine": machine(), "versions": versions()}
    return head | dict(results) | tail


def versions() -> dict[str, str]:
    """Version of Python and of each of `LIBRARIES` that is installed."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        try:
            found[library] = version(library)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Name of CPU and GPU (None where there is none), and PyTorch's number of threads."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu_name(), "gpu": gpu, "threads": torch.get_num_threads(), "system": platform.platform()}


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def write_json(content: Mapping[str, Any], path: str | Path) -> None:
    """Writes the whole file or leaves what was there: a reader or a kill never sees half of it.

    Raises:
        ValueError: NaN or infinity, which JSON cannot hold.
    """
    path = Path(path)
    text = json.dumps(content, ensure_ascii=False, indent=2, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def text_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns: the first to the left, the others to the right; floats with one decimal, None as "-".

    >>> print(text_table(["model", "36"], [["mBERT+DAP", 90.9], ["mine", None]]))
    model        36
    ---------  ----
    mBERT+DAP  90.9
    mine          -
    """
    cells = [[_cell(value) for value in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]).rstrip()
        for row in [cells[0], ["-" * width for width in widths], *cells[1:]]
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def paper_table(averages: Mapping[str, tuple[float, float]], name: str = "this model") -> str:
    """The paper's table of Tatoeba averages with a row of our own on top.

    Args:
        averages: "14 languages", "28 languages", "36 languages" -> (xx→en, en→xx) in percent; absent ones show "-".
        name: what to call our row.
    """
    groups = ("14 languages", "28 languages", "36 languages")
    header = ["model"] + [f"{direction} {group.split()[0]}" for direction in ("xx→en", "en→xx") for group in groups]
    ours = [averages.get(group, (None, None))[side] for side in (0, 1) for group in groups]
    paper = [[model, *numbers["xx-en"], *numbers["en-xx"]] for model, numbers in PAPER_TATOEBA.items()]
    return text_table(header, [[name, *ours], *([f"paper: {row[0]}", *row[1:]] for row in paper)])
