"""Run the same function over many arguments, here or in several processes (knows nothing of text or models)."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from dap.errors import UserError

logger = logging.getLogger(__name__)


@contextmanager
def workers(count: int) -> Iterator[Callable[[str, Callable[..., None], list[tuple]], None]]:
    """What calls a function with each of some arguments, here or in `count` processes, and logs what is done."""
    if count == 1:
        yield lambda name, function, calls: _follow(name, calls, (function(*call) for call in calls))
        return
    before = {name: os.environ.get(name) for name in ("POLARS_MAX_THREADS", "OMP_NUM_THREADS")}
    os.environ.update({name: value or "1" for name, value in before.items()})  # read by the new processes
    context, arguments = get_context("spawn"), (os.getpid(),)
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker, initargs=arguments)
    try:
        yield lambda name, function, calls: _follow(name, calls, _in_pool(pool, function, calls))
    except BrokenProcessPool as error:
        raise UserError(
            "a process was ended from outside, perhaps for want of memory; give the same command again to go on, "
            "with a smaller --num_workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
        os.environ.update({name: value for name, value in before.items() if value is not None})
        for name in (name for name, value in before.items() if value is None):
            del os.environ[name]


def _in_pool(pool: ProcessPoolExecutor, function: Callable[..., None], calls: list[tuple]) -> Iterator[None]:
    for done in as_completed([pool.submit(function, *call) for call in calls]):
        yield done.result()


def _follow(name: str, calls: list[tuple], results: Iterator[None]) -> None:
    started = time.perf_counter()
    for number, _ in enumerate(results, 1):
        logger.info("%s: %d of %d done, %.0f s", name, number, len(calls), time.perf_counter() - started)


def _start_worker(parent: int) -> None:
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when its parent was killed: it would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
