"""Functions of all commands: end with a clear message, check outputs, and lock them."""

import argparse
import functools
import io
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TextIO

from filelock import FileLock, Timeout

from dap_transformers import __version__
from dap_transformers.addresses import send_path
from dap_transformers.errors import UserError, one_line
from dap_transformers.files import disk_full, read_json

logger = logging.getLogger(__name__)

#: The files that may make up a model. None is written into a model's folder, even if it is new.
MODEL_FILES = (
    "config.json", "*_config.json", "config_sentence_transformers.json", "modules.json",
    "*.safetensors*", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*",
    "merges.txt", "*.model", "*.onnx*", "*.bin", "*.pt", "*.pth", "*.py", "run.json",
    "trainer_state.json", "train_results.json", "README.md", "LICENSE*", "*.gguf", "*.h5",
    "*.msgpack", "*.tflite", "openvino*", "*.spm", "*.jinja",
)  # fmt: skip
#: Environment variables in which launchers state the number of processes.
PROCESS_COUNTS = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")

AnyPath = str | Path
Main = Callable[[Sequence[str] | None], Any]


class ClaimedError(UserError):
    """Error that is raised if another run is writing to an output of this run."""


# ------------------------------------------------------------------------------- how a command ends


def command(main: Main) -> Main:
    """Decorate a `main` so that errors that the user can fix end it with one line and status 1.

    These are `UserError`, errors of the file system (`OSError`), and a training loss that is not
    finite (`FloatingPointError`). Ctrl-C ends it with one line and status 130. The line shows the
    text of the `KeyboardInterrupt`, if it has one. Any other exception is a bug and keeps its
    traceback. Characters that the console cannot show are replaced.

    If standard output cannot be written, the command still does its work and writes its files
    (`Printed`). Then it ends with one line and status 1.

    Args:
        main: takes the command line, or None for the process's own.

    Returns:
        A function that calls `main` and returns None.
    """

    @functools.wraps(main)
    def run_and_exit(argv: Sequence[str] | None = None) -> None:
        output = Printed(sys.stdout)
        with redirect_stdout(output), redirect_stderr(Printed(sys.stderr)):
            try:
                _require_all_processes()
                main(argv)
                _leave_process_group()
            except KeyboardInterrupt as interruption:
                _start_new_line()
                advice = f": {one_line(interruption)}" if interruption.args else ""
                print(f"interrupted{advice}", file=sys.stderr)
                sys.exit(130)
            except (UserError, OSError, FloatingPointError) as error:
                _start_new_line()
                sys.exit(f"error: {one_line(error)}")
            finally:
                output.end()
            if output.error:
                reason = output.error.strerror
                sys.exit(f"error: standard output cannot be written ({reason}); the work is done")

    return run_and_exit


def add_version(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--version` to a command. It prints the version of this package and ends.

    Args:
        parser: the command's parser, which is changed.
    """
    text = f"dap-transformers {__version__}"
    parser.add_argument("--version", action="version", version=text, help="Print the version.")


class Printed:
    """Standard output, or standard error, that never stops the work of a command.

    Characters that the console cannot show are replaced, as on a console that is not UTF-8. After
    the first error, such as a full disk or a closed pipe, nothing more is printed.

    Args:
        stream: the stream to print to. None if there is none, as in a program without a console.

    Attributes:
        error: the first error, or None.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = io.StringIO() if stream is None else stream
        self.error: OSError | None = None
        if hasattr(self._stream, "reconfigure"):
            self._stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Print a text, unless an earlier one could not be printed."""
        self._attempt("write", text)
        return len(text)

    def flush(self) -> None:
        """Print what is still in the buffer."""
        self._attempt("flush")

    def end(self) -> None:
        """Print what is still in the buffer. After an error, discard it instead.

        Otherwise Python would try again when it ends, and print a second error.
        """
        self.flush()
        if self.error is not None:
            with suppress(OSError, ValueError):  # a stream that is no file
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _attempt(self, method: str, *arguments: str) -> None:
        """Call a method of the stream, and remember its error."""
        if self.error is not None:
            return
        try:
            getattr(self._stream, method)(*arguments)
        except OSError as error:
            self.error = error


def _start_new_line() -> None:
    """Print a line break to stderr if it is a terminal.

    A progress bar or ^C may stand on the current line.
    """
    if sys.stderr.isatty():
        print(file=sys.stderr)


def _require_all_processes() -> None:
    """Raise `UserError` if `accelerate launch --cpu` started one process instead of several.

    It is recognised by the environment. If accelerate is asked for several processes, it sets
    `MASTER_ADDR`, but starts only one process and sets none of the `PROCESS_COUNTS`.
    """
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true")
    asked_for_several = "MASTER_ADDR" in os.environ
    states_number = any(name in os.environ for name in PROCESS_COUNTS)
    if on_cpu and asked_for_several and not states_number:
        raise UserError(
            "accelerate launch --cpu starts only one process, whatever --num_processes says: put "
            "ACCELERATE_USE_CPU=true before the command and give --multi_gpu instead of --cpu"
        )


def _leave_process_group() -> None:
    """Disconnect from the other processes of this launch, if there are any.

    Otherwise torch warns at exit.
    """
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

    This is a context manager. An output may be the local copy of an address, such as
    "s3://bucket/out" (`dap_transformers.addresses`). It is sent to the address if the block ends
    without an error. A full disk within the block becomes a one-line error (`disk_full`).

    Args:
        files: output files, by the flag that names them, such as "--output".
        folders: output folders, by the flag that names them. They are created. A folder that is
            still empty at the end is removed.
        inputs: files and folders that the run reads.
        model: the model that the run reads, if it is a folder or a file.
        is_writer: False for processes of a distributed run that write nothing. They take no lock
            and send nothing.
    """
    files = dict(files or {})
    folders = dict(folders or {})
    inputs = list(inputs)

    check_folders(folders, inputs, model)
    check_outputs(files, inputs, model)

    outputs = [*folders.items(), *files.items()]
    with ExitStack() as stack:
        if is_writer:
            for name, path in outputs:
                with _named_as_output(name, path):
                    stack.enter_context(claimed(path, name))
            for name, path in folders.items():
                with _named_as_output(name, path):
                    stack.enter_context(_created_folder(Path(path)))
        if outputs:
            _, first_path = outputs[0]
            stack.enter_context(disk_full(Path(first_path)))
        yield
        if is_writer:
            for name, path in outputs:
                address = send_path(path, name)
                if address:
                    print(f"sent to {address}")


def check_folders(
    folders: Mapping[str, AnyPath], inputs: Iterable[AnyPath] = (), model: AnyPath | None = None
) -> None:
    """Check that writing into the output folders cannot change something that the run reads.

    An output folder must not be an input, lie in an input folder, or be the folder of an input
    file. It may lie in the folder of the model, but must not be that folder. If the model is a
    training's checkpoint, it must not be the folder above it, either.

    Args:
        folders: output folders, by the flag that names them.
        inputs: files and folders that the run reads. Names of Hub datasets do no harm.
        model: the model that the run reads, if it is a folder or a file.
    """
    inputs = list(inputs)
    for name, path in folders.items():
        _require_no_input(name, path, inputs)
        place = resolved(path)
        if place.exists() and not place.is_dir():
            raise UserError(f"{name} {path} is a file: give a folder")
        if model is not None and _is_same(place, resolved(model)):
            raise UserError(f"{name} {path} is the folder of the model: give another folder")
        for read in inputs:
            if resolved(read).is_file() and resolved(read).parent == place:
                raise UserError(
                    f"{name} {path} is the folder of the input {read}: give another folder"
                )
        if model is not None and resolved(model).parent == place and _is_checkpoint(model):
            raise UserError(
                f"{name} {path} is the folder of {model}, which a run may remove: give another "
                "folder"
            )


def _is_checkpoint(model: AnyPath) -> bool:
    """Tell whether a model is a training's folder `checkpoint-…`, which a later step may remove."""
    return resolved(model).is_dir() and resolved(model).name.startswith("checkpoint-")


def resolved(path: AnyPath) -> Path:
    """Return an absolute path without links and `..`, also if parts of it do not exist.

    Inputs and outputs are compared in this form, because `none/../a.de` and `a.de` are the same
    file even if there is no folder `none`.
    """
    return Path(os.path.realpath(path))


def check_outputs(
    files: Mapping[str, AnyPath], inputs: Iterable[AnyPath] = (), model: AnyPath | None = None
) -> None:
    """Check that all output files can be written, and create their folders.

    A temporary file is created beside each output for a moment. The outputs themselves are not
    created.

    Args:
        files: output files, by the flag that names them.
        inputs: files and folders that the run reads.
        model: the model that the run reads, if it is a folder or a file.
    """
    inputs = list(inputs)

    seen: dict[Path, str] = {}
    for name, path in files.items():
        place = resolved(path)
        if model is not None and _is_model_file(place, resolved(model)):
            raise UserError(
                f"{name} {path} would overwrite a file of the model {model}: give another file"
            )
        _require_no_input(name, path, inputs)
        if place in seen:
            raise UserError(f"{name} {path} would overwrite {seen[place]}: give another file")
        if place.is_dir():
            raise UserError(f"{name} {path} is a folder: give the file to write")
        if place.exists() and not place.is_file():
            raise UserError(f"{name} {path} is a device: give the file to write")
        seen[place] = f"{name} {path}"

    # Create a file beside each output. Its name is as long as the temporary name of `whole_file`.
    for name, path in files.items():
        folder = resolved(path).parent
        with _named_as_output(name, path):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                prefix=f".{Path(path).name}.", suffix=".tmp", dir=folder
            ):
                pass


def _require_no_input(name: str, path: AnyPath, inputs: Iterable[AnyPath]) -> None:
    """Raise `UserError` if an output is one of the inputs, or lies in an input folder.

    Also raised if the output's name is too long for the file system.
    """
    with _named_as_output(name, path):
        Path(path).exists()  # raises OSError if the name is too long
    place = resolved(path)
    for read in inputs:
        source = resolved(Path(read).expanduser())
        if _is_same(place, source):
            raise UserError(f"{name} {path} would overwrite the input {read}: give another path")
        if source.is_dir() and place.is_relative_to(source):
            raise UserError(f"{name} {path} lies in the input {read}: give another path")


def _is_same(place: Path, other: Path) -> bool:
    """Tell whether two paths exist and are the same file or folder, perhaps by a hard link."""
    return place.exists() and other.exists() and place.samefile(other)


def _is_model_file(path: Path, model: Path) -> bool:
    """Tell whether writing an output would change the files of a model.

    Outside of the model's folder, nothing would. In it, an output must have no name of
    `MODEL_FILES`. A new file of another name is allowed. An existing file may be replaced only if
    it is a report of ours, or a file that such a report describes.

    Returns:
        True if the output must be refused.
    """
    folder = model
    if model.is_file():
        folder = model.parent
        if folder.name == "onnx":  # the folder of an ONNX export lies in the model's folder
            folder = folder.parent
    if not folder.is_dir() or not path.is_relative_to(folder):
        return False
    if any(fnmatch(path.name, pattern) for pattern in MODEL_FILES):
        return True
    beside = path.with_name(f"{path.name}.json")  # describes mined pairs or links
    return path.is_file() and not _is_report(path) and not _is_report(beside)


def _is_report(path: Path) -> bool:
    """Tell whether a file is a JSON report that a command of ours wrote."""
    try:
        content = read_json(path)
    except (UserError, OSError, RecursionError):
        return False
    return isinstance(content, dict) and {"protocol", "versions"} <= content.keys()


@contextmanager
def _named_as_output(name: str, path: AnyPath) -> Iterator[None]:
    """Turn an `OSError` within the block into a `UserError` that names an output.

    This is a context manager.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise UserError(f"{name} {path} cannot be written: {reason}") from error


@contextmanager
def _created_folder(folder: Path) -> Iterator[None]:
    """Create a folder before the block, and check that it can be written.

    If it is empty when the block ends, remove it. This is a context manager.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
        yield
    finally:
        with suppress(OSError):  # not empty
            folder.rmdir()


@contextmanager
def claimed(path: AnyPath, name: str = "") -> Iterator[None]:
    """Lock a file or folder until the block ends, to keep other runs away from it.

    This is a context manager. The lock is the file `.NAME.lock` beside the path. The system frees
    it when the process ends, even if the process is killed. If the file system has no locks, only
    a warning is logged.

    Args:
        path: a file or a folder, which need not exist.
        name: the argument that names it, for the error message.
    """
    path = Path(path)
    absolute = path.resolve()
    absolute.parent.mkdir(parents=True, exist_ok=True)
    lock_file = absolute.with_name(f".{absolute.name}.lock")
    lock = FileLock(lock_file)

    try:
        lock.acquire(blocking=False)
    except Timeout:
        named = f"{name} {path}".strip()
        raise ClaimedError(
            f"{named} is in use by another run: wait until it ends, or give another path"
        ) from None
    except (OSError, NotImplementedError) as error:  # some network file systems have no locks
        logger.warning(
            "%s cannot be locked (%s): start no other run that writes there", path, one_line(error)
        )

    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # Windows removes no open file
                lock_file.unlink()
            lock.release()
