"""A Ray cluster, on which a command encodes, searches and prepares text with the results of one process.

The functions are those of one process; Ray runs them on its nodes, and once more where a worker or a node is lost.
Every node needs this project, and a model that it can load: of the Hub, or in a folder at the same path. Workers begin
in the folder of the command, where their node has it, so that relative paths are the same. Texts to encode, finished
vectors and results are with the process of the command, so that a stopped one goes on as without a cluster; text to
prepare lies in a folder that all nodes share.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dap.arguments import arg, require_least
from dap.errors import UserError, one_line

#: Times that a task begins again after its worker or its node is lost.
RETRIES = 10


@dataclass
class ClusterArguments:
    """Where the work is done."""

    ray: str | None = arg(
        None, "Encode and search on a Ray cluster: its address (auto or HOST:PORT), or 'local' for one of this "
        "machine's cores."
    )  # fmt: skip
    ray_actors: int | None = arg(
        None, "Encoders on the cluster. Default: one a GPU, without GPUs as many as fit."
    )
    ray_cpus_per_actor: int = arg(1, "CPU cores and threads of an encoder.")

    def __post_init__(self) -> None:
        require_least(self, ray_actors=1, ray_cpus_per_actor=1)
        if self.ray is None and self.ray_actors:
            raise UserError(
                f"--ray_actors {self.ray_actors} is for a cluster: name it with --ray, or leave it out"
            )
        if self.ray and (launched := os.environ.get("WORLD_SIZE", "1")) != "1":
            raise UserError(
                f"--ray {self.ray} in {launched} processes: start one, without accelerate launch, or leave --ray out"
            )

    @contextmanager
    def connect(self) -> Iterator[None]:
        """The cluster, if one is asked for, as long as the block lasts; "local" starts one, and ends it.

        Nothing is done where this process is connected already.

        Raises:
            ValueError: Ray is not installed, nothing answers, or tasks fail for good; in one line.
        """
        if not self.ray:
            yield
            return
        try:
            import ray
        except ImportError as error:
            raise UserError(
                "--ray needs Ray: pip install --constraint constraints.txt '.[ray]'"
            ) from error
        is_first = not ray.is_initialized()
        try:
            if is_first:
                _join(self.ray, self.ray_cpus_per_actor)
            yield
        except ray.exceptions.RayError as error:
            raise _plain(error, self.ray) from error
        finally:
            if is_first:
                ray.shutdown()


def _join(address: str, threads: int) -> None:
    """Joins the cluster; polars and tokenizers have so many threads in a worker, and not each of a node's cores."""
    import ray

    folder = os.getcwd()

    def start() -> None:
        if os.path.isdir(folder):
            os.chdir(folder)

    limits = dict.fromkeys(("POLARS_MAX_THREADS", "RAYON_NUM_THREADS"), str(threads))
    workers = {"env_vars": limits, "worker_process_setup_hook": start}
    host, _, port = address.rpartition(":")
    try:
        if (
            port.isdigit() and "/" not in host
        ):  # where nothing answers, Ray goes on trying for many minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env=workers)
    except ValueError as error:
        raise UserError(
            f"--ray {address}: {one_line(error)}; give auto, HOST:PORT or local"
        ) from error
    except (OSError, RuntimeError) as error:
        odd = [each for each in (error, error.__cause__) if "Version mismatch" in str(each)]
        reason = (
            f"{one_line(odd[0])}; give all nodes and this process the same"
            if odd
            else one_line(error)
        )
        raise UserError(f"--ray {address}: {reason}") from error


def _plain(error: Exception, address: str) -> Exception:
    """What a task raised, as it is; an error of Ray itself as one line that says what to do."""
    from ray import exceptions

    cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
    if not isinstance(cause, exceptions.RayError):
        return cause
    reason = str(cause).strip().splitlines()[-1][:300]  # below a traceback from elsewhere
    if isinstance(cause, exceptions.ObjectStoreFullError | exceptions.OutOfDiskError):
        reason = (
            "a node's object store is full, and so is the disk that takes what has no room there: start that node "
            "with a larger --object-store-memory, or with --object-spilling-directory on a disk with more room"
        )
    elif not getattr(cause, "actor_init_failed", False):
        reason += "; run again to go on"
    return UserError(f"--ray {address}: {reason}")


def duration(seconds: float) -> str:
    """Seconds as text, from a thousand on in hours.

    >>> duration(261.8), duration(9000)
    ('262 s', '2.5 h')
    """
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds / 3600:.3g} h"


def each_on_cluster(
    function: Callable[..., Any], calls: Mapping[str, tuple]
) -> Iterator[tuple[str, Any]]:
    """Calls a function as tasks of the connected cluster, which begin again where a worker or a node is lost.

    Args:
        calls: what a call is about, such as a file -> its arguments.

    Yields:
        What a call is about and what it returned, as they end; a `UserError` of those whose workers are always lost.
    """
    import ray

    task = ray.remote(max_retries=RETRIES)(lambda *call: function(*call))
    jobs = {task.remote(*call).future(): name for name, call in calls.items()}
    for job in as_completed(jobs):
        error, name = job.exception(), jobs[job]
        if isinstance(error, ray.exceptions.RayError) and not isinstance(
            error, ray.exceptions.RayTaskError
        ):
            yield (
                name,
                UserError(
                    f"{name}: its worker was lost {RETRIES + 1} times, perhaps for want of memory"
                ),
            )
        else:
            yield name, job.result()
