"""Deferred exit forwards that run while the gradient is still on its way."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import simulate
from eeplan.sim.schedule import Op, compute_order, one_f_one_b


def split_makespan_ns(costs: PipelineCosts, num_microbatches: int) -> int:
    """Each backward as two ops: one that follows the op before it, one that also follows the gradient."""
    orders = [list(stage) for stage in compute_order(costs.num_stages, num_microbatches).stages]
    last = costs.num_stages - 1
    ends: dict[tuple[Op, int, int], int] = {}
    clocks = [0] * costs.num_stages
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                op, microbatch = order[0].op, order[0].microbatch
                source = stage - 1 if op is Op.FORWARD else stage + 1
                arrived = 0
                if 0 <= source <= last:
                    if (op, source, microbatch) not in ends:
                        break
                    arrived = ends[op, source, microbatch]
                if op is Op.FORWARD:
                    clocks[stage] = max(clocks[stage], arrived) + costs.forward_ns[stage]
                else:
                    early = costs.before_gradient_ns[stage]
                    rest = costs.backward_ns[stage] - early
                    clocks[stage] = max(clocks[stage] + early, arrived) + rest
                ends[op, stage, microbatch] = clocks[stage]
                order.pop(0)
    return max(clocks)


@st.composite
def costs_with_early_parts(draw: st.DrawFn) -> tuple[PipelineCosts, int]:
    num_stages = draw(st.integers(1, 5))
    column = st.lists(st.integers(0, 30), min_size=num_stages, max_size=num_stages)
    forward, early, rest = draw(column), draw(column), draw(column)
    costs = PipelineCosts(
        forward_ns=tuple(forward),
        backward_ns=tuple(a + b for a, b in zip(early, rest, strict=True)),
        # Messages take no time: long ones could queue on a link, which the oracle does not know.
        before_gradient_ns=tuple(early),
    )
    return costs, draw(st.integers(1, 9))


@settings(max_examples=150, deadline=None)
@given(costs_with_early_parts())
def test_the_makespan_is_that_of_a_backward_in_two_parts(case: tuple[PipelineCosts, int]) -> None:
    costs, num_microbatches = case
    timeline = simulate(one_f_one_b(costs.num_stages, num_microbatches), costs)
    assert timeline.pipeline_ns == split_makespan_ns(costs, num_microbatches)
    for stage, spans in enumerate(timeline.spans):
        for before, after in pairwise(spans):
            assert before.end_ns <= after.start_ns, f"stage {stage} runs two ops at once"
    waiting = simulate(one_f_one_b(costs.num_stages, num_microbatches), replace(costs, before_gradient_ns=()))
    assert timeline.pipeline_ns <= waiting.pipeline_ns


def test_an_exit_in_the_cool_down_is_hidden_behind_the_wait() -> None:
    """P=2, M=1: the first stage's exit forward of 5 runs during the 9 that the second stage takes."""
    costs = PipelineCosts(forward_ns=(2, 3), backward_ns=(9, 6), before_gradient_ns=(5, 0))
    assert simulate(one_f_one_b(2, 1), costs).pipeline_ns == 2 + 3 + 6 + (9 - 5)
    assert simulate(one_f_one_b(2, 1), replace(costs, before_gradient_ns=())).pipeline_ns == 2 + 3 + 6 + 9


def test_blocking_receives_cannot_hide_it() -> None:
    costs = PipelineCosts(forward_ns=(2, 3), backward_ns=(9, 6), before_gradient_ns=(5, 0))
    with pytest.raises(ValueError, match="needs asynchronous messages"):
        simulate(one_f_one_b(2, 1), costs, "rendezvous")
