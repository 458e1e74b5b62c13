"""Branch and bound against trying everything, on small families of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.linear_program import least_makespan_ns

from eeplan.sim import branch, fixed_split, known_stages, later_stages
from eeplan.sim.family import Family, Integers
from eeplan.sim.fast import Transport, ends_ns
from eeplan.sim.layout import Layout, can_hold, least_overshoot
from eeplan.sim.solve import Value, solve, some_within, with_split, without_counts, without_times


def random_family(generator: np.random.Generator) -> Family:
    """Any shape that can be enumerated: ties, heavy stages, limits, messages, few or many microbatches."""
    stages = int(generator.integers(1, 5))
    layers = int(generator.integers(stages, stages + 5))
    exits = int(generator.integers(0, min(3, layers - 1) + 1))
    scale = int(generator.choice([3, 20, 1000]))
    rendezvous, microbatches = bool(generator.random() < 0.4), int(generator.integers(1, 14))
    exits_below = np.full(layers + 1, -1)
    group = np.maximum(np.arange(exits + 1)[None] - np.arange(exits + 1)[:, None], 0)
    exit_times = np.arange(exits + 1)[None, :] * generator.integers(0, scale, (2, 1))
    if exits and generator.random() < 0.3:
        named = generator.integers(1, layers + 1, exits)
        exits_below = np.array([(named <= count).sum() for count in range(layers + 1)])
        group = np.zeros_like(group)
        for number, (below, above) in enumerate(combinations(range(exits + 1), 2), start=1):
            group[below, above] = number
        exit_times = np.zeros((2, exits + 1), np.int64)
        exit_times[:, 1:] = generator.integers(0, scale, (2, exits)).cumsum(axis=1)
    shape = (stages, layers + 1, int(group.max()) + 1)
    few = generator.random() < 0.5

    def table() -> Integers:
        return generator.integers(0, 2 if few else scale, shape)

    holder = generator.random((stages, shape[2])) < 0.5
    # The final head's matrix is one of the copies.
    holder[-1] = True
    most_message = int(generator.choice([1, 3, scale]))
    return Family(
        num_stages=stages,
        num_layers=layers,
        num_exits=exits,
        num_microbatches=microbatches,
        forward=generator.integers(0, scale, stages),
        backward=generator.integers(0, scale, stages),
        layer_forward=int(generator.integers(0, scale)),
        layer_backward=int(generator.integers(0, scale)),
        exit_forward=exit_times[0],
        exit_backward=exit_times[1],
        message=generator.integers(0, most_message, stages - 1),
        rendezvous=rendezvous,
        blocks=rendezvous and microbatches > stages,
        group=group,
        exits_below=exits_below,
        exits_most=exits_below,
        excluded=np.full(stages, -1),
        allowed=generator.random(shape) < generator.choice([1.0, 0.7]),
        peak=table(),
        sync=table() * int(generator.choice([0, 1, 5])),
        step=table(),
        holder=holder,
        shared=np.sort(generator.integers(0, scale * int(generator.choice([1, 10])), stages + 1)),
    )


def every_candidate(family: Family) -> Iterator[tuple[Value, tuple[int, ...], tuple[int, ...]]]:
    """(value, layers, exits) of all that is allowed, judged one by one."""
    stages, layers, exits = family.num_stages, family.num_layers, family.num_exits
    for cuts in combinations(range(1, layers), stages - 1):
        below = (0, *cuts, layers)
        layout = Layout(tuple(b - a for a, b in pairwise(below)))
        if family.exits_below[-1] >= 0:
            ends: list[tuple[int, ...]] = [tuple(family.exits_below[list(below)].tolist())]
        else:
            ends = [(0, *rest, exits) for rest in _ascending(stages - 1, exits)]
        for exits_below in ends:
            counts = tuple(b - a for a, b in pairwise(exits_below))
            placed = family.exits_below[-1] >= 0
            if placed or can_hold(counts, layout):
                value = judged(family, layout, exits_below, 0 if placed else None)
                if value is not None:
                    yield value, layout.layers_per_stage, counts


def _ascending(length: int, top: int) -> Iterator[tuple[int, ...]]:
    if length == 0:
        yield ()
        return
    for first in range(top + 1):
        for rest in _ascending(length - 1, top):
            if not rest or rest[0] >= first:
                yield (first, *rest)


def judged(
    family: Family, layout: Layout, exits_below: tuple[int, ...], overshoot: int | None
) -> Value | None:
    """What one candidate is compared by; None if it is not allowed."""
    forward, backward, cells = [], [], []
    for stage, (below, above) in enumerate(pairwise(exits_below)):
        layers = layout.layers_per_stage[stage]
        cells.append((stage, layers, family.group[below, above]))
        added = family.exit_forward[above] - family.exit_forward[below]
        forward.append(family.forward[stage] + layers * family.layer_forward + added)
        added = family.exit_backward[above] - family.exit_backward[below]
        backward.append(family.backward[stage] + layers * family.layer_backward + added)
    if not all(family.allowed[cell] for cell in cells):
        return None
    transport: Transport = "rendezvous" if family.rendezvous else "asynchronous"
    times = np.array([forward]), np.array([backward])
    ends = ends_ns(*times, family.num_microbatches, family.message, transport)[0]
    ready = [int(end + family.sync[cell]) for end, cell in zip(ends, cells, strict=True)]
    holders = [
        time for time, (stage, _, kind) in zip(ready, cells, strict=True) if family.holder[stage, kind]
    ]
    synced = max(*ready, max(holders) + int(family.shared[len(holders)]))
    if overshoot is None:
        found = least_overshoot([b - a for a, b in pairwise(exits_below)], layout)
        assert found is not None
        overshoot = found[0]
    return Value(
        synced + max(int(family.step[cell]) for cell in cells),
        max(int(family.peak[cell]) for cell in cells),
        overshoot,
    )


def key(value: Value) -> tuple[int, int, int]:
    return value.time_ns, value.peak_bytes, value.overshoot


@settings(max_examples=250, deadline=None)
@given(st.integers(0, 2**32))
def test_the_solution_is_the_least_of_all(seed: int) -> None:
    family = random_family(np.random.default_rng(seed))
    every = list(every_candidate(family))
    solution, proof = solve([family])
    assert proof.optimal
    if not every:
        assert solution is None
        return
    assert solution is not None
    assert key(solution.value) == min(key(value) for value, _, _ in every)
    assert (solution.value, solution.split, solution.counts) in every
    assert proof.settled
    assert proof.lower_bound_ns == solution.value.time_ns
    smallest, _ = solve([without_times(family)])
    assert smallest is not None
    assert smallest.value.peak_bytes == min(value.peak_bytes for value, _, _ in every)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_restricted_families_are_searched_among_what_is_left(seed: int) -> None:
    generator = np.random.default_rng(seed)
    family = random_family(generator)
    every = list(every_candidate(family))
    if not every:
        return
    _, split, counts = every[int(generator.integers(len(every)))]
    for restricted, left in (
        (with_split(family, split), [one for one in every if one[1] == split]),
        (without_counts(family, counts), [one for one in every if one[2] != counts]),
    ):
        solution, _ = solve([restricted])
        assert (solution is None) == (not left)
        if solution is not None:
            assert key(solution.value) == min(key(value) for value, _, _ in left)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32))
def test_one_split_is_enumerated_with_the_answers_of_the_search(seed: int) -> None:
    generator = np.random.default_rng(seed)
    family = random_family(generator)
    every = list(every_candidate(family))
    if not every:
        return
    _, split, _ = every[int(generator.integers(len(every)))]
    one = with_split(family, split)
    listed = fixed_split.enumerated(one)
    assert listed is not None
    assert len(listed) == sum(other == split for _, other, _ in every)
    with pytest.MonkeyPatch.context() as patch:
        found = solve([one])
        limits = [found[0].value.time_ns - 1, found[0].value.time_ns, None] if found[0] else [None]
        within = [some_within([one], limit, 10**6) for limit in limits]
        patch.setattr(fixed_split, "MOST", -1)
        searched = solve([one])
        assert [some_within([one], limit, 10**6) for limit in limits] == within == [False, True, True]
    assert (found[0] is None) == (searched[0] is None)
    if found[0] is not None and searched[0] is not None:
        assert key(found[0].value) == key(searched[0].value)
    assert found[1].optimal == searched[1].optimal is True


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_a_later_family_must_be_strictly_faster(seed: int) -> None:
    generator = np.random.default_rng(seed)
    first = random_family(generator)
    # The same shape with times of its own, and with the same times.
    slower = first._replace(backward=first.backward + generator.integers(0, 3, first.num_stages) - 1)
    second = slower._replace(backward=np.maximum(slower.backward, 0), peak=np.zeros_like(first.peak))
    solution, proof = solve([first, second])
    times = [
        min((value.time_ns for value, _, _ in every_candidate(f)), default=None) for f in (first, second)
    ]
    if times[0] is None or times[1] is None:
        assert solution is None
        return
    assert solution is not None
    assert solution.family == (times[1] < times[0])
    assert solution.value.time_ns == proof.lower_bound_ns == min(times[0], times[1])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_no_bound_exceeds_what_completions_take(seed: int) -> None:
    """At every depth of the tree; the times of one random candidate are held against its own prefixes."""
    generator = np.random.default_rng(seed)
    family = random_family(generator)
    every = list(every_candidate(family))
    if not every:
        return
    value, split, counts = every[int(generator.integers(len(every)))]
    most = np.full(family.num_stages, family.num_layers)
    everything = np.zeros(2, np.int64)
    bounds = later_stages.tables(family, 1 << 62, most, everything)
    known = known_stages.empty_prefix(family)
    crossing = later_stages.crossing_ns(family)
    assert known_stages.bound_ns(family, bounds, known, 0, crossing) <= value.time_ns
    last = above = 0
    for stage, layers in enumerate(split):
        above += counts[stage]
        assert known_stages.extend(family, bounds, known, stage, layers, above, everything)
        bound = known_stages.bound_ns(family, bounds, known, stage + 1, crossing)
        assert bound <= value.time_ns
        assert branch.least_gaps(family, known, stage + 1) <= value.overshoot
        last = bound
    assert last >= crossing


def test_too_high_a_bound_is_noticed() -> None:
    """Negative control: with messages twice as long in the bounds only, the best candidate is cut off."""
    generator = np.random.default_rng(7)
    wrong = 0
    for _ in range(60):
        family = random_family(generator)
        solution, _ = solve([family])
        if solution is None or family.num_stages < 2:
            continue
        longer = family._replace(message=family.message + 50)
        most, everything = np.full(family.num_stages, family.num_layers), np.zeros(2, np.int64)
        bounds = later_stages.tables(longer, 1 << 62, most, everything)
        known = known_stages.empty_prefix(longer)
        bound = known_stages.bound_ns(longer, bounds, known, 0, later_stages.crossing_ns(longer))
        wrong += bound > solution.value.time_ns
    assert wrong > 10


@pytest.mark.parametrize("seed", range(6))
def test_spaces_too_large_to_enumerate_agree_with_a_linear_program(seed: int) -> None:
    """The additive part: free messages, no synchronisation and no optimizer step."""
    generator = np.random.default_rng(seed)
    stages, layers, exits = int(generator.integers(5, 8)), int(generator.integers(18, 30)), 3
    nothing = np.zeros((stages, layers + 1, exits + 1), np.int64)
    counts = np.arange(exits + 1)
    family = Family(
        num_stages=stages,
        num_layers=layers,
        num_exits=exits,
        num_microbatches=int(generator.integers(stages + 1, 4 * stages)),
        forward=generator.integers(0, 30, stages),
        backward=generator.integers(0, 60, stages),
        layer_forward=int(generator.integers(5, 20)),
        layer_backward=int(generator.integers(10, 40)),
        exit_forward=counts * int(generator.integers(0, 20)),
        exit_backward=counts * int(generator.integers(0, 40)),
        message=np.zeros(stages - 1, np.int64),
        rendezvous=False,
        blocks=False,
        group=np.maximum(counts[None] - counts[:, None], 0),
        exits_below=np.full(layers + 1, -1),
        exits_most=np.full(layers + 1, -1),
        excluded=np.full(stages, -1),
        allowed=np.ones(nothing.shape, np.bool_),
        peak=nothing,
        sync=nothing,
        step=nothing,
        holder=np.ones((stages, exits + 1), np.bool_),
        shared=np.zeros(stages + 1, np.int64),
    )
    solution, proof = solve([family])
    assert solution is not None
    assert proof.optimal
    assert solution.value.time_ns == least_makespan_ns(family)
