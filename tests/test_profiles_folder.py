"""The profiles that come with the project: readable, honest about their source, and good to plan with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eeplan.profile import load_profile
from eeplan.sim.planner import make_plan
from eeplan.spec import load_run, replace_keys

FOLDER = Path(__file__).parents[1] / "profiles"
PROFILES = sorted(path for path in FOLDER.glob("*.yaml") if not path.name.endswith(".run.yaml"))


def test_the_readme_lists_them_all_with_their_sizes() -> None:
    rows = dict(re.findall(r"\| `([^`]+\.yaml)` \|.*\| ([0-9, ]+) \|\n", (FOLDER / "README.md").read_text()))
    assert sorted(rows) == [path.name for path in PROFILES]
    for path in PROFILES:
        profile, _ = load_profile(path)
        sizes = sorted({cost.micro_batch_size for cost in profile.ops})
        assert rows[path.name] == ", ".join(map(str, sizes))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_each_plans_its_run_and_marks_what_was_not_measured(path: Path) -> None:
    profile, digest = load_profile(path)
    assert "MIT licence, copyright ETH Zurich" in profile.software["source"]
    assert {cost.op for cost in profile.ops if cost.extrapolated} == {
        *("exit_minimal", "exit_norm", "exit_mlp", "exit_block")
    }
    run, run_digest = load_run(FOLDER / f"{path.name.split('-', 2)[0]}-{path.name.split('-')[1]}.run.yaml")
    run = replace_keys(
        run,
        {
            "parallel.tensor_model_parallel_size": profile.ops[0].tensor_model_parallel_size,
            "training.micro_batch_size": 1,
        },
    )
    plan = make_plan(run, run_digest, profile, digest)
    assert len(plan.exits) == 2
    assert plan.extrapolated_ops == ("exit_norm",)
    assert 0 <= plan.prediction.time_overhead < 0.1
