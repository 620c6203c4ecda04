"""Run the checks and benchmarks that need a GPU, each as a stage.

    timeout 480 python -m benchmarks.gpu 2>&1 | tee gpu.log   # on a GPU, from the repository's root
    python -m benchmarks.gpu --device cpu --tiny               # a rehearsal anywhere

The project need not be installed. Each stage prints its own table. No stage needs another, and one
that fails does not stop the others. The table at the end shows the outcome of each. The exit status
is 1 if a stage failed, for example because a package is missing.
"""

import argparse
import gc
import importlib
import os
import shlex
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch

from dap_transformers.reports import machine, versions
from dap_transformers.tables import text_table

REPOSITORY = Path(__file__).resolve().parent.parent
TESTS_LIMIT = 110  # seconds for the tests
TESTS = "tests"  # stage of its own kind
XLMR = "--size xlmr --bf16"
STEP = f"train_step {XLMR} --batch_size 1024 --optimizer"
TINY = "--size tiny --repeats 1"
TINY_STEP = f"{TINY} --batch_size 4 --no_library"

#: Name -> module and arguments, and what is added for a rehearsal, where it replaces the arguments
#: of the same names. None is left out of a rehearsal. The most valuable stage stands first.
STAGES: dict[str, tuple[str, str | None]] = {
    "correctness": ("correctness --paths float32 bf16", "--encoders bert --paths bf16"),
    "correctness, dropout": (
        "correctness --paths dropout 'dropout, bf16' --draws 1000",
        "--encoders bert --draws 20",
    ),
    "step": (f"{STEP} --repeats 10 --warm_up 3 --profile TR", TINY_STEP),
    "memory of steps": (
        f"memory {XLMR} --batch_sizes 256 1024 --objectives TR TLM DAP BOW",
        f"{TINY} --batch_sizes 2",
    ),
    "encoding": (
        f"encode {XLMR} --sentences 40000 --batch_sizes 128 512 --repeats 2",
        f"{TINY} --sentences 40 --batch_sizes 8",
    ),
    "mining": (
        "mining --rows 200000 --contenders ours --repeats 2",
        "--rows 500 --dimensions 16 --repeats 1",
    ),
    TESTS: ("", None),
    "correctness, GradCache": (
        "correctness --paths cached 'dropout, cached'",
        "--encoders bert",
    ),
    "memory": (
        f"memory {XLMR} --tokens 4096 16384 32768 --vocabularies 37000 250002 --hidden 768 "
        "--grad_cache 8192 --mini_batch_size 64",
        f"{TINY} --tokens 16 --vocabularies 100 --grad_cache 8",
    ),
    "correctness, compiled": (
        "correctness --encoders xlm-roberta --paths compiled 'dropout, compiled' --draws 1000",
        None,
    ),
    "step, compiled": (f"{STEP} --compile --no_library --repeats 10 --warm_up 3", None),
}


def run_tests() -> None:
    """Run the tests of the fast paths."""
    options = "-q -o addopts= -p no:cacheprovider --continue-on-collection-errors"
    options += " -k 'cuda or pack or fused or compile or similarity'"
    files = "tests/test_*_dap.py tests/encoding/test_encoder.py tests/search/test_exact.py"
    command = f"{sys.executable} -m pytest {options} {files} tests/training/test_grad_cache.py"
    subprocess.run(command, shell=True, cwd=REPOSITORY, timeout=TESTS_LIMIT, check=True)


def run_benchmark(name: str, args: argparse.Namespace) -> None:
    """Run the benchmark of a stage in this process."""
    line, rehearsal = STAGES[name]
    module, *argv = shlex.split(line)
    argv += shlex.split(rehearsal) if args.tiny else []
    print(f"== python -m benchmarks.{module} {shlex.join(argv)}", flush=True)
    importlib.import_module(f"benchmarks.{module}").main([*argv, "--device", args.device])


def run_stage(name: str, args: argparse.Namespace) -> list[str]:
    """Run a stage, and catch its errors, so that the other stages still run.

    Returns:
        The name, the outcome ("ok", or what failed), and the seconds that it took.
    """
    outcome = "ok"
    began = time.perf_counter()
    try:
        if name == TESTS:
            run_tests()
        else:
            run_benchmark(name, args)
    except Exception as error:
        traceback.print_exc()
        outcome = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())}"
    gc.collect()
    torch.cuda.empty_cache()
    row = [name, outcome, f"{time.perf_counter() - began:.0f} s"]
    print(*row, flush=True)
    return row


def main(argv: list[str] | None = None) -> None:
    """Run the stages and print a table of their outcomes. Exit with status 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="rehearsal with tiny models")
    parser.add_argument("--stages", nargs="+", choices=list(STAGES), default=list(STAGES))
    args = parser.parse_args(argv)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    print(machine() | versions(), flush=True)

    rows = []
    for name in args.stages:
        _, rehearsal = STAGES[name]
        if rehearsal is not None or not args.tiny:
            rows.append(run_stage(name, args))
    print("\n" + text_table(["stage", "result", ""], rows))
    if any(outcome != "ok" for _, outcome, _ in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
