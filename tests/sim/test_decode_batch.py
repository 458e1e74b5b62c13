"""Several sequences at once: against single sequences played layer by layer, and where costs are simple."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decode_cases import draw_depths, processes, usages
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.sim import decode_batch
from eeplan.sim.decode_batch import Rounds, batch_ns_per_token, speculative_batch_ns_per_token
from eeplan.sim.decode_events import simulate_decode
from eeplan.sim.decode_process import DecodeProcess, Exit, Further, RowCosts
from eeplan.sim.inference import expected_latency
from eeplan.spec import DecodeMode

ROW = RowCosts((1, 2), (100, 200))
"""Every row costs the same, whoever stands beside it."""


def local(process: DecodeProcess) -> DecodeProcess:
    """On one process."""
    exits = tuple(replace(one, stage=0) for one in process.exits)
    return replace(process, exits=exits, layers_per_stage=(process.num_layers,))


def played_ns(process: DecodeProcess, mode: DecodeMode, depths: list[list[int]], limit: int) -> int:
    """Forwards of some sequences at given depths."""
    batch = [decode_batch._Waiting(keeps_depth=mode == "catch_up") for _ in depths[0]]
    total = 0
    for row in depths:
        joins = [one.joins(depth, limit, process.num_layers) for one, depth in zip(batch, row, strict=True)]
        total += decode_batch.forward_ns(process, row, joins)
    return total


@settings(max_examples=60)
@given(st.data(), st.sampled_from(["kv_recompute", "catch_up"]), st.integers(0, 5))
def test_one_sequence_is_the_one_played_layer_by_layer(
    data: st.DataObject, mode: DecodeMode, limit: int
) -> None:
    process = local(data.draw(processes()))
    depths = draw_depths(process, data.draw(usages(process)), 30, seed=3)
    expected = simulate_decode(process, mode, depths, limit).done_ns
    assert played_ns(process, mode, [[depth] for depth in depths], limit) == expected


@settings(max_examples=40)
@given(st.data(), st.sampled_from(["kv_recompute", "catch_up"]), st.integers(2, 5))
def test_where_every_row_costs_the_same_nothing_is_shared(
    data: st.DataObject, mode: DecodeMode, sequences: int
) -> None:
    drawn = local(data.draw(processes()))
    process = replace(
        drawn,
        layer=ROW,
        embedding=ROW,
        final_head=ROW,
        heads=dict.fromkeys(drawn.heads, ROW),
        step_overhead_ns=0,
    )
    usage = data.draw(usages(process))
    columns = [draw_depths(process, usage, 20, seed) for seed in range(sequences)]
    alone = sum(simulate_decode(process, mode, column, 3).done_ns for column in columns)
    rows = [list(row) for row in zip(*columns, strict=True)]
    assert played_ns(process, mode, rows, 3) == alone
    # Control: with something that each further sequence adds, it is more.
    costly = replace(process, further=Further(layer_ns=10, masked_layer_ns=10))
    assert played_ns(costly, mode, rows, 3) > alone


def example(stages: tuple[int, ...] = (8,)) -> DecodeProcess:
    """Costs as on a CPU: four rows take as long as one."""
    rows = RowCosts((1, 2, 4, 5, 8), (1000, 1000, 1000, 1500, 1500))
    stage = len(stages) - 1
    return DecodeProcess(
        exits=(Exit(2, "norm", 0), Exit(4, "norm", 0)),
        layers_per_stage=stages,
        layer=rows,
        embedding=RowCosts((1,), (10,)),
        final_head=rows,
        heads={"norm": rows},
        step_overhead_ns=50,
        message_ns=40 * stage,
        return_ns=20 * stage,
    )


@pytest.mark.parametrize("mode", ["kv_recompute", "catch_up"])
@pytest.mark.parametrize("shares", [(0.5, 0.2, 0.3), (0.0, 0.9, 0.1)])
def test_drawn_usage_comes_near_the_closed_form(mode: DecodeMode, shares: tuple[float, ...]) -> None:
    from eeplan.usage import ExitShares

    process = example()
    usage = ExitShares((2, 4), 8, shares[:-1], 0.5, is_assumption=True, sentence="a test")
    expected = expected_latency(process, usage, mode, 4, process.full_ns).ns_per_token
    assert batch_ns_per_token(process, mode, shares, 4, 1) == pytest.approx(expected, rel=0.02)


def test_a_batch_takes_less_than_its_sequences_and_more_than_one() -> None:
    process, shares = example(), (0.5, 0.2, 0.3)
    alone = batch_ns_per_token(process, "catch_up", shares, 4, 1)
    together = batch_ns_per_token(process, "catch_up", shares, 4, 8)
    assert alone / 8 < together < alone
    # Deep layers run for whoever goes there, so with many sequences a forward seldom ends early.
    full = replace(process, exits=())
    gain_alone = batch_ns_per_token(full, "full", (1.0,), 0, 1) / alone
    gain_together = batch_ns_per_token(full, "full", (1.0,), 0, 8) / together
    assert gain_together < gain_alone


def test_drafts_of_one_sequence_cost_what_their_ops_cost() -> None:
    """Where costs grow by the row, a round can be written out by its means."""
    process = replace(example(), layer=ROW, final_head=ROW)
    drafts = sum(0.6**n for n in range(1, 5))
    # Each round checks as often as it drafts, and once more unless the limit ends it.
    checks = drafts + 1 - 0.6**4
    written_out = (drafts + 1) * (50 + 10 + 2 * 100) + checks * 1000 + (drafts + 1) * (6 * 100 + 100)
    found = speculative_batch_ns_per_token(process, process.exits[0], Rounds(drafts, tokens=2.0), 4, 1)
    assert found == pytest.approx(written_out / 2.0, rel=0.02)
    more = speculative_batch_ns_per_token(process, process.exits[0], Rounds(drafts, tokens=1.9), 4, 1)
    assert more > found


@settings(max_examples=40)
@given(st.data())
def test_one_sequence_in_a_pipeline_that_never_queues(data: st.DataObject) -> None:
    """The first stage is the slowest, so nothing that could share a forward waits."""
    drawn = data.draw(processes(max_stages=3))
    process = replace(drawn, embedding=RowCosts((1,), (100_000,)))
    depths = draw_depths(process, data.draw(usages(process)), 25, seed=5)
    found = decode_batch._Pipeline(process, depths, 1).run()
    assert found * len(depths) == pytest.approx(simulate_decode(process, "pipeline", depths).done_ns)


def test_a_pipeline_keeps_its_stages_busy_with_several_sequences() -> None:
    process = example((4, 4))
    alone = batch_ns_per_token(process, "pipeline", (0.0, 0.0, 1.0), 0, 1)
    two = batch_ns_per_token(process, "pipeline", (0.0, 0.0, 1.0), 0, 2)
    assert two < 0.75 * alone
    # Control: on one stage there is nothing to overlap, only rows to share.
    slow_return = replace(process, return_ns=50_000)
    assert batch_ns_per_token(slow_return, "pipeline", (0.0, 0.0, 1.0), 0, 1) > alone + 45_000
