"""Least candidates of search families, with proof: iterative deepening around ``branch``.

The allowed time grows from the lower bound of the whole family. A round without a find proves that nothing
is that fast; the round with the first find goes on until nothing faster is left. Then the same for the peak
among the candidates of that time, and for the overshoot among those of that peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eeplan.sim.family import Family, Integers, iteration_ns
from eeplan.sim.fixed_split import Enumerated, enumerated

NODE_BUDGET = 6_000_000
"""Stages tried before a search gives up its proof; a count, so that equal inputs give equal plans."""
TIE_BUDGET = 2_000_000
"""The same for choosing among equally fast candidates."""
FIRST_STEP = 1e-4
"""How far above the lower bound the first round looks; each round doubles it."""
_ANYTHING = 1 << 62


@dataclass(frozen=True, slots=True)
class Value:
    """What candidates are compared by, in this order."""

    time_ns: int
    """Whole iteration without the constant overhead."""
    peak_bytes: int
    overshoot: int
    """``layout.squared_gaps``; 0 where exits have fixed places."""


@dataclass(frozen=True, slots=True)
class Solution:
    """Layers and exits of each stage."""

    family: int
    """Index of the family it is from."""
    split: tuple[int, ...]
    counts: tuple[int, ...]
    value: Value


@dataclass(frozen=True, slots=True)
class Proof:
    """How much of the space is settled."""

    lower_bound_ns: int
    """No candidate is faster."""
    optimal: bool
    """The solution is the fastest."""
    settled: bool
    """Of the fastest it is the least in peak, then in overshoot, too."""
    evaluated: int
    """Candidates judged."""
    pruned: int
    """Subtrees cut off by a bound."""


def solve(
    families: Sequence[Family], budget: int = NODE_BUDGET, tie_budget: int = TIE_BUDGET
) -> tuple[Solution | None, Proof]:
    """The least candidate of all families; a later family must be strictly faster than an earlier one.

    Args:
        budget: stages tried, in each family.
        tie_budget: stages tried when choosing among equally fast candidates, for each further criterion.

    Returns:
        The solution and its proof. No solution and an optimal proof: none is allowed.
    """
    best: Solution | None = None
    searches: list[_Search | _Enumeration] = []
    for index, family in enumerate(families):
        every = enumerated(family)
        search = _Search(family, budget, tie_budget) if every is None else _Enumeration(every)
        searches.append(search)
        solution = search.fastest(index, best)
        if solution is not None:
            best = solution
    lower_bound_ns = min(search.lower_bound_ns for search in searches)
    if best is not None:
        lower_bound_ns = min(lower_bound_ns, best.value.time_ns)
        best = searches[best.family].choose(best)
    optimal = all(search.finished for search in searches)
    return best, Proof(
        lower_bound_ns=lower_bound_ns,
        optimal=optimal,
        settled=optimal and all(search.settled for search in searches),
        evaluated=sum(search.judged for search in searches),
        pruned=sum(search.cut for search in searches),
    )


def some_within(families: Sequence[Family], limit_ns: int | None, budget: int) -> bool | None:
    """Whether any candidate takes at most ``limit_ns``; None if the budget did not suffice to tell."""
    told: bool | None = False
    for family in families:
        every = enumerated(family)
        if every is not None:
            found: bool | None = bool((every.time_ns <= (_ANYTHING if limit_ns is None else limit_ns)).any())
        else:
            found = _Search(family, budget, 0).within(limit_ns)
        if found:
            return True
        told = told if found is False else None
    return told


def with_split(family: Family, split: Sequence[int]) -> Family:
    """The candidates with these layers per stage."""
    given = np.zeros_like(family.allowed)
    for stage, layers in enumerate(split):
        given[stage, layers] = True
    return family._replace(allowed=family.allowed & given)


def without_counts(family: Family, counts: Sequence[int]) -> Family:
    """The candidates with other exits per stage."""
    return family._replace(excluded=np.array(counts, np.int64))


def without_times(family: Family) -> Family:
    """The same candidates when time does not count, so that the least one has the least peak."""
    nothing = np.zeros_like
    return family._replace(
        forward=nothing(family.forward),
        backward=nothing(family.backward),
        layer_forward=0,
        layer_backward=0,
        exit_forward=nothing(family.exit_forward),
        exit_backward=nothing(family.exit_backward),
        message=nothing(family.message),
        sync=nothing(family.sync),
        step=nothing(family.step),
        shared=nothing(family.shared),
    )


@dataclass(slots=True)
class _Enumeration:
    """A family of which every candidate is judged; the same questions and answers as ``_Search``."""

    every: Enumerated
    lower_bound_ns: int = _ANYTHING
    finished: bool = True
    settled: bool = True
    cut: int = 0

    @property
    def judged(self) -> int:
        return len(self.every)

    def fastest(self, index: int, best: Solution | None) -> Solution | None:
        """The least candidate if it is strictly faster than ``best``."""
        found = self.every.best()
        if found is None:
            return None
        time_ns, peak_bytes, overshoot, counts = found
        self.lower_bound_ns = time_ns
        if best is not None and time_ns >= best.value.time_ns:
            return None
        return Solution(index, self.every.split, counts, Value(time_ns, peak_bytes, overshoot))

    def choose(self, fastest: Solution) -> Solution:
        """It is the least in everything already."""
        return fastest


@dataclass(slots=True)
class _Search:
    """One family, and what is known of it so far."""

    family: Family
    budget: int
    tie_budget: int
    lower_bound_ns: int = _ANYTHING
    """No candidate of this family is faster."""
    finished: bool = True
    """Within the budget."""
    settled: bool = True
    judged: int = 0
    cut: int = 0

    def fastest(self, index: int, best: Solution | None) -> Solution | None:
        """The least candidate in time that is strictly faster than ``best``."""
        from eeplan.sim import branch

        lowest_ns = self._lowest_ns()
        if lowest_ns is None:
            return None
        self.lower_bound_ns = lowest_ns
        if best is not None and lowest_ns >= best.value.time_ns:
            return None
        above = Value(best.value.time_ns if best else _ANYTHING, _ANYTHING, _ANYTHING)
        solution, self.finished = self._deepen(branch.TIME, index, above, lowest_ns, self.budget)
        if solution is not None and self.finished:
            self.lower_bound_ns = solution.value.time_ns
        return solution

    def within(self, limit_ns: int | None) -> bool | None:
        """Whether a candidate takes at most ``limit_ns``."""
        from eeplan.sim import branch

        longest = self._longest_ns() + 1
        value = np.array([longest if limit_ns is None else min(longest, limit_ns + 1), _ANYTHING, _ANYTHING])
        found, statistics = self._round(branch.TIME, 0, value, True, self.budget)
        if found is None and statistics[branch.STAGE] >= 0:
            return None
        return found is not None

    def choose(self, fastest: Solution) -> Solution:
        """Of the candidates as fast as ``fastest``, the least in peak, then in overshoot."""
        from eeplan.sim import branch, known_stages, later_stages

        best = fastest
        peak = int(
            self._bounds(best.value.time_ns, best.value.peak_bytes)[0][0, 0, 0, later_stages.LEAST_PEAK]
        )
        gaps = int(branch.least_gaps(self.family, known_stages.empty_prefix(self.family), 0))
        for goal, lowest in ((branch.PEAK, peak), (branch.OVERSHOOT, gaps)):
            better, finished = self._deepen(goal, best.family, best.value, lowest, self.tie_budget)
            best, self.settled = better or best, self.settled and finished
        return best

    def _deepen(
        self, goal: int, index: int, above: Value, lowest: int, budget: int
    ) -> tuple[Solution | None, bool]:
        """The candidate with the least goal below that of ``above``, not more in what comes before the goal.

        A round costs the more the higher its limit is. So limits rise slowly, and start to rise anew below
        every candidate that is found.

        Returns:
            The solution or None, and whether that is proved.
        """
        from eeplan.sim import branch

        limits = np.array([above.time_ns, above.peak_bytes, above.overshoot])
        best: Solution | None = None
        step = max(1, round(FIRST_STEP * lowest))
        while lowest < limits[goal]:
            value = limits.copy()
            value[goal] = min(lowest + step, limits[goal])
            is_last = best is not None and value[goal] == limits[goal]
            found, statistics = self._round(goal, index, value, not is_last, budget)
            budget -= int(statistics[branch.NODES])
            best = found or best
            if statistics[branch.STAGE] >= 0:
                return best, False
            if is_last:
                break
            if found:
                limits[goal] = value[goal]
                step = max(1, (int(limits[goal]) - lowest) // 4)
                continue
            lowest += step
            step *= 2
            if goal == branch.TIME:
                self.lower_bound_ns = min(lowest, int(limits[goal]))
                limits[goal] = min(int(limits[goal]), self._longest_ns() + 1)
        return best, True

    def _round(
        self, goal: int, index: int, value: Integers, any_will_do: bool, budget: int
    ) -> tuple[Solution | None, Integers]:
        """A candidate below ``value``, which becomes its value, or None; and the statistics of ``branch``."""
        from eeplan.sim import branch, known_stages, later_stages
        from eeplan.sim.kernels import LANES

        family = self.family
        bounds, most_layers, mean = self._bounds(int(value[branch.TIME]), int(value[branch.PEAK]))
        known, crossing = known_stages.empty_prefix(family), later_stages.crossing_ns(family)
        cursor = branch.start(family, most_layers)
        waiting = np.zeros((LANES, branch.W_RANK + 1, max(2, family.num_stages + 1)), np.int64)
        statistics = np.zeros(branch.BUDGET + 1, np.int64)
        statistics[branch.BUDGET] = budget
        best: Solution | None = None
        while True:
            branch.search(
                family, bounds, crossing, known, most_layers, mean, cursor, waiting, goal, value, statistics
            )
            if not statistics[branch.WAITING]:
                break
            found = self._judged(waiting[: statistics[branch.WAITING]], goal, index, value)
            if found is not None:
                best = found
                statistics[branch.FOUND] += 1
                if any_will_do:
                    statistics[branch.STAGE] = -1
                    break
        self.cut += int(statistics[branch.CUT])
        return best, statistics

    def _judged(self, waiting: Integers, goal: int, index: int, value: Integers) -> Solution | None:
        """The best of the candidates if it is below ``value``, which becomes its value."""
        from eeplan.sim import branch
        from eeplan.sim.fast import ends_ns

        family, stages = self.family, self.family.num_stages
        self.judged += len(waiting)
        layers = np.diff(waiting[:, branch.W_BELOW])[:, :stages]
        exits_below = waiting[:, branch.W_EXITS_BELOW]
        group = family.group[exits_below[:, :stages], exits_below[:, 1 : stages + 1]]
        ends = ends_ns(
            waiting[:, branch.W_FORWARD, :stages],
            waiting[:, branch.W_BACKWARD, :stages],
            family.num_microbatches,
            family.message,
            "rendezvous" if family.rendezvous else "asynchronous",
        )
        best: Solution | None = None
        for row, time_ns in enumerate(iteration_ns(family, ends, layers, group).tolist()):
            peak, overshoot = waiting[row, branch.W_RANK, :2].tolist()
            if branch.is_better(time_ns, peak, overshoot, goal, value):
                value[:] = time_ns, peak, overshoot
                counts = np.diff(exits_below[row])[:stages].tolist()
                best = Solution(
                    index, tuple(layers[row].tolist()), tuple(counts), Value(time_ns, peak, overshoot)
                )
        return best

    def _lowest_ns(self) -> int | None:
        """Lower bound of all candidates; None if there are none."""
        from eeplan.sim import branch, known_stages, later_stages

        crossing_ns = later_stages.crossing_ns(self.family)
        longest_ns, limit_ns = self._longest_ns(), 2 * self.family.num_microbatches * crossing_ns
        limit_ns = limit_ns // self.family.num_stages + 1
        while True:
            bounds, most_layers, _ = self._bounds(limit_ns, _ANYTHING)
            known = known_stages.empty_prefix(self.family)
            anything = np.zeros(2, np.int64)
            bound_ns = int(
                branch.lowest_ns(self.family, bounds, crossing_ns, known, 0, most_layers, anything)
            )
            if bound_ns < later_stages.NEVER:
                # Stages that take longer than the limit alone were left out.
                return min(bound_ns, limit_ns + 1)
            if limit_ns >= longest_ns:
                return None
            limit_ns *= 4

    def _bounds(self, limit_ns: int, limit_bytes: int) -> tuple[Integers, Integers, Integers]:
        """Tables for candidates within both limits, with the layers and means of stages that they allow."""
        from eeplan.sim import later_stages

        family = self.family._replace(allowed=self.family.allowed & (self.family.peak <= limit_bytes))
        most_layers, mean = self._most_layers(limit_ns), self._mean(limit_ns)
        return later_stages.tables(family, limit_ns, most_layers, mean), most_layers, mean

    def _most_layers(self, limit_ns: int) -> Integers:
        """Layers beyond which the stage alone takes longer than ``limit_ns``: M forwards and backwards."""
        family = self.family
        most = family.num_layers - family.num_stages + 1
        layer_ns = family.layer_forward + family.layer_backward
        if layer_ns == 0:
            return np.full(family.num_stages, most)
        spare_ns = limit_ns // family.num_microbatches - family.forward - family.backward
        layers: Integers = np.clip(spare_ns // layer_ns, 0, most)
        return layers

    def _mean(self, limit_ns: int) -> Integers:
        """Largest mean of a run of neighbouring stages that the limit allows, as a fraction.

        A path that crosses the pipeline twice may spend its other M-1-P rounds on any run: whole turns of it,
        and what is left over on its slowest stage, which misses at most the messages within one turn.
        """

        from eeplan.sim import later_stages

        family = self.family
        turns = family.num_microbatches - 1 - family.num_stages
        if turns < 1:
            return np.zeros(2, np.int64)
        inside_ns = 0 if family.blocks else 2 * int(family.message.sum())
        return np.array([limit_ns - 2 * int(later_stages.crossing_ns(family)) + inside_ns, turns])

    def _longest_ns(self) -> int:
        """More than any candidate takes: all ops and messages one after the other."""
        family = self.family
        once = family.num_layers * (family.layer_forward + family.layer_backward)
        once += int((family.forward + family.backward).sum() + 4 * family.message.sum())
        once += int(family.exit_forward[-1] + family.exit_backward[-1])
        after = int(family.sync.max() + family.step.max() + family.shared.max())
        return family.num_microbatches * once + after
