"""Stages, microbatch size and head kind left open: the best of all runs that name them, and why."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_plan, make_profile, make_run
from decode_cases import with_decode_costs
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import EeplanError, PlanInfeasible, SpecError
from eeplan.plan import Decision, Plan
from eeplan.profile import OpProfile
from eeplan.sim.combinations import combinations
from eeplan.spec import RunSpec, replace_keys

STAGES = "parallel.pipeline_model_parallel_size"
RANKS = "parallel.data_parallel_size"
SIZE = "training.micro_batch_size"
CLOSED: dict[str, Any] = {"search.pipeline_model_parallel_size": [], "search.micro_batch_size": []}


def profile_of(run: RunSpec, sizes: list[int], **knobs: Any) -> OpProfile:
    """Costs at several microbatch sizes."""
    profiles = [make_profile(replace_keys(run, {SIZE: size}), seed=size, **knobs) for size in sizes]
    ops = tuple(op for profile in profiles for op in profile.ops)
    return profiles[0].model_copy(update={"ops": ops})


def open_run(**overrides: Any) -> RunSpec:
    return make_run(
        parallel={"pipeline_model_parallel_size": 2, "data_parallel_size": 2},
        search={"pipeline_model_parallel_size": [1, 2, 4], "micro_batch_size": [1, 2]},
        training__micro_batch_size=1,
        **overrides,
    )


def concrete_runs(run: RunSpec, heads: list[str]) -> list[RunSpec]:
    """Written out by hand: every combination, with as many processes."""
    return [
        replace_keys(run, {**CLOSED, STAGES: stages, RANKS: 4 // stages, SIZE: size, "exits.head": head})
        for stages in (1, 2, 4)
        for size in (1, 2)
        for head in heads
    ]


def decision(plan: Plan, subject: str) -> Decision:
    return next(one for one in plan.decisions if one.subject == subject)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2), st.sampled_from(["uniform", "auto"]), st.floats(0.0, 1.0))
def test_the_plan_is_the_best_of_all_combinations(exits: int, split: str, jitter: float) -> None:
    run = open_run(exits={"count": exits, "head": ["minimal", "mlp"]}, training__global_batch_size=32)
    run = replace_keys(run, {"parallel.layer_split": split})
    profile = profile_of(run, [1, 2], jitter=jitter, flops_per_s=5e9)
    plan = make_plan(run, profile)
    heads = ["minimal", "mlp"] if exits else ["minimal"]
    each = [make_plan(one, profile) for one in concrete_runs(run, heads)]
    fastest = min(each, key=lambda one: one.prediction.iteration_time_s)
    assert plan.prediction.iteration_time_s == fastest.prediction.iteration_time_s
    assert plan.prediction.baseline_iteration_time_s == min(
        one.prediction.baseline_iteration_time_s for one in each
    )
    assert plan.certificate.optimal
    assert plan.certificate.space_size == sum(one.certificate.space_size for one in each)
    # The plan's own run is closed, and gives the same plan again.
    assert plan.run in concrete_runs(run, heads)
    again = make_plan(plan.run, profile)
    assert again.prediction == plan.prediction.model_copy(
        update={
            "baseline_iteration_time_s": again.prediction.baseline_iteration_time_s,
            "time_overhead": again.prediction.time_overhead,
        }
    )


def test_the_decision_names_the_others_with_their_times_and_reasons() -> None:
    run = open_run(exits__count=1)
    run = replace_keys(
        run, {"search.pipeline_model_parallel_size": [1, 2, 3, 4], "search.micro_batch_size": [2, 8]}
    )
    plan = make_plan(run, profile_of(run, [2]))
    why = decision(plan, "pipeline_model_parallel_size, micro_batch_size")
    chosen = f"pipeline_model_parallel_size {len(plan.stages)}, micro_batch_size 2"
    assert why.choice == chosen
    assert why.reason.startswith("the fastest of 3 combinations: ")
    rejected = why.rejected.split("; ")
    assert (
        "pipeline_model_parallel_size 3, micro_batch_size 2 not judged: 4 processes do not divide into 3"
        in (why.rejected)
    )
    # The runner-up comes first, with its time.
    assert "%)" in rejected[0]
    assert len([part for part in rejected if "%)" in part]) == 2


def test_combinations_too_large_for_the_device_are_left_out() -> None:
    run = open_run(exits__count=1)
    profile = profile_of(run, [1, 2], flops_per_s=1e12)
    peaks = {}
    for one in concrete_runs(run, ["norm"]):
        plan = make_plan(one, profile)
        peaks[one.parallel.pipeline_model_parallel_size, one.training.micro_batch_size] = max(
            stage.memory.peak_bytes + stage.memory.process_base_bytes for stage in plan.stages
        )
    limit = min(peaks.values())
    plan = make_plan(replace_keys(run, {"limits.device_memory_bytes": limit}), profile)
    shape = len(plan.stages), plan.run.training.micro_batch_size
    assert peaks[shape] == limit
    why = decision(plan, "pipeline_model_parallel_size, micro_batch_size")
    assert why.rejected.count("over limits.device_memory_bytes") == len(
        {s for s in peaks if peaks[s] > limit}
    )
    with pytest.raises(PlanInfeasible):
        make_plan(replace_keys(run, {"limits.device_memory_bytes": limit // 2}), profile)


def test_auto_counts_against_the_fastest_combination_without_exits() -> None:
    run = open_run(exits={"count": "auto", "max_count": 3}, limits__max_time_overhead=0.1)
    profile = profile_of(run, [1, 2])
    plan = make_plan(run, profile)
    bare = make_plan(replace_keys(run, {"exits.count": 0}), profile)
    assert plan.prediction.baseline_iteration_time_s == bare.prediction.iteration_time_s
    assert plan.prediction.time_overhead <= 0.1


def test_an_open_head_is_marked_as_supposed_and_not_searched_without_exits() -> None:
    run = make_run(exits={"count": 1, "head": "auto"})
    plan = make_plan(run)
    assert plan.exits[0].head == plan.run.exits.head == "minimal"
    why = decision(plan, "head")
    assert "assumed, not measured: tokens leave as early with one kind" in why.reason
    assert all(f"head {kind}: " in why.rejected for kind in ("norm", "mlp", "block"))
    bare = make_plan(replace_keys(run, {"exits.count": 0}))
    assert bare.run.exits.head == "minimal"
    assert bare.certificate.space_size == 1
    by_hand = make_plan(make_run(exits={"layers": [{"layer": 3, "head": "mlp"}], "head": "auto"}))
    assert by_hand.exits[0].head == "mlp"


def test_an_open_head_for_decoding_takes_the_cheapest_check() -> None:
    run = make_run(exits={"count": 1, "objective": "decode_speed_up", "head": ["mlp", "norm"]})
    plan = make_plan(run, with_decode_costs(make_profile(run)))
    assert plan.exits[0].head == "norm"


def test_a_kind_whose_check_was_not_measured_is_not_judged() -> None:
    run = make_run(exits={"count": 1, "objective": "decode_speed_up", "head": ["norm", "mlp"]})
    profile = with_decode_costs(make_profile(run))
    decode = tuple(
        costs.model_copy(update={"ops": tuple(op for op in costs.ops if op.op != "exit_norm")})
        for costs in profile.decode
    )
    plan = make_plan(run, profile.model_copy(update={"decode": decode}))
    assert plan.exits[0].head == "mlp"
    assert "head norm not judged: " in decision(plan, "head").rejected


def test_a_run_of_which_nothing_can_be_judged_says_why() -> None:
    run = open_run()
    run = replace_keys(run, {"search.pipeline_model_parallel_size": [3, 5], "search.micro_batch_size": []})
    with pytest.raises(SpecError, match=r"no combination .*3: 4 processes do not divide into 3 stages.* 5: "):
        make_plan(run, profile_of(run, [1]))


def test_a_closed_run_is_one_combination_and_keeps_its_own_error() -> None:
    run = make_run()
    (only,) = combinations(run, make_profile(run))
    assert (only.changes, only.error) == ({}, None)
    with pytest.raises(EeplanError, match="seq_length"):
        make_plan(run, make_profile(make_run(training__seq_length=64)))
    with pytest.raises(EeplanError, match="names a value twice"):
        make_run(search={"micro_batch_size": [1, 1]})
