"""The 1F1B compute order and the order of its messages."""

from __future__ import annotations

import pytest

from eeplan.errors import ScheduleError
from eeplan.sim.schedule import Op, Schedule, compute_order, one_f_one_b, with_messages


def text(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, program)) for program in schedule.stages]


def test_compute_order_is_the_picture_in_the_module() -> None:
    assert text(compute_order(4, 6)) == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_fewer_microbatches_than_stages_all_warm_up() -> None:
    assert text(compute_order(3, 1)) == ["F0 B0"] * 3
    assert text(compute_order(4, 2))[0] == "F0 F1 B0 B1"


def test_messages_put_the_forward_direction_first_on_both_ends() -> None:
    assert text(one_f_one_b(2, 3)) == [
        "F0 sf0 F1 sf1 rb0 B0 F2 sf2 rb1 B1 rb2 B2",
        "rf0 F0 B0 rf1 sb0 F1 B1 rf2 sb1 F2 B2 sb2",
    ]


def test_one_stage_has_no_messages() -> None:
    assert text(one_f_one_b(1, 2)) == ["F0 B0 F1 B1"]


def test_messages_leave_the_compute_order_alone() -> None:
    order = compute_order(5, 9)
    kept = [
        tuple(i for i in program if i.op in (Op.FORWARD, Op.BACKWARD))
        for program in with_messages(order).stages
    ]
    assert tuple(kept) == order.stages


@pytest.mark.parametrize(("stages", "microbatches"), [(0, 4), (4, 0), (-1, 1)])
def test_an_empty_schedule_is_refused(stages: int, microbatches: int) -> None:
    with pytest.raises(ScheduleError, match="give at least 1"):
        one_f_one_b(stages, microbatches)
