"""Processes for tests, forked from a server that imported torch and Transformers: a new python needs 8 s for them."""

import gc
import importlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.util
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from unittest import mock

from _pytest.capture import CaptureManager

#: For `processes.Process(target=..., args=...)`. The server starts with the first of them.
processes = multiprocessing.get_context("forkserver")
PRELOADED = ["transformers.trainer", "transformers.models.bert", "sentence_transformers"]
processes.set_forkserver_preload(PRELOADED)

TESTS = Path(__file__).resolve().parent


def start_server(capture: CaptureManager) -> None:
    """Starts the server by a fork of this process, which needs the same modules: before it has threads or our code."""
    for name in PRELOADED:  # not captured: their log handlers keep the stderr that they find
        importlib.import_module(name)
    capture.resume_global_capture()  # what the processes print belongs to the tests
    resource_tracker.ensure_running()
    with mock.patch.object(multiprocessing.util, "spawnv_passfds", _fork):
        multiprocessing.forkserver.ensure_running()
    capture.suspend_global_capture()


def _fork(executable: str, arguments: list[str], kept: list[int]) -> int:
    """What multiprocessing would start as `python -c CODE` goes on here, in a child that has all modules already."""
    if process := os.fork():
        return process
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number not in (
            1,
            2,
            *kept,
        ):  # closed, but no later file gets the number, which an object may still know
            os.dup2(null, number)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    gc.freeze()
    try:
        exec(arguments[-1])
    finally:
        os._exit(0)


def run_two(work: Callable[..., None], *args: object) -> None:
    """`work(rank, *args)` in two processes at once, to their end; what one of them raises is raised here.

    They find each other by their environment, as those of torchrun do.
    """
    import torch.multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # that nothing listens on
    torch.multiprocessing.start_processes(
        _as_rank, (port, work, args), nprocs=2, start_method="forkserver"
    )


def _as_rank(rank: int, port: int, work: Callable[..., None], args: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
    }
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    work(rank, *args)


def run_python(
    arguments: list[str], env: dict[str, str], cwd: Path, timeout: float | None = None
) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` (`-c CODE` or a file) to its end, with what it printed as text; not where this project is.

    What is imported has read its settings (`HF_HOME`, `HF_ENDPOINT`, `OMP_NUM_THREADS`) from the environment of the
    tests: who must see others needs a new python.

    Raises:
        TimeoutError: it did not end within `timeout` seconds, and was killed.
    """
    with tempfile.TemporaryDirectory(prefix="dap-python-") as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        process = processes.Process(target=_play, args=(arguments, env, cwd, printed))
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            raise TimeoutError(f"python {arguments} was killed after {timeout} s")
        return subprocess.CompletedProcess(
            arguments, process.exitcode, *(path.read_text() for path in printed)
        )


def _play(arguments: list[str], env: dict[str, str], cwd: Path, printed: list[Path]) -> None:
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    installed = [
        path
        for path in sys.path
        if Path(path) != TESTS.parent and not Path(path).is_relative_to(TESTS)
    ]
    if arguments[0] == "-c":
        sys.argv, sys.path[:] = ["-c", *arguments[2:]], [str(cwd), *installed]
        exec(arguments[1], types.ModuleType("__main__").__dict__)
    else:
        sys.argv, sys.path[:] = arguments, [str(Path(arguments[0]).parent), *installed]
        runpy.run_path(arguments[0], run_name="__main__")
