"""A command that is killed at any moment and run again writes the same files as an undisturbed run.

Files are compared byte by byte, JSON without times. A command that had already written everything
may refuse to run again. A run that ends before its kill does not count, and the next one is killed
earlier. `SLOW_KILLS` (default 2) is the number of kills per command.
"""

import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, save, synthetic_pairs, write_bitext
from forked import run_python
from tiny_models import tiny_model
from written import lines_of, write

pytestmark = pytest.mark.release

KILLS = int(os.environ.get("SLOW_KILLS", "2"))
STEPS = (
    "--per_device_train_batch_size 4 --max_steps 12 --save_strategy steps --save_steps 3"
    " --report_to none --use_cpu --output_dir out"
)
MINE = (
    "dap_transformers.commands.mine_bitext a.de a.en --model dap --threshold none"
    " --output out/pairs.tsv"
)
COMMANDS = (
    f"train_dap --train_data text --model_name_or_path model --dev_pairs 2 {STEPS}",
    "eval_retrieval --data_dir text --model dap --output_file out/r.json",
    MINE,
    f"{MINE} --ray local",
    "run_xnli --data_dir xnli --model_name_or_path model --total_train_batch_size 4 "
    f"--max_seq_length 64 {STEPS}",
    "dap_transformers.commands.push_to_hub dap --repo_id user/a --with_heads --dry_run"
    " --output_dir out",
    "dap_transformers.commands.prepare_data --data text --evaluation_data a.en --num_workers 1"
    " --output_dir out/clean --max_shared 2",
)
#: Runs a command, a module and its arguments, with a cache in the current folder.
RUN = f"""
import importlib
import sys
sys.path.insert(0, {str(REPOSITORY)!r})
import datasets
datasets.config.HF_DATASETS_CACHE = "cache"
from functools import partial
from dap_transformers.mining import mine_pairs
mine_pairs.embed_to_disk = partial(mine_pairs.embed_to_disk, shard_size=5)  # several shards
importlib.import_module(sys.argv[1]).main(sys.argv[2:])
"""
#: Keys of times, and of values that the Trainer counts from the last start of the process.
TIMES = re.compile("second|time|created|resumed_from|^steps$|epoch|train_loss|total_flos")
#: Files that only serve resuming.
OF_RESUMING = re.compile(r"checkpoint-|^\.|\.tmp$|tmp-")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, tiny_bert_dir: Path) -> Path:
    """Write everything that the commands read: text, an encoder and a DAP checkpoint."""
    folder = tmp_path_factory.mktemp("inputs")
    shutil.copytree(tiny_bert_dir, folder / "model")
    save(folder / "dap", tiny_model())
    write_bitext(folder / "text", 40)
    for name, side in zip(("a.de", "a.en"), zip(*synthetic_pairs("de", 40, seed=1))):
        write(folder / name, lines_of(side))
    labels = ("entailment", "neutral", "contradiction") * 20
    rows = [f"premise {n}\thypothesis {n}\t{label}" for n, label in enumerate(labels)]
    for name in ("train-en", "dev-en", "test-en", "test-de"):
        write(folder / f"xnli/{name}.tsv", lines_of(rows))
    return folder


def run(command: str, place: Path, limit: float = 120) -> str:
    """Run a command, and return why it refuses to run again. Kill it after `limit` seconds."""
    done = run_python(["-c", RUN, *command.split()], dict(os.environ), place, limit)
    refused = re.search("holds a finished run|is not empty", done.stderr)
    assert done.returncode == 0 or refused, done.stderr[-2000:]
    return refused[0] if refused else ""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_command_can_be_run_again(command: str, inputs: Path, tmp_path: Path) -> None:
    place = shutil.copytree(inputs, tmp_path / "in")
    started = time.perf_counter()
    assert not run(command, place)
    seconds = time.perf_counter() - started
    expected = written(place / "out")

    draw = random.Random(0)
    kills = 0
    while kills < KILLS:
        shutil.rmtree(place)
        shutil.copytree(inputs, place)
        after = draw.uniform(seconds / 3, seconds)  # the first third imports modules
        try:
            run(command, place, after)
            seconds = after  # it ended before the kill
        except TimeoutError:
            kills += 1
            run(command, place)
            assert written(place / "out") == expected, f"killed after {after:.2f} s"


def written(folder: Path) -> dict:
    """Return the content of all files below a folder, without checkpoints and leftovers of kills.

    JSON content comes without times and without the Trainer's log.
    """
    found: dict = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if not path.is_file() or any(OF_RESUMING.search(part) for part in name.parts):
            continue
        data = path.read_bytes()
        if path.suffix == ".json":
            found[str(name)] = json.loads(data, object_pairs_hook=without_times)
        else:
            found[str(name)] = data
    return found


def without_times(pairs: list[tuple[str, object]]) -> dict:
    """Return a JSON object without the entries that differ from run to run."""
    kept = {}
    for key, value in pairs:
        if key != "log_history" and not TIMES.search(key):
            kept[key] = value
    return kept
