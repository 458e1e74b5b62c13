"""From a run and a profile to a plan: decide, predict, and write down why."""

from __future__ import annotations

from collections.abc import Sequence

from eeplan import __version__
from eeplan.errors import PlanInfeasible
from eeplan.plan import Decision, Plan, PlannedExit, Prediction, StagePlan
from eeplan.profile import OpProfile
from eeplan.sim import explain
from eeplan.sim.bounds import bubble_fill_capacity, closed_form_ns, upper_bound_ns
from eeplan.sim.choice import PlacedExit
from eeplan.sim.combinations import combinations, explain_combinations
from eeplan.sim.costs import CostModel, shared_matrix_sync_ns
from eeplan.sim.decode_plan import plan_decode
from eeplan.sim.engine import message_ns, simulate
from eeplan.sim.estimator import corrections
from eeplan.sim.fill import Fill, filled
from eeplan.sim.fill_choice import FillChoice, backbone_ns, choose_fill
from eeplan.sim.insight import Insight, insight, spare_bytes
from eeplan.sim.loss_weights import explain_weights, target_weights
from eeplan.sim.memory import memory_breakdown
from eeplan.sim.remedies import decide, with_remedies
from eeplan.sim.search import Candidate
from eeplan.spec import RunSpec
from eeplan.timeline import Timeline
from eeplan.usage import ExitShares, ExitUsage, Usage, exit_shares


def make_plan(
    run: RunSpec,
    run_sha256: str,
    profile: OpProfile,
    profile_sha256: str,
    usage: ExitUsage | None = None,
    usage_sha256: str | None = None,
) -> Plan:
    """Plan a run.

    Args:
        run: what the user wants.
        run_sha256: of the run file.
        profile: op costs measured for the run's shape, micro_batch_size and tensor parallel size.
        profile_sha256: of the profile file.
        usage: how often tokens leave early; None takes ``run.decode.prior``, marked as an assumption.
        usage_sha256: of the usage file.

    Returns:
        The plan, without ``content_sha256``, which writing adds.

    Raises:
        ProfileError: the profile is of another model, or lacks an op that the run needs.
        SpecError: loss weights from usage, and no token leaves early.
        PlanInfeasible: nothing that the run asks for fits its limits.
    """
    used = usage.content if usage else run.decode.prior
    try:
        return _planned(run, run_sha256, profile, profile_sha256, used, usage_sha256)
    except PlanInfeasible as error:
        raise with_remedies(error, run, profile, used) from None


def _planned(
    run: RunSpec,
    run_sha256: str,
    profile: OpProfile,
    profile_sha256: str,
    used: Usage,
    usage_sha256: str | None,
) -> Plan:
    open_combinations = combinations(run, profile)
    choice = decide(open_combinations, used)
    model = choice.candidate.model
    run = model.run
    depths = [placed.slot.depth for placed in choice.exits]
    shares = exit_shares(used, run.decode.threshold, depths, run.model.num_layers)
    decode, decode_mode = plan_decode(run, profile, model.layout, choice.exits, shares)
    filled_choice = choose_fill(model, choice)
    exits = _planned_exits(run, choice.exits, filled_choice.fill, shares)
    timeline = _simulated(model, filled_choice)
    explained = insight(
        model, filled_choice.candidate, filled_choice.costs, filled_choice.fill, exits, timeline
    )
    return Plan(
        schema_version=1,
        eeplan_version=__version__,
        run_sha256=run_sha256,
        profile_sha256=profile_sha256,
        usage_sha256=usage_sha256,
        run=run,
        exits=exits,
        loss_weight_schedule=run.exits.loss_weights.warmup,
        exit_forward=choice.candidate.exit_forward,
        fill=filled_choice.plan,
        schedule="1f1b",
        num_microbatches=run.num_microbatches,
        stages=_stage_plans(model, filled_choice, exits, explained),
        prediction=_prediction(model, filled_choice, choice.baseline, timeline),
        critical_path=explained.critical_path,
        decode=decode,
        decisions=(
            *explain_combinations(open_combinations, choice),
            *choice.decisions,
            *filled_choice.decisions,
            *_other_decisions(model, choice.exits, shares),
            decode_mode,
        ),
        certificate=choice.certificate,
        extrapolated_ops=model.extrapolated_ops,
        interpolated_ops=model.interpolated_ops,
    )


def _planned_exits(
    run: RunSpec, exits: Sequence[PlacedExit], fill: Fill, shares: ExitShares
) -> tuple[PlannedExit, ...]:
    factors = corrections(fill, run.parallel.pipeline_model_parallel_size).loss_factors
    weights = target_weights(
        run.exits.loss_weights,
        [placed.slot.depth for placed in exits],
        run.model.num_layers,
        [placed.weight for placed in exits],
        shares,
    )
    return tuple(
        PlannedExit(
            layer=placed.slot.layer,
            boundary=placed.slot.boundary,
            depth=placed.slot.depth,
            stage=placed.slot.stage,
            head=placed.head.kind,
            tied=placed.head.tied,
            target_weight=weight,
            effective_weight=weight * factors[placed.slot.stage],
        )
        for placed, weight in zip(exits, weights, strict=True)
    )


def _simulated(model: CostModel, chosen: FillChoice) -> Timeline:
    """The planned iteration by the engine, which has the last word."""
    timeline = simulate(filled(model.layout.num_stages, chosen.fill), chosen.costs)
    assert timeline.pipeline_ns == chosen.candidate.pipeline_ns, (
        f"the engine's makespan {timeline.pipeline_ns} differs from the recurrence's "
        f"{chosen.candidate.pipeline_ns}"
    )
    return timeline


def _stage_plans(
    model: CostModel, chosen: FillChoice, exits: Sequence[PlannedExit], explained: Insight
) -> tuple[StagePlan, ...]:
    candidate, filled_costs = chosen.candidate, (chosen.costs, chosen.fill)
    shared_ns = shared_matrix_sync_ns(model, candidate.stages)
    messages = (*message_ns(chosen.costs), 0)
    spare = spare_bytes(candidate.peak_bytes, model.run.limits.device_memory_bytes)
    return tuple(
        StagePlan(
            first_layer=model.layout.first_layer(index),
            last_layer=model.layout.last_layer(index),
            exit_depths=tuple(placed.depth for placed in exits if placed.stage == index),
            forward_s=stage.forward_ns / 1e9,
            backward_s=stage.backward_ns / 1e9,
            exit_s=stage.exit_ns / 1e9,
            output_bytes=stage.output_bytes,
            message_s=messages[index] / 1e9,
            kept_bytes=stage.kept_bytes,
            forward_transient_bytes=stage.forward_transient_bytes,
            backward_transient_bytes=stage.backward_transient_bytes,
            optimizer_s=stage.optimizer_ns / 1e9,
            grad_sync_s=(stage.data_sync_ns + shared_ns * stage.holds_shared_matrix) / 1e9,
            busy_s=told.busy_s,
            idle=told.idle,
            time_headroom=told.time_headroom,
            critical=told.critical,
            memory=memory_breakdown(model, candidate.stages, index, filled_costs),
            spare_bytes=spare[index],
        )
        for index, (stage, told) in enumerate(zip(candidate.stages, explained.stages, strict=True))
    )


def _prediction(model: CostModel, chosen: FillChoice, baseline: Candidate, timeline: Timeline) -> Prediction:
    run, candidate, costs = model.run, chosen.candidate, chosen.costs
    num_stages, num_microbatches = model.layout.num_stages, run.num_microbatches
    busy_ns = sum(timeline.busy_ns(stage) for stage in range(num_stages))
    closed_form = (
        closed_form_ns(costs.forward_ns, costs.backward_ns, num_microbatches)
        if num_microbatches >= num_stages and chosen.fill.is_plain
        else None
    )
    iteration_s = candidate.iteration_ns / 1e9
    return Prediction(
        iteration_time_s=iteration_s,
        pipeline_s=candidate.pipeline_ns / 1e9,
        grad_sync_s=candidate.grad_sync_ns / 1e9,
        optimizer_s=candidate.optimizer_ns / 1e9,
        overhead_s=candidate.overhead_ns / 1e9,
        baseline_iteration_time_s=baseline.iteration_ns / 1e9,
        time_overhead=explain.overhead(candidate, baseline),
        upper_bound_s=_upper_bound_ns(model, candidate, chosen.fill.num_full) / 1e9,
        closed_form_s=None if closed_form is None else closed_form / 1e9,
        bubble_fraction=1.0 - busy_ns / (num_stages * timeline.pipeline_ns),
        bubble_fill_capacity=bubble_fill_capacity(num_stages, *backbone_ns(model)),
        tokens_per_s=run.training.global_batch_size * run.training.seq_length / iteration_s,
    )


def _upper_bound_ns(model: CostModel, candidate: Candidate, num_microbatches: int) -> int:
    embedding, final = model.ops["embedding"], model.ops["final_head"]
    return upper_bound_ns(
        sum(backbone_ns(model)),
        [stage.exit_ns for stage in candidate.stages],
        num_microbatches,
        embedding_ns=embedding.forward_ns + embedding.backward_ns,
        final_ns=final.forward_ns + final.backward_ns,
    )


def _other_decisions(
    model: CostModel, exits: Sequence[PlacedExit], shares: ExitShares
) -> tuple[Decision, ...]:
    if not exits:
        return ()
    spec = model.run.exits.loss_weights
    by_hand = sum(placed.weight is not None for placed in exits)
    reason = explain_weights(spec, by_hand, shares)
    return (Decision(subject="exits.loss_weights", choice=spec.policy, reason=reason),)
