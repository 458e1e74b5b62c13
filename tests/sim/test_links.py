"""Nodes and links against ranks written out one by one."""

from __future__ import annotations

import pytest
from builders import make_plan, make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.naive_links import line_of

from eeplan.errors import ProfileError, SchemaError
from eeplan.profile import OpProfile, Transfer
from eeplan.sim.costs import pipeline_costs_of
from eeplan.sim.engine import simulate
from eeplan.sim.fill import schedule_of
from eeplan.sim.links import data_transfer, message_transfer, shared_transfer
from eeplan.spec import RunSpec

SLOW = Transfer(latency_s=2e-3, bandwidth_bytes_per_s=1e7)


def two_lines(profile: OpProfile) -> OpProfile:
    return profile.model_copy(update={"p2p_between_nodes": SLOW, "all_reduce_between_nodes": SLOW})


@settings(max_examples=150, deadline=None)
@given(
    stages=st.integers(1, 8),
    tp=st.sampled_from([1, 2, 4]),
    ranks=st.integers(1, 9),
    nodes=st.integers(1, 5),
)
def test_lines_are_those_of_the_ranks(stages: int, tp: int, ranks: int, nodes: int) -> None:
    run = make_run(
        parallel={
            "pipeline_model_parallel_size": stages,
            "tensor_model_parallel_size": tp,
            "data_parallel_size": ranks,
            "gpus_per_node": nodes * tp,
            "layer_split": "auto",
        },
        training__global_batch_size=2 * ranks,
    )
    profile, parallel = two_lines(make_profile(run)), run.parallel
    for stage in range(stages):
        assert data_transfer(profile, parallel, stage) == line_of(run, profile, "all_reduce", (stage, stage))
    for stage in range(stages - 1):
        expected = line_of(run, profile, "p2p", (stage, stage + 1))
        assert message_transfer(profile, parallel, stage) == expected
    if stages > 1:
        assert shared_transfer(profile, parallel) == line_of(run, profile, "all_reduce", (0, stages - 1))


def four_stages(**knobs: object) -> RunSpec:
    return make_run(parallel__pipeline_model_parallel_size=4, **knobs)


def test_a_plan_takes_each_link_as_it_is() -> None:
    """Four stages on two nodes of two: the message in the middle is slow, and the engine has it."""
    run = four_stages(parallel__gpus_per_node=2)
    plan = make_plan(run, two_lines(make_profile(run)))
    costs = pipeline_costs_of(plan)
    inside, between, again = costs.message_ns
    assert inside == again < between == round(plan.stages[1].message_s * 1e9)
    assert simulate(schedule_of(plan), costs).pipeline_ns == round(plan.prediction.pipeline_s * 1e9)
    # Negative control: on one node nothing is slow, and the shared matrix is reduced inside as well.
    together = make_plan(four_stages(parallel__gpus_per_node=4), two_lines(make_profile(run)))
    assert together.prediction.pipeline_s < plan.prediction.pipeline_s
    assert together.prediction.grad_sync_s < plan.prediction.grad_sync_s
    assert together.stages == make_plan(four_stages(), make_profile(run)).stages


def test_lines_between_nodes_that_the_profile_lacks_are_asked_for() -> None:
    run = four_stages(parallel__gpus_per_node=2)
    with pytest.raises(
        ProfileError, match="4 ranks on 2 nodes, and the profile has no p2p_between_nodes and"
    ):
        make_plan(run, make_profile(run))
    half = make_profile(run).model_copy(update={"p2p_between_nodes": SLOW})
    with pytest.raises(ProfileError, match="the profile has no all_reduce_between_nodes; add them"):
        make_plan(run, half)


def test_tensor_parallel_ranks_share_a_node() -> None:
    with pytest.raises(SchemaError, match="gpus_per_node 3 is not divisible by tensor_model_parallel_size 2"):
        make_run(parallel__tensor_model_parallel_size=2, parallel__gpus_per_node=3)


@pytest.mark.parametrize("fill", ["none", {"warmup": 1, "cooldown": 2}])
def test_a_plan_with_blocking_messages_is_judged_as_it_runs(fill: object) -> None:
    knobs = {"exits": {"count": 2}, "fill": {"policy": fill}}
    run = four_stages(**knobs, parallel__p2p_communication="rendezvous")
    profile = make_profile(run, p2p_latency_s=5e-3)
    plan = make_plan(run, profile)
    costs = pipeline_costs_of(plan)
    assert costs.transport == "rendezvous"
    timeline = simulate(schedule_of(plan), costs)
    assert timeline.pipeline_ns == round(plan.prediction.pipeline_s * 1e9)
    free = make_plan(four_stages(**knobs), profile)
    assert free.prediction.pipeline_s < plan.prediction.pipeline_s
