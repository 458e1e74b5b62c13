"""Plans that are judged with blocking messages are predicted, never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from builders import make_plan, make_run

from eeplan.errors import PlanError
from eeplan.plan import write_plan
from eeplan.runtime.preflight import check_ranks, check_training
from eeplan.runtime.rehearse import rehearse


def test_blocking_messages_are_refused_before_anything_starts(tmp_path: Path) -> None:
    plan = make_plan(make_run(parallel__p2p_communication="rendezvous"))
    write_plan(tmp_path / "plan.yaml", plan)
    message = "p2p_communication is rendezvous, .*set it to asynchronous and plan again"
    with pytest.raises(PlanError, match=message):
        check_training(tmp_path / "plan.yaml", tmp_path / "run")
    with pytest.raises(PlanError, match=message):
        check_ranks(plan, {"WORLD_SIZE": "2"})
    with pytest.raises(PlanError, match=message):
        rehearse(plan)
    assert not (tmp_path / "run").exists()
