"""Which exits and layers a run gets: as given, a number of exits to place, or as many as the limits allow.

Search answers "where do k exits go"; this module asks it the right questions and keeps what was rejected, so
that every choice can be explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eeplan.errors import PlanInfeasible
from eeplan.plan import Certificate, Decision
from eeplan.sim import explain
from eeplan.sim.costs import CostModel, StageCosts, stage_costs
from eeplan.sim.layout import Layout, Slot, nearly_even_layout
from eeplan.sim.parameters import Head
from eeplan.sim.search import (
    BUDGETS,
    Budgets,
    Candidate,
    Outcome,
    Search,
    best_slots,
    counted_search,
    judge,
    placed_search,
    split_is_free,
)
from eeplan.spec import EXIT_FORWARDS, ExitForward, ExitRequest, ExitsSpec, HeadKind


@dataclass(frozen=True, slots=True)
class PlacedExit:
    """One exit at its place, before it gets a loss weight."""

    slot: Slot
    head: Head
    weight: float | None
    """Set by hand, or None."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen exits and layers with their predicted costs, and why."""

    exits: tuple[PlacedExit, ...]
    candidate: Candidate
    baseline: Candidate
    """The same run without exits; with a free layer split at its own best one."""
    decisions: tuple[Decision, ...]
    certificate: Certificate
    search: Search | None = None
    """Where it was found; None where training time was not searched for."""


def wanted_kinds(exits: ExitsSpec) -> set[HeadKind]:
    """Head kinds whose costs the run needs."""
    if exits.layers:
        return {request.head or exits.head_kind for request in exits.layers}
    return {exits.head_kind} if exits.count else set()


def choose(models: Sequence[CostModel], budgets: Budgets = BUDGETS) -> Choice:
    """Decide the exits of a run, its layer split if that is free, and which of the models to take.

    Args:
        models: one for each combination of what else the run leaves open; their runs differ in that only.
        budgets: of each search.

    Raises:
        PlanInfeasible: what the run asks for does not fit ``limits.device_memory_bytes``.
    """
    exits = models[0].run.exits
    bare = _counted(models, 0, budgets)
    without = bare.best()
    baseline = without.best or bare.smallest()
    if exits.layers:
        return _by_hand(models, baseline, budgets)
    if exits.count == "auto":
        return _automatic(models, baseline, bare, without, budgets)
    if not exits.count:
        require_fit(baseline)
        return _without_exits(bare, baseline, [without], explain.no_exits_wanted())
    search = _counted(models, exits.count, budgets)
    outcome = search.best()
    require_fit(outcome.best or search.smallest())
    return _placed(baseline, search, [outcome], explain.count_given(exits.count))


def _by_hand(models: Sequence[CostModel], baseline: Candidate, budgets: Budgets) -> Choice:
    spec = models[0].run.exits
    wanted = sorted(spec.layers, key=lambda request: request.depth)

    def heads(model: CostModel) -> list[Head]:
        return [head_of(model.run.exits, request) for request in wanted]

    layers = [request.layer for request in wanted]
    search = placed_search(models, heads, layers, modes_of(spec), budgets)
    outcome = search.best()
    best = outcome.best or search.smallest()
    require_fit(best)
    exits = tuple(
        PlacedExit(
            Slot(request.depth, best.layout.stage_of(request), request.layer, request.boundary),
            head,
            request.weight,
        )
        for request, head in zip(wanted, heads(best.model), strict=True)
    )
    later = _read_later(exits, best.layout)
    improved = None
    if later != exits:
        improved = judge(*_with_exits(best.model, later, [best.exit_forward]))[0]
    return Choice(
        exits=exits,
        candidate=best,
        baseline=baseline,
        decisions=(
            explain.count_by_hand(len(exits)),
            explain.placement_by_hand([e.slot for e in exits], best, baseline, improved),
            explain.exit_forward(best, _other_mode(exits, best)),
            _split_decision(search, best),
        ),
        certificate=_certificate([outcome], best),
        search=search,
    )


def _automatic(
    models: Sequence[CostModel], baseline: Candidate, bare: Search, without: Outcome, budgets: Budgets
) -> Choice:
    """The largest number of exits within the limits; counts down, since limits need not bind in order."""
    require_fit(baseline)
    run = models[0].run
    outcomes: list[Outcome] = []
    above: Candidate | None = None
    for count in range(min(run.exits.max_count, run.model.num_layers - 1), 0, -1):
        search = _counted(models, count, budgets)
        outcome = search.best()
        outcomes.append(outcome)
        if outcome.best and explain.overhead(outcome.best, baseline) <= run.limits.max_time_overhead:
            why = explain.count_automatic(run, count, outcome.best, above, baseline)
            return _placed(baseline, search, outcomes, why)
        above = outcome.best or search.smallest()
    why = explain.count_automatic(run, 0, None, above, baseline)
    return _without_exits(bare, baseline, [*outcomes, without], why)


def _placed(baseline: Candidate, search: Search, outcomes: Sequence[Outcome], why: Decision) -> Choice:
    """A choice of the last of ``outcomes``, which is that of ``search``."""
    outcome = outcomes[-1]
    best = outcome.best
    assert best is not None, "only a feasible search can be turned into a plan"
    slots, head = best_slots(best), head_of(best.model.run.exits)
    exits = tuple(PlacedExit(slot, head, None) for slot in slots)
    return Choice(
        exits=exits,
        candidate=best,
        baseline=baseline,
        decisions=(
            why,
            explain.placement(outcome, best, slots, search.second(best), baseline),
            explain.exit_forward(best, _other_mode(exits, best)),
            _split_decision(search, best),
        ),
        certificate=_certificate(outcomes, best),
        search=search,
    )


def _without_exits(search: Search, baseline: Candidate, outcomes: Sequence[Outcome], why: Decision) -> Choice:
    return Choice(
        exits=(),
        candidate=baseline,
        baseline=baseline,
        decisions=(why, _split_decision(search, baseline)),
        certificate=_certificate(outcomes, baseline),
        search=search,
    )


def _split_decision(search: Search, best: Candidate) -> Decision:
    if not split_is_free(best.model):
        return explain.layer_split(best.model.run, best.layout)
    even = nearly_even_layout(best.layout.num_layers, best.layout.num_stages)
    return explain.free_layer_split(best, None if even == best.layout else search.with_layout(best, even))


def _certificate(outcomes: Sequence[Outcome], best: Candidate) -> Certificate:
    """Of a choice among the answers of several searches; the last one's is ``best``."""
    lower_ns = min(best.iteration_ns, outcomes[-1].proof.lower_bound_ns + best.overhead_ns)
    return Certificate(
        optimal=all(outcome.proof.optimal for outcome in outcomes),
        ties_settled=all(outcome.proof.settled for outcome in outcomes),
        lower_bound_s=lower_ns / 1e9,
        gap=1.0 - lower_ns / best.iteration_ns,
        evaluated=sum(outcome.proof.evaluated for outcome in outcomes),
        pruned=sum(outcome.proof.pruned for outcome in outcomes),
        space_size=sum(outcome.space_size for outcome in outcomes),
    )


def require_fit(candidate: Candidate) -> None:
    """Refuse a candidate that is too large.

    Raises:
        PlanInfeasible: with the stage and the numbers.
    """
    if not candidate.fits(candidate.model.run.limits.device_memory_bytes):
        raise PlanInfeasible(explain.infeasible(candidate))


def _counted(models: Sequence[CostModel], count: int, budgets: Budgets) -> Search:
    modes = modes_of(models[0].run.exits)
    # Without exits there is nothing to run in either mode.
    modes = modes if count else modes[:1]
    return counted_search(models, count, lambda model: head_of(model.run.exits), modes, budgets)


def _read_later(exits: tuple[PlacedExit, ...], layout: Layout) -> tuple[PlacedExit, ...]:
    """The same model with every exit at the end of a stage read at the start of the next (Optimization 2)."""
    moved = []
    for placed in exits:
        slot = placed.slot
        if slot.depth == layout.last_layer(slot.stage):
            slot = Slot(slot.depth, slot.stage + 1, slot.layer + 1, "before")
        moved.append(PlacedExit(slot, placed.head, placed.weight))
    return tuple(moved)


def _with_exits(
    model: CostModel, exits: Sequence[PlacedExit], modes: Sequence[ExitForward]
) -> tuple[CostModel, list[tuple[ExitForward, tuple[StageCosts, ...]]]]:
    """Arguments of ``judge`` for exits at their places, run in each of the modes."""
    stages = range(model.layout.num_stages)
    heads = [tuple(placed.head for placed in exits if placed.slot.stage == stage) for stage in stages]
    return model, [
        (mode, tuple(stage_costs(model, stage, heads[stage], mode) for stage in stages)) for mode in modes
    ]


def _other_mode(exits: Sequence[PlacedExit], best: Candidate) -> Candidate | None:
    """The chosen exits with the other ``exit_forward``; None when the user fixed it."""
    others = [mode for mode in modes_of(best.model.run.exits) if mode != best.exit_forward]
    return judge(*_with_exits(best.model, exits, others))[0] if others else None


def modes_of(exits: ExitsSpec) -> tuple[ExitForward, ...]:
    """Where exit forwards may run."""
    if exits.distillation is not None:
        # The final exit must have spoken.
        return ("deferred",)
    return EXIT_FORWARDS if exits.exit_forward == "auto" else (exits.exit_forward,)


def head_of(spec: ExitsSpec, request: ExitRequest | None = None) -> Head:
    """Of an exit without wishes of its own, or with those of a request."""
    tied = None if request is None else request.tied
    kind = None if request is None else request.head
    return Head(kind or spec.head_kind, not spec.untie_exit_output_weights if tied is None else tied)
