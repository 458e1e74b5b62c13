"""What a plan says beyond its numbers: idle time by phase, room for more, and what the time hangs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eeplan.plan import (
    CriticalOp,
    CriticalPath,
    IdleTime,
    PathCount,
    PlannedExit,
    StageCriticalPath,
    TimeHeadroom,
)
from eeplan.sim.costs import (
    EXIT_OPS,
    CostModel,
    PipelineCosts,
    grad_sync_ns,
    pipeline_costs,
    shared_matrix_sync_ns,
    stage_costs,
)
from eeplan.sim.critical_path import deciding_stages, event_graph
from eeplan.sim.fill import Fill, filled
from eeplan.sim.fill_costs import partial_costs, with_partial_costs
from eeplan.sim.fill_search import filled_ends_ns
from eeplan.sim.headroom import Headroom, Iteration, headroom
from eeplan.sim.idle import StageTime, stage_times
from eeplan.sim.parameters import Head
from eeplan.sim.search import Candidate
from eeplan.sim.sensitivity import ExitOp, Passed, Sensitivity, StageOnPath, sensitivity
from eeplan.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StageInsight:
    """Of one stage, in the plan's form."""

    busy_s: float
    idle: IdleTime
    time_headroom: TimeHeadroom
    critical: StageCriticalPath


@dataclass(frozen=True, slots=True)
class Insight:
    """Of a whole plan."""

    stages: tuple[StageInsight, ...]
    critical_path: CriticalPath


def insight(
    model: CostModel,
    candidate: Candidate,
    costs: PipelineCosts,
    fill: Fill,
    exits: Sequence[PlannedExit],
    timeline: Timeline,
) -> Insight:
    """Explain a simulated iteration.

    Args:
        candidate: the chosen one.
        costs: what was simulated; those of partial microbatches included where there are any.
        fill: the microbatches.
        exits: all of them, placed.
        timeline: the engine's, of ``costs`` and ``fill``.
    """
    schedule = filled(model.layout.num_stages, fill)
    shared_ns = shared_matrix_sync_ns(model, candidate.stages)
    fixed_ns = candidate.optimizer_ns + candidate.overhead_ns

    def iteration_ns(ends_ns: Sequence[int]) -> int:
        return max(ends_ns) + grad_sync_ns(ends_ns, candidate.stages, shared_ns) + fixed_ns

    def compose(changed: CostModel) -> PipelineCosts:
        return _composed(changed, candidate, exits, fill)

    found = sensitivity(
        model,
        compose,
        [ExitOp(one.depth, one.stage, EXIT_OPS[one.head]) for one in exits],
        event_graph(schedule, timeline, costs.transport),
        deciding_stages(filled_ends_ns(costs, fill), iteration_ns),
    )
    rooms = headroom(Iteration(costs, fill, iteration_ns))
    times = stage_times(timeline, schedule.kinds)
    return Insight(
        tuple(_stage(*parts) for parts in zip(times, rooms, found.stages, strict=True)), _path(found)
    )


def spare_bytes(peaks: Sequence[int], limit_bytes: int | None) -> tuple[int, ...]:
    """What each process could hold in addition: up to the device's limit, or without one up to the largest
    process of any stage.

    Args:
        peaks: of each stage's process, base included.
    """
    limit = max(peaks) if limit_bytes is None else limit_bytes
    return tuple(max(0, limit - peak) for peak in peaks)


def _composed(
    model: CostModel, candidate: Candidate, exits: Sequence[PlannedExit], fill: Fill
) -> PipelineCosts:
    mode = candidate.exit_forward
    stages = [stage_costs(model, index, stage.heads, mode) for index, stage in enumerate(candidate.stages)]
    costs = pipeline_costs(model, stages)
    if fill.is_plain:
        return costs
    on_stage = [
        [(one.depth, Head(one.head, one.tied)) for one in exits if one.stage == stage]
        for stage in range(len(stages))
    ]
    partial = [partial_costs(model, stage, placed, mode) for stage, placed in enumerate(on_stage)]
    return with_partial_costs(costs, partial)


def _stage(time: StageTime, room: Headroom, on_path: StageOnPath) -> StageInsight:
    return StageInsight(
        busy_s=time.busy_ns / 1e9,
        idle=IdleTime(
            warm_up_s=time.warm_up_ns / 1e9,
            steady_s=time.steady_ns / 1e9,
            cool_down_s=time.cool_down_ns / 1e9,
        ),
        time_headroom=TimeHeadroom(
            free_s=room.free_ns / 1e9,
            free_side=room.free_side,
            hidden_s=room.hidden_ns / 1e9,
            hidden_side=room.hidden_side,
        ),
        critical=StageCriticalPath(
            forward=_count(on_path.forward),
            backward=_count(on_path.backward),
            messages=_count(on_path.messages),
        ),
    )


def _path(found: Sensitivity) -> CriticalPath:
    ops = tuple(
        CriticalOp(
            op=one.op,
            forward=_count(one.forward),
            backward=_count(one.backward),
            critical_s=one.critical_ns / 1e9,
        )
        for one in found.ops
    )
    return CriticalPath(ops=ops, other_s=found.other_ns / 1e9)


def _count(passed: Passed) -> PathCount:
    return PathCount(least=passed.least, most=passed.most)
