"""Loss weights and gradient scales that keep the gradient unbiased when bubbles are filled (EE-LLM 3.3, C.2).

Microbatches are drawn independently from one distribution, so it is enough that each stage counts each loss
as often as the others. Among F full microbatches (the divisor of the loss), stage j sees the losses of stage
k >= j in

    F full ones,  T_j truncated ones (those whose backward reaches it),  A_k warm-up inserts (deeper than k).

With the loss weights of stage k multiplied by F / (F + A_k), and stage j's gradient scaled by

    s_j = F / (F + T_j)      from full and truncated microbatches,
    1                        from warm-up inserts,

the expectation is the full gradient for every pair: (F / (F + A_k)) (s_j (F + T_j) + A_k) / F = 1. To scale
the inserts as well, as the two regions' formulas side by side would have it, is biased wherever A_k T_j > 0
for some k >= j: by A_k T_j / ((F + A_k) (F + T_j)).

Tied parameters need nothing more: each stage's copy has its own unbiased share, and the shares are summed.
"""

from __future__ import annotations

from dataclasses import dataclass

from eeplan.errors import ScheduleError
from eeplan.plan import Plan
from eeplan.sim.fill import Fill, fill_of
from eeplan.sim.schedule import Op, Schedule

TOLERANCE = 1e-9
"""Relative difference between a plan's numbers and those that its schedule asks for, from rounding alone."""


@dataclass(frozen=True, slots=True)
class Corrections:
    """Factors of each stage, and the divisor that they are made for. All are 1 without inserts."""

    num_full: int
    """Losses are divided by it."""
    loss_factors: tuple[float, ...]
    """Multiply the target weights of the early losses on the stage."""
    gradient_scales: tuple[float, ...]
    """Multiply the stage's gradients of full and truncated microbatches."""


def corrections(fill: Fill, num_stages: int) -> Corrections:
    """The factors for a fill."""
    return _corrections(
        fill.num_full,
        [fill.warm_up_on(stage) for stage in range(num_stages)],
        [fill.truncated_on(stage, num_stages) for stage in range(num_stages)],
    )


def counted_corrections(schedule: Schedule) -> Corrections:
    """The same from the backwards that a schedule really has, stage by stage.

    Raises:
        ScheduleError: not as many full microbatches on every stage.
    """
    counts = []
    for stage, program in enumerate(schedule.stages):
        count = {"full": 0, "warm_up": 0, "truncated": 0}
        for instruction in program:
            if instruction.op is Op.BACKWARD:
                count[schedule.kind(instruction.microbatch).name] += 1
        counts.append(count)
        if count["full"] != counts[0]["full"]:
            raise ScheduleError(
                f"stage {stage} has {count['full']} backwards of full microbatches, stage 0 has "
                f"{counts[0]['full']}; expected equally many"
            )
    return _corrections(counts[0]["full"], [c["warm_up"] for c in counts], [c["truncated"] for c in counts])


def _corrections(num_full: int, warm_up: list[int], truncated: list[int]) -> Corrections:
    return Corrections(
        num_full,
        tuple(num_full / (num_full + count) for count in warm_up),
        tuple(num_full / (num_full + count) for count in truncated),
    )


def corrections_of(plan: Plan) -> Corrections:
    """The factors for a plan's fill."""
    return corrections(fill_of(plan), len(plan.stages))


def check_estimator(schedule: Schedule, plan: Plan) -> None:
    """The plan's effective weights and gradient scales are those that ``schedule`` needs to be unbiased.

    Raises:
        ScheduleError: names the stage or exit, what the plan says, and what the schedule asks for.
    """
    needed = counted_corrections(schedule)
    planned = plan.fill.gradient_scales if plan.fill else (1.0,) * len(plan.stages)
    if len(planned) != schedule.num_stages or len(plan.stages) != schedule.num_stages:
        raise ScheduleError(
            f"the plan has {len(plan.stages)} stages and gradient scales for {len(planned)}, the schedule "
            f"has {schedule.num_stages} stages"
        )
    for stage, (found, wanted) in enumerate(zip(planned, needed.gradient_scales, strict=True)):
        if _differ(found, wanted):
            raise ScheduleError(
                f"stage {stage}: the plan scales its gradients by {found:.6g}, but the microbatches of the "
                f"schedule ask for {wanted:.6g}; the gradient would be biased, plan again"
            )
    for placed in plan.exits:
        wanted = placed.target_weight * needed.loss_factors[placed.stage]
        if _differ(placed.effective_weight, wanted):
            raise ScheduleError(
                f"exit after {placed.depth} layers: effective weight {placed.effective_weight:.6g}, but the "
                f"microbatches of the schedule ask for {wanted:.6g}; the gradient would be biased, plan again"
            )


def _differ(found: float, wanted: float) -> bool:
    return abs(found - wanted) > TOLERANCE * abs(wanted)
