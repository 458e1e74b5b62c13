"""Peak bytes of a stage over a whole iteration, and what they consist of (EE-LLM 3.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from eeplan.plan import MemoryBreakdown
from eeplan.sim.bounds import in_flight_microbatches, peak_bytes
from eeplan.sim.costs import CostModel, StageCosts, pipeline_costs

PeakDuring = Literal["forward", "backward", "optimizer"]


def iteration_peak_bytes(model: CostModel, stages: Sequence[StageCosts]) -> tuple[int, ...]:
    """Peak bytes of each stage without the process base: during the pipeline or the optimizer step.

    The optimizer runs when no microbatch is in flight, so the two peaks do not add up.
    """
    pipeline = peak_bytes(pipeline_costs(model, stages), model.run.num_microbatches)
    optimizer = (stage.state_bytes + stage.optimizer_transient_bytes for stage in stages)
    return tuple(map(max, pipeline, optimizer))


def memory_breakdown(model: CostModel, stages: Sequence[StageCosts], stage: int) -> MemoryBreakdown:
    """Parts of one stage's peak; they add up to it exactly."""
    costs, limit = stages[stage], model.run.limits.device_memory_bytes
    peak = iteration_peak_bytes(model, stages)[stage]
    in_flight = in_flight_microbatches(len(stages), model.run.num_microbatches, stage)
    activations = in_flight * costs.kept_bytes
    transients: dict[PeakDuring, int] = {
        "forward": activations + costs.forward_transient_bytes,
        "backward": activations + costs.backward_transient_bytes,
        "optimizer": costs.optimizer_transient_bytes,
    }
    during = max(transients, key=lambda name: transients[name])
    held = 0 if during == "optimizer" else activations
    base = model.profile.process_base_bytes
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
