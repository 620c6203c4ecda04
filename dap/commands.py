"""What every command shares: how it ends, and the guard and the lock of what it writes.

A command imports it before all else, so that Ctrl-C is one line while the libraries are still loaded, too.
"""

import fcntl
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

from dap.errors import UserError, one_line
from dap.file_io import disk_full

logger = logging.getLogger(__name__)

#: Names of what a model's folder consists of; other files in it, such as results, may be written anew.
MODEL_FILES = (
    "config.json", "*_config.json", "config_sentence_transformers.json", "modules.json", "*.safetensors*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model",
    "*.onnx*", "*.bin", "*.pt", "*.pth", "*.py", "run.json", "trainer_state.json", "train_results.json", "README.md",
)  # fmt: skip
_HELD: set[int] = set()  # handles that have a lock


class ClaimedError(UserError):
    """Another run is at work on an output."""


Place = str | Path
Main = Callable[[Sequence[str] | None], Any]


def command(main: Main) -> Main:
    """A `main` that ends in one line where the user can mend it, with status 1.

    That is a refusal (`UserError`), what the system says of a file (`OSError`), and a training loss that is not
    finite (`FloatingPointError`). Any other exception is a bug and keeps its traceback.
    """

    @functools.wraps(main)
    def ended(argv: Sequence[str] | None = None) -> None:
        try:
            _require_all_launched()
            main(argv)
        except (UserError, OSError, FloatingPointError) as error:
            _end_bars()
            sys.exit(f"error: {one_line(error)}")

    return ended


def _end_bars() -> None:
    """Ends the lines of progress bars, so that what is said next has a line of its own and is the last one."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)  # where the command has come so far
    for bar in list(getattr(tqdm, "_instances", ())):
        bar.close()


def _require_all_launched() -> None:
    """Raise `UserError` where `accelerate launch` was to start several processes; on CPUs it starts one, silently."""
    words = []
    with suppress(OSError):  # not on Linux
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text().replace("=", "\0").split("\0")
    flags = ("--num_processes", "--num-processes")
    asked = next((number for flag, number in pairwise(words) if flag in flags), "1")
    if (
        asked != "1"
        and "WORLD_SIZE" not in os.environ
        and any("accelerate" in word for word in words[:3])
    ):
        raise UserError(
            f"accelerate launch --num_processes {asked} has started one process alone, as it does on CPUs: leave "
            "--cpu out, give --multi_gpu, and put ACCELERATE_USE_CPU=true before the command"
        )


# ---------------------------------------------------------------------------------------- what it writes


@contextmanager
def guarded(
    files: Mapping[str, Place] | None = None,
    folders: Mapping[str, Place] | None = None,
    inputs: Iterable[Place] = (),
    model: Place | None = None,
    is_writer: bool = True,
) -> Iterator[None]:
    """Checks everything that a run will write, and keeps other runs out of it until the block or the process ends.

    Where the disk is full within the block, that is said in one line (`disk_full`). What belongs at an address
    (`dap.addresses`) is sent there when the block has ended well.

    Args:
        files, folders: argument that names the output -> output.
        inputs: files and folders that the run reads.
        model: the model that it reads, if that is a folder or a file.
        is_writer: false in a process of several that writes nothing, and so locks nothing.

    Raises:
        UserError: an output that the run would read or that cannot be written, or another run is at work on it.
    """
    from dap.addresses import send  # libraries come when Ctrl-C is one line

    files, folders, inputs = files or {}, folders or {}, list(inputs)
    for name, path in folders.items():
        _keep_out(name, path, inputs)
        if Path(path).exists() and not Path(path).is_dir():
            raise UserError(f"{name} {path} is a file: give a folder")
        if model is not None and _is_same(path, model):
            raise UserError(f"{name} {path} is the folder of the model: give another folder")
    check_outputs(files, inputs, model)
    outputs = [*folders.items(), *files.items()]
    with ExitStack() as stack:
        for name, path in outputs if is_writer else ():
            with _writing(name, path):
                stack.enter_context(claimed(path, name, beside=name in files))
                if name in folders:
                    tempfile.TemporaryFile(dir=path).close()
        for _, path in outputs[:1]:
            stack.enter_context(disk_full(Path(path)))
        yield
        for name, path in outputs if is_writer else ():
            if address := send(path, name):
                print(f"sent to {address}")


def check_outputs(
    files: Mapping[str, Place], inputs: Iterable[Place] = (), model: Place | None = None
) -> None:
    """Finds out before the work what would spoil its end; makes the folders of the files.

    Args:
        files, inputs, model: as in `guarded`.

    Raises:
        UserError: an output that is an input or lies in one, a file of the model or another output (names both), that
            is a folder or a device, or that cannot be written.
    """
    inputs, taken = list(inputs), {}
    for name, path in files.items():
        place = Path(path).resolve()
        if model is not None and _is_of_model(place, Path(model).resolve()):
            raise UserError(
                f"{name} {path} would overwrite a file of the model {model}: give another file"
            )
        _keep_out(name, path, inputs)
        if place in taken:
            raise UserError(f"{name} {path} would overwrite {taken[place]}: give another file")
        if place.exists() and not place.is_file():
            raise UserError(
                f"{name} {path} is {'a folder' if place.is_dir() else 'a device'}: give the file to write"
            )
        taken[place] = f"{name} {path}"
    for name, path in files.items():
        with _writing(name, path):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            name_of_parts = {
                "prefix": f".{Path(path).name}.",
                "suffix": ".tmp",
            }  # as long as that of `whole_file`
            tempfile.NamedTemporaryFile(dir=Path(path).parent, **name_of_parts).close()


def _keep_out(name: str, path: Place, inputs: Iterable[Place]) -> None:
    """Refuses an output that is one of the inputs, by whatever link, or lies in the folder of one."""
    with _writing(name, path):
        Path(path).exists()  # raises where a name is too long
    for read in map(Path, inputs):
        if _is_same(path, read):
            raise UserError(f"{name} {path} would overwrite the input {read}: give another one")
        if read.is_dir() and Path(path).resolve().is_relative_to(read.resolve()):
            raise UserError(f"{name} {path} lies in the input {read}: give another place")


def _is_same(path: Place, other: Place) -> bool:
    return Path(path).exists() and Path(other).exists() and Path(path).samefile(other)


def _is_of_model(path: Path, model: Path) -> bool:
    """Whether a path is one of `MODEL_FILES` in a model's folder, which of an .onnx file is the one above `onnx/`."""
    beside = model.parent.parent if model.parent.name == "onnx" else model.parent
    folder = beside if model.is_file() else model
    return (
        folder.is_dir()
        and path.is_relative_to(folder)
        and any(fnmatch(path.name, each) for each in MODEL_FILES)
    )


@contextmanager
def _writing(name: str, path: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{name} {path} cannot be written: {error.strerror or one_line(error)}"
        ) from error


@contextmanager
def claimed(path: Place, name: str = "", beside: bool = False) -> Iterator[None]:
    """Keeps other runs out of a folder, until the block or this process ends; the folder goes if it stays empty.

    Processes that are forked off do not have the lock, and so do not outlive it.

    Args:
        name: the argument that names it, for the error.
        beside: lock by the file `.NAME.lock` beside the path, which may be a file and need not exist.

    Raises:
        UserError: another run is at work on it.
    """
    path = Path(path)
    lock = path.with_name(f".{path.name}.lock") if beside else path
    handle = _open_locked(lock, beside, f"{name} {path}".strip())
    _HELD.add(handle)
    try:
        yield
    finally:
        if handle in _HELD:
            with suppress(OSError):  # a folder that holds something
                lock.unlink() if beside else lock.rmdir()
            _HELD.discard(handle)
            os.close(handle)


def _open_locked(lock: Path, is_file: bool, name: str) -> int:
    """The handle of a lock, which is made, again if the run that had it takes it away meanwhile."""
    while True:
        (lock.parent if is_file else lock).mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            handle = os.open(lock, os.O_RDWR | os.O_CREAT if is_file else os.O_RDONLY, 0o644)
            try:
                _lock(handle, name)
                if os.path.samestat(os.fstat(handle), os.stat(lock)):
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)


def _lock(handle: int, name: str) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        run = f"another run{_holder(handle)}"
        raise ClaimedError(
            f"{name}: {run} is at work on it: wait for its end, or give another one"
        ) from None
    except OSError as error:  # some network file systems know no locks
        logger.warning(
            "%s cannot be kept from other runs (%s): start none beside this one",
            name,
            error.strerror,
        )


def _holder(handle: int) -> str:
    """Which process has the lock, as far as Linux tells: " (process 4711)"."""
    with suppress(OSError):
        for lock in (
            Path("/proc/locks").read_text().splitlines()
        ):  # 1: FLOCK ADVISORY WRITE 4711 08:01:inode 0 EOF
            words = lock.split()
            if words[1] == "FLOCK" and words[5].endswith(f":{os.fstat(handle).st_ino}"):
                return f" (process {words[4]})"
    return ""


def _let_go() -> None:
    """Closes in a forked process the locks of its parent."""
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_let_go)


def _say_interrupted(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Ctrl-C in one line, where Python would print a traceback; the status is then 130, as shells say."""
    if issubclass(kind, KeyboardInterrupt):
        _end_bars()
        print("interrupted", file=sys.stderr)
    else:
        _hook_before(kind, error, trace)


_hook_before, sys.excepthook = sys.excepthook, _say_interrupted
