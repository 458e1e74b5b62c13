"""Commands for other people's clusters: both kinds of output, files, and refusals in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from world import tree

from eeplan.cli import main
from eeplan.plan import load_plan
from eeplan.profile import load_profile
from eeplan.spec import load_run


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def op_table() -> dict[str, Any]:
    entries = [[0.001, 0.0, 0.0], *[[0.01, 0.02, 0.0]] * 8, [0.004, 0.006, 0.0]]
    return {"note": "free", "op_times_s": {f"mb{size}_tp1": entries for size in (1, 2)}}


def test_validate_paper(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    result = as_json(capsys, "validate", "paper")
    keys = {"model", "setup", "predicted_s", "measured_s", "time_error", "predicted_gb", "measured_gb"}
    assert len(result["cells"]) == 10
    assert all(keys | {"memory_error"} <= set(cell) for cell in result["cells"])
    assert main(["validate", "paper"]) == 0
    out = capsys.readouterr().out
    for part in ("optimization_1", "order of the set-ups", "calibrated: the two standard rows"):
        assert part in out
    assert main(["validate", "paper", "--data", str(tmp_path / "none.json")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_no_torch_is_needed() -> None:
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['megatron'] = None\n"
        "import eeplan.sweep_figures, eeplan.optable_profile, eeplan.megatron_reader\n"
        "import eeplan.validate.sailor\n"
        "from eeplan.cli import main\nsys.exit(main(['validate', 'paper']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_validate_sailor(capsys: pytest.CaptureFixture[str], validation_data: Path) -> None:
    path = str(validation_data / "sailor_opt350_gh200.json")
    result = as_json(capsys, "validate", "sailor", "--data", path)
    assert set(result["raw"]) == {"time", "memory"}
    assert {"mean_abs", "max_abs"} <= set(result["calibrated"]["time"])
    keys = {"name", "predicted_s", "measured_s", "time_error", "memory_error"}
    assert all(keys <= set(run) for run in result["runs"])
    other = as_json(
        capsys, "validate", "sailor", "--data", path, "--link-bandwidth", "1e8", "--base-bytes", "0"
    )
    assert other["raw"]["time"]["mean"] > result["raw"]["time"]["mean"]
    assert other["raw"]["memory"]["mean"] < result["raw"]["memory"]["mean"]
    assert main(["validate", "sailor", "--data", path]) == 0
    assert "N32_D8" in capsys.readouterr().out


def test_an_imported_table_plans_a_cluster(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("ops.json").write_text(json.dumps(op_table()))
    arguments = ["import-ops", "ops.json", "--run", "run.yaml", "-o", "new/profile.yaml", "--date", "2024"]
    result = as_json(capsys, *arguments, "--device-name", "G", "--link-bandwidth", "1e9")
    assert result["profile"] == "new/profile.yaml"
    profile, _ = load_profile(Path("new/profile.yaml"))
    assert (profile.device.name, profile.date, profile.p2p.bandwidth_bytes_per_s) == ("G", "2024", 1e9)
    assert Path("new/profile.yaml").read_text().startswith("# Imported by `eeplan import-ops`; source")
    assert profile.software["source"] == "free"
    planned = as_json(capsys, "plan", "run.yaml", "--profile", "new/profile.yaml", "-o", "new/plan.yaml")
    assert "exit_norm" in planned["extrapolated_ops"]
    assert main(arguments) == 0
    assert "exit_norm (extrapolated)" in capsys.readouterr().out
    assert profile.p2p_between_nodes is None
    between = ("--node-link-bandwidth", "1e8", "--node-link-latency", "1e-3")
    as_json(capsys, *arguments, *between)
    profile, _ = load_profile(Path("new/profile.yaml"))
    for line in (profile.p2p_between_nodes, profile.all_reduce_between_nodes):
        assert line is not None
        assert (line.latency_s, line.bandwidth_bytes_per_s) == (1e-3, 1e8)


def test_flags_there_and_back(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "emit", "plan.yaml"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#!/bin/bash\n")
    result = as_json(capsys, "flags", "emit", "plan.yaml", "-o", "new/launch.sh")
    assert Path("new/launch.sh").read_text() == script == result["script"]
    assert result["for"] == "ee-llm"
    assert result["layout"] == ["--pipeline-model-parallel-layout", "Et*4|t*4,L"]
    read = as_json(capsys, "flags", "read", "new/launch.sh", "-o", "new/run.yaml")
    assert read["not_understood"] == read["assumed"] == []
    run, _ = load_run(Path("new/run.yaml"))
    plan = load_plan(Path("plan.yaml"))
    assert run.model.num_layers == plan.run.model.num_layers
    assert [(e.layer, e.boundary) for e in run.exits.layers] == [(e.layer, e.boundary) for e in plan.exits]
    assert run.data == plan.run.data
    stock = as_json(capsys, "flags", "emit", "plan.yaml", "--for", "megatron")
    assert "--exit-layer-nums" not in stock["words"]
    assert "--pipeline-model-parallel-layout" in stock["words"]


def test_a_script_with_holes_is_read_with_help(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flags", "emit", "plan.yaml", "--for", "megatron"]) == 0
    script = capsys.readouterr().out.replace("--num-layers 8", "--num-layers $L --moe-layer-freq 2")
    Path("launch.sh").write_text(script)
    assert main(["flags", "read", "launch.sh", "-o", "r.yaml"]) == 2
    assert "--define NAME=VALUE" in capsys.readouterr().err
    assert main(["flags", "read", "launch.sh", "-o", "r.yaml", "--define", "L=8"]) == 0
    out = capsys.readouterr().out
    assert "--moe-layer-freq 2" in out
    assert "unknown to eeplan" in out
    assert yaml.safe_load(Path("r.yaml").read_text())["model"]["num_layers"] == 8


def test_sweep_writes_a_table_and_figures(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "run.yaml", "--profile", "profile.yaml", "-o", "new/table.csv"]
    settings = ["--set", "exits.count=0..9", "--set", "training.global_batch_size=8,16"]
    result = as_json(capsys, *command, *settings, "--figures", "new/figures")
    assert (result["configurations"], result["feasible"]) == (20, 16)
    table = pd.read_csv("new/table.csv")
    assert len(table) == 20
    assert table.loc[~table["feasible"], "reason"].str.contains("has room for 7").all()
    assert sorted(path.name for path in Path("new/figures").iterdir()) == [
        *("exits.count.png", "training.global_batch_size.png")
    ]
    assert main([*command, *settings]) == 0
    out = capsys.readouterr().out
    assert "fastest" in out
    assert "infeasible" in out


def test_a_front_is_shown_written_and_picked_from(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["pareto", "run.yaml", "--profile", "profile.yaml"]
    result = as_json(capsys, *command, "-o", "new/front.csv", "--pick", "2", "--plan", "new/plan.yaml")
    points = result["points"]
    assert result["certificate"]["optimal"]
    assert [one["point"] for one in points] == list(range(1, len(points) + 1))
    table = pd.read_csv("new/front.csv")
    assert table["iteration_time_s"].tolist() == [one["iteration_time_s"] for one in points]
    assert json.loads(table["keys"][1]) == points[1]["keys"]
    plan = load_plan(Path("new/plan.yaml"))
    assert plan.prediction.iteration_time_s == points[1]["iteration_time_s"]
    assert len(plan.exits) == points[1]["num_exits"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert f"Pareto front: {len(points)} points, all there are, of " in out
    assert "largest peak" in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ("validate sailor --data none.json", "validation data none.json does not exist"),
        ("validate paper --data run.yaml", "not valid JSON"),
        ("import-ops none.json --run run.yaml -o p.yaml", "op table none.json does not exist"),
        ("import-ops run.yaml --run run.yaml -o p.yaml", "not valid JSON"),
        ("import-ops run.yaml --run run.yaml -o p.yaml --device-memory 0", "--device-memory"),
        ("flags emit run.yaml", "plan run.yaml"),
        ("flags emit plan.yaml --for other", "--for"),
        ("flags emit plan.yaml -o data", "is a directory"),
        ("flags read none.sh -o r.yaml", "script none.sh does not exist"),
        ("flags read some.txt -o r.yaml", "expected a launch script"),
        ("flags read some.txt -o r.yaml --define L", "expected NAME=VALUE"),
        ("sweep run.yaml --profile profile.yaml -o t.txt --set exits.count=1", "unknown ending '.txt'"),
        ("sweep run.yaml --profile profile.yaml -o t.csv --set exits.cuont=1", "no such key in a run file"),
        ("sweep run.yaml --profile profile.yaml -o t.csv", "--set"),
        ("sweep run.yaml --profile none.yaml -o t.csv --set exits.count=1", "does not exist"),
        ("sweep run.yaml --profile profile.yaml -o data --set exits.count=1", "unknown ending"),
        ("pareto run.yaml --profile none.yaml", "does not exist"),
        ("pareto run.yaml --profile profile.yaml --pick 1", "--pick and --plan belong together"),
        ("pareto run.yaml --profile profile.yaml --pick 999 --plan p.yaml", "the front has"),
        ("pareto run.yaml --profile profile.yaml -o data", "is a directory"),
        (
            "sweep run.yaml --profile profile.yaml -o t.csv --set exits.count=1 --figures run.yaml/x",
            "is a file; choose another folder",
        ),
    ],
)
def test_refusals_are_one_line_and_leave_nothing(
    world: Path, capsys: pytest.CaptureFixture[str], arguments: str, part: str
) -> None:
    before = tree(world)
    assert main(arguments.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("eeplan: error: ")
    assert part in lines[0]
    assert tree(world) == before
