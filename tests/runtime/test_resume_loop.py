"""The training loop itself, started again and again in one folder: what it says, keeps and repeats."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from small_data import plan_two_layers

from eeplan.errors import CheckpointError, FileError, Preempted, TrainingError
from eeplan.plan import Plan, load_plan
from eeplan.runtime import backend, loop
from eeplan.runtime.checkpoint_files import checkpoints_in
from eeplan.runtime.recording import MetricsWriter

ITERATIONS = 6


@pytest.fixture(autouse=True)
def left_alone() -> Any:
    """A failed run leaves the process group to the next test otherwise."""
    yield
    backend.stop()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run: checkpoints every two iterations, of which two stay."""
    folder = tmp_path_factory.mktemp("loop")
    plan = plan_two_layers(
        folder,
        training__global_batch_size=4,
        training__train_iters=ITERATIONS,
        training__save_interval=2,
        training__lr=0.01,
        training__eval_iters=1,
        training__eval_interval=2,
    )
    loop.train(plan, folder / "run")
    return folder


@pytest.fixture
def run(pristine: Path, tmp_path: Path) -> Path:
    shutil.copytree(pristine / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def plan(pristine: Path) -> Plan:
    return load_plan(pristine / "plan.yaml")


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    reader = dcp.FileSystemReader(folder)
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [
        record
        for record in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        if record["kind"] == kind
    ]


def names(run: Path) -> list[str]:
    return [path.name for path in checkpoints_in(run / "checkpoints")]


def check_equal_runs(run: Path, pristine: Path) -> None:
    assert names(run) == ["iter_0000006", "iter_0000004"]
    ours, theirs = (tensors(at / "checkpoints" / "iter_0000006") for at in (run, pristine / "run"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    timeless = ("iteration", "consumed_samples", "lr", "grad_norm", "losses")
    ours_logged, theirs_logged = (
        [{key: record[key] for key in timeless} for record in records(at, "train")]
        for at in (run, pristine / "run")
    )
    assert ours_logged == theirs_logged
    for kind, least in (("validation", 4), ("quality", 4)):
        assert len(records(run, kind)) >= least
        assert records(run, kind) == records(pristine / "run", kind)
    for name in ("evaluation.json", "usage.yaml"):
        assert (run / name).read_bytes() == (pristine / "run" / name).read_bytes()


def test_a_finished_run_has_nothing_left_to_do(
    run: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    loop.train(plan, run)
    assert capsys.readouterr().err.splitlines() == [
        f"going on from checkpoint iter_0000006 in {run}/checkpoints",
        f"all {ITERATIONS} iterations are done; nothing is left to train",
    ]
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_iterations_after_the_last_checkpoint_run_again(
    run: Path, pristine: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a SIGKILL: two iterations were logged that no checkpoint holds."""
    shutil.rmtree(run / "checkpoints" / "iter_0000006")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "iter')
    loop.train(plan, run)
    assert f"going on from checkpoint iter_0000004 in {run}/checkpoints" in capsys.readouterr().err
    check_equal_runs(run, pristine)


def test_a_damaged_checkpoint_is_passed_over_in_one_line(
    run: Path, pristine: Path, plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "checkpoints" / "iter_0000006" / "__0_0.distcp"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    file.write_bytes(damaged)
    loop.train(plan, run)
    said = [line for line in capsys.readouterr().err.splitlines() if "checkpoint" in line]
    assert said == [
        f"checkpoint {file.parent}: __0_0.distcp is damaged (checksum differs)",
        f"going on from checkpoint iter_0000004 in {run}/checkpoints",
    ]
    check_equal_runs(run, pristine)


def test_no_valid_checkpoint_is_an_error_and_restart_the_way_out(
    run: Path, pristine: Path, plan: Plan
) -> None:
    for folder in checkpoints_in(run / "checkpoints"):
        (folder / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="--restart"):
        loop.train(plan, run)
    backend.stop()
    loop.train(plan, run, restart=True)
    check_equal_runs(run, pristine)


def test_a_request_to_stop_saves_and_the_next_start_goes_on(
    tmp_path: Path, pristine: Path, plan: Plan
) -> None:
    """Stopped after every iteration; six starts do what one does."""
    run = tmp_path / "run"
    for iteration in range(1, ITERATIONS):
        with pytest.raises(Preempted, match=f"after iteration {iteration};"):
            loop.train(plan, run, stop_is_requested=lambda: True)
        assert names(run)[0] == f"iter_{iteration:07d}"
    loop.train(plan, run, stop_is_requested=lambda: True)
    shutil.rmtree(run / "checkpoints" / "iter_0000005")
    shutil.copytree(pristine / "run/checkpoints/iter_0000004", run / "checkpoints" / "iter_0000004")
    check_equal_runs(run, pristine)


def test_a_gradient_that_is_not_finite_changes_nothing(
    run: Path, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses are fine here; one gradient is not. Saved is what was before."""
    shutil.rmtree(run / "checkpoints" / "iter_0000006")
    real = loop.set_up

    def with_a_bad_gradient(of: Plan) -> Any:
        rank = real(of)
        norm = rank.model.exits["1"].norm.weight
        norm.register_hook(lambda gradient: gradient * float("inf"))
        return rank

    monkeypatch.setattr(loop, "set_up", with_a_bad_gradient)
    with pytest.raises(
        TrainingError, match=r"the gradient of exits\.1\.norm\.weight on rank 0 in iteration 5"
    ):
        loop.train(plan, run)
    assert names(run) == ["iter_0000004"]


def test_a_full_disk_under_the_metrics_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path, io.StringIO(), 9, 4)
    with pytest.raises(FileError, match=r"cannot be written \(No space left on device\).*goes on") as told:
        writer.reference(5.0)
    assert "\n" not in str(told.value)


def test_metrics_go_on_without_repeating(tmp_path: Path) -> None:
    values = {"losses": {"final": 1.0}, "lr": 0.1, "grad_norm": 1.0, "iteration_time_s": 1, "tokens_per_s": 1}

    def write(after: int | None, iterations: range) -> None:
        writer = MetricsWriter(tmp_path, io.StringIO(), 9, 4, after_iteration=after)
        for iteration in iterations:
            writer.train(iteration, values, print_line=False)
        writer.close()

    write(None, range(1, 6))
    write(3, range(4, 8))
    assert [record["iteration"] for record in records(tmp_path, "train")] == [*range(1, 8)]
    write(None, range(1, 3))
    assert [record["iteration"] for record in records(tmp_path, "train")] == [1, 2]
