"""How much more each stage could do before the iteration gets longer.

Extra time x on every forward, or every backward, of a stage makes the iteration T(x) long. T is a maximum of
path lengths, each of which grows by a whole number of x: convex, and never decreasing. Two questions are
answered exactly, in nanoseconds:

    free     the largest x with T(x) <= T(0)
    hidden   the largest x with T(x) <= T(0) + x: the extra time shows once an iteration and not once per
             microbatch, as that of a minimal exit on a middle stage does (EE-LLM 3.2)

Since T is convex, T(x) - x first stays at or below T(0), then above. The largest x is found from above: the
line through T(x-1) and T(x) lies below T left of both, so that no x beyond where it meets the limit is
possible, and the search goes on there. That takes a few steps, each for all stages at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import message_ns
from eeplan.sim.fast import ends_ns
from eeplan.sim.fill import Fill
from eeplan.sim.fill_search import filled_ends_ns

Side = Literal["forward", "backward", "either"]


@dataclass(frozen=True, slots=True)
class Iteration:
    """One training iteration whose op times may change."""

    costs: PipelineCosts
    fill: Fill
    from_ends_ns: Callable[[Sequence[int]], int]
    """From the ends of all stages in the pipeline part to the whole iteration; never decreasing."""

    def times_ns(self, variants: Sequence[PipelineCosts]) -> list[int]:
        """The iteration with other costs, for many of them."""
        return [self.from_ends_ns(ends) for ends in self._ends_ns(variants)]

    def _ends_ns(self, variants: Sequence[PipelineCosts]) -> list[list[int]]:
        if self.fill.is_plain and not any(self.costs.before_gradient_ns):
            ends = ends_ns(
                np.array([costs.forward_ns for costs in variants]),
                np.array([costs.backward_ns for costs in variants]),
                self.fill.num_full,
                np.array([message_ns(costs) for costs in variants], dtype=np.int64),
                self.costs.transport,
            )
            found: list[list[int]] = ends.tolist()
            return found
        return [list(filled_ends_ns(costs, self.fill)) for costs in variants]


@dataclass(frozen=True, slots=True)
class Headroom:
    """What one stage could take in addition, per microbatch."""

    free_ns: int
    """Without any effect on the iteration."""
    free_side: Side
    """Whether its forward or its backward has that much room; ``either`` if both do."""
    hidden_ns: int
    """Adding at most as much to the iteration once; never less than ``free_ns``."""
    hidden_side: Side


def headroom(iteration: Iteration) -> tuple[Headroom, ...]:
    """Headroom of each stage; extra time counts for all kinds of microbatches alike."""
    stages = range(iteration.costs.num_stages)
    sides: tuple[Side, ...] = ("forward", "backward")
    free = _largest(iteration, [(stage, side) for stage in stages for side in sides], price=0)
    # With one microbatch, once an iteration is once per microbatch.
    hidden = free
    if iteration.fill.num_full > 1:
        hidden = _largest(iteration, [(stage, side) for stage in stages for side in sides], price=1)
    return tuple(
        Headroom(*_best(free[2 * stage : 2 * stage + 2]), *_best(hidden[2 * stage : 2 * stage + 2]))
        for stage in stages
    )


def slowed(costs: PipelineCosts, stage: int, side: Side, extra_ns: int) -> PipelineCosts:
    """``costs`` with every forward or backward of one stage so much longer."""

    def longer(times: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(time + extra_ns * (index == stage) for index, time in enumerate(times))

    if side == "forward":
        return replace(
            costs,
            forward_ns=longer(costs.forward_ns),
            turn_forward_ns=longer(costs.turn_forward_ns),
            bare_forward_ns=longer(costs.bare_forward_ns),
        )
    return replace(
        costs, backward_ns=longer(costs.backward_ns), turn_backward_ns=longer(costs.turn_backward_ns)
    )


def _best(forward_and_backward: Sequence[int]) -> tuple[int, Side]:
    forward, backward = forward_and_backward
    if forward == backward:
        return forward, "either"
    return (forward, "forward") if forward > backward else (backward, "backward")


def _largest(iteration: Iteration, places: Sequence[tuple[int, Side]], price: int) -> list[int]:
    """The largest x with T(x) <= T(0) + price x at each place."""
    (now_ns,) = iteration.times_ns([iteration.costs])
    # The stage itself is busy for x with each full microbatch.
    found = [now_ns // (iteration.fill.num_full - price)] * len(places)
    open_places = [at for at in range(len(places)) if found[at]]
    while open_places:
        variants = [
            slowed(iteration.costs, *places[at], extra)
            for at in open_places
            for extra in (found[at] - 1, found[at])
        ]
        times = iteration.times_ns(variants)
        too_long = []
        for at, before, after in zip(open_places, times[::2], times[1::2], strict=True):
            excess_ns, slope = after - price * found[at] - now_ns, after - before - price
            if excess_ns > 0:
                assert slope > 0, "the time of an iteration is convex in the time of its ops"
                found[at] -= -(-excess_ns // slope)
                too_long.append(at)
        open_places = [at for at in too_long if found[at]]
    return found
