"""The engine against the longest path of an explicit graph, and its books: spans, messages, memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.longest_path import blocking_one_f_one_b_ns, one_f_one_b_ns

from eeplan.errors import ScheduleError
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import Transport, message_ns, simulate
from eeplan.sim.schedule import Op, Schedule, one_f_one_b
from eeplan.timeline import MemorySample, Span

TRANSPORTS: tuple[Transport, ...] = ("asynchronous", "rendezvous")


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[PipelineCosts, int]:
    """Stage costs with small integers (ties are the hard case), now and then a very long op or no time."""
    num_stages = draw(st.integers(1, 6))
    time = st.one_of(st.integers(0, 6), st.integers(1, 500))

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
    return costs, draw(st.integers(1, 14))


@settings(max_examples=250, deadline=None)
@given(pipelines())
def test_makespan_is_the_longest_path(pipeline: tuple[PipelineCosts, int]) -> None:
    costs, num_microbatches = pipeline
    schedule = one_f_one_b(costs.num_stages, num_microbatches)
    times = costs.forward_ns, costs.backward_ns, num_microbatches, message_ns(costs)
    assert simulate(schedule, costs, "asynchronous").pipeline_ns == one_f_one_b_ns(*times)
    assert simulate(schedule, costs, "rendezvous").pipeline_ns == blocking_one_f_one_b_ns(*times)


@settings(max_examples=100, deadline=None)
@given(pipelines(), st.sampled_from(TRANSPORTS))
def test_spans_and_messages_keep_the_rules(pipeline: tuple[PipelineCosts, int], transport: Transport) -> None:
    costs, num_microbatches = pipeline
    schedule = one_f_one_b(costs.num_stages, num_microbatches)
    timeline = simulate(schedule, costs, transport)
    spans: dict[tuple[str, int, int], Span] = {}
    for stage, row in enumerate(timeline.spans):
        ops = [i for i in schedule.stages[stage] if i.op in (Op.FORWARD, Op.BACKWARD)]
        assert [(s.kind[0].upper(), s.microbatch) for s in row] == [(i.op.value, i.microbatch) for i in ops]
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(row))
        for span in row:
            duration = (costs.forward_ns if span.kind == "forward" else costs.backward_ns)[stage]
            assert span.end_ns - span.start_ns == duration
            spans[span.kind, stage, span.microbatch] = span
    assert len(timeline.messages) == 2 * (costs.num_stages - 1) * num_microbatches
    link_free_ns: dict[tuple[int, int], int] = {}
    for message in timeline.messages:
        link = message.source, message.target
        assert message.send_ns >= spans[message.direction, message.source, message.microbatch].end_ns
        assert message.receive_ns <= spans[message.direction, message.target, message.microbatch].start_ns
        assert message.receive_ns - message.send_ns == message_ns(costs)[min(link)]
        assert message.size_bytes == costs.output_bytes[min(link)]
        assert message.send_ns >= link_free_ns.get(link, 0)
        link_free_ns[link] = message.receive_ns


@settings(max_examples=100, deadline=None)
@given(pipelines(), st.sampled_from(TRANSPORTS))
def test_memory_is_the_sum_over_what_is_alive(
    pipeline: tuple[PipelineCosts, int], transport: Transport
) -> None:
    costs, num_microbatches = pipeline
    # An op without time has no instant inside it to look at.
    positive = {name: tuple(t + 1 for t in getattr(costs, name)) for name in ("forward_ns", "backward_ns")}
    costs = replace(costs, **positive)
    timeline = simulate(one_f_one_b(costs.num_stages, num_microbatches), costs, transport)
    for stage, samples in enumerate(timeline.memory):
        times = [sample.time_ns for sample in samples]
        assert times[0] == 0
        assert times == sorted(set(times))
        for sample, until in zip(samples, [*times[1:], times[-1] + 1], strict=True):
            for instant in {sample.time_ns, until - 1}:
                assert sample.live_bytes == live_bytes(timeline.spans[stage], costs, stage, instant)


def live_bytes(spans: tuple[Span, ...], costs: PipelineCosts, stage: int, instant: int) -> int:
    """Naive count of what is alive on a stage at an instant (spans are half-open)."""
    live = costs.static_bytes[stage]
    for span in spans:
        running = span.start_ns <= instant < span.end_ns
        if span.kind == "forward":
            live += costs.kept_bytes[stage] * (span.start_ns <= instant)
            live += costs.forward_transient_bytes[stage] * running
        else:
            live -= costs.kept_bytes[stage] * (span.end_ns <= instant)
            live += costs.backward_transient_bytes[stage] * running
    return live


def test_memory_of_one_stage_written_out() -> None:
    costs = PipelineCosts(
        forward_ns=(10,),
        backward_ns=(20,),
        static_bytes=(100,),
        kept_bytes=(7,),
        forward_transient_bytes=(3,),
        backward_transient_bytes=(5,),
    )
    memory = simulate(one_f_one_b(1, 2), costs).memory[0]
    expected = [(0, 110), (10, 112), (30, 110), (40, 112), (60, 100)]
    assert memory == tuple(MemorySample(time, live) for time, live in expected)


@pytest.mark.parametrize(
    ("num_stages", "num_microbatches", "expected_ns"), [(4, 64, 203_560_000), (8, 128, 410_200_000)]
)
def test_rendezvous_golden_makespans(num_stages: int, num_microbatches: int, expected_ns: int) -> None:
    """f=1, b=2, c=0.01 ms; from SimuMax's blocking example phases (facts 8)."""
    costs = PipelineCosts((1_000_000,) * num_stages, (2_000_000,) * num_stages, (10_000,) * (num_stages - 1))
    schedule = one_f_one_b(num_stages, num_microbatches)
    assert simulate(schedule, costs, "rendezvous").pipeline_ns == expected_ns


def test_messages_in_one_direction_queue_on_their_link() -> None:
    # Forwards of 1 ns, messages of 10: the second message leaves when the first has arrived.
    costs = PipelineCosts((1, 1), (1, 1), message_ns=(10,))
    forward = [m for m in simulate(one_f_one_b(2, 2), costs).messages if m.direction == "forward"]
    assert [(m.send_ns, m.receive_ns) for m in forward] == [(1, 11), (11, 21)]


def test_every_link_has_its_own_message_time() -> None:
    costs = PipelineCosts((1, 1, 1), (1, 1, 1), message_ns=(50, 2))
    hidden = [m for m in simulate(one_f_one_b(3, 1), costs).messages if m.direction == "forward"]
    assert [m.receive_ns - m.send_ns for m in hidden] == [50, 2]
    with pytest.raises(ValueError, match="1 message times were given for 2 links"):
        simulate(one_f_one_b(3, 1), replace(costs, message_ns=(5,)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_equal_inputs_give_equal_timelines(transport: Transport) -> None:
    costs = PipelineCosts((3, 3, 3), (3, 3, 3), message_ns=(3, 3))
    schedule = one_f_one_b(3, 5)
    assert simulate(schedule, costs, transport) == simulate(schedule, costs, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_stuck_run_names_what_is_pending(transport: Transport) -> None:
    schedule = one_f_one_b(2, 2)
    first = tuple(i for i in schedule.stages[0] if str(i) != "sf1")
    broken = Schedule(2, (first, schedule.stages[1]))
    with pytest.raises(
        ScheduleError, match=r"stage 0 waits at .*, stage 1 waits at instruction \d \((F|rf)1\)"
    ):
        simulate(broken, PipelineCosts((1, 1), (1, 1)), transport)


def test_costs_of_another_pipeline_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit a schedule of 3"):
        simulate(one_f_one_b(3, 2), PipelineCosts((1, 1), (1, 1)))
    with pytest.raises(ValueError, match="1 values were given for 2 stages"):
        simulate(one_f_one_b(2, 2), PipelineCosts((1, 1), (1, 1), static_bytes=(1,)))


def test_the_garbage_collector_is_left_as_it_was() -> None:
    costs = PipelineCosts((1, 1), (1, 1))
    broken = Schedule(2, (one_f_one_b(2, 2).stages[0][:-2], one_f_one_b(2, 2).stages[1][:1]))
    for restore in (gc.enable, gc.disable):
        restore()
        try:
            before = gc.isenabled()
            simulate(one_f_one_b(2, 2), costs)
            assert gc.isenabled() == before
            with pytest.raises(ScheduleError):
                simulate(broken, costs, "rendezvous")
            assert gc.isenabled() == before
        finally:
            gc.enable()
