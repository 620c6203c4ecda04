"""Kill every command at random moments, run it again, and compare what it wrote with an undisturbed run.

    python -m benchmarks.kills --kills 20

A killed run is given again as it was; one that had written everything may refuse. Files are compared byte by byte,
JSON without times. A run that ends before its kill is none of them: another follows, killed earlier.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.fuzz import go_offline, prepare, run_forked, start

STEPS = "--per_device_train_batch_size 4 --max_steps 12 --save_strategy steps --save_steps 3 --report_to none --use_cpu"
COMMANDS = (
    f"train_dap --train_data text --model_name_or_path model --dev_pairs 2 {STEPS} --output_dir out",
    "eval_retrieval --data_dir text --model dap --embeddings_dir out/vectors --output_file out/r.json",
    "mine_bitext text/a.fr text/a.en --model dap --shard_size 5 --output out/pairs",
    "mine_bitext text/a.fr text/a.en --model dap --shard_size 5 --ray local --output out/pairs",
    f"run_xnli --data_dir xnli --model_name_or_path model --total_train_batch_size 4 {STEPS} --output_dir out",
    "push_to_hub dap --repo_id user/a --with_heads --dry_run --output_dir out",
    "prepare_data --data text --evaluation_data test --num_workers 1 --list_leaks out/leaks --output_dir out/clean",
)
#: Keys of times, and of what the Trainer counts over the steps of the last process alone.
TIMES = re.compile("second|time|created|resumed_from|^steps$|epoch|train_loss|total_flos")
OF_RESUMING = re.compile(r"checkpoint-|^\.|\.tmp$|tmp-")
EARLY = "ended before the kill"


def written(folder: Path) -> dict[str, object]:
    """The content of the files below a folder by their paths, but for checkpoints and what a kill leaves behind.

    JSON is without times, and without the log that the Trainer's state has of them.
    """

    def of_every_run(pairs: list[tuple[str, object]]) -> dict[str, object]:
        return {
            key: value for key, value in pairs if not TIMES.search(key) and key != "log_history"
        }

    found: dict[str, object] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and not any(map(OF_RESUMING.search, name.parts)):
            data = path.read_bytes()
            found[str(name)] = (
                json.loads(data, object_pairs_hook=of_every_run) if path.suffix == ".json" else data
            )
    return found


def kill_and_run_again(command: str, place: Path, after: float, expected: dict[str, object]) -> str:
    """Kills a command some seconds after its start; how it ended then: "same", `EARLY`, or what is wrong."""
    pid = start(command, place / "printed")
    time.sleep(after)
    if os.waitpid(pid, os.WNOHANG) != (0, 0):
        return EARLY
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # its locks are gone then
    end, text = run_forked(command, place)
    if end != "done" and "holds a finished run" not in text and "is not empty" not in text:
        last = text.rsplit("\n", 1)[-1]
        return f"{end.upper()} (killed after {after:.2f} s): {last}"
    found = written(Path("out"))
    differing = [name for name in found.keys() | expected if found.get(name) != expected.get(name)]
    return (
        f"DIFFERS (killed after {after:.2f} s): {' '.join(sorted(differing))}"
        if differing
        else "same"
    )


@contextmanager
def inputs(base: Path) -> Iterator[Path]:
    """A folder for one case, whose `in/`, with fresh inputs, is the current folder."""
    place = base / "case"
    shutil.copytree(base / "pristine", place / "in")
    os.chdir(place / "in")
    yield place
    os.chdir(base)
    shutil.rmtree(place)


def main() -> None:
    """Prints a table of the ends, by command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="of each command, while it runs")
    parser.add_argument("--only", default="", help="commands that begin so")
    args = parser.parse_args()
    chosen = [command for command in COMMANDS if command.startswith(args.only)]
    draw, base = random.Random(0), Path(tempfile.mkdtemp(prefix="dap-kills-"))
    prepare(chosen, base)
    for command in chosen:
        with inputs(base) as place:
            started = time.perf_counter()
            end, text = run_forked(command, place)
            assert end == "done", text
            expected, seconds = written(Path("out")), time.perf_counter() - started
        counts: Counter[str] = Counter()
        while counts.total() < args.kills:
            after = draw.uniform(0, seconds)
            with inputs(base) as place:
                end = kill_and_run_again(command, place, after, expected)
            if end == EARLY:
                seconds = after
            else:
                counts[end] += 1
        for end, count in sorted(counts.items()):
            print(
                f"{count:>6}  {command.split()[0]:<16} {seconds:>5.1f} s  {len(expected):>2} files  {end}",
                flush=True,
            )
    shutil.rmtree(base)


if __name__ == "__main__":
    go_offline()
    main()
