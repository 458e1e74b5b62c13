"""SIGTERM and SIGUSR1, wherever they arrive: all ranks save after the same iteration, exit code 75."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import make_plan
from small_data import build_small, run_for

from eeplan.plan import load_plan, write_plan
from eeplan.runtime import resume

LIMIT_S = 90.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    run = run_for(
        build_small(tmp_path), model__hidden_size=32, training__train_iters=5000, exits={"count": 1}
    )
    write_plan(tmp_path / "plan.yaml", make_plan(run))
    yield tmp_path
    for pid in job_processes(tmp_path):
        os.kill(pid, signal.SIGKILL)


def command_line(pid: int) -> str:
    try:
        return (Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def job_processes(folder: Path) -> list[int]:
    """Processes that train below ``folder``, torchrun's agent among them."""
    pids = [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if pid != os.getpid() and f"{folder}/run" in command_line(pid)]


def rank_process(folder: Path, rank: int) -> int:
    for pid in job_processes(folder):
        environment = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in environment:
            return pid
    raise AssertionError(f"rank {rank} is not running")


def agent_process(folder: Path) -> int:
    return next(pid for pid in job_processes(folder) if "eeplan.runtime.launch" in command_line(pid))


def iterations(folder: Path) -> list[int]:
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return [record["iteration"] for record in records if record["kind"] == "train"]


def stopped_by(
    folder: Path, number: signal.Signals, target: Callable[[Path, int], int], after: int
) -> tuple[int, str]:
    """Train until iteration ``after`` is done, send the signal; the exit code and what was said."""
    arguments = ["train", str(folder / "plan.yaml"), "--out", str(folder / "run")]
    process = subprocess.Popen(
        [sys.executable, "-m", "eeplan", *arguments],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while max(iterations(folder), default=0) < after:
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < deadline, f"iteration {after} not within {LIMIT_S} s"
            time.sleep(0.05)
        os.kill(target(folder, process.pid), number)
        _, said = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    return process.returncode, said


def check_saved(folder: Path, code: int, said: str) -> int:
    assert code == 75, said
    assert "Traceback" not in said
    found = resume.find(folder / "run" / "checkpoints", load_plan(folder / "plan.yaml"))
    assert found is not None
    done = found.position.iteration
    assert f"stopped on request after iteration {done}, which is saved" in said
    assert said.splitlines()[-1].startswith("eeplan: training was stopped by a signal and is saved")
    assert iterations(folder) == list(range(1, done + 1)), "each iteration once"
    assert job_processes(folder) == []
    return done


def test_signals_to_the_command_and_to_a_rank(folder: Path) -> None:
    code, said = stopped_by(folder, signal.SIGTERM, lambda _, launcher: launcher, after=2)
    first = check_saved(folder, code, said)
    assert "going on from" not in said
    code, said = stopped_by(folder, signal.SIGUSR1, lambda at, _: rank_process(at, 1), after=first + 1)
    assert f"going on from checkpoint iter_{first:07d}" in said
    assert check_saved(folder, code, said) > first


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signals_to_every_process(folder: Path, number: signal.Signals) -> None:
    done = 0
    for target in (
        lambda _, launcher: launcher,
        lambda at, _: agent_process(at),
        lambda at, _: rank_process(at, 0),
        lambda at, _: rank_process(at, 1),
    ):
        code, said = stopped_by(folder, number, target, after=done + 1)
        done = check_saved(folder, code, said)
