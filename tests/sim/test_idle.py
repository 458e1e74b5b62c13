"""Idle time by phase: parts that add up exactly, at the places where 1F1B has its bubbles."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import simulate
from eeplan.sim.fill import Fill, filled
from eeplan.sim.idle import StageTime, stage_times
from eeplan.sim.schedule import one_f_one_b
from eeplan.timeline import Span, Timeline

TIMES = st.integers(0, 40)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Fill, PipelineCosts]:
    num_stages = draw(st.integers(1, 5))

    def per_stage() -> tuple[int, ...]:
        return tuple(draw(st.lists(TIMES, min_size=num_stages, max_size=num_stages)))

    depths = draw(st.lists(st.integers(1, max(1, num_stages - 1)), max_size=2)) if num_stages > 1 else []
    reaches = draw(st.lists(st.integers(1, max(1, num_stages - 1)), max_size=2)) if num_stages > 1 else []
    fill = Fill(
        draw(st.integers(1, 8)), tuple(sorted(depths, reverse=True)), tuple(sorted(reaches, reverse=True))
    )
    message = draw(st.integers(0, 9))
    costs = PipelineCosts(per_stage(), per_stage(), message_ns=(message,) * (num_stages - 1))
    return fill, costs


def naive_idle(timeline: Timeline, stage: int, start_ns: int, end_ns: int) -> int:
    """Nanoseconds in the window in which no op of the stage runs, one by one."""
    busy = {t for s in timeline.spans[stage] for t in range(s.start_ns, s.end_ns)}
    return sum(t not in busy for t in range(start_ns, end_ns))


@given(pipelines())
@settings(max_examples=60, deadline=None)
def test_parts_add_up_and_lie_where_they_should(case: tuple[Fill, PipelineCosts]) -> None:
    fill, costs = case
    schedule = filled(costs.num_stages, fill)
    timeline = simulate(schedule, costs)
    for stage, time in enumerate(stage_times(timeline, schedule.kinds)):
        assert time.busy_ns == timeline.busy_ns(stage)
        assert time.busy_ns + time.idle_ns == timeline.pipeline_ns
        spans = timeline.spans[stage]
        inserts = [schedule.kind(s.microbatch).name == "warm_up" for s in spans]
        backwards = [
            s.start_ns
            for s, insert in zip(spans, inserts, strict=True)
            if s.kind == "backward" and not insert
        ]
        begin = min(backwards, default=timeline.pipeline_ns)
        end = max(begin, max(s.end_ns for s in spans if s.kind == "forward"))
        assert time.warm_up_ns == naive_idle(timeline, stage, 0, begin)
        assert time.steady_ns == naive_idle(timeline, stage, begin, end)
        assert time.cool_down_ns == naive_idle(timeline, stage, end, timeline.pipeline_ns)


def test_equal_stages_idle_at_both_ends_only() -> None:
    """P = 4, f = 1, b = 2: (P - 1)(f + b) in all; stage i waits 3 - (P-1-i) at the start."""
    costs = PipelineCosts((1,) * 4, (2,) * 4)
    times = stage_times(simulate(one_f_one_b(4, 8), costs))
    assert [time.idle_ns for time in times] == [9] * 4
    assert [time.steady_ns for time in times] == [0] * 4
    # Stage 0 waits from its 4th forward to its first backward, and then between its last backwards.
    assert times[0] == StageTime(busy_ns=24, warm_up_ns=6, steady_ns=0, cool_down_ns=3)
    assert times[3] == StageTime(busy_ns=24, warm_up_ns=3, steady_ns=0, cool_down_ns=6)


def test_a_slow_last_stage_makes_the_others_wait_in_the_steady_phase() -> None:
    costs = PipelineCosts((1, 1, 3), (2, 2, 6))
    times = stage_times(simulate(one_f_one_b(3, 20), costs))
    assert times[0].steady_ns > 5 * times[0].warm_up_ns
    assert times[2].steady_ns == 0


def test_an_insert_is_work_and_not_the_first_backward() -> None:
    fill, costs = Fill(8, depths=(2, 1)), PipelineCosts((1,) * 4, (2,) * 4)
    schedule = filled(4, fill)
    timeline = simulate(schedule, costs)
    plain = stage_times(simulate(one_f_one_b(4, 8), costs))
    with_kinds, without = stage_times(timeline, schedule.kinds), stage_times(timeline)
    # Two inserts of f + b = 3 fill the six that stage 0 waited, and nothing else changes.
    assert (plain[0].warm_up_ns, with_kinds[0].warm_up_ns) == (6, 0)
    assert with_kinds[0].cool_down_ns == plain[0].cool_down_ns
    assert without[0].idle_ns == with_kinds[0].idle_ns


def test_without_the_kinds_an_insert_would_cut_the_warm_up_short() -> None:
    """Negative control of the cut itself."""
    schedule = filled(4, Fill(8, depths=(1,)))
    timeline = simulate(schedule, PipelineCosts((1,) * 4, (2,) * 4))
    assert stage_times(timeline, schedule.kinds)[0].warm_up_ns == 3
    assert stage_times(timeline)[0].warm_up_ns == 0


def test_whole_iteration_ops_do_not_count() -> None:
    spans = (Span(0, "forward", 0, 2, 4), Span(0, "backward", 0, 5, 9), Span(0, "optimizer", -1, 9, 20))
    (time,) = stage_times(Timeline(spans=(spans,)))
    assert time == StageTime(busy_ns=6, warm_up_ns=3, steady_ns=0, cool_down_ns=0)
