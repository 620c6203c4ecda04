"""Records of runs and evaluations: JSON files that say how a number came about.

A report is one evaluation's numbers with the model, protocol, settings, machine and versions behind them.
"""

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dap.errors import UserError
from dap.file_io import read_json

#: What a report says about the run; everything else in it is a number of the evaluation.
HEAD = (
    "model", "revision", "protocol", "seed", "settings", "seconds", "seconds_by_part", "time", "machine", "versions",
)  # fmt: skip
RECORD = "run.json"  # what a run of train_dap.py is; see dap/training/resuming.py
#: Libraries whose version can move a number.
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
    head = {
        "model": model,
        "revision": revision,
        "protocol": protocol,
        "seed": seed,
        "settings": dict(settings),
    }
    tail = {
        "seconds": round(seconds, 2),
        "time": timestamp(),
        "machine": machine(),
        "versions": versions(),
    }
    return head | dict(results) | tail


def timestamp() -> str:
    """Date and time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Version of Python and of each of `LIBRARIES` that is installed."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[library] = version(library)
    return found


def machine() -> dict[str, Any]:
    """Name of CPU and GPU (None where there is none), and PyTorch's number of threads."""
    import torch  # takes seconds, which those who only write tables need not wait

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(
            line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
        )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def training_record(name_or_path: str) -> tuple[int | None, str | None]:
    """Seed and recipe of a local checkpoint that train_dap.py made, from the `run.json` that it left; else None twice.

    The recipe is a digest of all arguments that can change the weights but the seeds, of the languages, and of the
    step for one of a run's checkpoints. The text is not part of it, since the seed draws the dev set; nor is the size
    of a target vocabulary that comes from the text.
    """
    folder = Path(name_or_path)
    places = [folder, folder.parent] if folder.name.startswith("checkpoint-") else [folder]
    path = next((place / RECORD for place in places if (place / RECORD).is_file()), None)
    if path is None:
        return None, None
    run = read_json(path)
    by_seed = {"seed", "data_seed"} | (
        {"target_vocab_size"} if run.get("target_vocabulary_file") is None else set()
    )
    recipe = {name: value for name, value in run.items() if name not in by_seed}
    recipe |= {name: sorted(recipe.get(name, {})) for name in ("training text", "dev text")}
    recipe |= {"checkpoint": folder.name if len(places) > 1 else None}
    return run.get("seed"), hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[
        :12
    ]


def read_report(path: str | Path, merged: bool = False) -> dict[str, Any]:
    """What `write_json` wrote of a `report`, or with `merged` of several that were merged, too.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not JSON, NaN in it, or no report (without model or protocol).
    """
    content = read_json(path, finite=True)
    if not (
        isinstance(content, dict)
        and all(isinstance(content.get(key), str) for key in ("model", "protocol"))
    ):
        raise UserError(f"{path} is no report of an evaluation: it names no model and protocol")
    if "seeds" in content and not merged:
        raise UserError(f"{path} is a merged report: give the reports that it was made of")
    return content
