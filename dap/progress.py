"""Progress: a bar for each step, or one for a whole run."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm

#: Whether to show a bar, or what gives one instead of `tqdm`.
Progress = bool | Callable[..., Any]
#: Of a whole run's bar.
FORMAT = "{l_bar}{bar}| {n:.0f} of {total:.0f} planned seconds [{elapsed}<{remaining}]"


def bar_of(progress: Progress, **options: Any) -> Any:
    """A step's bar, to be entered and updated; options are `tqdm`'s."""
    return (
        progress(**options)
        if callable(progress)
        else tqdm(**options, unit_scale=True, disable=not progress)
    )


class WholeRun:
    """One bar over the steps of a run, in the seconds that each of them takes by a plan; each calls it in its turn.

    >>> run = WholeRun([30, 10])
    >>> with run("encoding", total=4) as bar:
    ...     bar.update(1)
    >>> run.bar.n, run.bar.total
    (7.5, 40)
    """

    def __init__(self, seconds: Iterable[float]) -> None:
        self._left = deque(seconds)
        self.bar = tqdm(total=sum(self._left), bar_format=FORMAT)

    @contextmanager
    def __call__(self, desc: str, total: int, **options: Any) -> Iterator["WholeRun"]:
        self.bar.set_description(desc)
        self._unit = self._left.popleft() / total
        yield self
        if not self._left:
            self.bar.close()

    def update(self, count: int) -> None:
        self.bar.update(count * self._unit)
