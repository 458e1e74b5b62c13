"""Cost of zeroing gradients, clipping and stepping, as a line through parts of two sizes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from eeplan.profile import OptimizerCost
from eeplan.runtime.clock import Clock
from eeplan.runtime.memory import trace_allocations
from eeplan.runtime.optimizer import Training

ROUNDS = 9


def measure_optimizer(parts: Sequence[Training], clock: Clock) -> OptimizerCost:
    """Fit ``fixed + parameters x slope`` through the medians of ``parts``, smallest first."""
    points = [(_parameters(part), _median_seconds(part, clock)) for part in parts]
    (small, small_s), (large, large_s) = points[0], points[-1]
    slope = max(0.0, (large_s - small_s) / (large - small)) if large != small else large_s / large
    largest = parts[-1]
    with trace_allocations(largest.device) as trace:
        _step(largest)
    return OptimizerCost(
        fixed_s=max(0.0, large_s - slope * large),
        per_parameter_s=slope,
        transient_bytes_per_parameter=max(0, trace.peak_bytes) / large,
        state_bytes_per_parameter=largest.state_bytes() / large,
        points=tuple(points),
    )


def _parameters(part: Training) -> int:
    return sum(parameter.numel() for parameter in part.model.parameters())


def _step(part: Training) -> None:
    part.zero_gradients()
    part.step()


def _median_seconds(part: Training, clock: Clock) -> float:
    seconds = []
    for _ in range(ROUNDS + 1):
        clock.start()
        start = clock.mark()
        _step(part)
        start_ns, end_ns = clock.resolve([start, clock.mark()])
        seconds.append((end_ns - start_ns) / 1e9)
    return statistics.median(seconds[1:])
