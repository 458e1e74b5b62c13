"""How long exits take in training, measured inside the ops that contain them.

An exit's forward is timed as it is. Its backward is part of the one backward call of its stage: autograd runs
what was recorded last first, so the call begins with the exits, the deepest one first, and each is over when
the gradient of its input is there.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from eeplan.runtime.clock import Clock, Mark

Part = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class ExitSpan:
    """One exit's forward or backward of one microbatch, between marks of the device's clock."""

    name: str
    part: Part
    start: Mark
    end: Mark


@dataclass(slots=True)
class ExitTimer:
    """Notes when exits run; one for each stage."""

    clock: Clock
    spans: list[ExitSpan] = field(default_factory=list)
    _reached: Mark = None
    """Up to where the running backward call is accounted for."""

    @contextlib.contextmanager
    def forward(self, name: str) -> Iterator[None]:
        """Around an exit's forward, its loss included."""
        start = self.clock.mark()
        yield
        self.spans.append(ExitSpan(name, "forward", start, self.clock.mark()))

    def watched(self, name: str, hidden: Tensor) -> Tensor:
        """The exit's input, as a view whose gradient tells that the exit's backward is over."""
        if not hidden.requires_grad:
            return hidden
        view = hidden.view_as(hidden)

        def is_over(_: Tensor) -> None:
            now = self.clock.mark()
            self.spans.append(ExitSpan(name, "backward", self._reached, now))
            self._reached = now

        view.register_hook(is_over)
        return view

    def begin_backward(self) -> None:
        """Right before a backward call."""
        self._reached = self.clock.mark()

    def take(self) -> list[ExitSpan]:
        """What was noted since the last call."""
        taken, self.spans = self.spans, []
        return taken


ExitSeconds = dict[str, dict[Part, float]]
"""By exit and part."""


def mean_seconds(clock: Clock, spans: Sequence[ExitSpan]) -> ExitSeconds:
    """Mean over an iteration's microbatches."""
    times = clock.resolve([mark for span in spans for mark in (span.start, span.end)])
    found: dict[tuple[str, Part], list[int]] = {}
    for span, start_ns, end_ns in zip(spans, times[::2], times[1::2], strict=True):
        found.setdefault((span.name, span.part), []).append(end_ns - start_ns)
    means: ExitSeconds = {}
    for (name, part), durations_ns in found.items():
        means.setdefault(name, {})[part] = statistics.fmean(durations_ns) / 1e9
    return means


def median_seconds(iterations: Sequence[ExitSeconds]) -> ExitSeconds:
    """Median over iterations of what :func:`mean_seconds` gives."""
    keys = {(name, part) for seconds in iterations for name, parts in seconds.items() for part in parts}
    medians: ExitSeconds = {}
    for name, part in sorted(keys):
        seen = [seconds[name][part] for seconds in iterations if part in seconds.get(name, {})]
        medians.setdefault(name, {})[part] = statistics.median(seen)
    return medians
