"""The tests of the fast paths and every benchmark that a GPU is for, in under 8 minutes.

    python -m benchmarks.gpu --folder results        # on a machine with a GPU, from the repository's root
    python -m benchmarks.gpu --device cpu --tiny     # a dry run anywhere

The project need not be installed; where a package is missing, what needs it is left out. The table at the end says
what became of each, and whether it reached its goal for an H100; what fails does not stop the rest, and makes the
command exit with 1.
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
BEGIN, LIMIT = (
    240,
    450,
)  # seconds after which no benchmark begins, and after which the one that runs is ended

XLMR, TINY = "--size xlmr --bf16", "--size tiny --repeats 1"
STEP = f"train_step {XLMR} --batch_size 1024 --mini_batch_size 1024 --optimizer"
DRY_STEP = f"train_step {TINY} --batch_size 4 --matrix_seconds 0.01 --no_library"
#: Name -> module and arguments: what matters most comes first.
STAGES = {
    "correctness": "correctness --paths float32 bf16 cached",
    "step": f"{STEP} --repeats 10 --warm_up 3",
    "GradCache": f"train_step {XLMR} --batch_size 2048 --mini_batch_size 512 --repeats 3",
    "memory": f"memory {XLMR} --tokens 4096 16384 32768 --vocabularies 37000 250002 --hidden 768 "
    "--batch_sizes 256 1024 --grad_cache 8192 --mini_batch_size 64",
    "FLOPs": "flops --size base --batch_size 512 --bf16 --repeats 5",
    "encoding": f"encode {XLMR} --sentences 40000 --token_budget 32768 --batch_sizes 128 512 --repeats 2",
    "mining": "mining --rows 200000 --contenders ours --repeats 2",
    "pipeline": f"input_pipeline {XLMR} --batch_size 1024 --pairs 40000 --batches 20 --workers 0 2 --step --repeats 2",
    "step, float32": "train_step --batch_size 256 --mini_batch_size 256 --repeats 5 --warm_up 2",
    "correctness, compiled": "correctness --encoders xlm-roberta --paths compiled",
    "step, compiled": f"{STEP} --compile --no_library --repeats 10 --warm_up 3",
}
#: The same of a dry run.
DRY = {
    "correctness": "correctness --encoders bert --paths bf16 cached",
    "step": f"{DRY_STEP} --optimizer",
    "GradCache": f"{DRY_STEP} --mini_batch_size 2",
    "memory": f"memory {TINY} --same_process --tokens 16 --vocabularies 100 --grad_cache 4 --mini_batch_size 2",
    "FLOPs": f"flops {TINY} --batch_size 2 --tokens 8",
    "encoding": f"encode {TINY} --sentences 40 --batch_sizes 8",
    "mining": "mining --rows 500 --dimensions 16 --contenders ours --repeats 1",
    "pipeline": f"input_pipeline {TINY} --batch_size 4 --pairs 16 --batches 2 --workers 0 --step",
}


def step_share(found: dict[str, Any]) -> float:
    """DAP's share of the rate of matrix products of the same type."""
    from benchmarks.train_step import shares  # which needs more than torch

    return shares(found["contenders"], WALL)["DAP"]


#: Name -> the least share of a rate that is aimed at on an H100, and the share that the JSON file tells.
GOALS: dict[str, tuple[float, Callable[[dict[str, Any]], float]]] = {
    "step": (0.45, step_share),
    "mining": (0.60, lambda found: next(iter(found["rows"].values()))["ours"]["share"]),
}


def run_tests() -> str:
    """What became of the tests of the fast paths; only files that need few libraries."""
    if find_spec("pytest") is None:
        return "skipped: pytest is not installed"
    command = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command += ["-k", "cuda or pack or fused or compile or similarity"]
    command += [
        f"tests/{name}.py"
        for name in ("encoding/test_encoder", "search/test_similarity", "training/test_grad_cache")
    ]
    command += map(str, REPOSITORY.glob("tests/test_*_dap.py"))
    try:
        code = subprocess.run(command, cwd=REPOSITORY, timeout=110).returncode
    except subprocess.TimeoutExpired:
        code = "timeout"
    return f"FAILED: {code}" if code else "ok"


def run_stage(name: str, args: argparse.Namespace) -> tuple[str, str]:
    """What became of a benchmark, and of its goal."""
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
        importlib.import_module(f"benchmarks.{module}").main(
            [*argv, "--device", args.device, "--json", str(path)]
        )
        return "ok", judge(name, path)
    except ModuleNotFoundError as error:
        return f"skipped: {error.name} is not installed", ""
    except Exception as error:  # the other benchmarks still tell something
        traceback.print_exc()
        return f"FAILED: {type(error).__name__}", ""
    finally:
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def judge(name: str, path: Path) -> str:
    """Whether a benchmark has reached its goal, by its JSON file; empty where it has none."""
    if name not in GOALS:
        return ""
    least, share = GOALS[name]
    reached = share(read_json(path))
    return f"goal {least:.0%}, reached {reached:.0%}: {'met' if reached >= least else 'MISSED'}"


def stop(*_: Any) -> None:
    """End the benchmark that runs, so that the table is still printed."""
    raise TimeoutError("asked to end")


def main(argv: list[str] | None = None) -> None:
    """Prints each benchmark's own table and then what became of them; each writes its JSON into `--folder`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--folder", type=Path, help="for the JSON files (default: a new one)")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    args = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args.folder = args.folder or Path(tempfile.mkdtemp(prefix="dap-gpu-"))
    args.folder.mkdir(parents=True, exist_ok=True)
    print(
        ", ".join(f"{key} {value}" for key, value in (machine() | versions()).items()), flush=True
    )
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
