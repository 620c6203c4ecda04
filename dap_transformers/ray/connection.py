"""Connect to a Ray cluster, on which a command encodes, searches and prepares text.

The results equal those of one process, because Ray runs the same functions, only on other nodes. If
a worker or a node is lost, Ray runs its tasks again.

- Every node needs this project and must be able to load the model: from the Hub, or from a folder
  at the same path.
- Workers start in the command's folder if their node has that folder, so relative paths mean the
  same there.
- Texts to encode, finished vectors and results stay with the command's process. A stopped command
  therefore resumes as it does without a cluster.
- Text to prepare lies in a folder that all nodes share.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from dap_transformers.errors import UserError, one_line
from dap_transformers.options import arg

#: How often Ray starts a task again after its worker or node is lost.
RETRIES = 10
#: Seconds to wait for an answer from HOST:PORT.
CONNECT_TIMEOUT = 10


@dataclass
class Cluster:
    """The Ray cluster to use, if any, and the encoders to start on it."""

    ray: str | None = arg(
        None,
        "Encode and search on a Ray cluster: its address (auto or HOST:PORT), or 'local' to use "
        "this machine's cores.",
    )
    ray_cpus_per_actor: int = arg(
        1, "CPU cores and threads per encoder. There is one per GPU, or without GPUs all that fit."
    )

    def __post_init__(self) -> None:
        launched = os.environ.get("WORLD_SIZE", "1")
        if self.ray and launched != "1":
            raise UserError(
                f"ray={self.ray} in {launched} processes: start one, without accelerate launch"
            )

    @contextmanager
    def connect(self) -> Iterator[None]:
        """Connect to the cluster while the block runs. Without an address, do nothing.

        The address "local" starts a cluster on this machine and stops it afterwards. If this
        process is connected already, the connection is kept.
        """
        if not self.ray:
            yield
            return
        import ray

        was_connected = ray.is_initialized()
        try:
            if not was_connected:
                _start_ray(self.ray, self.ray_cpus_per_actor)
            yield
        except ray.exceptions.RayError as error:
            raise _readable(error) from error
        finally:
            if not was_connected:
                ray.shutdown()


def _start_ray(address: str, threads: int) -> None:
    """Connect this process to a Ray cluster. Workers start in this folder if their node has it."""
    import ray

    folder = os.getcwd()

    def enter_folder() -> None:
        if os.path.isdir(folder):
            os.chdir(folder)

    runtime = {
        "env_vars": {"POLARS_MAX_THREADS": str(threads), "RAYON_NUM_THREADS": str(threads)},
        "worker_process_setup_hook": enter_folder,
    }
    host, _, port = address.rpartition(":")
    try:
        if port.isdigit() and "/" not in host:  # Ray itself would retry for minutes
            place = host.strip("[]"), int(port)
            socket.create_connection(place, timeout=CONNECT_TIMEOUT).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR", runtime_env=runtime)
    except (ValueError, OSError, RuntimeError) as error:
        # Ray names a mismatch of versions only in the cause of its error.
        mismatch = "Version mismatch" in str(error.__cause__)
        reason = one_line(error.__cause__ if mismatch else error)
        raise UserError(f"the Ray cluster {address}: {reason}") from error


def _readable(error: Exception) -> Exception:
    """Return the error inside a task that Ray reports, or a `UserError` if Ray itself failed."""
    from ray import exceptions

    cause = error.cause if isinstance(error, exceptions.RayTaskError) else error
    if not isinstance(cause, exceptions.RayError):
        return cause
    if isinstance(cause, exceptions.ObjectStoreFullError | exceptions.OutOfDiskError):
        return UserError(
            "the object store of a Ray node is full, and so is the disk that takes what has no "
            "room there: start that node with a larger --object-store-memory, or with "
            "--object-spilling-directory on a disk with more room"
        )
    # Ray puts the traceback of the worker above the last line.
    reason = str(cause).strip().splitlines()[-1][:300]
    if not getattr(cause, "actor_init_failed", False):
        reason += "; run the command again to resume"
    return UserError(f"Ray: {reason}")


def each_on_cluster(
    function: Callable[..., Any], calls: Mapping[str, tuple]
) -> Iterator[tuple[str, Any]]:
    """Call a function as tasks of the connected cluster. Yield names and results as the calls end.

    A call is started again if its worker or node is lost, up to `RETRIES` times.
    """
    import ray

    task = ray.remote(max_retries=RETRIES)(lambda *call: function(*call))
    names = {task.remote(*call).future(): name for name, call in calls.items()}
    for future in as_completed(names):
        yield names[future], future.result()
