"""Decides the fill of a plan and completes the plan with it: counts, corrections, prediction, reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eeplan.errors import PlanInfeasible
from eeplan.plan import Decision, FillPlan
from eeplan.sim.bounds import bubble_fill_capacity
from eeplan.sim.choice import Choice, PlacedExit
from eeplan.sim.costs import (
    CostModel,
    PipelineCosts,
    grad_sync_ns,
    pipeline_costs,
    shared_matrix_sync_ns,
    stage_costs,
    to_ns,
)
from eeplan.sim.estimator import corrections
from eeplan.sim.explain import format_bytes, format_ns, format_percent
from eeplan.sim.fill import Fill
from eeplan.sim.fill_costs import partial_costs, with_partial_costs
from eeplan.sim.fill_search import FillCell, FillOutcome, FillProblem, fixed_fill, search_fill
from eeplan.sim.fixed_split import count_vectors
from eeplan.sim.layout import can_hold
from eeplan.sim.memory import optimizer_peak_bytes
from eeplan.sim.search import Candidate, best_slots, judge
from eeplan.spec import FillCounts, FillSpec

SUBJECT = "fill"
RIVALS = 16
"""Other places of the exits whose fills are looked at."""


@dataclass(frozen=True, slots=True)
class FillChoice:
    """The microbatches of a plan, and what follows from them."""

    fill: Fill
    plan: FillPlan | None
    """None when no bubble is filled."""
    costs: PipelineCosts
    """Those of partial microbatches included where there are any."""
    candidate: Candidate
    """The chosen candidate with the time and peaks of the filled schedule."""
    decisions: tuple[Decision, ...]


def choose_fill(model: CostModel, choice: Choice) -> FillChoice:
    """Fill the bubbles of ``choice`` as the run file asks.

    Raises:
        PlanInfeasible: counts by hand that do not fit ``limits.device_memory_bytes``.
    """
    spec, costs = model.run.fill, pipeline_costs(model, choice.candidate.stages)
    plain = FillChoice(Fill(model.run.num_microbatches), None, costs, choice.candidate, ())
    if spec.policy == "none":
        return plain
    problem = _problem(choice.exits, choice.candidate, costs)
    if isinstance(spec.policy, FillCounts):
        cell = fixed_fill(problem, spec.policy.warmup, spec.policy.cooldown)
        _require_fit(model, problem, cell)
        decision = _by_hand(problem, cell)
    else:
        outcome = search_fill(problem)
        assert outcome is not None, "the candidate was chosen because it fits without inserts"
        cell = outcome.best
        decision = _searched(model, problem, spec, outcome, _elsewhere(choice, cell))
    if cell.fill.is_plain:
        return replace(plain, decisions=(decision,))
    return FillChoice(
        fill=cell.fill,
        plan=_fill_plan(model, problem, cell),
        costs=problem.costs,
        candidate=_filled_candidate(model, choice.candidate, cell),
        decisions=(decision,),
    )


def backbone_ns(model: CostModel) -> tuple[int, int]:
    """Forward and backward of the layers of the largest stage, for one microbatch."""
    layers, layer = max(model.layout.layers_per_stage), model.ops["layer"]
    forward_ns = layers * layer.forward_ns + to_ns(model.profile.microbatch_overhead_s)
    return forward_ns, layers * layer.backward_ns


def _elsewhere(choice: Choice, cell: FillCell) -> str:
    """Which other places of as many exits, about as fast, would let more inserts in; empty if none.

    The fill is chosen for exits that were placed without a care for it. Other places on the same layers whose
    iteration is within ``fill.max_time_overhead`` of the chosen one's are tried, the fastest ``RIVALS``.
    """
    model, exits = choice.candidate.model, choice.exits
    if not exits or model.run.exits.layers:
        return ""
    head, layout, mode = exits[0].head, model.layout, choice.candidate.exit_forward
    vectors = count_vectors(len(exits), layout.num_stages).tolist() if len(exits) < 7 else []
    vectors = [v for v in vectors if tuple(v) != choice.candidate.counts and can_hold(v, layout)]
    known = {
        pair: stage_costs(model, pair[0], (head,) * pair[1], mode)
        for pair in {pair for counts in vectors for pair in enumerate(counts)}
    }
    candidates = judge(model, [(mode, tuple(known[pair] for pair in enumerate(v))) for v in vectors])
    limit_ns = choice.candidate.iteration_ns * (1.0 + model.run.fill.max_time_overhead)
    limit_bytes = model.run.limits.device_memory_bytes
    rivals = sorted(
        (one for one in candidates if one.iteration_ns <= limit_ns and one.fits(limit_bytes)),
        key=lambda one: one.rank,
    )
    best, where = cell, choice.candidate
    for one in rivals[:RIVALS]:
        placed = [PlacedExit(slot, head, None) for slot in best_slots(one)]
        outcome = search_fill(_problem(placed, one, pipeline_costs(model, one.stages)))
        if outcome is not None and outcome.best.stage_backwards > best.stage_backwards:
            best, where = outcome.best, one
    if where is choice.candidate:
        return ""
    slower = format_percent(where.iteration_ns / choice.candidate.iteration_ns - 1.0)
    return (
        f"exits per stage {', '.join(map(str, where.counts))} ({slower} iteration time) would let in "
        f"{best.stage_backwards} backwards of stages instead of {cell.stage_backwards}"
    )


def _problem(exits: Sequence[PlacedExit], candidate: Candidate, costs: PipelineCosts) -> FillProblem:
    model = candidate.model
    num_stages = model.layout.num_stages
    on_stage = [
        [(placed.slot.depth, placed.head) for placed in exits if placed.slot.stage == stage]
        for stage in range(num_stages)
    ]
    partial = [
        partial_costs(model, stage, exits, candidate.exit_forward) for stage, exits in enumerate(on_stage)
    ]
    shared_ns = shared_matrix_sync_ns(model, candidate.stages)
    fixed_ns = candidate.optimizer_ns + candidate.overhead_ns

    def iteration_ns(ends_ns: Sequence[int]) -> int:
        return max(ends_ns) + grad_sync_ns(ends_ns, candidate.stages, shared_ns) + fixed_ns

    return FillProblem(
        costs=with_partial_costs(costs, partial),
        num_microbatches=model.run.num_microbatches,
        mode=model.run.fill.mode,
        has_exit=tuple(map(bool, on_stage)),
        iteration_ns=iteration_ns,
        max_time_overhead=model.run.fill.max_time_overhead,
        floor_bytes=optimizer_peak_bytes(candidate.stages),
        base_bytes=model.profile.process_base_bytes,
        limit_bytes=model.run.limits.device_memory_bytes,
    )


def _require_fit(model: CostModel, problem: FillProblem, cell: FillCell) -> None:
    limit, peak = problem.limit_bytes, max(cell.peak_bytes)
    if limit is not None and peak > limit:
        stage = cell.peak_bytes.index(peak)
        raise PlanInfeasible(
            f"fill.policy puts {len(cell.fill.depths)} warm-up inserts into the pipeline, and stage {stage} "
            f"then needs {format_bytes(peak)} ({peak} bytes) of limits.device_memory_bytes "
            f"{format_bytes(limit)} ({limit} bytes); lower fill.policy.warmup, or take policy: auto"
        )


def _filled_candidate(model: CostModel, candidate: Candidate, cell: FillCell) -> Candidate:
    shared_ns = shared_matrix_sync_ns(model, candidate.stages)
    return replace(
        candidate,
        pipeline_ns=max(cell.ends_ns),
        grad_sync_ns=grad_sync_ns(cell.ends_ns, candidate.stages, shared_ns),
        peak_bytes=cell.peak_bytes,
    )


def _fill_plan(model: CostModel, problem: FillProblem, cell: FillCell) -> FillPlan:
    run, costs = model.run, problem.costs
    extra = cell.fill.num_microbatches - run.num_microbatches
    tokens = run.training.micro_batch_size * run.training.seq_length * run.parallel.data_parallel_size
    return FillPlan(
        mode=problem.mode,
        warm_up=cell.warm_up,
        cool_down=cell.cool_down,
        num_full=cell.fill.num_full,
        warm_up_depths=cell.fill.depths,
        truncated_reaches=cell.fill.reaches,
        gradient_scales=corrections(cell.fill, costs.num_stages).gradient_scales,
        extra_tokens_per_iteration=extra * tokens,
        turn_forward_s=tuple(ns / 1e9 for ns in costs.turn_forward_ns),
        turn_backward_s=tuple(ns / 1e9 for ns in costs.turn_backward_ns),
        turn_kept_bytes=costs.turn_kept_bytes,
        bare_forward_s=tuple(ns / 1e9 for ns in costs.bare_forward_ns),
    )


def _searched(
    model: CostModel, problem: FillProblem, spec: FillSpec, outcome: FillOutcome, elsewhere: str
) -> Decision:
    capacity = bubble_fill_capacity(model.layout.num_stages, *backbone_ns(model))
    limits = f"fill.max_time_overhead {100 * spec.max_time_overhead:g} %"
    limits += " and limits.device_memory_bytes" if problem.limit_bytes else ""
    found = "no insert stays within" if outcome.best.fill.is_plain else "the most inserts within"
    reason = (
        f"{found} {limits}, of all pairs of counts ({outcome.evaluated} fills simulated; the formula for "
        f"equal stages starts at {capacity} per region), for the exits and layers chosen before: "
        f"{_numbers(problem, outcome.best)}"
    )
    rejected = [
        f"one more in the {region}: {_misses(problem, cell)}"
        for region, cell in (("warm-up", outcome.more_warm_up), ("cool-down", outcome.more_cool_down))
        if cell is not None
    ]
    rejected += [elsewhere] if elsewhere else []
    return Decision(
        subject=SUBJECT, choice=_counts(problem, outcome.best), reason=reason, rejected="; ".join(rejected)
    )


def _by_hand(problem: FillProblem, cell: FillCell) -> Decision:
    dropped = cell.warm_up - len(cell.fill.depths)
    meets_none = (
        f"; {dropped} of {cell.warm_up} warm-up inserts meet no exit and are dropped" if dropped else ""
    )
    return Decision(
        subject=SUBJECT,
        choice=_counts(problem, cell),
        reason=f"set in the run file{meets_none}: {_numbers(problem, cell)}",
    )


def _counts(problem: FillProblem, cell: FillCell) -> str:
    if cell.fill.is_plain:
        return "none"
    depths, reaches = (
        ", ".join(map(str, lengths)) or "-" for lengths in (cell.fill.depths, cell.fill.reaches)
    )
    return f"{problem.mode}: warm-up {depths} and cool-down {reaches} stages deep"


def _numbers(problem: FillProblem, cell: FillCell) -> str:
    """What the fill gives and takes."""
    full = cell.fill.num_full
    against = f"{format_percent(cell.time_overhead)} against its {full} full microbatches alone"
    work = cell.stage_backwards / (full * problem.costs.num_stages)
    return (
        f"{format_ns(cell.iteration_ns)} ({against}), largest peak {format_bytes(max(cell.peak_bytes))}, "
        f"{cell.stage_backwards} backwards of stages on top of {full * problem.costs.num_stages} "
        f"({format_percent(work)})"
    )


def _misses(problem: FillProblem, cell: FillCell) -> str:
    """Which limit a cell breaks."""
    peak, limit = max(cell.peak_bytes), problem.limit_bytes
    if limit is not None and peak > limit:
        return (
            f"stage {cell.peak_bytes.index(peak)} needs {format_bytes(peak)}, over limits.device_memory_bytes"
        )
    return f"{format_percent(cell.time_overhead)} iteration time, over fill.max_time_overhead"
