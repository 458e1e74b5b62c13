"""Weights & Biases gets what TensorBoard gets, if asked for; a fake module stands in for it."""

from __future__ import annotations

import importlib.util
import io
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from world import make_world

from eeplan.errors import LaunchError
from eeplan.plan import load_plan, write_plan
from eeplan.runtime.preflight import check_training
from eeplan.runtime.recording import MetricsWriter
from eeplan.runtime.wandb_log import WandbLog

VALUES = {"losses": {"exit_2": 2.0, "final": 1.0}, "lr": 0.1, "grad_norm": 3.0}
TIMES = {"iteration_time_s": 0.5, "tokens_per_s": 64.0}


class FakeRun:
    """Remembers what it is told."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.is_finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        assert not self.is_finished
        self.logged.append((step, values))

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[FakeRun]:
    """Runs begun in the fake module."""
    begun: list[FakeRun] = []

    def init(**settings: Any) -> FakeRun:
        begun.append(FakeRun(**settings))
        return begun[-1]

    fake = types.ModuleType("wandb")
    fake.init = init  # type: ignore[attr-defined]
    fake.__spec__ = importlib.util.spec_from_loader("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return begun


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan that logs to a project."""
    folder = make_world(tmp_path_factory.mktemp("wandb"))
    plan = load_plan(folder / "plan.yaml")
    training = plan.run.training.model_copy(update={"wandb_project": "exits"})
    run = plan.run.model_copy(update={"training": training})
    write_plan(folder / "plan.yaml", plan.model_copy(update={"run": run}))
    return folder


def test_what_is_logged(runs: list[FakeRun], world: Path, tmp_path: Path) -> None:
    plan = load_plan(world / "plan.yaml")
    writer = MetricsWriter(tmp_path, io.StringIO(), 9, 4, wandb=WandbLog("exits", plan, tmp_path))
    writer.train(3, {**VALUES, **TIMES}, print_line=False)
    quality = {name: {"agreement_with_final": 0.5, "calibration_error": 0.1} for name in ("exit_2", "final")}
    writer.evaluation("validation", 3, {"exit_2": 2.5, "final": 1.5}, quality)
    writer.close()
    (run,) = runs
    assert run.is_finished
    assert {step for step, _ in run.logged} == {3}
    merged = {key: value for _, values in run.logged for key, value in values.items()}
    assert merged["train/exit_2 loss"] == 2.0
    assert merged["train/grad_norm"] == 3.0
    assert merged["validation/final loss"] == 1.5
    assert merged["validation/exit_2 agreement with final"] == 0.5
    assert (run.settings["project"], run.settings["name"]) == ("exits", "small")
    assert run.settings["config"]["model"]["num_layers"] == 8


def test_going_on_in_a_folder_goes_on_with_its_run(runs: list[FakeRun], world: Path, tmp_path: Path) -> None:
    plan = load_plan(world / "plan.yaml")
    for folder in (tmp_path / "a", tmp_path / "a", tmp_path / "b"):
        WandbLog("exits", plan, folder)
    first, again, other = (run.settings["id"] for run in runs)
    assert first == again != other
    assert {run.settings["resume"] for run in runs} == {"allow"}


def test_asked_for_and_absent_is_one_line(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "wandb" else find(name))
    with pytest.raises(LaunchError, match="wandb is not installed; run pip install wandb") as caught:
        check_training(world / "plan.yaml", tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_asked_for_and_there(runs: list[FakeRun], world: Path, tmp_path: Path) -> None:
    assert check_training(world / "plan.yaml", tmp_path / "run").run.training.wandb_project == "exits"
