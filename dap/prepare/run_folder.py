"""The folder that a run of `prepare_data.py` writes into: whose it is, whether it is free, begun or finished.

Shapes: none.
"""

import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dap.errors import UserError
from dap.prepare.plan import Plan, Source
from dap.prepare.shards import shard_path
from dap.reports import write_json

logger = logging.getLogger(__name__)

REPORT, WORK, INFO, CARD = "report.json", ".work", "dataset_info.json", "README.md"
VOCABULARY, NOTE = "target_vocabulary.json", "run.json"
SHOWN = 5  # names in an error


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder, until the block or this process ends; the folder goes if it stays empty.

    Raises:
        ValueError: another run is at work in it.
    """
    handle = _open_locked(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # it holds something
            folder.rmdir()
        os.close(handle)


def _open_locked(folder: Path) -> int:
    """A folder's handle with its lock; the folder is made, again if the run that had it takes it away meanwhile."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            try:
                _lock(handle, folder)
                if os.path.samestat(os.fstat(handle), os.stat(folder)):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)


def _lock(handle: int, folder: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(
            f"{folder}: another run is at work in this folder: wait for its end, or give another --output_dir"
        ) from None
    except OSError as error:  # some network file systems know no locks
        logger.warning("%s cannot be kept from other runs (%s): start none beside this one", folder, error.strerror)


def finished(plan: Plan, mark: str) -> dict[str, Any] | None:
    """The report of the same run if it has ended.

    Raises:
        ValueError: a shard that the report names is not there.
    """
    report = plan.output_dir / REPORT
    if _mark(report) != mark:
        return None
    ended = read_object(report)
    for code, counts in ended["languages"].items():
        for split in ("train", "dev"):
            for number in range(counts[f"{split}_shards"]):
                path = shard_path(plan.output_dir / split, f"{code}-{plan.target_language}", number)
                if not path.is_file():
                    raise UserError(f"{path} is absent, though {report} tells of it: --overwrite makes all again")
    return ended


def check_free(plan: Plan, mark: str, overwrite: bool) -> None:
    """Whether a run may begin or go on in the output folder.

    Raises:
        ValueError: it holds other things or another run, and may not be overwritten.
    """
    output = plan.output_dir
    names = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    ended, begun = _mark(output / REPORT), _mark(plan.work_dir / NOTE)
    if not names or names == [WORK] and begun or begun == mark and not ended or overwrite and (ended or begun):
        return
    held = f"{output} holds {', '.join(names[:SHOWN])}"
    if overwrite:
        raise UserError(f"{held}, but no {REPORT} of this command, and is not overwritten: give another --output_dir")
    raise UserError(
        f"{held} of a run with other arguments or other text: give another --output_dir, or --overwrite to replace it"
    )


def begin(plan: Plan, sources: Sequence[Source], mark: str) -> None:
    """Makes the output folder ready to begin or go on: what a finished or another run left goes.

    Cleaned files whose keys are still right stay. A kill leaves a folder that is known for one of this command.
    """
    output, note = plan.output_dir, plan.work_dir / NOTE
    if _mark(note) == mark and not (output / REPORT).exists():
        return
    write_json({"fingerprint": "being emptied"}, note)
    (output / REPORT).unlink(missing_ok=True)
    for name in (VOCABULARY, INFO, CARD):
        (output / name).unlink(missing_ok=True)
    kept = {plan.file_folder(source) for source in sources} | {note}
    for path in (output / "train", output / "dev", *plan.work_dir.iterdir()):
        if path.is_dir() and path not in kept:
            shutil.rmtree(path)
        elif path.is_file() and path not in kept:
            path.unlink()
    write_json({"fingerprint": mark}, note)


def _mark(path: Path) -> str | None:
    """The fingerprint in a report or note; None without one.

    Raises:
        ValueError: the file is not of this command.
    """
    if not path.is_file():
        return None
    found = read_object(path).get("fingerprint")
    if not isinstance(found, str):
        raise UserError(f"{path}: not written by this command; give another --output_dir")
    return found


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises `ValueError` for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: no JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: holds a JSON {type(content).__name__}, expected an object " + '{"name": …}')
    return content
