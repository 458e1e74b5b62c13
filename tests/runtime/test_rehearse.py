"""Rehearsals on real processes: order, prediction, filled bubbles, and errors that show what they should."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from builders import make_plan, make_profile, make_run
from ranks import run_ranks

from eeplan.cli import main
from eeplan.errors import LaunchError, ScheduleError, SpecError
from eeplan.plan import Plan, write_plan
from eeplan.runtime import rehearse as rehearsing
from eeplan.runtime.rehearse import rehearse
from eeplan.sim.fill import schedule_of
from eeplan.timeline import Span, Timeline

FILLS_EVIDENCE = Path(__file__).parents[2] / "reports" / "training"


def plan_of(stages: int, microbatches: int, *, backward_ratio: float = 2.0, **overrides: Any) -> Plan:
    """Layers of 4 ms and more, so that delays of the machine stay small beside them."""
    run = make_run(
        parallel={"pipeline_model_parallel_size": stages},
        training__global_batch_size=2 * microbatches,
        **({"exits": {"count": 1}} | overrides),
    )
    return make_plan(run, make_profile(run, flops_per_s=1e9, backward_ratio=backward_ratio))


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

    def slower(module: str, args: list[str], **settings: Any) -> None:
        path = Path(args[0]) / "script.json"
        script = json.loads(path.read_text())
        for stage in script["sleeps_ns"]:
            for op in stage:
                op[2] = int(1.5 * op[2])
        path.write_text(json.dumps(script))
        run_ranks(module, [Path(args[0])], nproc=settings["nproc"])

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


def equal_stages(stages: int, fill: tuple[int, int]) -> Plan:
    """An exit like the final head on every stage but the last, so that the paper's capacity is exact.

    Backwards take 2 forwards on four stages and 1.5 on eight, where one insert too many costs most.
    """
    return plan_of(
        stages,
        2 * stages if stages == 4 else stages,
        backward_ratio=2.0 if stages == 4 else 1.5,
        model__num_layers=2 * stages,
        exits={
            "layers": [{"layer": 2 * stage + 1, "head": "minimal"} for stage in range(stages - 1)],
            "exit_forward": "eager",
        },
        fill={"policy": {"warmup": fill[0], "cooldown": fill[1]}, "mode": "added"},
    )


CAPACITY = {4: 2, 8: 4}
"""Inserts that fit into a bubble: floor((P - 1) / (f/b + 1)) (EE-LLM 3.3)."""


@pytest.mark.parametrize("stages", CAPACITY)
def test_fills_up_to_the_capacity_are_predicted_to_take_no_time(stages: int) -> None:
    most = CAPACITY[stages]
    times = {
        fill: equal_stages(stages, fill).prediction.pipeline_s
        for fill in ((0, 0), (most, 0), (0, most), (most, most), (most + 1, most + 1))
    }
    plain = times.pop((0, 0))
    longer = times.pop((most + 1, most + 1))
    assert all(time == pytest.approx(plain, rel=2e-3) for time in times.values()), times
    assert longer > 1.05 * plain


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stages", CAPACITY)
def test_fills_up_to_the_capacity_take_no_time(stages: int) -> None:
    """Measured: K fills in both regions within 3 % of none, one more visibly longer. On a quiet machine."""
    most = CAPACITY[stages]
    measured = {
        fill: rehearse(equal_stages(stages, fill), iterations=9).to_json()
        for fill in ((0, 0), (most, most), (most + 1, most + 1))
    }
    path = FILLS_EVIDENCE / f"fills_p{stages}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    keys = ("iteration_times_s", "measured_iteration_s", "predicted_pipeline_s", "iteration_error")
    kept = [
        {"stages": stages, "inserts": list(fill)} | {key: result[key] for key in keys}
        for fill, result in measured.items()
    ]
    path.write_text(json.dumps(kept, indent=1) + "\n")
    plain, filled, longer = (result["measured_iteration_s"] for result in measured.values())
    assert filled < 1.03 * plain
    assert longer > 1.04 * plain
