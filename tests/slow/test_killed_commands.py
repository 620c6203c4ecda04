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
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from forked_commands import prepare, run_forked, start

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("SLOW_KILLS", "2"))
STEPS = (
    "--per_device_train_batch_size 4 --max_steps 12 --save_strategy steps --save_steps 3"
    " --report_to none --use_cpu"
)
COMMANDS = (
    f"train_dap --train_data text --model_name_or_path model --dev_pairs 2 {STEPS}"
    " --output_dir out",
    "eval_retrieval --data_dir text --model dap --embeddings_dir out/vectors"
    " --output_file out/r.json",
    "dap_transformers.commands.mine text/a.fr text/a.en --model dap --shard_size 5"
    " --output out/pairs",
    "dap_transformers.commands.mine text/a.fr text/a.en --model dap --shard_size 5 --ray local"
    " --output out/pairs",
    "run_xnli --data_dir xnli --model_name_or_path model --total_train_batch_size 4"
    f" {STEPS} --output_dir out",
    "dap_transformers.commands.push dap --repo_id user/a --with_heads --dry_run --output_dir out",
    "dap_transformers.commands.prepare --data text --evaluation_data test --num_workers 1"
    " --output_dir out/clean",
)
#: Keys of times, and of values that the Trainer counts from the last start of the process.
TIMES = re.compile("second|time|created|resumed_from|^steps$|epoch|train_loss|total_flos")
#: Files that only serve resuming.
OF_RESUMING = re.compile(r"checkpoint-|^\.|\.tmp$|tmp-")
EARLY = "ended before the kill"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kills")
    prepare(COMMANDS, folder)
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_killed_command_can_be_run_again(
    command: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = fresh_inputs(base, monkeypatch)
    started = time.perf_counter()
    end, text = run_forked(command, place)
    seconds = time.perf_counter() - started
    assert end == 0, text
    expected = written(Path("out"))

    draw = random.Random(0)
    counts: Counter[str] = Counter()
    while counts.total() < KILLS:
        after = draw.uniform(0, seconds)
        place = fresh_inputs(base, monkeypatch)
        end = kill_and_run_again(command, place, after, expected)
        if end == EARLY:
            seconds = after
        else:
            counts[end] += 1
    assert counts.keys() == {"same"}, counts


def fresh_inputs(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder for one run, and change into its `in/`, a fresh copy of the inputs."""
    place = base / "case"
    monkeypatch.chdir(base)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(base / "pristine", place / "in")
    monkeypatch.chdir(place / "in")
    return place


def kill_and_run_again(command: str, place: Path, after: float, expected: dict[str, object]) -> str:
    """Kill a command some seconds after its start, then run it to its end.

    Args:
        after: seconds until the kill.
        expected: what an undisturbed run writes, from `written`.

    Returns:
        "same", `EARLY` if it ended before the kill, or a description of what is wrong.
    """
    pid = start(command, place / "printed")
    time.sleep(after)
    if os.waitpid(pid, os.WNOHANG) != (0, 0):
        return EARLY
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # the process's locks are released then

    end, text = run_forked(command, place)
    is_finished = "holds a finished run" in text or "is not empty" in text
    if end and not is_finished:
        return f"status {end} (killed after {after:.2f} s): {text}"
    found = written(Path("out"))
    names = sorted(found.keys() | expected.keys())
    differing = [name for name in names if found.get(name) != expected.get(name)]
    if differing:
        return f"DIFFERS (killed after {after:.2f} s): {' '.join(differing)}"
    return "same"


def written(folder: Path) -> dict[str, object]:
    """Return the content of all files below a folder, without checkpoints and leftovers of kills.

    JSON content comes without times and without the Trainer's log.
    """
    found: dict[str, object] = {}
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


def without_times(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object without the entries that differ from run to run."""
    kept = {}
    for key, value in pairs:
        if key != "log_history" and not TIMES.search(key):
            kept[key] = value
    return kept
