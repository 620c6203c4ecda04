"""Build the wheel of this checkout."""

import shutil
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder, from a copy of the checkout, which stays unchanged.

    Returns:
        The wheel.
    """
    tree = folder / "tree"
    left_out = shutil.ignore_patterns(".*", "build", "out", "runs", "*.egg-info")
    shutil.copytree(REPOSITORY, tree, ignore=left_out)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    command += ["--outdir", str(folder), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(folder.glob("*.whl"))
