"""Headroom is exact: that much fits, a nanosecond more does not, by the engine."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim import headroom as headroom_module
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import stage_ends_ns
from eeplan.sim.fill import Fill, filled
from eeplan.sim.headroom import Headroom, Iteration, Side, headroom, slowed

TIMES = st.integers(0, 12)


@st.composite
def iterations(draw: st.DrawFn) -> Iteration:
    num_stages = draw(st.integers(1, 4))

    def times(count: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(TIMES, min_size=count, max_size=count)))

    transport: Any = draw(st.sampled_from(("asynchronous", "rendezvous")))
    fill = Fill(draw(st.integers(1, 8)))
    if num_stages > 1 and transport == "asynchronous" and draw(st.booleans()):
        depths, reaches = (
            tuple(sorted(draw(st.lists(st.integers(1, num_stages - 1), max_size=2)), reverse=True))
            for _ in range(2)
        )
        fill = replace(fill, depths=depths, reaches=reaches)
    costs = PipelineCosts(
        times(num_stages), times(num_stages), message_ns=times(num_stages - 1), transport=transport
    )
    sync = times(num_stages)

    def from_ends(ends: Sequence[int]) -> int:
        return max(end + own for end, own in zip(ends, sync, strict=True)) + 7

    return Iteration(costs, fill, from_ends)


def engine_ns(iteration: Iteration, costs: PipelineCosts) -> int:
    return iteration.from_ends_ns(stage_ends_ns(filled(costs.num_stages, iteration.fill), costs))


def naive_headroom(iteration: Iteration, stage: int, side: Side, price: int) -> int:
    """The largest extra time, tried one nanosecond after the other with the engine."""
    now, extra = engine_ns(iteration, iteration.costs), 0
    while engine_ns(iteration, slowed(iteration.costs, stage, side, extra + 1)) <= now + price * (extra + 1):
        extra += 1
    return extra


@given(iterations())
@settings(max_examples=25, deadline=None)
def test_headroom_is_the_largest_that_fits(iteration: Iteration) -> None:
    for stage, found in enumerate(headroom(iteration)):
        free = {side: naive_headroom(iteration, stage, side, 0) for side in ("forward", "backward")}
        assert found.free_ns == max(free.values())
        assert found.free_side in (
            "either" if len(set(free.values())) == 1 else max(free, key=free.__getitem__)
        )
        if iteration.fill.num_full > 1:
            hidden = {side: naive_headroom(iteration, stage, side, 1) for side in ("forward", "backward")}
            assert found.hidden_ns == max(hidden.values())
        assert found.hidden_ns >= found.free_ns


def test_the_stages_before_a_slow_last_one_hide_what_it_takes_longer() -> None:
    """P = 4, M = 64: extra backward time shows once, until the stage is as slow as the last (EE-LLM 3.2)."""
    costs = PipelineCosts((1000, 1000, 1000, 1250), (2000, 2000, 2000, 2500))
    found = headroom(Iteration(costs, Fill(64), max))
    assert [one.free_ns for one in found] == [0, 0, 0, 0]
    assert found[3].hidden_ns == 0
    assert all(700 <= one.hidden_ns <= 800 for one in found[:3])


def test_stages_behind_the_slowest_have_room_for_free() -> None:
    costs = PipelineCosts((5000, 1000, 1000), (6000, 2000, 2000))
    found = headroom(Iteration(costs, Fill(16), max))
    assert found[0] == Headroom(0, "either", 0, "either")
    assert found[1].free_ns > 1000
    assert found[2].free_ns > 1000
    # As fast as the slowest, its first microbatch comes back too late: an equal forward leaves no time.
    assert headroom(Iteration(PipelineCosts((3000, 1000, 1000), (6000, 2000, 2000)), Fill(16), max))[1] == (
        Headroom(0, "either", 3000, "backward")
    )


def test_a_single_microbatch_hides_nothing() -> None:
    """Once an iteration is once per microbatch there."""
    found = headroom(Iteration(PipelineCosts((10, 10), (20, 20)), Fill(1), max))
    assert found == (Headroom(0, "either", 0, "either"),) * 2


def test_a_simulator_that_is_off_by_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the property test compares with the engine, and so sees a wrong fast path."""
    iteration = Iteration(PipelineCosts((50, 10, 10), (60, 20, 20)), Fill(6), max)
    right = headroom(iteration)
    true_ends = headroom_module.ends_ns
    monkeypatch.setattr(
        headroom_module, "ends_ns", lambda forward, backward, *rest: true_ends(forward, backward + 1, *rest)
    )
    wrong = headroom(iteration)
    assert wrong != right
    assert right[1].free_ns == naive_headroom(iteration, 1, right[1].free_side, 0)
    assert wrong[1].free_ns != naive_headroom(iteration, 1, wrong[1].free_side, 0)


def test_it_costs_milliseconds() -> None:
    costs = PipelineCosts(
        (31_000_000, 30_000_000, 30_000_000, 37_000_000),
        (60_000_000, 61_000_000, 60_000_000, 71_000_000),
        message_ns=(400_000,) * 3,
    )
    iteration = Iteration(costs, Fill(64), max)
    headroom(iteration)
    start = time.process_time()
    headroom(iteration)
    assert time.process_time() - start < 0.1
