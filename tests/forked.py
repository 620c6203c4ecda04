"""`python` in a process that is forked from one with torch and Transformers imported: a new one needs 6 s for them.

`serve` begins a fork server while no module of this project is imported, torch has no thread and nothing was computed.
Each of its forks takes the arguments of `python` (`-c CODE`, `-m MODULE` or a file), an environment, a folder and
three streams, and is otherwise as a new process: its own `sys.argv`, `sys.path`, atexit handlers and Hub settings.
This file as a command is such a `python` for shell scripts. Without a fork server all of it is done by a new process.
"""

import atexit
import importlib
import io
import json
import os
import random
import runpy
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

SERVER = "DAP_TEST_FORK_SERVER"  # environment variable: the server's socket
TESTS = Path(__file__).resolve().parent


class ForkedPython:
    """A running `python`, to be used as a `subprocess.Popen`."""

    def __init__(self, arguments: list[str], env: dict[str, str], cwd: str, streams: tuple[int, int, int]) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(os.environ[SERVER])
        job = json.dumps({"arguments": arguments, "env": env, "cwd": cwd}).encode()
        socket.send_fds(self._socket, [len(job).to_bytes(4, "big")], streams)
        self._socket.sendall(job)
        self._lines = self._socket.makefile("r")
        self.pid = int(self._lines.readline())

    def poll(self) -> int | None:
        """The exit code, -N after a signal N, or None while it runs."""
        return self.wait() if select.select([self._socket], [], [], 0)[0] else None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; after `timeout` seconds the process is killed, and TimeoutError raised."""
        if not select.select([self._socket], [], [], timeout)[0]:
            self.kill()
            raise TimeoutError(f"a forked python was killed after {timeout} s")
        return int(self._lines.readline())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def start_python(
    arguments: list[str], env: dict[str, str], cwd: Path, streams: tuple[int, int, int]
) -> ForkedPython | subprocess.Popen:
    """`python ARGUMENTS` with (stdin, stdout, stderr) as files' numbers."""
    if SERVER in os.environ:
        return ForkedPython(arguments, env, str(cwd), streams)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        [sys.executable, *arguments], env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, close_fds=True
    )


def run_python(
    arguments: list[str], env: dict[str, str], cwd: Path, timeout: float | None = None
) -> subprocess.CompletedProcess:
    """`python ARGUMENTS` to its end, with what it printed as text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, open(os.devnull) as nothing:
        process = start_python(arguments, env, cwd, (nothing.fileno(), out.fileno(), err.fileno()))
        code = process.wait(timeout)
        printed = [(file.seek(0), file.read())[1] for file in (out, err)]
    return subprocess.CompletedProcess(arguments, code, *printed)


def write_command(path: Path) -> None:
    """An executable that shell scripts can use as `python`."""
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -I -S {shlex.quote(__file__)} "$@"\n')
    path.chmod(0o755)


# ----------------------------------------------------------------------------------------- the server


def serve(folder: str) -> None:
    """Forks the server, which ends with this process, and tells `start_python` where it is."""
    place = f"{folder}/fork-server"
    if not sys.platform.startswith("linux") or len(place) > 100:  # system libraries that bear a fork; a socket's name
        return
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    lifeline, held = os.pipe()
    if os.fork() == 0:
        os.close(held)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
        while lifeline not in select.select([lifeline, listener], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                _supervise(connection)
            connection.close()
        os._exit(0)
    listener.close()
    os.close(lifeline)
    os.environ[SERVER] = place


def _supervise(connection: socket.socket) -> None:
    """Forks the job, and says its process id and its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with suppress(BrokenPipeError):  # of a client that is gone
        length, streams, _, _ = socket.recv_fds(connection, 4, 3)
        with connection.makefile("rb") as file:
            job = json.loads(file.read(int.from_bytes(length, "big")))
        if (pid := os.fork()) == 0:
            connection.close()
            _play(job, streams)
        connection.sendall(f"{pid}\n".encode())
        connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n".encode())
    os._exit(0)


def take_own_lock() -> None:
    """Forks share tqdm's lock: one that is killed while it holds it, for any bar, would stop all others for ever."""
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())


def _play(job: dict[str, Any], streams: list[int]) -> None:
    """Runs a job and ends the process with its exit code."""
    atexit._clear()  # they would tidy up behind the parent
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = 1
    try:
        _redirect(streams)
        take_own_lock()
        _settle(job)
        _execute(job["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _redirect(streams: list[int]) -> None:
    for number, (given, stream) in enumerate(zip(streams, (sys.stdin, sys.stdout, sys.stderr), strict=True)):
        with suppress(io.UnsupportedOperation, ValueError, AttributeError):  # pytest's: loggers may have kept it
            if number:
                os.dup2(given, stream.fileno())
        os.dup2(given, number)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True) for fd in (1, 2))


def _settle(job: dict[str, Any]) -> None:
    """Environment, folder, search path, threads, random state and Hub settings of a new process."""
    import numpy as np
    import torch

    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    installed = [path for path in sys.path if path and Path(path).resolve() not in (TESTS, TESTS.parent)]
    sys.path[:] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path] + installed
    sys.modules.pop("conftest", None)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    random.seed()
    np.random.seed()
    _read_hub_settings()


def _read_hub_settings() -> None:
    """What the libraries read from the environment when they are imported."""
    import huggingface_hub
    import transformers.dynamic_module_utils as dynamic
    from huggingface_hub import constants, hf_api

    importlib.reload(constants)
    hf_api.api.endpoint = constants.ENDPOINT
    modules = os.environ.get("HF_MODULES_CACHE", os.path.join(constants.HF_HOME, "modules"))
    dynamic.HF_MODULES_CACHE = transformers_hub().HF_MODULES_CACHE = modules
    huggingface_hub.close_session()


def transformers_hub() -> types.ModuleType:
    return importlib.import_module("transformers.utils.hub")


def _execute(arguments: list[str]) -> None:
    """What `python ARGUMENTS` does."""
    isolated, arguments = arguments[0] == "-I", arguments[arguments[0] == "-I" :]
    kind, sys.argv = arguments[0], list(arguments)
    if not isolated:
        sys.path.insert(0, os.getcwd() if kind in ("-c", "-m") else str(Path(kind).resolve().parent))
    if kind == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *arguments[2:]]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    sys.exit(start_python(sys.argv[1:], dict(os.environ), Path.cwd(), (0, 1, 2)).wait())
