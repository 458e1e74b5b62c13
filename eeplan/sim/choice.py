"""Which exits a run gets: placed by hand, a number to place, or as many as the limits allow.

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
from eeplan.sim.layout import Layout, Slot
from eeplan.sim.parameters import Head
from eeplan.sim.search import Candidate, Outcome, judge, search
from eeplan.spec import EXIT_FORWARDS, ExitForward, ExitsSpec, HeadKind


@dataclass(frozen=True, slots=True)
class PlacedExit:
    """One exit at its place, before it gets a loss weight."""

    slot: Slot
    head: Head
    weight: float | None
    """Set by hand, or None."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen exits with their predicted costs, and why."""

    exits: tuple[PlacedExit, ...]
    candidate: Candidate
    baseline: Candidate
    """The same run without exits."""
    decisions: tuple[Decision, ...]
    certificate: Certificate


def wanted_kinds(exits: ExitsSpec) -> set[HeadKind]:
    """Head kinds whose costs the run needs."""
    if exits.layers:
        return {request.head or exits.head for request in exits.layers}
    return {exits.head} if exits.count else set()


def choose(model: CostModel) -> Choice:
    """Decide the exits of ``model.run``.

    Raises:
        PlanInfeasible: what the run asks for does not fit ``limits.device_memory_bytes``.
    """
    exits = model.run.exits
    baseline = search(model, 0, Head(exits.head, tied=True), _modes(exits)[:1]).smallest
    if exits.layers:
        return _by_hand(model, baseline)
    if exits.count == "auto":
        return _automatic(model, baseline)
    return _counted(model, baseline, exits.count or 0)


def _by_hand(model: CostModel, baseline: Candidate) -> Choice:
    exits = _requested(model)
    candidates = sorted(judge(model, _with_exits(model, exits, _modes(model.run.exits))), key=_rank)
    fitting = [c for c in candidates if c.fits(model.run.limits.device_memory_bytes)]
    if not fitting:
        smallest = min(candidates, key=lambda candidate: max(candidate.peak_bytes))
        raise PlanInfeasible(explain.infeasible(model, smallest, baseline))
    best = fitting[0]
    later = _read_later(exits, model.layout)
    improved = judge(model, _with_exits(model, later, (best.exit_forward,)))[0] if later != exits else None
    return Choice(
        exits=exits,
        candidate=best,
        baseline=baseline,
        decisions=(
            explain.count_by_hand(len(exits)),
            explain.placement_by_hand([e.slot for e in exits], best, baseline, improved),
            explain.exit_forward(model, best, _other_mode(model, exits, best)),
        ),
        certificate=Certificate(optimal=True, evaluated=len(candidates), space_size=len(candidates)),
    )


def _counted(model: CostModel, baseline: Candidate, count: int) -> Choice:
    if count == 0:
        _require_fit(model, baseline, baseline)
        return _without_exits(baseline, explain.no_exits_wanted())
    outcome = search(model, count, _head(model), _modes(model.run.exits))
    _require_fit(model, outcome.best or outcome.smallest, baseline)
    return _placed(model, baseline, outcome, explain.count_given(count), [outcome])


def _automatic(model: CostModel, baseline: Candidate) -> Choice:
    """The largest number of exits within the limits; counts down, since limits need not bind in order."""
    _require_fit(model, baseline, baseline)
    run = model.run
    most = min(run.exits.max_count, run.model.num_layers - 1)
    outcomes: list[Outcome] = []
    for count in range(most, 0, -1):
        outcome = search(model, count, _head(model), _modes(run.exits))
        outcomes.append(outcome)
        if outcome.best and explain.overhead(outcome.best, baseline) <= run.limits.max_time_overhead:
            above = outcomes[-2] if count < most else None
            why = explain.count_automatic(model, count, outcome, above, baseline)
            return _placed(model, baseline, outcome, why, outcomes)
    why = explain.count_automatic(model, 0, None, outcomes[-1] if outcomes else None, baseline)
    choice = _without_exits(baseline, why)
    return Choice(
        choice.exits, baseline, baseline, choice.decisions, _certificate(outcomes, choice.certificate)
    )


def _placed(
    model: CostModel, baseline: Candidate, outcome: Outcome, why: Decision, outcomes: Sequence[Outcome]
) -> Choice:
    assert outcome.best is not None, "only a feasible search can be turned into a plan"
    exits = tuple(PlacedExit(slot, _head(model), None) for slot in outcome.slots)
    return Choice(
        exits=exits,
        candidate=outcome.best,
        baseline=baseline,
        decisions=(
            why,
            explain.placement(model, outcome, baseline),
            explain.exit_forward(model, outcome.best, _other_mode(model, exits, outcome.best)),
        ),
        certificate=_certificate(outcomes, Certificate(optimal=True, evaluated=0, space_size=0)),
    )


def _without_exits(baseline: Candidate, why: Decision) -> Choice:
    one = Certificate(optimal=True, evaluated=1, space_size=1)
    return Choice(exits=(), candidate=baseline, baseline=baseline, decisions=(why,), certificate=one)


def _certificate(outcomes: Sequence[Outcome], start: Certificate) -> Certificate:
    """Every vector of counts was judged, so every placement is settled."""
    return Certificate(
        optimal=True,
        evaluated=start.evaluated + sum(outcome.evaluated for outcome in outcomes),
        space_size=start.space_size + sum(outcome.space_size for outcome in outcomes),
    )


def _require_fit(model: CostModel, candidate: Candidate, baseline: Candidate) -> None:
    if not candidate.fits(model.run.limits.device_memory_bytes):
        raise PlanInfeasible(explain.infeasible(model, candidate, baseline))


def _requested(model: CostModel) -> tuple[PlacedExit, ...]:
    spec = model.run.exits
    placed = []
    for request in sorted(spec.layers, key=lambda request: request.depth):
        slot = Slot(request.depth, model.layout.stage_of(request), request.layer, request.boundary)
        tied = not spec.untie_exit_output_weights if request.tied is None else request.tied
        placed.append(PlacedExit(slot, Head(request.head or spec.head, tied), request.weight))
    return tuple(placed)


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
) -> list[tuple[ExitForward, tuple[StageCosts, ...]]]:
    stages = range(model.layout.num_stages)
    heads = [tuple(placed.head for placed in exits if placed.slot.stage == stage) for stage in stages]
    return [
        (mode, tuple(stage_costs(model, stage, heads[stage], mode) for stage in stages)) for mode in modes
    ]


def _other_mode(model: CostModel, exits: Sequence[PlacedExit], best: Candidate) -> Candidate | None:
    """The chosen exits with the other ``exit_forward``; None when the user fixed it."""
    others = [mode for mode in _modes(model.run.exits) if mode != best.exit_forward]
    return judge(model, _with_exits(model, exits, others))[0] if others else None


def _modes(exits: ExitsSpec) -> tuple[ExitForward, ...]:
    return EXIT_FORWARDS if exits.exit_forward == "auto" else (exits.exit_forward,)


def _head(model: CostModel) -> Head:
    return Head(model.run.exits.head, tied=not model.run.exits.untie_exit_output_weights)


def _rank(candidate: Candidate) -> tuple[int, bool, int]:
    return candidate.rank
