"""Costs of recomputed and sequence-parallel ops: measured where they were, derived and marked elsewhere."""

from __future__ import annotations

import pytest
from builders import make_plan, make_profile, make_run

from eeplan.errors import ProfileError
from eeplan.profile import OpCost, OpProfile
from eeplan.profile_variants import op_cost
from eeplan.sim.costs import pipeline_costs_of
from eeplan.sim.engine import simulate
from eeplan.sim.fill import schedule_of


def with_op(profile: OpProfile, cost: OpCost) -> OpProfile:
    return profile.model_copy(update={"ops": (*profile.ops, cost)})


def test_full_recompute_keeps_a_layers_input_alone() -> None:
    for precision, width in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        run = make_run(training__recompute_granularity="full", training__precision=precision)
        profile = make_profile(run)
        plain, again = profile.cost("layer", 2), op_cost(profile, run, "layer")
        assert again.kept_bytes == width * 32 * 2 * 64
        assert again.forward == plain.forward
        assert again.backward.mean_s == plain.backward.mean_s + plain.forward.mean_s
        # All that the forward keeps is alive once more while the backward runs.
        assert again.backward_transient_bytes == plain.kept_bytes + plain.backward_transient_bytes
        assert again.extrapolated
        for op in ("embedding", "exit_block", "final_head"):
            assert op_cost(profile, run, op) == profile.cost(op, 2)  # type: ignore[arg-type]


def test_selective_recompute_saves_what_attention_alone_keeps() -> None:
    run = make_run(training__recompute_granularity="selective")
    profile = make_profile(run)
    plain, again = profile.cost("layer", 2), op_cost(profile, run, "layer")
    assert plain.kept_bytes - again.kept_bytes == 4 * 4 * 32 * 2
    assert plain.backward.mean_s < again.backward.mean_s < plain.backward.mean_s + 0.2 * plain.forward.mean_s
    assert again.extrapolated


@pytest.mark.parametrize("granularity", ["full", "selective"])
def test_what_was_measured_goes_before_what_can_be_derived(granularity: str) -> None:
    run = make_run(training__recompute_granularity=granularity)
    profile = make_profile(run)
    measured = profile.cost("layer", 2).model_copy(
        update={"recompute_granularity": granularity, "kept_bytes": 77}
    )
    assert op_cost(with_op(profile, measured), run, "layer") == measured
    plan = make_plan(run, with_op(profile, measured))
    assert plan.extrapolated_ops == ()
    assert make_plan(run, profile).extrapolated_ops == ("layer",)


def test_sequence_parallel_ranks_keep_and_send_their_part() -> None:
    knobs = {"parallel__tensor_model_parallel_size": 2, "exits": {"count": 1}}
    whole, divided = make_run(**knobs), make_run(**knobs, parallel__sequence_parallel=True)
    profile, states = make_profile(whole), 4 * 32 * 2 * 64
    for op, tensors in (("layer", 4), ("embedding", 1), ("exit_norm", 1)):
        plain, found = profile.cost(op, 2, op_cost(profile, whole, op).way), op_cost(profile, divided, op)  # type: ignore[arg-type]
        assert plain.kept_bytes - found.kept_bytes == tensors * states // 2
        assert found.extrapolated
    one, other = make_plan(whole, profile), make_plan(divided, profile)
    assert [stage.output_bytes for stage in one.stages] == [states, 0]
    assert [stage.output_bytes for stage in other.stages] == [states // 2, 0]
    assert other.stages[0].message_s < one.stages[0].message_s
    assert other.stages[1].kept_bytes < one.stages[1].kept_bytes
    both = make_run(**knobs, parallel__sequence_parallel=True, training__recompute_granularity="full")
    assert op_cost(profile, both, "layer").kept_bytes == states // 2


def test_sequence_parallel_costs_stand_for_no_others() -> None:
    knobs = {"parallel__tensor_model_parallel_size": 2}
    divided = make_run(**knobs, parallel__sequence_parallel=True)
    profile = make_profile(divided)
    ops = tuple(op.model_copy(update={"sequence_parallel": True}) for op in profile.ops)
    profile = profile.model_copy(update={"ops": ops})
    assert make_plan(divided, profile).extrapolated_ops == ()
    with pytest.raises(ProfileError, match=r"no 'embedding' .*tensor_model_parallel_size 2 \(it was not"):
        make_plan(make_run(**knobs), profile)


@pytest.mark.parametrize("granularity", [None, "full", "selective"])
@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_the_timelines_memory_is_the_plans_with_recompute_too(granularity: str | None, mode: str) -> None:
    run = make_run(
        parallel__pipeline_model_parallel_size=4,
        training__recompute_granularity=granularity,
        exits={"count": 3, "exit_forward": mode},
        fill={"policy": {"warmup": 1, "cooldown": 1}},
    )
    plan = make_plan(run, make_profile(run, jitter=0.4))
    timeline = simulate(schedule_of(plan), pipeline_costs_of(plan))
    for index, stage in enumerate(plan.stages):
        parts = stage.memory
        assert parts.peak_bytes == parts.state_bytes + parts.activation_bytes + parts.transient_bytes
        if parts.peak_during != "optimizer":
            assert timeline.peak_bytes(index) == parts.peak_bytes
    if granularity == "full":
        without = make_plan(make_run(parallel__pipeline_model_parallel_size=4), make_profile(run, jitter=0.4))
        assert plan.stages[0].kept_bytes < without.stages[0].kept_bytes
