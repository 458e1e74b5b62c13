"""Decode speed-up with a free split: the joint search against every set of exits under every split."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from builders import make_plan, make_profile, make_run
from decode_cases import with_decode_costs
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.exhaustive import NaiveVerdict, all_verdicts, modes_of, splits_of

from eeplan.errors import PlanInfeasible
from eeplan.plan import Plan
from eeplan.profile import OpProfile
from eeplan.sim import depth_search
from eeplan.sim.costs import cost_model
from eeplan.sim.decode_choice import choose_for_decoding
from eeplan.sim.decode_depths import SegmentTable
from eeplan.sim.decode_process import Exit, decode_process
from eeplan.sim.depth_search import Allowed, allowed_sets
from eeplan.sim.inference import decode_prediction
from eeplan.sim.layout import layout_of, uniform_layout
from eeplan.sim.parameters import Head
from eeplan.spec import RunSpec, replace_keys
from eeplan.usage import UsagePrior, exit_shares, leave_curve

PRIORS = [UsagePrior(), UsagePrior(name="ramp", start=0.3, share=0.7, exponent=0.5)]


def decode_ns(run: RunSpec, profile: OpProfile, usage: UsagePrior, depths: tuple[int, ...]) -> float:
    layers = run.model.num_layers
    exits = [Exit(depth, "norm") for depth in depths]
    shares = exit_shares(usage, run.decode.threshold, depths, layers)
    layout = uniform_layout(layers, 1)
    return decode_prediction(profile, layout, exits, shares, "catch_up", 8).ns_per_token


def depths_of(one: NaiveVerdict) -> tuple[int, ...]:
    return tuple(sorted(spot.depth for spot in one.exits))


def planned(run: RunSpec, profile: OpProfile, usage: UsagePrior) -> Plan | None:
    try:
        return make_plan(replace_keys(run, {"decode.prior": usage.model_dump(mode="json")}), profile)
    except PlanInfeasible:
        return None


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_the_joint_search_equals_trying_every_split(data: st.DataObject) -> None:
    stages = data.draw(st.sampled_from([1, 2, 3]))
    count = data.draw(st.sampled_from([1, 2, "auto"]))
    run = make_run(
        model__num_layers=5,
        parallel={"pipeline_model_parallel_size": stages, "layer_split": "auto"},
        exits={"count": count, "max_count": 2, "objective": "decode_speed_up"},
        limits__max_time_overhead=data.draw(st.sampled_from([0.01, 0.05, 0.2])),
    )
    usage = data.draw(st.sampled_from(PRIORS))
    profile = make_profile(run, seed=data.draw(st.integers(0, 99)), jitter=0.5, process_base_bytes=0)
    profile = with_decode_costs(profile, head_s=data.draw(st.sampled_from([1e-5, 1e-3])))
    numbers = (1, 2) if count == "auto" else (count,)
    bare = list(all_verdicts(run, profile, 0, ("deferred",)))
    every = [one for number in numbers for one in all_verdicts(run, profile, number, modes_of(run))]
    if data.draw(st.booleans()):
        peaks = sorted(max(one.peak_bytes) for one in [*bare, *every])
        limit = peaks[data.draw(st.integers(0, len(peaks) - 1))]
        run = replace_keys(run, {"limits.device_memory_bytes": limit})
        bare = [one for one in bare if max(one.peak_bytes) <= limit]
        every = [one for one in every if max(one.peak_bytes) <= limit]
    plan = planned(run, profile, usage)
    if count == "auto" and bare:
        base = min(one.iteration_ns for one in bare)
        every = [one for one in every if one.iteration_ns / base - 1 <= run.limits.max_time_overhead]
    if not bare or (count != "auto" and not every):
        assert plan is None
        return
    assert plan is not None
    assert plan.certificate.optimal
    known = {depths: decode_ns(run, profile, usage, depths) for depths in {depths_of(one) for one in every}}
    full = decode_ns(run, profile, usage, ())
    if count == "auto" and min(known.values(), default=full) >= full:
        assert plan.exits == ()
        return
    depths = tuple(one.depth for one in plan.exits)
    assert known[depths] == pytest.approx(min(known.values()), rel=1e-9)
    # Among trainings with these depths, the fastest, then the one with the least peak.
    mine = [one for one in every if depths_of(one) == depths]
    best = min((one.iteration_ns, one.mode == "eager", max(one.peak_bytes)) for one in mine)
    peak = max(stage.memory.peak_bytes for stage in plan.stages)
    assert (round(plan.prediction.iteration_time_s * 1e9), plan.exit_forward == "eager", peak) == best
    assert tuple(s.last_layer - s.first_layer + 1 for s in plan.stages) in set(splits_of(run))


def test_sets_come_in_the_order_of_their_decode_time() -> None:
    run = make_run(exits={"count": 3, "objective": "decode_speed_up"})
    profile = with_decode_costs(make_profile(run))
    model = cost_model(run, profile, layout_of(run), {"norm"})
    process = decode_process(profile, model.layout, (Exit(1, "norm"),), "catch_up")
    table = SegmentTable(process, "catch_up", 8, "norm", leave_curve(PRIORS[1], 0.8, 8))
    found = list(allowed_sets(3, table, Allowed([model], Head("norm", True), ("deferred",), None)))
    assert {one.depths for one in found} == set(combinations(range(1, 8), 3))
    times = [one.decode_ns for one in found]
    assert np.all(np.diff(times) > -1e-6)


def test_splitting_first_loses_what_the_joint_search_finds() -> None:
    """Splits 4, 2 and 3, 3 are as fast without exits; one has room for a shallow exit, one for a deep one."""
    layer, nothing = (5e-4, 1e-3), (0.0, 0.0)
    seconds = {"layer": layer, "exit_norm": layer, "final_head": layer, "embedding": nothing}
    lost = 0
    for exponent in (0.01, 8.0):
        run = make_run(
            model__num_layers=6,
            exits={"count": "auto", "max_count": 1, "objective": "decode_speed_up"},
            training__global_batch_size=128,
            decode__prior={"name": "ramp", "share": 1.0, "exponent": exponent},
            parallel={"pipeline_model_parallel_size": 2, "layer_split": "auto"},
        )
        profile = with_decode_costs(make_profile(run, op_seconds=seconds), head_s=1e-5)
        joint = make_plan(run, profile)
        bare = make_plan(replace_keys(run, {"exits.count": 0}), profile)
        split = [stage.last_layer - stage.first_layer + 1 for stage in bare.stages]
        after = make_plan(replace_keys(run, {"parallel.layer_split": split}), profile)
        depths = [[one.depth for one in plan.exits] for plan in (joint, after)]
        assert joint.certificate.optimal
        assert joint.prediction.time_overhead <= 0.05
        lost += depths[0] != depths[1]
    assert lost


def test_a_search_out_of_questions_says_that_it_proved_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the certificate."""
    run = make_run(exits={"count": 2, "objective": "decode_speed_up"})
    model = cost_model(run, with_decode_costs(make_profile(run)), layout_of(run), {"norm"})
    assert choose_for_decoding([model], UsagePrior()).certificate.optimal
    monkeypatch.setattr(depth_search, "QUESTIONS", 5)
    choice = choose_for_decoding([model], UsagePrior())
    assert choice.exits
    monkeypatch.setattr(depth_search, "some_within", lambda *_: None)
    with pytest.raises((PlanInfeasible, AssertionError)):
        choose_for_decoding([model], UsagePrior())
