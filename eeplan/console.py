"""Progress on stderr: rich bars on a terminal, plain lines elsewhere. Results never go through here."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_ITERATION = re.compile(r"(?:^|\s)iteration\s+(\d+)\s*/\s*(\d+)")


class Progress(Protocol):
    """Where a long command says what it is doing."""

    def step(self, title: str, *, announce: bool = False) -> AbstractContextManager[None]:
        """Name the step that the body is, and say how long it took.

        ``announce``: where there is no bar, also write a line when it begins.
        """

    def update(self, done: int, total: int, what: str = "") -> None:
        """``done`` of ``total`` parts of the current step are finished; ``what`` is the one under way."""

    def line(self, text: str) -> None:
        """Show a line of a log."""


@contextlib.contextmanager
def open_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Progress for this command, bars or lines as ``stream`` (stderr when None) allows."""
    stream = stream or sys.stderr
    if not stream.isatty():
        yield PlainProgress(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as RichProgress

    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[what]}[/]"),
    )
    with RichProgress(*columns, console=Console(file=stream)) as bars:
        yield TerminalProgress(bars)


class PlainProgress:
    """A line at the end of a step, and until then one whenever nothing was said for a while."""

    def __init__(
        self, stream: TextIO, *, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._interval_s = interval_s
        self._clock = clock
        self._last_s = float("-inf")
        self._title = ""

    @contextlib.contextmanager
    def step(self, title: str, *, announce: bool = False) -> Iterator[None]:
        """See :class:`Progress`."""
        self._title = title
        start_s = self._last_s = self._clock()
        if announce:
            self.line(f"{title} …")
        yield
        self.line(f"{title}: done in {self._clock() - start_s:.1f} s")

    def update(self, done: int, total: int, what: str = "") -> None:
        """See :class:`Progress`."""
        if self._clock() - self._last_s >= self._interval_s:
            self.line(f"{self._title}: {done}/{total}{' ' + what if what else ''}")

    def line(self, text: str) -> None:
        """See :class:`Progress`."""
        self._last_s = self._clock()
        print(text, file=self._stream, flush=True)


class TerminalProgress:
    """A live bar per step; log lines scroll by above the bars."""

    def __init__(self, bars: RichProgress) -> None:
        self._bars = bars
        self._task: TaskID | None = None

    @contextlib.contextmanager
    def step(self, title: str, *, announce: bool = False) -> Iterator[None]:
        """See :class:`Progress`; the bar itself announces."""
        task = self._task = self._bars.add_task(title, total=None, what="")
        yield
        # A step that never said how much there is to do counts as one part.
        total = self._bars.tasks[self._bars.task_ids.index(task)].total or 1
        self._bars.update(task, total=total, completed=total, what="")

    def update(self, done: int, total: int, what: str = "") -> None:
        """See :class:`Progress`."""
        if self._task is not None:
            self._bars.update(self._task, completed=done, total=total, what=what)

    def line(self, text: str) -> None:
        """See :class:`Progress`."""
        self._bars.console.print(text, markup=False, highlight=False, soft_wrap=True)


def follow_training(progress: Progress) -> Callable[[str], None]:
    """A sink for the lines of a training job: shows them, and moves the bar at each iteration's line."""

    def on_line(text: str) -> None:
        progress.line(text)
        if match := _ITERATION.search(text):
            progress.update(int(match[1]), int(match[2]))

    return on_line
