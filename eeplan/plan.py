"""What was decided and why: the plan file (plan.yaml).

A plan embeds its run and the stage costs it was judged by, so that simulating, training and reporting need
no other file but the data. Deciding is ``sim.search``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from eeplan.errors import PlanError
from eeplan.files import sha256_bytes, write_text
from eeplan.schema import Model, dump_yaml, load_yaml
from eeplan.spec import (
    Boundary,
    DecodeMode,
    ExitForward,
    FillMode,
    HeadKind,
    RunSpec,
    WeightSchedule,
    with_data_paths,
)

Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(ge=0.0)]

PLAN_HEADER = "# Written by `eeplan plan`. Edit the run file and plan again instead.\n"


class PlannedExit(Model):
    """One early exit, placed."""

    layer: PositiveInt
    boundary: Boundary
    depth: PositiveInt
    """Layers computed before the exit; names it in logs and checkpoints (``exit_<depth>``)."""
    stage: Count
    head: HeadKind
    tied: bool
    target_weight: Annotated[float, Field(ge=0.0)]
    effective_weight: Annotated[float, Field(ge=0.0)]
    """Weight that the runtime applies; equals the target unless bubble filling corrects it."""


class MemoryBreakdown(Model):
    """Predicted peak bytes of one stage (facts 3); ``peak_bytes`` is their sum without the process base."""

    parameters: Count
    """Parameters held by one rank of the stage."""
    state_bytes: Count
    """Parameters, gradients and optimizer state."""
    in_flight: Count
    """Most microbatches alive between their forward and backward."""
    activation_bytes_per_microbatch: Count
    activation_bytes: Count
    """Kept for backward by all microbatches in flight at the peak."""
    transient_bytes: Count
    """Of the op that runs at the peak: logits, recomputed exits, temporaries."""
    peak_during: Literal["forward", "backward", "optimizer"] = "backward"
    """When the peak is reached; no microbatch is in flight during the optimizer step."""
    peak_bytes: Count
    process_base_bytes: Count
    headroom_bytes: int | None
    """Device limit minus peak and process base; None without a limit."""


class IdleTime(Model):
    """A stage's idle time in the pipeline part, by phase of the schedule (``sim.idle``)."""

    warm_up_s: Seconds
    """Before its first backward, that of a warm-up insert left aside."""
    steady_s: Seconds
    """From there to the end of its last forward."""
    cool_down_s: Seconds
    """From there to the end of the pipeline part."""


class TimeHeadroom(Model):
    """What a stage could do in addition for every microbatch, all in its forward or all in its backward."""

    free_s: Seconds
    """Without making the iteration longer at all."""
    free_side: Literal["forward", "backward", "either"]
    """Where there is that much room."""
    hidden_s: Seconds
    """Making the iteration longer by no more than that once, instead of once per microbatch."""
    hidden_side: Literal["forward", "backward", "either"]


class PathCount(Model):
    """How often the critical paths of an iteration pass something. They differ where several are equally
    long: all of them pass it at least so often, some of them that often at most."""

    least: Count
    """Seconds that the iteration gets shorter by for each second that the thing takes less."""
    most: Count
    """Seconds that it gets longer by for each second that the thing takes more."""


class StageCriticalPath(Model):
    """How much of a stage is critical."""

    forward: PathCount
    """Forwards of single microbatches."""
    backward: PathCount
    messages: PathCount
    """Over the link to the next stage, both directions together."""


class CriticalOp(Model):
    """One op of the model on the critical path."""

    op: str
    """``embedding``, ``layer`` (all layers together), ``exit_<depth>``, ``final_head``; ``message`` for all
    messages, forward and backward."""
    forward: PathCount
    backward: PathCount
    critical_s: Seconds
    """Its part of one critical path."""


class CriticalPath(Model):
    """What the pipeline part of the iteration consists of along one critical path; its times add up to it."""

    ops: tuple[CriticalOp, ...]
    other_s: Seconds
    """The executor's own time per microbatch."""


class StagePlan(Model):
    """Layers, exits and predicted costs of one pipeline stage. Layers are numbered from 1, inclusive."""

    first_layer: PositiveInt
    last_layer: PositiveInt
    exit_depths: tuple[int, ...]
    forward_s: Seconds
    """One microbatch's forward on this stage, eager exits included."""
    backward_s: Seconds
    """One microbatch's backward, deferred exit forwards included."""
    exit_s: Seconds
    """The part of forward plus backward that the exits cost."""
    output_bytes: Count
    """Size of the message to the next stage; 0 on the last."""
    message_s: Seconds
    """What it takes, and its gradient back; 0 on the last."""
    kept_bytes: Count
    """Alive per microbatch between forward and backward."""
    forward_transient_bytes: Count
    """Beyond ``kept_bytes`` during the forward."""
    backward_transient_bytes: Count
    """Beyond ``kept_bytes`` during the backward."""
    optimizer_s: Seconds
    grad_sync_s: Seconds
    busy_s: Seconds
    """All forwards and backwards of an iteration."""
    idle: IdleTime
    """With ``busy_s`` the whole pipeline part."""
    time_headroom: TimeHeadroom
    critical: StageCriticalPath
    memory: MemoryBreakdown
    spare_bytes: Count
    """Up to the device's limit, or without one up to the largest process of any stage."""


class Prediction(Model):
    """What the simulator expects of one training iteration."""

    iteration_time_s: Seconds
    pipeline_s: Seconds
    grad_sync_s: Seconds
    optimizer_s: Seconds
    overhead_s: Seconds
    """Per iteration, outside the three parts above."""
    baseline_iteration_time_s: Seconds
    """The same model, split and schedule without exits."""
    time_overhead: float
    """``iteration_time_s / baseline_iteration_time_s - 1``."""
    upper_bound_s: Seconds
    """The paper's closed-form bound on the pipeline part (3.2), of its full microbatches alone."""
    closed_form_s: Seconds | None
    """Exact closed form of the pipeline part without p2p; None where it does not hold (M < P, filled
    bubbles)."""
    bubble_fraction: Annotated[float, Field(ge=0.0, le=1.0)]
    """Idle share of all stages during the pipeline part."""
    bubble_fill_capacity: Count
    """Partial microbatches that fit one explicit bubble region (paper 3.3)."""
    tokens_per_s: Annotated[float, Field(ge=0.0)]
    """Of global_batch_size; what ``fill`` adds does not count."""


class DecodeModePrediction(Model):
    """Expected speed of one decoding mode, prompt excluded."""

    mode: DecodeMode
    processes: PositiveInt
    """Stages that decode at once in mode ``pipeline``; 1 for the others."""
    seconds_per_token: Annotated[float, Field(gt=0.0)]
    tokens_per_s: Annotated[float, Field(gt=0.0)]
    speed_up: Annotated[float, Field(gt=0.0)]
    """Over mode ``full`` on one process."""
    mean_depth: Annotated[float, Field(gt=0.0)]
    """Layers that the emitting exits read."""
    layer_rows_per_token: Annotated[float, Field(gt=0.0)]
    """Layers run, each counted once per row."""
    checks_per_token: Annotated[float, Field(ge=0.0)]
    """Early heads run, each counted once per row."""


class DecodePrediction(Model):
    """What the decode model expects of the trained model, one sequence at a time (paper 4)."""

    threshold: Annotated[float, Field(ge=0.0, le=1.0)]
    recompute_limit: Count
    context_tokens: PositiveInt
    """Positions that attention looked back at when the costs were measured."""
    exit_shares: tuple[Annotated[float, Field(ge=0.0, le=1.0)], ...]
    """Share of tokens that leave at each exit, by depth; the rest passes all layers."""
    usage: str
    """Where the shares come from."""
    usage_is_assumption: bool
    estimated: tuple[str, ...]
    """Costs that were not measured as they are used."""
    modes: tuple[DecodeModePrediction, ...]


class Decision(Model):
    """One automatic choice: what, why, and what came second."""

    subject: str
    choice: str
    reason: str
    rejected: str = ""
    """Best rejected alternative with its numbers; empty when the user fixed the choice."""


class Certificate(Model):
    """How much of the space of placements and layer splits the search has settled."""

    optimal: bool
    """Proved to be the best in what was asked for."""
    ties_settled: bool = True
    """Also proved to be the best of equally fast ones in peak, then in layers computed in vain."""
    lower_bound_s: Seconds | None = None
    """No other choice has a shorter iteration; None where another objective was searched."""
    gap: Annotated[float, Field(ge=0.0)] = 0.0
    """``1 - lower_bound_s / iteration_time_s`` before bubbles are filled."""
    evaluated: Count
    """Candidates judged to the nanosecond."""
    pruned: Count = 0
    """Groups of candidates ruled out together by a lower bound."""
    space_size: Count


class FillPlan(Model):
    """Partial microbatches in the bubbles (paper 3.3), and what keeps the gradient unbiased with them.

    The kind of every microbatch follows: ``num_full`` full ones, then the truncated, then the warm-up
    inserts.
    """

    mode: FillMode
    warm_up: Count
    """Inserts of region A before those that meet no exit were dropped (K_A)."""
    cool_down: Count
    """Inserts of region B (K_B)."""
    num_full: PositiveInt
    """Full microbatches per iteration and data-parallel rank."""
    warm_up_depths: tuple[PositiveInt, ...]
    """Stages that each warm-up insert passes, deepest first."""
    truncated_reaches: tuple[PositiveInt, ...]
    """Last stages that each truncated microbatch's backward passes, furthest first."""
    gradient_scales: tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...]
    """Per stage: multiplies its gradients of full and truncated microbatches."""
    extra_tokens_per_iteration: Count
    """Read beyond global_batch_size x seq_length, by all data-parallel ranks together."""
    turn_forward_s: tuple[Seconds, ...]
    """Per stage: a warm-up insert's forward where it turns, up to the stage's last exit."""
    turn_backward_s: tuple[Seconds, ...]
    turn_kept_bytes: tuple[Count, ...]
    bare_forward_s: tuple[Seconds, ...]
    """Per stage: a truncated microbatch's forward where its backward never comes; it runs no exits."""


class Plan(Model):
    """The whole plan file."""

    schema_version: Literal[1]
    eeplan_version: str
    run_sha256: str
    profile_sha256: str
    usage_sha256: str | None = None
    """Of the usage file; None when there is none and ``run.decode.prior`` stands in."""
    run: RunSpec
    exits: tuple[PlannedExit, ...]
    loss_weight_schedule: WeightSchedule | None = None
    """Factor on the weights of all early losses, by iteration; None keeps it at 1."""
    exit_forward: ExitForward
    fill: FillPlan | None = None
    """None when no bubble is filled."""
    schedule: Literal["1f1b"]
    num_microbatches: PositiveInt
    """That global_batch_size asks of each data-parallel rank (M); ``fill`` may change what runs."""
    stages: tuple[StagePlan, ...]
    prediction: Prediction
    critical_path: CriticalPath
    decode: DecodePrediction | None = None
    """None when the profile has no decode costs."""
    decisions: tuple[Decision, ...]
    certificate: Certificate
    extrapolated_ops: tuple[str, ...]
    """Ops whose cost was not measured as it is used."""
    interpolated_ops: tuple[str, ...] = ()
    """Ops measured at smaller and larger microbatch sizes only."""
    content_sha256: str = ""
    """Hash of everything above; a plan edited by hand is refused."""

    @property
    def final_exit_weight(self) -> float:
        """Weight of the last layer's loss."""
        return 1.0


def content_hash(plan: Plan) -> str:
    """SHA-256 of the plan without its own hash field.

    Of data paths only the last part counts, so that a plan keeps its hash when it is copied elsewhere.
    """
    run = with_data_paths(plan.run, os.path.basename)
    return sha256_bytes(dump_yaml(plan.model_copy(update={"run": run, "content_sha256": ""})).encode())


def write_plan(path: Path, plan: Plan) -> Plan:
    """Write a plan whole; data paths become relative to its folder.

    Returns:
        The plan as written, with its hash.
    """
    folder = path.parent.resolve()
    run = with_data_paths(plan.run, lambda p: os.path.relpath(folder / p, folder))
    plan = plan.model_copy(update={"run": run})
    plan = plan.model_copy(update={"content_sha256": content_hash(plan)})
    write_text(path, PLAN_HEADER + dump_yaml(plan))
    return plan


def load_plan(path: Path) -> Plan:
    """Read a plan; data paths become absolute. The hash is kept as written.

    Raises:
        FileError, SchemaError. PlanError: the file was edited after it was written.
    """
    plan, _ = load_yaml(path, Plan, "plan")
    expected = content_hash(plan)
    if plan.content_sha256 != expected:
        raise PlanError(
            f"plan {path}: content_sha256 is {plan.content_sha256[:12] or 'empty'}…, its content hashes to "
            f"{expected[:12]}…; it was edited, or written by another version of eeplan; plan again from the "
            "run file"
        )
    run = with_data_paths(plan.run, lambda p: str((path.parent / p).resolve()))
    return plan.model_copy(update={"run": run})
