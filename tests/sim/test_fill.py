"""Filled schedules: always valid, free where the paper says so, timed and weighed as by a naive model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations_with_replacement, product
from textwrap import indent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.filled_path import NaiveFill, filled_ns, peak_bytes

from eeplan.errors import ScheduleError
from eeplan.sim import fill as fill_module
from eeplan.sim.ascii import render
from eeplan.sim.bounds import bubble_fill_capacity, filled_peak_bytes
from eeplan.sim.bounds import peak_bytes as plain_peak_bytes
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import message_ns, simulate
from eeplan.sim.fill import Fill, filled, truncated_reaches, warm_up_depths
from eeplan.sim.schedule import Instruction, Op, Schedule, one_f_one_b, truncated, warm_up
from eeplan.sim.validators import check_channels, check_deadlock, check_inputs_and_counts, in_flight, validate

RATIOS = [(1, 1), (2, 3), (1, 2), (2, 5), (1, 3)]
"""(f, b) with b/f from 1 to 3."""


def lengths(num_stages: int, most: int) -> list[tuple[int, ...]]:
    """All non-increasing lists of up to ``most`` numbers of stages."""
    stages = range(num_stages - 1, 0, -1)
    return [ks for n in range(most + 1) for ks in combinations_with_replacement(stages, n)]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_every_small_fill_is_valid(num_stages: int) -> None:
    """All inserts of all lengths, whatever made them; twice as many as the formula would ever give."""
    inserts = lengths(num_stages, 3 if num_stages < 4 else 2)
    for num_full, depths, reaches in product(range(1, 4 * num_stages + 1), inserts, inserts):
        fill = Fill(num_full, depths, reaches)
        schedule = filled(num_stages, fill)
        validate(schedule)
        assert Fill.of(schedule) == fill


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_generated_fill_is_valid(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(2, 12))
    num_full = data.draw(st.integers(1, 4 * num_stages))
    has_exit = data.draw(st.lists(st.booleans(), min_size=num_stages, max_size=num_stages))
    times = data.draw(st.sampled_from(RATIOS))
    most = min(bubble_fill_capacity(num_stages, *times) + 1, num_stages - 1)
    depths = warm_up_depths(data.draw(st.integers(0, most)), has_exit)
    reaches = truncated_reaches(data.draw(st.integers(0, most)), num_stages, *times)
    validate(filled(num_stages, Fill(num_full, depths, reaches)))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("num_stages", range(2, 13))
def test_the_whole_grid_is_valid(num_stages: int) -> None:
    """All M up to 4P, all placements of exits, both counts up to one beyond capacity; both modes.

    In mode ``same_count`` the full microbatches are fewer, so the same numbers of them cover it. The regions
    exchange no messages with each other, so beyond eight stages the inserts of each go with none and with
    the most of the other, instead of with all.
    """
    most = max(min(bubble_fill_capacity(num_stages, *times) + 1, num_stages - 1) for times in RATIOS)
    depths = {
        warm_up_depths(count, [*exits, *[True] * (num_stages - count)])
        for count in range(most + 1)
        # Exits behind the deepest insert do not count.
        for exits in product([False, True], repeat=count)
    }
    reaches = {
        truncated_reaches(count, num_stages, *times)
        for times in RATIOS
        for count in range(min(bubble_fill_capacity(num_stages, *times) + 2, num_stages))
    }
    pairs = set(product(depths, reaches))
    if num_stages > 8:
        extremes = {(), max(depths)}, {(), max(reaches)}
        pairs = set(product(depths, extremes[1])) | set(product(extremes[0], reaches))
    for num_full, inserts in product(range(1, 4 * num_stages + 1), sorted(pairs)):
        validate(filled(num_stages, Fill(num_full, *inserts)))


def test_the_pictures_of_the_docstring() -> None:
    drawn = render(simulate(filled(4, Fill(6, (2, 1), (2, 1))), PipelineCosts((1,) * 4, (2,) * 4)))
    assert fill_module.__doc__ is not None
    assert indent("\n".join(drawn.splitlines()[:4]), "    ") in fill_module.__doc__


@pytest.mark.parametrize("num_stages", range(2, 13))
@pytest.mark.parametrize(("f", "b"), RATIOS)
def test_capacity_is_free_and_one_more_is_not(num_stages: int, f: int, b: int) -> None:
    """K per region, either or both, leave the makespan at (M+P-1)(f+b); K+1 in region A lengthens it."""
    capacity = bubble_fill_capacity(num_stages, f, b)
    costs = PipelineCosts((f,) * num_stages, (b,) * num_stages)
    num_full = num_stages + 3
    free_ns = (num_full + num_stages - 1) * (f + b)

    def makespan_ns(k_a: int, k_b: int) -> int:
        depths = warm_up_depths(k_a, [True] * num_stages)
        fill = Fill(num_full, depths, truncated_reaches(k_b, num_stages, f, b))
        assert (len(fill.depths), len(fill.reaches)) == (k_a, k_b)
        return simulate(filled(num_stages, fill), costs).pipeline_ns

    for k_a, k_b in ((0, 0), (capacity, 0), (0, capacity), (capacity, capacity)):
        assert makespan_ns(k_a, k_b) == free_ns
    assert makespan_ns(capacity + 1, 0) > free_ns
    # A stage more for the last truncated microbatch no longer fits either, nor does one microbatch more.
    assert makespan_ns(0, capacity + 1) > free_ns


def test_without_inserts_it_is_one_f_one_b() -> None:
    assert filled(4, Fill(7)) == one_f_one_b(4, 7)
    costs = PipelineCosts((1, 1, 1), (2, 2, 2), static_bytes=(5, 5, 5), kept_bytes=(7, 8, 9))
    assert filled_peak_bytes(costs, Fill(2)) == plain_peak_bytes(costs, 2)


@pytest.mark.parametrize(
    ("count", "exit_stages", "depths"),
    [
        (3, {0, 1, 2, 3}, (3, 2, 1)),
        (3, set(), ()),
        # Stage 0 has no exit: the insert that would go there only meets none.
        (3, {1, 2}, (3, 2)),
        # Nothing deeper than stage 0 gives a loss.
        (3, {0}, (1, 1, 1)),
        (3, {1}, (2, 2)),
        # An exit behind the deepest insert does not count.
        (2, {3}, ()),
        (0, {0, 1}, ()),
    ],
)
def test_inserts_stop_at_their_last_exit(count: int, exit_stages: set[int], depths: tuple[int, ...]) -> None:
    assert warm_up_depths(count, [stage in exit_stages for stage in range(4)]) == depths


def test_truncated_reaches_of_the_paper() -> None:
    assert truncated_reaches(2, 4, 1, 2) == (2, 1)
    assert truncated_reaches(4, 8, 1, 2) == (6, 5, 3, 2)
    assert truncated_reaches(3, 4, 1, 2) == (2, 1, 1)


@st.composite
def filled_pipelines(draw: st.DrawFn) -> tuple[NaiveFill, PipelineCosts]:
    """Any inserts, small integer costs (ties are the hard case), now and then a very long op or no time."""
    num_stages = draw(st.integers(2, 6))
    length = st.lists(st.integers(1, num_stages - 1), max_size=4)
    time = st.one_of(st.integers(0, 6), st.integers(1, 400))

    def column(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(values, min_size=num_stages, max_size=num_stages)))

    size = st.integers(0, 40)
    costs = PipelineCosts(
        forward_ns=column(time),
        backward_ns=column(time),
        message_ns=tuple(draw(st.integers(0, 12)) for _ in range(num_stages - 1)),
        output_bytes=column(size),
        static_bytes=column(size),
        kept_bytes=column(size),
        forward_transient_bytes=column(size),
        backward_transient_bytes=column(size),
    )
    if draw(st.booleans()):
        costs = replace(
            costs,
            turn_forward_ns=column(time),
            turn_backward_ns=column(time),
            bare_forward_ns=column(time),
            turn_kept_bytes=tuple(draw(st.integers(0, kept)) for kept in costs.kept_bytes),
        )
    depths, reaches = (sorted(draw(length), reverse=True) for _ in range(2))
    return NaiveFill(num_stages, draw(st.integers(1, 3 * num_stages)), depths, reaches), costs


def schedule_of(naive: NaiveFill) -> Schedule:
    return filled(naive.num_stages, Fill(naive.num_full, tuple(naive.depths), tuple(naive.reaches)))


@settings(max_examples=200, deadline=None)
@given(filled_pipelines())
def test_the_engine_runs_it_as_the_naive_model(case: tuple[NaiveFill, PipelineCosts]) -> None:
    naive, costs = case
    timeline = simulate(schedule_of(naive), costs)
    durations = {
        ("F", "whole"): costs.forward_ns,
        ("B", "whole"): costs.backward_ns,
        ("F", "turn"): costs.turn_forward_ns or costs.forward_ns,
        ("B", "turn"): costs.turn_backward_ns or costs.backward_ns,
        ("F", "bare"): costs.bare_forward_ns or costs.forward_ns,
    }
    expected = filled_ns(naive, durations, message_ns(costs))
    found = {(s.kind[0].upper(), s.stage, s.microbatch): s.end_ns for row in timeline.spans for s in row}
    assert found == expected
    assert simulate(schedule_of(naive), costs, "rendezvous").pipeline_ns >= timeline.pipeline_ns


@settings(max_examples=150, deadline=None)
@given(filled_pipelines())
def test_peaks_of_engine_closed_form_and_naive_model_agree(case: tuple[NaiveFill, PipelineCosts]) -> None:
    naive, costs = case
    schedule = schedule_of(naive)
    timeline = simulate(schedule, costs)
    peaks = filled_peak_bytes(costs, Fill.of(schedule))
    turn_kept = costs.turn_kept_bytes or costs.kept_bytes
    for stage in range(naive.num_stages):
        counted = costs.static_bytes[stage] + peak_bytes(
            naive,
            stage,
            costs.kept_bytes[stage],
            turn_kept[stage],
            costs.forward_transient_bytes[stage],
            costs.backward_transient_bytes[stage],
        )
        assert timeline.peak_bytes(stage) == counted == peaks[stage]
        assert timeline.memory[stage][-1].live_bytes == costs.static_bytes[stage]


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_region_a_costs_stage_0_its_inserts_and_region_b_costs_nothing(num_stages: int) -> None:
    """With M >= P: P + K in flight on the first stage (facts 4), P - i everywhere without region A."""
    capacity = bubble_fill_capacity(num_stages, 1, 2)
    depths = warm_up_depths(capacity, [True] * num_stages)
    reaches = truncated_reaches(capacity, num_stages, 1, 2)
    both = in_flight(filled(num_stages, Fill(2 * num_stages, depths, reaches)))
    assert both[0] == num_stages + capacity
    cool_down = in_flight(filled(num_stages, Fill(2 * num_stages, (), reaches)))
    assert cool_down == tuple(num_stages - stage for stage in range(num_stages))


def edited(schedule: Schedule, stage: int, edit: Callable[[list[Instruction]], None]) -> Schedule:
    program = list(schedule.stages[stage])
    edit(program)
    return replace(schedule, stages=(*schedule.stages[:stage], tuple(program), *schedule.stages[stage + 1 :]))


def moved(schedule: Schedule, stage: int, name: str, before: str) -> Schedule:
    def move(program: list[Instruction]) -> None:
        instruction = next(i for i in program if str(i) == name)
        program.remove(instruction)
        program.insert(next(p for p, i in enumerate(program) if str(i) == before), instruction)

    return edited(schedule, stage, move)


FILLED = filled(4, Fill(6, (2, 1), (2, 1)))
"""6 and 7 are truncated after two and one stages, 8 and 9 warm-up inserts of two and one stages."""


def test_sending_the_last_warm_up_forward_before_the_inserts_mispairs_them() -> None:
    """Negative control: stage 1 would take the hidden states of microbatch 3 for those of insert 8."""
    broken = moved(FILLED, 0, "sf3", "F8")
    with pytest.raises(ScheduleError, match=r"stage 0 sends microbatch 3 at this point of the channel"):
        check_channels(broken)
    with pytest.raises(ScheduleError):
        validate(broken)


def test_messages_in_the_right_order_at_the_wrong_time_are_a_deadlock() -> None:
    """Negative control: both ends agree on the order, yet with rendezvous they wait for each other."""
    early = moved(moved(FILLED, 0, "sf3", "B9"), 1, "rf3", "B8")
    late = moved(moved(FILLED, 0, "sf3", "B9"), 1, "rf3", "sb0")
    for schedule in (early, late):
        check_channels(schedule)
        check_inputs_and_counts(schedule)
        check_deadlock(schedule, rendezvous=False)
    check_deadlock(early, rendezvous=True)
    with pytest.raises(ScheduleError, match="deadlock with rendezvous sends"):
        check_deadlock(late, rendezvous=True)


@pytest.mark.parametrize(
    ("stage", "name", "message"),
    [
        (0, "rb8", r"stage 0, instruction \d+ \(B8\): expected rb8"),
        (1, "B8", r"stage 1, instruction \d+ \(sb8\): expected B8"),
        (1, "rf6", r"stage 1, instruction \d+ \(F6\): expected rf6"),
        (2, "B6", r"stage 2: backward of microbatch 6 \(B6\) is missing"),
    ],
)
def test_a_missing_instruction_of_an_insert_is_named(stage: int, name: str, message: str) -> None:
    broken = edited(FILLED, stage, lambda program: program.remove(next(i for i in program if str(i) == name)))
    with pytest.raises(ScheduleError, match=message):
        validate(broken)


def test_an_instruction_that_the_kind_does_not_have_is_named() -> None:
    deeper = edited(FILLED, 2, lambda program: program.append(Instruction(Op.FORWARD, 8)))
    with pytest.raises(
        ScheduleError, match=r"microbatch 8, which is a warm-up insert up to stage 1 and has none"
    ):
        check_inputs_and_counts(deeper)
    further = edited(FILLED, 1, lambda program: program.append(Instruction(Op.BACKWARD, 6)))
    with pytest.raises(ScheduleError, match=r"microbatch 6, which is truncated at stage 2 and has none here"):
        check_inputs_and_counts(further)


def test_another_count_in_flight_is_noticed() -> None:
    """Negative control of the memory model's count: the inserts of stage 0 one after the other."""
    broken = moved(FILLED, 0, "F9", "B9")
    broken = moved(moved(broken, 0, "rb8", "F9"), 0, "B8", "F9")
    check_inputs_and_counts(broken)
    check_deadlock(broken, rendezvous=True)
    with pytest.raises(ScheduleError, match=r"stage 0: up to 5 .* min\(P-i, M\) and 2 inserts = 6"):
        validate(broken)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((warm_up(1),), "kinds for 1"),
        ((warm_up(2), warm_up(1)), r"microbatch 0 is 'warm_up' .* up to stage 1"),
        ((truncated(2, 2), truncated(2, 1)), r"microbatch 0 is 'truncated' .* down to stage 0"),
    ],
)
def test_impossible_kinds_are_named(kinds: tuple, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        validate(replace(one_f_one_b(2, 2), kinds=kinds))


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        (Fill(0, (1,)), "0 full microbatches"),
        (Fill(2, (4,)), "warm-up inserts of 4 stages; expected 1 to 3"),
        (Fill(2, (), (2, 0)), "truncated inserts of 2, 0 stages"),
        (Fill(2, (1, 2)), "expected the longest first"),
    ],
)
def test_impossible_fills_are_refused(fill: Fill, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        filled(4, fill)
