"""Busy and idle time of every stage, the idle time by phase of the schedule.

Phases are those of 1F1B (Narayanan et al. 2021, 2.2: warm-up, steady state, cool-down), cut where a stage's
ops change their pattern, so that the explicit bubbles of EE-LLM 3.3 lie where they can be filled:

    warm-up     until the stage's first backward of a microbatch that is no warm-up insert begins: the wait
                for the first input, and the bubble between the warm-up forwards and that backward (region A)
    steady      from there to the end of its last forward
    cool-down   from there to the end of the pipeline part: the waits between the last backwards (region B),
                and the time after the stage's own last op

A stage whose forwards are all done before its first backward has no steady phase. The three idle times and
the busy time add up exactly to the makespan. Works on measured timelines as well as on simulated ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from eeplan.sim.schedule import Kind
from eeplan.timeline import Span, Timeline


@dataclass(frozen=True, slots=True)
class StageTime:
    """Where the time of one stage goes during the pipeline part of an iteration."""

    busy_ns: int
    warm_up_ns: int
    """Idle in the warm-up; the next two likewise."""
    steady_ns: int
    cool_down_ns: int

    @property
    def idle_ns(self) -> int:
        """All of it."""
        return self.warm_up_ns + self.steady_ns + self.cool_down_ns


def stage_times(timeline: Timeline, kinds: Sequence[Kind] = ()) -> tuple[StageTime, ...]:
    """Split the pipeline part of every stage.

    Args:
        timeline: simulated or measured; ops of one stage do not overlap.
        kinds: of each microbatch; empty when all are full.
    """
    end_ns = timeline.pipeline_ns
    return tuple(_stage_time(spans, end_ns, kinds) for spans in timeline.spans)


def _stage_time(spans: Sequence[Span], end_ns: int, kinds: Sequence[Kind]) -> StageTime:
    ops = [span for span in spans if span.kind in ("forward", "backward")]
    inserts = {microbatch for microbatch, kind in enumerate(kinds) if kind.name == "warm_up"}
    backwards = (s.start_ns for s in ops if s.kind == "backward" and s.microbatch not in inserts)
    first_backward_ns = next(backwards, end_ns)
    last_forward_ns = max((s.end_ns for s in ops if s.kind == "forward"), default=0)
    cuts = (0, first_backward_ns, max(first_backward_ns, last_forward_ns), end_ns)
    # No op crosses a cut: each is the start or the end of one.
    busy = [
        sum(s.end_ns - s.start_ns for s in ops if start <= s.start_ns and s.end_ns <= end)
        for start, end in pairwise(cuts)
    ]
    idle = [end - start - used for (start, end), used in zip(pairwise(cuts), busy, strict=True)]
    return StageTime(sum(busy), *idle)
