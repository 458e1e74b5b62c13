from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from builders import make_profile, make_run

from eeplan.profile import DecodeCosts
from eeplan.runtime import backend
from eeplan.runtime.decode.engine import LocalEngine
from eeplan.runtime.decode.exit_check import ExitCheck
from eeplan.runtime.decode.network import Transformer
from eeplan.runtime.decode_timing import ROWS, SEQUENCES, DecodeTimer, decoded_stage, measure_decode
from eeplan.runtime.model import build_model
from eeplan.sim.decode_process import Exit, decode_process
from eeplan.sim.inference import decode_prediction
from eeplan.sim.layout import uniform_layout
from eeplan.spec import DECODE_MODES, HEAD_KINDS, RunSpec
from eeplan.usage import UsagePrior, exit_shares

OPS = {"embedding", "layer", "final_head", *(f"exit_{kind}" for kind in HEAD_KINDS)}
DELAY_S = 0.004


def measured(here: backend.Backend, run: RunSpec, **changes: Any) -> DecodeCosts:
    options = {"processes": 1, "threads": 1, "seconds": 0.0, "min_rounds": 3} | changes
    return measure_decode(run, here, **options)


def small_run(**changes: Any) -> RunSpec:
    return make_run(parallel={"pipeline_model_parallel_size": 1}, **changes)


def least_s(costs: DecodeCosts, op: str, rows: int = 1, sequences: int = 1) -> float:
    wanted = (op, rows, sequences)
    return next(cost.time.p10_s for cost in costs.ops if (cost.op, cost.rows, cost.sequences) == wanted)


def test_every_op_is_timed_for_every_number_of_rows(one_process: backend.Backend) -> None:
    threads = torch.get_num_threads()
    costs = measured(one_process, small_run(), processes=2)
    shapes = [*((rows, 1) for rows in ROWS), (SEQUENCES, SEQUENCES), (2 * SEQUENCES, SEQUENCES)]
    assert {(cost.op, cost.rows, cost.sequences) for cost in costs.ops} == {
        (op, *shape) for op in OPS for shape in shapes
    }
    assert (costs.processes, costs.threads, costs.context_tokens) == (2, 1, 16)
    assert all(cost.time.p10_s > 0 for cost in costs.ops)
    assert {cost.time.n for cost in costs.ops if cost.op == "layer"} == {3 * 8}
    assert {cost.time.n for cost in costs.ops if cost.op != "layer"} == {3}
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("layers", [2, 4])
def test_a_model_with_fewer_layers_than_head_kinds_times_every_head(
    one_process: backend.Backend, layers: int
) -> None:
    costs = measured(one_process, small_run(model__num_layers=layers), min_rounds=1)
    assert {cost.op for cost in costs.ops} == set(OPS)


def test_what_was_measured_predicts_every_mode(one_process: backend.Backend) -> None:
    run = small_run()
    profile = make_profile(run).model_copy(update={"decode": (measured(one_process, run),)})
    usage = exit_shares(UsagePrior(), 0.8, [2, 4], 8)
    exits = (Exit(2, "norm", 0), Exit(4, "mlp", 0))
    for mode in DECODE_MODES:
        latency = decode_prediction(profile, uniform_layout(8, 2), exits, usage, mode, 8)
        assert latency.ns_per_token > 0


@pytest.mark.parametrize("op", ["layer", "exit_mlp"])
def test_a_slow_op_is_charged_to_itself(
    one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch, op: str
) -> None:
    """Negative control: what takes longer shows up in its own cost, and in no other."""
    method = "run_layers" if op == "layer" else "logits"
    original = getattr(Transformer, method)

    def slow(self: Transformer, *arguments: Any, **options: Any) -> torch.Tensor:
        kinds = {exit_.depth: exit_.head for exit_ in self.weights.stage.exits}
        if op == "layer" or kinds.get(arguments[0]) == "mlp":
            time.sleep(DELAY_S)
        return original(self, *arguments, **options)

    plain = measured(one_process, small_run())
    monkeypatch.setattr(Transformer, method, slow)
    slowed = measured(one_process, small_run())
    for rows in ROWS:
        assert least_s(slowed, op, rows) > DELAY_S
    # A loaded machine may delay any op, so look at the quickest time of the others.
    assert least_s(slowed, "embedding") < DELAY_S / 2
    assert least_s(slowed, "final_head") < DELAY_S / 2
    assert least_s(plain, op) < DELAY_S


def test_time_between_ops_is_the_steps_overhead(
    one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LocalEngine.step

    def slow(self: LocalEngine) -> Any:
        time.sleep(10 * DELAY_S * self.running)
        return original(self)

    monkeypatch.setattr(LocalEngine, "step", slow)
    costs = measured(one_process, small_run(), min_rounds=2)
    assert 5 * DELAY_S < costs.step_overhead_s < 20 * DELAY_S
    assert 5 * DELAY_S < costs.sequence_overhead_s < 20 * DELAY_S


def test_asking_an_exit_has_a_cost_of_its_own(
    one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ExitCheck.leaves

    def slow(self: ExitCheck, *arguments: Any) -> Any:
        time.sleep(DELAY_S)
        return (yield from original(self, *arguments))

    monkeypatch.setattr(ExitCheck, "leaves", slow)
    for processes in (1, 2):
        costs = measured(one_process, small_run(model__num_layers=4), min_rounds=2, processes=processes)
        assert 0.8 * DELAY_S < costs.check_overhead_s < 2 * DELAY_S
        assert costs.step_overhead_s < DELAY_S


def test_what_each_further_sequence_adds_is_charged_to_it(
    one_process: backend.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: attention that is slow by the sequence, not by the row."""
    original = Transformer._attend

    def slow(self: Transformer, *arguments: Any) -> torch.Tensor:
        time.sleep(DELAY_S)
        return original(self, *arguments)

    monkeypatch.setattr(Transformer, "_attend", slow)
    run = small_run(model__num_layers=2)
    costs = measured(one_process, run, min_rounds=2)
    assert least_s(costs, "layer", SEQUENCES, SEQUENCES) > SEQUENCES * DELAY_S
    assert least_s(costs, "layer", SEQUENCES) < SEQUENCES * DELAY_S
    profile = make_profile(run).model_copy(update={"decode": (costs,)})
    process = decode_process(profile, uniform_layout(2, 1), (), "full")
    assert 0.8 * DELAY_S < process.further.layer_ns / 1e9 < 2.0 * DELAY_S


def test_a_model_without_room_for_a_step_has_no_overhead(one_process: backend.Backend) -> None:
    model = build_model(small_run(), decoded_stage(small_run()), one_process).eval()
    timer = DecodeTimer(model, model.run.training.seq_length, processes=1, threads=1)
    timer.round()
    assert (timer.costs().step_overhead_s, timer.costs().check_overhead_s) == (0.0, 0.0)


def test_a_large_model_is_cut_to_what_no_cache_holds() -> None:
    small = decoded_stage(small_run())
    assert small.last_layer == 8
    assert [exit_.depth for exit_ in small.exits] == [1, 3, 4, 6]
    assert all(exit_.tied for exit_ in small.exits)
    wide = small_run(
        model={"num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 256},
        exits__untie_exit_output_weights=True,
    )
    assert decoded_stage(wide).last_layer == 1
    assert [exit_.depth for exit_ in decoded_stage(wide).exits] == [2, 3, 4, 5]
    assert not any(exit_.tied for exit_ in decoded_stage(wide).exits)
