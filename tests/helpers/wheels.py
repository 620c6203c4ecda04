"""Build the wheel of this checkout."""

import shutil
import sys
from pathlib import Path

from conftest import REPOSITORY
from forked import run_fresh


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder, from a copy of the checkout, which stays unchanged.

    Returns:
        The wheel.
    """
    tree = folder / "tree"
    left_out = shutil.ignore_patterns(".*", "build", "out", "runs", "*.egg-info")
    shutil.copytree(REPOSITORY, tree, ignore=left_out)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    run_fresh(*command, "--outdir", folder, tree)
    return next(folder.glob("*.whl"))
