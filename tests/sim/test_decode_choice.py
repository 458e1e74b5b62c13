from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from builders import make_profile, make_run
from decode_cases import processes, with_decode_costs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from eeplan.errors import PlanInfeasible, ProfileError
from eeplan.plan import Decision
from eeplan.profile import OpProfile
from eeplan.sim import explain
from eeplan.sim.choice import Choice, wanted_kinds
from eeplan.sim.costs import CostModel, cost_model, stage_costs
from eeplan.sim.decode_choice import choose_for_decoding
from eeplan.sim.decode_depths import SegmentTable, fastest_depths
from eeplan.sim.decode_process import DecodeProcess, Exit, decode_process
from eeplan.sim.inference import decode_prediction, expected_latency
from eeplan.sim.layout import Layout, uniform_layout
from eeplan.sim.parameters import Head
from eeplan.sim.search import judge
from eeplan.spec import HEAD_KINDS, RunSpec
from eeplan.usage import UsagePrior, exit_shares, leave_curve

PRIORS = [
    UsagePrior(),
    UsagePrior(name="ramp", start=0.3, share=0.7, exponent=0.5),
    UsagePrior(name="ramp", share=0.9, exponent=3.0),
]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_dynamic_programming_finds_the_best_of_all_depths(data: st.DataObject) -> None:
    process = data.draw(processes())
    layout = Layout(process.layers_per_stage)
    kind = data.draw(st.sampled_from(HEAD_KINDS))
    mode = data.draw(st.sampled_from(["kv_recompute", "catch_up"]))
    limit, usage = data.draw(st.integers(0, 6)), data.draw(st.sampled_from(PRIORS))
    layers = layout.num_layers
    placements = _all_placements(layout)
    assume(placements)
    table = SegmentTable(process, mode, limit, kind, leave_curve(usage, 0.5, layers))
    counts = data.draw(st.sampled_from(sorted(placements)))
    expected = {}
    for depths in placements[counts]:
        placed = _with_exits(process, [Exit(depth, kind) for depth in depths])
        shares = exit_shares(usage, 0.5, depths, layers)
        expected[depths] = expected_latency(placed, shares, mode, limit, 1).ns_per_token
    ns, slots = fastest_depths(counts, layout, table)
    found = tuple(slot.depth for slot in slots)
    assert ns == pytest.approx(min(expected.values()), rel=1e-9)
    assert expected[found] == pytest.approx(ns, rel=1e-9)
    assert tuple(sum(slot.stage == stage for slot in slots) for stage in range(layout.num_stages)) == counts


def _all_placements(layout: Layout) -> dict[tuple[int, ...], set[tuple[int, ...]]]:
    """Every set of up to three depths, by the vectors of exits per stage that can read it."""
    found: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
    for number in (1, 2, 3):
        for depths in combinations(range(1, layout.num_layers), number):
            readers = [
                [s for s in range(layout.num_stages) if any(slot.depth == d for slot in layout.slots(s))]
                for d in depths
            ]
            for stages in product(*readers):
                counts = tuple(stages.count(stage) for stage in range(layout.num_stages))
                found.setdefault(counts, set()).add(depths)
    return found


def _with_exits(process: DecodeProcess, exits: list[Exit]) -> DecodeProcess:
    return replace(process, exits=tuple(exits))


def model_of(run: RunSpec, profile: OpProfile) -> CostModel:
    layout = uniform_layout(run.model.num_layers, run.parallel.pipeline_model_parallel_size)
    return cost_model(run, profile, layout, wanted_kinds(run.exits))


def chosen(run: RunSpec, usage: Any = None, **decode_costs: Any) -> tuple[Choice, CostModel]:
    model = model_of(run, with_decode_costs(make_profile(run), **decode_costs))
    return choose_for_decoding([model], usage or UsagePrior()), model


def count_decision(choice: Choice) -> Decision:
    return next(decision for decision in choice.decisions if decision.subject == "exits.count")


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(PRIORS),
    st.sampled_from([1, 2, 4]),
    st.floats(1e-5, 2e-3),
    st.sampled_from([0.0, 0.02, 9.0]),
)
def test_the_choice_is_the_best_of_all_that_the_limits_allow(
    usage: UsagePrior, stages: int, head_s: float, overhead: float
) -> None:
    run = make_run(
        parallel__pipeline_model_parallel_size=stages,
        exits={"count": "auto", "max_count": 3, "objective": "decode_speed_up"},
        limits__max_time_overhead=overhead,
    )
    choice, model = chosen(run, usage, head_s=head_s)
    head = Head("norm", tied=True)
    best = float(decode_process(model.profile, model.layout, (), "catch_up").full_ns)
    for counts, placements in _all_placements(model.layout).items():
        for mode in ("deferred", "eager"):
            composed = tuple(stage_costs(model, s, (head,) * c, mode) for s, c in enumerate(counts))
            candidate = judge(model, [(mode, composed)])[0]
            if explain.overhead(candidate, choice.baseline) > overhead:
                continue
            for depths in placements:
                exits = [Exit(depth, "norm") for depth in depths]
                shares = exit_shares(usage, 0.8, depths, 8)
                latency = decode_prediction(model.profile, model.layout, exits, shares, "catch_up", 8)
                best = min(best, latency.ns_per_token)
    depths = [placed.slot.depth for placed in choice.exits]
    exits = [Exit(depth, "norm") for depth in depths]
    shares = exit_shares(usage, 0.8, depths, 8)
    found = decode_prediction(model.profile, model.layout, exits, shares, "catch_up", 8)
    assert found.ns_per_token == pytest.approx(best, rel=1e-9)
    assert explain.overhead(choice.candidate, choice.baseline) <= max(overhead, 0.0)
    assert choice.certificate.optimal


def test_no_exit_pays_when_a_check_is_worth_many_layers() -> None:
    """facts 6: the planner may find that no exit pays and must say so, with numbers."""
    run = make_run(exits={"count": "auto", "objective": "decode_speed_up"}, limits__max_time_overhead=1.0)
    choice, _ = chosen(run, head_s=8e-3)
    why = count_decision(choice)
    assert choice.exits == ()
    assert choice.candidate == choice.baseline
    assert why.choice == "0"
    assert why.reason.startswith("no exit pays on this hardware for this model: ")
    assert "a check of head 'norm' takes as long as 8 layers" in why.reason
    assert "per token in catch_up with" in why.reason
    assert "assumed, not measured" in why.reason
    assert "per token" in why.rejected
    cheap, _ = chosen(run, head_s=1e-4)
    assert cheap.exits


def test_exits_that_nobody_uses_do_not_pay() -> None:
    run = make_run(exits={"count": "auto", "objective": "decode_speed_up"}, limits__max_time_overhead=1.0)
    choice, _ = chosen(run, UsagePrior(name="none"), head_s=1e-6)
    assert choice.exits == ()


def test_a_given_number_is_placed_where_decoding_gains_most() -> None:
    run = make_run(exits={"count": 1, "objective": "decode_speed_up"})
    late = UsagePrior(name="ramp", start=0.7, share=1.0)
    choice, _ = chosen(run, late, head_s=1e-4)
    assert [placed.slot.depth for placed in choice.exits] == [7]
    early, _ = chosen(run, UsagePrior(name="ramp", share=1.0, exponent=0.1), head_s=1e-4)
    assert [placed.slot.depth for placed in early.exits] == [1]
    placement = next(d for d in early.decisions if d.subject == "exits.placement")
    assert placement.choice == "after layer 1 (stage 0)"
    assert placement.reason.startswith("greatest decode speed-up of 28 placements")
    assert count_decision(early).reason == "set in the run file"


def test_limits_bind() -> None:
    run = make_run(
        exits={"count": "auto", "objective": "decode_speed_up", "head": "block"},
        limits__max_time_overhead=0.0,
    )
    choice, _ = chosen(run, row_s=0.0)
    assert choice.exits == ()
    assert "not even one exit stays within limits.max_time_overhead 0 %" in count_decision(choice).reason
    small = make_run(exits={"count": 2, "objective": "decode_speed_up"}, limits={"device_memory_bytes": 1000})
    with pytest.raises(PlanInfeasible, match="device_memory_bytes is 1000 bytes"):
        chosen(small)
    automatic = make_run(
        exits={"count": "auto", "objective": "decode_speed_up"}, limits={"device_memory_bytes": 1000}
    )
    with pytest.raises(PlanInfeasible, match="device_memory_bytes is 1000 bytes"):
        chosen(automatic)


def test_without_decode_costs_there_is_nothing_to_optimise() -> None:
    run = make_run(exits={"count": "auto", "objective": "decode_speed_up"})
    with pytest.raises(ProfileError, match=r"no decode costs.*run `eeplan profile`"):
        choose_for_decoding([model_of(run, make_profile(run))], UsagePrior())


def test_a_single_layer_has_no_room() -> None:
    run = make_run(
        model__num_layers=1,
        parallel__pipeline_model_parallel_size=1,
        exits={"count": "auto", "objective": "decode_speed_up"},
    )
    choice, _ = chosen(run)
    assert count_decision(choice).reason == "a single layer has no room for exits"
