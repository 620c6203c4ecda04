"""Whether the run that lies in a folder may be used: only if it was made from what is asked for now."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dap.errors import UserError
from dap.file_io import read_json, write_json
from dap.training import FINISHED, changes_weights, differences

RECORD = "made_from.json"  # written before training begins


def folder_digest(folder: Path) -> str:
    """16 hexadecimal digits that depend on name and content of every file in ``folder`` (not below it)."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        with path.open("rb") as file:
            digest.update(
                hashlib.file_digest(file, partial(hashlib.sha256, path.name.encode())).digest()
            )
    return digest.hexdigest()[:16]


def ingredients(model: str, pooling: str, recipe: Path, text: Path) -> dict[str, Any]:
    """What decides how a run comes out: start model, pooling, training text, lines of the recipe (those that can).

    A model in a folder is known by its content, one of the Hub by its name.
    """
    start = f"{Path(model).name} ({folder_digest(Path(model))})" if Path(model).is_dir() else model
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    lines = {key: value for key, value in content.items() if changes_weights(key)}
    return {
        "start model": start,
        "pooling": pooling,
        "training text": folder_digest(text),
        recipe.name: lines,
    }


def claim(out: Path, wanted: dict[str, Any]) -> bool:
    """Whether ``out`` holds a finished run made from ``wanted``; if not, it is marked as a run that will be.

    A folder without a finished run or a checkpoint to go on from is free for any run.

    Raises:
        ValueError: a finished or interrupted run from something else.
    """
    record, finished = out / RECORD, (out / FINISHED).exists()
    if not finished and not any(out.glob("checkpoint-*")):
        write_json(wanted, record)
        return False
    if differing := differences(
        read_json(record) if record.exists() else dict.fromkeys(wanted), wanted
    ):
        raise UserError(
            f"{out} holds a run made from something else ({'; '.join(differing)}); remove or rename the folder to "
            f"train again: mv {out} {out}-old"
        )
    return finished
