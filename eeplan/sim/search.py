"""Where k exits go, and how the layers are split: exact search, with its proof.

Time and peaks depend on exits and layers only through what they add to each stage, so all placements with the
same layers and (equal) exits per stage cost the same. Branch and bound settles these numbers (``solve``); the
exits then go to the depths where tokens compute the fewest layers in vain. Covered: exits of one kind at any
place or exits at given places, a given or a free layer split, exit forwards all deferred or all eager, and
several cost models at once: one for each combination of what else the run leaves open (``combinations``).
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
from eeplan.sim.engine import Transport, message_ns
from eeplan.sim.family import Family, counted_family, placed_family
from eeplan.sim.fast import ends_ns
from eeplan.sim.layout import Layout, Slot, least_overshoot
from eeplan.sim.memory import iteration_peak_bytes
from eeplan.sim.parameters import Head
from eeplan.sim.solve import (
    NODE_BUDGET,
    TIE_BUDGET,
    Proof,
    Solution,
    solve,
    with_split,
    without_counts,
    without_times,
)
from eeplan.spec import ExitForward


@dataclass(frozen=True, slots=True)
class Candidate:
    """Layers and exits per stage and where exit forwards run, judged over one iteration."""

    model: CostModel
    """What it was judged by; its layout is the candidate's."""
    exit_forward: ExitForward
    stages: tuple[StageCosts, ...]
    pipeline_ns: int
    grad_sync_ns: int
    optimizer_ns: int
    overhead_ns: int
    peak_bytes: tuple[int, ...]
    """Of each stage's process, base included."""

    @property
    def layout(self) -> Layout:
        """Layers of each stage."""
        return self.model.layout

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
class Budgets:
    """Counts of stages tried, so that equal inputs give equal plans."""

    nodes: int = NODE_BUDGET
    ties: int = TIE_BUDGET


BUDGETS = Budgets()


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

    Best is, in this order: least iteration time, deferred before eager, the earlier cost model, least largest
    peak of any stage, least expected overshoot (:func:`eeplan.sim.layout.squared_gaps`).

    Args:
        models: runs and op costs, which differ in what the run file leaves open; their layouts are the split
            unless that is free.
        modes: where exit forwards may run.
        family: candidates of one model and mode.
        heads: on each stage, from a model and the number of exits on each stage.
        placements: sets of exits with a model's layout, for the size of the space.
        budgets: stages tried in each family, and when choosing among equals.
    """

    def __init__(
        self,
        models: Sequence[CostModel],
        modes: Sequence[ExitForward],
        family: Callable[[CostModel, ExitForward], Family],
        heads: Callable[[CostModel, Sequence[int]], Sequence[tuple[Head, ...]]],
        placements: Callable[[CostModel], int],
        budgets: Budgets = BUDGETS,
    ) -> None:
        self.models, self.modes, self.budgets = tuple(models), tuple(modes), budgets
        self._family, self._heads, self._placements = family, heads, placements
        self._variants = [(mode, model) for mode in self.modes for model in self.models]

    @property
    def limit_bytes(self) -> int | None:
        """Of each device; the same for all models."""
        return self.models[0].run.limits.device_memory_bytes

    @property
    def space_size(self) -> int:
        """Models x splits x placements x modes."""
        return len(self.modes) * sum(num_splits(model) * self._placements(model) for model in self.models)

    def best(self) -> Outcome:
        """The best candidate within the memory limit."""
        solution, proof = self._solve(self._families(None))
        fastest = self._candidate(solution)
        if fastest is None or fastest.fits(self.limit_bytes):
            return Outcome(fastest, None, proof, self.space_size)
        solution, limited = self._solve(self._families(self.limit_bytes))
        proof = replace(
            limited, evaluated=proof.evaluated + limited.evaluated, pruned=proof.pruned + limited.pruned
        )
        return Outcome(self._candidate(solution), fastest, proof, self.space_size)

    def of(self, models: Sequence[CostModel], budgets: Budgets) -> Search:
        """The same question to some of the models only."""
        return Search(models, self.modes, self._family, self._heads, self._placements, budgets)

    def second(self, best: Candidate) -> Candidate | None:
        """The best fitting candidate of the same model with other exits per stage, None if there is none."""
        alike = self._like(best)
        families = alike._families(self.limit_bytes)
        solution, _ = self._solve([without_counts(family, best.counts) for family in families])
        return alike._candidate(solution)

    def with_layout(self, best: Candidate, layout: Layout) -> Candidate | None:
        """The best fitting candidate of the same model with this layer split, None if none fits."""
        alike = self._like(best)
        families = alike._families(self.limit_bytes)
        solution, _ = self._solve([with_split(family, layout.layers_per_stage) for family in families])
        return alike._candidate(solution)

    def smallest(self) -> Candidate:
        """The candidate with the least largest peak, whatever its time."""
        found = []
        for mode, model in self._variants:
            search = Search([model], [mode], self._family, self._heads, self._placements, self.budgets)
            # All are equally fast then, so that choosing among equals does the work.
            solution, _ = solve([without_times(family) for family in search._families(None)])
            found.append(search._candidate(solution))
        return min((one for one in found if one), key=lambda candidate: max(candidate.peak_bytes))

    def _like(self, candidate: Candidate) -> Search:
        return self.of([model for model in self.models if model.run == candidate.model.run], self.budgets)

    def _solve(self, families: Sequence[Family]) -> tuple[Solution | None, Proof]:
        return solve(families, self.budgets.nodes, self.budgets.ties)

    def _families(self, limit_bytes: int | None) -> list[Family]:
        found = []
        for mode, model in self._variants:
            limits = model.run.limits.model_copy(update={"device_memory_bytes": limit_bytes})
            limited = replace(model, run=model.run.model_copy(update={"limits": limits}))
            family = self._family(limited, mode)
            found.append(
                family if split_is_free(model) else with_split(family, model.layout.layers_per_stage)
            )
        return found

    def _candidate(self, solution: Solution | None) -> Candidate | None:
        if solution is None:
            return None
        mode, model = self._variants[solution.family]
        model = replace(model, layout=Layout(solution.split))
        heads = self._heads(model, solution.counts)
        stages = tuple(stage_costs(model, stage, on_stage, mode) for stage, on_stage in enumerate(heads))
        return judge(model, [(mode, stages)])[0]


def split_is_free(model: CostModel) -> bool:
    """Whether the planner chooses the layers of each stage."""
    return model.run.parallel.layer_split == "auto"


def num_splits(model: CostModel) -> int:
    """Layer splits that the planner may choose from."""
    layout = model.layout
    return comb(layout.num_layers - 1, layout.num_stages - 1) if split_is_free(model) else 1


def counted_search(
    models: Sequence[CostModel],
    num_exits: int,
    head: Callable[[CostModel], Head],
    modes: Sequence[ExitForward],
    budgets: Budgets = BUDGETS,
) -> Search:
    """Search for ``num_exits`` equal exits, at most the number of layers minus 1."""
    return Search(
        models,
        modes,
        lambda model, mode: counted_family(model, num_exits, head(model), mode, transport_of(model)),
        lambda model, counts: [(head(model),) * count for count in counts],
        lambda model: model.layout.num_placements(num_exits),
        budgets,
    )


def placed_search(
    models: Sequence[CostModel],
    heads: Callable[[CostModel], Sequence[Head]],
    layers: Sequence[int],
    modes: Sequence[ExitForward],
    budgets: Budgets = BUDGETS,
) -> Search:
    """Search with exits at given places.

    Args:
        heads: of the exits of a model, by depth.
        layers: that the exits name.
    """

    def on_stages(model: CostModel, counts: Sequence[int]) -> list[tuple[Head, ...]]:
        ends, those = np.cumsum(counts), heads(model)
        return [tuple(those[end - count : end]) for end, count in zip(ends, counts, strict=True)]

    return Search(
        models,
        modes,
        lambda model, mode: placed_family(model, heads(model), layers, mode, transport_of(model)),
        on_stages,
        lambda model: 1,
        budgets,
    )


def transport_of(model: CostModel) -> Transport:
    """How the run's stages send messages."""
    return model.run.parallel.p2p_communication


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
    ends = ends_ns(forward, backward, model.run.num_microbatches, messages, transport_of(model)).tolist()
    return [_judged(model, *one, one_ends) for one, one_ends in zip(composed, ends, strict=True)]


def _judged(
    model: CostModel, mode: ExitForward, stages: tuple[StageCosts, ...], ends_ns: list[int]
) -> Candidate:
    base = model.profile.process_base_bytes
    return Candidate(
        model=model,
        exit_forward=mode,
        stages=stages,
        pipeline_ns=max(ends_ns),
        grad_sync_ns=grad_sync_ns(ends_ns, stages, shared_matrix_sync_ns(model, stages)),
        # Clipping needs the norm over all stages, so the slowest stage's step ends the iteration.
        optimizer_ns=max(stage.optimizer_ns for stage in stages),
        overhead_ns=to_ns(model.profile.iteration_overhead_s),
        peak_bytes=tuple(peak + base for peak in iteration_peak_bytes(model, stages)),
    )
