"""What the plan says about decoding: every mode's speed, what it supposes, and what follows for the exits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builders import make_profile, make_run
from decode_cases import with_decode_costs

from eeplan.errors import ProfileError, SpecError
from eeplan.plan import Decision, DecodeModePrediction, DecodePrediction, Plan, load_plan, write_plan
from eeplan.schema import validate
from eeplan.sim.planner import make_plan
from eeplan.spec import RunSpec, WeightSchedule
from eeplan.usage import ExitUsage

USAGE = validate(
    {
        "schema_version": 1,
        "measured": {
            "source": "a test",
            "num_layers": 8,
            "depths": [2, 5],
            "num_tokens": 1000,
            "curve": [{"threshold": 0.8, "could_leave": [0.1, 0.6], "first_leave": [0.1, 0.5]}],
        },
    },
    ExitUsage,
    "usage",
)
TWO_EXITS = {"layers": [{"layer": 2}, {"layer": 5}]}


def plan_of(run: RunSpec, usage: ExitUsage | None = None, **costs: Any) -> Plan:
    profile = with_decode_costs(make_profile(run), **costs)
    return make_plan(run, "0" * 64, profile, "1" * 64, usage, "2" * 64 if usage else None)


def section(plan: Plan) -> DecodePrediction:
    assert plan.decode is not None
    return plan.decode


def mode(plan: Plan, name: str) -> DecodeModePrediction:
    return next(one for one in section(plan).modes if one.mode == name)


def decision(plan: Plan, subject: str) -> Decision:
    return next(one for one in plan.decisions if one.subject == subject)


def test_every_mode_is_predicted() -> None:
    plan = plan_of(make_run(exits=TWO_EXITS))
    assert [one.mode for one in section(plan).modes] == ["full", "kv_recompute", "catch_up", "pipeline"]
    full = mode(plan, "full")
    # 8 layers of 1 ms, embedding 20 us, final head 300 us, overhead 100 us.
    assert full.seconds_per_token == pytest.approx(8e-3 + 2e-5 + 3e-4 + 1e-4)
    assert (full.speed_up, full.mean_depth, full.layer_rows_per_token, full.checks_per_token) == (1, 8, 8, 0)
    for one in section(plan).modes:
        assert one.tokens_per_s == pytest.approx(1 / one.seconds_per_token)
        assert one.speed_up == pytest.approx(full.seconds_per_token / one.seconds_per_token)
        assert one.processes == (2 if one.mode == "pipeline" else 1)
    assert mode(plan, "catch_up").seconds_per_token <= mode(plan, "kv_recompute").seconds_per_token
    assert mode(plan, "catch_up").layer_rows_per_token == pytest.approx(8)
    assert mode(plan, "pipeline").speed_up <= 2
    # Uniform depth: a quarter leaves at layer 2, three eighths at layer 5.
    assert section(plan).exit_shares == pytest.approx((0.25, 0.375))
    assert mode(plan, "catch_up").mean_depth == pytest.approx(0.25 * 2 + 0.375 * 5 + 0.375 * 8)


def test_a_prior_is_marked_as_an_assumption_and_a_measurement_is_not() -> None:
    run = make_run(exits=TWO_EXITS)
    supposed = plan_of(run)
    assert section(supposed).usage_is_assumption
    assert section(supposed).usage.startswith("assumed, not measured: ")
    assert supposed.usage_sha256 is None
    assert "assumed, not measured" in decision(supposed, "decode.mode").reason
    measured = plan_of(run, USAGE)
    assert not section(measured).usage_is_assumption
    assert section(measured).usage == "measured on 1000 tokens: a test"
    assert section(measured).exit_shares == pytest.approx((0.1, 0.5))
    assert measured.usage_sha256 == "2" * 64
    elsewhere = plan_of(make_run(exits={"layers": [{"layer": 3}]}), USAGE)
    assert section(elsewhere).usage_is_assumption
    prior = plan_of(make_run(exits=TWO_EXITS, decode={"prior": {"name": "none"}}))
    assert section(prior).exit_shares == (0, 0)


def test_costs_that_were_not_measured_are_listed() -> None:
    plan = plan_of(make_run(exits=TWO_EXITS, decode={"recompute_limit": 20}), rows=(1, 2, 8), processes=(1,))
    assert section(plan).estimated == (
        "layer: 3, 4, 5, 6, 7 rows interpolated and 9 to 21 rows extrapolated",
        "embedding: 3, 4, 5, 6, 7 rows interpolated and 9 to 21 rows extrapolated",
        "mode pipeline: measured with 1 process, runs with 2",
    )
    assert section(plan_of(make_run(exits=TWO_EXITS, decode={"recompute_limit": 1}))).estimated == ()
    assert section(plan_of(make_run())).estimated == ()


def test_the_fastest_mode_is_named_with_the_next_best() -> None:
    plan = plan_of(make_run(exits=TWO_EXITS))
    best, second = sorted(section(plan).modes, key=lambda one: one.seconds_per_token)[:2]
    named = decision(plan, "decode.mode")
    assert named.choice == best.mode
    assert f"{best.speed_up:.3f} times as fast as full" in named.reason
    assert named.rejected.startswith(second.mode)
    slow = decision(plan_of(make_run(exits=TWO_EXITS), head_s=0.05), "decode.mode")
    assert slow.choice == "full"
    assert slow.reason.startswith("no early exit makes decoding faster: full ")
    bare = decision(plan_of(make_run()), "decode.mode")
    assert (bare.choice, bare.rejected) == ("full", "")
    assert bare.reason.startswith("there is no early exit: full ")


def test_one_stage_has_no_pipeline() -> None:
    plan = plan_of(make_run(exits=TWO_EXITS, parallel={"pipeline_model_parallel_size": 1}))
    assert [one.mode for one in section(plan).modes] == ["full", "kv_recompute", "catch_up"]


def test_a_profile_without_decode_costs_predicts_nothing_and_says_so() -> None:
    run = make_run(exits=TWO_EXITS)
    plan = make_plan(run, "0" * 64, make_profile(run), "1" * 64)
    assert plan.decode is None
    assert decision(plan, "decode.mode").choice == "not predicted"
    assert "`eeplan profile` measures them" in decision(plan, "decode.mode").reason
    run = make_run(exits={"count": 1, "objective": "decode_speed_up"})
    with pytest.raises(ProfileError, match="no decode costs"):
        make_plan(run, "0" * 64, make_profile(run), "1" * 64)


def test_the_objective_moves_the_exits() -> None:
    exits = {"count": 1, "objective": "decode_speed_up"}
    late = {"prior": {"name": "ramp", "start": 0.7}}
    plan = plan_of(make_run(exits=exits, decode=late))
    assert [placed.depth for placed in plan.exits] == [7]
    assert "greatest decode speed-up" in decision(plan, "exits.placement").reason
    by_time = plan_of(make_run(exits={"count": 1}, decode=late))
    assert mode(plan, "catch_up").speed_up > mode(by_time, "catch_up").speed_up
    assert plan.prediction.iteration_time_s >= by_time.prediction.iteration_time_s


def test_a_second_plan_follows_what_the_first_model_learnt() -> None:
    """A measured usage in which nobody leaves before layer 5 moves the exit there."""
    run = make_run(exits={"count": 1, "objective": "decode_speed_up"})
    usage = validate(
        {
            "schema_version": 1,
            "measured": {
                "source": "a test",
                "num_layers": 8,
                "depths": [1, 4, 5],
                "num_tokens": 1000,
                "curve": [
                    {"threshold": 0.8, "could_leave": [0.0, 0.02, 0.7], "first_leave": [0.0, 0.02, 0.69]}
                ],
            },
        },
        ExitUsage,
        "usage",
    )
    first, second = plan_of(run), plan_of(run, usage)
    assert [placed.depth for placed in second.exits] == [5]
    assert [placed.depth for placed in first.exits] != [5]


def test_loss_weights_follow_the_usage() -> None:
    exits = {**TWO_EXITS, "loss_weights": {"policy": "usage", "scale": 0.6}}
    plan = plan_of(make_run(exits=exits), USAGE)
    assert [placed.target_weight for placed in plan.exits] == pytest.approx([0.1, 0.5])
    assert "measured on 1000 tokens: a test" in decision(plan, "exits.loss_weights").reason
    with pytest.raises(SpecError, match="finds no token that leaves early"):
        plan_of(make_run(exits=exits, decode={"threshold": 1.0}), USAGE)


def test_the_weight_schedule_is_in_the_plan() -> None:
    warmup = {"style": "cosine", "init": 0.1, "iters": 3}
    plan = plan_of(make_run(exits={**TWO_EXITS, "loss_weights": {"warmup": warmup}}))
    assert plan.loss_weight_schedule == WeightSchedule(style="cosine", init=0.1, iters=3)
    assert "along a cosine from 0.1 times their targets" in decision(plan, "exits.loss_weights").reason
    assert plan_of(make_run(exits=TWO_EXITS)).loss_weight_schedule is None


def test_the_section_survives_the_plan_file(tmp_path: Path) -> None:
    plan = write_plan(tmp_path / "plan.yaml", plan_of(make_run(exits=TWO_EXITS), USAGE))
    assert load_plan(tmp_path / "plan.yaml").decode == plan.decode
