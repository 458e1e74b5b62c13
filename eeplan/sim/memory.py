"""Peak bytes of a stage over a whole iteration, and what they consist of (EE-LLM 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from eeplan.plan import MemoryBreakdown
from eeplan.sim.bounds import filled_activation_bytes, filled_peak_bytes, peak_bytes
from eeplan.sim.costs import CostModel, PipelineCosts, StageCosts, pipeline_costs
from eeplan.sim.fill import Fill

PeakDuring = Literal["forward", "backward", "optimizer"]


def iteration_peak_bytes(model: CostModel, stages: Sequence[StageCosts]) -> tuple[int, ...]:
    """Peak bytes of each stage without the process base: during the pipeline or the optimizer step.

    The optimizer runs when no microbatch is in flight, so the two peaks do not add up.
    """
    pipeline = peak_bytes(pipeline_costs(model, stages), model.run.num_microbatches)
    return tuple(map(max, pipeline, optimizer_peak_bytes(stages)))


def optimizer_peak_bytes(stages: Sequence[StageCosts]) -> tuple[int, ...]:
    """Peak bytes of each stage during the optimizer step."""
    return tuple(stage.state_bytes + stage.optimizer_transient_bytes for stage in stages)


def memory_breakdown(
    model: CostModel,
    stages: Sequence[StageCosts],
    stage: int,
    filled: tuple[PipelineCosts, Fill] | None = None,
) -> MemoryBreakdown:
    """Parts of one stage's peak; they add up to it exactly.

    Args:
        filled: costs with those of partial microbatches, and which there are; None for plain 1F1B.
    """
    costs, limit = stages[stage], model.run.limits.device_memory_bytes
    pipeline, fill = filled or (pipeline_costs(model, stages), Fill(model.run.num_microbatches))
    peak = max(filled_peak_bytes(pipeline, fill)[stage], optimizer_peak_bytes(stages)[stage])
    activations = filled_activation_bytes(pipeline, fill, stage)
    transients: dict[PeakDuring, int] = {
        "forward": activations + costs.forward_transient_bytes,
        "backward": activations + costs.backward_transient_bytes,
        "optimizer": costs.optimizer_transient_bytes,
    }
    if peak - costs.state_bytes > max(transients.values()):
        # A forward that keeps nothing is the highest.
        transients["forward"] = peak - costs.state_bytes
    during = max(transients, key=lambda name: transients[name])
    held = 0 if during == "optimizer" else activations
    base = model.profile.process_base_bytes
    in_flight = fill.held_at_first_backward(stage, len(stages)) + fill.warm_up_on(stage)
    return MemoryBreakdown(
        parameters=costs.parameters,
        state_bytes=costs.state_bytes,
        in_flight=in_flight,
        activation_bytes_per_microbatch=costs.kept_bytes,
        activation_bytes=held,
        transient_bytes=peak - costs.state_bytes - held,
        peak_during=during,
        peak_bytes=peak,
        process_base_bytes=base,
        headroom_bytes=None if limit is None else limit - peak - base,
    )
