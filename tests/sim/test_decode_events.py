from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decode_cases import constant, draw_depths, make_process, processes, usages
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim.decode_events import simulate_decode
from eeplan.sim.decode_process import RowCosts
from eeplan.spec import DECODE_MODES

TWO_EXITS = (((1, "norm", 0), (3, "norm", 0)), (4,))


def test_full_runs_every_layer_once_and_no_exit() -> None:
    trace = simulate_decode(make_process(*TWO_EXITS), "full", [1, 3, 4])
    assert trace.done_ns == 3 * (50 + 4 * 1000 + 900)
    assert trace.emitted_ns == (4950, 9900, 14850)
    assert trace.checks == 0
    assert (trace.computed == 1).all()


def test_kv_recompute_by_hand() -> None:
    """Leave after 1, after 3, then all layers: 1, 2 and 3 rows from the first layer on."""
    trace = simulate_decode(make_process(*TWO_EXITS), "kv_recompute", [1, 3, 4], recompute_limit=8)
    steps = [
        50 + 1000 + 700,
        50 + 3 * 1100 + 2 * 700,
        50 + 4 * 1200 + 2 * 700 + 900,
    ]
    assert trace.emitted_ns == tuple(np.cumsum(steps))
    assert trace.computed.tolist() == [[3, 2, 2, 1], [2, 2, 2, 1], [1, 1, 1, 1]]
    assert trace.checks == 5


def test_catch_up_by_hand() -> None:
    """The first token waits after layer 1, is taken along to layer 3 by the second, and on by the third."""
    trace = simulate_decode(make_process(*TWO_EXITS), "catch_up", [1, 3, 4], recompute_limit=8)
    steps = [
        50 + 1000 + 700,
        50 + 1000 + 2 * 1100 + 2 * 700,
        50 + 3 * 1000 + 1200 + 2 * 700 + 900,
    ]
    assert trace.emitted_ns == tuple(np.cumsum(steps))
    assert (trace.computed == 1).all()


def test_the_limit_forces_a_pass_through_all_layers_but_not_another_exit() -> None:
    trace = simulate_decode(make_process(*TWO_EXITS), "kv_recompute", [1, 1, 1], recompute_limit=1)
    forced = 50 + 4 * 1100 + 700
    assert np.diff((0, *trace.emitted_ns)).tolist() == [1750, forced, 1750]
    assert trace.computed.tolist() == [[2, 1, 1, 1], [1, 1, 1, 1], [1, 0, 0, 0]]


def test_a_block_head_runs_on_all_rows_also_after_the_token_is_emitted() -> None:
    heads = {"norm": constant(700), "block": RowCosts((1, 2), (2000, 2500))}
    process = make_process(((1, "norm", 0), (3, "block", 0)), heads=heads)
    trace = simulate_decode(process, "kv_recompute", [1, 1], recompute_limit=1)
    assert trace.done_ns == (50 + 1000 + 700) + (50 + 4 * 1100 + 700 + 2500)
    assert trace.checks == 1 + 1 + 2


def test_pipeline_by_hand() -> None:
    """Two stages of two layers, an exit after layer 1: the second token starts when stage 1 is free."""
    process = make_process(((1, "norm", 0),), (2, 2), overhead_ns=10, message_ns=100, return_ns=30)
    trace = simulate_decode(process, "pipeline", [1, 4, 4])
    first = 10 + 50 + 1000 + 700
    free = first + 1000
    second_stage = free + 100 + 10 + 2000
    # The second token reaches stage 2 at 2 x free + 100, later than that stage is done with the first.
    assert 2 * free + 100 > second_stage
    second = 2 * free + 100 + 10 + 2000 + 900
    assert trace.emitted_ns == (first, second, second + 30 + free + 100 + 10 + 2000 + 900)
    assert trace.done_ns == trace.emitted_ns[-1]
    assert trace.checks == 3


def test_a_token_waits_for_a_stage_that_fills_an_older_ones_keys_and_values() -> None:
    process = make_process(((1, "norm", 0),), (1, 5))
    trace = simulate_decode(process, "pipeline", [1, 6])
    stage_1 = 50 + 1000 + 700
    assert trace.emitted_ns == (stage_1, stage_1 + 5000 + 5000 + 900)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_token_passes_every_layer_once(data: st.DataObject) -> None:
    """Counted: catch_up and the pipeline never run a pair twice, and miss only tokens that still wait."""
    process = data.draw(processes())
    usage = data.draw(usages(process))
    depths = draw_depths(process, usage, 40, seed=data.draw(st.integers(0, 99)))
    limit = data.draw(st.integers(0, 6))
    assert (simulate_decode(process, "pipeline", depths).computed == 1).all()
    assert (simulate_decode(process, "full", depths).computed == 1).all()
    caught_up = simulate_decode(process, "catch_up", depths, limit).computed
    assert caught_up.max() == 1
    complete = caught_up.all(axis=1)
    assert not complete.all() or depths[-1] == process.num_layers or limit == 0 or len(depths) > limit
    still_waiting = len(depths) - int(np.flatnonzero(complete)[-1]) - 1 if complete.any() else len(depths)
    assert complete[: len(depths) - still_waiting].all()
    assert still_waiting <= limit
    closed = simulate_decode(process, "catch_up", [*depths, process.num_layers], limit).computed
    assert (closed == 1).all()


def test_recomputation_does_run_pairs_twice() -> None:
    """Negative control of the count."""
    computed = simulate_decode(make_process(*TWO_EXITS), "kv_recompute", [1, 4], recompute_limit=4).computed
    assert computed.max() == 2


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_catch_up_is_never_slower_and_never_does_more(data: st.DataObject) -> None:
    process = data.draw(processes())
    usage = data.draw(usages(process))
    depths = draw_depths(process, usage, 40, seed=data.draw(st.integers(0, 99)))
    limit = data.draw(st.integers(0, 12))
    recomputed = simulate_decode(process, "kv_recompute", depths, limit)
    caught_up = simulate_decode(process, "catch_up", depths, limit)
    assert all(a <= b for a, b in zip(caught_up.emitted_ns, recomputed.emitted_ns, strict=True))
    assert (caught_up.computed <= recomputed.computed).all()
    assert caught_up.checks <= recomputed.checks


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_pipeline_is_no_faster_than_its_work_over_its_stages(data: st.DataObject) -> None:
    process = data.draw(processes())
    usage = data.draw(usages(process))
    depths = draw_depths(process, usage, 30, seed=1)
    trace = simulate_decode(process, "pipeline", depths)
    single = replace(
        process,
        exits=tuple(replace(exit_, stage=0) for exit_ in process.exits),
        layers_per_stage=(process.num_layers,),
        step_overhead_ns=0,
    )
    on_one = simulate_decode(single, "pipeline", depths)
    assert trace.done_ns * len(process.layers_per_stage) >= on_one.done_ns
    assert trace.checks == on_one.checks
    assert list(trace.emitted_ns) == sorted(trace.emitted_ns)


@pytest.mark.parametrize("mode", DECODE_MODES)
def test_an_unknown_exit_is_refused(mode: str) -> None:
    with pytest.raises(AssertionError, match=r"tokens leave at \[2\], exits are at \(1, 3, 4\)"):
        simulate_decode(make_process(*TWO_EXITS), mode, [1, 2])  # type: ignore[arg-type]
