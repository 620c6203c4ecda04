"""The edge of every command: how it ends, and which outputs it may write."""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dap_transformers.errors import UserError, one_line
from dap_transformers.files import claimed, disk_full, read_json

#: Environment variables in which launchers state the number of processes.
PROCESS_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

AnyPath = str | Path
Main = Callable[[Sequence[str] | None], Any]


# ------------------------------------------------------------------------------- how a command ends


def command(main: Main) -> Main:
    """Decorate a `main` so that errors that the user can fix end it with one line and status 1.

    These are `UserError`, errors of the file system (`OSError`), and a training loss that is not
    finite (`FloatingPointError`). Ctrl-C ends it with one line and status 130. The line shows the
    text of the `KeyboardInterrupt`, if it has one. Any other exception is a bug and keeps its
    traceback. Characters that the console cannot show are replaced.
    """

    @functools.wraps(main)
    def run_and_exit(argv: Sequence[str] | None = None) -> None:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        try:
            _require_all_processes()
            main(argv)
            _leave_process_group()
        except KeyboardInterrupt as interruption:
            advice = f": {one_line(interruption)}" if interruption.args else ""
            print(f"\ninterrupted{advice}", file=sys.stderr)
            sys.exit(130)
        except (UserError, OSError, FloatingPointError) as error:
            sys.exit(f"error: {one_line(error)}")

    return run_and_exit


def _require_all_processes() -> None:
    """Raise `UserError` if `accelerate launch --cpu` started one process instead of several.

    If accelerate is asked for several processes, it sets `MASTER_ADDR`, but with `--cpu` it starts
    only one process and sets none of the `PROCESS_COUNTS`.
    """
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    states_number = any(name in os.environ for name in PROCESS_COUNTS)
    if on_cpu and "MASTER_ADDR" in os.environ and not states_number:
        raise UserError(
            "accelerate launch --cpu starts only one process, whatever --num_processes says: put "
            "ACCELERATE_USE_CPU=true before the command and give --multi_gpu instead of --cpu"
        )


def _leave_process_group() -> None:
    """Disconnect from the other processes of this launch. Otherwise torch warns at exit."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


# ------------------------------------------------------------------------- what a command may write


@contextmanager
def guarded(
    files: Mapping[str, AnyPath] | None = None,
    folders: Mapping[str, AnyPath] | None = None,
    inputs: Iterable[AnyPath] = (),
    model: AnyPath | None = None,
    is_writer: bool = True,
) -> Iterator[None]:
    """Check all outputs of a run before the block starts, and lock them until it ends.

    A full disk within the block becomes a one-line error (`disk_full`).

    Args:
        files: output files, by the flag that names them, such as "--output".
        folders: output folders, by the flag that names them. They are created. A folder that is
            still empty at the end is removed.
        is_writer: False for processes of a distributed run that write nothing. They take no lock.
    """
    files = dict(files or {})
    folders = dict(folders or {})
    inputs = [*inputs, *([model] if model else [])]
    check_folders(folders, inputs)
    check_files(files, inputs)

    outputs = {**folders, **files}
    with ExitStack() as stack:
        if is_writer:
            for name, path in outputs.items():
                stack.enter_context(claimed(path, name))
            for path in folders.values():
                stack.enter_context(_created_folder(Path(path)))
        for path in list(outputs.values())[:1]:
            stack.enter_context(disk_full(Path(path)))
        yield


def check_folders(folders: Mapping[str, AnyPath], inputs: Iterable[AnyPath] = ()) -> None:
    """Refuse output folders in which writing could change or remove what the run reads.

    An output folder must not be an input, the folder of an input file, or the folder of a
    training's checkpoint, because the training may remove it. It may lie in the folder of a model.
    """
    for name, path in folders.items():
        place = resolved(path)
        for read in inputs:
            source = resolved(read)
            if not source.exists():
                continue  # such as an id of the Hub
            is_checkpoint = source.is_dir() and source.name.startswith("checkpoint-")
            is_inside = place.is_relative_to(source) and not (source / "config.json").is_file()
            is_parent = place == source.parent and (source.is_file() or is_checkpoint)
            if place == source or is_inside or is_parent:
                raise UserError(f"{name} {path} would change the input {read}: give another folder")


def check_files(files: Mapping[str, AnyPath], inputs: Iterable[AnyPath] = ()) -> None:
    """Refuse output files that are inputs, lie in an input folder, or are the same file.

    In the folder of a model, new files are allowed, and reports of ours may be replaced.
    """
    seen: dict[Path, str] = {}
    for name, path in files.items():
        place = resolved(path)
        for read in inputs:
            source = resolved(read)
            is_input = place == source or (place.exists() and _is_same(place, source))
            if source.is_dir() and place.is_relative_to(source):
                is_model = (source / "config.json").is_file()
                is_input = not is_model or (place.exists() and not _is_report(place))
            if is_input:
                raise UserError(f"{name} {path} would change the input {read}: give another file")
        if place in seen:
            raise UserError(f"{name} {path} would overwrite {seen[place]}: give another file")
        if place.is_dir():
            raise UserError(f"{name} {path} is a folder: give the file to write")
        seen[place] = f"{name} {path}"
        place.parent.mkdir(parents=True, exist_ok=True)


def resolved(path: AnyPath) -> Path:
    """Return an absolute path without links and `..`, also if parts of it do not exist."""
    return Path(os.path.realpath(Path(path).expanduser()))


def _is_same(place: Path, other: Path) -> bool:
    """Tell whether two existing paths are the same file, perhaps by a hard link."""
    return other.exists() and place.samefile(other)


def _is_report(path: Path) -> bool:
    """Tell whether a file is a report of ours, or is described by a report beside it."""
    for each in (path, path.with_name(f"{path.name}.json")):
        with suppress(UserError, OSError):
            if {"protocol", "versions"} <= set(read_json(each)):
                return True
    return False


@contextmanager
def _created_folder(folder: Path) -> Iterator[None]:
    """Create a folder before the block. If it is empty when the block ends, remove it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()
