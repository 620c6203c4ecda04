"""Commands run without `fcntl`, which Python has on POSIX systems only."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from dap_transformers.files import claimed

pytestmark = pytest.mark.release

#: Hides the module, as on Windows, and runs the command that follows.
START = """
import importlib
import sys
sys.modules["fcntl"] = None
module, *arguments = sys.argv[1:]
importlib.import_module(module).main(arguments)
"""


def run(command: str) -> subprocess.CompletedProcess:
    """Run a command in a process in which the module is hidden."""
    line = [sys.executable, "-c", START, *command.split()]
    return subprocess.run(line, capture_output=True, text=True, cwd=REPOSITORY)


def test_training_and_mining_run_and_lock_their_outputs(flags: str, tmp_path: Path) -> None:
    done = run(f"train_dap {flags} --max_steps 2 --use_cpu --output_dir {tmp_path}/out")
    assert done.returncode == 0, done.stderr[-2000:]

    for name in ("a.de", "a.en"):
        (tmp_path / name).write_text("kaban loder\nmifin pusut\n")
    mining = f"dap_transformers.commands.mine_bitext {tmp_path}/a.de {tmp_path}/a.en"
    mining += f" --model {tmp_path}/out --threshold 0 --output {tmp_path}/pairs.tsv"
    done = run(mining)
    assert done.returncode == 0, done.stderr[-2000:]
    with claimed(tmp_path / "pairs.tsv"):
        done = run(mining)
    assert done.returncode == 1
    assert "in use by another run" in done.stderr
