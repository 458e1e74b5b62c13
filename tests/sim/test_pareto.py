"""The front against trying everything: every split, exit, mode, number of stages and microbatch size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from builders import make_plan, make_profile, make_run
from decode_cases import with_decode_costs
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.exhaustive import all_verdicts, modes_of

from eeplan.errors import PlanInfeasible, SpecError
from eeplan.profile import OpProfile
from eeplan.sim import pareto
from eeplan.sim.decode_process import Exit
from eeplan.sim.inference import decode_prediction
from eeplan.sim.layout import uniform_layout
from eeplan.sim.pareto import Front, pareto_front
from eeplan.spec import RunSpec, replace_keys
from eeplan.usage import UsagePrior, exit_shares

SIZE = "training.micro_batch_size"
CLOSED: dict[str, Any] = {"search.pipeline_model_parallel_size": [], "search.micro_batch_size": []}


def profile_of(run: RunSpec, seed: int, head_s: float | None) -> OpProfile:
    profiles = [
        make_profile(replace_keys(run, {SIZE: size}), seed=seed + size, jitter=0.6, process_base_bytes=0)
        for size in (1, 2)
    ]
    profile = profiles[0].model_copy(update={"ops": tuple(op for one in profiles for op in one.ops)})
    return profile if head_s is None else with_decode_costs(profile, head_s=head_s)


def everything(run: RunSpec, profile: OpProfile, usage: UsagePrior) -> Iterator[tuple[int, int, float]]:
    """(time, peak, decode) of all there is, by the naive planner."""
    layers = run.model.num_layers
    for stages in (1, 2):
        for size in (1, 2):
            keys = {
                **CLOSED,
                "parallel.pipeline_model_parallel_size": stages,
                "parallel.data_parallel_size": 2 // stages,
                SIZE: size,
            }
            concrete = replace_keys(run, keys)
            # The naive planner takes the first op of a name.
            ops = tuple(op for op in profile.ops if op.micro_batch_size == size)
            costs = profile.model_copy(update={"ops": ops})
            for number in range(run.exits.max_count + 1):
                for one in all_verdicts(concrete, costs, number, modes_of(run) if number else ("deferred",)):
                    depths = tuple(sorted(spot.depth for spot in one.exits))
                    decode = -float(number)
                    if profile.decode:
                        exits = [Exit(depth, "norm") for depth in depths]
                        shares = exit_shares(usage, run.decode.threshold, depths, layers)
                        layout = uniform_layout(layers, 1)
                        decode = decode_prediction(
                            profile, layout, exits, shares, run.decode.mode, run.decode.recompute_limit
                        ).ns_per_token
                    yield one.iteration_ns, max(one.peak_bytes), decode


def least(points: set[tuple[int, int, float]]) -> set[tuple[int, int, float]]:
    return {
        one
        for one in points
        if not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in points)
    }


def found(front: Front) -> set[tuple[int, int, float]]:
    return {
        (
            one.iteration_ns,
            one.peak_bytes,
            -float(len(one.exits)) if one.decode_ns is None else round(one.decode_ns, 1),
        )
        for one in front.points
    }


def case(split: str, **overrides: Any) -> RunSpec:
    return make_run(
        model__num_layers=4,
        parallel={"pipeline_model_parallel_size": 2, "layer_split": split},
        search={"pipeline_model_parallel_size": [1, 2], "micro_batch_size": [1, 2]},
        exits__max_count=2,
        training__micro_batch_size=1,
        **overrides,
    )


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["uniform", "auto"]),
    st.integers(0, 99),
    st.sampled_from([None, 1e-5, 1e-3]),
    st.sampled_from(["kv_recompute", "catch_up"]),
    st.booleans(),
)
def test_the_front_equals_trying_everything(
    split: str, seed: int, head_s: float | None, mode: str, is_limited: bool
) -> None:
    run = case(split, decode__mode=mode)
    profile, usage = profile_of(run, seed, head_s), UsagePrior()
    every = {(time, peak, round(decode, 1)) for time, peak, decode in everything(run, profile, usage)}
    if is_limited:
        peaks = sorted(peak for _, peak, _ in every)
        run = replace_keys(run, {"limits.device_memory_bytes": peaks[len(peaks) // 3]})
        every = {one for one in every if one[1] <= peaks[len(peaks) // 3]}
    front = pareto_front(run, profile, usage)
    assert found(front) == least(every)
    assert front.certificate.optimal
    times = [one.iteration_ns for one in front.points]
    assert times == sorted(times)


def test_a_forgotten_candidate_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the candidates of one mode, the front is another."""
    run = case("auto", exits__exit_forward="auto")
    profile = profile_of(run, 5, 1e-4)
    every = {(t, p, round(d, 1)) for t, p, d in everything(run, profile, UsagePrior())}
    assert found(pareto_front(run, profile, UsagePrior())) == least(every)
    monkeypatch.setattr(pareto, "_numbers", lambda model: range(2))
    assert found(pareto_front(run, profile, UsagePrior())) != least(every)


@pytest.mark.parametrize("head_s", [None, 1e-5])
def test_every_point_is_what_planning_its_keys_gives(head_s: float | None) -> None:
    run = case("auto", exits__head=["minimal", "norm"])
    profile = profile_of(run, 7, head_s)
    front = pareto_front(run, profile, UsagePrior())
    assert len(front.points) > 3
    for point in front.points:
        plan = make_plan(replace_keys(run, dict(point.keys)), profile)
        assert round(plan.prediction.iteration_time_s * 1e9) == point.iteration_ns
        peak = max(stage.memory.peak_bytes + stage.memory.process_base_bytes for stage in plan.stages)
        assert peak == point.peak_bytes
        assert [(one.layer, one.boundary) for one in plan.exits] == [
            (slot.layer, slot.boundary) for slot in point.exits
        ]
        if point.decode_ns is not None:
            assert plan.decode is not None
            mine = next(one for one in plan.decode.modes if one.mode == run.decode.mode)
            assert mine.seconds_per_token == pytest.approx(point.decode_ns / 1e9, rel=1e-9)


def test_too_many_splits_give_real_points_and_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    run = case("auto")
    profile = profile_of(run, 3, 1e-4)
    whole = pareto_front(run, profile, UsagePrior())
    monkeypatch.setattr(pareto, "MOST", 10)
    part = pareto_front(run, profile, UsagePrior())
    assert not part.certificate.optimal
    assert any("may lack points" in text for text in part.assumptions)
    # The fastest training is among them all the same, and nothing is better than the front.
    assert part.points[0].iteration_ns == whole.points[0].iteration_ns
    assert least(found(part) | found(whole)) == found(whole)


def test_what_is_supposed_is_said() -> None:
    run = case("uniform", exits__head=["minimal", "norm"], fill__policy="auto")
    texts = pareto_front(run, profile_of(run, 1, 1e-4), UsagePrior()).assumptions
    assert any("one kind of head" in text for text in texts)
    assert any("bubbles are not filled" in text for text in texts)
    texts = pareto_front(run, profile_of(run, 1, None), UsagePrior()).assumptions
    assert any("no decode costs" in text for text in texts)


def test_refusals() -> None:
    by_hand = make_run(exits__layers=[{"layer": 2}])
    with pytest.raises(SpecError, match="by hand"):
        pareto_front(by_hand, make_profile(by_hand), UsagePrior())
    small = case("uniform", limits__device_memory_bytes=1000)
    with pytest.raises(PlanInfeasible, match="device_memory_bytes is 1000 bytes"):
        pareto_front(small, profile_of(small, 1, None), UsagePrior())
