"""Lays what was predicted beside what was measured: quantities, errors, op times, the summary.

Every error here is ``predicted / measured - 1``, signed: positive means that the prediction was too high.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from eeplan.plan import Plan
from eeplan.profile import OpName
from eeplan.profile_variants import op_cost
from eeplan.report.rundir import RunData
from eeplan.sim.costs import EXIT_OPS, pipeline_costs_of
from eeplan.sim.engine import simulate
from eeplan.sim.fill import schedule_of
from eeplan.sim.idle import StageTime, stage_times
from eeplan.timeline import Span, SpanKind, Timeline

Unit = Literal["s", "bytes", "tokens/s", "fraction"]
NS_PER_S = 1e9
PHASES = ("warm-up", "steady", "cool-down")
"""Of a stage's idle time, in order."""
PARTS = ("pipeline", "gradient sync", "optimizer", "overhead")
"""Of an iteration, in order."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number that was both predicted and measured; ``n`` is how many measurements stand behind it."""

    name: str
    unit: Unit
    predicted: float
    measured: float
    n: int

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1``; None where nothing was measured to divide by."""
        return signed_error(self.predicted, self.measured)


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one kind of op on one stage: predicted, and measured over all recorded iterations."""

    stage: int
    kind: SpanKind
    predicted_s: float
    median_s: float
    p10_s: float
    p90_s: float
    n: int

    @property
    def error(self) -> float | None:
        """``predicted / measured - 1`` of the median."""
        return signed_error(self.predicted_s, self.median_s)


def signed_error(predicted: float, measured: float) -> float | None:
    """``predicted / measured - 1``; None for a measurement that is not positive."""
    return predicted / measured - 1 if measured > 0 else None


def quantile(values: Sequence[float], fraction: float) -> float:
    """Linear-interpolation quantile of a non-empty sequence."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def predicted_timeline(plan: Plan) -> Timeline:
    """The simulated iteration of ``plan``: pipeline, then gradient synchronisation, then optimizer.

    The parts follow each other as in ``Prediction``: every stage updates its weights once all of them have
    synchronised.
    """
    pipeline = simulate(schedule_of(plan), pipeline_costs_of(plan))
    sync_start = pipeline.pipeline_ns
    update_start = sync_start + round(plan.prediction.grad_sync_s * NS_PER_S)
    spans = []
    for stage, (compute, costs) in enumerate(zip(pipeline.spans, plan.stages, strict=True)):
        sync_ns, update_ns = round(costs.grad_sync_s * NS_PER_S), round(costs.optimizer_s * NS_PER_S)
        # A stage that reduces for longer than the pipeline waits for it began before the pipeline's end.
        start = min(sync_start, update_start - sync_ns)
        tail = (
            Span(stage, "grad_sync", -1, start, start + sync_ns),
            Span(stage, "optimizer", -1, update_start, update_start + update_ns),
        )
        spans.append((*compute, *(span for span in tail if span.end_ns > span.start_ns)))
    return replace(pipeline, spans=tuple(spans))


def idle_share(timeline: Timeline) -> float:
    """Bubble: share of all stages' time in the pipeline part that no forward or backward fills."""
    span_ns = timeline.pipeline_ns * timeline.num_stages
    busy = sum(timeline.busy_ns(stage) for stage in range(timeline.num_stages))
    return 1 - busy / span_ns if span_ns else 0.0


def time_quantities(run: RunData) -> tuple[Quantity, ...]:
    """Iteration time, its parts, throughput and bubble."""
    predicted, measured = run.plan.prediction, run.measured
    training = run.plan.run.training
    tokens = training.global_batch_size * training.seq_length
    n, recorded = measured.iterations_timed, len(run.timelines)
    bubble = statistics.median([idle_share(timeline) for _, timeline in run.timelines])
    parts = zip(predicted_parts(run).items(), measured_parts(run).values(), strict=True)
    return (
        Quantity("Iteration time", "s", predicted.iteration_time_s, measured.iteration_time_s, n),
        *(Quantity(name, "s", expected, found, n) for (name, expected), found in parts),
        Quantity("Throughput", "tokens/s", predicted.tokens_per_s, tokens / measured.iteration_time_s, n),
        Quantity("Bubble (idle share)", "fraction", predicted.bubble_fraction, bubble, recorded),
    )


def predicted_parts(run: RunData) -> dict[str, float]:
    """Seconds of each part of the predicted iteration."""
    p = run.plan.prediction
    return dict(zip(PARTS, (p.pipeline_s, p.grad_sync_s, p.optimizer_s, p.overhead_s), strict=True))


def measured_parts(run: RunData) -> dict[str, float]:
    """Median seconds of each part of the measured iterations."""
    m = run.measured
    return dict(zip(PARTS, (m.pipeline_s, m.grad_sync_s, m.optimizer_s, m.overhead_s), strict=True))


def memory_quantities(run: RunData) -> tuple[Quantity, ...]:
    """Peak bytes per stage, of tensors and of the whole process where its base was profiled."""
    stages = tuple(enumerate(run.plan.stages))
    tensors = tuple(
        Quantity(f"Peak memory, stage {i}", "bytes", s.memory.peak_bytes, run.measured.peak_bytes[i], 1)
        for i, s in stages
    )
    if not all(stage.memory.process_base_bytes for stage in run.plan.stages):
        return tensors
    resident = tuple(
        Quantity(
            f"Process peak, stage {i}",
            "bytes",
            s.memory.peak_bytes + s.memory.process_base_bytes,
            run.measured.process_peak_bytes[i],
            1,
        )
        for i, s in stages
    )
    return tensors + resident


def idle_phases(run: RunData) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Idle seconds of each stage by phase (``sim.idle``): predicted, and medians of recorded iterations."""
    predicted = [
        dict(zip(PHASES, (s.idle.warm_up_s, s.idle.steady_s, s.idle.cool_down_s), strict=True))
        for s in run.plan.stages
    ]
    kinds = schedule_of(run.plan).kinds
    recorded = [stage_times(timeline, kinds) for _, timeline in run.timelines]
    measured = [
        {name: statistics.median([phases(times[stage])[name] for times in recorded]) for name in PHASES}
        for stage in range(len(run.plan.stages))
    ]
    return predicted, measured


def phases(time: StageTime) -> dict[str, float]:
    """Idle seconds by phase."""
    nanoseconds = (time.warm_up_ns, time.steady_ns, time.cool_down_ns)
    return {name: value / NS_PER_S for name, value in zip(PHASES, nanoseconds, strict=True)}


def idle_quantities(run: RunData) -> tuple[Quantity, ...]:
    """Idle time of each stage and its phases."""
    rows = []
    for stage, (expected, found) in enumerate(zip(*idle_phases(run), strict=True)):
        n = len(run.timelines)
        rows.append(Quantity(f"Idle, stage {stage}", "s", sum(expected.values()), sum(found.values()), n))
        rows += [Quantity(f"{name}, stage {stage}", "s", expected[name], found[name], n) for name in PHASES]
    return tuple(rows)


def exit_quantities(run: RunData) -> tuple[Quantity, ...]:
    """What each early exit takes of its stage for one microbatch, forward and backward; none if not timed.

    Predicted from the profile where the run has it, else as an equal part of what its stage's exits take.
    """
    rows = []
    for planned in sorted(run.plan.exits, key=lambda one: one.depth):
        name = f"exit_{planned.depth}"
        timed = run.measured.exits.get(name)
        if timed is None:
            continue
        n = run.measured.iterations_timed
        if run.profile is None:
            stage = run.plan.stages[planned.stage]
            expected = stage.exit_s / len(stage.exit_depths)
            rows.append(
                Quantity(f"Exit {planned.depth}", "s", expected, timed.forward_s + timed.backward_s, n)
            )
            continue
        op: OpName = EXIT_OPS[planned.head]
        cost = op_cost(run.profile, run.plan.run, op)
        forward_s, backward_s = cost.forward.mean_s, cost.backward.mean_s
        rows.append(
            Quantity(
                f"Exit {planned.depth}", "s", forward_s + backward_s, timed.forward_s + timed.backward_s, n
            )
        )
        rows.append(Quantity(f"forward, exit {planned.depth}", "s", forward_s, timed.forward_s, n))
        rows.append(Quantity(f"backward, exit {planned.depth}", "s", backward_s, timed.backward_s, n))
    return tuple(rows)


def decode_quantities(run: RunData) -> tuple[Quantity, ...]:
    """Tokens per second of every decoding mode that was both predicted and measured, one sequence at once."""
    if run.decode_bench is None:
        return ()
    return tuple(
        Quantity(
            f"Mode {one.mode}, {threshold_words(one.threshold)}",
            "tokens/s",
            one.predicted_tokens_per_s,
            one.tokens_per_s,
            1,
        )
        for one in run.decode_bench.runs
        if one.batch == 1 and one.predicted_tokens_per_s is not None
    )


def threshold_words(threshold: float | tuple[float, ...]) -> str:
    """One threshold, or one per exit."""
    each = threshold if isinstance(threshold, tuple) else (threshold,)
    return f"threshold {', '.join(f'{one:g}' for one in each)}"


def op_times(run: RunData, predicted: Timeline) -> tuple[OpTime, ...]:
    """Forward, backward, synchronisation and optimizer of each stage, op by op.

    Args:
        predicted: the timeline of :func:`predicted_timeline`, so that the page has one source of op times.
    """
    rows = []
    for stage in range(predicted.num_stages):
        for kind in ("forward", "backward", "grad_sync", "optimizer"):
            expected = _durations(predicted, stage, kind)
            found = [d for _, timeline in run.timelines for d in _durations(timeline, stage, kind)]
            if not found:
                continue
            rows.append(
                OpTime(
                    stage=stage,
                    kind=kind,
                    predicted_s=statistics.median(expected) if expected else 0.0,
                    median_s=statistics.median(found),
                    p10_s=quantile(found, 0.1),
                    p90_s=quantile(found, 0.9),
                    n=len(found),
                )
            )
    return tuple(rows)


def _durations(timeline: Timeline, stage: int, kind: str) -> list[float]:
    return [(s.end_ns - s.start_ns) / NS_PER_S for s in timeline.spans[stage] if s.kind == kind]


def loss_ends(run: RunData) -> Mapping[str, tuple[float, float]]:
    """First and last training loss of every exit in nats, ``final`` included."""
    first, last = run.train[0].losses, run.train[-1].losses
    return {name: (first[name], last[name]) for name in run.loss_names}


def learnt(run: RunData, name: str) -> bool | None:
    """Whether an exit ended below the unigram entropy, by validation loss where there is one.

    A model that has learnt nothing but word frequencies sits at that entropy. None without a reference.
    """
    if run.unigram_entropy_nats is None:
        return None
    return last_loss(run, name) < run.unigram_entropy_nats


def last_loss(run: RunData, name: str) -> float:
    """Last validation loss of an exit in nats, or its last training loss if there was no validation."""
    return (run.validation[-1] if run.validation else run.train[-1]).losses[name]


def summary(run: RunData) -> dict[str, Any]:
    """The numbers of the page for programs: predicted, measured, signed errors, losses, exits.

    ``losses`` holds the first and last training loss per exit (null where a loss was not finite).
    """
    predicted, measured = run.plan.prediction.iteration_time_s, run.measured.iteration_time_s
    predicted_bytes = [stage.memory.peak_bytes for stage in run.plan.stages]
    measured_bytes = list(run.measured.peak_bytes)
    return {
        "predicted": {"iteration_time_s": predicted, "peak_bytes": predicted_bytes},
        "measured": {"iteration_time_s": measured, "peak_bytes": measured_bytes},
        "error": {
            "iteration_time": signed_error(predicted, measured),
            "peak_bytes": [signed_error(p, m) for p, m in zip(predicted_bytes, measured_bytes, strict=True)],
        },
        "losses": {name: [_finite(x) for x in ends] for name, ends in loss_ends(run).items()},
        "exits": [
            {
                "name": f"exit_{e.depth}",
                "layer": e.layer,
                "boundary": e.boundary,
                "depth": e.depth,
                "stage": e.stage,
                "head": e.head,
                "tied": e.tied,
                "weight": e.effective_weight,
            }
            for e in run.plan.exits
        ],
        "wall_s": run.measured.wall_s,
        "parts": {
            name: {"unit": q.unit, "predicted": q.predicted, "measured": q.measured, "error": q.error}
            for name, q in (
                *((q.name, q) for q in time_quantities(run)[1:]),
                *((q.name, q) for q in exit_quantities(run) if q.name.startswith("Exit")),
            )
        },
        "idle": [
            {"predicted": expected, "measured": found}
            for expected, found in zip(*idle_phases(run), strict=True)
        ],
        "headroom": [stage.time_headroom.model_dump(mode="json") for stage in run.plan.stages],
        "critical_path": run.plan.critical_path.model_dump(mode="json"),
        "interpolated_ops": list(run.plan.interpolated_ops),
        "extrapolated_ops": list(run.plan.extrapolated_ops),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
