# mypy: disable-error-code="untyped-decorator"
"""Branch and bound over layers and exits per stage; compiled.

A node fixes the first stages of the pipeline, one after the other; ``known_stages`` bounds what its
completions take. Complete candidates are handed out to be judged by the recurrence kernels, to the
nanosecond. Equal times are ranked by peak, then by overshoot; both have bounds, too.

Whatever is compiled takes few arguments that are arrays, and few functions of numpy: compiling is what the
very first plan on a machine waits for.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from eeplan.sim import known_stages as rows
from eeplan.sim.family import Family, Integers
from eeplan.sim.known_stages import bound_ns, extend
from eeplan.sim.later_stages import LEAST_PEAK, NEVER, inner

NODES, JUDGED, CUT, FOUND, STAGE, WAITING, BUDGET = range(7)
"""Fields of the statistics: stages tried, candidates judged, subtrees cut, improvements; stage to go on with
(-1 when all is tried), candidates that wait, most stages to try."""

W_FORWARD, W_BACKWARD, W_BELOW, W_EXITS_BELOW, W_RANK = range(5)
"""Rows of a waiting candidate: times, layers and exits below each stage; peak and overshoot."""

TIME, PEAK, OVERSHOOT = range(3)
"""Fields of a value, least first: ns, bytes, squared gaps."""


@njit(cache=True)
def least_gaps(family: Family, prefix: Integers, fixed: int) -> int:
    """``layout.squared_gaps`` at best, given the exits on the first ``fixed`` stages and how many follow."""
    num_layers = family.num_layers
    if family.exits_below[num_layers] >= 0:
        return 0
    # Least sum of squares with the last exit at each depth; before the first exit that is depth 0.
    least, first, last = np.empty(num_layers + 1, np.int64), 0, 0
    for depth in range(num_layers + 1):
        least[depth] = NEVER
    least[0] = 0
    for stage in range(fixed):
        below = prefix[rows.BELOW, stage]
        for _ in range(prefix[rows.EXITS, stage]):
            reached = np.empty(num_layers + 1, np.int64)
            for depth in range(num_layers + 1):
                reached[depth] = NEVER
            low, high = max(below, 1), min(below + prefix[rows.LAYERS, stage], num_layers - 1)
            for depth in range(max(low, first + 1), high + 1):
                for before in range(first, min(last, depth - 1) + 1):
                    if least[before] < NEVER:
                        reached[depth] = min(reached[depth], least[before] + (depth - before) ** 2)
            least, first, last = reached, max(low, first + 1), high
    more = family.num_exits - prefix[rows.EXITS_BELOW, fixed]
    best = NEVER
    for before in range(first, last + 1):
        if least[before] == NEVER:
            continue
        if more == 0:
            best = min(best, least[before] + (num_layers - before) ** 2)
            continue
        for depth in range(max(prefix[rows.BELOW, fixed], before + 1), num_layers):
            gaps = (depth - before) ** 2 + _even_gaps(num_layers - depth, more)
            best = min(best, least[before] + gaps)
    return int(best)


@inner
def _even_gaps(layers: int, parts: int) -> int:
    """Least sum of squares of ``parts`` positive numbers that add up to ``layers``; very large if none do."""
    size, larger = layers // parts, layers % parts
    if size == 0:
        return 1 << 40
    return int(larger * (size + 1) ** 2 + (parts - larger) * size**2)


@njit(cache=True)
def is_better(time: int, peak: int, overshoot: int, goal: int, value: Integers) -> bool:
    """Less than ``value`` in the goal, and not more in what comes before it."""
    if goal == TIME:
        return bool(time < value[TIME])
    if goal == PEAK:
        return bool(time <= value[TIME] and peak < value[PEAK])
    return bool(time <= value[TIME] and peak <= value[PEAK] and overshoot < value[OVERSHOOT])


@inner
def _is_excluded(family: Family, prefix: Integers, fixed: int) -> bool:
    """Whether all exits are on fixed stages, in numbers that do not count."""
    equal = 0
    for stage in range(fixed):
        equal += prefix[rows.EXITS, stage] == family.excluded[stage]
    return bool(equal == fixed)


@njit(cache=True)
def lowest_ns(
    family: Family,
    bounds: Integers,
    crossing: int,
    prefix: Integers,
    stage: int,
    most_layers: Integers,
    mean: Integers,
) -> int:
    """Lower bound of all candidates: the least of those with the first stage fixed.

    Args:
        bounds: from :func:`later_stages.tables`.
        crossing: from :func:`later_stages.crossing_ns`.
        prefix: from :func:`known_stages.empty_prefix`.
        stage: 0; as a constant here it would be compiled for on its own.
        most_layers: as for :func:`search`.
        mean: as for :func:`search`.
    """
    lowest = NEVER
    for layers in range(1, most_layers[0] + 1):
        for above in range(family.num_exits + 1):
            if layers + family.num_stages - 1 > family.num_layers:
                continue
            if extend(family, bounds, prefix, stage, layers, above, mean):
                lowest = min(lowest, bound_ns(family, bounds, prefix, stage + 1, crossing))
    return int(lowest)


@njit(cache=True)
def search(
    family: Family,
    bounds: Integers,
    crossing: int,
    prefix: Integers,
    most_layers: Integers,
    mean: Integers,
    cursor: Integers,
    waiting: Integers,
    goal: int,
    value: Integers,
    statistics: Integers,
) -> None:
    """Go on through the tree until candidates wait to be judged, the budget is used up, or all is tried.

    Args:
        bounds: from :func:`later_stages.tables` with the same ``most_layers`` and ``mean``.
        crossing: from :func:`later_stages.crossing_ns`.
        prefix: from :func:`known_stages.empty_prefix`; changed.
        most_layers: [P] that a stage of a candidate with at most ``value[TIME]`` may have.
        mean: [2], (num, den) of :func:`later_stages.tables`.
        cursor: [3, P+1], from :func:`start`; changed.
        waiting: [n, 5, P+1]: candidates found, ``statistics[WAITING]`` of them. Until the first is known to
            be good, one at a time.
        goal: TIME, PEAK or OVERSHOOT. What comes before it may not be more than ``value``; what comes after
            it does not count.
        value: [3], least so far.
        statistics: changed.
    """
    num_stages, num_layers, num_exits = family.num_stages, family.num_layers, family.num_exits
    layers, above, later = cursor[0], cursor[1], cursor[2]
    stage, count = statistics[STAGE], 0
    while stage >= 0 and statistics[NODES] < statistics[BUDGET]:
        if above[stage] > num_exits:
            layers[stage], above[stage] = layers[stage] - 1, prefix[rows.EXITS_BELOW, stage]
        if layers[stage] < max(1, num_layers - prefix[rows.BELOW, stage] - later[stage + 1]):
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
        peak = prefix[rows.PEAK, stage + 1]
        if stage + 1 < num_stages:
            peak = max(peak, bounds[stage + 1, prefix[rows.BELOW, stage + 1], exits, LEAST_PEAK])
        overshoot = 0
        better = is_better(time, peak, overshoot, goal, value)
        if better and (goal == OVERSHOOT or stage + 1 == num_stages):
            overshoot = least_gaps(family, prefix, stage + 1)
            better = is_better(time, peak, overshoot, goal, value)
        if not better:
            statistics[CUT] += 1
            continue
        if stage + 1 < num_stages:
            stage += 1
            layers[stage] = min(
                most_layers[stage], num_layers - prefix[rows.BELOW, stage] - (num_stages - 1 - stage)
            )
            above[stage] = exits
            continue
        for index in range(num_stages + 1):
            waiting[count, W_FORWARD, index] = prefix[rows.FORWARD, index]
            waiting[count, W_BACKWARD, index] = prefix[rows.BACKWARD, index]
            waiting[count, W_BELOW, index] = prefix[rows.BELOW, index]
            waiting[count, W_EXITS_BELOW, index] = prefix[rows.EXITS_BELOW, index]
        waiting[count, W_RANK, 0], waiting[count, W_RANK, 1] = peak, overshoot
        count += 1
        if count == len(waiting) or statistics[FOUND] == 0:
            break
    statistics[STAGE], statistics[WAITING] = stage, count


def start(family: Family, most_layers: Integers) -> Integers:
    """Where :func:`search` begins: layers and exits above that each stage tries next; most layers later."""
    cursor = np.zeros((3, family.num_stages + 1), np.int64)
    cursor[0, 0] = min(most_layers[0], family.num_layers - family.num_stages + 1)
    cursor[2, :-1] = np.cumsum(most_layers[::-1])[::-1]
    return cursor
