"""The device's own clock, on one time base for all ranks of a machine.

On a CPU a mark is the time itself. On a GPU it is an event in the stream, resolved to a time when asked for,
so that taking a mark never makes the device wait. ``time.monotonic_ns`` counts from the machine's start and
is the same for all processes on it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

Mark = Any
"""An int of nanoseconds on a CPU, a CUDA event on a GPU."""


class Clock:
    """Marks points in the device's work and says later when they happened."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self._base_event: Any = None
        self._base_ns = 0

    def start(self) -> None:
        """Tie the device's clock to the machine's; call once an iteration, while the device is idle."""
        if self.is_cuda:
            torch.cuda.synchronize()
            self._base_event = torch.cuda.Event(enable_timing=True)
            self._base_event.record()
            self._base_event.synchronize()
            self._base_ns = time.monotonic_ns()

    def mark(self) -> Mark:
        """Now, in the order of the device's work."""
        if not self.is_cuda:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def resolve(self, marks: Sequence[Mark]) -> list[int]:
        """Machine time of each mark in nanoseconds; waits for the device to reach the last one."""
        if not self.is_cuda:
            return list(marks)
        torch.cuda.synchronize()
        return [self._base_ns + int(self._base_event.elapsed_time(mark) * 1e6) for mark in marks]
