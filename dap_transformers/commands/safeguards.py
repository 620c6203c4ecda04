"""The edge of every command: how it ends, and which outputs it may write."""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from transformers.utils import logging

from dap_transformers.errors import UserError, one_line
from dap_transformers.files import claimed
from dap_transformers.memory import keep_freed_memory

#: Environment variables in which launchers state the number of processes.
PROCESS_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

AnyPath = str | Path
#: Outputs by the flag that names them, such as "--output".
Outputs = Mapping[str, AnyPath | None]
Main = Callable[[Sequence[str] | None], Any]


# ------------------------------------------------------------------------------- how a command ends


def command(main: Main) -> Main:
    """Decorate a `main` so that errors that the user can fix end it with one line and status 1.

    These are `UserError`, errors of the file system (`OSError`), and a training loss that is not
    finite (`FloatingPointError`). Ctrl-C ends it with one line and status 130. The line shows the
    text of the `KeyboardInterrupt`, if it has one. Any other exception is a bug and keeps its
    traceback. Characters that the console cannot show are replaced. Freed memory is kept.
    """

    @functools.wraps(main)
    def run_and_exit(argv: Sequence[str] | None = None) -> None:
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")
        keep_freed_memory()
        # A bar of Transformers, such as that of loading weights, shows after some seconds.
        logging.set_tqdm_hook(lambda bar, args, options: bar(*args, **options, delay=5))
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
    files: Outputs,
    folders: Outputs,
    inputs: Iterable[AnyPath | None] = (),
    is_writer: bool = True,
) -> Iterator[None]:
    """Check all outputs of a run before the block starts, and lock them until it ends.

    Outputs and inputs that are None are left out.

    Args:
        files, folders: output files and output folders.
        inputs: texts and models. An id of the Hub is no path, and is left out.
        is_writer: False for processes of a distributed run that write nothing. They take no lock.
    """
    files = {name: path for name, path in files.items() if path}
    folders = {name: path for name, path in folders.items() if path}
    refuse_changes(files, folders, list(filter(None, inputs)))
    with ExitStack() as stack:
        if is_writer:
            for name, path in (folders | files).items():
                stack.enter_context(claimed(path, name))
        yield


def refuse_changes(files: Outputs, folders: Outputs, inputs: Iterable[AnyPath]) -> None:
    """Raise `UserError` for an output whose writing could change or remove what the run reads.

    An output must not be an input or lie in an input folder, except that new files and folders may
    lie in the folder of a model. An output folder must not hold an input file, or a checkpoint,
    which a training may remove.
    """
    seen: dict[Path, str] = {}
    for name, path in (folders | files).items():
        place = resolved(path)
        for read in inputs:
            source = resolved(read)
            if not source.exists():
                continue  # such as an id of the Hub
            is_model = (source / "config.json").is_file() and place != source
            is_inside = place.is_relative_to(source) and not (is_model and not place.is_file())
            is_kept = source.is_file() or source.name.startswith("checkpoint-")
            if is_inside or (name in folders and is_kept and place == source.parent):
                raise UserError(f"{name} {path} would change the input {read}: give another place")
        if place in seen:
            raise UserError(f"{name} {path} would overwrite {seen[place]}: give another file")
        if name in files and place.is_dir():
            raise UserError(f"{name} {path} is a folder: give the file to write")
        seen[place] = f"{name} {path}"


def resolved(path: AnyPath) -> Path:
    """Return an absolute path without links and `..`, also if parts of it do not exist."""
    return Path(os.path.realpath(Path(path).expanduser()))
