from __future__ import annotations

import re
import time
from typing import Any

import pytest
from builders import make_plan, make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import PlanInfeasible, ProfileError
from eeplan.plan import Plan
from eeplan.profile import OpProfile
from eeplan.sim.costs import pipeline_costs_of, to_ns
from eeplan.sim.engine import simulate
from eeplan.sim.schedule import one_f_one_b
from eeplan.spec import RunSpec

GIB = 2**30


def decision(plan: Plan, subject: str) -> Any:
    return next(one for one in plan.decisions if one.subject == subject)


def largest_process_bytes(plan: Plan) -> int:
    return max(stage.memory.peak_bytes + stage.memory.process_base_bytes for stage in plan.stages)


def free_messages(run: RunSpec, **knobs: Any) -> OpProfile:
    return make_profile(run, p2p_latency_s=0.0, p2p_bandwidth_bytes_per_s=1e18, **knobs)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 4]),
    st.integers(1, 9),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([1, 2]),
)
def test_the_prediction_hangs_together(
    stages: int, microbatches: int, exits: int, untied: bool, data_ranks: int
) -> None:
    run = make_run(
        parallel__pipeline_model_parallel_size=stages,
        parallel__data_parallel_size=data_ranks,
        training__global_batch_size=2 * microbatches * data_ranks,
        exits__count=exits,
        model__untie_embeddings_and_output_weights=untied,
    )
    plan = make_plan(run, free_messages(run, jitter=0.4, seed=microbatches))
    prediction = plan.prediction
    timeline = simulate(one_f_one_b(stages, microbatches), pipeline_costs_of(plan))
    assert to_ns(prediction.pipeline_s) == timeline.pipeline_ns
    parts = prediction.grad_sync_s, prediction.optimizer_s, prediction.overhead_s
    assert prediction.iteration_time_s == pytest.approx(prediction.pipeline_s + sum(parts))
    assert prediction.pipeline_s <= prediction.upper_bound_s
    if microbatches >= stages:
        assert prediction.closed_form_s == prediction.pipeline_s
    else:
        assert prediction.closed_form_s is None
    busy_s = sum(stage.forward_s + stage.backward_s for stage in plan.stages) * microbatches
    assert prediction.bubble_fraction == pytest.approx(1 - busy_s / (stages * prediction.pipeline_s))
    tokens = run.training.global_batch_size * run.training.seq_length
    assert prediction.tokens_per_s == pytest.approx(tokens / prediction.iteration_time_s)
    bare = make_plan(
        make_run(**{**_layout_of(run), "exits__count": 0}), free_messages(run, jitter=0.4, seed=microbatches)
    )
    assert prediction.baseline_iteration_time_s == bare.prediction.iteration_time_s
    assert prediction.time_overhead == pytest.approx(
        prediction.iteration_time_s / prediction.baseline_iteration_time_s - 1
    )
    assert [depth for stage in plan.stages for depth in stage.exit_depths] == [e.depth for e in plan.exits]
    assert sum(stage.exit_s for stage in plan.stages) > 0 or not exits


def _layout_of(run: RunSpec) -> dict[str, Any]:
    return {
        "parallel": run.parallel.model_dump(),
        "training__global_batch_size": run.training.global_batch_size,
        "model__untie_embeddings_and_output_weights": run.model.untie_embeddings_and_output_weights,
    }


def test_messages_lengthen_the_pipeline_beyond_the_closed_form() -> None:
    run = make_run(parallel__pipeline_model_parallel_size=4)
    plan = make_plan(run, make_profile(run, p2p_latency_s=1e-3))
    assert plan.prediction.closed_form_s is not None
    # The first microbatch crosses three links there and back.
    assert plan.prediction.pipeline_s >= plan.prediction.closed_form_s + 6e-3


def test_a_run_without_exits_is_its_own_baseline() -> None:
    plan = make_plan(make_run())
    assert plan.exits == ()
    assert plan.prediction.time_overhead == 0.0
    assert decision(plan, "exits.count").reason == "the run file asks for no exits"
    assert plan.exit_forward == "deferred"
    assert plan.certificate.optimal


def test_equal_inputs_give_equal_plans() -> None:
    run = make_run(exits__count="auto", parallel__pipeline_model_parallel_size=4)
    assert make_plan(run, make_profile(run, jitter=0.5)) == make_plan(run, make_profile(run, jitter=0.5))


def test_a_count_is_placed_with_reasons_and_the_best_rejected_alternative() -> None:
    run = make_run(exits__count=2, parallel__pipeline_model_parallel_size=4)
    plan = make_plan(run, free_messages(run))
    placement = decision(plan, "exits.placement")
    for planned in plan.exits:
        assert f"{planned.boundary} layer {planned.layer} (stage {planned.stage})" in placement.choice
    assert placement.reason.startswith("fastest iteration: ")
    assert "fewest layers in vain: 1.38 for a token" in placement.reason
    assert f"{100 * plan.prediction.time_overhead:+.2f} % over no exits" in placement.reason
    assert re.search(
        r"exits per stage [\d, ]+ \(\w+\): .* ms \(\+.* % over no exits\), peak", placement.rejected
    )
    assert plan.certificate.optimal
    assert plan.certificate.ties_settled
    assert plan.certificate.lower_bound_s == pytest.approx(plan.prediction.iteration_time_s)
    assert plan.certificate.gap == 0.0
    assert plan.certificate.evaluated + plan.certificate.pruned < plan.certificate.space_size == 2 * 4 * 21
    forward = decision(plan, "exits.exit_forward")
    assert forward.choice == plan.exit_forward == "deferred"
    assert forward.rejected.startswith("eager: ")


def test_weights_follow_the_policy_and_are_explained() -> None:
    run = make_run(exits={"count": 2, "loss_weights": {"policy": "uniform", "scale": 0.3}})
    plan = make_plan(run)
    assert [planned.target_weight for planned in plan.exits] == [0.3, 0.3]
    assert [planned.effective_weight for planned in plan.exits] == [0.3, 0.3]
    assert decision(plan, "exits.loss_weights").choice == "uniform"


def test_exits_by_hand_stay_where_they_are() -> None:
    layers = [
        {"layer": 6, "head": "mlp", "tied": False},
        {"layer": 2, "boundary": "before", "weight": 0.7},
    ]
    plan = make_plan(make_run(exits={"layers": layers, "head": "minimal"}))
    first, second = plan.exits
    assert (first.depth, first.layer, first.boundary, first.stage) == (1, 2, "before", 0)
    assert (first.head, first.tied, first.target_weight) == ("minimal", True, 0.7)
    assert (second.depth, second.layer, second.boundary, second.stage) == (6, 6, "after", 1)
    assert (second.head, second.tied, second.target_weight) == ("mlp", False, 0.75)
    assert decision(plan, "exits.placement").reason.startswith("set in the run file")
    assert "1 set by hand" in decision(plan, "exits.loss_weights").reason


def test_an_exit_at_the_end_of_a_stage_gets_the_advice_to_move() -> None:
    """EE-LLM 3.2, Optimization 2. On a middle stage of three, where the next one is not the last."""
    end = [{"layer": 4}]
    overrides: dict[str, Any] = {
        "model__num_layers": 12,
        "parallel__pipeline_model_parallel_size": 3,
        "training__global_batch_size": 32,
    }
    run = make_run(**overrides, exits={"layers": end, "untie_exit_output_weights": True})
    reason = decision(make_plan(run, free_messages(run)), "exits.placement").reason
    assert "would cost less if read 'before' the next layer" in reason
    start = make_run(
        **overrides, exits={"layers": [{"layer": 5, "boundary": "before"}], "untie_exit_output_weights": True}
    )
    moved = make_plan(start, free_messages(start))
    assert "would cost less" not in decision(moved, "exits.placement").reason
    assert moved.exits[0].stage == 1


@pytest.mark.parametrize("mode", ["deferred", "eager"])
def test_a_fixed_exit_forward_is_kept(mode: str) -> None:
    plan = make_plan(make_run(exits__count=1, exits__exit_forward=mode))
    assert plan.exit_forward == mode
    assert decision(plan, "exits.exit_forward").reason.startswith("set in the run file")
    assert decision(plan, "exits.exit_forward").rejected == ""


def test_eager_is_chosen_only_where_it_is_strictly_faster() -> None:
    """Two exits on one stage that is the bottleneck: eager moves their forwards out of the drain."""
    layers = [{"layer": 3}, {"layer": 4}]
    overrides: dict[str, Any] = {"parallel__pipeline_model_parallel_size": 4, "exits__layers": layers}
    run = make_run(**overrides)
    seconds = {"exit_norm": (2.5e-4, 5e-4), "layer": (5e-4, 1e-3), "final_head": (2.5e-4, 5e-4)}
    # Logits so large that the exits' stage has the largest peak.
    profile = free_messages(run, op_seconds=seconds, op_bytes={"exit_norm": (4 * 2**20, 0, 0)})
    eager = make_plan(run, profile)
    assert eager.exit_forward == "eager"
    assert "strictly faster than deferred by" in decision(eager, "exits.exit_forward").reason
    peak = largest_process_bytes(eager)
    deferred = make_plan(make_run(**overrides, exits__exit_forward="deferred"), profile)
    assert deferred.prediction.iteration_time_s > eager.prediction.iteration_time_s
    assert largest_process_bytes(deferred) < peak
    tight = make_plan(make_run(**overrides, limits__device_memory_bytes=peak - 1), profile)
    assert tight.exit_forward == "deferred"
    assert "eager would be faster by" in decision(tight, "exits.exit_forward").reason


def test_auto_takes_all_exits_that_are_allowed() -> None:
    run = make_run(exits__count="auto", exits__max_count=3, limits__max_time_overhead=0.9)
    plan = make_plan(run)
    assert len(plan.exits) == 3
    assert "the most allowed is 3" in decision(plan, "exits.count").reason
    assert decision(plan, "exits.count").rejected == ""


def test_auto_stops_where_one_more_would_cost_too_much() -> None:
    run = make_run(
        exits__count="auto", parallel__pipeline_model_parallel_size=4, training__global_batch_size=128
    )
    head = (2.5e-4, 5e-4)
    seconds = {"embedding": (0.0, 0.0), "layer": (5e-4, 1e-3), "exit_norm": head, "final_head": head}
    plan = make_plan(run, free_messages(run, op_seconds=seconds))
    # Three stages have room for one exit each; a fourth exit moves the bottleneck by 19 %.
    assert [len(stage.exit_depths) for stage in plan.stages] == [1, 1, 1, 0]
    count = decision(plan, "exits.count")
    assert "the most for which that holds" in count.reason
    assert re.search(
        r"4 exits: \+1\d\.\d\d % iteration time, over limits.max_time_overhead 5 %", count.rejected
    )
    allowed = make_plan(
        make_run(exits__count=4, parallel__pipeline_model_parallel_size=4, training__global_batch_size=128),
        free_messages(run, op_seconds=seconds),
    )
    assert allowed.prediction.time_overhead > 0.05


def test_auto_may_answer_that_no_exit_pays() -> None:
    run = make_run(exits__count="auto")
    plan = make_plan(run, make_profile(run, op_seconds={"exit_norm": (1.0, 2.0)}))
    assert plan.exits == ()
    assert plan.prediction.time_overhead == 0.0
    count = decision(plan, "exits.count")
    assert count.choice == "0"
    assert "not even one exit" in count.reason
    assert "1 exit: +" in count.rejected


def test_auto_gives_up_exits_that_do_not_fit_in_memory() -> None:
    run = make_run(exits__count="auto", exits__max_count=2, limits__max_time_overhead=9.0)
    profile = make_profile(run, op_bytes={"exit_norm": (GIB, 0, 0)})
    without = max(stage.memory.peak_bytes for stage in make_plan(make_run(), profile).stages)
    limits = {
        "device_memory_bytes": profile.process_base_bytes + without + GIB + 2**22,
        "max_time_overhead": 9.0,
    }
    plan = make_plan(run.model_copy(update={"limits": run.limits.model_copy(update=limits)}), profile)
    assert [len(stage.exit_depths) for stage in plan.stages] in ([1, 1], [0, 1], [1, 0])
    none = {"device_memory_bytes": profile.process_base_bytes + without + 2**20, "max_time_overhead": 9.0}
    plan = make_plan(run.model_copy(update={"limits": run.limits.model_copy(update=none)}), profile)
    assert plan.exits == ()
    assert "over limits.device_memory_bytes" in decision(plan, "exits.count").rejected


def test_auto_on_a_single_layer_has_no_room() -> None:
    run = make_run(exits__count="auto", model__num_layers=1, parallel__pipeline_model_parallel_size=1)
    plan = make_plan(run)
    assert decision(plan, "exits.count").reason == "a single layer has no room for exits"


def test_what_does_not_fit_is_refused_with_limit_stage_numbers_and_remedy() -> None:
    run = make_run(exits__count=2, limits__device_memory_bytes=104 * 2**20)
    with pytest.raises(PlanInfeasible) as refusal:
        make_plan(run)
    message = str(refusal.value)
    assert "\n" not in message
    assert f"limits.device_memory_bytes is 104.00 MiB ({104 * 2**20} bytes)" in message
    numbers = re.search(
        r"stage 0 of 2 needs 105\.\d\d MiB \((\d+) bytes\) with 2 exits, .* \((\d+) bytes\)", message
    )
    assert numbers is not None
    assert int(numbers[1]) - int(numbers[2]) == 104 * 2**20
    assert "optimizer state" in message
    assert "activations of 2 microbatches" in message
    # Half the microbatch needs costs that this profile lacks; half the exits do not suffice.
    assert refusal.value.details[0].startswith("single changes that make it feasible")
    enough = make_run(exits__count=2, limits__device_memory_bytes=int(numbers[1]))
    assert len(make_plan(enough).exits) == 2
    with pytest.raises(PlanInfeasible, match="1 bytes"):
        make_plan(make_run(exits__count=2, limits__device_memory_bytes=int(numbers[1]) - 1))


def test_a_refusal_says_when_fewer_exits_would_fit() -> None:
    profile = make_profile(make_run(), op_bytes={"exit_norm": (GIB, 0, 0)})
    for exits, sentence in (
        ({"count": 1}, "exits.count 0 instead of 1"),
        ({"layers": [{"layer": 2}]}, "no exit after layer 2"),
    ):
        run = make_run(exits=exits, limits__device_memory_bytes=GIB)
        with pytest.raises(PlanInfeasible) as refusal:
            make_plan(run, profile)
        assert any(f"  {sentence}: " in line for line in refusal.value.details)
    with pytest.raises(PlanInfeasible, match="with no exits"):
        make_plan(make_run(limits__device_memory_bytes=2**20), profile)


def test_a_faster_placement_that_does_not_fit_is_named() -> None:
    """The last stage has the fewest microbatches in flight, and is the slowest place for an exit."""
    overrides: dict[str, Any] = {
        "parallel__pipeline_model_parallel_size": 4,
        "training__global_batch_size": 128,
        "exits__untie_exit_output_weights": True,
    }
    head = (2.5e-4, 5e-4)
    seconds = {"layer": (5e-4, 1e-3), "exit_norm": head, "final_head": head}
    last = make_run(**overrides, exits__layers=[{"layer": 7}])
    profile = free_messages(last, op_seconds=seconds, op_bytes={"exit_norm": (8 * 2**20, 0, 0)})
    limit = largest_process_bytes(make_plan(last, profile))
    plan = make_plan(make_run(**overrides, exits__count=1, limits__device_memory_bytes=limit), profile)
    assert [len(stage.exit_depths) for stage in plan.stages] == [0, 0, 0, 1]
    placement = decision(plan, "exits.placement")
    assert re.search(
        r"faster, but stage [012] needs .* MiB, over limits.device_memory_bytes", placement.rejected
    )


def test_a_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ProfileError, match="seq_length"):
        make_plan(make_run(), make_profile(make_run(training__seq_length=64)))
    with pytest.raises(ProfileError, match="micro_batch_size"):
        make_plan(make_run(), make_profile(make_run(training__micro_batch_size=4)))


def test_ops_that_were_not_measured_are_listed() -> None:
    run = make_run(exits__count=1)
    assert make_plan(run, make_profile(run, extrapolated=("exit_norm", "exit_mlp"))).extrapolated_ops == (
        "exit_norm",
    )


def test_sixty_layers_on_four_stages_are_planned_within_a_second() -> None:
    run = make_run(
        model__num_layers=60,
        parallel__pipeline_model_parallel_size=4,
        training__global_batch_size=128,
        exits={"count": "auto", "max_count": 6},
        limits__max_time_overhead=0.01,
    )
    profile = make_profile(run, jitter=0.2)
    start = time.process_time()
    make_plan(run, profile)
    assert time.process_time() - start < 1.0


def test_a_given_layer_split_is_kept_and_need_not_be_even() -> None:
    run = make_run(exits__count=2, parallel={"pipeline_model_parallel_size": 3, "layer_split": [3, 4, 1]})
    plan = make_plan(run)
    assert [(stage.first_layer, stage.last_layer) for stage in plan.stages] == [(1, 3), (4, 7), (8, 8)]
    split = decision(plan, "layers per stage")
    assert (split.choice, split.reason) == ("3, 4, 1", "set in the run file")


FREE: dict[str, Any] = {"pipeline_model_parallel_size": 3, "layer_split": "auto"}


def test_a_free_layer_split_is_chosen_with_the_exits_and_explained() -> None:
    run = make_run(exits__count=2, parallel=FREE)
    plan = make_plan(run, free_messages(run, op_seconds={"final_head": (3e-4, 6e-4)}))
    layers = [stage.last_layer - stage.first_layer + 1 for stage in plan.stages]
    assert sum(layers) == 8
    split = decision(plan, "layers per stage")
    assert split.choice == ", ".join(map(str, layers))
    assert split.reason == "the fastest split together with the exits"
    assert re.search(r"3, 3, 2, as even as possible: .* ms \(\+.* %\), peak", split.rejected)
    even = make_plan(
        make_run(exits__count=2, parallel=FREE | {"layer_split": [3, 3, 2]}),
        free_messages(run, op_seconds={"final_head": (3e-4, 6e-4)}),
    )
    assert plan.prediction.iteration_time_s < even.prediction.iteration_time_s
    assert plan.certificate.optimal
    assert plan.certificate.space_size == 21 * 84 * 2


def test_the_baseline_of_a_free_split_has_the_best_split_of_its_own() -> None:
    run = make_run(exits__count=3, parallel=FREE)
    profile = make_profile(run, jitter=0.5)
    bare = make_plan(make_run(exits__count=0, parallel=FREE), profile)
    plan = make_plan(run, profile)
    assert plan.prediction.baseline_iteration_time_s == bare.prediction.iteration_time_s
    assert plan.prediction.time_overhead >= 0


def test_exits_by_hand_follow_their_layers_under_a_free_split() -> None:
    layers = [{"layer": 3}, {"layer": 5, "boundary": "before"}]
    run = make_run(exits={"layers": layers}, parallel=FREE)
    plan = make_plan(run, free_messages(run, op_seconds={"exit_norm": (4e-4, 8e-4)}))
    for planned in plan.exits:
        stage = plan.stages[planned.stage]
        assert stage.first_layer <= planned.layer <= stage.last_layer
    assert [planned.depth for planned in plan.exits] == [3, 4]
    # Two long exits get stages of their own, with fewer layers.
    assert len({planned.stage for planned in plan.exits}) == 2


def test_a_free_split_that_is_even_says_so() -> None:
    run = make_run(parallel={"pipeline_model_parallel_size": 2, "layer_split": "auto"})
    plan = make_plan(run, free_messages(run, op_seconds={"embedding": (0, 0), "final_head": (0, 0)}))
    split = decision(plan, "layers per stage")
    assert (split.choice, split.rejected) == ("4, 4", "")
    assert "as even as possible" in split.reason
