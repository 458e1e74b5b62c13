"""The engine's answer without spans, for many cost candidates at once.

Covers the asynchronous transport and any schedule that sends right after each op, as ``with_messages`` does.
Promises the engine's end times to the nanosecond (tested). One numpy step handles one op of all candidates,
so its price is that of a schedule's ops, nearly whatever the number of candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from eeplan.errors import ScheduleError
from eeplan.sim.schedule import Instruction, Op, Schedule

Nanoseconds = NDArray[np.int64]


def stage_ends_ns(
    schedule: Schedule, forward_ns: Nanoseconds, backward_ns: Nanoseconds, message_ns: Sequence[int]
) -> Nanoseconds:
    """When each stage ends its last op; the makespan is the largest of a row.

    Args:
        schedule: P stages; its messages are implied by its ops and may be left out.
        forward_ns: [candidates, P], one microbatch's forward.
        backward_ns: [candidates, P].
        message_ns: P-1 times of one message over each link, either way.

    Returns:
        [candidates, P].

    Raises:
        ScheduleError: the ops wait for each other.
    """
    num_candidates, num_stages = forward_ns.shape
    last = num_stages - 1
    # One row per stage, so that each step reads and writes contiguous memory.
    durations = {
        Op.FORWARD: np.ascontiguousarray(forward_ns.T),
        Op.BACKWARD: np.ascontiguousarray(backward_ns.T),
    }
    clock = np.zeros((num_stages, num_candidates), dtype=np.int64)
    link_free = {op: np.zeros((num_stages, num_candidates), dtype=np.int64) for op in durations}
    arrivals: dict[tuple[Op, int, int], Nanoseconds] = {}
    for stage, instruction in _dependency_order(schedule):
        op, microbatch = instruction.op, instruction.microbatch
        ends = clock[stage]
        arrival = arrivals.pop((op, stage, microbatch), None)
        if arrival is not None:
            np.maximum(ends, arrival, out=ends)
        ends += durations[op][stage]
        target = stage + 1 if op is Op.FORWARD else stage - 1
        if 0 <= target <= last:
            link = min(stage, target)
            free = link_free[op][link]
            np.maximum(free, ends, out=free)
            free += message_ns[link]
            arrivals[op, target, microbatch] = free.copy()
    return np.ascontiguousarray(clock.T)


def _dependency_order(schedule: Schedule) -> Iterator[tuple[int, Instruction]]:
    """All compute ops so that each comes after those it waits for; stages keep their own order."""
    programs = [[i for i in program if i.op in (Op.FORWARD, Op.BACKWARD)] for program in schedule.stages]
    last = len(programs) - 1
    done: set[tuple[Op, int, int]] = set()
    positions = [0] * len(programs)
    remaining = sum(map(len, programs))
    while remaining:
        before = remaining
        for stage, program in enumerate(programs):
            while positions[stage] < len(program):
                instruction = program[positions[stage]]
                op, microbatch = instruction.op, instruction.microbatch
                source = stage - 1 if op is Op.FORWARD else stage + 1
                if 0 <= source <= last and (op, source, microbatch) not in done:
                    break
                done.add((op, stage, microbatch))
                positions[stage] += 1
                remaining -= 1
                yield stage, instruction
        if remaining == before:
            raise ScheduleError("the schedule's ops wait for each other; it has no order to run in")
