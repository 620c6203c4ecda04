"""The folder that `prepare_data.py` writes into: what lies where, and whether a run may write to it."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dap.errors import SHOWN, UserError
from dap.file_io import disk_full, read_object
from dap.prepare.options import PrepareOptions
from dap.text import BitextFile, disk_path

REPORT, CARD, VOCABULARY, WORK = (
    "report.json",
    "README.md",
    "target_vocabulary.json",
    ".prepare_data",
)


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
    """What a run makes, and where: `output_dir` is the folder of `train/`, `dev/` and what describes them."""

    output_dir: Path
    options: PrepareOptions

    @property
    def work_dir(self) -> Path:
        """Folder of all that is made on the way; it is removed at the end."""
        return self.output_dir / WORK

    @property
    def leaks(self) -> Path:
        """What the index of the evaluation sentences is made of; absent where there are none."""
        return self.work_dir / "leaks.json"

    def cleaned(self, raw: RawFile) -> Path:
        return self.work_dir / f"clean-{raw.key}"

    def selected(self, language: str) -> Path:
        return self.work_dir / f"select-{language}.parquet"

    def shard(self, split: str, language: str, number: int) -> Path:
        return (
            self.output_dir
            / split
            / f"{number:05d}.{language}-{self.options.target_language}.parquet"
        )


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which gets its name when the block ends without an error, and else goes.

    It goes, too, where there is one of that name by then: another worker has made the same.

    Raises:
        ValueError: no space left on the device.
    """
    beside = {
        "suffix": ".tmp",
        "prefix": f"{folder.name}.",
        "dir": folder.parent,
        "ignore_cleanup_errors": True,
    }
    with disk_full(folder), tempfile.TemporaryDirectory(**beside) as new:
        yield Path(new)
        try:
            os.replace(new, folder)
        except OSError:
            if not folder.is_dir():
                raise


def finished(plan: Plan, mark: str, overwrite: bool) -> dict[str, Any] | None:
    """The report of the same run, if it has ended in the output folder; None where none has, or may be overwritten.

    Raises:
        ValueError: the folder holds the result of another run or command, or a file that the report names is absent.
    """
    path = plan.output_dir / REPORT
    report = read_object(path) if path.is_file() else None
    if report is not None and not isinstance(report.get("fingerprint"), str):
        raise UserError(f"{path}: not written by this command; give another --output_dir")
    if report is None or overwrite:
        return None
    if report["fingerprint"] != mark:
        raise UserError(
            f"{plan.output_dir} holds the result of a run with other arguments or other text: give another "
            "--output_dir, or --overwrite to replace it"
        )
    written = [Path(report["leaks"])] if report["leaks"] else []
    for code, counts in report["languages"].items():
        for split in ("train", "dev"):
            written += [
                plan.shard(split, code, number) for number in range(counts[f"{split}_shards"])
            ]
    if absent := [path for path in written if not path.is_file()]:
        raise UserError(
            f"{absent[0]} is absent, though {REPORT} tells of it: --overwrite makes all again"
        )
    return report


def begin(plan: Plan, files: Sequence[RawFile]) -> None:
    """Empties the output folder of what a run left there, but for what was cleaned of these files.

    Raises:
        ValueError: the folder holds nothing but other things.
    """
    output = plan.output_dir
    held = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if held and REPORT not in held and WORK not in held:
        names = ", ".join(held[:SHOWN])
        raise UserError(
            f"{output} holds {names}, but nothing of this command, and is left alone: give another one"
        )
    plan.work_dir.mkdir(
        parents=True, exist_ok=True
    )  # first, so that a kill leaves what is known for this command's
    made = [output / name for name in (REPORT, VOCABULARY, CARD, "train", "dev")]
    kept = {plan.cleaned(raw) for raw in files}
    for path in (*made, *plan.work_dir.iterdir()):
        if path not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
