from __future__ import annotations

from builders import make_plan, make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim.costs import pipeline_costs_of
from eeplan.sim.engine import simulate
from eeplan.sim.schedule import one_f_one_b


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([1, 2, 4]), st.integers(0, 3), st.integers(1, 8), st.sampled_from(["deferred", "eager"])
)
def test_the_breakdown_adds_up_to_the_engines_peak(
    stages: int, exits: int, microbatches: int, mode: str
) -> None:
    run = make_run(
        parallel__pipeline_model_parallel_size=stages,
        exits__count=exits,
        exits__exit_forward=mode,
        training__global_batch_size=2 * microbatches,
    )
    plan = make_plan(run, make_profile(run, seed=exits, jitter=0.5))
    timeline = simulate(one_f_one_b(stages, microbatches), pipeline_costs_of(plan))
    for index, stage in enumerate(plan.stages):
        parts = stage.memory
        assert parts.peak_bytes == parts.state_bytes + parts.activation_bytes + parts.transient_bytes
        assert parts.in_flight == min(stages - index, microbatches)
        if parts.peak_during == "optimizer":
            assert timeline.peak_bytes(index) <= parts.peak_bytes
            assert parts.activation_bytes == 0
        else:
            assert timeline.peak_bytes(index) == parts.peak_bytes
            assert parts.activation_bytes == parts.in_flight * parts.activation_bytes_per_microbatch


def test_a_large_optimizer_step_is_the_peak() -> None:
    run = make_run()
    profile = make_profile(run)
    optimizer = profile.optimizer.model_copy(update={"transient_bytes_per_parameter": 100.0})
    plan = make_plan(run, profile.model_copy(update={"optimizer": optimizer}))
    for stage in plan.stages:
        assert stage.memory.peak_during == "optimizer"
        assert stage.memory.transient_bytes == 100 * stage.memory.parameters


def test_headroom_is_what_the_device_has_left() -> None:
    limit = 200 * 2**20
    run = make_run(limits__device_memory_bytes=limit)
    for stage in make_plan(run).stages:
        used = stage.memory.peak_bytes + stage.memory.process_base_bytes
        assert stage.memory.headroom_bytes == limit - used
    assert make_plan(make_run()).stages[0].memory.headroom_bytes is None
