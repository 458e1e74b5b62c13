"""Gradient reductions: buckets against a walk over them one by one, shards against their formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from builders import make_plan, make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.profile import OpProfile, Transfer
from eeplan.sim.costs import CostModel, cost_model, stage_costs
from eeplan.sim.layout import layout_of
from eeplan.sim.parameters import Head, stage_parameters
from eeplan.sim.reductions import Run, backward_runs, exposed_ns, ring_all_reduce_s, ring_half_s
from eeplan.spec import RunSpec

ONE_NS_PER_PARAMETER = Transfer(latency_s=0.0, bandwidth_bytes_per_s=4e9)
"""An all-reduce of fp32 gradients over two ranks."""


def model_of(run: RunSpec, profile: OpProfile | None = None) -> CostModel:
    profile = profile or make_profile(run)
    profile = profile.model_copy(update={"all_reduce": ONE_NS_PER_PARAMETER})
    return cost_model(run, profile, layout_of(run), {run.exits.head})


def walked_ns(runs: list[Run]) -> int:
    """Every bucket by itself: ready after its op, reduced after the one before."""
    clock = link_free = 0
    for run in runs:
        for _ in range(run.count):
            clock += run.backward_ns
            link_free = max(link_free, clock) + run.reduce_ns
    return max(link_free - clock, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(Run, st.integers(0, 50), st.integers(0, 50), st.integers(0, 6)), min_size=1, max_size=6
    )
)
def test_runs_of_equal_buckets_are_the_buckets_one_by_one(runs: list[Run]) -> None:
    assert exposed_ns(runs) == walked_ns(runs)


def test_what_fits_under_the_backward_is_hidden() -> None:
    # The last bucket never hides: its op is the backward's end.
    assert exposed_ns([Run(100, 10, 5)]) == 10
    assert exposed_ns([Run(10, 100, 5)]) == 5 * 100 - 4 * 10
    # Negative control: in the other order the long bucket would hide.
    assert exposed_ns([Run(10, 300), Run(200, 1)]) == 101
    assert exposed_ns([Run(200, 1), Run(10, 300)]) == 300


@pytest.mark.parametrize("untied_model", [False, True])
@pytest.mark.parametrize("tied_exits", [False, True])
@pytest.mark.parametrize("mode", ["deferred", "eager"])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_buckets_hold_every_parameter_once(
    untied_model: bool, tied_exits: bool, mode: str, stages: int
) -> None:
    run = make_run(
        parallel__pipeline_model_parallel_size=stages,
        parallel__data_parallel_size=2,
        parallel__overlap_grad_reduce=True,
        model__untie_embeddings_and_output_weights=untied_model,
    )
    model = model_of(run)
    for stage in range(stages):
        for heads in ((), (Head("norm", tied_exits),) * 2):
            before, layer, after = backward_runs(model, stage, heads, mode)  # type: ignore[arg-type]
            buckets = [*before, replace(layer, count=3), *after]
            assert sum(bucket.count * bucket.reduce_ns for bucket in buckets) == stage_parameters(
                run, stages, stage, 3, heads
            )


def test_overlap_hides_all_but_the_first_stages_embedding() -> None:
    """The embedding's gradient comes last of all, and is the largest bucket."""
    run = make_run(parallel__data_parallel_size=2, parallel__overlap_grad_reduce=True)
    slow = dict.fromkeys(("embedding", "layer", "final_head"), (1.0, 2.0))
    model = model_of(run, make_profile(run, op_seconds=slow))
    first, last = (stage_costs(model, stage, (), "deferred") for stage in (0, 1))
    assert first.data_sync_ns == 64 * 256
    assert last.data_sync_ns == model.run.model.hidden_size * 2 + (
        4 * 64 * 64 + 3 * 64 * run.model.ffn_size
    ), "one layer"
    plain = replace(model, run=make_run(parallel__data_parallel_size=2))
    assert stage_costs(plain, 0, (), "deferred").data_sync_ns == first.parameters


@pytest.mark.parametrize(
    ("precision", "whole", "kept"), [("fp32", 16.0, 8), ("bf16", 18.0, 6), ("fp16", 18.0, 6)]
)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_distributed_optimizer_divides_state_and_step(
    precision: str, whole: float, kept: int, ranks: int
) -> None:
    run = make_run(
        parallel__data_parallel_size=ranks,
        parallel__use_distributed_optimizer=True,
        training__precision=precision,
        training__global_batch_size=64,
    )
    model = model_of(run)
    stage = stage_costs(model, 0, (), "deferred")
    assert stage.state_bytes == round(stage.parameters * (kept + (whole - kept) / ranks))
    assert stage.optimizer_transient_bytes == round(4.0 * stage.parameters / ranks)
    width = 4 if precision == "fp32" else 2
    gather_s = ring_half_s(ONE_NS_PER_PARAMETER, width * stage.parameters, ranks)
    assert stage.optimizer_ns == round((1e-4 + stage.parameters / ranks * 1e-9 + gather_s) * 1e9)
    replicated = replace(
        model,
        run=make_run(
            parallel__data_parallel_size=ranks,
            training__precision=precision,
            training__global_batch_size=64,
        ),
    )
    whole_stage = stage_costs(replicated, 0, (), "deferred")
    assert whole_stage.state_bytes == round(whole * stage.parameters)
    # Reduce-scatter and all-gather are the two halves of an all-reduce.
    assert stage.data_sync_ns == pytest.approx(whole_stage.data_sync_ns / 2, abs=1)


def test_a_half_ring_is_half_an_all_reduce() -> None:
    pair = Transfer(latency_s=2e-6, bandwidth_bytes_per_s=1e9)
    for ranks in (1, 2, 3, 8):
        assert 2 * ring_half_s(pair, 12_000, ranks) == ring_all_reduce_s(pair, 12_000, ranks)


def test_a_plan_shows_what_sharding_saves_and_what_gathering_costs() -> None:
    knobs = {"parallel__data_parallel_size": 4, "training__global_batch_size": 32}
    plain, sharded = (
        make_plan(make_run(**knobs, parallel__use_distributed_optimizer=is_sharded))
        for is_sharded in (False, True)
    )
    for one, other in zip(plain.stages, sharded.stages, strict=True):
        assert other.memory.state_bytes < one.memory.state_bytes
        assert other.grad_sync_s < one.grad_sync_s
    overlapped = make_plan(make_run(**knobs, parallel__overlap_grad_reduce=True))
    assert overlapped.prediction.pipeline_s == plain.prediction.pipeline_s
    assert overlapped.prediction.grad_sync_s < plain.prediction.grad_sync_s
