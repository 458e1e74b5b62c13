"""What a plan explains: parts that add up, and counts that hold when an op really gets slower."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_plan, make_profile, make_run

from eeplan.plan import Plan
from eeplan.profile import OpProfile, Timing
from eeplan.sim.insight import spare_bytes
from eeplan.spec import RunSpec

RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"exits__exit_forward": "eager"},
    "filled": {"fill": {"policy": "auto"}},
    "rendezvous": {"parallel__p2p_communication": "rendezvous"},
    "data_parallel": {"parallel__data_parallel_size": 2},
}


def run_of(name: str, **more: Any) -> RunSpec:
    exits = {"layers": [{"layer": 2}, {"layer": 4, "boundary": "before"}, {"layer": 5}]}
    return make_run(
        **{
            "model__num_layers": 12,
            "parallel__pipeline_model_parallel_size": 4,
            "training__global_batch_size": 32,
            "exits": exits,
        }
        | RUNS[name]
        | more
    )


def with_op(profile: OpProfile, op: str, *, forward_s: float = 0.0, backward_s: float = 0.0) -> OpProfile:
    """The profile with one op slower."""

    def slower(timing: Timing, by_s: float) -> Timing:
        return timing.model_copy(
            update={name: getattr(timing, name) + by_s for name in Timing.model_fields if name.endswith("_s")}
        )

    ops = tuple(
        one.model_copy(
            update={
                "forward": slower(one.forward, forward_s),
                "backward": slower(one.backward, backward_s),
            }
        )
        if one.op == op
        else one
        for one in profile.ops
    )
    return profile.model_copy(update={"ops": ops})


def pipeline_ns(plan: Plan) -> int:
    return round(plan.prediction.iteration_time_s * 1e9)


@pytest.mark.parametrize("name", RUNS)
def test_everything_adds_up(name: str) -> None:
    plan = make_plan(run_of(name), make_profile(run_of(name), jitter=0.3))
    pipeline_s = plan.prediction.pipeline_s
    for stage in plan.stages:
        idle = stage.idle.warm_up_s + stage.idle.steady_s + stage.idle.cool_down_s
        assert stage.busy_s + idle == pytest.approx(pipeline_s, abs=1e-12)
        assert stage.time_headroom.hidden_s >= stage.time_headroom.free_s
    idle_share = 1 - sum(stage.busy_s for stage in plan.stages) / (4 * pipeline_s)
    assert idle_share == pytest.approx(plan.prediction.bubble_fraction)
    path = plan.critical_path
    assert sum(op.critical_s for op in path.ops) + path.other_s == pytest.approx(pipeline_s, abs=1e-12)
    assert [op.op for op in path.ops] == [
        "embedding", "layer", "exit_2", "exit_3", "exit_5", "final_head", "message",
    ]  # fmt: skip
    layer = next(op for op in path.ops if op.op == "layer")
    # Three layers on every stage, but a warm-up insert may turn before a stage's last.
    if name != "filled":
        assert layer.forward.most <= 3 * sum(stage.critical.forward.most for stage in plan.stages)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("op", ["layer", "final_head"])
def test_a_slower_op_costs_what_its_count_says(name: str, op: str) -> None:
    """Finite differences through the whole planner, the placement held fixed."""
    run = run_of(name)
    profile = make_profile(run, jitter=0.3)
    plan = make_plan(run, profile)
    count = next(one for one in plan.critical_path.ops if one.op == op)
    for passed_in, passed in (("forward_s", count.forward), ("backward_s", count.backward)):
        slower = make_plan(run, with_op(profile, op, **{passed_in: 1e-9}))
        if slower.fill != plan.fill:
            continue
        assert pipeline_ns(slower) - pipeline_ns(plan) == passed.most


@pytest.mark.parametrize("name", ["plain", "eager"])
def test_exits_are_counted_one_by_one(name: str) -> None:
    run = run_of(name)
    profile = make_profile(run, jitter=0.3)
    plan = make_plan(run, profile)
    exits = [one for one in plan.critical_path.ops if one.op.startswith("exit_")]
    assert len(exits) == 3
    slower = make_plan(run, with_op(profile, "exit_norm", backward_s=1e-9))
    assert pipeline_ns(slower) - pipeline_ns(plan) == sum(one.backward.most for one in exits)
    for one, placed in zip(exits, plan.exits, strict=True):
        # A deferred forward runs in the backward.
        runs_in = plan.stages[placed.stage].critical
        assert one.backward == runs_in.backward
        assert one.forward == (runs_in.backward if name == "plain" else runs_in.forward)


def test_headroom_holds_for_a_slower_embedding() -> None:
    """The last stage has the slowest op; the first may do as much more as its headroom says, hidden."""
    run = make_run(parallel__pipeline_model_parallel_size=4, training__global_batch_size=64)
    profile = make_profile(run, op_seconds={"final_head": (0.004, 0.008), "embedding": (1e-3, 2e-3)})
    plan = make_plan(run, profile)
    room = plan.stages[0].time_headroom
    assert room.hidden_s > 0
    side = "backward_s" if room.hidden_side == "backward" else "forward_s"
    now, extra_ns = pipeline_ns(plan), round(room.hidden_s * 1e9)
    for beyond_ns in (0, 1, 10_000):
        slower = with_op(profile, "embedding", **{side: (extra_ns + beyond_ns) / 1e9})
        longer_ns = pipeline_ns(make_plan(run, slower)) - now
        assert (longer_ns <= extra_ns + beyond_ns) == (beyond_ns == 0)


def test_spare_bytes_reach_to_the_limit_or_the_largest_stage() -> None:
    assert spare_bytes((5, 9, 7), None) == (4, 0, 2)
    assert spare_bytes((5, 9, 7), 10) == (5, 1, 3)
    run = run_of("plain", limits={"device_memory_bytes": 8 * 2**30})
    plan = make_plan(run)
    assert [s.spare_bytes for s in plan.stages] == [s.memory.headroom_bytes for s in plan.stages]


def test_one_stage_has_no_messages() -> None:
    plan = make_plan(make_run(parallel__pipeline_model_parallel_size=1))
    assert [one.op for one in plan.critical_path.ops] == ["embedding", "layer", "final_head"]
    assert plan.stages[0].critical.messages.most == 0
    assert plan.stages[0].idle.steady_s == plan.stages[0].time_headroom.free_s == 0
