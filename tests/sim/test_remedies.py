"""What makes an infeasible run feasible: every remedy is planned again, and nothing smaller works."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_plan, make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.errors import PlanInfeasible
from eeplan.profile import OpProfile
from eeplan.spec import RunSpec, replace_keys

SIZE = "training.micro_batch_size"
MEMORY = "limits.device_memory_bytes"


def with_sizes(run: RunSpec, sizes: tuple[int, ...], **knobs: Any) -> OpProfile:
    profiles = [make_profile(replace_keys(run, {SIZE: size}), **knobs) for size in sizes]
    return profiles[0].model_copy(update={"ops": tuple(op for one in profiles for op in one.ops)})


def refusal_of(run: RunSpec, profile: OpProfile) -> PlanInfeasible:
    with pytest.raises(PlanInfeasible) as refusal:
        make_plan(run, profile)
    return refusal.value


def peak_of(run: RunSpec, profile: OpProfile) -> int:
    stages = make_plan(run, profile).stages
    return max(stage.memory.peak_bytes + stage.memory.process_base_bytes for stage in stages)


def memory_of(refusal: PlanInfeasible) -> int:
    """What the device would have to have."""
    found = [one["keys"][MEMORY] for one in refusal.remedies if MEMORY in one["keys"]]
    return int(found[0])


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 3), st.sampled_from(["uniform", "auto"]), st.floats(0.2, 0.999), st.integers(0, 99))
def test_every_remedy_works_and_is_the_smallest_of_its_kind(
    exits: int, split: str, share: float, seed: int
) -> None:
    run = make_run(
        exits__count=exits,
        exits__untie_exit_output_weights=True,
        parallel={"pipeline_model_parallel_size": 2, "data_parallel_size": 2, "layer_split": split},
    )
    profile = with_sizes(run, (1, 2), seed=seed, jitter=0.5, process_base_bytes=0)
    limited = replace_keys(run, {MEMORY: int(share * peak_of(run, profile))})
    try:
        make_plan(limited, profile)
    except PlanInfeasible as refused:
        refusal = refused
    else:
        # A slower placement fits.
        return
    base_s = make_plan(run, profile).prediction.iteration_time_s
    times = []
    for remedy in refusal.remedies:
        plan = make_plan(replace_keys(limited, remedy["keys"]), profile)
        assert plan.prediction.iteration_time_s == remedy["iteration_time_s"]
        assert remedy["slower"] == pytest.approx(remedy["iteration_time_s"] / base_s - 1)
        times.append(remedy["iteration_time_s"])
        if MEMORY in remedy["keys"]:
            refusal_of(replace_keys(limited, {MEMORY: remedy["keys"][MEMORY] - 1}), profile)
        if set(remedy["keys"]) == {"exits.count"}:
            for more in range(remedy["keys"]["exits.count"] + 1, exits + 1):
                refusal_of(replace_keys(limited, {"exits.count": more}), profile)
    assert times == sorted(times)
    assert any(MEMORY in remedy["keys"] for remedy in refusal.remedies)


def test_remedies_are_told_in_lines_with_numbers() -> None:
    run = make_run(exits__count=2)
    profile = with_sizes(run, (1, 2), op_bytes={"exit_norm": (2**24, 0, 0)}, process_base_bytes=0)
    needed = memory_of(refusal_of(replace_keys(run, {MEMORY: 1000}), profile))
    refusal = refusal_of(replace_keys(run, {MEMORY: needed - 1}), profile)
    assert "\n" not in str(refusal)
    assert "(1 bytes) too much" in str(refusal)
    head, *lines = refusal.details
    assert head.startswith("single changes that make it feasible")
    assert any(" instead of 2: " in line for line in lines)
    assert any("devices with 1 bytes more" in line for line in lines)
    assert all(" per iteration (" in line and "largest peak" in line for line in lines[:-1])
    # A profile in fp32 cannot tell what bf16 would take.
    assert lines[-1].startswith("not judged, for want of costs: training.precision bf16")


def test_fill_by_hand_has_remedies_too() -> None:
    run = make_run(
        exits={"layers": [{"layer": 2}, {"layer": 5}]},
        parallel__pipeline_model_parallel_size=4,
        fill__policy={"warmup": 3, "cooldown": 0},
    )
    profile = make_profile(run, op_bytes={"layer": (2**20, 0, 0)})
    peak = peak_of(run, profile)
    refusal = refusal_of(replace_keys(run, {MEMORY: peak - 1}), profile)
    assert str(refusal).startswith("fill.policy puts 3 warm-up inserts")
    fewer = next(one for one in refusal.remedies if "fill.policy" in one["keys"])
    assert fewer["keys"]["fill.policy"] == {"warmup": 2, "cooldown": 0}
    assert memory_of(refusal) == peak


def test_where_no_single_change_helps_the_memory_that_would_is_named() -> None:
    run = make_run(limits__device_memory_bytes=2**20)
    refusal = refusal_of(run, make_profile(run))
    assert [set(one["keys"]) for one in refusal.remedies] == [{MEMORY}]
