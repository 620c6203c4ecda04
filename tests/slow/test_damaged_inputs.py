"""Commands and readers that get damaged inputs end well.

A command must end with status 0, or with an error status and one line. It may change no input and
write only into `out/`. `SLOW_SECONDS` (default 60) bounds the time of each test. A failure names
the case: `SLOW_FIRST=N SLOW_CASES=1` runs case N again.
"""

import logging
import os
import random
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
from damaged_files import damaged, read_damaged, write_texts
from forked_commands import prepare, run_forked

from dap_transformers.errors import one_line

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("SLOW_SECONDS", "60"))
FIRST = int(os.environ.get("SLOW_FIRST", "0"))
CASES = int(os.environ.get("SLOW_CASES", "5000"))
SHORT = (
    "--max_steps 1 --per_device_train_batch_size 4 --report_to none --save_strategy no"
    " --eval_strategy no"
)
#: Commands on the files of `forked_commands.write_inputs`. One file that a command names is
#: damaged.
COMMANDS = (
    "prepare_data --data text --evaluation_data test --licences licences.json --list_leaks out/l"
    " --output_dir out/c",
    "prepare_data --data text --max_bad_lines 0.9 --target_vocabulary model --output_dir out/c",
    "mine_bitext text/a.fr text/a.en --model model --pooling cls --output out/p",
    "eval_retrieval --data_dir text --model model --hard_negatives --output_file out/r",
    f"train_dap --train_data text --model_name_or_path model --dev_pairs 2 --use_cpu {SHORT}"
    " --output_dir out/t",
    f"train_dap recipe.yaml --model_name_or_path model --use_cpu {SHORT} --output_dir out/t",
    f"run_xnli --data_dir xnli --model_name_or_path model --use_cpu {SHORT} --output_dir out/x",
    "push_to_hub model --repo_id user/a --pooling cls --dry_run --output_dir out/h",
    "mine_bitext text/a.fr text/a.en --model dap --output out/p",
    f"train_dap --train_data text/de-en.tsv --model_name_or_path dap --use_cpu {SHORT}"
    " --output_dir out/t",
    f"run_xnli --data_dir xnli --model_name_or_path dap --use_cpu {SHORT} --output_dir out/x",
    "push_to_hub dap --repo_id user/a --with_heads --dry_run --output_dir out/h",
)


def test_commands_refuse_damaged_inputs_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pristine = prepare(COMMANDS, tmp_path)
    until = time.monotonic() + SECONDS
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for case in range(FIRST, FIRST + CASES):
        if time.monotonic() > until:
            break
        place = tmp_path / "case"
        shutil.copytree(pristine, place / "in")
        monkeypatch.chdir(place / "in")
        command, end, text = run_on_damaged_input(place, case)
        monkeypatch.chdir(tmp_path)
        shutil.rmtree(place)
        counts[command, end] += 1
        if end not in ("done", "refused"):
            wrong.append(f"case {case}: {command}: {end}: {text}")
    print(table_of(counts))
    assert not wrong, "\n\n".join(wrong)


def run_on_damaged_input(folder: Path, case: int) -> tuple[str, str, str]:
    """Damage one input in the current folder and run a command that names it.

    Returns:
        The command's name, how it ended, and the damaged file with the last printed lines.
    """
    draw = random.Random(case)
    command = draw.choice(COMMANDS)
    path = damage_an_input(command, draw)
    before = contents(Path())
    end, text = run_forked(command, folder)

    # Everything outside of out/ must be as before.
    after = contents(Path())
    after = {path: data for path, data in after.items() if path.parts[0] != "out"}
    if after != before:
        end = "WRITES OUTSIDE"
        text = " ".join(sorted(str(path) for path, _ in after.items() ^ before.items()))
    return command.split()[0], end, f"{path}: {text}"


def damage_an_input(command: str, draw: random.Random) -> Path:
    """Damage one of the files that a command names, and return its path.

    In one of 20 cases the file becomes a folder or a broken link.
    """
    files = []
    for word in command.split():
        path = Path(word)
        if path.is_dir():
            files += [file for file in path.rglob("*") if file.is_file()]
        elif path.is_file():
            files.append(path)
    path = draw.choice(sorted(files))
    data = path.read_bytes()
    if draw.random() < 0.05:
        path.unlink()
        replacement = draw.choice(["link to nothing", "folder", "link to itself"])
        if replacement == "folder":
            path.mkdir()
        else:
            path.symlink_to("absent" if replacement == "link to nothing" else path.name)
        return path
    others = [file.read_bytes() for file in files if file != path] or [b""]
    path.write_bytes(damaged(data, others, draw))
    return path


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Return the bytes of everything below a folder; None for what is not a file."""
    found = {}
    for path in folder.rglob("*"):
        found[path] = path.read_bytes() if path.is_file() else None
    return found


def test_readers_count_every_line_of_damaged_text(tmp_path: Path) -> None:
    write_texts(tmp_path / "text")
    until = time.monotonic() + SECONDS
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    logging.disable(logging.WARNING)
    try:
        for case in range(FIRST, FIRST + CASES):
            if time.monotonic() > until:
                break
            try:
                counts["readers", read_damaged(tmp_path / "text", case)] += 1
            except Exception as error:
                wrong.append(f"case {case}: {type(error).__name__}: {one_line(error)}")
    finally:
        logging.disable(logging.NOTSET)
    print(table_of(counts))
    assert not wrong, "\n".join(wrong)


def table_of(counts: Counter[tuple[str, str]]) -> str:
    """Return a line for each command and end with its count."""
    lines = []
    for (command, end), count in sorted(counts.items()):
        lines.append(f"{count:>8}  {command:<20} {end}")
    return "\n".join(lines)
