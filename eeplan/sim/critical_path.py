"""What the length of an iteration hangs on: the critical path, and how often it passes each op.

The graph of a simulated iteration has a node for every op and every message. A node starts when the last of
those it waits for has ended; that one is *tight*. Following tight nodes back from the end of the iteration
gives a critical path: its ops and messages follow each other without a gap, so that their times add up to the
makespan. An op that the path passes n times makes the iteration n ns longer when it takes one ns more.

Ties: several paths can be equally long. Then the iteration gets longer by the *most* that any of them passes
the op, and shorter only by the *least* that all of them do (the right and left derivatives of a maximum of
sums). Both are exact as long as the change is smaller than the distance to the next shorter path.

What a node waits for:

    asynchronous    an op: the op before it on its stage, and its message. A message: the op before its send,
                    and the message before it on its link.
    rendezvous      an op: the instruction before it on its stage. A message: the one before it on each end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eeplan.sim.engine import Transport
from eeplan.sim.schedule import Instruction, Op, Schedule
from eeplan.timeline import Direction, Message, Span, SpanKind, Timeline

Weights = NDArray[np.int64]

_KINDS: Mapping[Op, SpanKind] = {Op.FORWARD: "forward", Op.BACKWARD: "backward"}


class Place(NamedTuple):
    """Nodes that take equally long: an op of a stage, or the messages over a link in one direction."""

    what: str
    """``forward``, ``backward``, ``turn_forward``, ``turn_backward``, ``bare_forward`` (see
    ``PipelineCosts``), or ``message_forward``, ``message_backward``."""
    stage: int
    """Of a message the earlier one."""


@dataclass(frozen=True, slots=True)
class EventGraph:
    """A simulated iteration with what each of its nodes waits for."""

    nodes: tuple[Span | Message, ...]
    waits_for: tuple[tuple[int, ...], ...]
    """Of each node the tight ones; the stage's own op comes first."""
    last: tuple[int, ...]
    """Of each stage, the node whose end is the stage's end."""
    places: tuple[Place, ...]


def event_graph(schedule: Schedule, timeline: Timeline, transport: Transport = "asynchronous") -> EventGraph:
    """The graph of ``timeline``, which ``engine.simulate`` made of ``schedule`` with this transport.

    Raises:
        ValueError: the timeline does not follow from the schedule: a node starts after all that it waits for,
            as with ``before_gradient_ns`` or a measured timeline.
    """
    nodes: list[Span | Message] = [span for spans in timeline.spans for span in spans]
    spans = {(s.stage, s.kind, s.microbatch): i for i, s in enumerate(nodes) if isinstance(s, Span)}
    messages = {
        (m.direction, m.source, m.microbatch): len(nodes) + i for i, m in enumerate(timeline.messages)
    }
    nodes += timeline.messages
    waits: list[list[int]] = [[] for _ in nodes]
    link = _asynchronous if transport == "asynchronous" else _rendezvous
    last = tuple(link(schedule, stage, spans, messages, waits) for stage in range(schedule.num_stages))
    if transport == "asynchronous":
        _queue_up(nodes, len(spans), waits)
    ends, starts = [_end_ns(node) for node in nodes], [_start_ns(node) for node in nodes]
    tight = tuple(
        tuple(dict.fromkeys(other for other in others if ends[other] == starts[index]))
        for index, others in enumerate(waits)
    )
    for index, others in enumerate(tight):
        if not others and starts[index] > 0:
            raise ValueError(
                f"{nodes[index]} starts after all that it waits for; simulate the schedule again"
            )
    return EventGraph(tuple(nodes), tight, last, tuple(_place(node, schedule) for node in nodes))


def critical_path(graph: EventGraph, stage: int | None = None) -> tuple[Span | Message, ...]:
    """One longest chain from the start of the iteration to the end of ``stage``, in time order.

    Of equally long ones, the chain that stays on a stage as long as it can, seen from its end.

    Args:
        stage: where it ends; None takes the first of those that end last.
    """
    if stage is None:
        stage = max(range(len(graph.last)), key=lambda s: (_end_ns(graph.nodes[graph.last[s]]), -s))
    index = graph.last[stage]
    path = [index]
    while graph.waits_for[index]:
        index = graph.waits_for[index][0]
        path.append(index)
    return tuple(graph.nodes[index] for index in reversed(path))


def times_passed(
    graph: EventGraph, stages: Sequence[int], weights: Mapping[Place, Weights]
) -> tuple[Weights, Weights]:
    """How often critical paths pass things, over all of equal length.

    Args:
        stages: whose ends the iteration hangs on.
        weights: [D] for each place: how often one node there contains each of D things.

    Returns:
        [D] least, [D] most: for each thing by itself over all critical paths.
    """
    sinks = list(dict.fromkeys(graph.last[stage] for stage in stages))
    order = _topological(graph, sinks)
    uses = dict.fromkeys(order, 0)
    for index in order:
        for other in graph.waits_for[index]:
            uses[other] += 1
    known: dict[int, tuple[Weights, Weights]] = {}
    for index in order:
        own = weights[graph.places[index]]
        others = graph.waits_for[index]
        if others:
            least, most = known[others[0]]
            for other in others[1:]:
                least, most = np.minimum(least, known[other][0]), np.maximum(most, known[other][1])
            known[index] = (least + own, most + own)
        else:
            known[index] = (own, own)
        for other in others:
            uses[other] -= 1
            # Only the front of the graph is kept, a few nodes per stage.
            if not uses[other] and other not in sinks:
                del known[other]
    found = [known[sink] for sink in sinks]
    return np.min([least for least, _ in found], axis=0), np.max([most for _, most in found], axis=0)


def deciding_stages(ends_ns: Sequence[int], iteration_ns: Callable[[Sequence[int]], int]) -> tuple[int, ...]:
    """Stages whose end the iteration hangs on: it takes a ns longer when they do.

    Args:
        iteration_ns: from the ends of all stages to the iteration, gradient synchronisation included.
    """
    now = iteration_ns(ends_ns)
    later = ([end + (other == stage) for other, end in enumerate(ends_ns)] for stage in range(len(ends_ns)))
    found = tuple(stage for stage, changed in enumerate(later) if iteration_ns(changed) > now)
    # Nothing but a synchronisation that hides the pipeline could make it hang on none of them.
    return found or (max(range(len(ends_ns)), key=lambda stage: ends_ns[stage]),)


def _asynchronous(
    schedule: Schedule,
    stage: int,
    spans: Mapping[tuple[int, SpanKind, int], int],
    messages: Mapping[tuple[Direction, int, int], int],
    waits: list[list[int]],
) -> int:
    last = -1
    for instruction in schedule.stages[stage]:
        if instruction.op in _KINDS:
            index = spans[stage, _KINDS[instruction.op], instruction.microbatch]
            arrives = messages.get(_input(instruction, stage))
            waits[index] += [last] * (last >= 0) + ([] if arrives is None else [arrives])
            last = index
        elif instruction.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD):
            waits[messages[_sent(instruction, stage)]].append(last)
    return last


def _rendezvous(
    schedule: Schedule,
    stage: int,
    spans: Mapping[tuple[int, SpanKind, int], int],
    messages: Mapping[tuple[Direction, int, int], int],
    waits: list[list[int]],
) -> int:
    last = -1
    for instruction in schedule.stages[stage]:
        if instruction.op in _KINDS:
            index = spans[stage, _KINDS[instruction.op], instruction.microbatch]
        else:
            index = messages[_sent(instruction, stage)]
        waits[index] += [last] * (last >= 0)
        last = index
    return last


def _queue_up(nodes: Sequence[Span | Message], first: int, waits: list[list[int]]) -> None:
    """Messages of a link wait for the one before; those of a timeline are in the order of their start."""
    before: dict[tuple[Direction, int], int] = {}
    for index, message in enumerate(nodes[first:], start=first):
        assert isinstance(message, Message), "messages come after spans"
        link = message.direction, message.source
        if link in before:
            waits[index].append(before[link])
        before[link] = index


def _input(instruction: Instruction, stage: int) -> tuple[Direction, int, int]:
    """Key of the message that an op takes in, whether there is one or not."""
    if instruction.op is Op.FORWARD:
        return "forward", stage - 1, instruction.microbatch
    return "backward", stage + 1, instruction.microbatch


def _sent(instruction: Instruction, stage: int) -> tuple[Direction, int, int]:
    """Key of the message of a send or receive."""
    match instruction.op:
        case Op.SEND_FORWARD:
            return "forward", stage, instruction.microbatch
        case Op.RECV_FORWARD:
            return "forward", stage - 1, instruction.microbatch
        case Op.SEND_BACKWARD:
            return "backward", stage, instruction.microbatch
        case _:
            return "backward", stage + 1, instruction.microbatch


def _topological(graph: EventGraph, sinks: Sequence[int]) -> list[int]:
    """Everything that leads to the sinks, each after what it waits for, by time."""
    order: list[int] = []
    state: dict[int, bool] = {}
    for sink in sinks:
        stack = [sink]
        while stack:
            index = stack[-1]
            if index not in state:
                state[index] = False
                stack += [other for other in graph.waits_for[index] if other not in state]
                continue
            stack.pop()
            if not state[index]:
                state[index] = True
                order.append(index)
    # Sorting is stable, so ops of no time stay behind those they wait for.
    return sorted(order, key=lambda index: _end_ns(graph.nodes[index]))


def _place(node: Span | Message, schedule: Schedule) -> Place:
    if isinstance(node, Message):
        return Place(f"message_{node.direction}", min(node.source, node.target))
    kind = schedule.kind(node.microbatch) if schedule.kinds else None
    if kind is not None and kind.turns_on(node.stage):
        return Place(f"turn_{node.kind}", node.stage)
    if kind is not None and node.kind == "forward" and not kind.has(Op.BACKWARD, node.stage):
        return Place("bare_forward", node.stage)
    return Place(node.kind, node.stage)


def _start_ns(node: Span | Message) -> int:
    return node.send_ns if isinstance(node, Message) else node.start_ns


def _end_ns(node: Span | Message) -> int:
    return node.receive_ns if isinstance(node, Message) else node.end_ns
