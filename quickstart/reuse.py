"""Decide whether a finished run in a folder can be used again.

It can if it was made from the same model, pooling, objective, text and recipe.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dap_transformers.errors import UserError
from dap_transformers.files import read_json, write_json
from dap_transformers.training.resume import FINISHED, changes_weights, differences

RECORD = "made_from.json"  # written before training begins


def folder_digest(folder: Path) -> str:
    """Return a hash of the names and contents of all files of a folder, without subfolders.

    It has 16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            named = partial(hashlib.sha256, path.name.encode())  # a hash that starts with the name
            digest.update(hashlib.file_digest(file, named).digest())
    return digest.hexdigest()[:16]


def ingredients(
    model: str, pooling: str, objective: str, recipe: Path, text: Path
) -> dict[str, Any]:
    """Describe everything that decides about the weights of a run.

    A model in a folder is described by its name and a hash of its content, one of the Hub by its
    name.

    Args:
        model: id or folder of the model that training starts from.
        pooling: "cls" or "mean".
        objective: what is trained, such as "tr+rtl". It replaces that of the recipe.
        recipe: YAML file with arguments of train_dap.py.
        text: folder of the training text.

    Returns:
        Start model, pooling, objective, hash of the text, and those lines of the recipe that change
        weights.
    """
    start = f"{Path(model).name} ({folder_digest(Path(model))})" if Path(model).is_dir() else model
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    content.pop("objective", None)
    lines = {key: value for key, value in content.items() if changes_weights(key)}
    return {
        "start model": start,
        "pooling": pooling,
        "objective": objective,
        "training text": folder_digest(text),
        recipe.name: lines,
    }


def claim(out: Path, wanted: dict[str, Any]) -> bool:
    """Tell whether a folder holds a finished run of these ingredients, or reserve it for a new one.

    A folder without a finished run and without a checkpoint is free. It is then marked as a run
    of these ingredients by the file `made_from.json`.

    Args:
        out: folder of the run. It need not exist.
        wanted: result of `ingredients` for the run.

    Returns:
        True if there is a finished run. False if training must begin or continue.
    """
    record = out / RECORD
    finished = (out / FINISHED).exists()
    if not finished and not any(out.glob("checkpoint-*")):
        write_json(wanted, record)
        return False
    known = read_json(record) if record.exists() else dict.fromkeys(wanted)
    differing = differences(known, wanted)
    if differing:
        raise UserError(
            f"{out} holds a run made from something else ({'; '.join(differing)}); "
            f"to train again: mv {out} {out}-old"
        )
    return finished
