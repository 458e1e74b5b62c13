"""Discrete-event simulation of a schedule: every span, every message, and memory over time.

Exact integer nanoseconds and one total order of events (time, then stage), so equal inputs give equal
timelines. A stage runs its compute ops strictly in schedule order; a link between neighbours carries one
message at a time in each direction, for latency + bytes / bandwidth. Not covered: compute slowed down by
communication, collectives, and anything outside the pipeline part of an iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Literal

from eeplan.errors import ScheduleError
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.schedule import Instruction, Op, Schedule
from eeplan.sim.validators import COUNTERPART, PEER_OFFSET, describe_pending
from eeplan.timeline import MemorySample, Message, Span, Timeline

Transport = Literal["asynchronous", "rendezvous"]
"""``asynchronous``: sends and receives return at once (isend, irecv posted ahead), and the op that uses a
message waits for it. ``rendezvous``: sender and receiver both wait until both have posted and the transfer is
done, as Megatron's blocking p2p does."""


def simulate(schedule: Schedule, costs: PipelineCosts, transport: Transport = "asynchronous") -> Timeline:
    """Run a schedule.

    Returns:
        Timeline in integer ns from 0: spans and memory samples per stage in time order, messages in the order
        their transfers are started.

    Raises:
        ScheduleError: the run got stuck; names the pending instructions.
        ValueError: costs of another number of stages.
    """
    if costs.num_stages != schedule.num_stages or len(costs.backward_ns) != schedule.num_stages:
        raise ValueError(
            f"costs of {costs.num_stages} forward and {len(costs.backward_ns)} backward stages do not fit a "
            f"schedule of {schedule.num_stages}"
        )
    run = {"asynchronous": _run_asynchronous, "rendezvous": _run_rendezvous}[transport]
    spans, messages = run(schedule, costs)
    return Timeline(
        spans=tuple(map(tuple, spans)),
        messages=tuple(messages),
        memory=tuple(memory_over_time(stage, spans[stage], costs) for stage in range(costs.num_stages)),
    )


def message_ns(costs: PipelineCosts) -> tuple[int, ...]:
    """Time of one message over each of the P-1 links: latency + bytes / bandwidth, to the nearest ns."""
    sizes = per_stage(costs.output_bytes, costs.num_stages)[:-1]
    return tuple(costs.latency_ns + round(size / costs.bytes_per_s * 1e9) for size in sizes)


def per_stage(values: Sequence[int], num_stages: int) -> Sequence[int]:
    """``values``, or zeros where a cost was left out.

    Raises:
        ValueError: given for another number of stages.
    """
    if values and len(values) != num_stages:
        raise ValueError(f"{len(values)} values were given for {num_stages} stages")
    return values or (0,) * num_stages


def memory_over_time(stage: int, spans: Sequence[Span], costs: PipelineCosts) -> tuple[MemorySample, ...]:
    """Live bytes of one stage from its spans: static, plus what each microbatch in flight keeps (from the
    start of its forward to the end of its backward), plus the transient of the op that runs.

    An op that follows another at once starts from what that one left; only the new level is recorded.
    """
    static, kept, forward_transient, backward_transient = (
        per_stage(values, costs.num_stages)[stage]
        for values in (
            costs.static_bytes,
            costs.kept_bytes,
            costs.forward_transient_bytes,
            costs.backward_transient_bytes,
        )
    )
    live = static
    changed_ns = 0
    samples: list[MemorySample] = []
    for span in spans:
        if span.start_ns > changed_ns:
            samples.append(MemorySample(changed_ns, live))
        if span.kind == "forward":
            live += kept
            samples.append(MemorySample(span.start_ns, live + forward_transient))
        else:
            samples.append(MemorySample(span.start_ns, live + backward_transient))
            live -= kept
        changed_ns = span.end_ns
    samples.append(MemorySample(changed_ns, live))
    return tuple(samples)


def _run_asynchronous(schedule: Schedule, costs: PipelineCosts) -> tuple[list[list[Span]], list[Message]]:
    num_stages, last = schedule.num_stages, schedule.num_stages - 1
    durations = message_ns(costs)
    sizes = per_stage(costs.output_bytes, num_stages)
    unknown: list[int | None] = [None] * schedule.num_microbatches
    present: list[int | None] = [0] * schedule.num_microbatches
    # When the input of each microbatch's forward and backward is on its stage; None while it is under way.
    hidden_ns = [present if stage == 0 else unknown.copy() for stage in range(num_stages)]
    gradient_ns = [present if stage == last else unknown.copy() for stage in range(num_stages)]
    link_free_ns = {"forward": [0] * num_stages, "backward": [0] * num_stages}
    positions = [0] * num_stages
    waiting = [False] * num_stages
    spans: list[list[Span]] = [[] for _ in range(num_stages)]
    messages: list[Message] = []
    events = [(0, stage) for stage in range(num_stages)]

    def send(instruction: Instruction, stage: int, now_ns: int) -> None:
        microbatch = instruction.microbatch
        forward = instruction.op is Op.SEND_FORWARD
        link, target = (stage, stage + 1) if forward else (stage - 1, stage - 1)
        direction: Literal["forward", "backward"] = "forward" if forward else "backward"
        start_ns = max(now_ns, link_free_ns[direction][link])
        arrival_ns = link_free_ns[direction][link] = start_ns + durations[link]
        (hidden_ns if forward else gradient_ns)[target][microbatch] = arrival_ns
        messages.append(Message(stage, target, direction, microbatch, sizes[link], start_ns, arrival_ns))
        if waiting[target]:
            waiting[target] = False
            heappush(events, (now_ns, target))

    while events:
        now_ns, stage = heappop(events)
        program = schedule.stages[stage]
        position = positions[stage]
        while position < len(program):
            instruction = program[position]
            op, microbatch = instruction.op, instruction.microbatch
            if op is Op.FORWARD or op is Op.BACKWARD:
                forward = op is Op.FORWARD
                ready_ns = (hidden_ns if forward else gradient_ns)[stage][microbatch]
                if ready_ns is None:
                    waiting[stage] = True
                    break
                start_ns = max(now_ns, ready_ns)
                end_ns = start_ns + (costs.forward_ns if forward else costs.backward_ns)[stage]
                kind: Literal["forward", "backward"] = "forward" if forward else "backward"
                spans[stage].append(Span(stage, kind, microbatch, start_ns, end_ns))
                heappush(events, (end_ns, stage))
                position += 1
                break
            if op is Op.SEND_FORWARD or op is Op.SEND_BACKWARD:
                send(instruction, stage, now_ns)
            position += 1
        positions[stage] = position
    _require_finished(schedule, positions)
    return spans, messages


def _run_rendezvous(schedule: Schedule, costs: PipelineCosts) -> tuple[list[list[Span]], list[Message]]:
    durations = message_ns(costs)
    sizes = per_stage(costs.output_bytes, schedule.num_stages)
    positions = [0] * schedule.num_stages
    # What a stage has posted and waits for; events come in time order, so the second to post starts it.
    posted: list[Instruction | None] = [None] * schedule.num_stages
    spans: list[list[Span]] = [[] for _ in range(schedule.num_stages)]
    messages: list[Message] = []
    events = [(0, stage) for stage in range(schedule.num_stages)]
    while events:
        now_ns, stage = heappop(events)
        program = schedule.stages[stage]
        if positions[stage] == len(program):
            continue
        instruction = program[positions[stage]]
        op, microbatch = instruction.op, instruction.microbatch
        if op is Op.FORWARD or op is Op.BACKWARD:
            forward = op is Op.FORWARD
            end_ns = now_ns + (costs.forward_ns if forward else costs.backward_ns)[stage]
            spans[stage].append(Span(stage, "forward" if forward else "backward", microbatch, now_ns, end_ns))
            positions[stage] += 1
            heappush(events, (end_ns, stage))
            continue
        peer = stage + PEER_OFFSET[op]
        other = posted[peer]
        if other is None or other.op is not COUNTERPART[op] or other.microbatch != microbatch:
            posted[stage] = instruction
            continue
        link = min(stage, peer)
        end_ns = now_ns + durations[link]
        source, target = (stage, peer) if op in (Op.SEND_FORWARD, Op.SEND_BACKWARD) else (peer, stage)
        direction: Literal["forward", "backward"] = "forward" if source < target else "backward"
        messages.append(Message(source, target, direction, microbatch, sizes[link], now_ns, end_ns))
        posted[peer] = None
        for end in (stage, peer):
            positions[end] += 1
            heappush(events, (end_ns, end))
    _require_finished(schedule, positions)
    return spans, messages


def _require_finished(schedule: Schedule, positions: Sequence[int]) -> None:
    pending = {s: p for s, p in enumerate(positions) if p < len(schedule.stages[s])}
    if pending:
        raise ScheduleError(f"the simulation cannot go on; {describe_pending(schedule, pending)}")
