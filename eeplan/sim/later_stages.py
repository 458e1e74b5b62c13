# mypy: disable-error-code="untyped-decorator"
"""What no choice of the last stages can beat: tables for ``branch``, compiled.

The least possible value of several sums and maxima over stages s..P-1, by dynamic programming over (stage,
layers below, exits below), from the last stage down. Each value enters a lower bound on the iteration by
itself. No one choice of stages need reach all of them at once; that makes the bound lower, never wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from eeplan.sim.family import Family, Integers

_WITHOUT_WRAPPERS: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner = njit(cache=True, **_WITHOUT_WRAPPERS)
"""For what only compiled functions call: code to take a family apart for Python would be most of theirs."""
NONE = -(1 << 62)
NEVER = 1 << 62
"""Beyond every time, size and overshoot."""


# Last index of the tables [P+1, L+1, k+1, 8]: bounds of the stages s..P-1 given layers and exits below; NEVER
# if nothing fits. One array, because a tuple of many is slow to compile.
(
    # Slowest stage, forward plus backward with the messages that block it.
    LEAST_SLOWEST,
    # Longest path with all rounds on one of these stages, from its first to its last.
    LEAST_ROUNDS,
    # Slowest stage from its first to its last forward, or backward.
    LEAST_FORWARDS,
    LEAST_BACKWARDS,
    # Copies of the shared matrix.
    LEAST_HOLDERS,
    LEAST_PEAK,
    LEAST_STEP,
    # Most that a run of stages below may exceed the allowed mean, times its denominator; else -1.
    MOST_SLACK,
) = range(8)


@inner
def stage_ns(family: Family, stage: int, layers: int, below: int, above: int) -> tuple[int, int]:
    """Forward and backward of a stage."""
    forward = family.exit_forward[above] - family.exit_forward[below]
    backward = family.exit_backward[above] - family.exit_backward[below]
    return (
        family.forward[stage] + layers * family.layer_forward + forward,
        family.backward[stage] + layers * family.layer_backward + backward,
    )


@inner
def _can_be_below(family: Family, layers: int, exits: int) -> bool:
    """Whether so many exits can be on the first layers; always so where they have no places of their own."""
    least = family.exits_below[layers]
    return bool(least < 0 or least <= exits <= family.exits_most[layers])


@inner
def fits(family: Family, stage: int, below_layers: int, layers: int, below: int, above: int) -> bool:
    """Whether a stage can be of that kind; exits are only counted, see ``deepest``."""
    if not family.allowed[stage, layers, family.group[below, above]]:
        return False
    if family.exits_below[below_layers + layers] >= 0:
        return bool(_can_be_below(family, below_layers + layers, above))
    room = layers + (stage > 0) - (stage == family.num_stages - 1)
    return above - below <= room


def tables(family: Family, limit_ns: int, most_layers: Integers, mean: Integers) -> Integers:
    """Bounds of all suffixes of candidates that take at most ``limit_ns``.

    Args:
        most_layers: [P] that a stage of such a candidate may have.
        mean: (num, den), the largest mean that a run of neighbouring stages may have, with the messages
            between them; a ``den`` of 0 means any.
    """
    shape = (family.num_stages + 1, family.num_layers + 1, family.num_exits + 1, MOST_SLACK + 1)
    bounds = np.full(shape, NEVER)
    bounds[..., MOST_SLACK] = -1
    bounds[-1, -1, -1] = (0, NONE, 0, 0, 0, 0, 0, NEVER)
    _fill(family, bounds, crossing_ns(family), limit_ns, most_layers, mean)
    return bounds


@njit(cache=True)
def _fill(
    family: Family, bounds: Integers, crossing: int, limit_ns: int, most_layers: Integers, mean: Integers
) -> None:
    num_stages, num_layers, num_exits = family.num_stages, family.num_layers, family.num_exits
    reachable = num_layers
    for stage in range(num_stages - 1, -1, -1):
        reachable -= most_layers[stage]
        most_on_earlier = 0
        for earlier in range(stage):
            most_on_earlier += most_layers[earlier]
        most_below = min(most_on_earlier, num_layers - (num_stages - stage))
        for below in range(max(stage, reachable), most_below + 1):
            for exits in range(num_exits + 1):
                if not _can_be_below(family, below, exits):
                    continue
                for layers in range(1, min(most_layers[stage], num_layers - below) + 1):
                    for above in range(exits, num_exits + 1):
                        if bounds[stage + 1, below + layers, above, LEAST_SLOWEST] == NEVER:
                            continue
                        if not fits(family, stage, below, layers, exits, above):
                            continue
                        if _alone_ns(family, crossing, stage, layers, exits, above) <= limit_ns:
                            _relax(family, bounds, stage, below, layers, exits, above, mean)


@inner
def _alone_ns(family: Family, crossing: int, stage: int, layers: int, exits: int, above: int) -> int:
    """At least what an iteration takes with this stage, whatever the others are."""
    forward, backward = stage_ns(family, stage, layers, exits, above)
    work = forward + backward + blocked_ns(family, stage)
    turns = family.num_microbatches - 1 - family.num_stages
    if turns < 0:
        return int(max(crossing, family.num_microbatches * work))
    alone = 2 * crossing + turns * work
    if stage == family.num_stages - 1:
        # The way there does not end like one to a stage with others behind it.
        there = crossing - (_messages_ns(family) if family.blocks else 0)
        alone = max(alone, there + (family.num_microbatches - 1) * work)
    return int(alone)


@inner
def _relax(
    family: Family,
    bounds: Integers,
    stage: int,
    below: int,
    layers: int,
    exits: int,
    above: int,
    mean: Integers,
) -> None:
    """Let the bounds at one place count with one more choice of the stage there."""
    at, after = bounds[stage, below, exits], bounds[stage + 1, below + layers, above]
    forward, backward = stage_ns(family, stage, layers, exits, above)
    work, link = forward + backward + blocked_ns(family, stage), link_ns(family, stage)
    group = family.group[exits, above]
    at[LEAST_SLOWEST] = min(at[LEAST_SLOWEST], max(work, after[LEAST_SLOWEST]))
    longest = after[LEAST_ROUNDS] - work - link if after[LEAST_ROUNDS] > NONE else NONE
    turns = family.num_microbatches - 2 - (family.num_stages - 1 - stage)
    if turns >= 0:
        longest = max(longest, turns * work)
    at[LEAST_ROUNDS] = min(at[LEAST_ROUNDS], longest)
    waits, mixed = ramp_rounds(family, stage)
    forwards, backwards = waits * forward + mixed * work, waits * backward + mixed * work
    at[LEAST_FORWARDS] = min(at[LEAST_FORWARDS], max(forwards, after[LEAST_FORWARDS]))
    at[LEAST_BACKWARDS] = min(at[LEAST_BACKWARDS], max(backwards, after[LEAST_BACKWARDS]))
    at[LEAST_HOLDERS] = min(at[LEAST_HOLDERS], family.holder[stage, group] + after[LEAST_HOLDERS])
    at[LEAST_PEAK] = min(at[LEAST_PEAK], max(family.peak[stage, layers, group], after[LEAST_PEAK]))
    at[LEAST_STEP] = min(at[LEAST_STEP], max(family.step[stage, layers, group], after[LEAST_STEP]))
    if mean[1] and after[MOST_SLACK] >= 0:
        spare = mean[0] - work * mean[1]
        if stage < family.num_stages - 1:
            spare += min(0, after[MOST_SLACK] - link * mean[1])
        at[MOST_SLACK] = max(at[MOST_SLACK], spare)


@inner
def ramp_rounds(family: Family, stage: int) -> tuple[int, int]:
    """From the first to the last forward of a stage: steps of a forward alone, and with a backward between.

    The same for its backwards.
    """
    others = family.num_microbatches - 1
    waits = min(family.num_stages - 1 - stage, others)
    return waits, others - waits


def crossing_ns(family: Family) -> int:
    """A path from stage 0 to the last and back: the same for all candidates."""
    crossing = family.num_layers * (family.layer_forward + family.layer_backward)
    crossing += int(family.exit_forward[-1] + family.exit_backward[-1])
    crossing += int((family.forward + family.backward).sum())
    # Where messages block, each counts as work of both its ends there and back, but not twice on the way.
    return crossing + (3 if family.blocks else 2) * int(family.message.sum())


@inner
def _messages_ns(family: Family) -> int:
    total = 0
    for message in family.message:
        total += message
    return total


@inner
def blocked_ns(family: Family, stage: int) -> int:
    """What messages add to one steady forward and backward of a stage that waits for them."""
    if not family.blocks:
        return 0
    ahead = family.message[stage] if stage < family.num_stages - 1 else 0
    behind = family.message[stage - 1] if stage > 0 else 0
    return 2 * (ahead + behind)


@inner
def link_ns(family: Family, stage: int) -> int:
    """What messages add to a path that goes on to the next stage and comes back."""
    return 0 if family.blocks or stage == family.num_stages - 1 else 2 * family.message[stage]
