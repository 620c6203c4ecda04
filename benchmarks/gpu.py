"""Run the tests of the fast paths and every benchmark that needs a GPU, in under 8 minutes.

    python -m benchmarks.gpu --folder results      # on a GPU, from the repository's root
    python -m benchmarks.gpu --device cpu --tiny   # a dry run anywhere

The project need not be installed. A benchmark whose packages are missing is skipped. One that fails
does not stop the others. The table at the end shows the outcome of each, and whether it reached its
goal for an H100. The exit status is 1 if a benchmark failed.
"""

import argparse
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import WALL, show
from dap.file_io import read_json
from dap.reports import machine, text_table, versions

REPOSITORY = Path(__file__).resolve().parent.parent
BEGIN = 240  # seconds after which no benchmark starts
LIMIT = 450  # seconds after which the running benchmark is stopped

XLMR, TINY = "--size xlmr --bf16", "--size tiny --repeats 1"
STEP = f"train_step {XLMR} --batch_size 1024 --mini_batch_size 1024 --optimizer"
DRY_STEP = f"train_step {TINY} --batch_size 4 --matrix_seconds 0.01 --no_library"
#: Name -> module and arguments. The most important come first.
STAGES = {
    "correctness": "correctness --paths float32 bf16 cached",
    "step": f"{STEP} --repeats 10 --warm_up 3",
    "GradCache": f"train_step {XLMR} --batch_size 2048 --mini_batch_size 512 --repeats 3",
    "memory": f"memory {XLMR} --tokens 4096 16384 32768 --vocabularies 37000 250002 --hidden 768 "
    "--batch_sizes 256 1024 --grad_cache 8192 --mini_batch_size 64",
    "FLOPs": "flops --size base --batch_size 512 --bf16 --repeats 5",
    "encoding": f"encode {XLMR} --sentences 40000 --token_budget 32768 --batch_sizes 128 512 "
    "--repeats 2",
    "mining": "mining --rows 200000 --contenders ours --repeats 2",
    "pipeline": f"input_pipeline {XLMR} --batch_size 1024 --pairs 40000 --batches 20 "
    "--workers 0 2 --step --repeats 2",
    "step, float32": "train_step --batch_size 256 --mini_batch_size 256 --repeats 5 --warm_up 2",
    "correctness, compiled": "correctness --encoders xlm-roberta --paths compiled",
    "step, compiled": f"{STEP} --compile --no_library --repeats 10 --warm_up 3",
}
#: The same for a dry run.
DRY = {
    "correctness": "correctness --encoders bert --paths bf16 cached",
    "step": f"{DRY_STEP} --optimizer",
    "GradCache": f"{DRY_STEP} --mini_batch_size 2",
    "memory": f"memory {TINY} --same_process --tokens 16 --vocabularies 100 --grad_cache 4 "
    "--mini_batch_size 2",
    "FLOPs": f"flops {TINY} --batch_size 2 --tokens 8",
    "encoding": f"encode {TINY} --sentences 40 --batch_sizes 8",
    "mining": "mining --rows 500 --dimensions 16 --contenders ours --repeats 1",
    "pipeline": f"input_pipeline {TINY} --batch_size 4 --pairs 16 --batches 2 --workers 0 --step",
}


def step_share(found: dict[str, Any]) -> float:
    """Return the rate of DAP's step as a share of the rate of matrix products."""
    from benchmarks.train_step import shares  # here, because it needs more than torch

    return shares(found["contenders"], WALL)["DAP"]


#: Name -> goal for an H100, a share of a rate, and a function that reads the share from the JSON.
GOALS: dict[str, tuple[float, Callable[[dict[str, Any]], float]]] = {
    "step": (0.45, step_share),
    "mining": (0.60, lambda found: next(iter(found["rows"].values()))["ours"]["share"]),
}


def run_tests() -> str:
    """Run the tests of the fast paths and return their outcome.

    Only test files that need few packages are run.
    """
    if find_spec("pytest") is None:
        return "skipped: pytest is not installed"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += ["-k", "cuda or pack or fused or compile or similarity"]
    command += [
        "tests/encoding/test_sentence_encoder.py",
        "tests/search/test_similarity.py",
        "tests/training/test_grad_cache.py",
    ]
    command += [str(path) for path in REPOSITORY.glob("tests/test_*_dap.py")]
    try:
        code = subprocess.run(command, cwd=REPOSITORY, timeout=110).returncode
    except subprocess.TimeoutExpired:
        code = "timeout"
    return f"FAILED: {code}" if code else "ok"


def run_stage(name: str, args: argparse.Namespace) -> tuple[str, str]:
    """Run a benchmark.

    Returns:
        Its outcome, and whether it reached its goal (empty if it has none).
    """
    if args.tiny and name not in DRY:
        return "left out of a dry run", ""
    if time.perf_counter() > args.deadline:
        return f"left out: {BEGIN} s are over", ""
    module, *argv = (DRY if args.tiny else STAGES)[name].split()
    if module == "train_step" and find_spec("sentence_transformers") is None:
        argv.append("--no_library")
    path = args.folder / f"{name.replace(', ', '_').replace(' ', '_')}.json"
    show(f"== {name}: python -m benchmarks.{module} {' '.join(argv)}")
    try:
        benchmark = importlib.import_module(f"benchmarks.{module}")
        benchmark.main([*argv, "--device", args.device, "--json", str(path)])
        return "ok", judge(name, path)
    except ModuleNotFoundError as error:
        return f"skipped: {error.name} is not installed", ""
    except Exception as error:  # so that the other benchmarks still run
        traceback.print_exc()
        return f"FAILED: {type(error).__name__}", ""
    finally:
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def judge(name: str, path: Path) -> str:
    """Say whether a benchmark reached its goal, from its JSON file. Empty if it has no goal."""
    if name not in GOALS:
        return ""
    least, share = GOALS[name]
    reached = share(read_json(path))
    return f"goal {least:.0%}, reached {reached:.0%}: {'met' if reached >= least else 'MISSED'}"


def stop(*_: Any) -> None:
    """Stop the running benchmark, so that the table is still printed."""
    raise TimeoutError("asked to end")


def main(argv: list[str] | None = None) -> None:
    """Run all benchmarks and print the table of their outcomes.

    Each benchmark prints its own table and writes its JSON into `--folder`.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="dry run with tiny models")
    parser.add_argument("--folder", type=Path, help="folder for the JSON files; default: a new one")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    args = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="dap-gpu-"))
    args.folder.mkdir(parents=True, exist_ok=True)
    about = machine() | versions()
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    rows = [["tests", "left out of a dry run" if args.tiny else run_tests(), "", ""]]
    started = time.perf_counter()
    args.deadline = started + BEGIN
    for name in args.stages:
        began = time.perf_counter()
        outcome, goal = run_stage(name, args)
        rows.append([name, outcome, f"{time.perf_counter() - began:.0f} s", goal])
    print("\n" + text_table(["benchmark", "result", "", "share of the matrix rate"], rows))
    print(f"{time.perf_counter() - started:.0f} s altogether")
    if any(outcome.startswith("FAILED") for _, outcome, *_ in rows):
        sys.exit(1)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, stop)
    signal.alarm(LIMIT)
    main()
