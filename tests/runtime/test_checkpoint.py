"""Checkpoints on disk: what damage is noticed, what a full disk leaves, which plans may use which."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_data import plan_two_layers

from eeplan.errors import CheckpointError
from eeplan.plan import Plan
from eeplan.runtime import backend, checkpoint, checkpoint_files, resume
from eeplan.runtime.checkpoint_files import FileOperations, checkpoints_in, verify
from eeplan.runtime.checkpoint_state import Position, load_tensors, named_state
from eeplan.runtime.plan_identity import training_hash
from eeplan.runtime.setup import Rank, set_up
from eeplan.runtime.stage import loss_weights

EXITS = {"layers": [{"layer": 1, "weight": 0.3}]}


@dataclass(frozen=True)
class World:
    """A rank, and a folder with its checkpoints of iterations 4 and 8."""

    rank: Rank
    folder: Path
    data: Path

    @property
    def plan(self) -> Plan:
        return self.rank.plan


def plan_in(folder: Path, **overrides: Any) -> Plan:
    return plan_two_layers(folder, **({"exits": EXITS} | overrides))


def save(rank: Rank, folder: Path, iteration: int, operations: FileOperations | None = None) -> Path:
    weights = loss_weights(rank.plan, iteration + 1)
    return checkpoint.save(
        folder,
        iteration,
        rank.model,
        rank.plan,
        training=rank.training,
        position=Position(iteration, 16 * iteration, 16 * iteration, iteration, weights),
        backend=rank.backend,
        operations=operations,
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("saved")
    with backend.single_process():
        rank = set_up(plan_in(folder))
        for iteration in (4, 8):
            save(rank, folder / "run", iteration)
        yield World(rank, folder / "run", folder)


@pytest.fixture
def world(saved: World, tmp_path: Path) -> World:
    shutil.copytree(saved.folder, tmp_path / "run")
    return World(saved.rank, tmp_path / "run", saved.data)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


def newest(world: World) -> Path:
    return checkpoints_in(world.folder)[0]


def passes_over_the_newest(world: World) -> str:
    """The note on the damaged one; the one before is what training goes on from."""
    found = resume.find(world.folder, world.plan)
    assert found is not None
    assert (found.position.iteration, found.folder.name) == (4, "iter_0000004")
    damage, going_on = found.notes
    assert "iter_0000008" in damage
    assert going_on.startswith("going on from checkpoint iter_0000004")
    return damage


def test_a_checkpoint_is_found_and_whole(world: World) -> None:
    found = resume.find(world.folder, world.plan)
    assert found is not None
    assert found.position == Position(8, 128, 128, 8, {"exit_1": 0.3, "final": 1.0})
    assert checkpoint.resolve(world.folder) == newest(world)
    assert {path.name for path in files_of(newest(world))} == {
        *("manifest.json", "plan.yaml", "random.pt", "tokenizer.json", ".metadata", "__0_0.distcp"),
    }
    assert resume.find(world.folder / "nothing", world.plan) is None


def test_every_truncation_is_noticed(world: World) -> None:
    for path in files_of(newest(world)):
        whole = path.read_bytes()
        for length in {0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 1}:
            path.write_bytes(whole[:length])
            assert path.name in passes_over_the_newest(world), length
            with pytest.raises(CheckpointError, match=path.name.replace(".", r"\.")):
                checkpoint.load_model(newest(world), world.rank.backend)
        path.write_bytes(whole)
    assert resume.find(world.folder, world.plan).position.iteration == 8  # type: ignore[union-attr]


def test_a_damaged_newest_model_is_replaced_by_the_one_before_and_said_so(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (newest(world) / "random.pt").write_bytes(b"")
    checkpoint.load_model(world.folder, world.rank.backend)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        f"eeplan: checkpoint {newest(world)}: random.pt is damaged (checksum differs); an older one is used"
    ]
    assert checkpoint.load_tokenizer_path(world.folder).parent.name == "iter_0000004"
    (world.folder / "iter_0000004" / "random.pt").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is valid"):
        checkpoint.load_model(world.folder, world.rank.backend)


def flip_bits(world: World, count: int) -> None:
    """Flip random bits one at a time, each file with an equal share, the manifest included."""
    rng = random.Random(5)
    files = files_of(newest(world))
    for number in range(count):
        path = files[number % len(files)]
        whole = bytearray(path.read_bytes())
        bit = rng.randrange(8 * len(whole))
        whole[bit // 8] ^= 1 << bit % 8
        path.write_bytes(whole)
        with pytest.raises(CheckpointError):
            verify(newest(world))
        whole[bit // 8] ^= 1 << bit % 8
        path.write_bytes(whole)
        verify(newest(world))


def test_bit_flips_are_noticed(world: World) -> None:
    flip_bits(world, 60)


@pytest.mark.long
def test_500_bit_flips_are_noticed(world: World) -> None:
    flip_bits(world, 500)


def test_every_missing_file_is_noticed(world: World) -> None:
    for path in files_of(newest(world)):
        path.rename(world.folder / "aside")
        assert path.name in passes_over_the_newest(world)
        (world.folder / "aside").rename(path)


def test_unreadable_files_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read = checkpoint_files._sha256

    def fail(path: Path) -> str:
        if path.parent.name == "iter_0000008":
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(checkpoint_files, "_sha256", fail)
    assert "cannot be read (Input/output error)" in passes_over_the_newest(world)


def test_nothing_valid_is_an_error_and_not_random_weights(world: World) -> None:
    for folder in checkpoints_in(world.folder):
        (folder / "random.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"iter_0000008.*iter_0000004.*--restart"):
        resume.find(world.folder, world.plan)


def test_restart_forgets_all(world: World) -> None:
    run = world.folder.parent / "whole"
    run.mkdir()
    shutil.move(world.folder, run / "checkpoints")
    (run / "metrics.jsonl").write_text("{}\n")
    resume.start_over(run)
    assert list(run.iterdir()) == []


def counted(world: World, folder: Path) -> list[str]:
    seen: list[str] = []
    save(world.rank, folder, 12, FileOperations(lambda operation, path: seen.append(operation)))
    return seen


def failing_at(number: int, error: OSError) -> FileOperations:
    done = 0

    def before(operation: str, path: Path) -> None:
        nonlocal done
        done += 1
        if done > number:
            raise error

    return FileOperations(before)


def test_a_full_disk_leaves_the_previous_checkpoint(world: World, tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    shutil.copytree(world.folder, tmp_path / "count")
    operations = counted(world, tmp_path / "count")
    committed = len(operations) - 1 - operations[::-1].index("open")
    for number in {*range(6), *range(6, committed, 40), *range(committed - 12, committed)}:
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(world.rank, world.folder, 12, failing_at(number, full))
        found = resume.find(world.folder, world.plan)
        assert found is not None
        assert len(found.notes) == 1
        assert found.position.iteration in (8, 12)
        verify(checkpoint.resolve(world.folder))
        assert not list(world.folder.glob(".iter*partial")), "the space is given back"
        shutil.rmtree(world.folder / "iter_0000012", ignore_errors=True)
    save(world.rank, world.folder, 12)
    assert [path.name for path in checkpoints_in(world.folder)] == ["iter_0000012", "iter_0000008"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_disk_that_is_full_at_any_operation_leaves_the_previous_checkpoint(
    world: World, tmp_path: Path
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    shutil.copytree(world.folder, tmp_path / "count")
    operations = counted(world, tmp_path / "count")
    # Up to the last file that is written; what follows removes old checkpoints, of which there may be none.
    for number in range(len(operations) - 1 - operations[::-1].index("open")):
        with pytest.raises(CheckpointError, match="No space left on device"):
            save(world.rank, world.folder, 12, failing_at(number, full))
        found = resume.find(world.folder, world.plan)
        assert found is not None
        assert (len(found.notes), found.position.iteration in (8, 12)) == (1, True)
        shutil.rmtree(world.folder / "iter_0000012", ignore_errors=True)


def test_a_damaged_one_is_replaced_when_its_iteration_comes_again(world: World) -> None:
    (newest(world) / "random.pt").write_bytes(b"")
    passes_over_the_newest(world)
    save(world.rank, world.folder, 8)
    verify(newest(world))
    assert sorted(path.name for path in world.folder.iterdir()) == ["iter_0000004", "iter_0000008", "latest"]


def other_plan(world: World, folder: Path, **overrides: Any) -> Plan:
    for path in world.data.glob("text*"):
        shutil.copy(path, folder)
    return plan_in(folder, **overrides)


@pytest.mark.parametrize(
    "change",
    [
        {"training__lr": 0.5},
        {"training__train_iters": 5},
        {"training__seed": 7},
        {"model__rotary_base": 500},
        {"exits": {"layers": [{"layer": 1, "weight": 0.31}]}},
        {"exits": {"layers": [{"layer": 1, "weight": 0.3, "head": "mlp"}]}},
        {"exits": {**EXITS, "loss_weights": {"warmup": {"init": 0.5, "iters": 2}}}},
        {"exits": {**EXITS, "loss_weights": {"dynamic": True}}},
        {"exits": {**EXITS, "distillation": {"weight": 0.5}}},
        {"exits": {**EXITS, "temperature": 2.0}},
    ],
)
def test_a_plan_that_learns_something_else_is_refused(
    world: World, tmp_path: Path, change: dict[str, Any]
) -> None:
    with pytest.raises(CheckpointError, match="was written for another plan"):
        resume.find(world.folder, other_plan(world, tmp_path, **change))


@pytest.mark.parametrize(
    "change",
    [
        {"parallel__pipeline_model_parallel_size": 2},
        {"parallel__tensor_model_parallel_size": 2},
        {"parallel__data_parallel_size": 2},
        {"training__save_interval": 1, "training__log_interval": 3, "training__async_save": True},
        {"training__eval_interval": 1, "training__wandb_project": "somewhere"},
    ],
)
def test_a_plan_of_another_layout_may_go_on(world: World, tmp_path: Path, change: dict[str, Any]) -> None:
    plan = other_plan(world, tmp_path, **change)
    assert training_hash(plan) == training_hash(world.plan)
    assert resume.find(world.folder, plan) is not None


def test_a_model_alone_cannot_be_gone_on_from(world: World, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "model", 3, world.rank.model, world.plan)
    with pytest.raises(CheckpointError, match="without optimizer state"):
        resume.find(tmp_path / "model", world.plan)
    checkpoint.load_model(tmp_path / "model", world.rank.backend)


def test_nothing_is_loaded_half(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor that is not in the file: no other is loaded either."""
    real = named_state

    def with_a_stranger(*args: Any) -> Any:
        yield from real(*args)
        name, parameter = next(iter(world.rank.model.named_global_parameters()))
        yield "a stranger", name, parameter.detach(), parameter

    def snapshot() -> list[torch.Tensor]:
        return [tensor.clone() for _, _, tensor, _ in real(world.rank.model, world.rank.training)]

    with torch.no_grad():
        for parameter in world.rank.model.parameters():
            parameter.mul_(1.5)
    before = snapshot()
    monkeypatch.setattr("eeplan.runtime.checkpoint_state.named_state", with_a_stranger)
    with pytest.raises(CheckpointError, match="it has no a stranger"):
        load_tensors(newest(world), world.rank.model, world.rank.training)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    monkeypatch.undo()
    load_tensors(newest(world), world.rank.model, world.rank.training)
    assert not all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
