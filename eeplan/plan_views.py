"""A plan, and one simulated iteration of it, as tables for people; see ``views``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eeplan import decode_views
from eeplan.report import words
from eeplan.report.insights import headroom_sentences, parts_of_path, path_sentences
from eeplan.views import Table, plain_text, table_of

if TYPE_CHECKING:
    from eeplan.plan import Plan
    from eeplan.timeline import Timeline


def plan_tables(plan: Plan) -> tuple[Table, ...]:
    """What a plan predicts, where everything is, what its time hangs on, and why."""
    return (
        _overview(plan),
        *((_exits(plan),) if plan.exits else ()),
        _times(plan),
        _memory(plan),
        _path(plan),
        *(table_of(cells) for cells in decode_views.prediction_cells(plan.decode)),
        Table(
            "decisions",
            tuple((d.subject, d.choice, d.reason, d.rejected) for d in plan.decisions),
            ("what", "choice", "why", "best rejected"),
            sentences=True,
        ),
    )


def _overview(plan: Plan) -> Table:
    run, prediction = plan.run, plan.prediction
    exits = words.plural(len(plan.exits), "exit") if plan.exits else "no early exit"
    title = (
        f"plan '{run.name}': {run.model.num_layers} layers on {words.plural(len(plan.stages), 'stage')} with "
        f"{exits}; {plan.num_microbatches} microbatches of {run.training.micro_batch_size} x "
        f"{run.training.seq_length} tokens per iteration"
    )
    peaks = [stage.memory.peak_bytes + stage.memory.process_base_bytes for stage in plan.stages]
    limit = run.limits.device_memory_bytes
    rows = [
        ("iteration", _seconds(prediction.iteration_time_s), _parts(plan)),
        (
            "exits cost",
            _text(words.signed_percent(prediction.time_overhead)),
            f"{_seconds(prediction.baseline_iteration_time_s)} without exits",
        ),
        ("throughput", f"{prediction.tokens_per_s:,.0f} tokens/s", ""),
        ("idle", _text(words.percent(prediction.bubble_fraction)), _idle_note(plan)),
        (
            "largest process",
            _size(max(peaks)),
            f"of stage {peaks.index(max(peaks))}, "
            + ("no limit given" if limit is None else f"the limit is {_size(limit)}"),
        ),
        _certificate(plan),
    ]
    return Table(title, (*rows, *_unmeasured(plan)))


def _idle_note(plan: Plan) -> str:
    if plan.fill is None:
        fits = words.plural(
            plan.prediction.bubble_fill_capacity, "partial microbatch", "partial microbatches"
        )
        return f"of the stages' time in the pipeline; {fits} would fit each bubble (`fill.policy`)"
    partial = len(plan.fill.warm_up_depths) + len(plan.fill.truncated_reaches)
    filled = words.plural(partial, "partial microbatch", "partial microbatches")
    return f"of the stages' time in the pipeline, with {filled} in the bubbles"


def _certificate(plan: Plan) -> tuple[str, str, str]:
    certificate = plan.certificate
    settled = "proved optimal" if certificate.optimal else f"within {100 * certificate.gap:.2g} %"
    ties = "" if certificate.ties_settled else "; a better one of equally fast ones is possible"
    counts = f"{certificate.evaluated:,} judged, {certificate.pruned:,} groups ruled out"
    return "placement", settled, f"{counts} of {_large(certificate.space_size)} candidates{ties}"


def _unmeasured(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    """Costs that nobody measured, each with what it was guessed from."""
    rows = []
    if plan.interpolated_ops:
        rows.append(("interpolated", ", ".join(plan.interpolated_ops), "between measured microbatch sizes"))
    if plan.extrapolated_ops:
        rows.append(("not measured", ", ".join(plan.extrapolated_ops), "as used here: costs derived"))
    if plan.decode and plan.decode.estimated:
        rows.append(("not measured", "for decoding", "; ".join(plan.decode.estimated)))
    return tuple(rows)


def _exits(plan: Plan) -> Table:
    rows = tuple(
        (
            f"exit_{e.depth}",
            f"{e.boundary} layer {e.layer}",
            str(e.stage),
            e.head,
            "tied" if e.tied else "untied",
            f"{e.effective_weight:.3g}",
            "" if e.effective_weight == e.target_weight else f"wanted {e.target_weight:.3g}",
        )
        for e in plan.exits
    )
    columns = ("exit", "reads", "stage", "head", "matrix", "loss weight", "")
    return Table(f"exits, forwards {plan.exit_forward}", rows, columns)


def _times(plan: Plan) -> Table:
    pipeline_s = plan.prediction.pipeline_s or 1.0
    rows = tuple(
        (
            str(index),
            f"{s.first_layer}-{s.last_layer}",
            ", ".join(map(str, s.exit_depths)) or "-",
            _seconds(s.forward_s),
            _seconds(s.backward_s),
            _share(s.busy_s / pipeline_s),
            _share(s.idle.warm_up_s / pipeline_s),
            _share(s.idle.steady_s / pipeline_s),
            _share(s.idle.cool_down_s / pipeline_s),
            _room(s.time_headroom.free_s, s.time_headroom.free_side),
            _room(s.time_headroom.hidden_s, s.time_headroom.hidden_side),
        )
        for index, s in enumerate(plan.stages)
    )
    columns = (
        *("stage", "layers", "exits", "forward", "backward", "busy"),
        *("idle: warm-up", "steady", "cool-down", "room: free", "hidden"),
    )
    return Table("time of each stage", rows, columns, notes=headroom_sentences(plan))


def _room(extra_s: float, side: str) -> str:
    if not extra_s:
        return "-"
    return f"{_seconds(extra_s)}{'' if side == 'either' else ' ' + side[0].upper()}"


def _memory(plan: Plan) -> Table:
    rows = tuple(
        (
            str(index),
            _size(s.memory.state_bytes),
            f"{s.memory.in_flight} x {_size(s.memory.activation_bytes_per_microbatch)}",
            _size(s.memory.transient_bytes),
            _size(s.memory.peak_bytes),
            s.memory.peak_during,
            _size(s.memory.process_base_bytes),
            _size(s.spare_bytes),
        )
        for index, s in enumerate(plan.stages)
    )
    spare = "below largest" if plan.run.limits.device_memory_bytes is None else "below limit"
    columns = ("stage", "state", "in flight", "transient", "peak", "during", "process", spare)
    return Table("memory of each stage", rows, columns)


def _path(plan: Plan) -> Table:
    rows = tuple(
        (
            part.name,
            _text(words.percent(part.share)),
            _seconds(part.critical_s),
            "" if part.forward is None else words.times(part.forward),
            "" if part.backward is None else words.times(part.backward),
        )
        for part in parts_of_path(plan)
    )
    columns = ("", "share", "on the path", "forward counts", "backward counts")
    return Table("what the time hangs on: the critical path", rows, columns, notes=path_sentences(plan))


def _parts(plan: Plan) -> str:
    p = plan.prediction
    parts = (
        ("pipeline", p.pipeline_s),
        ("gradient sync", p.grad_sync_s),
        ("optimizer", p.optimizer_s),
        ("other", p.overhead_s),
    )
    return " + ".join(f"{name} {_seconds(value)}" for name, value in parts)


def simulation_result(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """What `eeplan simulate` reports of one simulated iteration."""
    from eeplan.sim.fill import schedule_of
    from eeplan.sim.idle import stage_times

    pipeline_ns = timeline.pipeline_ns
    times = stage_times(timeline, schedule_of(plan).kinds)
    idle_ns = sum(time.idle_ns for time in times)
    return {
        "pipeline_s": pipeline_ns / 1e9,
        "predicted_pipeline_s": plan.prediction.pipeline_s,
        "upper_bound_s": plan.prediction.upper_bound_s,
        "bubble_fraction": idle_ns / max(1, pipeline_ns * timeline.num_stages),
        "messages": len(timeline.messages),
        "stages": [
            {
                "busy_s": time.busy_ns / 1e9,
                "idle": {
                    "warm_up_s": time.warm_up_ns / 1e9,
                    "steady_s": time.steady_ns / 1e9,
                    "cool_down_s": time.cool_down_ns / 1e9,
                },
                "time_headroom": stage.time_headroom.model_dump(mode="json"),
                "critical": stage.critical.model_dump(mode="json"),
                "peak_bytes": timeline.peak_bytes(index),
                "spare_bytes": stage.spare_bytes,
            }
            for index, (stage, time) in enumerate(zip(plan.stages, times, strict=True))
        ],
        "critical_path": plan.critical_path.model_dump(mode="json"),
        "headroom": list(headroom_sentences(plan)),
        "interpolated_ops": list(plan.interpolated_ops),
        "extrapolated_ops": list(plan.extrapolated_ops),
    }


def simulation_tables(plan: Plan, result: Mapping[str, Any]) -> tuple[Table, ...]:
    """Tables of a :func:`simulation_result`."""
    pipeline_s = result["pipeline_s"] or 1.0
    rows = [
        ("pipeline", _seconds(result["pipeline_s"])),
        ("idle", _text(words.percent(result["bubble_fraction"]))),
        ("messages", f"{result['messages']:,}"),
    ]
    rows += [row[:2] for row in _unmeasured(plan)]
    stages = tuple(
        (
            str(index),
            _seconds(stage["busy_s"]),
            *(
                _share(seconds / pipeline_s)
                for seconds in (
                    stage["busy_s"],
                    *(stage["idle"][name] for name in ("warm_up_s", "steady_s", "cool_down_s")),
                )
            ),
            _room(stage["time_headroom"]["free_s"], stage["time_headroom"]["free_side"]),
            _room(stage["time_headroom"]["hidden_s"], stage["time_headroom"]["hidden_side"]),
            _size(stage["peak_bytes"]),
            _size(stage["spare_bytes"]),
        )
        for index, stage in enumerate(result["stages"])
    )
    columns = (
        *("stage", "busy", "share", "idle: warm-up", "steady", "cool-down"),
        *("room: free", "hidden", "peak", "spare"),
    )
    return (
        Table("one simulated iteration", tuple(rows)),
        Table("stages", stages, columns, notes=tuple(result["headroom"])),
        _path(plan),
    )


def _large(number: int) -> str:
    return f"{number:,}" if number < 10**9 else f"{float(number):.1e}"


def _seconds(value: float) -> str:
    return _text(words.seconds(value))


def _size(value: float) -> str:
    return _text(words.size(value))


def _share(value: float) -> str:
    return _text(words.percent(value))


def _text(phrase: str) -> str:
    return plain_text(phrase)
