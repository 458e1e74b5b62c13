"""Closed forms against the engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles.longest_path import one_f_one_b_ns

from eeplan.sim.bounds import (
    bubble_fill_capacity,
    closed_form_ns,
    in_flight_microbatches,
    peak_bytes,
    upper_bound_ns,
)
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import simulate
from eeplan.sim.schedule import one_f_one_b
from eeplan.sim.validators import in_flight

TIME = st.one_of(st.integers(0, 5), st.integers(0, 1000))


def engine_ns(forward_ns: list[int], backward_ns: list[int], num_microbatches: int) -> int:
    costs = PipelineCosts(tuple(forward_ns), tuple(backward_ns))
    return simulate(one_f_one_b(costs.num_stages, num_microbatches), costs).pipeline_ns


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(TIME, TIME), min_size=1, max_size=7), st.integers(0, 15))
def test_closed_form_is_the_engine(stages: list[tuple[int, int]], extra: int) -> None:
    forward, backward = [f for f, _ in stages], [b for _, b in stages]
    num_microbatches = len(stages) + extra
    expected = engine_ns(forward, backward, num_microbatches)
    assert closed_form_ns(forward, backward, num_microbatches) == expected
    assert one_f_one_b_ns(forward, backward, num_microbatches) == expected


def random_stages(rng: np.random.Generator, num_stages: int) -> tuple[list[int], list[int]]:
    """Stage times of one of four shapes: few values (ties), heavy tails, GPT-like, any."""
    shape = rng.integers(4)
    if shape == 0:
        times = rng.integers(0, 4, (2, num_stages))
    elif shape == 1:
        times = (10 * rng.pareto(0.7, (2, num_stages))).clip(max=1e9).astype(np.int64)
    elif shape == 2:
        times = np.outer([100, 200], np.ones(num_stages, np.int64)) + rng.integers(0, 3, (2, num_stages))
        times[:, [0, -1]] += rng.integers(0, 60, (2, 2))
    else:
        times = rng.integers(0, 10_000, (2, num_stages))
    return times[0].tolist(), times[1].tolist()


def test_closed_form_is_the_engine_on_a_sweep_of_shapes() -> None:
    rng = np.random.default_rng(20231208)
    for _ in range(2500):
        num_stages = int(rng.integers(1, 10))
        num_microbatches = num_stages + int(rng.integers(0, 2 * num_stages + 1))
        forward, backward = random_stages(rng, num_stages)
        assert closed_form_ns(forward, backward, num_microbatches) == engine_ns(
            forward, backward, num_microbatches
        ), (forward, backward, num_microbatches)


def test_the_usual_approximation_is_not_the_engine() -> None:
    """Negative control: the sweep tells a wrong formula, sum(t) + (M-1) max(t), from the right one."""
    rng = np.random.default_rng(7)
    exact = 0
    for _ in range(200):
        forward, backward = random_stages(rng, 6)
        work = [f + b for f, b in zip(forward, backward, strict=True)]
        exact += sum(work) + 11 * max(work) == engine_ns(forward, backward, 12)
    assert exact < 100


def test_closed_form_refuses_fewer_microbatches_than_stages() -> None:
    with pytest.raises(ValueError, match="got 3 for 4"):
        closed_form_ns([1] * 4, [2] * 4, 3)


@st.composite
def early_exit_stages(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    """Forward and backward of each stage (equal backbones, any exits and ends), M, and the paper's bound."""
    num_stages = draw(st.integers(1, 7))
    num_microbatches = draw(st.integers(1, 3 * num_stages + 2))
    backbone_f, backbone_b, embedding_f, embedding_b, final_f, final_b = draw(st.tuples(*[TIME] * 6))
    per_stage = {"min_size": num_stages, "max_size": num_stages}
    exits = draw(st.lists(st.tuples(TIME, TIME), **per_stage))
    if draw(st.booleans()):
        exits = [exits[0]] * num_stages
    counts = draw(st.lists(st.integers(0, 2), **per_stage))
    exits = [(n * f, n * b) for n, (f, b) in zip(counts, exits, strict=True)]
    deferred = draw(st.booleans())
    forward = [backbone_f + (0 if deferred else f) for f, _ in exits]
    backward = [backbone_b + b + (f if deferred else 0) for f, b in exits]
    forward[0] += embedding_f
    backward[0] += embedding_b
    forward[-1] += final_f
    backward[-1] += final_b
    extra = min(max(forward) - backbone_f, max(backward) - backbone_b)
    assume(extra <= backbone_f + backbone_b)
    bound = upper_bound_ns(
        backbone_f + backbone_b,
        [f + b for f, b in exits],
        num_microbatches,
        embedding_ns=embedding_f + embedding_b,
        final_ns=final_f + final_b,
    )
    return forward, backward, num_microbatches, bound


@settings(max_examples=250, deadline=None)
@given(early_exit_stages())
def test_upper_bound_is_never_exceeded(case: tuple[list[int], list[int], int, int]) -> None:
    forward, backward, num_microbatches, bound = case
    assert bound >= engine_ns(forward, backward, num_microbatches)


def test_upper_bound_is_exceeded_outside_its_condition() -> None:
    """No backbone, an embedding's forward of 1 on stage 0, an exit's backward of 1 on stage 1."""
    assert engine_ns([1, 0, 0, 0], [0, 1, 0, 0], 3) == 6
    assert upper_bound_ns(0, [0, 1, 0, 0], 3, embedding_ns=1) == 5


def test_upper_bound_is_tight_where_the_paper_says_so() -> None:
    """P=4, M=64, f=1, b=2, heads 0.25 + 0.5, in units of 100 ns: k middle exits cost k times 75."""
    f, b, head_f, head_b = 100, 200, 25, 50
    for counts, cost in (((0, 1, 0, 0), 75), ((0, 1, 1, 0), 150)):
        forward = [f + n * head_f for n in counts]
        backward = [b + n * head_b for n in counts]
        forward[-1] += head_f
        backward[-1] += head_b
        exits = [n * (head_f + head_b) for n in counts]
        bound = upper_bound_ns(f + b, exits, 64, final_ns=head_f + head_b)
        assert engine_ns(forward, backward, 64) == bound
        assert bound == upper_bound_ns(f + b, [0] * 4, 64, final_ns=head_f + head_b) + cost


def test_a_bound_without_the_exits_on_the_way_is_exceeded() -> None:
    """Negative control: the engine notices a bound that leaves sum_i N_i (f_EE + b_EE) out."""
    slowest_is_last = upper_bound_ns(300, [0, 0, 0, 0], 64, final_ns=75)
    assert engine_ns([100, 125, 100, 125], [200, 250, 200, 250], 64) > slowest_is_last


SIZES = st.lists(st.tuples(*[st.integers(0, 99)] * 4), min_size=1, max_size=7)


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(1, 12), TIME, TIME, st.integers(0, 9))
def test_peak_bytes_is_the_engine(
    sizes: list[tuple[int, ...]], num_microbatches: int, forward: int, backward: int, latency: int
) -> None:
    static, kept, forward_transient, backward_transient = (
        tuple(column) for column in zip(*sizes, strict=True)
    )
    costs = PipelineCosts(
        (forward,) * len(sizes),
        (backward,) * len(sizes),
        (latency,) * (len(sizes) - 1),
        static_bytes=static,
        kept_bytes=kept,
        forward_transient_bytes=forward_transient,
        backward_transient_bytes=backward_transient,
    )
    schedule = one_f_one_b(len(sizes), num_microbatches)
    timeline = simulate(schedule, costs)
    assert peak_bytes(costs, num_microbatches) == tuple(map(timeline.peak_bytes, range(len(sizes))))
    assert in_flight(schedule) == tuple(
        in_flight_microbatches(len(sizes), num_microbatches, stage) for stage in range(len(sizes))
    )


def test_peak_bytes_without_any_sizes_is_zero() -> None:
    assert peak_bytes(PipelineCosts((1, 1), (1, 1)), 3) == (0, 0)


@pytest.mark.parametrize(("num_stages", "expected"), [(1, 0), (2, 0), (4, 2), (8, 4), (16, 10)])
def test_bubble_fill_capacity_with_backward_twice_the_forward(num_stages: int, expected: int) -> None:
    """Facts 4; b = 2f."""
    assert bubble_fill_capacity(num_stages, 1_000, 2_000) == expected


@given(st.integers(1, 64), st.integers(0, 1000), st.integers(0, 1000))
def test_bubble_fill_capacity_is_the_largest_that_fits(num_stages: int, forward: int, backward: int) -> None:
    capacity = bubble_fill_capacity(num_stages, forward, backward)
    room = (num_stages - 1) * backward
    assert capacity * (forward + backward) <= room
    assert (capacity + 1) * (forward + backward) > room or forward + backward == 0
