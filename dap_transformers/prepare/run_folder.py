"""The output folder of `prepare-data`: what lies where, and whether a run may write to it."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dap_transformers.errors import SHOWN, UserError
from dap_transformers.files import read_json
from dap_transformers.prepare.options import PrepareOptions
from dap_transformers.text.archives import disk_path
from dap_transformers.text.formats import BitextFile

REPORT = "report.json"
CARD = "README.md"
LEAKS = "leaks.jsonl"
WORK = ".prepare_data"
SPLIT_FOLDERS = ("train", "dev")
_SHARD = re.compile(r"[0-9]{5,}\.[a-z]{2,3}-[a-z]{2,3}\.parquet")


@dataclass(frozen=True)
class RawFile:
    """An input file of raw parallel text.

    Attributes:
        file: path, format and languages.
        origin: name of its corpus, which is written beside each of its pairs.
        key: a hash that names the folder with the result of cleaning the file. It changes with the
            content of the file and with the options of the cleaning.
    """

    file: BitextFile
    origin: str
    key: str

    @property
    def bytes(self) -> int:
        """Return the size of the input file on the disk in bytes. A Hub dataset counts as 0."""
        paths = {disk_path(path) for path in self.file.paths}  # both sides may be in one archive
        return sum(path.stat().st_size for path in paths if path.is_file())


@dataclass(frozen=True)
class Plan:
    """The output folder and options of a run, and the paths of all files that it writes.

    Attributes:
        output_dir: the folder of `train/`, `dev/`, the report and the card.
        options: the options that shape the text.
    """

    output_dir: Path
    options: PrepareOptions

    @property
    def work_dir(self) -> Path:
        """Return the folder of intermediate files, which is removed at the end."""
        return self.output_dir / WORK

    @property
    def leaks(self) -> Path:
        """Return the path of the JSON file with the evaluation sentences for the leak check.

        The check drops pairs with a side that equals, or nearly equals, one of these sentences
        (leaks). If the run has no evaluation sentences, there is no such file.
        """
        return self.work_dir / "leaks.json"

    def cleaned(self, raw: RawFile) -> Path:
        """Return the path of the folder with the result of cleaning a file (`clean_file`)."""
        return self.work_dir / f"clean-{raw.key}"

    def selected(self, language: str) -> Path:
        """Return the path of the Parquet file that lists which pairs of a language are kept."""
        return self.work_dir / f"select-{language}.parquet"

    def shard(self, split: str, language: str, number: int) -> Path:
        """Return the path of a Parquet file of the result.

        Args:
            split: "train" or "dev".
            language: code of the source language.
            number: number of the file within the split and language, from 0.
        """
        name = f"{number:05d}.{language}-{self.options.target_language}.parquet"
        return self.output_dir / split / name


def finished_report(plan: Plan, fingerprint: str, overwrite: bool) -> dict[str, Any] | None:
    """Return the report of the same run, if it has finished in the output folder.

    Args:
        plan: the paths of the run.
        fingerprint: hash of the arguments and the input. The report holds that of its own run.
        overwrite: whether the result of a finished run may be overwritten.

    Returns:
        The report, or None if the run still has to be done: there is no report, or `overwrite`.
    """
    path = plan.output_dir / REPORT
    if not path.is_file():
        return None
    report = read_json(path)
    if overwrite:
        return None
    if report["fingerprint"] != fingerprint:
        raise UserError(
            f"{plan.output_dir} holds the result of a run with other arguments or other text: give "
            "another folder, or overwrite it"
        )
    for file in _files_of_report(plan, report):
        if not file.is_file():
            raise UserError(f"{file} is missing, but {REPORT} lists it: overwrite the result")
    return report


def _files_of_report(plan: Plan, report: dict[str, Any]) -> list[Path]:
    """Return the paths of all shards that a report says were written."""
    files = []
    for language, counts in report["languages"].items():
        for split in SPLIT_FOLDERS:
            for number in range(counts[f"{split}_shards"]):
                files.append(plan.shard(split, language, number))
    return files


def begin(plan: Plan, files: Sequence[RawFile]) -> None:
    """Prepare the output folder for a new run: create it, or remove what an earlier run left there.

    Report, card and shards are removed. The results of cleaning the given files are kept, so that
    a run that was stopped continues.

    Args:
        plan: the paths of the run.
        files: the input files, whose results of cleaning are kept.
    """
    output = plan.output_dir
    held = sorted(path.name for path in output.iterdir()) if output.is_dir() else []
    if held and REPORT not in held and WORK not in held:
        names = ", ".join(held[:SHOWN])
        raise UserError(f"{output} holds other files ({names}): give another folder")

    foreign = _foreign_files(plan)
    if foreign:
        names = ", ".join(str(path.relative_to(output)) for path in foreign[:SHOWN])
        raise UserError(f"{output} holds other files ({names}): move them, or give another folder")

    # The work folder comes first, so that a killed run can be recognised as one of this command.
    if plan.work_dir.is_symlink():
        plan.work_dir.unlink()
    plan.work_dir.mkdir(parents=True, exist_ok=True)
    kept = {plan.cleaned(raw) for raw in files}
    results = [output / name for name in (REPORT, LEAKS, CARD, *SPLIT_FOLDERS)]
    for path in [*results, *plan.work_dir.iterdir()]:
        if path not in kept or path.is_symlink():
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or folder, if it exists. Of a link, only the link is removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _foreign_files(plan: Plan) -> list[Path]:
    """List the visible files and folders in the output folder that no run of this command wrote.

    The content of `train/` and `dev/` is checked, too: only names of shards are allowed.
    """
    own = {REPORT, LEAKS, CARD, *SPLIT_FOLDERS}
    found = []
    for path in sorted(plan.output_dir.glob("[!.]*")):
        if path.name not in own:
            found.append(path)
        elif path.name in SPLIT_FOLDERS and path.is_dir() and not path.is_symlink():
            found += [
                file for file in sorted(path.glob("[!.]*")) if not _SHARD.fullmatch(file.name)
            ]
    return found
