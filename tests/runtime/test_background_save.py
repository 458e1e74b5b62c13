"""Saving in the background: what was true at the step, published whole, one at a time."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_data import plan_two_layers

from eeplan.errors import CheckpointError, Preempted
from eeplan.runtime import backend, checkpoint, loop, resume
from eeplan.runtime.background_save import BackgroundSaver
from eeplan.runtime.batches import build_batches
from eeplan.runtime.checkpoint_files import FileOperations, checkpoints_in, verify
from eeplan.runtime.checkpoint_state import whole_state
from eeplan.runtime.setup import Rank, set_up


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rank]:
    folder = tmp_path_factory.mktemp("background")
    plan = plan_two_layers(
        folder, training__train_iters=6, training__save_interval=2, training__async_save=True
    )
    with backend.single_process():
        yield set_up(plan)


class Gate:
    """File operations that stop at a rename until they are let through."""

    def __init__(self, error: OSError | None = None) -> None:
        self.is_reached, self.may_pass = threading.Event(), threading.Event()
        self.error = error
        self.operations = FileOperations(self.before)

    def before(self, operation: str, path: Path) -> None:
        if operation == "open" and not self.is_reached.is_set():
            self.is_reached.set()
            assert self.may_pass.wait(60)
            if self.error is not None:
                raise self.error


def taken(rank: Rank, stream: Any, iteration: int, *, copies: bool = True) -> checkpoint.Snapshot:
    return checkpoint.snapshot(
        iteration,
        rank.model,
        rank.plan,
        training=rank.training,
        position=resume.position_of(rank, stream, iteration),
        backend=rank.backend,
        copies=copies,
    )


@pytest.mark.parametrize("copies", [True, False])
def test_what_was_true_at_the_step_is_saved(rank: Rank, tmp_path: Path, copies: bool) -> None:
    """Training goes on while the writer stands still; without a copy (the control) it would show."""
    stream = build_batches(rank.plan.run, rank_info=rank.backend)
    expected = {name: tensor.clone() for name, tensor in whole_state(rank.model, rank.training).items()}
    gate = Gate()
    saver = BackgroundSaver(gate.operations)
    saver.save(tmp_path, taken(rank, stream, 1, copies=copies))
    assert gate.is_reached.wait(60)
    loop._train_step(rank, stream, 1)
    assert saver.is_busy
    assert checkpoints_in(tmp_path) == [], "nothing is to be seen before it is whole"
    gate.may_pass.set()
    saver.wait()
    verify(checkpoint.resolve(tmp_path))
    found = resume.find(tmp_path, rank.plan)
    assert found is not None
    resume.restore(rank, stream, found)
    restored = whole_state(rank.model, rank.training)
    assert all(torch.equal(restored[name], expected[name]) for name in expected) == copies
    assert stream.consumed_samples == 0


def test_one_at_a_time(rank: Rank, tmp_path: Path) -> None:
    stream, gate = build_batches(rank.plan.run, rank_info=rank.backend), Gate()
    saver = BackgroundSaver(gate.operations)
    saver.save(tmp_path, taken(rank, stream, 1))
    assert gate.is_reached.wait(60)
    second = threading.Thread(target=saver.save, args=(tmp_path, taken(rank, stream, 2)))
    second.start()
    second.join(0.3)
    assert second.is_alive(), "it waits for the first"
    gate.may_pass.set()
    second.join(60)
    saver.wait()
    assert [path.name for path in checkpoints_in(tmp_path)] == ["iter_0000002", "iter_0000001"]


def test_a_full_disk_is_told_between_iterations(rank: Rank, tmp_path: Path) -> None:
    stream = build_batches(rank.plan.run, rank_info=rank.backend)
    checkpoint.write(tmp_path, taken(rank, stream, 1))
    gate = Gate(OSError(errno.ENOSPC, "No space left on device"))
    gate.may_pass.set()
    saver = BackgroundSaver(gate.operations)
    saver.save(tmp_path, taken(rank, stream, 2))
    with pytest.raises(
        CheckpointError, match=r"No space left on device.*the last one is iter_0000001"
    ) as told:
        saver.wait()
    assert "\n" not in str(told.value)
    saver.check()
    saver.save(tmp_path, taken(rank, stream, 2))
    saver.wait()
    verify(tmp_path / "iter_0000002")


def test_a_run_saves_in_the_background_and_goes_on(rank: Rank, tmp_path: Path) -> None:
    """Stopped after three iterations, then to the end: every checkpoint that was due is there, and whole."""
    backend.stop()
    asked: list[bool] = []

    def stop_after_three() -> bool:
        asked.append(True)
        return len(asked) == 3

    with pytest.raises(Preempted):
        loop.train(rank.plan, tmp_path, stop_is_requested=stop_after_three)
    assert [path.name for path in checkpoints_in(tmp_path / "checkpoints")] == [
        "iter_0000003",
        "iter_0000002",
    ]
    loop.train(rank.plan, tmp_path)
    saved = checkpoints_in(tmp_path / "checkpoints")
    assert [path.name for path in saved] == ["iter_0000006", "iter_0000004"]
    assert [verify(path)["iteration"] for path in saved] == [6, 4]
