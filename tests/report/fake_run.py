"""Writes a small, complete run directory as training would leave it, from seeded noise around a plan."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from builders import make_profile, make_run
from decode_cases import with_decode_costs

from eeplan.files import sha256_bytes
from eeplan.plan import (
    Certificate,
    CriticalOp,
    CriticalPath,
    Decision,
    IdleTime,
    MemoryBreakdown,
    PathCount,
    Plan,
    PlannedExit,
    Prediction,
    StageCriticalPath,
    StagePlan,
    TimeHeadroom,
    write_plan,
)
from eeplan.profile import OpProfile
from eeplan.report.rundir import RunData, loss_names
from eeplan.runtime.decode.quality import (
    THRESHOLDS,
    Outcomes,
    exit_quality,
    measured_usage,
    threshold_quality,
)
from eeplan.schema import dump_yaml, write_yaml
from eeplan.sim.idle import StageTime, stage_times
from eeplan.sim.schedule import Op, one_f_one_b
from eeplan.timeline import Span, Timeline
from eeplan.usage import ExitUsage

MIB = 2**20
FORWARD_S, BACKWARD_S, EXIT_S = 0.030, 0.060, 0.004
OPTIMIZER_S, SYNC_S, OVERHEAD_S = 0.025, 0.006, 0.003
WORDS = (
    "the",
    "function",
    "returns",
    "a",
    "list",
    "of",
    "names\n",
    "module",
    "defines,",
    "order.",
    "<b>",
    "&",
)


@dataclass(frozen=True)
class Reported:
    """A run directory, what was read from it, and the report made of it."""

    folder: Path
    out: Path
    plan: Plan
    run: RunData
    summary: dict[str, Any]


def naive_pipeline(num_microbatches: int, durations: Sequence[dict[tuple[str, int], int]]) -> Timeline:
    """1F1B without message times: every op starts when its stage is free and its input has arrived.

    Args:
        durations: per stage, nanoseconds of each ("forward" | "backward", microbatch).
    """
    kinds = {Op.FORWARD: "forward", Op.BACKWARD: "backward"}
    schedule = one_f_one_b(len(durations), num_microbatches)
    orders = [[(kinds[i.op], i.microbatch) for i in stage if i.op in kinds] for stage in schedule.stages]
    last = len(orders) - 1
    ends: dict[tuple[int, str, int], int] = {}
    spans: list[list[Span]] = [[] for _ in orders]
    while any(orders):
        for stage, order in enumerate(orders):
            while order:
                kind, microbatch = order[0]
                needed = [(stage, "forward", microbatch)] if kind == "backward" else []
                if kind == "forward" and stage > 0:
                    needed.append((stage - 1, "forward", microbatch))
                if kind == "backward" and stage < last:
                    needed.append((stage + 1, "backward", microbatch))
                if any(key not in ends for key in needed):
                    break
                free = spans[stage][-1].end_ns if spans[stage] else 0
                start = max([free, *(ends[key] for key in needed)])
                end = start + durations[stage][order.pop(0)]
                ends[stage, kind, microbatch] = end
                spans[stage].append(Span(stage, kind, microbatch, start, end))
    return Timeline(spans=tuple(map(tuple, spans)))


def fake_plan(
    profile: OpProfile, *, stages: int, microbatches: int, layers: int, exit_depths: Sequence[int]
) -> Plan:
    """A plan whose stage costs are round numbers; its pipeline time comes from :func:`naive_pipeline`."""
    per_stage = layers // stages
    run = make_run(
        name="fake",
        model__num_layers=layers,
        parallel__pipeline_model_parallel_size=stages,
        training__global_batch_size=2 * microbatches,
        training__train_iters=60,
        exits={"layers": [{"layer": depth} for depth in exit_depths]},
    )
    exits = tuple(
        PlannedExit(
            layer=depth,
            boundary="after",
            depth=depth,
            stage=(depth - 1) // per_stage,
            head="norm",
            tied=False,
            target_weight=depth / layers,
            effective_weight=depth / layers,
        )
        for depth in exit_depths
    )
    counts = [sum(e.stage == stage for e in exits) for stage in range(stages)]
    built = tuple(
        _stage(stage, stages, microbatches, per_stage, exits, counts[stage]) for stage in range(stages)
    )
    pipeline = _pipeline(microbatches, [(s.forward_s, s.backward_s) for s in built])
    built = tuple(_with_idle(s, time) for s, time in zip(built, stage_times(pipeline), strict=True))
    pipeline_s = pipeline.pipeline_ns / 1e9
    bare_times = [(s.forward_s, s.backward_s - s.exit_s) for s in built]
    bare_s = _pipeline(microbatches, bare_times).pipeline_ns / 1e9
    rest_s = SYNC_S + OPTIMIZER_S + OVERHEAD_S
    busy = sum(microbatches * (s.forward_s + s.backward_s) for s in built)
    return Plan(
        schema_version=1,
        eeplan_version="0.1.0",
        run_sha256="ab" * 32,
        profile_sha256=sha256_bytes(dump_yaml(profile).encode()),
        run=run,
        exits=exits,
        exit_forward="deferred",
        schedule="1f1b",
        num_microbatches=microbatches,
        stages=built,
        prediction=Prediction(
            iteration_time_s=pipeline_s + rest_s,
            pipeline_s=pipeline_s,
            grad_sync_s=SYNC_S,
            optimizer_s=OPTIMIZER_S,
            overhead_s=OVERHEAD_S,
            baseline_iteration_time_s=bare_s + rest_s,
            time_overhead=(pipeline_s + rest_s) / (bare_s + rest_s) - 1,
            upper_bound_s=pipeline_s * 1.01,
            closed_form_s=pipeline_s,
            bubble_fraction=1 - busy / (stages * pipeline_s),
            bubble_fill_capacity=0,
            tokens_per_s=2 * microbatches * run.training.seq_length / (pipeline_s + rest_s),
        ),
        critical_path=_critical_path(pipeline_s, microbatches, exit_depths),
        decisions=(
            Decision(
                subject="exit placement",
                choice=", ".join(f"after layer {depth}" for depth in exit_depths) or "none",
                reason="one exit per stage but the last hides in the bubbles",
                rejected="a second exit on stage 0: iteration 4.1 % longer",
            ),
            Decision(
                subject="layer split", choice="even", reason="the run file fixes <nothing> & 1F1B likes it"
            ),
        ),
        certificate=Certificate(optimal=True, evaluated=28, space_size=28),
        extrapolated_ops=(),
    )


def _stage(
    stage: int, stages: int, microbatches: int, layers: int, exits: Sequence[PlannedExit], count: int
) -> StagePlan:
    in_flight = min(stages - stage, microbatches)
    state, per_microbatch, transient = (40 + 10 * stage) * MIB, 9 * MIB, (6 + 4 * count) * MIB
    return StagePlan(
        first_layer=stage * layers + 1,
        last_layer=(stage + 1) * layers,
        exit_depths=tuple(e.depth for e in exits if e.stage == stage),
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S + EXIT_S * count,
        exit_s=EXIT_S * count,
        output_bytes=0 if stage == stages - 1 else 65536,
        message_s=0.0,
        kept_bytes=per_microbatch,
        forward_transient_bytes=MIB,
        backward_transient_bytes=transient,
        optimizer_s=OPTIMIZER_S,
        grad_sync_s=SYNC_S,
        busy_s=microbatches * (FORWARD_S + BACKWARD_S + EXIT_S * count),
        idle=IdleTime(warm_up_s=0.0, steady_s=0.0, cool_down_s=0.0),
        time_headroom=TimeHeadroom(
            free_s=0.002 * (stage == stages - 1),
            free_side="backward",
            hidden_s=0.002 + EXIT_S * max(0, 1 - count),
            hidden_side="either",
        ),
        critical=StageCriticalPath(
            forward=PathCount(least=1, most=microbatches if count else 1),
            backward=PathCount(least=1, most=microbatches if count else 1),
            messages=PathCount(least=2, most=2 * microbatches),
        ),
        spare_bytes=10 * MIB * (stages - 1 - stage),
        memory=MemoryBreakdown(
            parameters=2_500_000 + 600_000 * stage,
            state_bytes=state,
            in_flight=in_flight,
            activation_bytes_per_microbatch=per_microbatch,
            activation_bytes=in_flight * per_microbatch,
            transient_bytes=transient,
            peak_bytes=state + in_flight * per_microbatch + transient,
            process_base_bytes=320 * MIB,
            headroom_bytes=None,
        ),
    )


def _critical_path(pipeline_s: float, microbatches: int, exit_depths: Sequence[int]) -> CriticalPath:
    """A made-up one whose times add up."""
    count = PathCount(least=microbatches, most=microbatches + 2)
    exits = [f"exit_{depth}" for depth in exit_depths]
    times = {"embedding": 0.002, "final_head": 0.05, "message": 0.0} | dict.fromkeys(exits, 0.01)
    rest_s = pipeline_s - sum(times.values()) - 0.001
    return CriticalPath(
        ops=tuple(
            CriticalOp(
                op=op, forward=count, backward=count, critical_s=rest_s if op == "layer" else times[op]
            )
            for op in ("embedding", "layer", *exits, "final_head", "message")
        ),
        other_s=0.001,
    )


def _with_idle(stage: StagePlan, time: StageTime) -> StagePlan:
    idle = IdleTime(
        warm_up_s=time.warm_up_ns / 1e9, steady_s=time.steady_ns / 1e9, cool_down_s=time.cool_down_ns / 1e9
    )
    return stage.model_copy(update={"busy_s": time.busy_ns / 1e9, "idle": idle})


def _pipeline(microbatches: int, times: Sequence[tuple[float, float]]) -> Timeline:
    durations = [
        {
            (kind, m): round(t * 1e9)
            for kind, t in zip(("forward", "backward"), pair, strict=True)
            for m in range(microbatches)
        }
        for pair in times
    ]
    return naive_pipeline(microbatches, durations)


def write_fake_run(
    folder: Path,
    *,
    stages: int = 2,
    microbatches: int = 6,
    layers: int = 8,
    exit_depths: Sequence[int] = (4,),
    iterations: int = 12,
    recorded: int = 3,
    slowdown: float = 1.03,
    noise: float = 0.03,
    seed: int = 0,
    prompts: int = 2,
    evaluated: bool = True,
    decode_bench: bool = True,
) -> Plan:
    """Write plan, profile, metrics, timelines, measurements and samples to ``folder``.

    Args:
        iterations: trained; the last ``recorded`` of them leave a timeline.
        slowdown: measured op times over planned ones.
        noise: relative spread of single ops.
        evaluated: leave what the exits are worth, and the usage.
        decode_bench: leave measured decoding speeds.
    """
    rng = random.Random(seed)
    profile = with_decode_costs(make_profile(make_run()))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "profile.yaml").write_text(dump_yaml(profile))
    plan = fake_plan(
        profile, stages=stages, microbatches=microbatches, layers=layers, exit_depths=exit_depths
    )
    plan = write_plan(folder / "plan.yaml", plan)
    measured = [_measured_timeline(plan, rng, slowdown, noise) for _ in range(iterations)]
    times = [timeline.end_ns / 1e9 + OVERHEAD_S * slowdown for timeline in measured]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in _metrics(plan, rng, times)))
    kept = [(i + 1, timeline) for i, timeline in enumerate(measured)][-recorded:]
    _write_json(
        folder / "timelines.json",
        {"iterations": [{"iteration": i, "timeline": timeline.to_json()} for i, timeline in kept]},
    )
    pipeline_s = statistics.median(timeline.pipeline_ns / 1e9 for timeline in measured)
    _write_json(
        folder / "measured.json",
        {
            "iteration_time_s": statistics.median(times),
            "iterations_timed": len(times),
            "pipeline_s": pipeline_s,
            "grad_sync_s": SYNC_S * 0.9,
            "optimizer_s": OPTIMIZER_S * 1.1,
            "overhead_s": OVERHEAD_S * slowdown,
            "iteration_times_s": times,
            "peak_bytes": [round(s.memory.peak_bytes * (1.04 - 0.03 * i)) for i, s in enumerate(plan.stages)],
            "process_peak_bytes": [s.memory.peak_bytes + 330 * MIB for s in plan.stages],
            "wall_s": sum(times) + 5,
            "device": {"kind": "cpu", "name": "Fake CPU @ 2 GHz", "cores": 2, "memory_bytes": 8 * 2**30},
            "threads": 1,
            "software": {"python": "3.11.2", "torch": "2.13.0", "megatron-core": "0.16.1"},
            "exits": {
                f"exit_{e.depth}": {"stage": e.stage, "forward_s": EXIT_S * 0.4, "backward_s": EXIT_S * 0.7}
                for e in plan.exits
            },
        },
    )
    if evaluated:
        _write_evaluation(folder, plan, rng)
    if decode_bench:
        _write_json(folder / "decode_bench.json", {"runs": _bench_runs()})
    if prompts:
        _write_json(folder / "samples.json", [_sample(plan, rng) for _ in range(prompts)])
    return plan


def _measured_timeline(plan: Plan, rng: random.Random, slowdown: float, noise: float) -> Timeline:
    def spread(seconds: float) -> int:
        return round(
            seconds * 1e9 * slowdown * (1 + noise * (rng.random() - 0.3) + 0.15 * (rng.random() > 0.97))
        )

    durations = [
        {("forward", m): spread(s.forward_s) for m in range(plan.num_microbatches)}
        | {("backward", m): spread(s.backward_s) for m in range(plan.num_microbatches)}
        for s in plan.stages
    ]
    pipeline = naive_pipeline(plan.num_microbatches, durations)
    start = pipeline.pipeline_ns
    middle, end = start + round(SYNC_S * 0.9e9), start + round((SYNC_S * 0.9 + OPTIMIZER_S * 1.1) * 1e9)
    tails = [
        (Span(i, "grad_sync", -1, start, middle), Span(i, "optimizer", -1, middle, end))
        for i in range(len(plan.stages))
    ]
    return Timeline(spans=tuple((*stage, *tail) for stage, tail in zip(pipeline.spans, tails, strict=True)))


def _metrics(plan: Plan, rng: random.Random, times: Sequence[float]) -> list[dict[str, Any]]:
    names = [f"exit_{e.depth}" for e in plan.exits] + ["final"]
    tokens = plan.run.training.global_batch_size * plan.run.training.seq_length

    def losses(done: int, spread: float) -> dict[str, float]:
        share = done / len(times)
        return {
            name: 6.4
            - (3.6 + 0.5 * i / len(names)) * (1 - 2.7 ** (-4 * share))
            + spread * (rng.random() - 0.5)
            for i, name in enumerate(names)
        }

    lines: list[dict[str, Any]] = [
        {"kind": "reference", "unigram_entropy_nats": 4.6},
        {"kind": "validation", "iteration": 0, "losses": losses(0, 0.05)},
    ]
    for index, seconds in enumerate(times):
        lines.append(
            {
                "kind": "train",
                "iteration": index + 1,
                "consumed_samples": (index + 1) * plan.run.training.global_batch_size,
                "lr": 1e-3,
                "grad_norm": 1.0,
                "losses": losses(index + 1, 0.25),
                "iteration_time_s": seconds,
                "tokens_per_s": tokens / seconds,
            }
        )
    lines.append({"kind": "validation", "iteration": len(times), "losses": losses(len(times), 0.05)})
    return lines


def _write_evaluation(folder: Path, plan: Plan, rng: random.Random) -> None:
    """Outcomes of made-up tokens, judged by the code that judges real ones."""
    num_tokens, names = 2000, loss_names(plan)
    tokens = np.random.default_rng(rng.randrange(1000))
    label = tokens.integers(0, 50, num_tokens)
    probability = np.clip(tokens.beta(2, 1.5, (len(names), num_tokens)), 0.02, 1.0)
    right = tokens.random((len(names), num_tokens)) < 0.9 * probability
    outcomes = Outcomes(
        cross_entropy_EN=-np.log(probability),
        predicted_EN=np.where(right, label, label + 1),
        probability_EN=probability,
        confidence_EN=probability,
        label_N=label,
    )
    depths = sorted(e.depth for e in plan.exits)
    everywhere = (*depths, plan.run.model.num_layers)
    document = {
        "iteration": 60,
        "source": "iteration 60 of run 'fake' on the validation part of text",
        "num_tokens": num_tokens,
        "losses": dict.fromkeys(names, 2.0),
        "exits": {name: exit_quality(outcomes, index) for index, name in enumerate(names)},
        "thresholds": [threshold_quality(outcomes, threshold, everywhere) for threshold in THRESHOLDS],
    }
    _write_json(folder / "evaluation.json", document)
    if depths:
        usage = measured_usage(outcomes, depths, plan.run.model.num_layers, "made up")
        write_yaml(folder / "usage.yaml", ExitUsage(schema_version=1, measured=usage), "made up")


def _bench_runs() -> list[dict[str, Any]]:
    speeds = {"full": (1.0, 50.0, 48.0), "catch_up": (0.6, 70.0, 74.0), "pipeline": (0.6, 60.0, None)}
    return [
        {
            "mode": mode,
            "batch": batch,
            "threshold": threshold,
            "tokens_per_s": batch * measured,
            "predicted_tokens_per_s": predicted if batch == 1 else None,
            "agreement_with_full": 0.9,
        }
        for mode, (threshold, measured, predicted) in speeds.items()
        for batch in (1, 8)
    ]


def _sample(plan: Plan, rng: random.Random) -> dict[str, Any]:
    names = [f"exit_{e.depth}" for e in plan.exits] + ["final"]
    tokens = [
        {"text": " " + rng.choice(WORDS), "id": i, "exit": rng.choice(names), "confidence": rng.random()}
        for i in range(40)
    ]
    return {"prompt": "def main():", "threshold": 0.6, "tokens": tokens, "tokens_per_s": 84.2}


def _write_json(path: Path, document: Any) -> None:
    path.write_text(json.dumps(document))
