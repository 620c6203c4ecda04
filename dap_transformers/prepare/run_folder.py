"""The output folder of `prepare-data`: what lies where, and whether a run may write to it."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dap_transformers.errors import UserError
from dap_transformers.files import LOCK, read_json
from dap_transformers.prepare.options import PrepareOptions
from dap_transformers.text.find import LEAKS
from dap_transformers.text.formats import BitextFile

REPORT = "report.json"
CARD = "README.md"
WORK = ".prepare_data"


@dataclass(frozen=True)
class RawFile:
    """An input file of raw parallel text.

    Attributes:
        origin: name of its corpus, which is written beside each of its pairs.
        key: a hash that names the folder with the result of cleaning the file. It changes with the
            content of the file and with the options of the cleaning.
    """

    file: BitextFile
    origin: str
    key: str


@dataclass(frozen=True)
class Plan:
    """What a run does, and its paths. `evaluation` are the sentences for the leak check."""

    output_dir: Path
    options: PrepareOptions
    evaluation: tuple[str, ...] = ()

    @property
    def work_dir(self) -> Path:
        """Return the folder of intermediate files, which is removed at the end."""
        return self.output_dir / WORK

    def cleaned(self, raw: RawFile) -> Path:
        """Return the path of the folder with the result of cleaning a file (`clean_file`)."""
        return self.work_dir / f"clean-{raw.key}"

    def shard(self, split: str, language: str, number: int) -> Path:
        """Return the path of a Parquet file of the result. `split` is "train" or "dev"."""
        name = f"{number:05d}.{language}-{self.options.target_language}.parquet"
        return self.output_dir / split / name


def begin(plan: Plan, files: Sequence[RawFile], overwrite: bool = False) -> None:
    """Create the output folder, or remove the result of an earlier run from it.

    The results of cleaning the given files are kept, so that a run that was stopped continues.
    Files that no run has written are left alone.

    Raises:
        UserError: the folder holds other files, or a finished run that is not to be overwritten.
    """
    output = plan.output_dir
    names = {path.name for path in output.glob("*")} - {LOCK}
    report = read_json(output / REPORT) if REPORT in names else {}
    if names and WORK not in names and "evaluation_sentences" not in report:
        raise UserError(f"{output} holds other files, such as {min(names)}: give another folder")
    if report and not overwrite:
        raise UserError(f"{output} holds a finished run: give another folder, or overwrite it")

    # The work folder comes first, so that a killed run can be recognised as one of this command.
    plan.work_dir.mkdir(parents=True, exist_ok=True)
    kept = {plan.cleaned(raw) for raw in files}
    patterns = [REPORT, LEAKS, CARD, f"{WORK}/*"]
    for split in ("train", "dev"):
        # Of processes that were lost, half a file is left.
        patterns += [f"{split}/{'[0-9]' * 5}.*-*.parquet", f"{split}/.*.tmp"]
    for pattern in patterns:
        for path in set(output.glob(pattern)) - kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
