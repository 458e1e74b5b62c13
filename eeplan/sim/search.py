"""Where k exits go, and how the layers are split: exact search, with its proof.

Time and peaks depend on exits and layers only through what they add to each stage, so all placements with the
same layers and (equal) exits per stage cost the same. Branch and bound settles these numbers (``solve``); the
exits then go to the depths where tokens compute the fewest layers in vain. Covered: exits of one kind at any
place or exits at given places, a given or a free layer split, exit forwards all deferred or all eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import comb

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
from eeplan.sim.family import Family, counted_family, placed_family
from eeplan.sim.fast import ends_ns
from eeplan.sim.layout import Layout, Slot, least_overshoot
from eeplan.sim.memory import iteration_peak_bytes
from eeplan.sim.parameters import Head
from eeplan.sim.solve import Proof, Solution, solve, with_split, without_counts, without_times
from eeplan.spec import ExitForward


@dataclass(frozen=True, slots=True)
class Candidate:
    """Layers and exits per stage and where exit forwards run, judged over one iteration."""

    exit_forward: ExitForward
    layout: Layout
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
    """What a search has found."""

    best: Candidate | None
    """None when nothing fits the memory limit, or the search was given up before it found anything."""
    faster_but_too_large: Candidate | None
    """A candidate that beats ``best`` in time and does not fit; the fastest when nothing fits."""
    proof: Proof
    space_size: int


class Search:
    """The candidates of one question: so many exits of a kind, or exits at given places.

    Best is, in this order: least iteration time, deferred before eager, least largest peak of any stage,
    least expected overshoot (:func:`eeplan.sim.layout.squared_gaps`).

    Args:
        model: run and op costs; its layout is the split unless ``split_is_free``.
        modes: where exit forwards may run.
        split_is_free: search all layer splits.
        family: candidates of one mode, from a model and the mode.
        heads: on each stage, from a layout and the number of exits on each stage.
        placements: sets of exits, for the size of the space.
    """

    def __init__(
        self,
        model: CostModel,
        modes: Sequence[ExitForward],
        split_is_free: bool,
        family: Callable[[CostModel, ExitForward], Family],
        heads: Callable[[Sequence[int]], Sequence[tuple[Head, ...]]],
        placements: int,
    ) -> None:
        self.model, self.modes, self.split_is_free = model, modes, split_is_free
        self._family, self._heads, self._placements = family, heads, placements

    @property
    def space_size(self) -> int:
        """Splits x placements x modes."""
        layout = self.model.layout
        splits = comb(layout.num_layers - 1, layout.num_stages - 1) if self.split_is_free else 1
        return splits * self._placements * len(self.modes)

    def best(self) -> Outcome:
        """The best candidate within the memory limit."""
        limit = self.model.run.limits.device_memory_bytes
        families = self._families(limit_bytes=None)
        solution, proof = solve(families)
        fastest = self._candidate(solution, self.modes)
        if fastest is None or fastest.fits(limit):
            return Outcome(fastest, None, proof, self.space_size)
        solution, limited = solve(self._families(limit))
        proof = replace(
            limited, evaluated=proof.evaluated + limited.evaluated, pruned=proof.pruned + limited.pruned
        )
        return Outcome(self._candidate(solution, self.modes), fastest, proof, self.space_size)

    def second(self, best: Candidate) -> Candidate | None:
        """The best fitting candidate with other exits per stage, None if there is none."""
        limit = self.model.run.limits.device_memory_bytes
        families = self._families(limit)
        solution, _ = solve([without_counts(family, best.counts) for family in families])
        return self._candidate(solution, self.modes)

    def with_layout(self, layout: Layout) -> Candidate | None:
        """The best fitting candidate with this layer split, None if none fits."""
        limit = self.model.run.limits.device_memory_bytes
        families = [with_split(family, layout.layers_per_stage) for family in self._families(limit)]
        return self._candidate(solve(families)[0], self.modes)

    def smallest(self) -> Candidate:
        """The candidate with the least largest peak, whatever its time."""
        found = [
            self._candidate(solve([without_times(family)])[0], [mode])
            for family, mode in zip(self._families(None), self.modes, strict=True)
        ]
        return min((one for one in found if one), key=lambda candidate: max(candidate.peak_bytes))

    def _families(self, limit_bytes: int | None) -> list[Family]:
        limits = self.model.run.limits.model_copy(update={"device_memory_bytes": limit_bytes})
        model = replace(self.model, run=self.model.run.model_copy(update={"limits": limits}))
        families = [self._family(model, mode) for mode in self.modes]
        if self.split_is_free:
            return families
        return [with_split(family, model.layout.layers_per_stage) for family in families]

    def _candidate(self, solution: Solution | None, modes: Sequence[ExitForward]) -> Candidate | None:
        if solution is None:
            return None
        mode = modes[solution.family]
        model = replace(self.model, layout=Layout(solution.split))
        heads = self._heads(solution.counts)
        stages = tuple(stage_costs(model, stage, on_stage, mode) for stage, on_stage in enumerate(heads))
        return judge(model, [(mode, stages)])[0]


def counted_search(
    model: CostModel, num_exits: int, head: Head, modes: Sequence[ExitForward], split_is_free: bool
) -> Search:
    """Search for ``num_exits`` equal exits, at most the number of layers minus 1."""
    return Search(
        model,
        modes,
        split_is_free,
        lambda limited, mode: counted_family(limited, num_exits, head, mode, "asynchronous"),
        lambda counts: [(head,) * count for count in counts],
        model.layout.num_placements(num_exits),
    )


def placed_search(
    model: CostModel,
    heads: Sequence[Head],
    layers: Sequence[int],
    modes: Sequence[ExitForward],
    split_is_free: bool,
) -> Search:
    """Search with exits at given places.

    Args:
        heads: of the exits, by depth.
        layers: that the exits name.
    """

    def on_stages(counts: Sequence[int]) -> list[tuple[Head, ...]]:
        ends = np.cumsum(counts)
        return [tuple(heads[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    return Search(
        model,
        modes,
        split_is_free,
        lambda limited, mode: placed_family(limited, heads, layers, mode, "asynchronous"),
        on_stages,
        1,
    )


def best_slots(candidate: Candidate) -> tuple[Slot, ...]:
    """Where the exits of a candidate read: the depths with the least expected overshoot."""
    found = least_overshoot(candidate.counts, candidate.layout)
    assert found is not None, f"{candidate.layout} cannot hold {candidate.counts} exits"
    return found[1]


def judge(
    model: CostModel, composed: Sequence[tuple[ExitForward, tuple[StageCosts, ...]]]
) -> list[Candidate]:
    """Predict iteration time and peaks of candidates with the model's layout under 1F1B."""
    if not composed:
        return []
    messages = message_ns(pipeline_costs(model, composed[0][1]))
    forward = np.array([[stage.forward_ns for stage in stages] for _, stages in composed], dtype=np.int64)
    backward = np.array([[stage.backward_ns for stage in stages] for _, stages in composed], dtype=np.int64)
    ends = ends_ns(forward, backward, model.run.num_microbatches, messages).tolist()
    return [_judged(model, *one, one_ends) for one, one_ends in zip(composed, ends, strict=True)]


def _judged(
    model: CostModel, mode: ExitForward, stages: tuple[StageCosts, ...], ends_ns: list[int]
) -> Candidate:
    base = model.profile.process_base_bytes
    return Candidate(
        exit_forward=mode,
        layout=model.layout,
        stages=stages,
        pipeline_ns=max(ends_ns),
        grad_sync_ns=grad_sync_ns(ends_ns, stages, shared_matrix_sync_ns(model, stages)),
        # Clipping needs the norm over all stages, so the slowest stage's step ends the iteration.
        optimizer_ns=max(stage.optimizer_ns for stage in stages),
        overhead_ns=to_ns(model.profile.iteration_overhead_s),
        peak_bytes=tuple(peak + base for peak in iteration_peak_bytes(model, stages)),
    )
