"""Rehearsals on real processes: order, prediction, filled bubbles, and errors that show what they should."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_plan, make_profile, make_run

from eeplan.cli import main
from eeplan.errors import LaunchError, ScheduleError, SpecError
from eeplan.plan import Plan, write_plan
from eeplan.runtime import rehearse as rehearsing
from eeplan.runtime.rehearse import rehearse
from eeplan.sim.fill import schedule_of
from eeplan.timeline import Span, Timeline


def plan_of(stages: int, microbatches: int, **overrides: Any) -> Plan:
    """Layers of 4 ms and more, so that delays of the machine stay small beside them."""
    run = make_run(
        parallel={"pipeline_model_parallel_size": stages},
        training__global_batch_size=2 * microbatches,
        **({"exits": {"count": 1}} | overrides),
    )
    return make_plan(run, make_profile(run, flops_per_s=1e9))


@pytest.fixture(scope="module")
def filled() -> Plan:
    return plan_of(4, 6, fill={"policy": {"warmup": 1, "cooldown": 1}, "mode": "added"})


def test_a_filled_plan_takes_the_time_that_was_predicted(
    filled: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path / "plan.yaml", filled)
    assert {kind.name for kind in schedule_of(filled).kinds} == {"full", "warm_up", "truncated"}
    command = ["rehearse", str(tmp_path / "plan.yaml"), "--iterations", "3"]
    assert main([*command, "--json", "--trace", str(tmp_path / "trace.json")]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["stages"], len(result["iteration_times_s"])) == (4, 3)
    assert result["predicted_pipeline_s"] == pytest.approx(filled.prediction.pipeline_s)
    # Sleeps are never short; how late they end depends on what else the machine does.
    assert -0.01 < result["pipeline_error"] < 0.25
    assert result["iteration_error"] == pytest.approx(
        result["measured_iteration_s"] / filled.prediction.iteration_time_s - 1
    )
    for stage in result["per_stage"]:
        assert stage["measured_busy_s"] == pytest.approx(stage["predicted_busy_s"], rel=0.2)
    assert json.loads((tmp_path / "trace.json").read_text())


def test_a_wrong_prediction_shows(filled: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: sleeps half again as long as was planned."""
    real = rehearsing.launch

    def slower(module: str, args: list[str], **settings: Any) -> None:
        path = Path(args[0]) / "script.json"
        script = json.loads(path.read_text())
        for stage in script["sleeps_ns"]:
            for op in stage:
                op[2] = int(1.5 * op[2])
        path.write_text(json.dumps(script))
        real(module, args, **settings)

    monkeypatch.setattr(rehearsing, "launch", slower)
    assert rehearse(filled, iterations=1).to_json()["pipeline_error"] > 0.45


def test_ops_out_of_order_are_noticed() -> None:
    spans = (Span(0, "forward", 0, 0, 5), Span(0, "forward", 1, 5, 9))
    planned, swapped = Timeline((spans,)), Timeline((spans[::-1],))
    rehearsing._require_order(planned, planned)
    with pytest.raises(ScheduleError, match="stage 0 ran its ops in another order"):
        rehearsing._require_order(planned, swapped)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_time_scale_is_refused(filled: Plan, scale: float) -> None:
    with pytest.raises(SpecError, match="time scale"):
        rehearse(filled, time_scale=scale)


def test_a_stage_that_dies_is_told(filled: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        raise LaunchError("rank 2 was killed")

    monkeypatch.setattr(rehearsing, "launch", fail)
    with pytest.raises(LaunchError, match="rank 2"):
        rehearse(filled)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_24_plans_take_the_time_that_was_predicted(tmp_path: Path) -> None:
    """Pipelines of four and eight stages, with and without filled bubbles: 2 % in the mean."""
    results = []
    for stages, per_stage, exits, fill in itertools.product((4, 8), (1, 2, 3), (1, 3), (0, 1)):
        plan = plan_of(
            stages,
            per_stage * stages,
            model__num_layers=16,
            exits={"count": exits},
            fill={"policy": {"warmup": fill, "cooldown": fill}, "mode": "added"},
        )
        case = {"microbatches": per_stage * stages, "exits": exits, "fills_per_region": fill}
        result = rehearse(plan, iterations=5).to_json()
        # The shares of one pipeline's iterations, not each stage's ops, are what is kept as evidence.
        results.append(case | {key: value for key, value in result.items() if key != "per_stage"})
        (tmp_path / "rehearsals.json").write_text(json.dumps(results, indent=1) + "\n")
    errors = [abs(result["iteration_error"]) for result in results]
    assert sum(errors) / len(errors) < 0.02, errors
