"""Reports: JSON files that hold an evaluation's numbers and how they came about.

A report has the numbers, the model, the protocol, the settings, the machine and library versions.
"""

import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dap_transformers.errors import UserError
from dap_transformers.files import read_json

RECORD = "run.json"  # arguments of a training (dap_transformers/training/resume.py)
#: Libraries whose version can change a number.
LIBRARIES = (
    "dap-transformers", "torch", "transformers", "tokenizers", "datasets", "accelerate", "numpy",
    "sentence-transformers", "faiss-cpu",
)  # fmt: skip


def report(
    model: str,
    protocol: str,
    results: Mapping[str, Any],
    settings: Mapping[str, Any],
    seconds: float,
    revision: str | None = None,
    seed: int | None = None,
) -> dict[str, Any]:
    """Make a report of an evaluation, ready for `write_json`, with time, machine and versions.

    Args:
        protocol: how the numbers were measured, such as "Tatoeba, cosine, index match".
        results: name -> result, for the report's top level.
        settings: name -> choice of the run, such as pooling, prefix, lengths and data.
        revision: commit of the checkpoint on the Hub. None for a local checkpoint.
    """
    return {
        "model": model,
        "revision": revision,
        "protocol": protocol,
        "seed": seed,
        "settings": dict(settings),
        **results,
        "seconds": round(seconds, 2),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the version of Python, and of each of `LIBRARIES` that is installed, by name."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[library] = version(library)
    return found


def machine() -> dict[str, Any]:
    """Describe this machine. `gpu` is None without one."""
    import torch  # takes seconds, and most users of this module do not need it

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def _cpu_name() -> str:
    """Return the name of the CPU, or its architecture if the system does not tell the name."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def read_record(checkpoint: Path, name: str = RECORD) -> dict[str, Any]:
    """Read a JSON record of a training, or return an empty dictionary if there is none.

    It is in the folder, or above `checkpoint-…`.
    """
    path = checkpoint / name
    if checkpoint.name.startswith("checkpoint-") and not path.is_file():
        path = checkpoint.parent / name
    return read_json(path) if path.is_file() else {}


def read_report(path: str | Path) -> dict[str, Any]:
    """Read a report from a JSON file."""
    content = read_json(path)
    if not {"model", "protocol"} <= content.keys():
        raise UserError(f"{path} is no report of eval-retrieval, run-xnli or mine-bitext")
    return content
