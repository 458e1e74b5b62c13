"""Saves that are killed at a given file operation, for test_checkpoint_kills.

Run as ``python -m kill_worker PLAN FOLDER POINTS OUT``: loads everything once, then forks the ranks of each
save. POINTS is a JSON list of [rank, operation number]; a negative number means a random moment in
milliseconds. OUT gets one record per point.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eeplan.errors import CheckpointError
from eeplan.plan import Plan, load_plan
from eeplan.runtime import checkpoint, resume
from eeplan.runtime.background_save import BackgroundSaver
from eeplan.runtime.checkpoint_files import FileOperations, verify
from eeplan.runtime.checkpoint_state import Position
from eeplan.runtime.launch import die_with_parent
from eeplan.runtime.setup import set_up
from eeplan.runtime.stage import loss_weights

LIMIT_S = 60.0
BASE = (1, 2)
"""Iterations saved beforehand; the killed save is the third."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def save_all(plan: Plan, folder: Path, iterations: list[int], operations: FileOperations | None) -> None:
    """One rank: build the model and save it once for each of ``iterations``."""
    rank = set_up(plan)
    if operations and operations.before.__name__ == "at_a_moment":
        operations.before("start", folder)
    in_background = plan.run.training.async_save
    for iteration in iterations:
        position = Position(iteration, 4 * iteration, 4 * iteration, 0, loss_weights(plan, iteration + 1))
        taken = checkpoint.snapshot(
            iteration,
            rank.model,
            plan,
            training=rank.training,
            position=position,
            backend=rank.backend,
            copies=in_background,
        )
        mine = operations if iteration == iterations[-1] else None
        if not in_background:
            checkpoint.write(folder, taken, operations=mine)
            continue
        saver = BackgroundSaver(mine)
        saver.save(folder, taken)
        while saver.is_busy:
            # What is being saved changes meanwhile, as in training.
            with torch.no_grad():
                for parameter in rank.model.parameters():
                    parameter.add_(1.0)
        saver.wait()


def fork_ranks(plan: Plan, work: Callable[[int], Any]) -> list[int]:
    """Run ``work`` on every rank in a process of its own; their wait statuses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world_size, children = plan.run.parallel.world_size, []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in environment.items()}
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            try:
                work(rank)
                os._exit(0)
            except CheckpointError:
                os._exit(2)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    return [wait(child) for child in children]


def wait(child: int) -> int:
    """Wait status of a child, which may have to be ended: it waits for a rank that is dead."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError(f"a rank hung for {LIMIT_S} s")


def count_operations(plan: Plan, folder: Path, counts: Path) -> list[list[str]]:
    """Operations of each rank's save, in order."""

    def work(rank: int) -> None:
        seen: list[str] = []
        save_all(plan, folder, [*BASE, 3], FileOperations(lambda operation, path: seen.append(operation)))
        (counts / f"{rank}.json").write_text(json.dumps(seen))

    assert fork_ranks(plan, work) == [0] * plan.run.parallel.world_size
    return [json.loads((counts / f"{rank}.json").read_text()) for rank in range(plan.run.parallel.world_size)]


def killing(victim: bool, number: int) -> FileOperations | None:
    """Operations of which the ``number``-th kills the process; or, negative, so many ms after the start."""
    if not victim:
        return None
    done = 0

    def at_a_moment(operation: str, path: Path) -> None:
        if operation == "start":
            threading.Timer(-number / 1e3, die).start()

    def at_an_operation(operation: str, path: Path) -> None:
        nonlocal done
        if done == number:
            die()
        done += 1

    return FileOperations(at_a_moment if number < 0 else at_an_operation)


def main(plan_file: str, folder: str, points: str, out: str) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    plan, root = load_plan(Path(plan_file)), Path(folder)
    base = root / "base"
    base.mkdir(parents=True)
    operations = count_operations(plan, base, root)
    records: list[dict[str, Any]] = [{"operations": operations}]
    shutil.rmtree(base)
    assert fork_ranks(plan, lambda rank: save_all(plan, base, list(BASE), None)) == [0] * len(operations)
    wanted = json.loads(points)
    if isinstance(wanted, int):
        wanted = spread(operations, wanted)
    for victim, number in wanted:
        target = root / "target"
        shutil.copytree(base, target)

        def work(rank: int, target: Path = target, victim: int = victim, number: int = number) -> None:
            save_all(plan, target, [3], killing(rank == victim, number))

        statuses = fork_ranks(plan, work)
        found = resume.find(target, plan)
        assert found is not None
        verify(checkpoint.resolve(target))
        # What was left behind must not stand in the way of the next save.
        left = sorted(path.name for path in target.iterdir())
        records.append(
            {
                "rank": victim,
                "number": number,
                "killed": os.WIFSIGNALED(statuses[victim]),
                "iteration": found.position.iteration,
                "notes": found.notes,
                "left": left,
            }
        )
        shutil.rmtree(target)
    Path(out).write_text(json.dumps(records))


def spread(operations: list[list[str]], count: int) -> list[list[int]]:
    """About ``count`` points over all ranks: every operation that is not a write, and writes in between."""
    points = [[rank, n] for rank, seen in enumerate(operations) for n in range(len(seen))]
    special = [point for point in points if operations[point[0]][point[1]] != "write"]
    writes = [point for point in points if operations[point[0]][point[1]] == "write"]
    if len(special) >= count:
        return special[:: max(1, len(special) // count)]
    step = max(1, len(writes) // (count - len(special)))
    return sorted(special + writes[::step])


if __name__ == "__main__":
    main(*sys.argv[1:])
