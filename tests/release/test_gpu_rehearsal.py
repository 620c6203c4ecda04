"""The checks for a GPU run on a CPU, without the packages that a bare machine lacks."""

import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.release

#: Packages that a bare machine lacks, by the names of their files.
LACKING = {
    *("datasets", "dill", "multiprocess", "_multiprocess", "xz", "python_xz", "polib"),
    *("evaluate", "faiss", "faiss_cpu", "polars", "polars_runtime_32", "_polars_runtime_32"),
    *("liger_kernel",),
}


def bare_environment(folder: Path) -> Path:
    """Make a virtual environment with links to all installed packages that are not in `LACKING`.

    Returns:
        Its Python.
    """
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        name = path.name.split("-")[0].removesuffix(".py")
        target = packages / path.name
        if name not in LACKING and not target.exists():
            target.symlink_to(path)
    return folder / "bin" / "python"


def test_every_stage_runs(tmp_path: Path) -> None:
    python = bare_environment(tmp_path / "bare")
    command = [str(python), "-m", "benchmarks.gpu", "--device", "cpu", "--tiny"]
    subprocess.run(command, cwd=REPOSITORY, check=True)
