"""The report's tables as pandas frames: numbers for CSV files, words for the page."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from eeplan.plan import Plan
from eeplan.report import words
from eeplan.report.compare import OpTime, Quantity, last_loss, loss_ends
from eeplan.report.palette import KIND_NAMES
from eeplan.report.rundir import RunData
from eeplan.timeline import Timeline


def comparison(quantities: Sequence[Quantity]) -> pd.DataFrame:
    """One row per quantity, raw numbers; ``error`` is predicted / measured - 1."""
    return pd.DataFrame(
        {
            "quantity": [q.name for q in quantities],
            "unit": [q.unit for q in quantities],
            "predicted": [q.predicted for q in quantities],
            "measured": [q.measured for q in quantities],
            "error": [q.error for q in quantities],
            "n": [q.n for q in quantities],
        }
    )


def comparison_words(quantities: Sequence[Quantity]) -> pd.DataFrame:
    """:func:`comparison` for reading: a pair shares its unit, parts of the row above are indented."""
    return pd.DataFrame(
        [
            {
                "": ("\u2003" if q.name[0].islower() else "") + q.name,
                "predicted": words.quantity(q.predicted, q.unit, max(q.predicted, q.measured)),
                "measured": words.quantity(q.measured, q.unit, max(q.predicted, q.measured)),
                "error": words.signed_percent(q.error),
                "n": f"{q.n:,}",
            }
            for q in quantities
        ]
    )


def ops(rows: Sequence[OpTime]) -> pd.DataFrame:
    """Seconds of each kind of op per stage, raw numbers."""
    return pd.DataFrame(
        {
            "stage": [r.stage for r in rows],
            "kind": [r.kind for r in rows],
            "predicted_s": [r.predicted_s for r in rows],
            "measured_median_s": [r.median_s for r in rows],
            "measured_p10_s": [r.p10_s for r in rows],
            "measured_p90_s": [r.p90_s for r in rows],
            "error": [r.error for r in rows],
            "n": [r.n for r in rows],
        }
    )


def ops_words(rows: Sequence[OpTime]) -> pd.DataFrame:
    """:func:`ops` for reading."""
    lines = []
    for row in rows:
        unit = words.time_unit(max(row.predicted_s, row.median_s))
        lines.append(
            {
                "": f"Stage {row.stage}, {KIND_NAMES[row.kind]}",
                "predicted": words.seconds(row.predicted_s, unit),
                "measured": words.seconds(row.median_s, unit),
                "p10 to p90": f"{words.number(row.p10_s / unit[1])} to {words.number(row.p90_s / unit[1])}",
                "error": words.signed_percent(row.error),
                "n": f"{row.n:,}",
            }
        )
    return pd.DataFrame(lines)


def timeline_rows(timelines: Sequence[tuple[str, Timeline]]) -> pd.DataFrame:
    """Every span of the named timelines in nanoseconds, for a CSV file."""
    return pd.DataFrame(
        [
            (source, span.stage, span.kind, span.microbatch, span.start_ns, span.end_ns)
            for source, timeline in timelines
            for stage in timeline.spans
            for span in stage
        ],
        columns=["source", "stage", "kind", "microbatch", "start_ns", "end_ns"],
    )


def memory_words(run: RunData) -> pd.DataFrame:
    """What the predicted peak of each stage consists of, and the step during which it is reached."""
    unit = words.size_unit(max(stage.memory.peak_bytes for stage in run.plan.stages))
    return pd.DataFrame(
        [
            {
                "": f"Stage {index}",
                "state": words.size(memory.state_bytes, unit),
                "activations": words.size(memory.activation_bytes, unit),
                "in flight": f"{memory.in_flight} × "
                + words.size(memory.activation_bytes_per_microbatch, unit),
                "transient": words.size(memory.transient_bytes, unit),
                "peak in": memory.peak_during,
            }
            for index, memory in enumerate(stage.memory for stage in run.plan.stages)
        ]
    )


def losses_words(run: RunData) -> pd.DataFrame:
    """First and last loss of every exit in nats, and the distance to the unigram entropy."""
    rows = []
    for name, (first, last) in loss_ends(run).items():
        row = {"": name, "first batch": f"{first:.3f}", "last batch": f"{last:.3f}"}
        if run.validation:
            row["validation"] = f"{run.validation[-1].losses[name]:.3f}"
        if run.unigram_entropy_nats is not None:
            difference = last_loss(run, name) - run.unigram_entropy_nats
            row["vs. unigram"] = f"{difference:+.3f}".replace("-", words.MINUS)
        rows.append(row)
    return pd.DataFrame(rows)


def exits_words(plan: Plan) -> pd.DataFrame:
    """Where each exit is, what it is made of, and what it weighs in the loss."""
    return pd.DataFrame(
        [
            {
                "": f"exit_{e.depth}",
                "reads": f"{e.boundary} layer {e.layer}",
                "stage": str(e.stage),
                "head": e.head,
                "output matrix": "tied" if e.tied else "own",
                "loss weight": f"{e.effective_weight:.3g}",
            }
            for e in sorted(plan.exits, key=lambda e: e.depth)
        ]
    )


def stages_words(plan: Plan) -> pd.DataFrame:
    """Predicted cost of one microbatch on each stage, and the part of it that exits take."""
    unit = words.time_unit(max(max(s.forward_s, s.backward_s) for s in plan.stages))
    return pd.DataFrame(
        [
            {
                "": f"Stage {index}",
                "layers": f"{stage.first_layer} to {stage.last_layer}",
                "exits": ", ".join(str(depth) for depth in stage.exit_depths) or "none",
                "forward": words.seconds(stage.forward_s, unit),
                "backward": words.seconds(stage.backward_s, unit),
                "of which exits": words.seconds(stage.exit_s, unit),
                "share": words.percent(stage.exit_s / max(stage.forward_s + stage.backward_s, 1e-12)),
            }
            for index, stage in enumerate(plan.stages)
        ]
    )


def decisions_words(plan: Plan) -> pd.DataFrame:
    """What the planner chose, why, and what came second."""
    return pd.DataFrame(
        [
            {
                "decision": d.subject,
                "choice": d.choice,
                "reason": d.reason,
                "best rejected": d.rejected or words.MISSING,
            }
            for d in plan.decisions
        ]
    )
