"""A Pareto front as JSON, CSV and a table for people."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eeplan.sim.pareto import Front
    from eeplan.views import Table

COLUMNS = (
    "point",
    "iteration_time_s",
    "peak_bytes",
    "decode_s_per_token",
    "num_exits",
    "exits",
    "head",
    "exit_forward",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "micro_batch_size",
    "layers_per_stage",
)


def front_result(front: Front) -> dict[str, Any]:
    """The machine-readable result: points by iteration time, numbered from 1, and what is proved."""
    points = []
    for number, one in enumerate(front.points, start=1):
        keys = dict(one.keys)
        points.append(
            {
                "point": number,
                "iteration_time_s": one.iteration_ns / 1e9,
                "peak_bytes": one.peak_bytes,
                "decode_s_per_token": None if one.decode_ns is None else one.decode_ns / 1e9,
                "num_exits": len(one.exits),
                "exits": [f"{slot.boundary} layer {slot.layer}" for slot in one.exits],
                "head": keys["exits.head"] if one.exits else None,
                "exit_forward": keys["exits.exit_forward"] if one.exits else None,
                "pipeline_model_parallel_size": keys["parallel.pipeline_model_parallel_size"],
                "data_parallel_size": keys["parallel.data_parallel_size"],
                "micro_batch_size": keys["training.micro_batch_size"],
                "layers_per_stage": keys["parallel.layer_split"],
                "keys": keys,
            }
        )
    return {
        "points": points,
        "certificate": front.certificate.model_dump(mode="json"),
        "assumptions": list(front.assumptions),
    }


def csv_text(result: dict[str, Any]) -> str:
    """One line per point; the last column holds the run file's keys as JSON."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*COLUMNS, "keys"])
    for point in result["points"]:
        cells = [point[name] for name in COLUMNS]
        plain = [" | ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in cells]
        writer.writerow([*plain, json.dumps(point["keys"])])
    return stream.getvalue()


def front_tables(result: dict[str, Any]) -> tuple[Table, ...]:
    """The front, and what it supposes."""
    from eeplan.sim.explain import format_bytes, format_ns, format_percent
    from eeplan.views import Table

    points, certificate = result["points"], result["certificate"]
    fastest = points[0]["iteration_time_s"]

    def decode(seconds: float | None) -> str:
        return "-" if seconds is None else format_ns(round(seconds * 1e9))

    rows = tuple(
        (
            str(one["point"]),
            format_ns(round(one["iteration_time_s"] * 1e9)),
            format_percent(one["iteration_time_s"] / fastest - 1.0),
            format_bytes(one["peak_bytes"]),
            decode(one["decode_s_per_token"]),
            ", ".join(one["exits"]) or "none",
            "-" if one["head"] is None else f"{one['head']}, {one['exit_forward']}",
            f"{one['pipeline_model_parallel_size']} x {one['data_parallel_size']}",
            str(one["micro_batch_size"]),
            " ".join(map(str, one["layers_per_stage"])),
        )
        for one in points
    )
    proved = "all there are" if certificate["optimal"] else "perhaps not all"
    title = (
        f"Pareto front: {len(points)} points, {proved}, of {certificate['space_size']} choices "
        f"({certificate['evaluated']} judged)"
    )
    columns = (
        *("point", "iteration", "slower", "largest peak", "per token", "exits", "head", "stages x data"),
        *("microbatch", "layers per stage"),
    )
    notes = [Table("supposed", tuple((text,) for text in result["assumptions"]))]
    written = [(name, result[name]) for name in ("table", "plan") if name in result]
    return (
        Table(title, rows, columns),
        *(notes if result["assumptions"] else []),
        *([Table("written", tuple(written))] if written else []),
    )
