"""Rehearsal: a plan's schedule with sleeps in place of compute, real processes and real messages.

Shows before a GPU hour is spent that the order of ops is right, that nothing deadlocks, and how long the
iteration takes against what was predicted. Sleeping costs no core, so a pipeline of eight stages fits on two.
One pipeline is rehearsed: tensor-parallel ranks of a stage move together and data-parallel pipelines are
alike. What follows the last backward (gradient synchronisation, optimizer, bookkeeping) is slept as planned.

Imports neither torch nor megatron-core; the ranks are ``rehearse_worker``.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from eeplan.errors import ScheduleError, SpecError
from eeplan.plan import Plan
from eeplan.runtime.launch import launch
from eeplan.runtime.preflight import require_asynchronous
from eeplan.sim.costs import pipeline_costs_of
from eeplan.sim.engine import simulate
from eeplan.sim.fill import schedule_of
from eeplan.sim.validators import validate
from eeplan.timeline import Span, Timeline

WORKER = "eeplan.runtime.rehearse_worker"


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What was predicted and what real processes took, in planned time (``time_scale`` divided out)."""

    predicted: Timeline
    measured: Timeline
    """Of the iteration with the median time; spans only."""
    iteration_times_s: tuple[float, ...]
    pipeline_times_s: tuple[float, ...]
    predicted_iteration_s: float
    time_scale: float

    def to_json(self) -> dict[str, Any]:
        """Times, signed errors (measured over predicted, minus 1) and the stages side by side."""
        iteration_s = statistics.median(self.iteration_times_s)
        pipeline_s = statistics.median(self.pipeline_times_s)
        predicted_s = self.predicted.pipeline_ns / 1e9
        return {
            "stages": self.predicted.num_stages,
            "iterations": len(self.iteration_times_s),
            "time_scale": self.time_scale,
            "predicted_iteration_s": self.predicted_iteration_s,
            "measured_iteration_s": iteration_s,
            "iteration_error": iteration_s / self.predicted_iteration_s - 1.0,
            "predicted_pipeline_s": predicted_s,
            "measured_pipeline_s": pipeline_s,
            "pipeline_error": pipeline_s / predicted_s - 1.0,
            "iteration_times_s": list(self.iteration_times_s),
            "per_stage": [self._stage(stage) for stage in range(self.predicted.num_stages)],
        }

    def _stage(self, stage: int) -> dict[str, Any]:
        planned, seen = self.predicted.spans[stage], self.measured.spans[stage]
        starts = {(span.kind, span.microbatch): span.start_ns for span in planned}
        late_ns = [span.start_ns - starts[span.kind, span.microbatch] for span in seen]
        return {
            "ops": len(seen),
            "predicted_busy_s": self.predicted.busy_ns(stage) / 1e9,
            "measured_busy_s": sum(span.end_ns - span.start_ns for span in seen) / 1e9,
            "predicted_end_s": planned[-1].end_ns / 1e9,
            "measured_end_s": seen[-1].end_ns / 1e9,
            "latest_start_s": max(late_ns) / 1e9,
        }


def rehearse(
    plan: Plan, *, iterations: int = 5, time_scale: float = 1.0, log: Path | None = None
) -> Rehearsal:
    """Run the schedule of ``plan`` on one process per pipeline stage.

    Args:
        iterations: counted ones; one more goes first, in which connections are made.
        time_scale: multiplies every sleep. Where ops take less than a few milliseconds, a factor keeps the
            machine's own delays (about 0.1 ms per op) small beside them.
        log: file for what the processes write.

    Raises:
        SpecError: impossible time scale. PlanError: messages that the executor does not send.
        ScheduleError: the schedule is wrong, or an op ran out of order. LaunchError: a process died.
    """
    if not (isfinite(time_scale) and time_scale > 0):
        raise SpecError(f"time scale is {time_scale}; expected a positive number")
    require_asynchronous(plan)
    schedule, costs = schedule_of(plan), pipeline_costs_of(plan)
    validate(schedule)
    predicted = simulate(schedule, costs)
    training, prediction = plan.run.training, plan.prediction
    tail_s = prediction.grad_sync_s + prediction.optimizer_s + prediction.overhead_s
    shares = plan.run.parallel.tensor_model_parallel_size if plan.run.parallel.sequence_parallel else 1
    script = {
        "iterations": iterations + 1,
        "message_shape": [
            training.seq_length // shares,
            training.micro_batch_size,
            plan.run.model.hidden_size,
        ],
        "precision": training.precision,
        "tail_ns": round(tail_s * 1e9 * time_scale),
        "num_microbatches": schedule.num_microbatches,
        "stages": [[[i.op.value, i.microbatch] for i in program] for program in schedule.stages],
        "sleeps_ns": [
            [
                [span.kind, span.microbatch, round((span.end_ns - span.start_ns) * time_scale)]
                for span in spans
            ]
            for spans in predicted.spans
        ],
    }
    with tempfile.TemporaryDirectory(prefix="eeplan-rehearse-") as name:
        folder = Path(name)
        (folder / "script.json").write_text(json.dumps(script))
        launch(WORKER, [name], nproc=schedule.num_stages, threads_per_process=1, log=log)
        stages = [
            json.loads((folder / f"stage{stage}.json").read_text()) for stage in range(schedule.num_stages)
        ]
    timelines = [_timeline(list(parts), time_scale) for parts in zip(*stages, strict=True)][1:]
    for timeline, _ in timelines:
        _require_order(predicted, timeline)
    pipeline_s = [timeline.pipeline_ns / 1e9 for timeline, _ in timelines]
    middle = sorted(range(iterations), key=lambda index: pipeline_s[index])[iterations // 2]
    return Rehearsal(
        predicted=predicted,
        measured=timelines[middle][0],
        iteration_times_s=tuple(end_ns / 1e9 for _, end_ns in timelines),
        pipeline_times_s=tuple(pipeline_s),
        predicted_iteration_s=prediction.iteration_time_s,
        time_scale=time_scale,
    )


def _timeline(stages: Sequence[dict[str, Any]], time_scale: float) -> tuple[Timeline, int]:
    """One iteration of all stages from its first op on, in planned time; and its end."""
    zero = min(start for part in stages for _, _, start, _ in part["spans"])

    def planned(at_ns: int) -> int:
        return round((at_ns - zero) / time_scale)

    spans = tuple(
        tuple(Span(stage, kind, m, planned(start), planned(end)) for kind, m, start, end in part["spans"])
        for stage, part in enumerate(stages)
    )
    return Timeline(spans), max(planned(part["end"]) for part in stages)


def _require_order(predicted: Timeline, measured: Timeline) -> None:
    for stage, (planned, seen) in enumerate(zip(predicted.spans, measured.spans, strict=True)):
        expected = [(span.kind, span.microbatch) for span in planned]
        if expected != [(span.kind, span.microbatch) for span in seen]:
            raise ScheduleError(
                f"stage {stage} ran its ops in another order than the plan's; make a new plan"
            )
