"""Which sequences run and which wait: the bookkeeping that every engine needs."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from eeplan.runtime.decode.requests import Request

RunningT = TypeVar("RunningT")


class Admission(Generic[RunningT]):
    """Sequences by number, first come, first served.

    Args:
        max_running: sequences that decode at once; others wait.
    """

    def __init__(self, max_running: int) -> None:
        self._max_running = max_running
        self._next = 0
        self._waiting: OrderedDict[int, tuple[Request, float]] = OrderedDict()
        self.running: dict[int, RunningT] = {}
        """What an engine keeps of those that have joined, in the order in which they did."""

    @property
    def waiting(self) -> int:
        """How many were submitted and have not joined."""
        return len(self._waiting)

    def submit(self, request: Request) -> int:
        """Let a sequence wait; its number."""
        number = self._next
        self._next += 1
        self._waiting[number] = (request, time.perf_counter())
        return number

    def admit(self, join: Callable[[int, Request, float], RunningT]) -> None:
        """Let those that wait join while there is room.

        Args:
            join: given number, request, and when it was submitted, what to keep of it.
        """
        while self._waiting and len(self.running) < self._max_running:
            number, (request, since_s) = self._waiting.popitem(last=False)
            self.running[number] = join(number, request, since_s)

    def drop(self, number: int) -> bool:
        """Forget a sequence, whether it runs or waits; whether it ran. Unknown ones are ignored."""
        self._waiting.pop(number, None)
        return self.running.pop(number, None) is not None

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()
        self.running.clear()
