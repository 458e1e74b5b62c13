"""How many microbatches fill each bubble: exact search over both counts (EE-LLM 3.3).

The formula for equal stages, K = floor((P-1) / (f/b + 1)) per region, is where to start; exits, unequal
stages, messages and memory decide otherwise. So every pair of counts is judged by the exact recurrence under
the limits on time and memory. Best is, in this order: most inserts, most stage backwards among them, least
iteration time, least peak, fewer in region A.

How far the backward of each truncated microbatch reaches is part of the answer: as far as time allows, the
first one first. Taking ops out of a schedule never delays the others, so with equally many full microbatches
the counts that fit form a staircase, and the reach of one microbatch can be found by bisection.

Not covered: other shapes of region A than that of the paper.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from eeplan.sim.bounds import filled_peak_bytes
from eeplan.sim.costs import PipelineCosts
from eeplan.sim.engine import message_ns, per_stage, stage_ends_ns
from eeplan.sim.fill import Fill, filled, warm_up_depths
from eeplan.spec import FillMode


@dataclass(frozen=True, slots=True)
class FillProblem:
    """What the counts are chosen for."""

    costs: PipelineCosts
    """Partial costs included."""
    num_microbatches: int
    """M of the run."""
    mode: FillMode
    has_exit: tuple[bool, ...]
    """Per stage."""
    iteration_ns: Callable[[Sequence[int]], int]
    """From the ends of all stages in the pipeline part to the whole iteration; never decreasing."""
    max_time_overhead: float
    """Accepted, as a fraction of the same full microbatches alone."""
    floor_bytes: tuple[int, ...]
    """Peak of each stage outside the pipeline part."""
    base_bytes: int
    """Of each process, beside what the costs count."""
    limit_bytes: int | None
    """Of each device."""


@dataclass(frozen=True, slots=True)
class FillCell:
    """One pair of counts, judged."""

    warm_up: int
    cool_down: int
    fill: Fill
    ends_ns: tuple[int, ...]
    iteration_ns: int
    plain_ns: int
    """Iteration of the full microbatches alone."""
    peak_bytes: tuple[int, ...]
    """Of each stage's process."""

    @property
    def inserts(self) -> int:
        """Partial microbatches."""
        return len(self.fill.depths) + len(self.fill.reaches)

    @property
    def stage_backwards(self) -> int:
        """Backwards that the partial microbatches add over all stages."""
        return sum(self.fill.depths) + sum(self.fill.reaches)

    @property
    def time_overhead(self) -> float:
        """Relative slow-down against the full microbatches alone."""
        return self.iteration_ns / self.plain_ns - 1.0

    @property
    def rank(self) -> tuple[int, int, int, int, int]:
        """Less is better."""
        peak = max(self.peak_bytes)
        return -self.inserts, -self.stage_backwards, self.iteration_ns, peak, self.warm_up


@dataclass(frozen=True, slots=True)
class FillOutcome:
    """The chosen counts, and what one insert more in either region would take: it misses a limit."""

    best: FillCell
    more_warm_up: FillCell | None
    """None where the stages and exits have no place for another."""
    more_cool_down: FillCell | None
    evaluated: int


def search_fill(problem: FillProblem) -> FillOutcome | None:
    """The best counts within the limits; None when not even no inserts at all fit the memory limit."""
    judge = _Judge(problem)
    num_stages = problem.costs.num_stages
    fitting: list[FillCell] = []
    seen: set[tuple[tuple[int, ...], int]] = set()
    for warm_up in range(num_stages):
        depths = warm_up_depths(warm_up, problem.has_exit)
        for cool_down in range(num_stages):
            cell = None if (depths, cool_down) in seen else judge.counts(warm_up, cool_down)
            seen.add((depths, cool_down))
            if cell is not None and judge.in_time(cell) and judge.in_memory(cell):
                fitting.append(cell)
            elif cell is not None and problem.mode == "added":
                # More of either only takes longer and keeps more.
                break
    if not fitting:
        return None
    most = max(cell.inserts for cell in fitting)
    finalists = (
        judge.reaching_further(cell, judge.limit_ns(cell)) for cell in fitting if cell.inserts == most
    )
    best = min(finalists, key=lambda cell: cell.rank)
    deeper = (
        count
        for count in range(best.warm_up + 1, num_stages)
        if len(warm_up_depths(count, problem.has_exit)) > len(best.fill.depths)
    )
    another = next(deeper, None)
    return FillOutcome(
        best=best,
        more_warm_up=None if another is None else judge.counts(another, best.cool_down),
        more_cool_down=None
        if best.cool_down + 1 >= num_stages
        else judge.counts(best.warm_up, best.cool_down + 1),
        evaluated=judge.evaluated,
    )


def fixed_fill(problem: FillProblem, warm_up: int, cool_down: int) -> FillCell:
    """Counts chosen by hand, judged; the reaches are the furthest that add no time.

    The cell need not fit any limit. Counts beyond what the stages can take are the caller's to refuse.

    Raises:
        ValueError: mode ``same_count`` and no full microbatch left.
    """
    judge = _Judge(problem)
    cell = judge.counts(warm_up, cool_down)
    if cell is None:
        raise ValueError(f"{warm_up} and {cool_down} inserts leave no full microbatch")
    return judge.reaching_further(cell, max(cell.iteration_ns, judge.limit_ns(cell)))


def filled_ends_ns(costs: PipelineCosts, fill: Fill) -> tuple[int, ...]:
    """When each stage is done; the engine's answer, compiled for asynchronous messages (tested)."""
    if costs.transport == "rendezvous":
        return stage_ends_ns(filled(costs.num_stages, fill), costs)
    from eeplan.sim import fill_kernels

    table = np.array(
        [
            costs.forward_ns,
            costs.backward_ns,
            costs.turn_forward_ns or costs.forward_ns,
            costs.turn_backward_ns or costs.backward_ns,
            costs.bare_forward_ns or costs.forward_ns,
            per_stage(costs.before_gradient_ns, costs.num_stages),
            (*message_ns(costs), 0),
        ],
        dtype=np.int64,
    )
    lengths = (np.array(lengths, dtype=np.int64) for lengths in (fill.depths, fill.reaches))
    ends: list[int] = fill_kernels.asynchronous(table, fill.num_full, *lengths).tolist()
    return tuple(ends)


class _Judge:
    """Judges fills of one problem and counts them."""

    def __init__(self, problem: FillProblem) -> None:
        self.problem = problem
        self.evaluated = 0
        self._plain_ns: dict[int, int] = {}

    def counts(self, warm_up: int, cool_down: int) -> FillCell | None:
        """These counts with the shortest reaches; None when no full microbatch would be left."""
        depths = warm_up_depths(warm_up, self.problem.has_exit)
        partial = len(depths) + cool_down if self.problem.mode == "same_count" else 0
        num_full = self.problem.num_microbatches - partial
        if num_full < 1:
            return None
        return self.cell(warm_up, cool_down, Fill(num_full, depths, (1,) * cool_down))

    def cell(self, warm_up: int, cool_down: int, fill: Fill) -> FillCell:
        problem = self.problem
        self.evaluated += 1
        if fill.num_full not in self._plain_ns:
            plain_ends = filled_ends_ns(problem.costs, Fill(fill.num_full))
            self._plain_ns[fill.num_full] = problem.iteration_ns(plain_ends)
        ends_ns = filled_ends_ns(problem.costs, fill)
        peaks = map(max, filled_peak_bytes(problem.costs, fill), problem.floor_bytes)
        return FillCell(
            warm_up=warm_up,
            cool_down=cool_down,
            fill=fill,
            ends_ns=ends_ns,
            iteration_ns=problem.iteration_ns(ends_ns),
            plain_ns=self._plain_ns[fill.num_full],
            peak_bytes=tuple(peak + problem.base_bytes for peak in peaks),
        )

    def limit_ns(self, cell: FillCell) -> int:
        return int(cell.plain_ns * (1.0 + self.problem.max_time_overhead))

    def in_time(self, cell: FillCell) -> bool:
        return cell.iteration_ns <= self.limit_ns(cell)

    def in_memory(self, cell: FillCell) -> bool:
        limit = self.problem.limit_bytes
        return limit is None or max(cell.peak_bytes) <= limit

    def reaching_further(self, cell: FillCell, limit_ns: int) -> FillCell:
        """The same counts, each truncated microbatch going back as far as time and memory allow."""
        longest = self.problem.costs.num_stages - 1
        for index in range(cell.cool_down):
            reaches = cell.fill.reaches
            longest = self._furthest(cell, index, range(reaches[index] + 1, longest + 1), limit_ns)
            cell = self._with_reach(cell, index, longest)
        return cell

    def _furthest(self, cell: FillCell, index: int, further: range, limit_ns: int) -> int:
        def too_far(reach: int) -> bool:
            changed = self._with_reach(cell, index, reach)
            return changed.iteration_ns > limit_ns or (self.in_memory(cell) and not self.in_memory(changed))

        return cell.fill.reaches[index] + bisect_left(further, True, key=too_far)

    def _with_reach(self, cell: FillCell, index: int, reach: int) -> FillCell:
        reaches = cell.fill.reaches
        if reaches[index] == reach:
            return cell
        changed = (*reaches[:index], reach, *reaches[index + 1 :])
        fill = Fill(cell.fill.num_full, cell.fill.depths, changed)
        return self.cell(cell.warm_up, cell.cool_down, fill)
