"""The paper's ablation, predicted from its standard rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eeplan.errors import EeplanError
from eeplan.sim.schedule import one_f_one_b
from eeplan.validate import paper
from eeplan.validate.ablation import PUBLISHED, SETUPS, SHAPES, read_ablation
from eeplan.validate.paper import Assumptions, validate_paper


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    return validate_paper()


def cell(result: dict[str, Any], model: str, setup: str) -> dict[str, Any]:
    return next(c for c in result["cells"] if (c["model"], c["setup"]) == (model, setup))


def test_every_cell_is_within_the_promised_errors(result: dict[str, Any]) -> None:
    assert len(result["cells"]) == 10
    for one in result["cells"]:
        assert abs(one["time_error"]) <= 0.015, one
        assert abs(one["memory_error"]) <= 0.03, one
        assert one["time_error"] == pytest.approx(one["predicted_s"] / one["measured_s"] - 1)
        assert one["memory_error"] == pytest.approx(one["predicted_gb"] / one["measured_gb"] - 1)


def test_the_setups_are_in_the_measured_order(result: dict[str, Any]) -> None:
    assert result["order"] == {name: {"time": True, "memory": True} for name in SHAPES}


def test_only_standard_rows_calibrate(tmp_path: Path, result: dict[str, Any]) -> None:
    """Predictions do not move when the rows with exits are measured differently; the errors do."""
    rows = [
        {"model": m, "setup": s, "iteration_time_s": t if s == "standard" else 2 * t, "peak_memory_gb": g}
        for m, s, t, g in PUBLISHED
    ]
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"rows": rows}))
    other = validate_paper(path)
    for mine, theirs in zip(result["cells"], other["cells"], strict=True):
        assert theirs["predicted_s"] == pytest.approx(mine["predicted_s"], rel=1e-9)
        assert theirs["predicted_gb"] == pytest.approx(mine["predicted_gb"], rel=1e-9)
    assert other["time"]["max_abs"] > 0.4
    for one in result["cells"]:
        if one["setup"] == "standard":
            assert one["time_error"] == pytest.approx(0, abs=1e-6)
            assert one["memory_error"] == pytest.approx(0, abs=1e-6)


def test_every_constant_has_a_value_and_a_source(result: dict[str, Any]) -> None:
    constants = {one["name"]: one for one in result["constants"]}
    assert all(one["source"] for one in result["constants"])
    calibrated = {name for name, one in constants.items() if one["source"].startswith("calibrated")}
    assert calibrated == {
        *(f"flops_per_s[{name}]" for name in SHAPES),
        *("layer_bytes_per_value", "constant_bytes"),
    }
    # The figures that facts about the table give: 52.9 bytes per value and 2.6 GB.
    assert constants["layer_bytes_per_value"]["value"] == pytest.approx(52.9, abs=0.2)
    assert constants["constant_bytes"]["value"] == pytest.approx(2.6e9, abs=0.05e9)


def test_assumptions_move_order_before_they_move_errors(result: dict[str, Any]) -> None:
    for other in result["sensitivity"]:
        assert other["time"]["max_abs"] <= 0.015
        assert other["memory"]["max_abs"] <= 0.03
    assert any(not other["order"]["1.3B"]["memory"] for other in result["sensitivity"])


def test_the_memory_of_exits_adds_up(result: dict[str, Any]) -> None:
    """7B, Optimization 1: a matrix of 18 bytes per parameter, one softmax and its temporaries on stage 0."""
    standard, deferred, eager = (
        cell(result, "7B", s)["predicted_gb"] for s in ("standard", "optimization_1", "early_exit")
    )
    logits, matrix, states = 2 * 2048 * 32_000, 4096 * 32_000, 2 * 2048 * 4096
    # Both runs keep the gradient from the next stage, and the layers' own of the standard run is gone.
    added = 18 * matrix + (4 + 8) * logits + 2 * states
    assert (deferred - standard) * 1e9 == pytest.approx(added, abs=3 * 2 * states)
    assert (eager - deferred) * 1e9 == pytest.approx(3 * (4 * logits + 2 * states), abs=3 * 2 * states)
    assert cell(result, "1.3B", "optimization_2")["peak_stage"] == 1


def test_the_wrong_schedule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with a quarter of the microbatches for the rows with exits, times are far off."""
    table = read_ablation(None)
    calibration, _ = paper._predict_all(table, Assumptions())
    monkeypatch.setattr(paper, "one_f_one_b", lambda stages, microbatches: one_f_one_b(stages, 16))
    seconds, _, _ = paper._predict("7B", SETUPS["both"], table.setup, calibration)
    assert seconds < 0.4 * 17.79


def test_wrong_bytes_per_logit_are_seen(result: dict[str, Any]) -> None:
    table = read_ablation(None)
    calibration, _ = paper._predict_all(table, Assumptions())
    wrong = replace(calibration, assumed=Assumptions(logit_temporary_bytes=40))
    _, peak_bytes, _ = paper._predict("1.3B", SETUPS["early_exit"], table.setup, wrong)
    assert peak_bytes / 1e9 / 24.05 - 1 > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["rows"].pop(0), "the standard rows of 1.3B and 7B, which calibrate"),
        (lambda d: d["rows"].append(d["rows"][0]), "expected each row once"),
        (lambda d: d["rows"][0].update(setup="other"), "rows[0].setup"),
        (lambda d: d["rows"][0].update(iteration_time_s=0.0), "rows[0].iteration_time_s"),
        (lambda d: d["rows"][0].update(iteration_time_s=1e-6), "a standard row of 1e-06 s"),
        (lambda d: d.update(setup={"pipeline_parallel": 5}), "a divisor of the models' layers"),
    ],
)
def test_other_tables_are_refused_in_one_line(tmp_path: Path, change: Any, message: str) -> None:
    document = {
        "rows": [
            {"model": m, "setup": s, "iteration_time_s": t, "peak_memory_gb": g} for m, s, t, g in PUBLISHED
        ]
    }
    change(document)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(document))
    with pytest.raises(EeplanError) as caught:
        validate_paper(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_published_figures_are_those_of_the_data_file(validation_data: Path) -> None:
    document = json.loads((validation_data / "table1.json").read_text())
    rows = [(r["model"], r["setup"], r["iteration_time_s"], r["peak_memory_gb"]) for r in document["rows"]]
    assert rows == list(PUBLISHED)
    assert validate_paper(validation_data / "table1.json")["time"] == validate_paper()["time"]
