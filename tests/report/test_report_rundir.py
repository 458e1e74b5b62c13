"""Reading a run directory: what is there is read whole, what is missing or wrong is named in one line."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_run import Reported

from eeplan.errors import EeplanError
from eeplan.report.rundir import read_run


def test_everything_is_read(reported: Reported) -> None:
    run = reported.run
    assert run.loss_names == ("exit_3", "exit_6", "final")
    assert [record.iteration for record in run.train] == list(range(1, 26))
    assert [record.iteration for record in run.validation] == [0, 25]
    assert run.unigram_entropy_nats == 4.6
    assert [number for number, _ in run.timelines] == [23, 24, 25]
    assert len(run.samples) == 2
    assert run.profile is not None


def test_the_iteration_shown_is_the_median_of_the_recorded(reported: Reported) -> None:
    number, timeline, duration_s = reported.run.median_iteration
    times = {r.iteration: r.iteration_time_s for r in reported.run.train}
    recorded = sorted((times[n], n) for n, _ in reported.run.timelines)
    assert (duration_s, number) == recorded[1]
    assert timeline == dict(reported.run.timelines)[number]


def test_profile_and_samples_are_optional(reported: Reported, tmp_path: Path) -> None:
    folder = copy(reported, tmp_path)
    (folder / "profile.yaml").unlink()
    (folder / "samples.json").unlink()
    run = read_run(folder)
    assert run.profile is None
    assert run.samples == ()


def test_a_diverged_loss_is_kept(reported: Reported, tmp_path: Path) -> None:
    folder = copy(reported, tmp_path)
    change_lines(folder, lambda line: line["losses"].update(final=math.nan) if "losses" in line else None)
    assert math.isnan(read_run(folder).train[-1].losses["final"])


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(text)

    return change


def in_json(name: str, change: Callable[[Any], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return apply


def in_metrics(change: Callable[[Any], object]) -> Callable[[Path], None]:
    return lambda folder: change_lines(folder, change)


def change_lines(folder: Path, change: Callable[[Any], object]) -> None:
    path = folder / "metrics.jsonl"
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    for document in documents:
        change(document)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))


def copy(reported: Reported, tmp_path: Path) -> Path:
    return Path(shutil.copytree(reported.folder, tmp_path / "run"))


BROKEN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no folder": (shutil.rmtree, ("does not exist", "eeplan train")),
    "no plan": (remove("plan.yaml"), ("plan.yaml", "eeplan train")),
    "not finished": (remove("measured.json"), ("measured.json", "training has not finished", "eeplan train")),
    "no metrics": (remove("metrics.jsonl"), ("metrics.jsonl", "eeplan train")),
    "no timelines": (remove("timelines.json"), ("timelines.json", "eeplan train")),
    "edited plan": (
        lambda d: (d / "plan.yaml").write_text((d / "plan.yaml").read_text().replace("even", "odd", 1)),
        ("content_sha256", "plan again"),
    ),
    "other profile": (
        lambda d: (d / "profile.yaml").write_text((d / "profile.yaml").read_text() + "# changed\n"),
        ("profile.yaml", "not the one"),
    ),
    "measured is no JSON": (write("measured.json", "{"), ("measured.json", "not JSON")),
    "measured is a list": (write("measured.json", "[]"), ("measured.json",)),
    "measured lacks a key": (
        in_json("measured.json", lambda m: m.pop("peak_bytes")),
        ("measured.json", "missing key 'peak_bytes'"),
    ),
    "zero iteration time": (
        in_json("measured.json", lambda m: m.update(iteration_time_s=0)),
        ("measured.json", "iteration_time_s"),
    ),
    "peaks of other stages": (
        in_json("measured.json", lambda m: m["peak_bytes"].pop()),
        ("measured.json", "peak_bytes has 2 entries", "3 stages"),
    ),
    "no peaks": (
        in_json("measured.json", lambda m: m.update(peak_bytes=[0, 0, 0])),
        ("measured.json", "memory was not recorded"),
    ),
    "empty metrics": (write("metrics.jsonl", ""), ("metrics.jsonl", "kind 'train'")),
    "torn metrics": (write("metrics.jsonl", '{"kind": "tr'), ("metrics.jsonl, line 1", "not a JSON object")),
    "losses of another plan": (
        in_metrics(lambda line: line.get("losses", {}).update(exit_5=1.0)),
        ("metrics.jsonl, line 2", "exit_5"),
    ),
    "loss as text": (
        in_metrics(lambda line: line.get("losses", {}).update(final="low")),
        ("metrics.jsonl, line 2", "losses.final"),
    ),
    "no iterations recorded": (
        write("timelines.json", '{"iterations": []}'),
        ("timelines.json", "iterations"),
    ),
    "timeline of other stages": (
        in_json("timelines.json", lambda t: t["iterations"][0]["timeline"]["spans"].pop()),
        ("timelines.json, iteration 23", "has 2 stages, the plan has 3"),
    ),
    "unknown span kind": (
        in_json("timelines.json", lambda t: t["iterations"][0]["timeline"]["spans"][0][0].update(kind="nap")),
        ("timelines.json, iteration 23", "kind"),
    ),
    "iteration not logged": (
        in_json("timelines.json", lambda t: t["iterations"][0].update(iteration=99)),
        ("timelines.json, iteration 99", "metrics.jsonl"),
    ),
    "sample from another model": (
        in_json("samples.json", lambda s: s[0]["tokens"][0].update(exit="exit_8")),
        ("samples.json", "exit_8"),
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_directories_are_refused_in_one_line(reported: Reported, tmp_path: Path, name: str) -> None:
    damage, expected = BROKEN[name]
    folder = copy(reported, tmp_path)
    damage(folder)
    with pytest.raises(EeplanError) as caught:
        read_run(folder)
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message
