"""`eeplan bench train`: both executors do the same work, and the numbers are what was timed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import make_profile
from typer.testing import CliRunner

import eeplan.runtime.profiler as profiler
from eeplan.bench_train import bench_run, bench_train, case_of
from eeplan.bench_views import train_bench_tables
from eeplan.cli_bench import app
from eeplan.profile import OpProfile
from eeplan.schema import validate
from eeplan.sim.planner import make_plan
from eeplan.spec import RunSpec, replace_keys


def tiny_run(stages: int, num_exits: int) -> RunSpec:
    return replace_keys(
        bench_run(stages, num_exits),
        {
            "model.num_layers": 4,
            "model.hidden_size": 32,
            "model.vocab_size": 128,
            "training.seq_length": 16,
            "training.global_batch_size": 8,
        },
    )


@pytest.fixture
def _fast_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Op costs from operation counts instead of measured ones."""

    def measured(run: RunSpec) -> OpProfile:
        return make_profile(run)

    monkeypatch.setattr(profiler, "measure", measured)


@pytest.mark.usefixtures("_fast_profile")
def test_both_executors_give_the_same_gradients_on_two_stages() -> None:
    result = bench_train(stages=(2,), rounds=2, run_of=tiny_run)
    (case,) = json.loads(json.dumps(result))["cases"]
    assert (case["p"], case["m"], case["rounds"]) == (2, 4, 2)
    assert case["gradient_difference"] < 1e-6
    assert len(case["exits"]) == 2
    assert min(case["own_s"], case["stock_s"], case["exits_s"], case["ratio_to_stock"]) > 0
    assert result["ratio_to_stock"] == case["ratio_to_stock"]
    assert result["model"]["num_layers"] == 4
    assert result["hardware"]["device"]["kind"]


def _case(**seconds: list[float]) -> dict[str, Any]:
    plans = {}
    for name, num_exits in (("plain", 0), ("exits", 2)):
        run = tiny_run(2, num_exits)
        plans[name] = make_plan(run, "0" * 64, make_profile(run), "0" * 64)
    return case_of(plans, {"seconds": seconds, "difference": 0.0})


def test_ratios_are_within_rounds() -> None:
    """A machine that is twice as slow in one round does not matter, nor does one slow iteration."""
    case = _case(own=[1.0, 2.0, 9.0], stock=[2.0, 4.0, 2.0], exits=[1.1, 2.2, 9.9])
    assert case["ratio_to_stock"] == 0.5
    assert case["exit_overhead"]["measured"] == pytest.approx(0.1)
    assert case["exit_overhead"]["predicted"] > 0.0


def test_a_slower_executor_shows() -> None:
    """Negative control of the target, at most 1.00."""
    assert _case(own=[1.1, 1.1], stock=[1.0, 1.0], exits=[1.0, 1.0])["ratio_to_stock"] > 1.0


def test_tables_name_every_case() -> None:
    case = _case(own=[1.0], stock=[2.0], exits=[1.5])
    (table,) = train_bench_tables({"ratio_to_stock": 0.5, "cases": [case]})
    assert table.rows == (("2", "4", "1.00 s", "2.00 s", "0.500", "50.0 %", table.rows[0][-1]),)


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eeplan.bench_train.bench_train", lambda **asked: {"stages": asked["stages"]})
    done = CliRunner().invoke(app, ["train", "--stages", "2", "--json"])
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"stages": [2]})


def test_the_bench_run_is_valid() -> None:
    for stages in (1, 2):
        assert validate(bench_run(stages, 2).model_dump(mode="json"), RunSpec, "run") == bench_run(stages, 2)
