"""What a sweep says about one configuration."""

from __future__ import annotations

from dataclasses import dataclass

from eeplan.plan import Plan
from eeplan.spec import ExitForward


@dataclass(frozen=True, slots=True)
class DecodeOutcome:
    """Expected decoding of one placement; seconds per token. None where the profile has no decode costs."""

    full_s: float | None = None
    kv_recompute_s: float | None = None
    catch_up_s: float | None = None
    pipeline_s: float | None = None
    """None on a single stage, too."""
    speed_up: float | None = None
    """Of ``decode.mode`` over mode ``full``."""
    mean_depth: float | None = None
    """Layers that the emitting exits read."""
    usage_is_assumption: bool | None = None
    estimated: bool = False
    """Costs were derived from those of another vocabulary."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is predicted for one configuration; None where it is infeasible."""

    feasible: bool
    reason: str = ""
    num_microbatches: int | None = None
    num_exits: int | None = None
    exits_per_stage: str | None = None
    exit_depths: str | None = None
    """Layers computed before each exit."""
    layers_per_stage: str | None = None
    exit_forward: ExitForward | None = None
    iteration_time_s: float | None = None
    pipeline_s: float | None = None
    grad_sync_s: float | None = None
    optimizer_s: float | None = None
    time_overhead: float | None = None
    """Against the same run without exits."""
    tokens_per_s: float | None = None
    peak_bytes: int | None = None
    """Of the largest stage's process; the least possible one where nothing fits."""
    fill_warm_up: int | None = None
    """Partial microbatches between warm-up and steady state."""
    fill_cool_down: int | None = None
    decode_full_s: float | None = None
    """Seconds per token in each mode; None where the profile has no decode costs."""
    decode_kv_recompute_s: float | None = None
    decode_catch_up_s: float | None = None
    decode_pipeline_s: float | None = None
    decode_speed_up: float | None = None
    """Of ``decode.mode`` over mode ``full``."""
    decode_mean_depth: float | None = None
    usage_is_assumption: bool | None = None
    """Whether the shares of tokens that leave early were supposed, not measured."""
    extrapolated_ops: str = ""
    interpolated_ops: str = ""


def outcome_of(plan: Plan) -> Outcome:
    """The row of a run that the planner itself was asked about."""
    prediction, fill, decode = plan.prediction, plan.fill, plan.decode
    counts = [len(stage.exit_depths) for stage in plan.stages]
    modes = {mode.mode: mode for mode in decode.modes} if decode else {}
    seconds = {name: mode.seconds_per_token for name, mode in modes.items()}
    chosen = modes.get(plan.run.decode.mode)
    return Outcome(
        feasible=True,
        num_microbatches=plan.num_microbatches,
        num_exits=sum(counts),
        exits_per_stage=_words(counts),
        exit_depths=_words(sorted(one.depth for one in plan.exits)),
        layers_per_stage=_words([stage.last_layer - stage.first_layer + 1 for stage in plan.stages]),
        exit_forward=plan.exit_forward,
        iteration_time_s=prediction.iteration_time_s,
        pipeline_s=prediction.pipeline_s,
        grad_sync_s=prediction.grad_sync_s,
        optimizer_s=prediction.optimizer_s,
        time_overhead=prediction.time_overhead,
        tokens_per_s=prediction.tokens_per_s,
        peak_bytes=max(s.memory.peak_bytes + s.memory.process_base_bytes for s in plan.stages),
        fill_warm_up=len(fill.warm_up_depths) if fill else 0,
        fill_cool_down=len(fill.truncated_reaches) if fill else 0,
        decode_full_s=seconds.get("full"),
        decode_kv_recompute_s=seconds.get("kv_recompute"),
        decode_catch_up_s=seconds.get("catch_up"),
        decode_pipeline_s=seconds.get("pipeline"),
        decode_speed_up=chosen.speed_up if chosen else None,
        decode_mean_depth=chosen.mean_depth if chosen else None,
        usage_is_assumption=decode.usage_is_assumption if decode else None,
        extrapolated_ops=" ".join(plan.extrapolated_ops),
        interpolated_ops=" ".join(plan.interpolated_ops),
    )


def _words(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))
