"""How long the executor owns what it sends."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.runtime.executor import settled_sends
from eeplan.sim.fill import Fill, filled
from eeplan.sim.schedule import Op, Schedule, one_f_one_b

SENDS = {Op.RECV_BACKWARD: Op.SEND_FORWARD, Op.RECV_FORWARD: Op.SEND_BACKWARD}


def most_owned(schedule: Schedule, stage: int, settled: dict[tuple[Op, int], int]) -> dict[Op, int]:
    """The most sends of each direction that a stage still owns, walking through its instructions."""
    sent, over, most = (dict.fromkeys(SENDS.values(), 0) for _ in range(3))
    for instruction in schedule.stages[stage]:
        op = instruction.op
        if op in sent:
            sent[op] += 1
            most[op] = max(most[op], sent[op] - over[op])
        if op in SENDS:
            told = settled.get((op, instruction.microbatch), 0)
            assert told <= sent[SENDS[op]], "told of a message that was never sent"
            over[SENDS[op]] = max(over[SENDS[op]], told)
    return most


@settings(max_examples=60, deadline=None)
@given(stages=st.integers(2, 6), microbatches=st.integers(1, 20), data=st.data())
def test_a_stage_owns_no_more_sends_than_microbatches_are_in_flight(
    stages: int, microbatches: int, data: st.DataObject
) -> None:
    schedule = one_f_one_b(stages, microbatches)
    stage = data.draw(st.integers(0, stages - 1))
    most = most_owned(schedule, stage, settled_sends(schedule, stage))
    in_flight = min(stages - stage, microbatches)
    assert most[Op.SEND_FORWARD] <= in_flight
    assert most[Op.SEND_BACKWARD] <= min(stages - stage + 1, microbatches)


def test_without_being_told_a_stage_owns_all_it_ever_sent() -> None:
    """Negative control, and what happened with a transport that never says that a send is done."""
    assert most_owned(one_f_one_b(2, 16), 0, {})[Op.SEND_FORWARD] == 16


@pytest.mark.parametrize("stage", range(4))
def test_what_is_told_is_what_the_neighbour_has_used(stage: int) -> None:
    """Against the neighbours' instructions, counted naively, with partial microbatches in both regions."""
    schedule = filled(4, Fill(9, depths=(2, 1), reaches=(2, 1)))
    for (received, microbatch), told in settled_sends(schedule, stage).items():
        neighbour = stage + 1 if received is Op.RECV_BACKWARD else stage - 1
        uses = Op.FORWARD if neighbour > stage else Op.BACKWARD
        instructions = schedule.stages[neighbour]
        sent = next(
            index
            for index, i in enumerate(instructions)
            if i.microbatch == microbatch and i.op in SENDS.values() and i.op is not SENDS[received]
        )
        used = [i.microbatch for i in instructions[:sent] if i.op is uses]
        mine = [i.microbatch for i in schedule.stages[stage] if i.op is SENDS[received]]
        assert told == len([m for m in used if m in mine])
        assert mine[:told] == [m for m in used if m in mine]
