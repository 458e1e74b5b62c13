"""What a schedule must satisfy before anything runs it.

Each check raises :class:`ScheduleError` with the stage, the instruction and what was expected there. All of
them are linear in the number of instructions, so they run before every launch.
"""

from __future__ import annotations

from collections.abc import Callable

from eeplan.errors import ScheduleError
from eeplan.sim.fill import Fill
from eeplan.sim.schedule import Instruction, Kind, Op, Schedule

PEER_OFFSET = {Op.SEND_FORWARD: 1, Op.RECV_FORWARD: -1, Op.SEND_BACKWARD: -1, Op.RECV_BACKWARD: 1}
"""Stage at the other end of a message, relative to the stage of the instruction."""

COUNTERPART = {
    Op.SEND_FORWARD: Op.RECV_FORWARD,
    Op.RECV_FORWARD: Op.SEND_FORWARD,
    Op.SEND_BACKWARD: Op.RECV_BACKWARD,
    Op.RECV_BACKWARD: Op.SEND_BACKWARD,
}
"""Instruction at the other end of a message."""

_SENDS = (Op.SEND_FORWARD, Op.SEND_BACKWARD)
_NAMES = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.SEND_FORWARD: "send of the hidden states",
    Op.RECV_FORWARD: "receive of the hidden states",
    Op.SEND_BACKWARD: "send of the gradient",
    Op.RECV_BACKWARD: "receive of the gradient",
}


_PREREQUISITES = {
    Op.FORWARD: (Op.RECV_FORWARD,),
    Op.BACKWARD: (Op.FORWARD, Op.RECV_BACKWARD),
    Op.SEND_FORWARD: (Op.FORWARD,),
    Op.SEND_BACKWARD: (Op.BACKWARD,),
    Op.RECV_FORWARD: (),
    Op.RECV_BACKWARD: (),
}
"""What must precede each op of a microbatch on its stage, where the stage has it for that microbatch."""


def validate(schedule: Schedule) -> None:
    """Check a 1F1B schedule completely, with or without filled bubbles.

    Raises:
        ScheduleError: an instruction or kind out of range; an op without its input; a microbatch not exactly
            once forward and once backward on each stage of its kind; the two ends of a channel in different
            order; a deadlock (names the pending instructions); more or fewer microbatches in flight than the
            memory prediction is made for, min(P-i, M) without inserts.
    """
    check_labels(schedule)
    check_inputs_and_counts(schedule)
    check_channels(schedule)
    check_deadlock(schedule, rendezvous=False)
    check_deadlock(schedule, rendezvous=True)
    check_in_flight(schedule)


def check_labels(schedule: Schedule) -> None:
    """Microbatches exist, and messages go to stages that exist.

    Raises:
        ScheduleError.
    """
    if not schedule.stages or schedule.num_microbatches < 1:
        raise ScheduleError(
            f"schedule has {schedule.num_stages} stages and {schedule.num_microbatches} microbatches; "
            "expected at least one of each"
        )
    _check_kinds(schedule)
    for stage, program in enumerate(schedule.stages):
        for position, instruction in enumerate(program):
            if not 0 <= instruction.microbatch < schedule.num_microbatches or instruction.chunk != 0:
                raise ScheduleError(
                    f"{_where(stage, position, instruction)}: microbatch {instruction.microbatch} of chunk "
                    f"{instruction.chunk}; expected 0 to {schedule.num_microbatches - 1} of chunk 0"
                )
            peer = stage + PEER_OFFSET.get(instruction.op, 0)
            if not 0 <= peer < schedule.num_stages:
                raise ScheduleError(
                    f"{_where(stage, position, instruction)}: message to or from stage {peer}; expected a "
                    f"neighbour among stages 0 to {schedule.num_stages - 1}"
                )


def _check_kinds(schedule: Schedule) -> None:
    if schedule.kinds and len(schedule.kinds) != schedule.num_microbatches:
        raise ScheduleError(
            f"schedule has {schedule.num_microbatches} microbatches and kinds for {len(schedule.kinds)}"
        )
    last = schedule.num_stages - 1
    for kind, microbatch in {kind: m for m, kind in enumerate(schedule.kinds)}.items():
        first, turn = kind.first_backward, kind.last_forward
        fits = {
            "full": first == 0 and turn == last,
            "warm_up": first == 0 and 0 <= turn < last,
            "truncated": 0 < first <= last and turn == last,
        }
        if not fits[kind.name]:
            raise ScheduleError(
                f"microbatch {microbatch} is '{kind.name}' with its forward up to stage {turn} and its "
                f"backward down to stage {first}; that does not fit stages 0 to {last}"
            )


def check_inputs_and_counts(schedule: Schedule) -> None:
    """Each microbatch passes each stage of its kind exactly once forward and once backward, and every
    instruction comes after those whose results it uses.

    Raises:
        ScheduleError.
    """
    for stage, program in enumerate(schedule.stages):
        having = {op: schedule.having(op, stage) for op in Op}
        done: dict[Op, set[int]] = {op: set() for op in Op}
        for position, instruction in enumerate(program):
            op, microbatch = instruction.op, instruction.microbatch
            if microbatch in done[op]:
                raise ScheduleError(
                    f"{_where(stage, position, instruction)}: second {_NAMES[op]} of microbatch "
                    f"{microbatch}; expected exactly one"
                )
            if not having[op][microbatch]:
                raise ScheduleError(
                    f"{_where(stage, position, instruction)}: {_NAMES[op]} of microbatch {microbatch}, which "
                    f"is {_describe(schedule.kind(microbatch))} and has none here"
                )
            for need in _PREREQUISITES[op]:
                if having[need][microbatch] and microbatch not in done[need]:
                    raise ScheduleError(
                        f"{_where(stage, position, instruction)}: expected {need.value}{microbatch} (the "
                        f"{_NAMES[need]} of microbatch {microbatch}) before it on this stage"
                    )
            done[op].add(microbatch)
        for op, seen in done.items():
            expected = sum(having[op])
            if len(seen) != expected:
                missing = min(m for m, here in enumerate(having[op]) if here and m not in seen)
                raise ScheduleError(
                    f"stage {stage}: {_NAMES[op]} of microbatch {missing} ({op.value}{missing}) is missing; "
                    f"expected exactly one for each of {expected} microbatches"
                )


def check_channels(schedule: Schedule) -> None:
    """On both ends of each channel the same microbatches pass in the same order.

    Raises:
        ScheduleError.
    """
    for stage in range(schedule.num_stages - 1):
        ends = ((stage, Op.SEND_FORWARD, stage + 1), (stage + 1, Op.SEND_BACKWARD, stage))
        for source, send, target in ends:
            sent = [i.microbatch for i in schedule.stages[source] if i.op is send]
            received = [
                (position, i)
                for position, i in enumerate(schedule.stages[target])
                if i.op is COUNTERPART[send]
            ]
            for microbatch, (position, instruction) in zip(sent, received, strict=False):
                if microbatch != instruction.microbatch:
                    raise ScheduleError(
                        f"{_where(target, position, instruction)}: stage {source} sends microbatch "
                        f"{microbatch} at this point of the channel; expected both ends in the same order"
                    )
            if len(sent) != len(received):
                raise ScheduleError(
                    f"channel from stage {source} to stage {target}: {len(sent)} {send.value} but "
                    f"{len(received)} {COUNTERPART[send].value}; expected as many receives as sends"
                )


def check_deadlock(schedule: Schedule, *, rendezvous: bool) -> None:
    """Run the instructions of each stage strictly one after the other, without times.

    A receive always waits for its message; with ``rendezvous`` a send also waits for its receive.

    Raises:
        ScheduleError: the run got stuck; names each unfinished stage's pending instruction.
    """
    run = _run_rendezvous if rendezvous else _run_buffered
    pending = run(schedule)
    if pending:
        kind = "rendezvous sends" if rendezvous else "asynchronous sends"
        raise ScheduleError(f"deadlock with {kind}; {describe_pending(schedule, pending)}")


def check_in_flight(schedule: Schedule) -> None:
    """Stage i (from 0) holds min(P-i, M) microbatches and its warm-up inserts at its fullest, as the memory
    model assumes (:meth:`Fill.most_in_flight`).

    Raises:
        ScheduleError.
    """
    fill = Fill.of(schedule)
    for stage, count in enumerate(in_flight(schedule)):
        expected = fill.most_in_flight(stage, schedule.num_stages)
        if count != expected:
            inserts = fill.warm_up_on(stage)
            raise ScheduleError(
                f"stage {stage}: up to {count} microbatches in flight; expected min(P-i, M) "
                f"{f'and {inserts} inserts ' if inserts else ''}= {expected}, which the memory prediction is "
                "made for"
            )


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Most microbatches of each stage that are between their forward and their backward at once.

    A forward without a backward counts while it runs.
    """
    peaks = []
    for stage, program in enumerate(schedule.stages):
        is_kept = schedule.having(Op.BACKWARD, stage)
        live = peak = 0
        for instruction in program:
            if instruction.op is Op.FORWARD:
                peak = max(peak, live + 1)
                live += is_kept[instruction.microbatch]
            elif instruction.op is Op.BACKWARD:
                live -= 1
        peaks.append(peak)
    return tuple(peaks)


def describe_pending(schedule: Schedule, pending: dict[int, int]) -> str:
    """Text of a stuck run; ``pending`` maps a stage to the position of the instruction it waits at."""
    waits = (
        f"stage {stage} waits at instruction {position} ({schedule.stages[stage][position]})"
        for stage, position in sorted(pending.items())
    )
    return "pending: " + ", ".join(waits)


def _where(stage: int, position: int, instruction: Instruction) -> str:
    return f"stage {stage}, instruction {position} ({instruction})"


def _describe(kind: Kind) -> str:
    if kind.name == "warm_up":
        return f"a warm-up insert up to stage {kind.last_forward}"
    return "full" if kind.name == "full" else f"truncated at stage {kind.first_backward}"


def _run_buffered(schedule: Schedule) -> dict[int, int]:
    """Stages that cannot finish when sends return at once, with the position each waits at."""
    arrived: dict[tuple[int, Op], int] = {}

    def proceed(stage: int, position: int, positions: list[int]) -> tuple[bool, int | None]:
        op = schedule.stages[stage][position].op
        if op is Op.FORWARD or op is Op.BACKWARD:
            return True, None
        if op in _SENDS:
            peer = stage + PEER_OFFSET[op]
            channel = (peer, COUNTERPART[op])
            arrived[channel] = arrived.get(channel, 0) + 1
            return True, peer
        waiting = arrived.get((stage, op), 0)
        arrived[(stage, op)] = max(waiting - 1, 0)
        return waiting > 0, None

    return _run(schedule, proceed)


def _run_rendezvous(schedule: Schedule) -> dict[int, int]:
    """Stages that cannot finish when sends wait for their receive, with the position each waits at."""

    def proceed(stage: int, position: int, positions: list[int]) -> tuple[bool, int | None]:
        op = schedule.stages[stage][position].op
        if op is Op.FORWARD or op is Op.BACKWARD:
            return True, None
        peer = stage + PEER_OFFSET[op]
        program = schedule.stages[peer]
        if positions[peer] == len(program) or program[positions[peer]].op is not COUNTERPART[op]:
            return False, None
        positions[peer] += 1
        return True, peer

    return _run(schedule, proceed)


def _run(
    schedule: Schedule, proceed: Callable[[int, int, list[int]], tuple[bool, int | None]]
) -> dict[int, int]:
    """Advance every stage as far as ``proceed`` lets it; it says whether the instruction at a position is
    done, and which other stage that may have freed."""
    positions = [0] * schedule.num_stages
    runnable = list(range(schedule.num_stages))
    while runnable:
        stage = runnable.pop()
        program = schedule.stages[stage]
        while positions[stage] < len(program):
            done, freed = proceed(stage, positions[stage], positions)
            if freed is not None:
                runnable.append(freed)
            if not done:
                break
            positions[stage] += 1
    return {s: p for s, p in enumerate(positions) if p < len(schedule.stages[s])}
