# mypy: disable-error-code="untyped-decorator"
"""How long an iteration takes at least when only the first stages are known; compiled, for ``branch``.

The bound is the longest of some dependency paths that every completion contains. All have the shape that the
longest path of 1F1B has (``closed_forms``): forward through the pipeline with a warm-up on the slowest stage
so far, rounds on one stage or on a run of neighbours, and back with a cool-down. Their rounds are spent on
known stages, or on the last stages at their best (``later_stages``); the work of all stages together is the
same for every candidate. Gradient synchronisation and optimizer step of the known stages are added.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from eeplan.sim.family import Family, Integers
from eeplan.sim.later_stages import (
    LEAST_BACKWARDS,
    LEAST_FORWARDS,
    LEAST_HOLDERS,
    LEAST_ROUNDS,
    LEAST_SLOWEST,
    LEAST_STEP,
    MOST_SLACK,
    NEVER,
    NONE,
    blocked_ns,
    fits,
    inner,
    link_ns,
    ramp_rounds,
    stage_ns,
)

# Rows of a prefix [24+P, P+1]. One array, because a tuple of many is slow to compile.
(
    # Entry s is of stage s: layers, exits, times of one microbatch, both with the messages that block a
    # steady stage; longest path to its first backward and back to stage 0, longest from stage 0 to its last
    # forward and to the end.
    LAYERS,
    EXITS,
    FORWARD,
    BACKWARD,
    WORK,
    UP,
    DOWN,
    # Entry s is of the stages below s: their layers and exits; work and messages of a path from stage 0 to
    # here and back; slowest warm-up step; slowest stage from its first to its last forward, or backward.
    BELOW,
    EXITS_BELOW,
    PASSED,
    SLOW_FORWARD,
    SLOW_BACKWARD,
    FORWARDS,
    BACKWARDS,
    # What a ramp to a stage saves where messages block; longest path whose two ramps and rounds are all on
    # fixed stages; of the run of stages that ends here over the allowed mean.
    OFFSET,
    CLOSED,
    EXCESS,
    # From the last backward of a stage to that of stage 0, at least; of a stage's gradient synchronisation
    # beyond the end of the pipeline part; the same of stages with a copy of the shared matrix, before that is
    # reduced; stages with a copy.
    DRAIN,
    TAIL,
    SHARED_TAIL,
    HOLDERS,
    PEAK,
    STEP,
    # Depth of the deepest exit if all are as shallow as they can be.
    DEEPEST,
    # From here on P rows [low, s]: longest way to spend all rounds on fixed stages from ``low`` on.
    TURNS,
) = range(25)


def empty_prefix(family: Family) -> Integers:
    """No stage is fixed."""
    prefix = np.zeros((TURNS + family.num_stages, family.num_stages + 1), np.int64)
    prefix[TURNS:] = NONE
    prefix[[CLOSED, TAIL, SHARED_TAIL], 0] = NONE
    if family.blocks:
        prefix[OFFSET, 1 : family.num_stages] = -np.cumsum(family.message)
    return prefix


@njit(cache=True)
def extend(
    family: Family, bounds: Integers, prefix: Integers, stage: int, layers: int, above: int, mean: Integers
) -> bool:
    """Fix one more stage; False if nothing good can come of it. ``mean`` is (num, den) of ``tables``."""
    below, exits = prefix[BELOW, stage], prefix[EXITS_BELOW, stage]
    after = bounds[stage + 1, below + layers, above]
    if after[LEAST_SLOWEST] == NEVER or not fits(family, stage, below, layers, exits, above):
        return False
    deepest = _deepest(family, prefix, stage, layers, above - exits)
    if deepest < 0:
        return False
    forward, backward = stage_ns(family, stage, layers, exits, above)
    work = forward + backward + blocked_ns(family, stage)
    link = link_ns(family, stage)
    if mean[1]:
        excess = max(prefix[EXCESS, stage], 0) + work * mean[1] - mean[0]
        if excess > 0:
            return False
        excess += link * mean[1]
        if stage < family.num_stages - 1 and max(excess, 0) > after[MOST_SLACK]:
            return False
        prefix[EXCESS, stage + 1] = excess
    group = family.group[exits, above]
    prefix[LAYERS, stage], prefix[EXITS, stage] = layers, above - exits
    prefix[BELOW, stage + 1], prefix[EXITS_BELOW, stage + 1] = below + layers, above
    prefix[FORWARD, stage], prefix[BACKWARD, stage], prefix[WORK, stage] = forward, backward, work
    prefix[PASSED, stage + 1] = prefix[PASSED, stage] + work + link
    prefix[DEEPEST, stage + 1] = deepest
    prefix[PEAK, stage + 1] = max(prefix[PEAK, stage], family.peak[stage, layers, group])
    prefix[STEP, stage + 1] = max(prefix[STEP, stage], family.step[stage, layers, group])
    _extend_ramps(family, prefix, stage)
    _extend_sync(family, prefix, stage, family.sync[stage, layers, group], family.holder[stage, group])
    _extend_rounds(family, prefix, stage)
    return True


@inner
def _deepest(family: Family, prefix: Integers, stage: int, layers: int, exits: int) -> int:
    """Depth of the stage's deepest exit if all lie as shallow as they can; -1 if they do not fit."""
    below, deepest = prefix[BELOW, stage], prefix[DEEPEST, stage]
    if exits == 0 or family.exits_below[below + layers] >= 0:
        return int(deepest)
    last = deepest + exits if stage == 0 else max(below, deepest + 1) + exits - 1
    return -1 if last > min(below + layers, family.num_layers - 1) else int(last)


@inner
def _extend_ramps(family: Family, prefix: Integers, stage: int) -> None:
    """Warm-up and cool-down through the new stage (``closed_forms``)."""
    waits = family.num_stages - 1 - stage
    ahead = family.message[stage] if waits else 0
    behind = family.message[stage - 1] if stage else 0
    blocked = ahead + behind if family.blocks else 0
    here = prefix[PASSED, stage] + prefix[WORK, stage] + prefix[OFFSET, stage]
    prefix[SLOW_FORWARD, stage + 1] = max(prefix[SLOW_FORWARD, stage], prefix[FORWARD, stage] + blocked)
    prefix[SLOW_BACKWARD, stage + 1] = max(prefix[SLOW_BACKWARD, stage], prefix[BACKWARD, stage] + blocked)
    ramp, mixed = ramp_rounds(family, stage)
    mixed_ns = mixed * prefix[WORK, stage]
    forwards, backwards = ramp * prefix[FORWARD, stage] + mixed_ns, ramp * prefix[BACKWARD, stage] + mixed_ns
    prefix[FORWARDS, stage + 1] = max(prefix[FORWARDS, stage], forwards)
    prefix[BACKWARDS, stage + 1] = max(prefix[BACKWARDS, stage], backwards)
    prefix[UP, stage] = here + waits * prefix[SLOW_FORWARD, stage + 1]
    prefix[DOWN, stage] = here + waits * prefix[SLOW_BACKWARD, stage + 1]
    prefix[DRAIN, stage + 1] = prefix[DRAIN, stage] + prefix[BACKWARD, stage] + ahead


@inner
def _extend_sync(family: Family, prefix: Integers, stage: int, sync: int, holds: bool) -> None:
    tail = sync - prefix[DRAIN, stage]
    prefix[TAIL, stage + 1] = max(prefix[TAIL, stage], tail)
    prefix[SHARED_TAIL, stage + 1] = max(prefix[SHARED_TAIL, stage], tail if holds else NONE)
    prefix[HOLDERS, stage + 1] = prefix[HOLDERS, stage] + holds


@inner
def rounds_left(family: Family, low: int) -> int:
    """Rounds to spend on stages from ``low`` on, on a path that turns there; negative if it cannot."""
    return int(family.num_microbatches - 2 - (family.num_stages - 1 - low))


@inner
def _extend_rounds(family: Family, prefix: Integers, stage: int) -> None:
    """Rounds on the runs of neighbouring stages that end at the new one."""
    for low in range(family.num_stages):
        prefix[TURNS + low, stage + 1] = prefix[TURNS + low, stage]
    end, slowest = prefix[PASSED, stage] + prefix[WORK, stage], 0
    for first in range(stage, -1, -1):
        slowest = max(slowest, prefix[WORK, first])
        length, run = stage - first + 1, end - prefix[PASSED, first]
        for low in range(first, -1, -1):
            left = rounds_left(family, low)
            if left < 0:
                break
            loops = left // length
            rest = left - loops * length
            # Rounds that are left over stay on the slowest stage, or go once through a part of the run.
            part = end - prefix[PASSED, stage - rest + 1] if rest else 0
            turns = loops * run + max(part, rest * slowest)
            prefix[TURNS + low, stage + 1] = max(prefix[TURNS + low, stage + 1], turns)
        if family.blocks:
            break
    closed, up, down = prefix[CLOSED, stage], NONE, NONE
    for low in range(stage, -1, -1):
        if rounds_left(family, low) < 0:
            break
        up, down = max(up, prefix[UP, low]), max(down, prefix[DOWN, low])
        ramps = max(prefix[UP, stage] + down, prefix[DOWN, stage] + up)
        closed = max(closed, ramps - prefix[PASSED, low] + prefix[TURNS + low, stage + 1])
    prefix[CLOSED, stage + 1] = closed


@njit(cache=True)
def bound_ns(family: Family, bounds: Integers, prefix: Integers, fixed: int, crossing: int) -> int:
    """No completion of the first ``fixed`` stages has a shorter iteration."""
    at = bounds[fixed, prefix[BELOW, fixed], prefix[EXITS_BELOW, fixed]]
    # Paths that cross the pipeline once more on their way to the end reach every stage's last backward.
    through, pipeline = _open_paths_ns(family, bounds, prefix, fixed, crossing)
    pipeline = max(pipeline, prefix[CLOSED, fixed])
    if not family.blocks:
        ramp = max(prefix[FORWARDS, fixed], at[LEAST_FORWARDS])
        pipeline = max(pipeline, crossing + max(ramp, prefix[BACKWARDS, fixed], at[LEAST_BACKWARDS]))
        for stage in range(min(fixed, family.num_stages - family.num_microbatches + 1)):
            pipeline = max(pipeline, _ramps_ns(family, prefix, stage))
    shared = family.shared[prefix[HOLDERS, fixed] + at[LEAST_HOLDERS]]
    tail, first_tail = prefix[TAIL, fixed], 0
    if prefix[SHARED_TAIL, fixed] > NONE:
        tail = max(tail, prefix[SHARED_TAIL, fixed] + shared)
    if fixed:
        first_tail = prefix[TAIL, 1]
        if prefix[SHARED_TAIL, 1] > NONE:
            first_tail = max(first_tail, prefix[SHARED_TAIL, 1] + shared)
    iteration = max(pipeline + first_tail, through + max(tail, 0))
    return int(iteration + max(prefix[STEP, fixed], at[LEAST_STEP]))


@inner
def _open_paths_ns(
    family: Family, bounds: Integers, prefix: Integers, fixed: int, crossing: int
) -> tuple[int, int]:
    """Longest paths whose ramps cross the whole pipeline: both of them, and at least one."""
    at = bounds[fixed, prefix[BELOW, fixed], prefix[EXITS_BELOW, fixed]]
    slowest, both, one, ramp = NONE, crossing, crossing, crossing
    if fixed < family.num_stages:
        slowest = at[LEAST_SLOWEST]
        if at[LEAST_ROUNDS] > NONE:
            both = max(both, 2 * crossing + at[LEAST_ROUNDS] - prefix[PASSED, fixed])
        slow = max(prefix[SLOW_FORWARD, fixed], prefix[SLOW_BACKWARD, fixed])
        waits = family.num_stages - 1 - fixed
        ramp = max(ramp, prefix[PASSED, fixed] + prefix[OFFSET, fixed] + waits * slow)
    for low in range(min(fixed, family.num_stages - 1), -1, -1):
        left = rounds_left(family, low)
        if left < 0:
            break
        rounds = left * slowest if fixed < family.num_stages else NONE
        if low < fixed:
            rounds = max(rounds, prefix[TURNS + low, fixed])
            ramp = max(ramp, prefix[UP, low], prefix[DOWN, low])
        both = max(both, 2 * crossing - prefix[PASSED, low] + rounds)
        one = max(one, crossing + ramp - prefix[PASSED, low] + rounds)
    return int(both), int(max(one, both))


@inner
def _ramps_ns(family: Family, prefix: Integers, stage: int) -> int:
    """All forwards of the slowest stage, to ``stage`` and back; or there first, then all backwards."""
    waits, _ = ramp_rounds(family, stage)
    here = prefix[PASSED, stage] + prefix[WORK, stage]
    first = prefix[FORWARDS, stage + 1] + waits * prefix[SLOW_BACKWARD, stage + 1]
    last = prefix[BACKWARDS, stage + 1] + waits * prefix[SLOW_FORWARD, stage + 1]
    return int(here + max(first, last))
