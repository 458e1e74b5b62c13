"""What a schedule must satisfy before anything runs it.

Each check raises :class:`ScheduleError` with the stage, the instruction and what was expected there. All of
them are linear in the number of instructions, so they run before every launch.
"""

from __future__ import annotations

from collections.abc import Callable

from eeplan.errors import ScheduleError
from eeplan.sim.schedule import Instruction, Op, Schedule

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


def validate(schedule: Schedule) -> None:
    """Check a 1F1B schedule completely.

    Raises:
        ScheduleError: an instruction out of range; an op without its input; a microbatch not exactly once
            forward and once backward on a stage; the two ends of a channel in different order; a deadlock
            (names the pending instructions); more or fewer microbatches in flight than min(P-i, M).
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


def check_inputs_and_counts(schedule: Schedule) -> None:
    """Each microbatch passes each stage exactly once forward and once backward, and every instruction comes
    after the one whose result it uses.

    Raises:
        ScheduleError.
    """
    for stage, program in enumerate(schedule.stages):
        needs = _prerequisites(stage, schedule.num_stages)
        done: dict[Op, set[int]] = {op: set() for op in needs}
        for position, instruction in enumerate(program):
            op, microbatch = instruction.op, instruction.microbatch
            if microbatch in done[op]:
                raise ScheduleError(
                    f"{_where(stage, position, instruction)}: second {_NAMES[op]} of microbatch "
                    f"{microbatch}; expected exactly one"
                )
            for need in needs[op]:
                if microbatch not in done[need]:
                    raise ScheduleError(
                        f"{_where(stage, position, instruction)}: expected {need.value}{microbatch} (the "
                        f"{_NAMES[need]} of microbatch {microbatch}) before it on this stage"
                    )
            done[op].add(microbatch)
        for op, seen in done.items():
            if len(seen) != schedule.num_microbatches:
                missing = min(set(range(schedule.num_microbatches)) - seen)
                raise ScheduleError(
                    f"stage {stage}: {_NAMES[op]} of microbatch {missing} ({op.value}{missing}) is missing; "
                    f"expected exactly one for each of {schedule.num_microbatches} microbatches"
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
    """Stage i (from 0) holds min(P-i, M) microbatches at its fullest, as the memory model assumes.

    Raises:
        ScheduleError.
    """
    for stage, count in enumerate(in_flight(schedule)):
        expected = min(schedule.num_stages - stage, schedule.num_microbatches)
        if count != expected:
            raise ScheduleError(
                f"stage {stage}: up to {count} microbatches in flight; expected min(P-i, M) = {expected}, "
                "which the memory prediction is made for"
            )


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Most microbatches of each stage that are between their forward and their backward at once."""
    peaks = []
    for program in schedule.stages:
        live = peak = 0
        for instruction in program:
            if instruction.op is Op.FORWARD:
                live += 1
                peak = max(peak, live)
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


def _prerequisites(stage: int, num_stages: int) -> dict[Op, tuple[Op, ...]]:
    """What must precede each op of a microbatch on this stage; has no key for ops it cannot have."""
    first, last = stage == 0, stage == num_stages - 1
    needs: dict[Op, tuple[Op, ...]] = {
        Op.FORWARD: () if first else (Op.RECV_FORWARD,),
        Op.BACKWARD: (Op.FORWARD,) if last else (Op.FORWARD, Op.RECV_BACKWARD),
    }
    if not first:
        needs |= {Op.RECV_FORWARD: (), Op.SEND_BACKWARD: (Op.BACKWARD,)}
    if not last:
        needs |= {Op.SEND_FORWARD: (Op.FORWARD,), Op.RECV_BACKWARD: ()}
    return needs


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
