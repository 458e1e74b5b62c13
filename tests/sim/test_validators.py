"""Validators accept every 1F1B schedule and name what is broken in a damaged one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from eeplan.errors import ScheduleError
from eeplan.sim.schedule import Instruction, Op, Schedule, one_f_one_b, with_messages
from eeplan.sim.validators import check_channels, check_deadlock, check_labels, in_flight, validate


def edited(schedule: Schedule, stage: int, edit: Callable[[list[Instruction]], None]) -> Schedule:
    """``schedule`` with one stage's program changed by ``edit``."""
    program = list(schedule.stages[stage])
    edit(program)
    stages = list(schedule.stages)
    stages[stage] = tuple(program)
    return replace(schedule, stages=tuple(stages))


def swapped(schedule: Schedule, stage: int, first: str, second: str) -> Schedule:
    """``schedule`` with two instructions of one stage exchanged."""

    def swap(program: list[Instruction]) -> None:
        a, b = (next(p for p, i in enumerate(program) if str(i) == name) for name in (first, second))
        program[a], program[b] = program[b], program[a]

    return edited(schedule, stage, swap)


def without(schedule: Schedule, stage: int, name: str) -> Schedule:
    """``schedule`` with one instruction of one stage removed."""
    return edited(schedule, stage, lambda program: program.remove(named(program, name)))


def named(program: list[Instruction], name: str) -> Instruction:
    return next(i for i in program if str(i) == name)


@pytest.mark.parametrize("num_stages", range(1, 13))
def test_every_schedule_is_valid_also_under_rendezvous(num_stages: int) -> None:
    for num_microbatches in range(1, 4 * num_stages + 1):
        schedule = one_f_one_b(num_stages, num_microbatches)
        validate(schedule)
        assert in_flight(schedule) == tuple(
            min(num_stages - stage, num_microbatches) for stage in range(num_stages)
        )


def test_a_mispaired_microbatch_is_named() -> None:
    # Stage 1 takes the second message for the first: every label on the stage is in place, but exchanged.
    exchange = {0: 1, 1: 0}
    schedule = edited(
        one_f_one_b(3, 4),
        1,
        lambda program: program.__setitem__(
            slice(None),
            [
                replace(i, microbatch=exchange.get(i.microbatch, i.microbatch))
                if i.op is Op.RECV_FORWARD
                else i
                for i in program
            ],
        ),
    )
    with pytest.raises(ScheduleError, match=r"stage 1, instruction 1 \(F0\): expected rf0"):
        validate(schedule)


def test_two_ends_of_a_channel_in_different_order_are_named() -> None:
    schedule = swapped(one_f_one_b(3, 4), 0, "sf0", "sf1")
    with pytest.raises(ScheduleError, match=r"stage 1, instruction 0 \(rf0\): stage 0 sends microbatch 1"):
        check_channels(schedule)
    with pytest.raises(ScheduleError, match=r"stage 0, instruction 1 \(sf1\): expected F1"):
        validate(schedule)


def test_a_removed_receive_is_named() -> None:
    schedule = without(one_f_one_b(4, 8), 2, "rf5")
    with pytest.raises(ScheduleError, match=r"stage 2.*\(F5\): expected rf5"):
        validate(schedule)
    with pytest.raises(ScheduleError, match="stage 1 sends microbatch 5"):
        check_channels(schedule)


def test_a_removed_send_is_named_and_deadlocks() -> None:
    schedule = without(one_f_one_b(4, 8), 1, "sb7")
    with pytest.raises(
        ScheduleError, match=r"stage 1: send of the gradient of microbatch 7 \(sb7\) is missing"
    ):
        validate(schedule)
    with pytest.raises(ScheduleError, match="1 to stage 0: 7 sb but 8 rb"):
        check_channels(schedule)
    with pytest.raises(ScheduleError, match=r"asynchronous sends; pending: stage 0 waits at .* \(rb7\)$"):
        check_deadlock(schedule, rendezvous=False)


def test_a_gradient_sent_too_early_deadlocks_only_under_rendezvous() -> None:
    schedule = swapped(one_f_one_b(2, 4), 1, "rf1", "sb0")
    check_deadlock(schedule, rendezvous=False)
    with pytest.raises(
        ScheduleError, match=r"rendezvous sends; pending: stage 0 .*\(sf1\), stage 1 .*\(sb0\)"
    ):
        validate(schedule)


def test_waiting_for_a_gradient_before_sending_deadlocks_even_with_asynchronous_sends() -> None:
    schedule = swapped(one_f_one_b(2, 4), 0, "sf1", "rb0")
    with pytest.raises(
        ScheduleError, match=r"asynchronous sends; pending: stage 0 .*\(rb0\), stage 1 .*\(rf1\)"
    ):
        validate(schedule)


def test_a_microbatch_done_twice_or_never_is_named() -> None:
    schedule = one_f_one_b(1, 3)
    twice = edited(schedule, 0, lambda program: program.insert(2, named(program, "F0")))
    with pytest.raises(ScheduleError, match=r"stage 0, instruction 2 \(F0\): second forward of microbatch 0"):
        validate(twice)
    with pytest.raises(ScheduleError, match=r"backward of microbatch 2 \(B2\) is missing"):
        validate(without(schedule, 0, "B2"))


def test_a_backward_before_its_forward_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"\(B1\): expected F1"):
        validate(swapped(one_f_one_b(1, 3), 0, "F1", "B1"))


def test_more_in_flight_than_the_memory_model_assumes_is_named() -> None:
    # All forwards first (GPipe) is a working schedule, but not within the memory of 1F1B.
    order = [
        *(Instruction(Op.FORWARD, m) for m in range(6)),
        *(Instruction(Op.BACKWARD, m) for m in range(6)),
    ]
    gpipe = with_messages(Schedule(6, (tuple(order), tuple(order))))
    with pytest.raises(ScheduleError, match=r"stage 0: up to 6 microbatches in flight; .*= 2"):
        validate(gpipe)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (Schedule(2, ((Instruction(Op.FORWARD, 2),),)), "expected 0 to 1"),
        (Schedule(2, ((Instruction(Op.FORWARD, 0, chunk=1),),)), "of chunk 0"),
        (Schedule(2, ((Instruction(Op.SEND_FORWARD, 0),),)), "message to or from stage 1"),
        (Schedule(2, ((Instruction(Op.RECV_FORWARD, 0),),)), "message to or from stage -1"),
        (Schedule(2, ()), "at least one of each"),
    ],
)
def test_labels_out_of_range_are_named(schedule: Schedule, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_labels(schedule)
