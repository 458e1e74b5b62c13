"""The fast evaluators give the engine's answer to the nanosecond."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.longest_path import blocking_one_f_one_b_ns, one_f_one_b_ns

from eeplan.sim.bounds import closed_form_ns
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import Transport, simulate
from eeplan.sim.fast import Nanoseconds, closed_form_makespans_ns, ends_ns, makespans_ns
from eeplan.sim.schedule import one_f_one_b

TRANSPORTS: tuple[Transport, ...] = ("asynchronous", "rendezvous")
DURATIONS = st.one_of(st.integers(0, 5), st.integers(0, 10_000))
GOLDEN_MS = {(4, 64): 203.56, (8, 128): 410.20, (64, 1024): 3303.16}
"""Rendezvous makespans at f=1, b=2, c=0.01 ms, from SimuMax's example phases (facts 8)."""


def random_times(generator: np.random.Generator, shape: tuple[int, int]) -> Nanoseconds:
    """Times with ties, zeros and heavy tails, one kind per row."""
    kinds = (
        generator.integers(0, 4, shape),
        generator.integers(0, 10_000, shape),
        (10 * generator.pareto(0.7, shape)).clip(max=1e12).astype(np.int64),
    )
    return np.choose(generator.integers(0, 3, (shape[0], 1)), kinds)


def engine(
    forward: Nanoseconds, backward: Nanoseconds, microbatches: int, latency: int, transport: Transport
) -> list[int]:
    """When each stage's last op ends, by the engine."""
    costs = PipelineCosts(tuple(forward.tolist()), tuple(backward.tolist()), (latency,) * (len(forward) - 1))
    timeline = simulate(one_f_one_b(len(forward), microbatches), costs, transport)
    return [row[-1].end_ns for row in timeline.spans]


@settings(max_examples=120, deadline=None)
@given(
    st.integers(1, 7),
    st.integers(1, 16),
    st.integers(0, 40),
    st.integers(0, 2**32),
    st.sampled_from(TRANSPORTS),
)
def test_makespan_is_the_engine(
    num_stages: int, num_microbatches: int, latency: int, seed: int, transport: Transport
) -> None:
    generator = np.random.default_rng(seed)
    forward, backward = (random_times(generator, (3, num_stages)) for _ in range(2))
    messages = [latency] * (num_stages - 1)
    found = makespans_ns(forward, backward, num_microbatches, messages, transport)
    expected = [
        engine(f, b, num_microbatches, latency, transport) for f, b in zip(forward, backward, strict=True)
    ]
    assert found.tolist() == [max(ends) for ends in expected]
    if transport == "asynchronous":
        assert ends_ns(forward, backward, num_microbatches, messages).tolist() == expected


@settings(max_examples=80, deadline=None)
@given(st.integers(2, 6), st.integers(1, 14), st.integers(0, 2**32))
def test_each_link_and_candidate_has_its_own_message_time(
    num_stages: int, num_microbatches: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    forward, backward = (random_times(generator, (4, num_stages)) for _ in range(2))
    messages = random_times(generator, (4, num_stages - 1))
    for transport, oracle in (("asynchronous", one_f_one_b_ns), ("rendezvous", blocking_one_f_one_b_ns)):
        found = makespans_ns(forward, backward, num_microbatches, messages, transport)  # type: ignore[arg-type]
        assert found.tolist() == [
            oracle(f.tolist(), b.tolist(), num_microbatches, c.tolist())
            for f, b, c in zip(forward, backward, messages, strict=True)
        ]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 9), st.integers(0, 20), st.integers(0, 2**32))
def test_closed_form_is_the_scalar_one_and_the_recurrence(num_stages: int, extra: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    forward, backward = (random_times(generator, (20, num_stages)) for _ in range(2))
    num_microbatches = num_stages + extra
    found = closed_form_makespans_ns(forward, backward, num_microbatches)
    assert found.tolist() == [
        closed_form_ns(f, b, num_microbatches)
        for f, b in zip(forward.tolist(), backward.tolist(), strict=True)
    ]
    free = [0] * (num_stages - 1)
    assert np.array_equal(found, makespans_ns(forward, backward, num_microbatches, free))


def test_closed_form_is_the_recurrence_on_a_large_sweep() -> None:
    generator = np.random.default_rng(1)
    for num_stages in (1, 2, 3, 5, 8, 13, 24, 64):
        for factor in (1, 2, 5):
            forward, backward = (random_times(generator, (2000, num_stages)) for _ in range(2))
            batch = forward, backward, factor * num_stages
            free = [0] * (num_stages - 1)
            assert np.array_equal(closed_form_makespans_ns(*batch), makespans_ns(*batch, free))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), list(GOLDEN_MS))
def test_golden_rendezvous_makespans(num_stages: int, num_microbatches: int) -> None:
    forward = np.full((1, num_stages), 1_000_000)
    messages = [10_000] * (num_stages - 1)
    found = makespans_ns(forward, 2 * forward, num_microbatches, messages, "rendezvous")
    assert found.tolist() == [round(GOLDEN_MS[num_stages, num_microbatches] * 1e6)]
    # Negative control: asynchronous messages hide part of the wait.
    assert makespans_ns(forward, 2 * forward, num_microbatches, messages)[0] < found[0]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_candidate_does_not_depend_on_its_neighbours_in_the_batch(transport: Transport) -> None:
    generator = np.random.default_rng(3)
    forward, backward = (random_times(generator, (70, 4)) for _ in range(2))
    whole = ends_ns(forward, backward, 9, [5, 6, 7], transport)
    for size in (0, 1, 31, 32, 33, 64, 65):
        part = ends_ns(forward[:size], backward[:size], 9, [5, 6, 7], transport)
        assert np.array_equal(part, whole[:size])
    # Views and other integer types are fine too.
    reversed_part = ends_ns(
        forward[::-1].astype(np.int32, order="F"), backward[::-1], 9, [5, 6, 7], transport
    )
    representable = forward.max(axis=1) < 2**31
    assert np.array_equal(reversed_part[::-1][representable], whole[representable])


def test_ends_include_the_last_rendezvous() -> None:
    forward, backward = np.full((1, 2), 10), np.full((1, 2), 20)
    assert ends_ns(forward, backward, 1, [3], "rendezvous").tolist() == [[66, 46]]
    assert ends_ns(forward, backward, 1, [3], "asynchronous").tolist() == [[66, 43]]


def test_wrong_shapes_are_refused() -> None:
    times = np.ones((3, 4), np.int64)
    with pytest.raises(ValueError, match=r"expected \[candidates, stages\] twice"):
        makespans_ns(times, times[:, :2], 5, [1, 1, 1])
    with pytest.raises(ValueError, match=r"expected \[candidates, stages\] twice"):
        closed_form_makespans_ns(times[0], times[0], 5)
    with pytest.raises(ValueError, match=r"shape \(1,\) for 3 candidates of 4 stages"):
        makespans_ns(times, times, 5, [1])
    with pytest.raises(ValueError, match="give at least 1"):
        makespans_ns(times, times, 0, [1, 1, 1])
    with pytest.raises(ValueError, match="got 3 for 4; use makespans_ns"):
        closed_form_makespans_ns(times, times, 3)
