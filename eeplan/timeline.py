"""What happened, or would happen, during one iteration: spans, messages and memory over time.

The simulator and the executor both produce a :class:`Timeline`, so that prediction and measurement can be
laid over each other op by op. Times are integer nanoseconds from the start of the iteration.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

SpanKind = Literal["forward", "backward", "grad_sync", "optimizer"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Span:
    """One op of one stage. ``microbatch`` is -1 for ops that belong to the whole iteration."""

    stage: int
    kind: SpanKind
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor sent between neighbouring stages: hidden states forward, their gradients backward."""

    source: int
    target: int
    direction: Direction
    microbatch: int
    size_bytes: int
    send_ns: int
    receive_ns: int


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Live bytes of a stage from ``time_ns`` until the next sample."""

    time_ns: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """All spans, messages and memory samples of one iteration, per stage in time order."""

    spans: tuple[tuple[Span, ...], ...]
    messages: tuple[Message, ...] = ()
    memory: tuple[tuple[MemorySample, ...], ...] = ()

    @property
    def num_stages(self) -> int:
        """Pipeline stages (P)."""
        return len(self.spans)

    @property
    def end_ns(self) -> int:
        """End of the last span of any stage."""
        return max((stage[-1].end_ns for stage in self.spans if stage), default=0)

    @property
    def pipeline_ns(self) -> int:
        """From 0 to the end of the last forward or backward: the schedule's makespan."""
        compute = ("forward", "backward")
        return max((s.end_ns for stage in self.spans for s in stage if s.kind in compute), default=0)

    def busy_ns(self, stage: int) -> int:
        """Time that ``stage`` spends in forward and backward ops."""
        return sum(s.end_ns - s.start_ns for s in self.spans[stage] if s.kind in ("forward", "backward"))

    def peak_bytes(self, stage: int) -> int:
        """Largest live bytes of ``stage``; 0 when memory was not recorded."""
        return max((sample.live_bytes for sample in self.memory[stage]), default=0) if self.memory else 0

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts, for files."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Timeline:
        """Inverse of :meth:`to_json`."""
        return cls(
            spans=tuple(tuple(Span(**span) for span in stage) for stage in document["spans"]),
            messages=tuple(Message(**message) for message in document["messages"]),
            memory=tuple(tuple(MemorySample(**s) for s in stage) for stage in document["memory"]),
        )
