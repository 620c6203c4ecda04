"""Run the checks and benchmarks that need a GPU, in under 8 minutes.

    python -m benchmarks.gpu --archive results.tar.xz    # on a GPU, from the repository's root
    python -m benchmarks.gpu --device cpu --tiny         # a rehearsal anywhere

The project need not be installed. First the versions are printed, and the packages that are
missing. Then each stage prints its own table and one JSON line with its numbers. No stage needs
another, and one that fails does not stop the others. The table at the end shows the outcome of
each, and whether it reached its goal for an H100.

The exit status is 1 if a stage failed or could not run, for example because a package or time was
lacking.
"""

import argparse
import gc
import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import show
from dap_transformers.files import read_json
from dap_transformers.reports import machine, versions
from dap_transformers.tables import text_table

REPOSITORY = Path(__file__).resolve().parent.parent
BEGIN = 360  # seconds after which no stage starts
LIMIT = 460  # seconds after which the running stage is stopped
TESTS_LIMIT = 110  # seconds for the tests

#: Package that a bare machine may lack -> what needs it.
NEEDED = {
    "datasets": "GradCache, the pipeline, and every training",
    "pyarrow": "datasets",
    "dill": "datasets",
    "multiprocess": "datasets",
    "xxhash": "datasets and mining",
    "sentence_transformers": "encoding",
    "pytest": "the tests",
    "accelerate": "every training",
    "xz": "text in .xz archives, such as BUCC",
    "polib": "text in .po files",
}

XLMR, TINY = "--size xlmr --bf16", "--size tiny --repeats 1"
STEP = f"train_step {XLMR} --batch_size 1024 --optimizer"
DRY_STEP = f"train_step {TINY} --batch_size 4 --no_library"
DROPOUT_PATHS = "dropout 'dropout, bf16'"
#: Name -> module and arguments, the most valuable first.
STAGES = {
    "correctness": "correctness --paths float32 bf16",
    "correctness, dropout": f"correctness --paths {DROPOUT_PATHS} --draws 1000",
    "step": f"{STEP} --repeats 10 --warm_up 3 --profile TR",
    "memory of steps": f"memory {XLMR} --batch_sizes 256 1024 --objectives TR TLM DAP BOW",
    "encoding": f"encode {XLMR} --sentences 40000 --token_budget 32768 --batch_sizes 128 512 "
    "--repeats 2",
    "mining": "mining --rows 200000 --contenders ours --repeats 2",
    "tests": "tests",
    "correctness, GradCache": "correctness --paths cached 'dropout, cached'",
    "memory": f"memory {XLMR} --tokens 4096 16384 32768 --vocabularies 37000 250002 --hidden 768 "
    "--grad_cache 8192 --mini_batch_size 64",
    "FLOPs": "flops --size base --batch_size 512 --bf16 --repeats 5",
    "step, float32": "train_step --batch_size 256 --repeats 5 --warm_up 2",
    "correctness, compiled": "correctness --encoders xlm-roberta --paths compiled "
    "'dropout, compiled' --draws 1000",
    "step, compiled": f"{STEP} --compile --no_library --repeats 10 --warm_up 3",
}
#: The same for a rehearsal. The tests and `torch.compile` take too long for it.
DRY = {
    "correctness": "correctness --encoders bert --paths bf16",
    "correctness, dropout": "correctness --encoders bert --paths dropout --draws 20",
    "step": f"{DRY_STEP} --optimizer --profile TR",
    "memory of steps": f"memory {TINY} --same_process --batch_sizes 2 --objectives TR BOW",
    "encoding": f"encode {TINY} --sentences 40 --batch_sizes 8",
    "mining": "mining --rows 500 --dimensions 16 --contenders ours --repeats 1",
    "correctness, GradCache": "correctness --encoders bert --paths cached 'dropout, cached'",
    "memory": f"memory {TINY} --same_process --tokens 16 --vocabularies 100",
    "FLOPs": f"flops {TINY} --batch_size 2 --tokens 8",
    "step, float32": DRY_STEP,
}


def step_share(found: dict[str, Any]) -> float:
    """Return the rate of DAP's training step, as a share of the rate of plain matrix products.

    Both rates are floating-point operations per second.

    Args:
        found: content of the JSON file of `benchmarks.train_step`.
    """
    return found["contenders"]["DAP"]["wall_share"]


#: Name -> goal for an H100, a share of a rate, and a function that reads the share from the JSON.
GOALS: dict[str, tuple[float, Callable[[dict[str, Any]], float]]] = {"step": (0.45, step_share)}


def preflight() -> list[str]:
    """Print the machine, the library versions and the packages of `NEEDED` that are missing.

    Returns:
        The names of the missing packages.
    """
    about = machine() | versions()
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    missing = [name for name in NEEDED if find_spec(name) is None]
    for name in missing:
        print(f"MISSING: {name}, needed by {NEEDED[name]}")
    print(json.dumps({"stage": "preflight", "missing": missing, **about}), flush=True)
    return missing


def run_tests() -> None:
    """Run the tests of the fast paths."""
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += ["--continue-on-collection-errors"]
    command += ["-k", "cuda or pack or fused or compile or similarity"]
    command += [
        "tests/encoding/test_sentence_encoder.py",
        "tests/search/test_similarity.py",
        "tests/training/test_grad_cache.py",
    ]
    command += [str(path) for path in REPOSITORY.glob("tests/test_*_dap.py")]
    code = subprocess.run(command, cwd=REPOSITORY, timeout=TESTS_LIMIT).returncode
    if code:
        raise RuntimeError(f"pytest ended with status {code}")


def run_benchmark(line: str, args: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Run a benchmark in this process, and read its results.

    Args:
        line: module and arguments, a value of `STAGES` or `DRY`.
        args: our command line, which has the device.
        path: JSON file that the benchmark writes.

    Returns:
        The content of the JSON file.
    """
    module, *argv = shlex.split(line)
    if module == "train_step" and find_spec("sentence_transformers") is None:
        argv.append("--no_library")
    show(f"== python -m benchmarks.{module} {shlex.join(argv)}")
    benchmark = importlib.import_module(f"benchmarks.{module}")
    benchmark.main([*argv, "--device", args.device, "--json", str(path)])
    return read_json(path)


def run_stage(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run a stage, unless there is no time left, and print its JSON line. Errors are caught.

    Args:
        name: key of `STAGES`.
        args: our command line. With `--tiny` the stage of `DRY` runs instead.

    Returns:
        "stage" -> the name. "outcome" -> "ok", "left out of a rehearsal", or a text that begins
        with "FAILED". "seconds" -> the time that it took. "goal" -> whether the goal was reached,
        only for stages with a goal.
    """
    lines = DRY if args.tiny else STAGES
    line: dict[str, Any] = {"stage": name, "outcome": "ok"}
    found: dict[str, Any] = {}
    began = time.perf_counter()
    if name not in lines:
        line["outcome"] = "left out of a rehearsal"
    elif began > args.deadline:
        line["outcome"] = "FAILED: not begun, the time is over"
    else:
        path = args.folder / f"{name.replace(', ', '_').replace(' ', '_')}.json"
        try:
            if name == "tests":
                run_tests()
            else:
                found = run_benchmark(lines[name], args, path)
        except ModuleNotFoundError as error:
            line["outcome"] = f"FAILED: {error.name} is not installed"
        except Exception as error:  # so that the other stages still run
            traceback.print_exc()
            if isinstance(error, TimeoutError):
                args.deadline = began  # asked to end, so no other stage begins
            line["outcome"] = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())}"
            found = read_json(path) if path.is_file() else {}
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    line["seconds"] = round(time.perf_counter() - began, 1)
    if name in GOALS and found:
        line["goal"] = judge(name, found)
    print(json.dumps(line | brief(found)), flush=True)
    return line


def brief(value: Any) -> Any:
    """Shorten the content of a benchmark's JSON file, so that it fits into one line.

    Single measurements and descriptions of the run are left out. Floats get 4 significant digits.

    Args:
        value: the content or a part of it: a dictionary, a list or a single value.

    Returns:
        A shortened copy.
    """
    if isinstance(value, dict):
        hidden = ("runs", "arguments", "machine", "versions")
        return {key: brief(item) for key, item in value.items() if key not in hidden}
    if isinstance(value, list):
        return [brief(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def judge(name: str, found: dict[str, Any]) -> str:
    """Return a text that says whether a stage reached its goal.

    Args:
        name: key of `GOALS`.
        found: content of the JSON file of the stage.
    """
    least, share = GOALS[name]
    reached = share(found)
    return f"goal {least:.0%}, reached {reached:.0%}: {'met' if reached >= least else 'MISSED'}"


def stop(*_: Any) -> None:
    """Raise `TimeoutError`, which stops the running stage, so that the table is still printed.

    This is the handler of the signals that ask the process to end.
    """
    raise TimeoutError("asked to end")


def pack(folder: Path, archive: Path) -> None:
    """Pack the JSON files of a folder into an archive, and print its size.

    Args:
        folder: folder with the files.
        archive: .tar.xz file to write. It holds the files without a folder.
    """
    with tarfile.open(archive, "w:xz") as file:
        for path in sorted(folder.glob("*.json")):
            file.add(path, path.name)
    print(f"{archive}: {archive.stat().st_size} bytes")


def main(argv: list[str] | None = None) -> None:
    """Run the stages and print a table of their outcomes. Exit with status 1 if one failed.

    Each stage writes its JSON into `--folder`. `--archive` packs these files.

    Args:
        argv: command-line arguments. None takes those of the process.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="rehearsal with tiny models")
    parser.add_argument("--folder", type=Path, help="folder for the JSON files; default: a new one")
    parser.add_argument("--archive", type=Path, help="pack the JSON files into this .tar.xz file")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    args = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="dap-gpu-"))
    args.folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    args.deadline = started + BEGIN
    preflight()
    lines = [run_stage(name, args) for name in args.stages]
    rows = []
    for line in lines:
        rows.append([line["stage"], line["outcome"], f"{line['seconds']} s", line.get("goal", "")])
    print("\n" + text_table(["stage", "result", "", "share of the matrix rate"], rows))
    print(f"{time.perf_counter() - started:.0f} s altogether")
    if args.archive:
        pack(args.folder, args.archive)
    if any(line["outcome"].startswith("FAILED") for line in lines):
        sys.exit(1)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, stop)
    signal.alarm(LIMIT)
    main()
