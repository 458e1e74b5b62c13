"""Plans with filled bubbles: what they predict is what their schedule does, and they say why."""

from __future__ import annotations

import re
from typing import Any

import pytest
from builders import make_plan, make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import PlanInfeasible, SchemaError
from eeplan.plan import Decision, Plan
from eeplan.profile import OpProfile
from eeplan.schema import dump_yaml, parse_yaml, validate
from eeplan.sim.costs import pipeline_costs_of, to_ns
from eeplan.sim.engine import simulate
from eeplan.sim.estimator import check_estimator
from eeplan.sim.fill import fill_of, schedule_of
from eeplan.sim.schedule import one_f_one_b
from eeplan.sim.validators import in_flight
from eeplan.sim.validators import validate as validate_schedule
from eeplan.spec import RunSpec, replace_keys


def decision(plan: Plan) -> Decision:
    return next(one for one in plan.decisions if one.subject == "fill")


def run_of(policy: Any, mode: str = "added", **changes: Any) -> RunSpec:
    """Eight layers on four stages, eight microbatches, an exit on each of the first three stages.

    The embedding makes stage 0 the slowest by 3 us, so a cool-down forward there costs that.
    """
    given = {
        "parallel__pipeline_model_parallel_size": 4,
        "exits": {"layers": [{"layer": 2}, {"layer": 3}, {"layer": 5, "boundary": "before"}]},
        "fill": {"policy": policy, "mode": mode, "max_time_overhead": 0.001},
    }
    return make_run(**(given | changes))


def quick(run: RunSpec, **knobs: Any) -> OpProfile:
    return make_profile(run, p2p_latency_s=0.0, p2p_bandwidth_bytes_per_s=1e18, **knobs)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_the_prediction_is_what_the_schedule_does(data: st.DataObject) -> None:
    stages = data.draw(st.sampled_from([2, 4, 8]))
    microbatches = data.draw(st.integers(1, 12))
    mode = data.draw(st.sampled_from(["added", "same_count"]))
    policy: Any = "auto"
    if data.draw(st.booleans()):
        most = stages - 1 if mode == "added" else min(stages - 1, (microbatches - 1) // 2)
        policy = {"warmup": data.draw(st.integers(0, most)), "cooldown": data.draw(st.integers(0, most))}
    run = make_run(
        parallel__pipeline_model_parallel_size=stages,
        parallel__data_parallel_size=data.draw(st.sampled_from([1, 2])),
        training__global_batch_size=4 * microbatches,
        exits__count=data.draw(st.integers(0, 3)),
        exits__exit_forward=data.draw(st.sampled_from(["deferred", "eager"])),
        fill={"policy": policy, "mode": mode},
    )
    plan = make_plan(run, make_profile(run, jitter=0.5, seed=microbatches))
    schedule = schedule_of(plan)
    validate_schedule(schedule)
    check_estimator(schedule, plan)
    timeline = simulate(schedule, pipeline_costs_of(plan))
    assert to_ns(plan.prediction.pipeline_s) == timeline.pipeline_ns
    for stage, (planned, held) in enumerate(zip(plan.stages, in_flight(schedule), strict=True)):
        memory = planned.memory
        assert memory.peak_bytes == memory.state_bytes + memory.activation_bytes + memory.transient_bytes
        assert memory.in_flight <= held
        if memory.peak_during == "optimizer":
            assert timeline.peak_bytes(stage) <= memory.peak_bytes
        else:
            assert timeline.peak_bytes(stage) == memory.peak_bytes
    fill = fill_of(plan)
    extra = fill.num_microbatches - run.num_microbatches
    assert extra == (0 if mode == "same_count" or plan.fill is None else len(fill.depths) + len(fill.reaches))
    if plan.fill is not None:
        tokens = run.training.micro_batch_size * run.training.seq_length * run.parallel.data_parallel_size
        assert plan.fill.extra_tokens_per_iteration == extra * tokens
    assert validate(parse_yaml(dump_yaml(plan).encode(), "plan"), Plan, "plan") == plan


def test_automatic_filling_stays_within_its_limit_and_says_what_it_gives() -> None:
    run = run_of("auto")
    plan, plain = make_plan(run, quick(run)), make_plan(run_of("none"), quick(run))
    assert plain.fill is None
    assert not [one for one in plain.decisions if one.subject == "fill"]
    assert plan.fill is not None
    longer = plan.prediction.iteration_time_s / plain.prediction.iteration_time_s - 1
    assert 0 <= longer <= 0.001
    assert plan.prediction.bubble_fraction < plain.prediction.bubble_fraction
    assert plan.prediction.closed_form_s is None
    assert len(plan.fill.warm_up_depths) >= 2
    assert len(plan.fill.truncated_reaches) >= 2
    said = decision(plan)
    assert "the most inserts within fill.max_time_overhead 0.1 %" in said.reason
    assert "the formula for equal stages starts at 1 per region" in said.reason
    assert "one more in the warm-up: +" in said.rejected
    assert "one more in the cool-down: +" in said.rejected


def test_weights_and_scales_are_corrected() -> None:
    plan = make_plan(run_of({"warmup": 2, "cooldown": 2}))
    assert plan.fill is not None
    assert plan.fill.warm_up_depths == (2, 1)
    targets = [placed.target_weight for placed in plan.exits]
    assert [placed.stage for placed in plan.exits] == [0, 1, 2]
    assert [placed.effective_weight for placed in plan.exits] == pytest.approx(
        [targets[0] * 8 / 10, targets[1] * 8 / 9, targets[2]]
    )
    reached = [sum(reach >= 4 - stage for reach in plan.fill.truncated_reaches) for stage in range(4)]
    assert plan.fill.gradient_scales == pytest.approx([8 / (8 + count) for count in reached])
    assert reached[3] == 2


def test_same_count_takes_full_microbatches_away() -> None:
    run = run_of({"warmup": 2, "cooldown": 2}, "same_count")
    plan, plain = make_plan(run, quick(run)), make_plan(run_of("none"), quick(run))
    assert plan.fill is not None
    assert plan.fill.num_full == 4
    assert plan.fill.extra_tokens_per_iteration == 0
    assert schedule_of(plan).num_microbatches == plan.num_microbatches == 8
    assert plan.prediction.pipeline_s / plain.prediction.pipeline_s == pytest.approx(7 / 11, rel=0.1)
    assert plan.prediction.tokens_per_s > plain.prediction.tokens_per_s


def test_an_insert_turns_at_the_stages_last_exit() -> None:
    """The exit before layer 5 reads what stage 2 receives: an insert that turns there runs no layer of it."""
    run = run_of({"warmup": 3}, exits={"layers": [{"layer": 5, "boundary": "before"}], "head": "minimal"})
    profile = quick(run, microbatch_overhead_s=0.0)
    plan = make_plan(run, profile)
    assert plan.fill is not None
    assert plan.fill.warm_up_depths == (3,)
    assert plan.fill.turn_forward_s[2] == 0
    head = next(op for op in profile.ops if op.op == "exit_minimal")
    assert plan.fill.turn_backward_s[2] == pytest.approx(head.forward.mean_s + head.backward.mean_s)
    assert plan.fill.turn_backward_s[2] < plan.stages[2].backward_s
    assert "2 of 3 warm-up inserts meet no exit and are dropped" in decision(plan).reason


def test_a_forward_that_is_not_kept_runs_no_eager_exits() -> None:
    run = run_of({"cooldown": 1}, exits={"layers": [{"layer": 2}], "exit_forward": "eager"})
    plan = make_plan(run, quick(run))
    assert plan.fill is not None
    bare = plan.fill.bare_forward_s
    assert bare[0] < plan.stages[0].forward_s
    assert bare[1:] == pytest.approx([stage.forward_s for stage in plan.stages[1:]])


def test_by_hand_may_take_longer_and_says_so() -> None:
    run = run_of({"warmup": 3, "cooldown": 3})
    plan = make_plan(run, quick(run))
    plain = make_plan(run_of("none"), quick(run))
    assert plan.prediction.iteration_time_s > plain.prediction.iteration_time_s
    assert "set in the run file: " in decision(plan).reason
    assert "(+0.00 % against" not in decision(plan).reason


def test_memory_limits_the_warm_up_inserts() -> None:
    run = run_of("none")
    profile = quick(run, op_bytes={"layer": (2**22, 0, 0)})
    peaks = [s.memory.peak_bytes + s.memory.process_base_bytes for s in make_plan(run, profile).stages]
    tight = run_of("auto", limits__device_memory_bytes=max(peaks) + 2**20)
    plan = make_plan(tight, profile)
    assert plan.fill is not None
    assert plan.fill.warm_up_depths == ()
    assert len(plan.fill.truncated_reaches) >= 2
    assert "stage 0 needs" in decision(plan).rejected
    by_hand = run_of({"warmup": 2}, limits__device_memory_bytes=max(peaks) + 2**20)
    with pytest.raises(PlanInfeasible, match=r"2 warm-up inserts .* stage 0 then needs .*lower fill\.policy"):
        make_plan(by_hand, profile)


def test_nothing_to_fill_is_said() -> None:
    run = run_of("auto", parallel__pipeline_model_parallel_size=1)
    plan = make_plan(run)
    assert plan.fill is None
    assert decision(plan).choice == "none"
    assert schedule_of(plan) == one_f_one_b(1, 8)


@pytest.mark.parametrize(
    ("fill", "message"),
    [
        ({"policy": "some"}, r"fill\.policy: 'some' is no fill; expected none, auto or counts"),
        ({"policy": 3}, r"fill\.policy: 3 is no fill"),
        ({"policy": {"warmup": -1}}, r"'fill\.policy\.warmup' has value -1"),
        ({"policy": {"warmpu": 1}}, r"unknown key 'fill\.policy\.warmpu'; did you mean 'warmup'\?"),
        ({"policy": {"cooldown": 4}}, r"fill\.policy\.cooldown is 4; 4 pipeline stages take at most 3"),
        ({"policy": "auto", "mode": "extra"}, r"'fill\.mode' has value 'extra'"),
        ({"policy": "auto", "max_time_overhead": -0.1}, r"'fill\.max_time_overhead' has value -0\.1"),
    ],
)
def test_impossible_wishes_are_named(fill: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        run_of("none", fill=fill)


def test_a_full_microbatch_must_be_left() -> None:
    with pytest.raises(SchemaError, match=r"turns 2 of 2 microbatches into partial ones"):
        run_of({"warmup": 1, "cooldown": 1}, "same_count", training__global_batch_size=4)


def test_places_that_would_let_more_inserts_in_are_named() -> None:
    """The placement is chosen before the fill; what that loses is told."""
    head, layer = (2.5e-4, 5e-4), (5e-4, 1e-3)
    seconds = {"embedding": (0.0, 0.0), "layer": layer, "exit_norm": head, "final_head": head}
    run = make_run(
        parallel__pipeline_model_parallel_size=4,
        exits__count=1,
        exits__untie_exit_output_weights=True,
        fill={"policy": "auto", "max_time_overhead": 0.2},
        training__global_batch_size=64,
    )
    profile = quick(run, op_seconds=seconds)
    plan = make_plan(run, profile)
    assert plan.fill is not None
    told = re.search(
        r"exits per stage ([\d, ]+) \([+-].* % iteration time\) would let in (\d+) "
        r"backwards of stages instead of (\d+)|$",
        decision(plan).rejected,
    )
    work = sum(plan.fill.warm_up_depths) + sum(plan.fill.truncated_reaches)
    others = {}
    # The depth nearest to the middle that each stage can read.
    for place in (
        {"layer": 2},
        {"layer": 4},
        {"layer": 5, "boundary": "before"},
        {"layer": 7, "boundary": "before"},
    ):
        by_hand = replace_keys(
            run, {"exits.count": None, "exits.layers": [place], "exits.exit_forward": plan.exit_forward}
        )
        other = make_plan(by_hand, profile)
        if other.fill is not None and other.prediction.baseline_iteration_time_s:
            counts = ", ".join(str(len(stage.exit_depths)) for stage in other.stages)
            others[counts] = sum(other.fill.warm_up_depths) + sum(other.fill.truncated_reaches)
    assert told is not None
    if told[1] is None:
        assert max(others.values()) <= work
    else:
        assert int(told[3]) == work
        assert int(told[2]) == others[told[1]] > work
