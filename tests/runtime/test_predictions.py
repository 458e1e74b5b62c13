"""Predicted and measured training iterations on this machine; the campaign needs it quiet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from campaigns.figures import prediction_figure
from campaigns.places import REPORTS, work_folder
from campaigns.predictions import GROUPS, compare, failures, is_disturbed, run_campaign, summarize

from eeplan.report.style import png


def _result(predicted_s: float, measured_s: float, peak: int = 100) -> dict[str, Any]:
    measured = {"iteration_time_s": measured_s, "peak_bytes": [100], "core_share": [1.0]}
    return compare({"run": "a", "group": "g"}, predicted_s, [peak], measured)


def test_the_campaign_has_24_different_runs_that_are_possible() -> None:
    runs = [group.run(case) for group in GROUPS for case in group.cases]
    assert len({run.model_dump_json() for run in runs}) == 24
    assert {run.parallel.pipeline_model_parallel_size for run in runs} == {1, 2}
    heads = {request.head or run.exits.head for run in runs for request in run.exits.layers}
    assert heads | {run.exits.head for run in runs} == {"minimal", "norm", "mlp", "block"}


def test_accurate_predictions_pass() -> None:
    summary = summarize([_result(1.02, 1.0), _result(1.94, 2.0), _result(3.0, 3.0, peak=102)])
    assert failures(summary) == []
    assert summary["mean_abs"] == pytest.approx(0.05 / 3)
    assert summary["mean_signed"] == pytest.approx(-0.01 / 3)
    assert summary["peak_mean_abs"] == pytest.approx(0.02 / 3)


@pytest.mark.parametrize(
    ("results", "what"),
    [
        ([_result(1.2, 1.0), _result(2.0, 2.0), _result(3.0, 3.0)], "max_abs"),
        ([_result(1.07, 1.0), _result(2.14, 2.0), _result(3.2, 3.0)], "mean_abs"),
        ([_result(1.0, 1.01), _result(1.01, 1.0), _result(1.02, 0.99)], "spearman"),
        ([_result(1.0, 1.0, peak=110), _result(2.0, 2.0), _result(3.0, 3.0)], "peak_mean_abs"),
    ],
)
def test_inaccurate_predictions_fail(results: list[dict[str, Any]], what: str) -> None:
    """Negative controls: each limit is seen."""
    assert any(failure.startswith(what) for failure in failures(summarize(results)))


def test_disturbed_runs_are_told_by_their_own_times() -> None:
    even = {"core_share": [0.96, 0.99], "iteration_times_s": [1.0, 1.02, 1.0, 1.05, 1.9]}
    assert not is_disturbed(even)
    assert is_disturbed(even | {"core_share": [0.96, 0.8]})
    assert is_disturbed(even | {"iteration_times_s": [1.0, 1.0, 1.1, 1.4, 1.5]})


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_24_runs_take_the_time_and_memory_that_were_predicted() -> None:
    """Goes on where it was stopped (``campaigns.places``); leaves its evidence under reports/training."""
    folder = work_folder("predictions")
    results = run_campaign(folder)
    summary = summarize(results)
    measured = json.loads((folder / f"{results[0]['run']}.measured-1.json").read_text())
    device = measured["device"]
    about = {"device": device, "software": measured["software"], "summary": summary, "runs": results}
    (REPORTS / "predictions.json").write_text(json.dumps(about, indent=1) + "\n")
    caption = (
        f"{summary['n']} runs on {device['name']}, {device['cores']} cores, fp32. Mean |error| "
        f"{summary['mean_abs']:.1%}, largest {summary['max_abs']:.1%}; peak memory "
        f"{summary['peak_mean_abs']:.1%}."
    )
    (REPORTS / "predictions.png").write_bytes(png(prediction_figure(results, caption)))
    assert failures(summary) == []
