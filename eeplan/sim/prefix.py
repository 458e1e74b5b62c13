# mypy: disable-error-code="untyped-decorator"
"""How long an iteration takes at least when only the first stages are known; compiled, for ``branch``.

The bound is the longest of some dependency paths that every completion contains. All have the shape that the
longest path of 1F1B has (``closed_forms``): forward through the pipeline with a warm-up on the slowest stage
so far, rounds on one stage or on a run of neighbours, and back with a cool-down. Their rounds are spent on
known stages, or on the last stages at their best (``suffix``); the work of all stages together is the same
for every candidate. Gradient synchronisation and optimizer step of the known stages are added.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from eeplan.sim.family import Family, Integers
from eeplan.sim.suffix import NEVER, NONE, Tables, blocked_ns, fits, link_ns, ramp_rounds, stage_ns


class Prefix(NamedTuple):
    """The fixed stages 0..s-1 of a node: entries up to s-1 of arrays [P], up to s of arrays [P+1]."""

    layers: Integers
    exits: Integers
    below: Integers
    """[P+1] layers below."""
    exits_below: Integers
    """[P+1]"""
    forward: Integers
    backward: Integers
    work: Integers
    """Both, and the messages that block a steady stage."""
    passed: Integers
    """[P+1] work and messages of a path from stage 0 to here and back."""
    slow_forward: Integers
    """[P+1] slowest warm-up step so far."""
    slow_backward: Integers
    forwards: Integers
    """[P+1] slowest stage so far from its first to its last forward."""
    backwards: Integers
    up: Integers
    """Longest path to the first backward of a stage, and back to stage 0."""
    down: Integers
    """Longest path from stage 0 to the last forward of a stage, and to the end."""
    offset: Integers
    """[P+1] what a ramp to a stage saves where messages block."""
    turns: Integers
    """[P+1, P] longest way to spend all rounds on fixed stages from a given lowest one on."""
    closed: Integers
    """[P+1] longest path whose two ramps and rounds are all on fixed stages."""
    excess: Integers
    """[P+1] of the run of stages that ends here over the allowed mean."""
    drain: Integers
    """[P+1] from the last backward of a stage to that of stage 0, at least."""
    tail: Integers
    """[P+1] of a stage's gradient synchronisation beyond the end of the pipeline part."""
    shared_tail: Integers
    """[P+1] the same of stages with a copy of the shared matrix, before that is reduced."""
    holders: Integers
    """[P+1] stages with a copy."""
    peak: Integers
    """[P+1]"""
    step: Integers
    """[P+1]"""
    deepest: Integers
    """[P+1] depth of the deepest exit if all are as shallow as they can be."""


@njit(cache=True)
def empty_prefix(family: Family) -> Prefix:
    """No stage is fixed."""
    row = np.zeros((24, family.num_stages + 1), np.int64)
    turns = np.full((family.num_stages + 1, family.num_stages), NONE)
    prefix = Prefix(
        row[0], row[1], row[2], row[3], row[4], row[5], row[6], row[7], row[8], row[9], row[10],
        row[11], row[12], row[13], row[14], turns, row[15], row[16], row[17], row[18], row[19], row[20],
        row[21], row[22], row[23],
    )  # fmt: skip
    prefix.closed[0] = prefix.tail[0] = prefix.shared_tail[0] = NONE
    if family.blocks:
        for stage in range(1, family.num_stages):
            prefix.offset[stage] = prefix.offset[stage - 1] - family.message[stage - 1]
    return prefix


@njit(cache=True)
def extend(
    family: Family, bounds: Tables, prefix: Prefix, stage: int, layers: int, above: int, mean: Integers
) -> bool:
    """Fix one more stage; False if nothing good can come of it. ``mean`` is (num, den) of ``tables``."""
    below, exits = prefix.below[stage], prefix.exits_below[stage]
    after = stage + 1, below + layers, above
    if bounds.slowest[after] == NEVER or not fits(family, stage, below, layers, exits, above):
        return False
    deepest = _deepest(family, prefix, stage, layers, above - exits)
    if deepest < 0:
        return False
    forward, backward = stage_ns(family, stage, layers, exits, above)
    work = forward + backward + blocked_ns(family, stage)
    link = link_ns(family, stage)
    if mean[1]:
        excess = max(prefix.excess[stage], 0) + work * mean[1] - mean[0]
        if excess > 0:
            return False
        excess += link * mean[1]
        if stage < family.num_stages - 1 and max(excess, 0) > bounds.slack[after]:
            return False
        prefix.excess[stage + 1] = excess
    group = family.group[exits, above]
    prefix.layers[stage], prefix.exits[stage] = layers, above - exits
    prefix.below[stage + 1], prefix.exits_below[stage + 1] = below + layers, above
    prefix.forward[stage], prefix.backward[stage], prefix.work[stage] = forward, backward, work
    prefix.passed[stage + 1] = prefix.passed[stage] + work + link
    prefix.deepest[stage + 1] = deepest
    prefix.peak[stage + 1] = max(prefix.peak[stage], family.peak[stage, layers, group])
    prefix.step[stage + 1] = max(prefix.step[stage], family.step[stage, layers, group])
    _extend_ramps(family, prefix, stage)
    _extend_sync(family, prefix, stage, family.sync[stage, layers, group], family.holder[stage, group])
    _extend_rounds(family, prefix, stage)
    return True


@njit(cache=True)
def _deepest(family: Family, prefix: Prefix, stage: int, layers: int, exits: int) -> int:
    """Depth of the stage's deepest exit if all lie as shallow as they can; -1 if they do not fit."""
    below, deepest = prefix.below[stage], prefix.deepest[stage]
    if exits == 0 or family.exits_below[below + layers] >= 0:
        return int(deepest)
    last = deepest + exits if stage == 0 else max(below, deepest + 1) + exits - 1
    return -1 if last > min(below + layers, family.num_layers - 1) else int(last)


@njit(cache=True)
def _extend_ramps(family: Family, prefix: Prefix, stage: int) -> None:
    """Warm-up and cool-down through the new stage (``closed_forms``)."""
    waits = family.num_stages - 1 - stage
    ahead = family.message[stage] if waits else 0
    behind = family.message[stage - 1] if stage else 0
    blocked = ahead + behind if family.blocks else 0
    here = prefix.passed[stage] + prefix.work[stage] + prefix.offset[stage]
    prefix.slow_forward[stage + 1] = max(prefix.slow_forward[stage], prefix.forward[stage] + blocked)
    prefix.slow_backward[stage + 1] = max(prefix.slow_backward[stage], prefix.backward[stage] + blocked)
    ramp, mixed = ramp_rounds(family, stage)
    mixed_ns = mixed * prefix.work[stage]
    forwards, backwards = ramp * prefix.forward[stage] + mixed_ns, ramp * prefix.backward[stage] + mixed_ns
    prefix.forwards[stage + 1] = max(prefix.forwards[stage], forwards)
    prefix.backwards[stage + 1] = max(prefix.backwards[stage], backwards)
    prefix.up[stage] = here + waits * prefix.slow_forward[stage + 1]
    prefix.down[stage] = here + waits * prefix.slow_backward[stage + 1]
    prefix.drain[stage + 1] = prefix.drain[stage] + prefix.backward[stage] + ahead


@njit(cache=True)
def _extend_sync(family: Family, prefix: Prefix, stage: int, sync: int, holds: bool) -> None:
    tail = sync - prefix.drain[stage]
    prefix.tail[stage + 1] = max(prefix.tail[stage], tail)
    prefix.shared_tail[stage + 1] = max(prefix.shared_tail[stage], tail if holds else NONE)
    prefix.holders[stage + 1] = prefix.holders[stage] + holds


@njit(cache=True)
def rounds_left(family: Family, low: int) -> int:
    """Rounds to spend on stages from ``low`` on, on a path that turns there; negative if it cannot."""
    return int(family.num_microbatches - 2 - (family.num_stages - 1 - low))


@njit(cache=True)
def _extend_rounds(family: Family, prefix: Prefix, stage: int) -> None:
    """Rounds on the runs of neighbouring stages that end at the new one."""
    turns = prefix.turns[stage + 1]
    turns[:] = prefix.turns[stage]
    end, slowest = prefix.passed[stage] + prefix.work[stage], 0
    for first in range(stage, -1, -1):
        slowest = max(slowest, prefix.work[first])
        length, run = stage - first + 1, end - prefix.passed[first]
        for low in range(first, -1, -1):
            left = rounds_left(family, low)
            if left < 0:
                break
            loops = left // length
            rest = left - loops * length
            # Rounds that are left over stay on the slowest stage, or go once through a part of the run.
            part = end - prefix.passed[stage - rest + 1] if rest else 0
            turns[low] = max(turns[low], loops * run + max(part, rest * slowest))
        if family.blocks:
            break
    closed, up, down = prefix.closed[stage], NONE, NONE
    for low in range(stage, -1, -1):
        if rounds_left(family, low) < 0:
            break
        up, down = max(up, prefix.up[low]), max(down, prefix.down[low])
        ramps = max(prefix.up[stage] + down, prefix.down[stage] + up)
        closed = max(closed, ramps - prefix.passed[low] + turns[low])
    prefix.closed[stage + 1] = closed


@njit(cache=True)
def bound_ns(family: Family, bounds: Tables, prefix: Prefix, fixed: int, crossing: int) -> int:
    """No completion of the first ``fixed`` stages has a shorter iteration."""
    at = fixed, prefix.below[fixed], prefix.exits_below[fixed]
    # Paths that cross the pipeline once more on their way to the end reach every stage's last backward.
    through, pipeline = _open_paths_ns(family, bounds, prefix, fixed, crossing)
    pipeline = max(pipeline, prefix.closed[fixed])
    if not family.blocks:
        ramp = max(prefix.forwards[fixed], bounds.forwards[at])
        pipeline = max(pipeline, crossing + max(ramp, prefix.backwards[fixed], bounds.backwards[at]))
        for stage in range(min(fixed, family.num_stages - family.num_microbatches + 1)):
            pipeline = max(pipeline, _ramps_ns(family, prefix, stage))
    shared = family.shared[prefix.holders[fixed] + bounds.holders[at]]
    tail, first_tail = prefix.tail[fixed], 0
    if prefix.shared_tail[fixed] > NONE:
        tail = max(tail, prefix.shared_tail[fixed] + shared)
    if fixed:
        first_tail = prefix.tail[1]
        if prefix.shared_tail[1] > NONE:
            first_tail = max(first_tail, prefix.shared_tail[1] + shared)
    iteration = max(pipeline + first_tail, through + max(tail, 0))
    return int(iteration + max(prefix.step[fixed], bounds.step[at]))


@njit(cache=True)
def _open_paths_ns(
    family: Family, bounds: Tables, prefix: Prefix, fixed: int, crossing: int
) -> tuple[int, int]:
    """Longest paths whose ramps cross the whole pipeline: both of them, and at least one."""
    at = fixed, prefix.below[fixed], prefix.exits_below[fixed]
    slowest, both, one, ramp = NONE, crossing, crossing, crossing
    if fixed < family.num_stages:
        slowest = bounds.slowest[at]
        if bounds.rounds[at] > NONE:
            both = max(both, 2 * crossing + bounds.rounds[at] - prefix.passed[fixed])
        slow = max(prefix.slow_forward[fixed], prefix.slow_backward[fixed])
        waits = family.num_stages - 1 - fixed
        ramp = max(ramp, prefix.passed[fixed] + prefix.offset[fixed] + waits * slow)
    for low in range(min(fixed, family.num_stages - 1), -1, -1):
        left = rounds_left(family, low)
        if left < 0:
            break
        rounds = left * slowest if fixed < family.num_stages else NONE
        if low < fixed:
            rounds = max(rounds, prefix.turns[fixed, low])
            ramp = max(ramp, prefix.up[low], prefix.down[low])
        both = max(both, 2 * crossing - prefix.passed[low] + rounds)
        one = max(one, crossing + ramp - prefix.passed[low] + rounds)
    return int(both), int(max(one, both))


@njit(cache=True)
def _ramps_ns(family: Family, prefix: Prefix, stage: int) -> int:
    """All forwards of the slowest stage, to ``stage`` and back; or there first, then all backwards."""
    waits, _ = ramp_rounds(family, stage)
    here = prefix.passed[stage] + prefix.work[stage]
    first = prefix.forwards[stage + 1] + waits * prefix.slow_backward[stage + 1]
    last = prefix.backwards[stage + 1] + waits * prefix.slow_forward[stage + 1]
    return int(here + max(first, last))
