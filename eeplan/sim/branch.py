# mypy: disable-error-code="untyped-decorator"
"""Branch and bound over layers and exits per stage; compiled.

A node fixes the first stages of the pipeline, one after the other; ``prefix`` bounds what its completions
take. Complete candidates are judged by the recurrence kernels, to the nanosecond. Equal times are ranked by
peak, then by overshoot; both have bounds, too.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from eeplan.sim import kernels
from eeplan.sim.family import Family, Integers
from eeplan.sim.prefix import Prefix, bound_ns, empty_prefix, extend
from eeplan.sim.suffix import NEVER, Tables, crossing_ns

NODES, JUDGED, CUT, FOUND, EXHAUSTED = range(5)
"""Fields of the statistics: stages tried, candidates judged, subtrees cut, improvements, budget used up."""

SPLIT, EXITS = range(2)
"""Rows of a solution [2, P]: layers and exits of each stage."""

TIME, PEAK, OVERSHOOT = range(3)
"""Fields of a value, least first: ns, bytes, squared gaps."""


@njit(cache=True)
def least_gaps(family: Family, prefix: Prefix, fixed: int) -> int:
    """``layout.squared_gaps`` at best, given the exits on the first ``fixed`` stages and how many follow."""
    num_layers = family.num_layers
    if family.exits_below[num_layers] >= 0:
        return 0
    # Least sum of squares with the last exit at each depth; before the first exit that is depth 0.
    least, first, last = np.full(num_layers + 1, NEVER), 0, 0
    least[0] = 0
    for stage in range(fixed):
        below = prefix.below[stage]
        for _ in range(prefix.exits[stage]):
            reached = np.full(num_layers + 1, NEVER)
            low, high = max(below, 1), min(below + prefix.layers[stage], num_layers - 1)
            for depth in range(max(low, first + 1), high + 1):
                for before in range(first, min(last, depth - 1) + 1):
                    if least[before] < NEVER:
                        reached[depth] = min(reached[depth], least[before] + (depth - before) ** 2)
            least, first, last = reached, max(low, first + 1), high
    more = family.num_exits - prefix.exits_below[fixed]
    best = NEVER
    for before in range(first, last + 1):
        if least[before] == NEVER:
            continue
        if more == 0:
            best = min(best, least[before] + (num_layers - before) ** 2)
            continue
        for depth in range(max(prefix.below[fixed], before + 1), num_layers):
            gaps = (depth - before) ** 2 + _even_gaps(num_layers - depth, more)
            best = min(best, least[before] + gaps)
    return int(best)


@njit(cache=True)
def _even_gaps(layers: int, parts: int) -> int:
    """Least sum of squares of ``parts`` positive numbers that add up to ``layers``; very large if none do."""
    size, larger = layers // parts, layers % parts
    if size == 0:
        return 1 << 40
    return int(larger * (size + 1) ** 2 + (parts - larger) * size**2)


@njit(cache=True)
def _is_better(time: int, peak: int, overshoot: int, goal: int, value: Integers) -> bool:
    """Less than ``value`` in the goal, and not more in what comes before it."""
    if goal == TIME:
        return bool(time < value[TIME])
    if goal == PEAK:
        return bool(time <= value[TIME] and peak < value[PEAK])
    return bool(time <= value[TIME] and peak <= value[PEAK] and overshoot < value[OVERSHOOT])


@njit(cache=True)
def iteration_ns(family: Family, ends_ns: Integers, below: Integers, exits_below: Integers) -> int:
    """Gradient synchronisation and optimizer step after the ends of a pipeline part.

    Args:
        ends_ns: [P] of the stages.
        below: [P+1] layers below each stage.
        exits_below: [P+1]
    """
    ready, shared_ready, step, holders = 0, 0, 0, 0
    for stage in range(family.num_stages):
        layers = below[stage + 1] - below[stage]
        group = family.group[exits_below[stage], exits_below[stage + 1]]
        done = ends_ns[stage] + family.sync[stage, layers, group]
        ready, step = max(ready, done), max(step, family.step[stage, layers, group])
        if family.holder[stage, group]:
            shared_ready, holders = max(shared_ready, done), holders + 1
    return int(max(ready, shared_ready + family.shared[holders]) + step)


class Leaves(NamedTuple):
    """Complete candidates that wait to be judged together."""

    forward: Integers
    """[LANES, P]"""
    backward: Integers
    message: Integers
    """[LANES, P-1]"""
    below: Integers
    """[LANES, P+1]"""
    exits_below: Integers
    rank: Integers
    """[LANES, 2]: peak and overshoot."""
    ends: Integers
    """[LANES, P] result."""


@njit(cache=True)
def _judge(
    family: Family,
    leaves: Leaves,
    count: int,
    goal: int,
    value: Integers,
    solution: Integers,
    statistics: Integers,
) -> None:
    """Run the recurrence for the first ``count`` leaves and keep the best."""
    if family.rendezvous:
        kernels.rendezvous(
            leaves.forward[:count], leaves.backward[:count], leaves.message[:count],
            family.num_microbatches, leaves.ends,
        )  # fmt: skip
    else:
        kernels.asynchronous(
            leaves.forward[:count], leaves.backward[:count], leaves.message[:count],
            family.num_microbatches, leaves.ends,
        )  # fmt: skip
    statistics[JUDGED] += count
    for leaf in range(count):
        time = iteration_ns(family, leaves.ends[leaf], leaves.below[leaf], leaves.exits_below[leaf])
        peak, overshoot = leaves.rank[leaf]
        if _is_better(time, peak, overshoot, goal, value):
            value[TIME], value[PEAK], value[OVERSHOOT] = time, peak, overshoot
            solution[SPLIT] = np.diff(leaves.below[leaf])
            solution[EXITS] = np.diff(leaves.exits_below[leaf])
            statistics[FOUND] += 1


@njit(cache=True)
def _is_excluded(family: Family, prefix: Prefix, fixed: int) -> bool:
    """Whether all exits are on fixed stages, in numbers that do not count."""
    equal = 0
    for stage in range(fixed):
        equal += prefix.exits[stage] == family.excluded[stage]
    return bool(equal == fixed)


@njit(cache=True)
def lowest_ns(family: Family, bounds: Tables, most_layers: Integers) -> int:
    """Lower bound of all candidates: the least of those with the first stage fixed."""
    prefix, crossing, lowest = empty_prefix(family), crossing_ns(family), NEVER
    for layers in range(1, most_layers[0] + 1):
        for above in range(family.num_exits + 1):
            if layers + family.num_stages - 1 > family.num_layers:
                continue
            if extend(family, bounds, prefix, 0, layers, above, np.zeros(2, np.int64)):
                lowest = min(lowest, bound_ns(family, bounds, prefix, 1, crossing))
    return int(lowest)


@njit(cache=True)
def search(
    family: Family,
    bounds: Tables,
    most_layers: Integers,
    mean: Integers,
    budget: int,
    goal: int,
    any_will_do: bool,
    value: Integers,
    solution: Integers,
    statistics: Integers,
) -> None:
    """Find the candidate with the least goal below ``value``, or prove that there is none.

    Args:
        bounds: from :func:`tables` with the same ``most_layers`` and ``mean``.
        most_layers: [P] that a stage of a candidate with at most ``value[TIME]`` may have.
        mean: [2], (num, den) of :func:`tables`.
        budget: most nodes to try; when it is used up, nothing is proved.
        goal: TIME, PEAK or OVERSHOOT. What comes before it may not be more than ``value``; what comes after
            it does not count.
        any_will_do: stop at the first candidate below ``value``.
        value: [3], changed to that of the candidate found.
        solution: [2, P], changed likewise.
        statistics: [5], added to.
    """
    num_stages, num_layers, num_exits = family.num_stages, family.num_layers, family.num_exits
    prefix, leaves = empty_prefix(family), _empty_leaves(family)
    crossing, count = crossing_ns(family), 0
    later = np.zeros(num_stages + 1, np.int64)
    for stage in range(num_stages - 1, -1, -1):
        later[stage] = later[stage + 1] + most_layers[stage]
    layers, above = np.zeros(num_stages, np.int64), np.zeros(num_stages, np.int64)
    layers[0], above[0] = min(most_layers[0], num_layers - num_stages + 1), 0
    stage = 0
    while stage >= 0 and statistics[NODES] < budget:
        if above[stage] > num_exits:
            layers[stage], above[stage] = layers[stage] - 1, prefix.exits_below[stage]
        if layers[stage] < max(1, num_layers - prefix.below[stage] - later[stage + 1]):
            stage -= 1
            continue
        chosen, exits = layers[stage], above[stage]
        above[stage] += 1
        statistics[NODES] += 1
        if not extend(family, bounds, prefix, stage, chosen, exits, mean):
            continue
        if exits == num_exits and _is_excluded(family, prefix, stage + 1):
            continue
        time = bound_ns(family, bounds, prefix, stage + 1, crossing)
        peak = prefix.peak[stage + 1]
        if stage + 1 < num_stages:
            peak = max(peak, bounds.peak[stage + 1, prefix.below[stage + 1], exits])
        better = _is_better(time, peak, 0, goal, value)
        overshoot = 0
        if better and (goal == OVERSHOOT or stage + 1 == num_stages):
            overshoot = least_gaps(family, prefix, stage + 1)
            better = _is_better(time, peak, overshoot, goal, value)
        if not better:
            statistics[CUT] += 1
            continue
        if stage + 1 < num_stages:
            stage += 1
            layers[stage] = min(
                most_layers[stage], num_layers - prefix.below[stage] - (num_stages - 1 - stage)
            )
            above[stage] = exits
            continue
        leaves.forward[count], leaves.backward[count] = prefix.forward[:-1], prefix.backward[:-1]
        leaves.below[count], leaves.exits_below[count] = prefix.below, prefix.exits_below
        leaves.rank[count, 0], leaves.rank[count, 1] = peak, overshoot
        count += 1
        if count == kernels.LANES or statistics[FOUND] == 0:
            _judge(family, leaves, count, goal, value, solution, statistics)
            count = 0
            if any_will_do and statistics[FOUND]:
                return
    if count:
        _judge(family, leaves, count, goal, value, solution, statistics)
    statistics[EXHAUSTED] = stage >= 0


@njit(cache=True)
def _empty_leaves(family: Family) -> Leaves:
    lanes, num_stages = kernels.LANES, family.num_stages
    message = np.zeros((lanes, num_stages - 1), np.int64)
    message[:] = family.message
    return Leaves(
        np.zeros((lanes, num_stages), np.int64),
        np.zeros((lanes, num_stages), np.int64),
        message,
        np.zeros((lanes, num_stages + 1), np.int64),
        np.zeros((lanes, num_stages + 1), np.int64),
        np.zeros((lanes, 2), np.int64),
        np.zeros((lanes, num_stages), np.int64),
    )
