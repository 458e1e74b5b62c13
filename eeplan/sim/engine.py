"""Discrete-event simulation of a schedule: every span, every message, and memory over time.

Exact integer nanoseconds and one total order of events (time, then stage), so equal inputs give equal
timelines. A stage runs its compute ops strictly in schedule order; a link between neighbours carries one
message at a time in each direction, for the link's message time. Not covered: compute slowed down by
communication, collectives, and anything outside the pipeline part of an iteration.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush

from eeplan.errors import ScheduleError
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.costs import Transport as Transport
from eeplan.sim.schedule import Instruction, Kind, Op, Schedule
from eeplan.sim.validators import describe_pending
from eeplan.timeline import Direction, MemorySample, Message, Span, Timeline

_Durations = tuple[Sequence[int], Sequence[int]]
"""Nanoseconds of each microbatch's forward and backward on one stage."""

# Looking a member up in its Enum costs as much as the rest of a loop's turn.
_FORWARD, _BACKWARD = Op.FORWARD, Op.BACKWARD
_SEND_FORWARD, _RECV_FORWARD = Op.SEND_FORWARD, Op.RECV_FORWARD
_SEND_BACKWARD, _RECV_BACKWARD = Op.SEND_BACKWARD, Op.RECV_BACKWARD


def simulate(schedule: Schedule, costs: PipelineCosts, transport: Transport | None = None) -> Timeline:
    """Run a schedule.

    Args:
        transport: instead of that of ``costs``.

    Returns:
        Timeline in integer ns from 0: spans and memory samples per stage in time order, messages in the order
        their transfers are started.

    Raises:
        ScheduleError: the run got stuck; names the pending instructions.
        ValueError: costs of another number of stages, or ``before_gradient_ns`` with rendezvous.
    """
    if costs.num_stages != schedule.num_stages or len(costs.backward_ns) != schedule.num_stages:
        raise ValueError(
            f"costs of {costs.num_stages} forward and {len(costs.backward_ns)} backward stages do not fit a "
            f"schedule of {schedule.num_stages}"
        )
    transport = transport or costs.transport
    if transport == "rendezvous" and any(costs.before_gradient_ns):
        raise ValueError(
            "before_gradient_ns needs asynchronous messages; a blocking receive would be waited for"
        )
    run = {"asynchronous": _run_asynchronous, "rendezvous": _run_rendezvous}[transport]
    with _collector_paused():
        spans, messages = run(schedule, costs)
        memory = tuple(
            memory_over_time(stage, spans[stage], costs, schedule.kinds) for stage in range(costs.num_stages)
        )
        return Timeline(spans=tuple(map(tuple, spans)), messages=tuple(messages), memory=memory)


def message_ns(costs: PipelineCosts) -> tuple[int, ...]:
    """Time of one message over each of the P-1 links, zeros where messages take none.

    Raises:
        ValueError: given for another number of links.
    """
    num_links = costs.num_stages - 1
    if costs.message_ns and len(costs.message_ns) != num_links:
        raise ValueError(f"{len(costs.message_ns)} message times were given for {num_links} links")
    return costs.message_ns or (0,) * num_links


def stage_ends_ns(schedule: Schedule, costs: PipelineCosts) -> tuple[int, ...]:
    """When each stage is done, its last message included if that is a rendezvous; see :func:`simulate`."""
    timeline = simulate(schedule, costs)
    ends = [spans[-1].end_ns if spans else 0 for spans in timeline.spans]
    if costs.transport == "rendezvous":
        for message in timeline.messages:
            for stage in (message.source, message.target):
                ends[stage] = max(ends[stage], message.receive_ns)
    return tuple(ends)


def per_stage(values: Sequence[int], num_stages: int) -> Sequence[int]:
    """``values``, or zeros where a cost was left out.

    Raises:
        ValueError: given for another number of stages.
    """
    if values and len(values) != num_stages:
        raise ValueError(f"{len(values)} values were given for {num_stages} stages")
    return values or (0,) * num_stages


def memory_over_time(
    stage: int, spans: Sequence[Span], costs: PipelineCosts, kinds: Sequence[Kind] = ()
) -> tuple[MemorySample, ...]:
    """Live bytes of one stage from its spans: static, plus what each microbatch in flight keeps (from the
    start of its forward to the end of its backward), plus the transient of the op that runs.

    An op that follows another at once starts from what that one left; only the new level is recorded. A
    forward whose backward never comes to the stage is charged what a kept one has at its peak, and leaves
    nothing: it computes the same without keeping, so that is an upper bound.

    Args:
        kinds: of each microbatch; empty when all are full.
    """
    static, kept, forward_transient, backward_transient, turn_kept = (
        per_stage(values, costs.num_stages)[stage]
        for values in (
            costs.static_bytes,
            costs.kept_bytes,
            costs.forward_transient_bytes,
            costs.backward_transient_bytes,
            costs.turn_kept_bytes or costs.kept_bytes,
        )
    )
    levels = {
        kind: (turn_kept if kind.turns_on(stage) else kept, kind.has(Op.BACKWARD, stage))
        for kind in set(kinds)
    }
    live = static
    changed_ns = 0
    samples: list[MemorySample] = []
    mine, is_kept = kept, True
    for span in spans:
        if kinds:
            mine, is_kept = levels[kinds[span.microbatch]]
        if span.start_ns > changed_ns:
            samples.append(MemorySample(changed_ns, live))
        if span.kind == "forward":
            live += mine
            samples.append(MemorySample(span.start_ns, live + forward_transient))
            if not is_kept:
                live -= mine
        else:
            samples.append(MemorySample(span.start_ns, live + backward_transient))
            live -= mine
        changed_ns = span.end_ns
    samples.append(MemorySample(changed_ns, live))
    return tuple(samples)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """A large run makes half a million small objects without cycles. Searching for cycles while they
    pile up would take a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(slots=True)
class _Link:
    """One direction between two neighbours."""

    source: int
    target: int
    direction: Direction
    size_bytes: int
    duration_ns: int
    arrivals_ns: list[int | None]
    """Per microbatch, when its message is at the target; None before it is sent."""
    free_ns: int = 0
    posted: int | None = None
    """Rendezvous: microbatch of the send or receive that waits for its counterpart."""

    def message(self, microbatch: int, start_ns: int) -> Message:
        """Carry a message from ``start_ns`` on."""
        self.free_ns = self.arrivals_ns[microbatch] = end_ns = start_ns + self.duration_ns
        return Message(
            self.source, self.target, self.direction, microbatch, self.size_bytes, start_ns, end_ns
        )


def _durations(schedule: Schedule, costs: PipelineCosts, stage: int) -> _Durations:
    forward_ns, backward_ns = costs.forward_ns[stage], costs.backward_ns[stage]
    if not schedule.kinds:
        count = schedule.num_microbatches
        return [forward_ns] * count, [backward_ns] * count
    turn = (
        (costs.turn_forward_ns or costs.forward_ns)[stage],
        (costs.turn_backward_ns or costs.backward_ns)[stage],
    )
    bare = (costs.bare_forward_ns or costs.forward_ns)[stage], 0
    known = {
        kind: turn
        if kind.turns_on(stage)
        else ((forward_ns, backward_ns) if kind.has(Op.BACKWARD, stage) else bare)
        for kind in set(schedule.kinds)
    }
    forwards, backwards = zip(*(known[kind] for kind in schedule.kinds), strict=True)
    return forwards, backwards


def _links(schedule: Schedule, costs: PipelineCosts) -> tuple[list[_Link], list[_Link]]:
    """Links that carry hidden states and links that carry gradients; both by the earlier stage."""
    sizes = per_stage(costs.output_bytes, costs.num_stages)
    hidden: list[_Link] = []
    gradients: list[_Link] = []
    for stage, duration_ns in enumerate(message_ns(costs)):
        size_bytes = sizes[stage]
        for links, source, target in ((hidden, stage, stage + 1), (gradients, stage + 1, stage)):
            direction: Direction = "forward" if source < target else "backward"
            unsent: list[int | None] = [None] * schedule.num_microbatches
            if direction == "backward" and schedule.kinds:
                # Where a warm-up insert turns, its backward awaits no gradient.
                unsent = [0 if kind.turns_on(stage) else None for kind in schedule.kinds]
            links.append(_Link(source, target, direction, size_bytes, duration_ns, unsent))
    return hidden, gradients


def _run_asynchronous(schedule: Schedule, costs: PipelineCosts) -> tuple[list[list[Span]], list[Message]]:
    hidden, gradients = _links(schedule, costs)
    durations = [_durations(schedule, costs, stage) for stage in range(schedule.num_stages)]
    present: list[int | None] = [0] * schedule.num_microbatches
    # When the input of each microbatch's forward and backward is on its stage.
    forward_ready_ns = [present, *(link.arrivals_ns for link in hidden)]
    backward_ready_ns = [*(link.arrivals_ns for link in gradients), present]
    early_ns = per_stage(costs.before_gradient_ns, schedule.num_stages)
    positions = [0] * schedule.num_stages
    waiting = [False] * schedule.num_stages
    spans: list[list[Span]] = [[] for _ in positions]
    messages: list[Message] = []
    events = [(0, stage) for stage in range(schedule.num_stages)]
    while events:
        now_ns, stage = heappop(events)
        program = schedule.stages[stage]
        position = positions[stage]
        while position < len(program):
            instruction = program[position]
            op, microbatch = instruction.op, instruction.microbatch
            if op is _FORWARD or op is _BACKWARD:
                ready_ns = (forward_ready_ns if op is _FORWARD else backward_ready_ns)[stage][microbatch]
                if ready_ns is None:
                    waiting[stage] = True
                    break
                start_ns = ready_ns if ready_ns > now_ns else now_ns
                if early_ns[stage] and op is _BACKWARD:
                    # What needs no gradient has begun as soon as the stage was free, perhaps in the past.
                    idle_ns = spans[stage][-1].end_ns
                    start_ns = max(idle_ns, ready_ns - early_ns[stage])
                span = _span(durations, stage, instruction, start_ns)
                spans[stage].append(span)
                heappush(events, (span.end_ns, stage))
                position += 1
                break
            if op is _SEND_FORWARD or op is _SEND_BACKWARD:
                link = hidden[stage] if op is _SEND_FORWARD else gradients[stage - 1]
                messages.append(link.message(microbatch, link.free_ns if link.free_ns > now_ns else now_ns))
                if waiting[link.target]:
                    waiting[link.target] = False
                    heappush(events, (now_ns, link.target))
            position += 1
        positions[stage] = position
    _require_finished(schedule, positions)
    return spans, messages


def _run_rendezvous(schedule: Schedule, costs: PipelineCosts) -> tuple[list[list[Span]], list[Message]]:
    hidden, gradients = _links(schedule, costs)
    durations = [_durations(schedule, costs, stage) for stage in range(schedule.num_stages)]
    positions = [0] * schedule.num_stages
    spans: list[list[Span]] = [[] for _ in positions]
    messages: list[Message] = []
    events = [(0, stage) for stage in range(schedule.num_stages)]
    while events:
        now_ns, stage = heappop(events)
        if positions[stage] == len(schedule.stages[stage]):
            continue
        instruction = schedule.stages[stage][positions[stage]]
        op = instruction.op
        if op is _FORWARD or op is _BACKWARD:
            span = _span(durations, stage, instruction, now_ns)
            spans[stage].append(span)
            positions[stage] += 1
            heappush(events, (span.end_ns, stage))
            continue
        links = hidden if op is _SEND_FORWARD or op is _RECV_FORWARD else gradients
        link = links[stage if op is _SEND_FORWARD or op is _RECV_BACKWARD else stage - 1]
        if link.posted is None:
            link.posted = instruction.microbatch
        elif link.posted == instruction.microbatch:
            # Events come in time order, so the later of the two is here and the transfer starts now. Two ends
            # that disagree on the microbatch wait for ever.
            messages.append(link.message(instruction.microbatch, now_ns))
            link.posted = None
            for end in (link.source, link.target):
                positions[end] += 1
                heappush(events, (link.free_ns, end))
    _require_finished(schedule, positions)
    return spans, messages


def _span(
    durations: Sequence[tuple[Sequence[int], Sequence[int]]],
    stage: int,
    instruction: Instruction,
    start_ns: int,
) -> Span:
    microbatch = instruction.microbatch
    forward_ns, backward_ns = durations[stage]
    if instruction.op is _FORWARD:
        return Span(stage, "forward", microbatch, start_ns, start_ns + forward_ns[microbatch])
    return Span(stage, "backward", microbatch, start_ns, start_ns + backward_ns[microbatch])


def _require_finished(schedule: Schedule, positions: Sequence[int]) -> None:
    pending = {s: p for s, p in enumerate(positions) if p < len(schedule.stages[s])}
    if pending:
        raise ScheduleError(f"the simulation cannot go on; {describe_pending(schedule, pending)}")
