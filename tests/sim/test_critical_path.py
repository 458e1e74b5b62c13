"""The critical path: a chain without gaps, and counts that equal finite differences of the simulator."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim.costs import PipelineCosts
from eeplan.sim.critical_path import (
    EventGraph,
    Place,
    critical_path,
    deciding_stages,
    event_graph,
    times_passed,
)
from eeplan.sim.engine import simulate, stage_ends_ns
from eeplan.sim.fill import Fill, filled
from eeplan.sim.schedule import Schedule, one_f_one_b
from eeplan.timeline import Message, Span

GRID_NS = 10_000
"""Times are multiples of it, so that paths that are not equally long differ by at least this much, more than
a path can pass one op: then a finite difference is the derivative."""


@st.composite
def pipelines(draw: st.DrawFn, largest: int = 6) -> tuple[Schedule, PipelineCosts]:
    num_stages = draw(st.integers(1, 4))

    def times(count: int, least: int = 1) -> tuple[int, ...]:
        drawn = draw(st.lists(st.integers(least, largest), min_size=count, max_size=count))
        return tuple(GRID_NS * time for time in drawn)

    transport: Any = draw(st.sampled_from(("asynchronous", "rendezvous")))
    fill = Fill(draw(st.integers(1, 7)))
    if num_stages > 1 and transport == "asynchronous" and draw(st.booleans()):
        lengths = st.lists(st.integers(1, num_stages - 1), max_size=2)
        depths, reaches = (tuple(sorted(draw(lengths), reverse=True)) for _ in range(2))
        fill = replace(fill, depths=depths, reaches=reaches)
    costs = PipelineCosts(
        times(num_stages),
        times(num_stages),
        message_ns=times(num_stages - 1, 0),
        transport=transport,
    )
    if not fill.is_plain:
        costs = replace(
            costs,
            turn_forward_ns=times(num_stages),
            turn_backward_ns=times(num_stages),
            bare_forward_ns=tuple(time // 2 for time in costs.forward_ns),
        )
    return filled(num_stages, fill), costs


def graph_of(schedule: Schedule, costs: PipelineCosts) -> EventGraph:
    return event_graph(schedule, simulate(schedule, costs), costs.transport)


def start_and_end(node: Span | Message) -> tuple[int, int]:
    return (node.send_ns, node.receive_ns) if isinstance(node, Message) else (node.start_ns, node.end_ns)


def unit_weights(graph: EventGraph) -> tuple[list[Place], dict[Place, np.ndarray]]:
    """Each place is one thing."""
    places = sorted(set(graph.places))
    eye = np.eye(len(places), dtype=np.int64)
    return places, {place: eye[index] for index, place in enumerate(places)}


def changed(costs: PipelineCosts, place: Place, by_ns: int) -> PipelineCosts:
    """Costs with the ops or messages of one place longer or shorter."""

    def moved(times: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(time + by_ns * (index == place.stage) for index, time in enumerate(times))

    if place.what.startswith("message"):
        return replace(costs, message_ns=moved(costs.message_ns))
    column = f"{place.what}_ns"
    return replace(costs, **{column: moved(getattr(costs, column))})


@given(pipelines())
@settings(max_examples=80, deadline=None)
def test_the_path_is_a_chain_from_start_to_end(case: tuple[Schedule, PipelineCosts]) -> None:
    schedule, costs = case
    graph = graph_of(schedule, costs)
    path = critical_path(graph)
    edges = [start_and_end(node) for node in path]
    assert edges[0][0] == 0
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert edges[-1][1] == max(stage_ends_ns(schedule, costs))
    assert sum(end - start for start, end in edges) == edges[-1][1]


@given(pipelines())
@settings(max_examples=60, deadline=None)
def test_counts_are_finite_differences_of_the_simulator(case: tuple[Schedule, PipelineCosts]) -> None:
    """Most: what the makespan gains when a thing takes a ns more; least: what it loses with a ns less."""
    schedule, costs = case
    graph = graph_of(schedule, costs)
    places, weights = unit_weights(graph)
    stages = deciding_stages(stage_ends_ns(schedule, costs), max)
    least, most = times_passed(graph, stages, weights)
    now = max(stage_ends_ns(schedule, costs))
    on_path = Counter(
        place
        for node in critical_path(graph, stages[0])
        for place, other in zip(graph.places, graph.nodes, strict=True)
        if other is node
    )
    for index, place in enumerate(places):
        if place.what.startswith("message"):
            # A link's message takes as long in both directions, and is changed in both.
            continue
        longer = max(stage_ends_ns(schedule, changed(costs, place, 1)))
        shorter = max(stage_ends_ns(schedule, changed(costs, place, -1)))
        assert most[index] == longer - now
        assert least[index] == now - shorter
        assert least[index] <= on_path[place] <= most[index]


@given(pipelines())
@settings(max_examples=40, deadline=None)
def test_messages_count_together_in_both_directions(case: tuple[Schedule, PipelineCosts]) -> None:
    schedule, costs = case
    graph = graph_of(schedule, costs)
    links = max(1, schedule.num_stages - 1)
    rows = {
        place: np.eye(links, dtype=np.int64)[place.stage] * place.what.startswith("message")
        if place.stage < links
        else np.zeros(links, np.int64)
        for place in graph.places
    }
    stages = deciding_stages(stage_ends_ns(schedule, costs), max)
    _, most = times_passed(graph, stages, rows)
    now = max(stage_ends_ns(schedule, costs))
    for link in range(schedule.num_stages - 1):
        longer = replace(costs, message_ns=tuple(t + (i == link) for i, t in enumerate(costs.message_ns)))
        assert most[link] == max(stage_ends_ns(schedule, longer)) - now


def test_ties_are_told_apart_from_certainties() -> None:
    """Equal stages: a slower backward of stage 1 counts for all microbatches but two, a faster one once."""
    schedule, costs = one_f_one_b(4, 16), PipelineCosts((10,) * 4, (20,) * 4)
    graph = graph_of(schedule, costs)
    places, weights = unit_weights(graph)
    least, most = times_passed(graph, [0], weights)
    found = {place: (least[i], most[i]) for i, place in enumerate(places)}
    assert found[Place("backward", 1)] == (1, 14)
    # Nothing waits for anything else than the last stage when that is the slowest.
    slow = graph_of(schedule, PipelineCosts((10, 10, 10, 11), (20, 20, 20, 22)))
    least, most = times_passed(slow, [0], weights)
    assert least.tolist() == most.tolist()
    assert dict(zip(places, most.tolist(), strict=True)) == {
        **{Place(what, stage): 1 for what in ("forward", "backward") for stage in range(3)},
        Place("forward", 3): 16,
        Place("backward", 3): 16,
    } | {place: most[i] for i, place in enumerate(places) if place.what.startswith("message")}


def test_a_stage_that_reduces_longest_decides() -> None:
    """The iteration can hang on a stage that is done before the last."""
    schedule, costs = one_f_one_b(2, 4), PipelineCosts((10, 10), (20, 20))
    ends = stage_ends_ns(schedule, costs)
    assert ends[1] < ends[0]
    assert deciding_stages(ends, max) == (0,)
    assert deciding_stages(ends, lambda times: max(times[0], times[1] + 100)) == (1,)
    path = critical_path(graph_of(schedule, costs), 1)
    assert start_and_end(path[-1])[1] == ends[1]


def test_a_timeline_of_another_schedule_is_refused() -> None:
    """Negative control: a measured timeline has gaps that nothing explains."""
    schedule, costs = one_f_one_b(2, 3), PipelineCosts((10, 10), (20, 20))
    timeline = simulate(schedule, costs)
    first = timeline.spans[0]
    late = replace(first[-1], start_ns=first[-1].start_ns + 1, end_ns=first[-1].end_ns + 1)
    with pytest.raises(ValueError, match="starts after all that it waits for"):
        event_graph(schedule, replace(timeline, spans=((*first[:-1], late), timeline.spans[1])))
