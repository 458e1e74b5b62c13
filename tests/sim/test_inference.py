from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from decode_cases import constant, draw_depths, make_process, make_shares, processes, usages
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from oracles import decode_cycles

from eeplan.sim.decode_events import DecodeTrace, simulate_decode
from eeplan.sim.decode_pipeline import expected_pipeline_ns, token_paths
from eeplan.sim.decode_process import DecodeProcess, RowCosts, row_costs
from eeplan.sim.inference import Latency, expected_latency, waiting_distribution
from eeplan.spec import DecodeMode
from eeplan.usage import ExitShares

EARLY_MODES: tuple[DecodeMode, ...] = ("kv_recompute", "catch_up", "pipeline")
WAITING_MODES: tuple[DecodeMode, ...] = ("kv_recompute", "catch_up")


def predict(process: DecodeProcess, usage: ExitShares, mode: DecodeMode, limit: int = 8) -> Latency:
    return expected_latency(process, usage, mode, limit, process.full_ns)


def batch_means(trace: DecodeTrace, batches: int = 20) -> tuple[float, float]:
    """Mean time per token and its standard error; the first batch is left out."""
    times = np.array((0, *trace.emitted_ns), dtype=np.float64)
    marks = np.linspace(0, len(trace.emitted_ns), batches + 1).astype(int)
    means = (np.diff(times[marks]) / np.diff(marks))[1:]
    return float(means.mean()), float(means.std(ddof=1) / len(means) ** 0.5)


def standard_errors_off(expected_ns: float, trace: DecodeTrace) -> float:
    mean, error = batch_means(trace)
    return abs(expected_ns - mean) / (error + 1e-3 * mean)


# Drawing the same cases every time keeps a bound of five standard errors from failing by chance.
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_the_expectation_is_what_the_event_simulation_averages_to(data: st.DataObject) -> None:
    process = data.draw(processes())
    usage = data.draw(usages(process, least_final=0.05))
    limit = data.draw(st.integers(0, 12))
    depths = draw_depths(process, usage, 2000, seed=data.draw(st.integers(0, 99)))
    for mode in EARLY_MODES:
        trace = simulate_decode(process, mode, depths, limit)
        latency = predict(process, usage, mode, limit)
        assert standard_errors_off(latency.ns_per_token, trace) < 5, mode
        assert latency.layer_rows_per_token == pytest.approx(trace.computed.sum() / 2000, rel=0.1)
        assert latency.checks_per_token == pytest.approx(trace.checks / 2000, rel=0.15, abs=0.05)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_waiting_modes_equal_the_sum_over_all_cycles(data: st.DataObject) -> None:
    """No statistics: every sequence of exits between two passes through all layers, weighted."""
    process = data.draw(processes(max_stages=2))
    assume(len(process.exits) <= 3)
    usage = data.draw(usages(process))
    limit = data.draw(st.integers(0, 3))
    for mode in WAITING_MODES:
        expected = decode_cycles.ns_per_token(process, usage, mode, limit)
        assert predict(process, usage, mode, limit).ns_per_token == pytest.approx(expected, rel=1e-9)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_the_pipeline_equals_the_sum_over_all_cycles(data: st.DataObject) -> None:
    process = data.draw(processes(max_stages=3, min_exits=1))
    process = replace(process, exits=process.exits[:2])
    early = [0.08, 0.05][: len(process.exits)]
    usage = make_shares(process, early)
    expected = decode_cycles.pipeline_ns_per_token(process, usage, longest=8)
    assert predict(process, usage, "pipeline").ns_per_token == pytest.approx(expected, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_a_sequence_without_chance_is_predicted_exactly(data: st.DataObject) -> None:
    """All tokens leave at the same exit: whole cycles take the expected time to the nanosecond."""
    process = data.draw(processes())
    limit = data.draw(st.integers(0, 9))
    taken = data.draw(st.integers(0, len(process.exits)))
    early = [float(index == taken) for index in range(len(process.exits))]
    usage, depth = make_shares(process, early), process.depths[taken]
    cycles = 4 * (limit + 1)
    for mode in WAITING_MODES:
        trace = simulate_decode(process, mode, [depth] * cycles, limit)
        assert predict(process, usage, mode, limit).ns_per_token * cycles == pytest.approx(
            trace.done_ns, rel=1e-12
        )
    first, second = (simulate_decode(process, "pipeline", [depth] * n).done_ns for n in (60, 80))
    assert predict(process, usage, "pipeline").ns_per_token * 20 == pytest.approx(second - first, rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_catch_up_is_never_predicted_slower_than_kv_recompute(data: st.DataObject) -> None:
    process = data.draw(processes())
    usage = data.draw(usages(process))
    limit = data.draw(st.integers(0, 40))
    recomputed = predict(process, usage, "kv_recompute", limit)
    caught_up = predict(process, usage, "catch_up", limit)
    assert caught_up.ns_per_token <= recomputed.ns_per_token * (1 + 1e-12)
    assert caught_up.layer_rows_per_token <= process.num_layers * (1 + 1e-12)


def test_falling_costs_would_break_that() -> None:
    """Negative control: it needs costs that do not fall with rows, which ``row_costs`` sees to."""
    falling = make_process(((1, "norm", 0), (3, "norm", 0)), layer=RowCosts((1, 2, 16), (1000, 400, 400)))
    usage = make_shares(falling, [0.4, 0.4])
    recomputed, caught_up = (predict(falling, usage, mode).ns_per_token for mode in WAITING_MODES)
    assert caught_up > recomputed
    assert row_costs([(16, 400e-9), (1, 1000e-9), (2, 400e-9)]).ns == (999, 999, 999)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_pipelines_speed_up_is_at_most_its_stages(data: st.DataObject) -> None:
    """Where a check costs no less than the final head; messages and a share of the work only slow it down."""
    process = data.draw(processes())
    process = replace(process, heads=dict.fromkeys(process.heads, process.final_head))
    usage = data.draw(usages(process))
    latency = predict(process, usage, "pipeline")
    assert latency.speed_up <= len(process.layers_per_stage) * (1 + 1e-9)


def test_a_bound_below_the_stages_would_be_noticed() -> None:
    """Negative control: equal stages that all tokens leave at the first do reach P."""
    process = make_process(((1, "norm", 0),), (1, 1, 1, 1), embedding_ns=0, head_ns=0, final_ns=0)
    assert predict(process, make_shares(process, [1.0]), "pipeline").speed_up == 4.0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_waiting_only_adds_to_the_papers_pipeline_latency(data: st.DataObject) -> None:
    """EE-LLM 4: max(time to the exit, stage 1's forward), exact where stage 1 is the slowest."""
    process = data.draw(processes())
    usage = data.draw(usages(process))
    without_waiting = papers_pipeline_ns(process, usage.all)
    expected = expected_pipeline_ns(process, usage.all)
    assert expected >= without_waiting * (1 - 1e-9)
    paths = token_paths(process)
    slowest_later = max((ns for path in paths for ns in path.work_ns[1:]), default=0)
    if slowest_later <= min(path.work_ns[0] for path in paths):
        assert expected == pytest.approx(without_waiting, rel=1e-9)


def papers_pipeline_ns(process: DecodeProcess, shares: Sequence[float]) -> float:
    total = 0.0
    for path, share in zip(token_paths(process), shares, strict=True):
        to_exit = sum(path.work_ns[: path.stage]) + path.stage * process.message_ns + path.until_emitted_ns
        to_exit += process.return_ns if path.stage else 0
        total += share * max(to_exit, path.work_ns[0])
    return total


def test_the_papers_formula_alone_misses_waiting() -> None:
    """Negative control: with a slow second stage, tokens that go deep wait for it."""
    process = make_process(((1, "norm", 0),), (1, 5))
    usage = make_shares(process, [0.8])
    depths = draw_depths(process, usage, 4000, seed=3)
    trace = simulate_decode(process, "pipeline", depths)
    assert standard_errors_off(papers_pipeline_ns(process, usage.all), trace) > 20
    assert standard_errors_off(predict(process, usage, "pipeline").ns_per_token, trace) < 5


def test_forgetting_the_forced_pass_would_be_noticed() -> None:
    """Negative control: a far higher limit is another answer."""
    process = make_process(((2, "norm", 0),), (8,), layer=RowCosts((1, 2), (1000, 1500)))
    usage = make_shares(process, [0.9])
    trace = simulate_decode(process, "catch_up", draw_depths(process, usage, 4000, seed=5), 3)
    assert standard_errors_off(predict(process, usage, "catch_up", 3).ns_per_token, trace) < 5
    assert standard_errors_off(predict(process, usage, "catch_up", 300).ns_per_token, trace) > 20


@settings(deadline=None)
@given(st.floats(0.0, 1.0), st.integers(0, 40))
def test_the_waiting_distribution_is_stationary(early: float, limit: int) -> None:
    here = waiting_distribution(early, limit)
    moved = np.zeros_like(here)
    moved[1:] = early * here[:-1]
    moved[0] = (1.0 - early) * here[:-1].sum() + here[-1]
    assert moved == pytest.approx(here, abs=1e-12)
    assert here.sum() == pytest.approx(1.0)


def test_without_exits_all_modes_are_the_full_model() -> None:
    process = make_process((), (4,), overhead_ns=17)
    for mode in (*EARLY_MODES, "full"):
        latency = predict(process, make_shares(process, []), mode)
        assert (latency.speed_up, latency.layer_rows_per_token, latency.mean_depth) == (1.0, 4.0, 4.0)
        assert latency.checks_per_token == 0


def test_threshold_one_checks_nothing_but_a_lower_one_pays_for_checks_in_vain() -> None:
    process = make_process(((1, "norm", 0), (2, "block", 0)))
    never = make_shares(process, [0.0, 0.0], threshold=1.0)
    in_vain = make_shares(process, [0.0, 0.0], threshold=0.9)
    for mode in EARLY_MODES:
        assert predict(process, never, mode).speed_up == 1.0
        latency = predict(process, in_vain, mode)
        assert latency.ns_per_token == process.full_ns + 2 * 700
        assert latency.checks_per_token == 2


def test_a_head_worth_many_layers_makes_exits_a_loss() -> None:
    """facts 6: a head of 49,152 x 576 takes as long as 8 of the 30 layers."""
    process = make_process(((20, "norm", 0),), (30,), head_ns=8000, final_ns=8000, layer=constant(1000))
    usage = make_shares(process, [0.4])
    for mode in EARLY_MODES:
        assert predict(process, usage, mode).speed_up < 1.0
    cheap = replace(process, heads=dict.fromkeys(process.heads, constant(500)))
    assert predict(cheap, usage, "catch_up").speed_up > 1.0


def test_rows_between_and_beyond_the_measured_ones_are_on_the_line() -> None:
    costs = row_costs([(1, 1e-6), (2, 1.2e-6), (4, 1.6e-6), (8, 3.2e-6)])
    assert costs.table(10) == (1000, 1200, 1400, 1600, 2000, 2400, 2800, 3200, 3600, 4000)
    assert costs.unmeasured(10) == "3, 5, 6, 7 rows interpolated and 9 to 10 rows extrapolated"
    assert costs.unmeasured(2) == ""
    assert row_costs([(1, 1e-6)]).table(3) == (1000, 1000, 1000)
    assert all(a <= b for a, b in pairwise(costs.table(40)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9999), min_size=1, max_size=6))
def test_falling_measurements_are_levelled_by_the_closest_costs(ns: list[int]) -> None:
    rows = [2**power for power in range(1, len(ns) + 1)]
    costs = row_costs((r, n * 1e-9) for r, n in zip(rows, ns, strict=True))
    assert list(costs.ns) == sorted(costs.ns)
    assert sum(costs.ns) == pytest.approx(sum(ns), abs=len(ns))
    if ns == sorted(ns):
        assert list(costs.ns) == ns
    # Nothing that does not fall is closer: compared with every constant and with the running maximum.
    distance = sum((a - b) ** 2 for a, b in zip(costs.ns, ns, strict=True)) ** 0.5
    others = [[value] * len(ns) for value in ns] + [list(np.maximum.accumulate(ns))]
    assert all(distance <= sum((a - b) ** 2 for a, b in zip(o, ns, strict=True)) ** 0.5 + 3 for o in others)


def test_a_single_row_keeps_its_measured_cost() -> None:
    assert row_costs([(1, 300e-9), (2, 900e-9), (4, 700e-9), (8, 1000e-9)]).ns == (300, 800, 800, 1000)


def test_shares_of_other_exits_are_refused() -> None:
    process = make_process(((1, "norm", 0),))
    other = make_shares(make_process(((2, "norm", 0),)), [0.5])
    with pytest.raises(AssertionError, match="belong together"):
        predict(process, other, "catch_up")
