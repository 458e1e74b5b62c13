"""Which exits and layers a run gets: as given, a number of exits to place, or as many as the limits allow.

Search answers "where do k exits go"; this module asks it the right questions and keeps what was rejected, so
that every choice can be explained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eeplan.errors import PlanInfeasible
from eeplan.plan import Certificate, Decision
from eeplan.sim import explain
from eeplan.sim.costs import CostModel, StageCosts, stage_costs
from eeplan.sim.layout import Layout, Slot, nearly_even_layout
from eeplan.sim.parameters import Head
from eeplan.sim.search import (
    Candidate,
    Outcome,
    Search,
    best_slots,
    counted_search,
    judge,
    placed_search,
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


def wanted_kinds(exits: ExitsSpec) -> set[HeadKind]:
    """Head kinds whose costs the run needs."""
    if exits.layers:
        return {request.head or exits.head for request in exits.layers}
    return {exits.head} if exits.count else set()


def choose(model: CostModel) -> Choice:
    """Decide the exits of ``model.run``, and its layer split if that is free.

    Raises:
        PlanInfeasible: what the run asks for does not fit ``limits.device_memory_bytes``.
    """
    exits = model.run.exits
    bare = _counted(model, 0)
    without = bare.best()
    baseline = without.best or bare.smallest()
    if exits.layers:
        return _by_hand(model, baseline)
    if exits.count == "auto":
        return _automatic(model, baseline, without)
    if not exits.count:
        _require_fit(model, baseline, baseline)
        return _without_exits(model, baseline, [without], explain.no_exits_wanted())
    search = _counted(model, exits.count)
    outcome = search.best()
    _require_fit(model, outcome.best or search.smallest(), baseline)
    return _placed(model, baseline, search, [outcome], explain.count_given(exits.count))


def split_is_free(model: CostModel) -> bool:
    """Whether the planner chooses the layers of each stage."""
    return model.run.parallel.layer_split == "auto"


def _by_hand(model: CostModel, baseline: Candidate) -> Choice:
    wanted = sorted(model.run.exits.layers, key=lambda request: request.depth)
    heads = [_head(model.run.exits, request) for request in wanted]
    layers, modes = [request.layer for request in wanted], _modes(model.run.exits)
    search = placed_search(model, heads, layers, modes, split_is_free(model))
    outcome = search.best()
    best = outcome.best or search.smallest()
    _require_fit(model, best, baseline)
    exits = tuple(
        PlacedExit(
            Slot(request.depth, best.layout.stage_of(request), request.layer, request.boundary),
            head,
            request.weight,
        )
        for request, head in zip(wanted, heads, strict=True)
    )
    later = _read_later(exits, best.layout)
    improved = None
    if later != exits:
        improved = judge(*_with_exits(model, best.layout, later, [best.exit_forward]))[0]
    return Choice(
        exits=exits,
        candidate=best,
        baseline=baseline,
        decisions=(
            explain.count_by_hand(len(exits)),
            explain.placement_by_hand([e.slot for e in exits], best, baseline, improved),
            explain.exit_forward(model, best, _other_mode(model, exits, best)),
            _split_decision(model, search, best),
        ),
        certificate=_certificate([outcome], best),
    )


def _automatic(model: CostModel, baseline: Candidate, without: Outcome) -> Choice:
    """The largest number of exits within the limits; counts down, since limits need not bind in order."""
    _require_fit(model, baseline, baseline)
    run = model.run
    outcomes: list[Outcome] = []
    above: Candidate | None = None
    for count in range(min(run.exits.max_count, run.model.num_layers - 1), 0, -1):
        search = _counted(model, count)
        outcome = search.best()
        outcomes.append(outcome)
        if outcome.best and explain.overhead(outcome.best, baseline) <= run.limits.max_time_overhead:
            why = explain.count_automatic(model, count, outcome.best, above, baseline)
            return _placed(model, baseline, search, outcomes, why)
        above = outcome.best or search.smallest()
    why = explain.count_automatic(model, 0, None, above, baseline)
    return _without_exits(model, baseline, [*outcomes, without], why)


def _placed(
    model: CostModel, baseline: Candidate, search: Search, outcomes: Sequence[Outcome], why: Decision
) -> Choice:
    """A choice of the last of ``outcomes``, which is that of ``search``."""
    outcome, head = outcomes[-1], _head(model.run.exits)
    best = outcome.best
    assert best is not None, "only a feasible search can be turned into a plan"
    slots = best_slots(best)
    exits = tuple(PlacedExit(slot, head, None) for slot in slots)
    return Choice(
        exits=exits,
        candidate=best,
        baseline=baseline,
        decisions=(
            why,
            explain.placement(model, outcome, best, slots, search.second(best), baseline),
            explain.exit_forward(model, best, _other_mode(model, exits, best)),
            _split_decision(model, search, best),
        ),
        certificate=_certificate(outcomes, best),
    )


def _without_exits(
    model: CostModel, baseline: Candidate, outcomes: Sequence[Outcome], why: Decision
) -> Choice:
    return Choice(
        exits=(),
        candidate=baseline,
        baseline=baseline,
        decisions=(why, _split_decision(model, _counted(model, 0), baseline)),
        certificate=_certificate(outcomes, baseline),
    )


def _split_decision(model: CostModel, search: Search, best: Candidate) -> Decision:
    if not split_is_free(model):
        return explain.layer_split(model.run, best.layout)
    even = nearly_even_layout(best.layout.num_layers, best.layout.num_stages)
    return explain.free_layer_split(model, best, None if even == best.layout else search.with_layout(even))


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


def _require_fit(model: CostModel, candidate: Candidate, baseline: Candidate) -> None:
    if not candidate.fits(model.run.limits.device_memory_bytes):
        raise PlanInfeasible(explain.infeasible(model, candidate, baseline))


def _counted(model: CostModel, count: int) -> Search:
    head, modes = _head(model.run.exits), _modes(model.run.exits)
    # Without exits there is nothing to run in either mode.
    return counted_search(model, count, head, modes if count else modes[:1], split_is_free(model))


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
    model: CostModel, layout: Layout, exits: Sequence[PlacedExit], modes: Sequence[ExitForward]
) -> tuple[CostModel, list[tuple[ExitForward, tuple[StageCosts, ...]]]]:
    """Arguments of ``judge`` for exits at their places, run in each of the modes."""
    model, stages = replace(model, layout=layout), range(layout.num_stages)
    heads = [tuple(placed.head for placed in exits if placed.slot.stage == stage) for stage in stages]
    return model, [
        (mode, tuple(stage_costs(model, stage, heads[stage], mode) for stage in stages)) for mode in modes
    ]


def _other_mode(model: CostModel, exits: Sequence[PlacedExit], best: Candidate) -> Candidate | None:
    """The chosen exits with the other ``exit_forward``; None when the user fixed it."""
    others = [mode for mode in _modes(model.run.exits) if mode != best.exit_forward]
    return judge(*_with_exits(model, best.layout, exits, others))[0] if others else None


def _modes(exits: ExitsSpec) -> tuple[ExitForward, ...]:
    return EXIT_FORWARDS if exits.exit_forward == "auto" else (exits.exit_forward,)


def _head(spec: ExitsSpec, request: ExitRequest | None = None) -> Head:
    """Of an exit without wishes of its own, or with those of a request."""
    tied = None if request is None else request.tied
    kind = None if request is None else request.head
    return Head(kind or spec.head, not spec.untie_exit_output_weights if tied is None else tied)
