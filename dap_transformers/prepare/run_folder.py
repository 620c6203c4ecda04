"""The output folder of `prepare-data`: what lies where, and whether a run may write to it."""

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

        If the run has no evaluation sentences, there is no such file.
        """
        return self.work_dir / "leaks.json"

    def cleaned(self, raw: RawFile) -> Path:
        """Return the path of the folder with the result of cleaning a file (`clean_file`)."""
        return self.work_dir / f"clean-{raw.key}"

    def selected(self, language: str) -> Path:
        """Return the path of the Parquet file that lists which pairs of a language are kept."""
        return self.work_dir / f"select-{language}.parquet"

    def shard(self, split: str, language: str, number: int) -> Path:
        """Return the path of a Parquet file of the result. `split` is "train" or "dev"."""
        name = f"{number:05d}.{language}-{self.options.target_language}.parquet"
        return self.output_dir / split / name


def finished_report(plan: Plan, fingerprint: str, overwrite: bool) -> dict[str, Any] | None:
    """Return the report of the same run, if it has finished in the output folder.

    Args:
        fingerprint: hash of the arguments and the input. The report holds that of its own run.
        overwrite: whether the result of a finished run may be overwritten. Then return None.
    """
    path = plan.output_dir / REPORT
    if overwrite or not path.is_file():
        return None
    report = read_json(path)
    if report["fingerprint"] != fingerprint:
        raise UserError(
            f"{plan.output_dir} holds the result of a run with other arguments or other text: give "
            "another folder, or overwrite it"
        )
    return report


def begin(plan: Plan, files: Sequence[RawFile]) -> None:
    """Create the output folder, or remove the result of an earlier run from it.

    The results of cleaning the given files are kept, so that a run that was stopped continues.
    Files that no run has written are left alone.
    """
    output = plan.output_dir
    names = sorted(path.name for path in output.glob("*"))
    if names and REPORT not in names and WORK not in names:
        raise UserError(f"{output} holds other files ({', '.join(names[:SHOWN])}): give another")

    # The work folder comes first, so that a killed run can be recognised as one of this command.
    plan.work_dir.mkdir(parents=True, exist_ok=True)
    kept = {plan.cleaned(raw) for raw in files}
    old = [folder for folder in plan.work_dir.glob("clean-*") if folder not in kept]
    old += [output / REPORT, output / LEAKS, output / CARD, plan.leaks]
    old += output.glob("*/[0-9]*.*-*.parquet")
    old += output.glob("*/.*.tmp")  # half-written by processes that were lost
    for path in old:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
