"""Decode predictions and costs as people see them, and the usage file on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from builders import make_profile, make_run
from decode_cases import with_decode_costs
from world import make_world

from eeplan.cli import main
from eeplan.decode_views import costs_cells
from eeplan.plan_views import plan_tables
from eeplan.profile import load_profile
from eeplan.schema import write_yaml
from eeplan.sim.planner import make_plan
from eeplan.views import plain, profile_tables


def test_a_plan_shows_every_mode() -> None:
    run = make_run(exits={"count": 2})
    plan = make_plan(run, "0" * 64, with_decode_costs(make_profile(run)), "1" * 64)
    text = "\n".join(plain(table) for table in plan_tables(plan))
    assert "decoding one sequence, predicted at threshold 0.8; usage assumed, not measured" in text
    for part in ("kv_recompute", "catch_up", "pipeline on 2 processes", "decode.mode: "):
        assert part in text
    assert re.search(r"for decoding +layer: 3, 5, 6, 7, 9 rows interpolated", text)
    bare = make_plan(run, "0" * 64, make_profile(run), "1" * 64)
    text = "\n".join(plain(table) for table in plan_tables(bare))
    assert "decoding one sequence" not in text
    assert "decode.mode: not predicted" in text


def test_a_profile_shows_costs_by_rows() -> None:
    profile = with_decode_costs(make_profile(make_run()), processes=(1, 2))
    text = "\n".join(plain(table) for table in profile_tables(profile))
    assert "decode steps, mean by number of rows: 1 process, 1 thread each, 16 tokens back" in text
    assert "2 processes, 1 thread each" in text
    (layer,) = {line for line in text.splitlines() if line.startswith("  layer") and "1.75 ms" in line}
    assert layer.split()[1::2] == ["1.00", "1.05", "1.15", "1.35", "1.75"]


def test_rows_of_several_sequences_do_not_replace_those_of_one() -> None:
    """Whichever comes last in the file; alone, such a cost has no column."""
    (costs,) = with_decode_costs(make_profile(make_run()), processes=(1,)).decode
    alone = next(one for one in costs.ops if (one.op, one.rows) == ("layer", 8))
    slow = alone.time.model_copy(update={"mean_s": 7.0})
    shared = [alone.model_copy(update={"sequences": 8, "time": slow, "rows": rows}) for rows in (8, 64)]
    for ops in ((*costs.ops, *shared), (*shared, *costs.ops)):
        assert costs_cells(costs.model_copy(update={"ops": ops})) == costs_cells(costs)
    other = tuple(one.model_copy(update={"time": slow}) if one == alone else one for one in costs.ops)
    assert costs_cells(costs.model_copy(update={"ops": other})) != costs_cells(costs)


def test_plan_reads_a_usage_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = make_world(tmp_path)
    profile, _ = load_profile(world / "profile.yaml")
    write_yaml(world / "profile.yaml", with_decode_costs(profile))
    (world / "usage.yaml").write_text("schema_version: 1\nprior: {name: ramp, share: 0.5}\n")
    command = ["plan", str(world / "run.yaml"), "--profile", str(world / "profile.yaml")]
    command += ["-o", str(world / "out.yaml"), "--json"]
    assert main([*command, "--usage", str(world / "usage.yaml")]) == 0
    result = json.loads(capsys.readouterr().out)
    assert len(result["usage_sha256"]) == 64
    assert "rises to 50%" in result["decode"]["usage"]
    assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["usage_sha256"] is None
    assert "uniform over the layers" in result["decode"]["usage"]
    assert main([*command, "--usage", str(world / "missing.yaml")]) == 2
    assert "usage file" in capsys.readouterr().err
