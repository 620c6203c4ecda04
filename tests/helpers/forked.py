"""Start Python processes for tests quickly.

A new Python process needs about 8 seconds to import torch and Transformers. So the processes are
forked from a server process that has imported them.
"""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Use it as `processes.Process(target=..., args=...)`.
processes = multiprocessing.get_context("forkserver")
PRELOADED = ["transformers.trainer", "transformers.models.bert", "sentence_transformers"]
processes.set_forkserver_preload(PRELOADED)

TESTS = Path(__file__).resolve().parent.parent


def run_two(work: Callable, *args: object) -> None:
    """Run `work(rank, *args)` in two processes and wait for them. Raise what one of them raises.

    Their environment lets them find each other, as with torchrun.
    """
    import torch.multiprocessing

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        _, port = probe.getsockname()  # a free port
    torch.multiprocessing.start_processes(
        _as_rank, (port, work, args), nprocs=2, start_method="forkserver"
    )


def _as_rank(rank: int, port: int, work: Callable, args: tuple) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    work(rank, *args)


def run_killed(work: Callable, *args: object) -> None:
    """Run `work(*args)` in a process that kills itself, and wait for its end."""
    process = processes.Process(target=work, args=args)
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def run_fresh(*command: object, **options: Any) -> str:
    """Run a command in a process that is not forked, and return what it prints.

    It must succeed. The options are those of `subprocess.run`.
    """
    line = [*map(str, command)]
    done = subprocess.run(line, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def run_python(code: str, cwd: Path = TESTS.parent, env: dict[str, str] | None = None) -> str:
    """Run `python -c CODE`, without this repository on its path, and return what it prints.

    It must succeed. The modules that the server has imported read `HF_HOME`, `HF_ENDPOINT` and
    `OMP_NUM_THREADS` from the environment of the tests. A test that needs other values must start
    a new Python process.

    Args:
        code: the code.
        cwd: the working directory.
        env: the environment, instead of that of the tests.
    """
    with tempfile.TemporaryDirectory(prefix="dap-python-") as folder:
        printed = [Path(folder) / name for name in ("stdout", "stderr")]
        arguments = (code, cwd, env or dict(os.environ), printed)
        process = processes.Process(target=_run_code, args=arguments)
        process.start()
        process.join()
        stdout, stderr = (path.read_text() for path in printed)
    assert process.exitcode == 0, stderr
    return stdout


def _run_code(code: str, cwd: Path, env: dict[str, str], printed: list[Path]) -> None:
    for number, path in enumerate(printed, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)

    installed = []
    for path in sys.path:
        is_ours = Path(path) == TESTS.parent or Path(path).is_relative_to(TESTS)
        if not is_ours:
            installed.append(path)
    sys.argv = ["-c"]
    sys.path[:] = [str(cwd), *installed]
    exec(code, types.ModuleType("__main__").__dict__)
