"""Write and read reports: JSON files that hold an evaluation's numbers and how they came about.

A report has the numbers, the model, the protocol, the settings, the machine and library versions.
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

from dap_transformers.errors import UserError
from dap_transformers.files import read_json, read_object, require_kinds

#: Keys of a report that describe the run. All other keys hold numbers of the evaluation.
HEAD = (
    "model", "revision", "protocol", "seed", "settings",
    "seconds", "seconds_by_part", "time", "machine", "versions",
)  # fmt: skip
RECORD = "run.json"  # arguments of a training (dap_transformers/training/resume.py)
#: What others read of a `run.json`, in the form of `dap_transformers.files.misfit`.
OF_RUN = {
    "seed": int | None,
    "objective": str | None,
    "training text": ({str: str}, None),
    "dev text": ({str: str}, None),
    "target_language": str | None,
    "model_name_or_path": str | None,
    "config_name": str | None,
}
#: A number of a report: that of one run, or mean and standard deviation over seeds.
NUMBER = (float, {"mean": float, "sd": float | None})
MAYBE = (*NUMBER, None)
#: What others read of any report.
OF_REPORT = {
    "model": str,
    "protocol": str,
    "seed": int | None,
    "settings": {
        "data": (str, [str], None),
        "bucc": (str, [str], None),
        "pair": (str, [str], None),
        "text": (str, [str], None),
        "recipe": str | None,
    },
    "languages": ({str: {"accuracy": MAYBE, "xx-en": MAYBE, "en-xx": MAYBE}}, None),
    "threshold_choice": (
        {"calibrated": bool | None, "threshold": MAYBE, "precision": MAYBE},
        None,
    ),
}
#: What others read of a merged report of several seeds, beside that.
OF_MERGED = {"models": [str], "seeds": [int | None], "n": int}
#: What others read of a report of retrieval, beside that.
OF_RETRIEVAL = {
    "languages": {str: {"pairs": int, "xx-en": NUMBER, "en-xx": NUMBER}},
    "averages": {str: {"xx-en": NUMBER, "en-xx": NUMBER}},
}
#: What others read of a report of BUCC, beside that.
OF_BUCC = {
    "pairs": {str: {"precision": NUMBER, "recall": NUMBER, "f1": NUMBER, "threshold": NUMBER}}
}
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
    """Make a report of an evaluation, ready for `write_json`.

    Time, machine and library versions are added.

    Args:
        model: name or path of the checkpoint.
        protocol: how the numbers were measured, such as "Tatoeba, cosine, index match".
        results: name -> result, which may be a dictionary of results.
        settings: name -> choice of the run, such as pooling, prefix, lengths and data.
        seconds: wall-clock time of the measured part.
        revision: commit of the checkpoint on the Hub. None for a local checkpoint.
        seed: seed of training or sampling, if there was one.

    Returns:
        The report, with the results at its top level.
    """
    return {
        "model": model,
        "revision": revision,
        "protocol": protocol,
        "seed": seed,
        "settings": dict(settings),
        **results,
        "seconds": round(seconds, 2),
        "time": timestamp(),
        "machine": machine(),
        "versions": versions(),
    }


def timestamp() -> str:
    """Return the present date and time in UTC, such as "2026-11-25T17:00:00+00:00"."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def versions() -> dict[str, str]:
    """Return the version of Python, and of each of `LIBRARIES` that is installed, by name."""
    found = {"python": platform.python_version()}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[library] = version(library)
    return found


def machine() -> dict[str, Any]:
    """Describe this machine.

    Returns:
        `cpu` (name), `gpu` (name, or None without one), `threads` (of PyTorch), and `system`.
    """
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


def training_record(name_or_path: str) -> tuple[int | None, str | None]:
    """Read how a local checkpoint was trained, from the `run.json` of train_dap.py.

    The recipe is a hash of everything but the seed that can change the weights: the arguments,
    the languages, and the step of an intermediate checkpoint. Runs that differ only in the seed
    have the same recipe. The text is left out, because the seed chooses which pairs are dev
    pairs. So is the size of a target vocabulary that is made from the text.

    Args:
        name_or_path: a folder, or any other name of a model. For a folder `checkpoint-…`, the
            `run.json` may be in the folder above.

    Returns:
        Seed, and recipe as 12 hexadecimal digits. (None, None) if there is no `run.json`.
    """
    folder = Path(name_or_path)
    is_checkpoint = folder.name.startswith("checkpoint-")
    path = folder / RECORD
    if is_checkpoint and not path.is_file():
        path = folder.parent / RECORD
    if not path.is_file():
        return None, None
    run = read_object(path, OF_RUN)

    depends_on_seed = {"seed", "data_seed"}
    if run.get("target_vocabulary_file") is None:
        depends_on_seed.add("target_vocab_size")
    # The number of processes does not matter: the pairs per step are in the record, too.
    left_out = {*depends_on_seed, "processes"}
    recipe = {name: value for name, value in run.items() if name not in left_out}
    for name in ("training text", "dev text"):
        recipe[name] = sorted(recipe.get(name) or {})  # only the languages
    recipe["checkpoint"] = folder.name if is_checkpoint else None

    content = json.dumps(recipe, sort_keys=True)
    return run.get("seed"), hashlib.sha256(content.encode()).hexdigest()[:12]


def read_report(path: str | Path, merged: bool = False) -> dict[str, Any]:
    """Read a report from a JSON file, and check that it is one.

    Args:
        path: JSON file.
        merged: also accept a merged report of several seeds.

    Returns:
        The report.
    """
    content = read_json(path, finite=True)
    is_report = isinstance(content, dict)
    is_report = is_report and all(isinstance(content.get(k), str) for k in ("model", "protocol"))
    if not is_report:
        raise UserError(f"{path} is not a report of an evaluation: it names no model and protocol")
    if "seeds" in content and not merged:
        raise UserError(f"{path} is a merged report: give the reports of the single seeds")
    require_kinds(path, content, OF_REPORT)
    if "seeds" in content:
        require_kinds(path, content, OF_MERGED)
    if "averages" in content:
        require_kinds(path, content, OF_RETRIEVAL)
    if content["protocol"].startswith("BUCC "):
        require_kinds(path, content, OF_BUCC)
    return content


def is_number(value: Any) -> bool:
    """Tell whether a value of a report is a single number, which is the result of one run."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_spread(value: Any) -> bool:
    """Tell whether a value of a report is a mean and standard deviation, as `merge_seeds` makes."""
    return isinstance(value, Mapping) and set(value) == {"mean", "sd"}


def mean_of(value: Any) -> Any:
    """Return the mean of a mean and standard deviation, and any other value unchanged."""
    return value["mean"] if is_spread(value) else value
