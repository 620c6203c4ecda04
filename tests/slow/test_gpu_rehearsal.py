"""The checks for a GPU run on a CPU without the packages that a bare machine lacks."""

import json
import subprocess
import sys

import pytest
from conftest import REPOSITORY

pytestmark = pytest.mark.slow

#: None in `sys.modules` makes a package look as if it were not installed.
REHEARSAL = """
import sys
for name in ("datasets", "xz", "polib"):
    sys.modules[name] = None
from benchmarks.gpu import main
main(["--device", "cpu", "--tiny", "--folder", sys.argv[1]])
"""
#: Stages that need `datasets`. sentence-transformers, the contender of encoding, imports it where
#: the files of its metadata are there, as they are here.
NEED_DATASETS = {"encoding", "correctness, GradCache", "GradCache", "pipeline"}


def test_every_stage_runs_or_fails_by_name(tmp_path: object) -> None:
    command = [sys.executable, "-c", REHEARSAL, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 1
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines[0]["missing"][:1] == ["datasets"]
    outcomes = {line["stage"]: line["outcome"] for line in lines[1:]}
    for stage, outcome in outcomes.items():
        if stage in NEED_DATASETS:
            assert outcome == "FAILED: datasets is not installed"
        else:
            assert outcome in ("ok", "left out of a rehearsal"), stage
