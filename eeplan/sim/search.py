"""Where k exits go: exact search over the number of exits on each stage.

Time and peaks depend on exits only through what they add to each stage, so all placements with the same
number of (equal) exits per stage cost the same; the search judges each such vector of counts once and then
puts the exits of the best one where tokens compute the fewest layers in vain. Covered: equal heads, a given
layer split, exit forwards all deferred or all eager. It judges C(k+P-1, k) vectors: 84 for P=4, k=6, 3,876
for P=16, k=4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from eeplan.sim.costs import (
    CostModel,
    StageCosts,
    grad_sync_ns,
    pipeline_costs,
    shared_matrix_sync_ns,
    stage_costs,
    to_ns,
)
from eeplan.sim.engine import message_ns
from eeplan.sim.fast import stage_ends_ns
from eeplan.sim.layout import Layout, Slot, can_hold, least_overshoot
from eeplan.sim.memory import iteration_peak_bytes
from eeplan.sim.parameters import Head
from eeplan.sim.schedule import compute_order
from eeplan.spec import ExitForward

CANDIDATES_AT_ONCE = 4096
"""Bounds the memory of the recurrence, which keeps a number per candidate, stage and microbatch in flight."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Exits per stage and where their forwards run, judged over one iteration."""

    exit_forward: ExitForward
    stages: tuple[StageCosts, ...]
    pipeline_ns: int
    grad_sync_ns: int
    optimizer_ns: int
    overhead_ns: int
    peak_bytes: tuple[int, ...]
    """Of each stage's process, base included."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Exits on each stage."""
        return tuple(len(stage.heads) for stage in self.stages)

    @property
    def iteration_ns(self) -> int:
        """Pipeline, gradient synchronisation, optimizer and the rest."""
        return self.pipeline_ns + self.grad_sync_ns + self.optimizer_ns + self.overhead_ns

    def fits(self, limit_bytes: int | None) -> bool:
        """Whether every stage stays within the device's memory."""
        return limit_bytes is None or max(self.peak_bytes) <= limit_bytes

    @property
    def rank(self) -> tuple[int, bool, int]:
        """Less is better: iteration time, then deferred before eager, then the largest peak of any stage."""
        return self.iteration_ns, self.exit_forward == "eager", max(self.peak_bytes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search has found. Candidates of the same kind are listed best first."""

    best: Candidate | None
    """None when nothing fits the memory limit."""
    slots: tuple[Slot, ...]
    """Where the exits of ``best`` read; empty without one."""
    runner_up: Candidate | None
    """Best fitting candidate with other counts, or None."""
    faster_but_too_large: Candidate | None
    """A candidate that beats ``best`` in time and does not fit."""
    smallest: Candidate
    """The candidate with the least largest peak; says by how much an infeasible search failed."""
    evaluated: int
    space_size: int


def search(model: CostModel, num_exits: int, head: Head, modes: Sequence[ExitForward]) -> Outcome:
    """The best placement of ``num_exits`` equal exits, proved by judging all of them.

    Least iteration time first, then deferred before eager, then the least largest peak of any stage, then the
    least expected overshoot
    (:func:`eeplan.sim.layout.squared_gaps`), then fewer exits on early stages.

    Args:
        model: run, layout and op costs.
        num_exits: k, at most the number of layers minus 1.
        head: of every exit.
        modes: where exit forwards may run.
    """
    layout = model.layout
    room = [len(layout.slots(stage)) for stage in range(layout.num_stages)]
    vectors = [counts for counts in _counts(num_exits, room) if can_hold(counts, layout)]
    candidates = judge(model, list(_composed(model, vectors, head, modes)))
    ranked = sorted(candidates, key=lambda candidate: (candidate.rank, candidate.counts))
    limit = model.run.limits.device_memory_bytes
    fitting = [candidate for candidate in ranked if candidate.fits(limit)]
    best, slots = _least_wasteful(fitting, layout) if fitting else (None, ())
    runners = [c for c in fitting if best and c.counts != best.counts]
    too_large = [c for c in ranked if best and c.iteration_ns < best.iteration_ns]
    return Outcome(
        best=best,
        slots=slots,
        runner_up=runners[0] if runners else None,
        faster_but_too_large=too_large[0] if too_large else None,
        smallest=min(ranked, key=lambda candidate: max(candidate.peak_bytes)),
        evaluated=len(candidates),
        space_size=layout.num_placements(num_exits) * len(modes),
    )


def judge(
    model: CostModel, composed: Sequence[tuple[ExitForward, tuple[StageCosts, ...]]]
) -> list[Candidate]:
    """Predict iteration time and peaks of many candidates under 1F1B with asynchronous messages."""
    if not composed:
        return []
    schedule = compute_order(model.layout.num_stages, model.run.num_microbatches)
    messages = message_ns(pipeline_costs(model, composed[0][1]))
    judged: list[Candidate] = []
    for start in range(0, len(composed), CANDIDATES_AT_ONCE):
        part = composed[start : start + CANDIDATES_AT_ONCE]
        forward = np.array([[stage.forward_ns for stage in stages] for _, stages in part], dtype=np.int64)
        backward = np.array([[stage.backward_ns for stage in stages] for _, stages in part], dtype=np.int64)
        ends = stage_ends_ns(schedule, forward, backward, messages).tolist()
        judged += (_judged(model, *one, one_ends) for one, one_ends in zip(part, ends, strict=True))
    return judged


def _judged(
    model: CostModel, mode: ExitForward, stages: tuple[StageCosts, ...], ends_ns: list[int]
) -> Candidate:
    base = model.profile.process_base_bytes
    return Candidate(
        exit_forward=mode,
        stages=stages,
        pipeline_ns=max(ends_ns),
        grad_sync_ns=grad_sync_ns(ends_ns, stages, shared_matrix_sync_ns(model, stages)),
        # Clipping needs the norm over all stages, so the slowest stage's step ends the iteration.
        optimizer_ns=max(stage.optimizer_ns for stage in stages),
        overhead_ns=to_ns(model.profile.iteration_overhead_s),
        peak_bytes=tuple(peak + base for peak in iteration_peak_bytes(model, stages)),
    )


def _counts(num_exits: int, room: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to put ``num_exits`` on stages with that much room, in lexicographic order."""
    if not room:
        if num_exits == 0:
            yield ()
        return
    for here in range(max(0, num_exits - sum(room[1:])), min(num_exits, room[0]) + 1):
        for rest in _counts(num_exits - here, room[1:]):
            yield (here, *rest)


def _composed(
    model: CostModel, vectors: Sequence[tuple[int, ...]], head: Head, modes: Sequence[ExitForward]
) -> Iterator[tuple[ExitForward, tuple[StageCosts, ...]]]:
    for mode in modes:
        known = {
            (stage, count): stage_costs(model, stage, (head,) * count, mode)
            for stage, count in {pair for counts in vectors for pair in enumerate(counts)}
        }
        for counts in vectors:
            yield mode, tuple(known[pair] for pair in enumerate(counts))


def _least_wasteful(ranked: Sequence[Candidate], layout: Layout) -> tuple[Candidate, tuple[Slot, ...]]:
    """Of the best by rank, the candidate whose exits overshoot least, with their slots."""
    _, equals = next(groupby(ranked, key=lambda candidate: candidate.rank))
    placed = []
    for candidate in equals:
        found = least_overshoot(candidate.counts, layout)
        if found is not None:
            placed.append((*found, candidate))
    _, slots, candidate = min(placed, key=lambda entry: (entry[0], entry[2].counts, entry[1]))
    return candidate, slots
