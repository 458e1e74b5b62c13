from __future__ import annotations

from typing import Any

import pytest
from builders import make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.exhaustive import NaiveExit, NaiveVerdict, all_verdicts, modes_of, verdict

from eeplan.profile import OpProfile, Transfer
from eeplan.sim import solve as solve_module
from eeplan.sim.costs import cost_model, stage_costs
from eeplan.sim.layout import layout_of, uniform_layout
from eeplan.sim.parameters import Head
from eeplan.sim.search import Candidate, Search, best_slots, counted_search, judge, placed_search
from eeplan.spec import EXIT_FORWARDS, ExitForward, ExitsSpec, RunSpec

FIXED_SPLITS: list[Any] = ["uniform", [1, 3], [4, 2], [1, 3, 2], [3, 1, 1]]


def search_of(run: RunSpec, profile: OpProfile, num_exits: int) -> Search:
    model = cost_model(run, profile, layout_of(run), {run.exits.head})
    head = Head(run.exits.head, tied=not run.exits.untie_exit_output_weights)
    return counted_search([model], num_exits, lambda _: head, modes_of(run))


def as_verdict(run: RunSpec, profile: OpProfile, found: Candidate | None) -> NaiveVerdict:
    """The search's answer, judged by the oracle."""
    assert found is not None
    exits = [NaiveExit(slot.layer, slot.boundary, slot.stage) for slot in best_slots(found)]
    return verdict(run, profile, found.layout.layers_per_stage, exits, found.exit_forward)


@st.composite
def searches(draw: st.DrawFn) -> tuple[RunSpec, OpProfile, int]:
    split = draw(st.sampled_from([*FIXED_SPLITS, "auto", "auto"]))
    if isinstance(split, str):
        stages, layers = draw(st.sampled_from([(1, 4), (2, 4), (2, 6), (3, 6), (4, 4)]))
        if split == "auto":
            layers += draw(st.integers(0, 1))
    else:
        stages, layers = len(split), sum(split)
    run = make_run(
        parallel__layer_split=split,
        model__num_layers=layers,
        model__untie_embeddings_and_output_weights=draw(st.booleans()),
        parallel__pipeline_model_parallel_size=stages,
        parallel__data_parallel_size=draw(st.sampled_from([1, 1, 2])),
        parallel__p2p_communication=draw(st.sampled_from(["asynchronous", "rendezvous"])),
        parallel__gpus_per_node=draw(st.sampled_from([None, 2])),
        parallel__use_distributed_optimizer=draw(st.booleans()),
        parallel__overlap_grad_reduce=draw(st.booleans()),
        training__recompute_granularity=draw(st.sampled_from([None, "full"])),
        training__global_batch_size=4 * draw(st.integers(1, 5)),
        exits__head=draw(st.sampled_from(["minimal", "norm", "block"])),
        exits__untie_exit_output_weights=draw(st.booleans()),
        exits__exit_forward=draw(st.sampled_from(["auto", "deferred", "eager"])),
    )
    # Without jitter and latency, equal stages tie, so that the later criteria decide.
    latency_s = draw(st.sampled_from([0.0, 3e-4]))
    profile = make_profile(
        run,
        seed=draw(st.integers(0, 999)),
        jitter=draw(st.sampled_from([0.0, 0.7])),
        p2p_latency_s=latency_s,
        p2p_bandwidth_bytes_per_s=2e9 if latency_s else 1e18,
        process_base_bytes=0,
    )
    slow = Transfer(latency_s=3e-4, bandwidth_bytes_per_s=1e8)
    profile = profile.model_copy(update={"p2p_between_nodes": slow, "all_reduce_between_nodes": slow})
    most = 2 if (layers > 4 and split != "auto") or layers > 6 else 3
    return run, profile, draw(st.integers(1, min(most, layers - 1)))


@settings(max_examples=60, deadline=None)
@given(searches())
def test_the_search_equals_trying_everything(case: tuple[RunSpec, OpProfile, int]) -> None:
    run, profile, num_exits = case
    every = list(all_verdicts(run, profile, num_exits, modes_of(run)))
    outcome = search_of(run, profile, num_exits).best()
    mine, best = as_verdict(run, profile, outcome.best), min(every, key=lambda one: one.objective)
    assert mine.objective == best.objective
    assert outcome.best is not None
    assert (outcome.best.iteration_ns, outcome.best.peak_bytes) == (mine.iteration_ns, mine.peak_bytes)
    assert outcome.space_size == len(every)
    assert outcome.proof.optimal
    assert outcome.proof.settled
    assert outcome.proof.lower_bound_ns + outcome.best.overhead_ns == best.iteration_ns


@settings(max_examples=30, deadline=None)
@given(searches(), st.floats(0.0, 1.0))
def test_under_a_memory_limit_it_is_the_best_that_fits(
    case: tuple[RunSpec, OpProfile, int], where: float
) -> None:
    run, profile, num_exits = case
    every = list(all_verdicts(run, profile, num_exits, modes_of(run)))
    peaks = sorted({max(one.peak_bytes) for one in every})
    limit = peaks[0] - 1 + round(where * (peaks[-1] - peaks[0] + 1))
    fitting = [one for one in every if max(one.peak_bytes) <= limit]
    limits = run.limits.model_copy(update={"device_memory_bytes": limit})
    search = search_of(run.model_copy(update={"limits": limits}), profile, num_exits)
    outcome = search.best()
    assert max(search.smallest().peak_bytes) == peaks[0]
    fastest = min(every, key=lambda one: one.iteration_ns)
    if not fitting:
        assert outcome.best is None
        assert outcome.faster_but_too_large is not None
        return
    best = min(fitting, key=lambda one: one.objective)
    assert as_verdict(run, profile, outcome.best).objective == best.objective
    if outcome.faster_but_too_large is not None:
        assert outcome.faster_but_too_large.iteration_ns == fastest.iteration_ns
    else:
        assert best.iteration_ns == fastest.iteration_ns


@settings(max_examples=30, deadline=None)
@given(searches())
def test_second_is_the_best_with_other_exits_per_stage(case: tuple[RunSpec, OpProfile, int]) -> None:
    run, profile, num_exits = case
    search = search_of(run, profile, num_exits)
    best = search.best().best
    assert best is not None
    others = [
        one
        for one in all_verdicts(run, profile, num_exits, modes_of(run))
        if tuple(sum(spot.stage == stage for spot in one.exits) for stage in range(len(one.split)))
        != best.counts
    ]
    second = search.second(best)
    assert (second is None) == (not others)
    if second is not None:
        assert as_verdict(run, profile, second).objective == min(one.objective for one in others)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 999), st.sets(st.integers(1, 13), max_size=3), st.integers(1, 4), st.booleans())
def test_given_exits_get_the_split_that_suits_them(
    seed: int, places: set[int], stages: int, eager: bool
) -> None:
    """Exits stay where they are; which stage they are on follows from the split."""
    run = make_run(
        model__num_layers=7,
        parallel={"pipeline_model_parallel_size": stages, "layer_split": "auto"},
        exits__exit_forward="eager" if eager else "deferred",
    )
    profile = make_profile(run, seed=seed, jitter=0.7)
    # Odd places are after a layer, even ones before the next; one exit at most for each depth.
    by_depth = {(place + 1) // 2: place for place in places if 0 < (place + 1) // 2 < 7}
    spots = [(depth, place % 2 == 1) for depth, place in sorted(by_depth.items())]
    layers = [depth if after else depth + 1 for depth, after in spots]
    model = cost_model(run, profile, layout_of(run), {"norm"})
    search = placed_search([model], lambda _: [Head("norm", True)] * len(spots), layers, modes_of(run))
    outcome = search.best()
    verdicts = []
    for one in all_verdicts(run, profile, 0, modes_of(run)):
        stage_of = [stage for stage, count in enumerate(one.split) for _ in range(count)]
        exits = [
            NaiveExit(layer, "after" if after else "before", stage_of[layer - 1])
            for layer, (_, after) in zip(layers, spots, strict=True)
        ]
        verdicts.append(verdict(run, profile, one.split, exits, one.mode))
    best = min(verdicts, key=lambda one: (one.iteration_ns, max(one.peak_bytes)))
    assert outcome.best is not None
    assert outcome.best.iteration_ns == best.iteration_ns
    assert max(outcome.best.peak_bytes) == max(best.peak_bytes)
    assert outcome.space_size == len(verdicts)


def test_a_search_that_skips_the_best_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparisons above."""
    run = make_run(model__num_layers=4, parallel__pipeline_model_parallel_size=4)
    profile = make_profile(run)
    search = search_of(run, profile, 1)
    best = search.best().best
    assert best is not None
    skipping = [solve_module.without_counts(family, best.counts) for family in search._families(None)]
    monkeypatch.setattr(search, "_families", lambda limit_bytes: skipping)
    wrong = as_verdict(run, profile, search.best().best)
    right = min(all_verdicts(run, profile, 1, modes_of(run)), key=lambda one: one.objective)
    assert wrong.objective > right.objective


def test_a_search_that_runs_out_of_its_budget_proves_nothing() -> None:
    run = make_run(exits__count=3, parallel={"pipeline_model_parallel_size": 4, "layer_split": "auto"})
    profile = make_profile(run, jitter=0.4)
    families = search_of(run, profile, 3)._families(None)
    whole, proof = solve_module.solve(families)
    assert whole is not None
    assert proof.optimal
    assert proof.lower_bound_ns == whole.value.time_ns
    for budget in (1, 5, 20):
        found, proof = solve_module.solve(families, budget)
        assert not proof.optimal
        assert not proof.settled
        assert proof.lower_bound_ns <= whole.value.time_ns
        assert found is None or found.value.time_ns >= whole.value.time_ns


def unit_stages(**overrides: Any) -> tuple[RunSpec, OpProfile]:
    """P=4, M=64, backbone 1 + 2 and heads 0.25 + 0.5 (in ms), free messages and embedding."""
    head_seconds = (0.25e-3, 0.5e-3)
    run = make_run(
        parallel__pipeline_model_parallel_size=4, training__global_batch_size=128, exits__head="minimal"
    ).model_copy(update=overrides)
    seconds = {
        "embedding": (0.0, 0.0),
        "layer": (0.5e-3, 1e-3),
        "exit_minimal": head_seconds,
        "final_head": head_seconds,
    }
    profile = make_profile(
        run,
        op_seconds=seconds,
        p2p_latency_s=0.0,
        p2p_bandwidth_bytes_per_s=1e18,
        microbatch_overhead_s=0.0,
    )
    return run, profile


@pytest.mark.parametrize(
    ("counts", "mode", "extra"),
    [
        ((0, 1, 0, 0), "deferred", 0.75),
        ((0, 1, 0, 0), "eager", 0.75),
        ((0, 1, 1, 0), "deferred", 1.5),
        ((0, 1, 1, 0), "eager", 1.5),
        ((0, 2, 0, 0), "eager", 46.5),
        # Deferred, the two exits' forwards stand in the drain of the bottleneck, a quarter more.
        ((0, 2, 0, 0), "deferred", 46.75),
        ((0, 0, 0, 1), "deferred", 48.0),
        ((0, 0, 0, 1), "eager", 48.0),
    ],
)
def test_the_price_of_exits_per_stage(counts: tuple[int, ...], mode: ExitForward, extra: float) -> None:
    """The first minimal exit is nearly free except on the last stage; a second is not (EE-LLM 3.2)."""
    run, profile = unit_stages()
    model, head = cost_model(run, profile, uniform_layout(8, 4), {"minimal"}), Head("minimal", True)
    bare, candidate = judge(
        model,
        [
            (mode, tuple(stage_costs(model, i, (head,) * count, mode) for i, count in enumerate(numbers)))
            for numbers in ((0, 0, 0, 0), counts)
        ],
    )
    assert candidate.pipeline_ns - bare.pipeline_ns == round(extra * 1e6)


def test_two_minimal_exits_go_to_the_middle_stages() -> None:
    run, profile = unit_stages(exits=ExitsSpec(count=2, head="minimal", untie_exit_output_weights=True))
    best = search_of(run, profile, 2).best().best
    assert best is not None
    assert best.counts == (0, 1, 1, 0)
    assert best.exit_forward == "deferred"
    assert [slot.depth for slot in best_slots(best)] == [2, 5]


def test_a_tied_exit_uses_the_copy_that_a_stage_already_holds() -> None:
    """On the first stage it adds no replica, so one stage fewer takes part in the gradient's reduction."""
    run, profile = unit_stages(exits=ExitsSpec(count=2, head="minimal"))
    best = search_of(run, profile, 2).best().best
    assert best is not None
    assert best.counts[0] == 1


def test_a_free_split_makes_room_for_a_heavy_head() -> None:
    """A head of two layers moves one layer away from the last stage, and the exit follows it."""
    run = make_run(
        model__num_layers=10,
        parallel={"pipeline_model_parallel_size": 5},
        training__global_batch_size=128,
        exits={"count": 1, "head": "minimal", "untie_exit_output_weights": True},
    )
    two_layers, half = (1e-3, 2e-3), (0.25e-3, 0.5e-3)
    seconds = {"layer": (0.5e-3, 1e-3), "final_head": two_layers, "exit_minimal": half}
    profile = make_profile(run, op_seconds=seconds, p2p_latency_s=0.0, microbatch_overhead_s=0.0)
    even = search_of(run, profile, 1).best().best
    free = run.model_copy(update={"parallel": run.parallel.model_copy(update={"layer_split": "auto"})})
    best = search_of(free, profile, 1).best().best
    assert even is not None
    assert best is not None
    slowest = [max(s.forward_ns + s.backward_ns for s in found.stages) for found in (even, best)]
    assert slowest[0] == 6_000_000
    assert slowest[1] < 4_600_000
    assert best.iteration_ns < 0.8 * even.iteration_ns
    assert best.layout.layers_per_stage[-1] == 1


def test_the_order_of_exit_modes_decides_only_between_equals() -> None:
    run = make_run(exits__count=3, parallel__pipeline_model_parallel_size=4)
    profile = make_profile(run, jitter=0.5, seed=3)
    model = cost_model(run, profile, uniform_layout(8, 4), {"norm"})
    head = Head("norm", True)
    times = []
    for modes in (EXIT_FORWARDS, tuple(reversed(EXIT_FORWARDS))):
        best = counted_search([model], 3, lambda _: head, modes).best().best
        assert best is not None
        times.append(best.iteration_ns)
    assert times[0] == times[1]
