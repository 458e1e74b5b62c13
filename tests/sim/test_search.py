from __future__ import annotations

from typing import Any

import pytest
from builders import make_profile, make_run
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.exhaustive import NaiveExit, NaiveVerdict, all_verdicts, modes_of, verdict

from eeplan.profile import OpProfile
from eeplan.sim import search as search_module
from eeplan.sim.costs import cost_model
from eeplan.sim.layout import layout_of, uniform_layout
from eeplan.sim.parameters import Head
from eeplan.sim.search import Outcome, search
from eeplan.spec import ExitForward, ExitsSpec, RunSpec


def run_search(run: RunSpec, profile: OpProfile, num_exits: int) -> Outcome:
    model = cost_model(run, profile, layout_of(run), {run.exits.head})
    head = Head(run.exits.head, tied=not run.exits.untie_exit_output_weights)
    return search(model, num_exits, head, modes_of(run))


def as_verdict(run: RunSpec, profile: OpProfile, outcome: Outcome) -> NaiveVerdict:
    """The search's answer, judged by the oracle."""
    assert outcome.best is not None
    exits = [NaiveExit(slot.layer, slot.boundary, slot.stage) for slot in outcome.slots]
    split = layout_of(run).layers_per_stage
    return verdict(run, profile, split, exits, outcome.best.exit_forward)


@st.composite
def searches(draw: st.DrawFn) -> tuple[RunSpec, OpProfile, int]:
    split = draw(st.sampled_from(["uniform", (1, 3), (4, 2), (1, 3, 2), (3, 1, 1)]))
    if split == "uniform":
        stages, layers = draw(st.sampled_from([(1, 4), (2, 4), (2, 6), (3, 6), (4, 4)]))
    else:
        stages, layers = len(split), sum(split)
    run = make_run(
        parallel__layer_split=split,
        model__num_layers=layers,
        model__untie_embeddings_and_output_weights=draw(st.booleans()),
        parallel__pipeline_model_parallel_size=stages,
        parallel__data_parallel_size=draw(st.sampled_from([1, 1, 2])),
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
    return run, profile, draw(st.integers(1, 2 if layers > 4 else 3))


@settings(max_examples=60, deadline=None)
@given(searches())
def test_the_search_equals_trying_everything(case: tuple[RunSpec, OpProfile, int]) -> None:
    run, profile, num_exits = case
    every = list(all_verdicts(run, profile, num_exits, modes_of(run)))
    outcome = run_search(run, profile, num_exits)
    mine, best = as_verdict(run, profile, outcome), min(every, key=lambda one: one.objective)
    assert mine.objective == best.objective
    assert outcome.best is not None
    assert (outcome.best.iteration_ns, outcome.best.peak_bytes) == (mine.iteration_ns, mine.peak_bytes)
    assert outcome.space_size == len(every)


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
    outcome = run_search(run.model_copy(update={"limits": limits}), profile, num_exits)
    assert max(outcome.smallest.peak_bytes) == peaks[0]
    if not fitting:
        assert outcome.best is None
        return
    best = min(fitting, key=lambda one: one.objective)
    assert as_verdict(run, profile, outcome).objective == best.objective
    faster = [one for one in every if one.iteration_ns < best.iteration_ns]
    assert (outcome.faster_but_too_large is not None) == bool(faster)


def test_a_search_that_skips_the_best_counts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison above."""
    run = make_run(model__num_layers=4, parallel__pipeline_model_parallel_size=4)
    profile = make_profile(run)
    best = run_search(run, profile, 1).best
    assert best is not None
    complete = search_module._counts

    def incomplete(num_exits: int, room: Any) -> Any:
        return (counts for counts in complete(num_exits, room) if counts != best.counts)

    monkeypatch.setattr(search_module, "_counts", incomplete)
    wrong = as_verdict(run, profile, run_search(run, profile, 1))
    right = min(all_verdicts(run, profile, 1, modes_of(run)), key=lambda one: one.objective)
    assert wrong.objective > right.objective


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
    model = cost_model(run, profile, uniform_layout(8, 4), {"minimal"})
    composed = list(search_module._composed(model, [(0, 0, 0, 0), counts], Head("minimal", True), [mode]))
    bare, candidate = search_module.judge(model, composed)
    assert candidate.pipeline_ns - bare.pipeline_ns == round(extra * 1e6)


def test_two_minimal_exits_go_to_the_middle_stages() -> None:
    run, profile = unit_stages(exits=ExitsSpec(count=2, head="minimal", untie_exit_output_weights=True))
    outcome = run_search(run, profile, 2)
    assert outcome.best is not None
    assert outcome.best.counts == (0, 1, 1, 0)
    assert outcome.best.exit_forward == "deferred"
    assert [slot.depth for slot in outcome.slots] == [2, 5]


def test_a_tied_exit_uses_the_copy_that_a_stage_already_holds() -> None:
    """On the first stage it adds no replica, so one stage fewer takes part in the gradient's reduction."""
    run, profile = unit_stages(exits=ExitsSpec(count=2, head="minimal"))
    outcome = run_search(run, profile, 2)
    assert outcome.best is not None
    assert outcome.best.counts[0] == 1


def test_the_answer_does_not_depend_on_the_order_of_exit_modes() -> None:
    run = make_run(exits__count=3, parallel__pipeline_model_parallel_size=4)
    profile = make_profile(run, jitter=0.5, seed=3)
    model = cost_model(run, profile, uniform_layout(8, 4), {"norm"})
    head = Head("norm", True)
    forward = search(model, 3, head, ("deferred", "eager"))
    backward = search(model, 3, head, ("eager", "deferred"))
    assert (forward.best, forward.slots) == (backward.best, backward.slots)
