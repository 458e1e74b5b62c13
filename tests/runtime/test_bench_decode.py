"""`eeplan bench decode`: what is counted, how times become ratios, and that rivals are the same model."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import make_plan, make_profile, make_run
from decode_cases import with_decode_costs
from small_data import build_small

from eeplan.bench_decode import Counts, Predictor, contenders, ratios_of, run_of
from eeplan.bench_views import decode_bench_tables
from eeplan.console import PlainProgress
from eeplan.decode_speed import Contender, Name, Timing
from eeplan.errors import DecodeError
from eeplan.plan import Plan, load_plan, write_plan
from eeplan.profile import load_profile
from eeplan.report.figures.decode_bench import speed_figure, trade_figure, write_figures
from eeplan.runtime import backend, checkpoint
from eeplan.runtime.benches import decode_bench
from eeplan.runtime.benches import llama as hf
from eeplan.runtime.benches.decode_bench import Asked, bench_decode
from eeplan.runtime.decode.speed import _latencies
from eeplan.runtime.model import EarlyExitGPT, build_model, whole_model_spec
from eeplan.schema import write_yaml
from eeplan.sim.decode_batch import Rounds

RATIOS = {
    "catch_up_vs_full",
    "pipeline_vs_full",
    "self_speculative_vs_full",
    "catch_up_vs_kv_recompute",
    "full_vs_transformers",
    "framework_overhead",
}
SMALL = Asked(batches=(1, 2), thresholds=(0.5,), rounds=2, new_tokens=8, prompt_tokens=4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, EarlyExitGPT]]:
    """A run folder with a checkpoint of random but confident parameters, and the model."""
    folder = tmp_path_factory.mktemp("run")
    files = build_small(folder)
    shape = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "num_query_groups": 2}
    run = make_run(
        model=shape | {"vocab_size": 257, "init_method_std": 0.5},
        parallel={"pipeline_model_parallel_size": 1},
        training__seq_length=16,
        exits={"layers": [{"layer": 1}, {"layer": 2}]},
        data={"data_path": str(files.prefix), "tokenizer": str(files.tokenizer), "split": "80,20,0"},
    )
    write_plan(folder / "plan.yaml", make_plan(run))
    plan = load_plan(folder / "plan.yaml")
    write_yaml(folder / "profile.yaml", with_decode_costs(make_profile(run)))
    with backend.single_process() as here:
        model = build_model(run, whole_model_spec(plan), here).eval()
        checkpoint.save(folder / "checkpoints", 7, model, plan)
        yield folder, model


@pytest.fixture(scope="module")
def result(trained: tuple[Path, EarlyExitGPT]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        # Threads that wait for each other in products of a few numbers take most of the time otherwise.
        patch.setattr(decode_bench, "available_cores", lambda: 1)
        return bench_decode(trained[0], SMALL, data=None, profile=None, progress=PlainProgress(io.StringIO()))


def test_the_result_has_its_promised_form(result: dict[str, Any]) -> None:
    found = json.loads(json.dumps(result, allow_nan=False))
    assert {"model", "hardware", "runs", "ratios"} <= found.keys()
    assert found["ratios"].keys() == RATIOS
    assert all(value is None or value > -1.0 for value in found["ratios"].values())
    keys = {(run["mode"], run["batch"], run["threshold"]) for run in found["runs"]}
    early = {
        (m, b, t)
        for m in ("catch_up", "kv_recompute", "self_speculative", "pipeline")
        for b in (1, 2)
        for t in (0.8, 0.5)
    }
    assert keys == early | {(m, b, 1.0) for m in ("full", "transformers") for b in (1, 2)}
    for run in found["runs"]:
        assert run["tokens_per_s"] > 0
        assert run["time_to_first_token_s"] > 0
        assert run["latency_s"]["p10"] <= run["latency_s"]["p99"]
        # The plan has one stage, the pipeline two.
        is_predicted = run["mode"] not in ("transformers", "pipeline")
        assert (run["predicted_tokens_per_s"] is not None) == is_predicted
    assert found["ratios_threshold"]["threshold"] == 0.8


def test_counts_are_those_of_the_modes(result: dict[str, Any]) -> None:
    by_mode = {(run["mode"], run["threshold"]): run for run in result["runs"] if run["batch"] == 1}
    full, drafts = by_mode["full", 1.0], by_mode["self_speculative", 0.5]
    assert (full["mean_layers"], full["agreement_with_full"], full["checks_per_token"]) == (4.0, 1.0, 0.0)
    assert drafts["agreement_with_full"] == 1.0
    caught, again = by_mode["catch_up", 0.5], by_mode["kv_recompute", 0.5]
    stages = by_mode["pipeline", 0.5]
    assert caught["exits"] == again["exits"] == stages["exits"]
    assert stages["mean_layers"] == 4.0
    assert stages["agreement_with_full"] == caught["agreement_with_full"] == again["agreement_with_full"]
    assert caught["exits"]["exit_1"] > 0
    assert caught["mean_layers"] <= min(4.0, again["mean_layers"])
    assert caught["mean_depth"] < 4.0


def test_tables_and_figures_show_every_run(result: dict[str, Any], tmp_path: Path) -> None:
    runs, ratios = decode_bench_tables(result)
    assert len(runs.rows) == len(result["runs"])
    assert {row[0] for row in ratios.rows} == RATIOS
    assert [path.stat().st_size > 5000 for path in write_figures(tmp_path, result)] == [True, True]
    bars = [patch.get_width() for patch in speed_figure(result).axes[0].patches]
    measured = [run["tokens_per_s"] for run in result["runs"] if run["batch"] == 1]
    assert set(measured) <= set(bars)
    lines = trade_figure(result).axes[0].lines
    assert {line.get_label() for line in lines} >= {"catch_up", "kv_recompute", "self_speculative"}


def test_ratios_are_paired_within_rounds() -> None:
    """One slow round slows both; medians of quotients, not quotients of medians."""
    full, caught = Timing(token_s=[2.0, 20.0, 2.2]), Timing(token_s=[1.0, 10.0, 2.0])
    timings = {Contender("full", 1): full, Contender("catch_up", 1, 0.7): caught}
    ratios = ratios_of(timings, 0.7, ops_s=1.98)
    assert ratios["catch_up_vs_full"] == 2.0
    assert ratios["framework_overhead"] == pytest.approx(0.1)
    assert ratios["pipeline_vs_full"] is None
    assert ratios_of(timings, 0.6, ops_s=1.98)["catch_up_vs_full"] is None


def test_tokens_of_one_moment_share_the_time() -> None:
    assert _latencies([1.0, 2.0, 2.5]) == [1.0, 0.5]
    assert _latencies([1.0, 1.3, 4.0, 4.0, 4.0]) == pytest.approx([0.3, 0.9, 0.9, 0.9])


def test_percentiles_and_speed_of_a_run() -> None:
    timing = Timing(first_s=[3.0], token_s=[0.5, 0.1, 0.2], latencies_s=[0.1 * i for i in range(1, 101)])
    run = run_of(Contender("transformers", 1), timing, None, None)
    assert run["tokens_per_s"] == pytest.approx(5.0)
    assert run["latency_s"]["p50"] == pytest.approx(5.1)
    assert run["latency_s"]["p99"] == pytest.approx(10.0)
    assert [one.mode for one in contenders(("catch_up",), (1,), (0.5, 0.7))] == [
        "full",
        "catch_up",
        "catch_up",
    ]


@pytest.mark.skipif(not hf.has_transformers(), reason="needs the extra 'bench'")
def test_the_rival_is_the_same_model(trained: tuple[Path, EarlyExitGPT]) -> None:
    model, prompt = trained[1], [5, 3, 250, 7, 1, 9]
    llama = hf.equal_llama(model, 257)
    assert hf.require_equal_logits(model, llama, prompt) < 1e-5
    times = hf.generate_times(llama, [prompt, prompt], 5)
    assert times == sorted(times)
    assert len(times) == 5


@pytest.mark.skipif(not hf.has_transformers(), reason="needs the extra 'bench'")
@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.gate_proj", "input_layernorm"])
def test_another_model_is_no_rival(trained: tuple[Path, EarlyExitGPT], name: str) -> None:
    """Negative control: a single parameter in another order."""
    llama = hf.equal_llama(trained[1], 257)
    weight = llama.get_parameter(f"model.layers.1.{name}.weight")
    with torch.no_grad():
        weight.copy_(weight.roll(1, dims=0) if weight.dim() > 1 else weight + 0.5)
    with pytest.raises(DecodeError, match="gives other logits"):
        hf.require_equal_logits(trained[1], llama, [5, 3, 250, 7, 1, 9])


def test_every_contender_of_ours_is_predicted_from_its_usage(trained: tuple[Path, EarlyExitGPT]) -> None:
    plan: Plan = load_plan(trained[0] / "plan.yaml")
    profile, _ = load_profile(trained[0] / "profile.yaml")
    counts = Counts({"exit_1": 3, "exit_2": 2, "final": 5}, 2.7, 4.0, 1.5, 1.0, Rounds(1.5, 2.0))
    timing = Timing(exits=Counter({"exit_1": 3, "exit_2": 2, "final": 5}))

    predictor = Predictor(plan, profile, 1)

    def speed(mode: Name, batch: int) -> float:
        found = predictor.tokens_per_s(Contender(mode, batch, 1.0 if mode == "full" else 0.5), timing, counts)
        assert found is not None, (mode, batch)
        return found

    for mode in ("full", "catch_up", "kv_recompute", "self_speculative", "pipeline"):
        assert speed(mode, 1) < speed(mode, 8) < 8 * speed(mode, 1)
    assert speed("catch_up", 1) >= speed("kv_recompute", 1)
    # Control: the usage decides.
    timing.exits["exit_1"] = 30
    sooner = speed("catch_up", 1)
    timing.exits["exit_1"] = 3
    assert sooner > speed("catch_up", 1)
    assert Predictor(plan, None).tokens_per_s(Contender("full", 1), timing, counts) is None
    # A pipeline of other stages than the plan's has other exits on its stages.
    assert Predictor(plan, profile, 2).tokens_per_s(Contender("pipeline", 1, 0.5), timing, counts) is None


def test_what_cannot_be_timed_is_refused(trained: tuple[Path, EarlyExitGPT]) -> None:
    for asked, what in (
        (Asked(rounds=0), "at least 1"),
        (Asked(new_tokens=14, prompt_tokens=4), "do not fit"),
    ):
        with pytest.raises(DecodeError, match=what):
            bench_decode(trained[0], asked, data=None, profile=None, progress=PlainProgress(io.StringIO()))
