"""Makes the report folder: reads a run directory, draws, writes everything or nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eeplan.errors import FileError
from eeplan.plan import load_plan
from eeplan.report import compare, page, replan, sections, tables
from eeplan.report.rundir import RunData, read_run
from eeplan.timeline import Timeline


def write_report(run_dir: Path, out_dir: Path, other_plan: Path | None = None) -> dict[str, Any]:
    """Write ``index.html``, its PNG files, ``summary.json``, ``trace.json`` and CSV tables to ``out_dir``.

    Files of an earlier report are replaced only after all new ones have been made; other files in ``out_dir``
    are left alone.

    Args:
        other_plan: a plan to compare the run's with; None compares with what the planner would decide from
            the usage that the run measured.

    Returns:
        The summary, as in ``summary.json`` (see :func:`eeplan.report.compare.summary`).

    Raises:
        FileError, SchemaError, PlanError: the run directory is incomplete or inconsistent, or ``out_dir``
            cannot be written.
    """
    if out_dir.exists() and not out_dir.is_dir():
        raise FileError(f"cannot write the report to {out_dir}: it is a file; give a folder")
    run = read_run(run_dir)
    comparison = replan.compared(run, load_plan(other_plan) if other_plan else None)
    summary = compare.summary(run) | {"replanned": replan.to_json(comparison)}
    _replace_files(out_dir, contents(run, summary, out_dir, comparison))
    return summary


def contents(
    run: RunData,
    summary: Mapping[str, Any],
    out_dir: Path,
    comparison: replan.Comparison | replan.NoPlan | None = None,
) -> dict[str, bytes]:
    """Every file of the report by name; the page comes last."""
    from eeplan.report.drawings import draw, planned_path
    from eeplan.sim.trace import perfetto

    predicted = compare.predicted_timeline(run.plan)
    shown, measured, duration_s = run.median_iteration
    timelines: dict[str, Timeline] = {"predicted": predicted, "measured": measured}
    op_rows = compare.op_times(run, predicted)
    quantities = (
        *compare.time_quantities(run),
        *compare.memory_quantities(run),
        *compare.idle_quantities(run),
        *compare.exit_quantities(run),
        *compare.decode_quantities(run),
    )
    drawings = draw(run, predicted, measured, duration_s, sections.caption(run))
    files = {f"{name}.png": drawing.png for name, drawing in drawings.items()}
    files |= {
        "summary.json": _json(summary),
        "trace.json": _json(perfetto(timelines, {"predicted": planned_path(run)})),
        "comparison.csv": tables.comparison(quantities).to_csv(index=False).encode(),
        "ops.csv": tables.ops(op_rows).to_csv(index=False).encode(),
        "timeline.csv": tables.timeline_rows(list(timelines.items())).to_csv(index=False).encode(),
    }
    svg = {name: drawing.svg for name, drawing in drawings.items()}
    files["index.html"] = page.render(run, svg, op_rows, shown, out_dir, comparison).encode()
    return files


def _json(document: Any) -> bytes:
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode()


def _replace_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write all files beside ``folder``'s old ones, then rename each into place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder, prefix=".report-"))
        try:
            for name, data in files.items():
                # Not write_bytes of eeplan.files: nobody looks into the staging folder before the renames.
                (staging / name).write_bytes(data)
            for name in files:
                os.replace(staging / name, folder / name)
        finally:
            shutil.rmtree(staging)
    except OSError as error:
        raise FileError(f"cannot write the report to {folder}: {error.strerror}; check the folder") from None
