"""torchrun without the command line around it: several agents as on several nodes, and too many ranks."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_data import plan_two_layers

from eeplan.plan import Plan
from eeplan.runtime import checkpoint
from eeplan.runtime.checkpoint_files import verify

LIMIT_S = 200


def plan_in(folder: Path, **overrides: Any) -> Plan:
    settings: dict[str, Any] = {
        "parallel__pipeline_model_parallel_size": 2,
        "training__global_batch_size": 4,
        "training__train_iters": 3,
        "training__eval_iters": 1,
        "split": "60,20,20",
    }
    return plan_two_layers(folder, **(settings | overrides))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def agents(folder: Path, count: int, nproc: int) -> list[tuple[int, str]]:
    """One torchrun per node, all on this machine; exit code and output of each."""
    port = free_port()
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", str(count), "--node-rank", str(node), "--nproc-per-node", str(nproc)),
                *("--master-addr", "127.0.0.1", "--master-port", str(port), "--local-addr", "127.0.0.1"),
                *("-m", "eeplan.runtime.train", str(folder / "plan.yaml"), "--out", str(folder / "run")),
            ],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        for node in range(count)
    ]
    try:
        return [(process.wait(LIMIT_S), process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_two_agents_train_one_plan(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    results = agents(tmp_path, 2, 1)
    assert [code for code, _ in results] == [0, 0], results
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["iteration"] for one in logged if one["kind"] == "train"] == [1, 2, 3]
    assert {len(one["losses"]) for one in logged if one["kind"] == "validation"} == {2}
    assert [(one["iteration"], len(one["losses"])) for one in logged if one["kind"] == "test"] == [(3, 2)]
    assert verify(checkpoint.resolve(tmp_path / "run"))["iteration"] == 3
    measured = json.loads((tmp_path / "run" / "measured.json").read_text())
    assert len(measured["peak_bytes"]) == len(plan.stages) == 2
    assert "iteration        3/       3" in results[0][1]
    assert "iteration        3/       3" not in results[1][1], "rank 0 alone speaks"


def test_a_wrong_number_of_processes_is_one_line(tmp_path: Path) -> None:
    plan_in(tmp_path)
    ((code, said),) = agents(tmp_path, 1, 3)
    assert code != 0
    lines = {line for line in said.splitlines() if "eeplan: error" in line}
    assert lines == {
        "eeplan: error: torchrun started 3 processes on all nodes together; the plan needs 2 processes "
        "(pipeline 2 x tensor 1 x data 1); set --nnodes and --nproc-per-node accordingly"
    }
    assert "Traceback" not in said.split("eeplan: error")[0]
    assert not (tmp_path / "run").exists()


def test_without_torchrun_it_says_so(tmp_path: Path) -> None:
    plan_in(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "eeplan.runtime.train",
            str(tmp_path / "plan.yaml"),
            "--out",
            str(tmp_path / "r"),
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("eeplan: error: this is a worker of torchrun")


@pytest.mark.long
def test_four_agents_train_one_plan(tmp_path: Path) -> None:
    plan_in(tmp_path, parallel__tensor_model_parallel_size=2)
    assert [code for code, _ in agents(tmp_path, 4, 1)] == [0] * 4
