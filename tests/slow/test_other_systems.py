"""Commands run without `fcntl`, which Python has on POSIX systems only."""

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY, training_flags

from dap_transformers.files import claimed

pytestmark = pytest.mark.slow

#: Hides the module, as on Windows, and runs the command that follows.
START = """
import importlib
import sys
sys.modules["fcntl"] = None
module, *arguments = sys.argv[1:]
importlib.import_module(module).main(arguments)
"""


def run(*command: object) -> subprocess.CompletedProcess:
    """Run a command in a process in which the module is hidden."""
    line = [sys.executable, "-c", START, *map(str, command)]
    return subprocess.run(line, capture_output=True, text=True, cwd=REPOSITORY)


def test_training_and_mining_run_and_lock_their_outputs(
    tiny_bert_dir: Path, bitext_dir: Path, tmp_path: Path
) -> None:
    training = f"{training_flags(tiny_bert_dir, bitext_dir)} --max_steps 2 --use_cpu"
    done = run(*f"train_dap {training} --output_dir {tmp_path}/out".split())
    assert done.returncode == 0, done.stderr[-2000:]

    (tmp_path / "a.de").write_text("ban der fin\nloder pusut\n", encoding="utf-8")
    (tmp_path / "a.en").write_text("kaban loder\nmifin pusut\n", encoding="utf-8")
    mining = ["dap_transformers.commands.mine", tmp_path / "a.de", tmp_path / "a.en"]
    mining += ["--model", tmp_path / "out", "--threshold", "0", "--output", tmp_path / "pairs.tsv"]
    done = run(*mining)
    assert done.returncode == 0, done.stderr[-2000:]
    with claimed(tmp_path / "pairs.tsv"):
        done = run(*mining)
    assert done.returncode == 1
    assert "in use by another run" in done.stderr
