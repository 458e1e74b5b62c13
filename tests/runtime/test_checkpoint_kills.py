"""SIGKILL at any step of a save: a valid checkpoint is always left, and at most one interval is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_data import plan_two_layers


def killed_saves(folder: Path, points: int | list[list[int]], limit_s: float, **overrides: Any) -> Any:
    """Records of the worker; see there."""
    plan_two_layers(folder, **overrides)
    arguments = [folder / "plan.yaml", folder / "saves", json.dumps(points), folder / "out.json"]
    done = subprocess.run(
        [sys.executable, "-m", "kill_worker", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"},
        timeout=limit_s,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "out.json").read_text())


def check(records: list[dict[str, Any]], at_least: int) -> None:
    operations, killed = records[0]["operations"], records[1:]
    assert len(killed) >= at_least
    assert all(record["killed"] for record in killed if record["number"] >= 0)
    renames = [n for n, operation in enumerate(operations[0]) if operation == "rename"]
    # Of rank 0: the tensors' index, the folder itself, then `latest`.
    became_valid = renames[1]
    for record in killed:
        assert record["iteration"] in (2, 3), record
        if record["rank"] == 0 and record["number"] >= 0:
            assert record["iteration"] == (3 if record["number"] > became_valid else 2), record
        assert len(record["notes"]) == 1, "nothing that looks like a checkpoint is damaged"


def test_killed_at_a_file_operation(tmp_path: Path) -> None:
    records = killed_saves(tmp_path, 24, limit_s=150)
    check(records, 24)
    assert {record["iteration"] for record in records[1:]} == {2, 3}
    kinds = set(records[0]["operations"][0])
    assert {"mkdir", "open", "write", "fsync", "rename", "remove"} <= kinds


def test_killed_while_training_goes_on(tmp_path: Path) -> None:
    """Saved in the background; the whole process dies, whichever thread is at work."""
    records = killed_saves(tmp_path, 10, limit_s=150, training__async_save=True)
    check(records, 10)
    assert {record["iteration"] for record in records[1:]} == {2, 3}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_at_every_kind_of_moment_in_the_background(tmp_path: Path) -> None:
    two = {"parallel__pipeline_model_parallel_size": 2, "training__async_save": True}
    check(killed_saves(tmp_path, 200, limit_s=1500, **two), 200)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_at_every_kind_of_moment_on_two_stages(tmp_path: Path) -> None:
    moments = [[rank, -milliseconds] for milliseconds in range(2, 62, 2) for rank in (0, 1)]
    folders = [tmp_path / name for name in ("operations", "moments")]
    for folder in folders:
        folder.mkdir()
    stages = {"parallel__pipeline_model_parallel_size": 2}
    check(killed_saves(folders[0], 200, limit_s=1200, **stages), 200)
    check(killed_saves(folders[1], moments, limit_s=600, **stages), len(moments))
