"""What distillation adds to a plan: the teacher's logits at every exit, and longer messages backward."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_plan, make_profile, make_run

from eeplan.plan import Plan
from eeplan.sim.costs import pipeline_costs_of
from eeplan.sim.engine import simulate
from eeplan.sim.fill import schedule_of


def planned(distillation: dict[str, Any] | None, **overrides: Any) -> Plan:
    exits = {"count": 2, "head": "minimal", **({"distillation": distillation} if distillation else {})}
    return make_plan(make_run(parallel__pipeline_model_parallel_size=4, exits=exits, **overrides))


def test_every_exit_pays_for_the_teachers_logits() -> None:
    with_teacher, without = planned({"weight": 0.5}), planned(None)
    profile = make_profile(with_teacher.run)
    head = next(op for op in profile.ops if op.op == "final_head")
    assert [one.exit_depths for one in with_teacher.stages] == [one.exit_depths for one in without.stages]
    for ours, theirs in zip(with_teacher.stages, without.stages, strict=True):
        more_s = len(ours.exit_depths) * head.forward.mean_s
        assert ours.exit_s - theirs.exit_s == pytest.approx(more_s, rel=1e-4)
        assert ours.backward_s - theirs.backward_s == pytest.approx(more_s, rel=1e-4)
        assert ours.forward_s == theirs.forward_s
        if ours.exit_depths:
            assert ours.backward_transient_bytes > theirs.backward_transient_bytes + head.kept_bytes
    assert with_teacher.prediction.iteration_time_s > without.prediction.iteration_time_s
    assert "distillation" in with_teacher.extrapolated_ops
    assert "distillation" not in without.extrapolated_ops


def test_messages_backward_are_twice_as_long() -> None:
    ours, theirs = (pipeline_costs_of(planned(one)) for one in ({"weight": 0.5}, None))
    latency_ns = 20_000
    for longer, message in zip(ours.message_ns, theirs.message_ns, strict=True):
        assert longer - latency_ns == pytest.approx(1.5 * (message - latency_ns), abs=2)


def test_the_prediction_is_that_of_the_simulator() -> None:
    plan = planned({"weight": 0.5}, parallel__layer_split="auto")
    timeline = simulate(schedule_of(plan), pipeline_costs_of(plan))
    assert timeline.pipeline_ns / 1e9 == pytest.approx(plan.prediction.pipeline_s, rel=1e-9)
    assert plan.exit_forward == "deferred"
