"""The comparison: timelines, op times, errors and the summary, recomputed here from the raw files."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_run import OPTIMIZER_S, SYNC_S, Reported, naive_pipeline
from hypothesis import given, settings
from hypothesis import strategies as st

from eeplan.report.compare import (
    idle_share,
    learnt,
    memory_quantities,
    op_times,
    predicted_timeline,
    quantile,
    signed_error,
    time_quantities,
)
from eeplan.timeline import Span, Timeline


def check_summary(summary: dict[str, Any], folder: Path, predicted: dict[str, Any]) -> None:
    """Recompute every number of a summary from the run directory's files."""
    measured = json.loads((folder / "measured.json").read_text())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [line["losses"] for line in lines if line["kind"] == "train"]
    assert summary["predicted"] == predicted
    assert summary["measured"] == {key: measured[key] for key in ("iteration_time_s", "peak_bytes")}
    assert summary["error"]["iteration_time"] == pytest.approx(
        (predicted["iteration_time_s"] - measured["iteration_time_s"]) / measured["iteration_time_s"]
    )
    assert summary["error"]["peak_bytes"] == pytest.approx(
        [(p - m) / m for p, m in zip(predicted["peak_bytes"], measured["peak_bytes"], strict=True)]
    )
    assert summary["losses"] == {name: [train[0][name], train[-1][name]] for name in train[0]}
    assert summary["wall_s"] == measured["wall_s"]


def predicted_numbers(reported: Reported) -> dict[str, Any]:
    return {
        "iteration_time_s": reported.plan.prediction.iteration_time_s,
        "peak_bytes": [stage.memory.peak_bytes for stage in reported.plan.stages],
    }


def test_summary_equals_recomputation(reported: Reported) -> None:
    check_summary(reported.summary, reported.folder, predicted_numbers(reported))
    keys = ["predicted", "measured", "error", "losses", "exits", "wall_s", "parts", "idle", "headroom"]
    keys += ["critical_path", "interpolated_ops", "extrapolated_ops", "replanned"]
    assert list(reported.summary) == keys
    assert [e["name"] for e in reported.summary["exits"]] == ["exit_3", "exit_6"]
    assert json.loads((reported.out / "summary.json").read_text()) == reported.summary


@pytest.mark.parametrize("wrong", ["sign", "ratio", "memory sign"])
def test_a_wrong_error_would_be_caught(reported: Reported, wrong: str) -> None:
    summary = json.loads(json.dumps(reported.summary))
    error, found = summary["error"], summary["measured"]["iteration_time_s"]
    if wrong == "sign":
        error["iteration_time"] *= -1
    elif wrong == "ratio":
        error["iteration_time"] = found / summary["predicted"]["iteration_time_s"] - 1
    else:
        error["peak_bytes"][0] *= -1
    with pytest.raises(AssertionError):
        check_summary(summary, reported.folder, predicted_numbers(reported))


def test_too_low_a_prediction_is_negative() -> None:
    assert signed_error(0.9, 1.0) == pytest.approx(-0.1)
    assert signed_error(1.1, 1.0) == pytest.approx(0.1)
    assert signed_error(1.0, 0.0) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_quantile_equals_numpy(values: list[float], fraction: float) -> None:
    assert quantile(values, fraction) == pytest.approx(float(np.quantile(values, fraction)), abs=1e-6)


def test_predicted_timeline_is_the_pipeline_and_its_tail(reported: Reported) -> None:
    plan = reported.plan
    timeline = predicted_timeline(plan)
    durations = [
        {("forward", m): round(s.forward_s * 1e9) for m in range(plan.num_microbatches)}
        | {("backward", m): round(s.backward_s * 1e9) for m in range(plan.num_microbatches)}
        for s in plan.stages
    ]
    naive = naive_pipeline(plan.num_microbatches, durations)
    end = naive.pipeline_ns
    assert end == round(plan.prediction.pipeline_s * 1e9)
    for stage, spans in enumerate(timeline.spans):
        assert spans[:-2] == naive.spans[stage]
        sync_end, update_end = end + round(SYNC_S * 1e9), end + round((SYNC_S + OPTIMIZER_S) * 1e9)
        assert spans[-2:] == (
            Span(stage, "grad_sync", -1, end, sync_end),
            Span(stage, "optimizer", -1, sync_end, update_end),
        )
    parts = plan.prediction
    assert timeline.end_ns / 1e9 + parts.overhead_s == pytest.approx(parts.iteration_time_s)


def test_a_long_synchronisation_begins_before_the_pipeline_ends(reported: Reported) -> None:
    plan = reported.plan
    stages = (*plan.stages[:-1], plan.stages[-1].model_copy(update={"grad_sync_s": 3 * SYNC_S}))
    timeline = predicted_timeline(plan.model_copy(update={"stages": stages}))
    sync, update = timeline.spans[-1][-2:]
    assert sync.end_ns == update.start_ns
    assert sync.end_ns - sync.start_ns == round(3 * SYNC_S * 1e9)
    assert update == predicted_timeline(plan).spans[-1][-1]


def test_op_times_are_the_spans_of_all_recorded_iterations(reported: Reported) -> None:
    raw = json.loads((reported.folder / "timelines.json").read_text())["iterations"]
    rows = op_times(reported.run, predicted_timeline(reported.plan))
    assert len(rows) == 3 * 4
    for row in rows:
        found = [
            (span["end_ns"] - span["start_ns"]) / 1e9
            for entry in raw
            for span in entry["timeline"]["spans"][row.stage]
            if span["kind"] == row.kind
        ]
        assert row.n == len(found)
        assert row.median_s == statistics.median(found)
        assert (row.p10_s, row.p90_s) == pytest.approx(tuple(np.quantile(found, (0.1, 0.9))))
    backward = next(row for row in rows if row.stage == 0 and row.kind == "backward")
    assert backward.predicted_s == pytest.approx(reported.plan.stages[0].backward_s)
    assert backward.error == pytest.approx(backward.predicted_s / backward.median_s - 1)


def test_quantities_hold_the_files_numbers(reported: Reported) -> None:
    measured = json.loads((reported.folder / "measured.json").read_text())
    training, prediction = reported.plan.run.training, reported.plan.prediction
    by_name = {q.name: q for q in (*time_quantities(reported.run), *memory_quantities(reported.run))}
    for name, key in (
        ("Iteration time", "iteration_time_s"),
        ("pipeline", "pipeline_s"),
        ("gradient sync", "grad_sync_s"),
        ("optimizer", "optimizer_s"),
        ("overhead", "overhead_s"),
    ):
        assert by_name[name].predicted == getattr(prediction, key)
        assert by_name[name].measured == measured[key]
        assert by_name[name].n == measured["iterations_timed"]
    tokens = training.global_batch_size * training.seq_length
    assert by_name["Throughput"].measured == pytest.approx(tokens / measured["iteration_time_s"])
    for index, stage in enumerate(reported.plan.stages):
        memory = stage.memory
        assert by_name[f"Peak memory, stage {index}"].predicted == memory.peak_bytes
        resident = by_name[f"Process peak, stage {index}"]
        assert resident.predicted == memory.peak_bytes + memory.process_base_bytes
        assert resident.measured == measured["process_peak_bytes"][index]


def test_idle_share_of_a_drawn_example() -> None:
    """Two stages, 8 ns of pipeline each; 5 and 3 of them busy: half is idle. The optimizer does not count."""
    timeline = Timeline(
        spans=(
            (Span(0, "forward", 0, 0, 2), Span(0, "backward", 0, 5, 8), Span(0, "optimizer", -1, 8, 20)),
            (Span(1, "forward", 0, 2, 3), Span(1, "backward", 0, 3, 5)),
        )
    )
    assert idle_share(timeline) == pytest.approx(0.5)


def test_learnt_compares_the_last_validation_with_the_unigram_entropy(reported: Reported) -> None:
    last = reported.run.validation[-1].losses["final"]
    assert last < 4.6
    assert learnt(reported.run, "final") is True
