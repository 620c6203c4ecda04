"""The folder that `prepare_data.py` writes into: where each step lies, and whether a run may begin or go on."""

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dap.errors import UserError
from dap.files import disk_full, read_object, write_json
from dap.prepare.options import PrepareOptions
from dap.text import BitextFile, disk_path

logger = logging.getLogger(__name__)

REPORT, WORK, CARD = "report.json", ".work", "README.md"
VOCABULARY, NOTE = "target_vocabulary.json", "run.json"
SHOWN = 5  # names in an error


@dataclass(frozen=True)
class RawFile:
    """One input file.

    Attributes:
        origin: the name under which its pairs go out.
        key: the name of what is cleaned of it; another one for another file, state or way of cleaning.
    """

    file: BitextFile
    origin: str
    key: str

    @property
    def bytes(self) -> int:
        """Its size on the disk."""
        paths = {disk_path(path) for path in self.file.paths}  # both sides may be in one archive
        return sum(path.stat().st_size for path in paths if path.is_file())


@dataclass(frozen=True)
class Plan:
    """What a run makes, and the folders of its steps.

    Attributes:
        output_dir: folder of `train/`, `dev/` and what describes them.
        check_leaks: whether `leaks`, the index of the evaluation sentences, is there.
        list_leaks: whether to keep a list of the leaks that are found.
    """

    output_dir: Path
    options: PrepareOptions
    check_leaks: bool = False
    list_leaks: bool = False

    @property
    def work_dir(self) -> Path:
        """Folder of all that is needed to go on; it is removed at the end."""
        return self.output_dir / WORK

    @property
    def leaks(self) -> Path:
        return self.work_dir / "leaks.json"

    def cleaned(self, raw: RawFile) -> Path:
        return self.work_dir / f"clean-{raw.key}"

    def selected(self, language: str) -> Path:
        return self.work_dir / f"select-{language}"

    def written(self, language: str) -> Path:
        return self.work_dir / f"write-{language}"

    def shard(self, split: str, language: str, number: int) -> Path:
        return self.output_dir / split / f"{number:05d}.{language}-{self.options.target_language}.parquet"


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends without an error, and else goes.

    Raises:
        ValueError: no space left on the device.
    """
    new = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        with disk_full(folder):
            new.mkdir(parents=True)
            yield new
            os.replace(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


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
            for path in (plan.shard(split, code, number) for number in range(counts[f"{split}_shards"])):
                if not path.is_file():
                    raise UserError(f"{path} is absent, though {report} tells of it: --overwrite makes all again")
    return ended


def begin(plan: Plan, files: Sequence[RawFile], mark: str, overwrite: bool) -> None:
    """Makes the output folder ready to begin or go on: what a finished or another run left goes.

    Cleaned files whose keys are still right stay.

    Raises:
        ValueError: the folder holds other things or another run, and may not be overwritten.
    """
    output, note = plan.output_dir, plan.work_dir / NOTE
    names = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if names == [WORK] and all(path.match(f".{NOTE}.*.tmp") for path in plan.work_dir.iterdir()):
        names = []  # of a run that was killed before its note had its name
    ended, begun = _mark(output / REPORT), _mark(note)
    if begun == mark and not ended:
        return
    if names and not (names == [WORK] and begun) and not (overwrite and (ended or begun)):
        reason = "of a run with other arguments or other text: give another --output_dir, or --overwrite to replace it"
        if overwrite:
            reason = f"but no {REPORT} of this command, and is not overwritten: give another --output_dir"
        raise UserError(f"{output} holds {', '.join(names[:SHOWN])} {reason}")
    write_json({"fingerprint": "being emptied"}, note)  # a kill leaves a folder that is known for one of this command
    made = [output / name for name in (REPORT, VOCABULARY, CARD, "train", "dev")]
    kept = {plan.cleaned(raw) for raw in files} | {note}
    for path in (*made, *plan.work_dir.iterdir()):
        if path not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
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
