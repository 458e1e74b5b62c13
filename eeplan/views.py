"""Results for people: the same tables drawn with rich on a terminal, and as plain stable lines elsewhere.

Only turns finished results into text; what is machine-readable is the command's own JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from eeplan import decode_views
from eeplan.report import words

if TYPE_CHECKING:
    from pathlib import Path

    from eeplan.plan import Plan
    from eeplan.profile import OpProfile
    from eeplan.timeline import Timeline

_ASCII = str.maketrans({words.THIN: " ", words.MINUS: "-", words.MISSING: "-"})
_STATUS_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table; without ``columns`` it is a list of names and values."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    columns: tuple[str, ...] = ()
    sentences: bool = False
    """Cells from the third on are sentences: plain text gives each its own line."""


def show(tables: Iterable[Table], stream: TextIO) -> None:
    """Print tables to ``stream`` in the form that suits it."""
    if stream.isatty():
        _show_rich(tables, stream)
        return
    for index, table in enumerate(tables):
        print("\n" * bool(index) + plain(table), file=stream)


def plain(table: Table) -> str:
    """The table as lines with aligned columns, one row a line; sentences stand below their row."""
    if table.sentences:
        return "\n".join([table.title, *(line for row in table.rows for line in _with_sentences(table, row))])
    rows = [table.columns, *table.rows] if table.columns else list(table.rows)
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(max(map(len, rows), default=0))]
    lines = ["  " + "  ".join(f"{cell:<{widths[i]}}" for i, cell in enumerate(row)).rstrip() for row in rows]
    return "\n".join([table.title, *lines])


def _with_sentences(table: Table, row: tuple[str, ...]) -> list[str]:
    named = zip(table.columns[2:], row[2:], strict=True)
    return [f"  {row[0]}: {row[1]}", *(f"    {name}: {text}" for name, text in named if text)]


def plan_tables(plan: Plan) -> tuple[Table, ...]:
    """Exits, stages, prediction and decisions of a plan."""
    run, prediction = plan.run, plan.prediction
    title = (
        f"plan '{run.name}': {run.model.num_layers} layers on {words.plural(len(plan.stages), 'stage')}, "
        f"{plan.num_microbatches} x {run.training.micro_batch_size} samples of "
        f"{run.training.seq_length} tokens per iteration"
    )
    exits = tuple(
        (
            f"exit_{e.depth}",
            f"{e.boundary} layer {e.layer}",
            str(e.stage),
            e.head,
            "tied" if e.tied else "untied",
            f"{e.effective_weight:.3g}",
        )
        for e in plan.exits
    )
    decisions = tuple((d.subject, d.choice, d.reason, d.rejected) for d in plan.decisions)
    return (
        Table(
            title, exits or (("no early exit",),), ("exit", "reads", "stage", "head", "matrix", "loss weight")
        ),
        Table("stages, per microbatch and at the peak", _stage_rows(plan), _STAGE_COLUMNS),
        Table(
            "prediction",
            (
                ("iteration", _text(words.seconds(prediction.iteration_time_s)), _parts(plan)),
                (
                    "without exits",
                    _text(words.seconds(prediction.baseline_iteration_time_s)),
                    f"exits cost {_text(words.signed_percent(prediction.time_overhead))}",
                ),
                ("throughput", f"{prediction.tokens_per_s:,.0f} tokens/s", ""),
                (
                    "idle in the pipeline",
                    _text(words.percent(prediction.bubble_fraction)),
                    f"room to fill {prediction.bubble_fill_capacity} partial microbatches per bubble",
                ),
                (
                    "pipeline bound",
                    _text(words.seconds(prediction.upper_bound_s)),
                    "never exceeded when messages are free",
                ),
            ),
        ),
        *(table_of(cells) for cells in decode_views.prediction_cells(plan.decode)),
        Table("decisions", decisions, ("what", "choice", "why", "best rejected"), sentences=True),
        *_notes(plan),
    )


_STAGE_COLUMNS = (
    "stage",
    "layers",
    "exits",
    "forward",
    "backward",
    "in flight",
    "state",
    "activations",
    "peak",
    "free",
)


def _stage_rows(plan: Plan) -> tuple[tuple[str, ...], ...]:
    return tuple(
        (
            str(index),
            f"{s.first_layer}-{s.last_layer}",
            ", ".join(map(str, s.exit_depths)) or "-",
            _text(words.seconds(s.forward_s)),
            _text(words.seconds(s.backward_s)),
            str(s.memory.in_flight),
            _text(words.size(s.memory.state_bytes)),
            _text(words.size(s.memory.activation_bytes)),
            _text(words.size(s.memory.peak_bytes)),
            "-" if s.memory.headroom_bytes is None else _text(words.size(s.memory.headroom_bytes)),
        )
        for index, s in enumerate(plan.stages)
    )


def _parts(plan: Plan) -> str:
    p = plan.prediction
    parts = (
        ("pipeline", p.pipeline_s),
        ("gradient sync", p.grad_sync_s),
        ("optimizer", p.optimizer_s),
        ("other", p.overhead_s),
    )
    return " + ".join(f"{name} {_text(words.seconds(value))}" for name, value in parts)


def _notes(plan: Plan) -> tuple[Table, ...]:
    certificate = plan.certificate
    settled = "proved optimal" if certificate.optimal else f"within {100 * certificate.gap:.2g} % of optimal"
    ties = "" if certificate.ties_settled else "; a better one of equally fast ones is possible"
    counts = f"{certificate.evaluated:,} judged, {certificate.pruned:,} groups ruled out"
    rows = [("placement", f"{settled}: {counts} of {_large(certificate.space_size)} candidates{ties}")]
    if plan.extrapolated_ops:
        rows.append(("not measured at this size", ", ".join(plan.extrapolated_ops)))
    if plan.decode and plan.decode.estimated:
        rows.append(("not measured for decoding", "; ".join(plan.decode.estimated)))
    return (Table("certificate", tuple(rows)),)


def _large(number: int) -> str:
    return f"{number:,}" if number < 10**9 else f"{float(number):.1e}"


def profile_tables(profile: OpProfile) -> tuple[Table, ...]:
    """Where a profile was measured, and what each op costs."""
    rows = tuple(
        (
            c.op + (" (extrapolated)" if c.extrapolated else ""),
            str(c.micro_batch_size),
            str(c.forward.n),
            _text(words.seconds(c.forward.mean_s)),
            _text(words.seconds(c.backward.mean_s)),
            _text(words.size(c.kept_bytes)),
        )
        for c in profile.ops
    )
    device = profile.device
    p2p = profile.p2p
    return (
        Table(
            f"profile of {device.name} ({words.plural(device.cores, 'core')}): {profile.processes} ranks, "
            f"{words.plural(profile.threads, 'thread')} each, {profile.shape.precision}",
            rows,
            ("op", "micro batch", "n", "forward, mean", "backward, mean", "kept"),
        ),
        Table(
            "messages, optimizer, machine",
            (
                (
                    "point to point",
                    _text(words.seconds(p2p.latency_s)),
                    f"{_text(words.size(p2p.bandwidth_bytes_per_s))}/s",
                ),
                ("samples disturbed by other work", words.percent(profile.disturbed_share, 0)),
                (
                    "optimizer",
                    _text(words.seconds(profile.optimizer.per_parameter_s * 1e6)),
                    "per million parameters",
                ),
            ),
        ),
        *(table_of(decode_views.costs_cells(costs)) for costs in profile.decode),
    )


def simulation_result(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """What `eeplan simulate` reports of one simulated iteration."""
    pipeline_ns = timeline.pipeline_ns
    stages = range(timeline.num_stages)
    return {
        "pipeline_s": pipeline_ns / 1e9,
        "predicted_pipeline_s": plan.prediction.pipeline_s,
        "upper_bound_s": plan.prediction.upper_bound_s,
        "bubble_fraction": 1 - sum(map(timeline.busy_ns, stages)) / max(1, pipeline_ns * timeline.num_stages),
        "messages": len(timeline.messages),
        "stages": [
            {"busy_s": timeline.busy_ns(s) / 1e9, "peak_bytes": timeline.peak_bytes(s)} for s in stages
        ],
    }


def simulation_tables(result: Mapping[str, Any]) -> tuple[Table, ...]:
    """Tables of a :func:`simulation_result`."""
    pipeline_s = result["pipeline_s"]
    return (
        Table(
            "one simulated iteration",
            (
                ("pipeline", _text(words.seconds(pipeline_s))),
                ("idle", _text(words.percent(result["bubble_fraction"]))),
                ("messages", str(result["messages"])),
            ),
        ),
        Table(
            "stages",
            tuple(
                (
                    str(index),
                    _text(words.seconds(stage["busy_s"])),
                    _text(words.percent(stage["busy_s"] / pipeline_s if pipeline_s else 0.0)),
                    _text(words.size(stage["peak_bytes"])),
                )
                for index, stage in enumerate(result["stages"])
            ),
            ("stage", "busy", "share", "peak"),
        ),
    )


def summary_tables(summary: Mapping[str, Any], page: Path) -> tuple[Table, ...]:
    """A report's summary: predicted beside measured, losses, and where the page is."""
    predicted, measured, error = summary["predicted"], summary["measured"], summary["error"]
    rows = [
        (
            "iteration",
            _text(words.seconds(predicted["iteration_time_s"])),
            _text(words.seconds(measured["iteration_time_s"])),
            _text(words.signed_percent(error["iteration_time"])),
        )
    ]
    peaks = zip(predicted["peak_bytes"], measured["peak_bytes"], error["peak_bytes"], strict=True)
    rows += [
        (
            f"peak of stage {index}",
            _text(words.size(expected)),
            _text(words.size(found)),
            _text(words.signed_percent(off)),
        )
        for index, (expected, found, off) in enumerate(peaks)
    ]
    losses = tuple((name, f"{first:.3f}", f"{last:.3f}") for name, (first, last) in summary["losses"].items())
    return (
        Table("one iteration", tuple(rows), ("", "predicted", "measured", "error")),
        Table("loss, nats per token", losses, ("exit", "first", "last")),
        Table("report", ((str(page),),)),
    )


def doctor_table(checks: Sequence[Mapping[str, str]]) -> Table:
    """Findings of `eeplan doctor`."""
    rows = tuple((c["status"], c["name"], c["detail"], c["remedy"]) for c in checks)
    return Table("doctor", rows, ("", "check", "found", "what to do"))


def bench_table(result: Mapping[str, Any]) -> Table:
    """Evaluations per second of each way to get a makespan."""
    rows = tuple(
        (
            case["evaluator"],
            str(case["p"]),
            str(case["m"]),
            _text(words.number(case["configs_per_s"])),
            _text(words.seconds(1 / case["configs_per_s"])),
        )
        for case in result["cases"]
    )
    return Table("simulator", rows, ("evaluator", "P", "M", "evaluations/s", "each"))


def record_table(title: str, record: Mapping[str, Any]) -> Table:
    """The scalar entries of a result, one a line; nested ones by dotted names."""
    return Table(title, tuple((name, _value(value)) for name, value in _flat(record)))


def plain_text(phrase: str) -> str:
    """Plain spaces and hyphens, which a script can search for."""
    return _text(phrase)


def _show_rich(tables: Iterable[Table], stream: TextIO) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=stream)
    for table in tables:
        drawn = RichTable(
            box=box.SIMPLE_HEAD,
            show_header=bool(table.columns),
            pad_edge=False,
        )
        for index in range(max([len(table.columns), *map(len, table.rows)])):
            name = table.columns[index] if table.columns else ""
            drawn.add_column(name, style="cyan" if index == 0 else None, overflow="fold")
        for row in table.rows:
            drawn.add_row(*(Text(cell, style=_STATUS_STYLE.get(cell, "")) for cell in row))
        console.print(Text(table.title, style="bold"), drawn, sep="\n")


def _flat(record: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_value, value))
    return str(value)


def table_of(cells: decode_views.Cells) -> Table:
    """The table of these cells."""
    return Table(cells.title, tuple(tuple(map(_text, row)) for row in cells.rows), cells.columns)


def _text(phrase: str) -> str:
    """Plain spaces and hyphens, which a script can search for."""
    return phrase.translate(_ASCII)
