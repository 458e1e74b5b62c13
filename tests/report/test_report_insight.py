"""What the report explains: idle phases, the critical path, exits' worth, and what a second plan changes."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import make_plan, make_profile, make_run
from decode_cases import with_decode_costs
from fake_run import EXIT_S, Reported, write_fake_run
from matplotlib.figure import Figure

from eeplan.errors import EeplanError, FileError, PlanError, SchemaError
from eeplan.plan import Plan, write_plan
from eeplan.report import build, compare
from eeplan.report.drawings import figures, planned_path
from eeplan.report.replan import Comparison, NoPlan, compared, to_json
from eeplan.report.rundir import read_run
from eeplan.report.sections_insight import replanned
from eeplan.schema import write_yaml
from eeplan.sim import planner
from eeplan.timeline import Message
from eeplan.usage import ExitUsage, load_usage


@pytest.fixture(scope="module")
def drawn(reported: Reported) -> dict[str, Figure]:
    _, measured, duration_s = reported.run.median_iteration
    return figures(reported.run, compare.predicted_timeline(reported.plan), measured, duration_s, "caption")


def gid(figure: Figure, name: str) -> Any:
    (axes,) = figure.axes
    return next(artist for artist in axes.get_children() if artist.get_gid() == name)


def test_idle_phases_and_busy_time_make_the_pipeline_part(reported: Reported) -> None:
    predicted, measured = compare.idle_phases(reported.run)
    for stage, found in zip(reported.plan.stages, predicted, strict=True):
        assert sum(found.values()) + stage.busy_s == pytest.approx(reported.plan.prediction.pipeline_s)
    # Medians of phases need not add up to a median, but with little noise they nearly do.
    timelines = [timeline for _, timeline in reported.run.timelines]
    for stage, found in enumerate(measured):
        whole = np.median([(t.pipeline_ns - t.busy_ns(stage)) / 1e9 for t in timelines])
        assert sum(found.values()) == pytest.approx(whole, rel=0.2)
    names = [quantity.name for quantity in compare.idle_quantities(reported.run)]
    assert len(set(names)) == len(names) == 3 * 4


def test_idle_bars_are_the_phases(drawn: dict[str, Figure], reported: Reported) -> None:
    for source, stages in zip(("predicted", "measured"), compare.idle_phases(reported.run), strict=True):
        for index, phases in enumerate(stages):
            left = 0.0
            for name, value_s in phases.items():
                bar = gid(drawn["idle"], f"{source}-{index}-{name}")
                assert (bar.get_x(), bar.get_width()) == pytest.approx((left, value_s * 1e3))
                assert bool(bar.get_hatch()) == (source == "predicted")
                left += bar.get_width()


def test_the_path_figure_adds_up_to_the_pipeline(drawn: dict[str, Figure], reported: Reported) -> None:
    (axes,) = drawn["critical_path"].axes
    bars = [patch for patch in axes.patches if str(patch.get_gid()).startswith("path-")]
    assert sum(bar.get_width() for bar in bars) == pytest.approx(reported.plan.prediction.pipeline_s * 1e3)
    assert len(bars) == len(reported.plan.critical_path.ops) + 1


def test_the_critical_path_is_drawn_from_start_to_end(drawn: dict[str, Figure], reported: Reported) -> None:
    line = gid(drawn["timeline"], "critical-path")
    x = line.get_xdata()
    assert (x[0], x[-1]) == pytest.approx((0.0, reported.plan.prediction.pipeline_s * 1e3))
    assert all(np.diff(x) >= -1e-9)
    spans = [node for node in planned_path(reported.run) if not isinstance(node, Message)]
    assert {node.stage for node in spans} == {0, 1, 2}


def test_shares_and_agreement_are_the_evaluation(drawn: dict[str, Figure], reported: Reported) -> None:
    evaluation = reported.run.evaluation
    assert evaluation is not None
    points = sorted(evaluation.thresholds, key=lambda point: point.threshold)
    line = gid(drawn["usage"], "agreement")
    assert list(line.get_ydata()) == [point.agreement_with_final for point in points]
    below = np.zeros(len(points))
    for index, name in enumerate(reported.run.loss_names[:-1]):
        corners = gid(drawn["usage"], f"share-{name}").get_paths()[0].vertices
        below = below + [point.exit_shares[index] for point in points]
        assert corners[:, 1].max() == pytest.approx(below.max())
    for name, worth in evaluation.exits.items():
        marks = gid(drawn["reliability"], f"bins-{name}").get_offsets()
        expected = [(one.mean_probability, one.accuracy) for one in worth.reliability]
        assert np.allclose(marks, expected)


def test_exits_and_decoding_are_compared_where_they_were_measured(reported: Reported, tmp_path: Path) -> None:
    exits = compare.exit_quantities(reported.run)
    assert [quantity.name for quantity in exits if quantity.name[0].isupper()] == ["Exit 3", "Exit 6"]
    assert exits[0].measured == pytest.approx(1.1 * EXIT_S)
    assert exits[0].predicted == pytest.approx(exits[1].predicted + exits[2].predicted)
    speeds = {quantity.name: quantity for quantity in compare.decode_quantities(reported.run)}
    assert set(speeds) == {"Mode full, threshold 1", "Mode catch_up, threshold 0.6"}
    assert speeds["Mode full, threshold 1"].error == pytest.approx(48 / 50 - 1)
    shutil.copytree(reported.folder, tmp_path / "run")
    (tmp_path / "run" / "profile.yaml").unlink()
    (tmp_path / "run" / "decode_bench.json").unlink()
    without = read_run(tmp_path / "run")
    assert [quantity.predicted for quantity in compare.exit_quantities(without)] == [EXIT_S, EXIT_S]
    assert compare.decode_quantities(without) == ()


def second_plan(tmp_path: Path, policy: str = "usage") -> tuple[Plan, Plan]:
    """A plan made from a guess, and one made from a usage in which nobody leaves at the first exit."""
    run = make_run(exits={"count": 2, "loss_weights": {"policy": policy}})
    profile = with_decode_costs(make_profile(run))
    first = make_plan(run, profile)
    measured = {
        "source": "a test",
        "num_layers": 8,
        "depths": [exit_.depth for exit_ in first.exits],
        "num_tokens": 100,
        "curve": [{"threshold": 0.8, "could_leave": [0.0, 0.5], "first_leave": [0.0, 0.5]}],
    }
    usage = ExitUsage.model_validate_json(json.dumps({"schema_version": 1, "measured": measured}))
    write_yaml(tmp_path / "usage.yaml", usage, "a test")
    second = planner.make_plan(run, "0" * 64, profile, "1" * 64, *load_usage(tmp_path / "usage.yaml"))
    return first, second


def test_another_plan_is_laid_beside_the_run(reported: Reported, tmp_path: Path) -> None:
    first, second = second_plan(tmp_path)
    ours = reported.run.plan.model_copy(update={"run": first.run})
    run = replace(reported.run, plan=ours)
    found = compared(run, second)
    assert isinstance(found, Comparison)
    # The one that knows a usage is the later one, whichever of both was trained.
    assert (found.before, found.after) == (ours, second)
    again = compared(replace(run, plan=second), first)
    assert isinstance(again, Comparison)
    assert (again.before, again.after) == (first, second)
    changes = {change.subject: change for change in again.changes}
    assert changes["loss weights"].is_change
    assert changes["exits.loss_weights"].before == changes["exits.loss_weights"].after == "usage"
    assert not changes["exits.placement"].is_change
    page = replanned(again)
    assert "measured on 100 tokens: a test" in page
    assert "assumed, not measured" in page
    document = to_json(again)
    assert document is not None
    assert len(document["changes"]) == len(again.changes)
    other_model = make_plan(make_run(model__num_layers=4))
    with pytest.raises(PlanError, match="is of another model"):
        compared(run, other_model)


def test_the_usage_that_the_run_measured_is_planned_with(reported: Reported) -> None:
    """Without being asked: the run's folder holds its profile and its usage."""
    assert reported.summary["replanned"] is not None
    found = compared(reported.run, None)
    assert isinstance(found, Comparison)
    assert found.is_made_here
    assert found.after.usage_sha256 == reported.run.usage_sha256
    assert found.after.decode is not None
    text = (reported.out / "index.html").read_text()
    assert "What the measured usage changes" in text


def test_planning_again_that_fails_is_told(reported: Reported, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Plan:
        raise EeplanError("nothing fits")

    monkeypatch.setattr(planner, "make_plan", fail)
    found = compared(reported.run, None)
    assert found == NoPlan("nothing fits")
    assert "nothing fits" in replanned(found)
    assert to_json(found) == {"problem": "nothing fits"}


def test_a_plan_that_knew_the_usage_is_not_made_again(reported: Reported) -> None:
    known = reported.run.plan.model_copy(update={"usage_sha256": reported.run.usage_sha256})
    assert compared(replace(reported.run, plan=known), None) is None
    assert replanned(None) == ""


def test_a_plan_file_can_be_named(
    reported: Reported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(tmp_path / "other.yaml", reported.run.plan)
    given: list[Comparison] = []
    monkeypatch.setattr(build, "contents", lambda *arguments: given.append(arguments[-1]) or {})
    summary = build.write_report(reported.folder, tmp_path / "page", tmp_path / "other.yaml")
    changes = summary["replanned"]["changes"]
    assert changes
    assert all(one["before"] == one["after"] for one in changes)
    assert "Every decision stays as it was" in replanned(given[0])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("evaluation.json", lambda d: d["exits"].pop("final"), "of different runs"),
        ("evaluation.json", lambda d: d["thresholds"][0]["exit_shares"].pop(), "shares for"),
        ("evaluation.json", lambda d: d.update(thresholds=[]), "thresholds"),
        ("decode_bench.json", lambda d: d["runs"][0].pop("tokens_per_s"), "tokens_per_s"),
    ],
)
def test_damaged_evaluations_are_refused(tmp_path: Path, name: str, change: Any, message: str) -> None:
    write_fake_run(tmp_path / "run", iterations=2, recorded=1, prompts=0)
    path = tmp_path / "run" / name
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises((FileError, SchemaError), match=message):
        read_run(tmp_path / "run")
    path.write_text("{")
    with pytest.raises(FileError, match="is not JSON"):
        read_run(tmp_path / "run")
