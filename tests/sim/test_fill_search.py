"""The counts that fill the bubbles: as the formula where it holds, and always as trying everything says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim.bounds import bubble_fill_capacity
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import simulate
from eeplan.sim.fill import Fill, filled, truncated_reaches, warm_up_depths
from eeplan.sim.fill_search import FillProblem, filled_ends_ns, fixed_fill, search_fill
from eeplan.sim.schedule import one_f_one_b


def equal_stages(num_stages: int, f: int, b: int, num_microbatches: int, **changes: object) -> FillProblem:
    problem = FillProblem(
        costs=PipelineCosts((f,) * num_stages, (b,) * num_stages, kept_bytes=(10,) * num_stages),
        num_microbatches=num_microbatches,
        mode="added",
        has_exit=(True,) * num_stages,
        iteration_ns=max,
        max_time_overhead=0.0,
        floor_bytes=(0,) * num_stages,
        base_bytes=0,
        limit_bytes=None,
    )
    return replace(problem, **changes)


@st.composite
def problems(draw: st.DrawFn) -> FillProblem:
    """Few stages, unequal costs, exits anywhere, limits that may bind."""
    num_stages = draw(st.integers(2, 4))
    time = st.integers(0, 9)

    def column(values: st.SearchStrategy[int]) -> tuple[int, ...]:
        return tuple(draw(st.lists(values, min_size=num_stages, max_size=num_stages)))

    forward, backward = column(st.integers(1, 9)), column(st.integers(1, 9))
    weights = column(st.integers(0, 5))
    return FillProblem(
        costs=PipelineCosts(
            forward_ns=forward,
            backward_ns=backward,
            message_ns=tuple(draw(st.integers(0, 3)) for _ in range(num_stages - 1)),
            kept_bytes=column(st.integers(1, 9)),
            before_gradient_ns=tuple(draw(st.integers(0, b)) for b in backward),
            turn_forward_ns=column(time),
            turn_backward_ns=column(time),
            turn_kept_bytes=column(st.integers(0, 9)),
            # Without exits and without keeping anything a forward is never slower.
            bare_forward_ns=tuple(draw(st.integers(0, f)) for f in forward),
        ),
        num_microbatches=draw(st.integers(1, 3 * num_stages)),
        mode=draw(st.sampled_from(["added", "same_count"])),
        has_exit=tuple(draw(st.lists(st.booleans(), min_size=num_stages, max_size=num_stages))),
        # Gradient synchronisation starts when a stage is done, so late ends may cost more than the makespan.
        iteration_ns=lambda ends: max(map(sum, zip(ends, weights, strict=True))),
        max_time_overhead=draw(st.sampled_from([0.0, 0.0, 0.1])),
        floor_bytes=(0,) * num_stages,
        base_bytes=7,
        limit_bytes=draw(st.one_of(st.none(), st.integers(10, 60))),
    )


def ends_by_engine(problem: FillProblem, fill: Fill) -> list[int]:
    timeline = simulate(filled(problem.costs.num_stages, fill), problem.costs)
    return [row[-1].end_ns for row in timeline.spans]


def fits_by_engine(problem: FillProblem, fill: Fill) -> bool:
    timeline = simulate(filled(problem.costs.num_stages, fill), problem.costs)
    plain = problem.iteration_ns(ends_by_engine(problem, Fill(fill.num_full)))
    if problem.iteration_ns(ends_by_engine(problem, fill)) > plain * (1 + problem.max_time_overhead):
        return False
    peak = max(timeline.peak_bytes(stage) for stage in range(problem.costs.num_stages))
    return problem.limit_bytes is None or peak + problem.base_bytes <= problem.limit_bytes


def every_fill(problem: FillProblem) -> list[Fill]:
    """All counts with all reaches that do not increase."""
    num_stages = problem.costs.num_stages
    fills = []
    for k_a, k_b in product(range(num_stages), repeat=2):
        depths = warm_up_depths(k_a, problem.has_exit)
        partial = len(depths) + k_b if problem.mode == "same_count" else 0
        if problem.num_microbatches - partial < 1:
            continue
        for reaches in product(range(1, num_stages), repeat=k_b):
            if list(reaches) == sorted(reaches, reverse=True):
                fills.append(Fill(problem.num_microbatches - partial, depths, reaches))
    return fills


@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_search_finds_what_trying_everything_finds(problem: FillProblem) -> None:
    outcome = search_fill(problem)
    fitting = [fill for fill in every_fill(problem) if fits_by_engine(problem, fill)]
    if outcome is None:
        assert not fitting
        return
    best = outcome.best
    assert best.fill in fitting
    most = max(len(fill.depths) + len(fill.reaches) for fill in fitting)
    assert best.inserts == most
    # Of all reaches that fit with these counts, the first microbatch's is the furthest, then the second's.
    same_counts = [
        f.reaches for f in fitting if (f.depths, len(f.reaches)) == (best.fill.depths, best.cool_down)
    ]
    assert best.fill.reaches == max(same_counts)
    for more in (outcome.more_warm_up, outcome.more_cool_down):
        assert more is None or (more.inserts == most + 1 and more.fill not in fitting)


@settings(max_examples=150, deadline=None)
@given(problems(), st.data())
def test_the_compiled_recurrence_equals_the_engine(problem: FillProblem, data: st.DataObject) -> None:
    lengths = st.lists(st.integers(1, problem.costs.num_stages - 1), max_size=4)
    depths, reaches = (tuple(sorted(data.draw(lengths), reverse=True)) for _ in range(2))
    fill = Fill(problem.num_microbatches, depths, reaches)
    assert list(filled_ends_ns(problem.costs, fill)) == ends_by_engine(problem, fill)


@pytest.mark.parametrize("num_stages", [2, 4, 8, 12])
@pytest.mark.parametrize(("f", "b"), [(1, 1), (1, 2), (1, 3)])
def test_equal_stages_get_the_papers_counts(num_stages: int, f: int, b: int) -> None:
    capacity = bubble_fill_capacity(num_stages, f, b)
    outcome = search_fill(equal_stages(num_stages, f, b, 2 * num_stages))
    assert outcome is not None
    best = outcome.best
    assert (best.warm_up, best.cool_down) == (capacity, capacity)
    assert best.fill.reaches == truncated_reaches(capacity, num_stages, f, b)
    assert best.time_overhead == 0
    for more in (outcome.more_warm_up, outcome.more_cool_down):
        assert more is None or more.time_overhead > 0


@pytest.mark.parametrize(("num_stages", "num_microbatches", "ratio"), [(4, 64, 0.94), (8, 16, 0.65)])
def test_same_count_saves_the_papers_time(num_stages: int, num_microbatches: int, ratio: float) -> None:
    """(M - K_A - K_B + P - 1) / (M + P - 1) for b/f = 2 (facts 4)."""
    problem = equal_stages(num_stages, 1, 2, num_microbatches, mode="same_count")
    outcome = search_fill(problem)
    assert outcome is not None
    best = outcome.best
    capacity = bubble_fill_capacity(num_stages, 1, 2)
    assert best.fill.num_microbatches == num_microbatches
    assert best.fill.num_full == num_microbatches - 2 * capacity
    whole = simulate(one_f_one_b(num_stages, num_microbatches), problem.costs).pipeline_ns
    assert best.iteration_ns / whole == pytest.approx(ratio, abs=0.005)


def test_memory_takes_from_region_a() -> None:
    """Region A costs stage 0 activations, region B costs none (facts 4)."""
    for inserts in range(3):
        outcome = search_fill(equal_stages(4, 1, 2, 8, limit_bytes=10 * (4 + inserts)))
        assert outcome is not None
        assert (outcome.best.warm_up, outcome.best.cool_down) == (inserts, 2)
        if inserts < 2:
            assert outcome.more_warm_up is not None
            assert outcome.more_warm_up.peak_bytes[0] == 10 * (5 + inserts)
            assert outcome.more_warm_up.time_overhead == 0
    assert search_fill(equal_stages(4, 1, 2, 8, limit_bytes=39)) is None


def test_time_that_the_user_accepts_is_used() -> None:
    problem = equal_stages(4, 1, 2, 8)
    more = search_fill(replace(problem, max_time_overhead=0.1))
    assert more is not None
    assert more.best.inserts > 4
    assert 0 < more.best.time_overhead <= 0.1


def test_work_after_the_pipeline_counts() -> None:
    """A stage that has to reduce its gradients for long must not end later, though the makespan allows."""
    problem = equal_stages(4, 1, 2, 8)

    def with_sync(ends: Sequence[int]) -> int:
        return max(max(ends), ends[3] + 6)

    outcome = search_fill(replace(problem, iteration_ns=with_sync))
    assert outcome is not None
    assert (outcome.best.warm_up, outcome.best.cool_down) == (2, 0)


def test_without_exits_only_the_cool_down_is_filled() -> None:
    outcome = search_fill(equal_stages(4, 1, 2, 8, has_exit=(False,) * 4))
    assert outcome is not None
    assert (outcome.best.warm_up, outcome.best.cool_down) == (0, 2)
    # An exit on the last stage gives nothing to an insert that never comes there.
    late = search_fill(equal_stages(4, 1, 2, 8, has_exit=(False, False, False, True)))
    assert late is not None
    assert late.best.fill == outcome.best.fill


def test_a_single_stage_has_no_bubble() -> None:
    outcome = search_fill(equal_stages(1, 1, 2, 8))
    assert outcome is not None
    assert outcome.best.fill == Fill(8)


def test_counts_by_hand_are_taken_whatever_they_cost() -> None:
    problem = equal_stages(4, 1, 2, 8)
    kept = fixed_fill(problem, 1, 1)
    assert kept.fill == Fill(8, (1,), (2,))
    assert kept.time_overhead == 0
    longer = fixed_fill(problem, 3, 3)
    assert longer.fill.depths == (3, 2, 1)
    assert longer.time_overhead > 0
    assert list(longer.ends_ns) == ends_by_engine(problem, longer.fill)
    same = fixed_fill(replace(problem, mode="same_count"), 3, 3)
    assert same.fill.num_full == 2


def test_equal_problems_get_equal_answers() -> None:
    problem = equal_stages(6, 3, 5, 9)
    assert search_fill(problem) == search_fill(problem)
