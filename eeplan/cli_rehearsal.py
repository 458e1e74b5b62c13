"""The command ``eeplan rehearse``. Same conventions as ``cli``: parses, calls, prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from eeplan.cli_output import Json, PlanFile, print_result, work

app = typer.Typer(rich_markup_mode=None)


@app.command()
def rehearse(
    plan: PlanFile,
    iterations: Annotated[int, typer.Option("--iterations", min=1, help="Iterations to measure.")] = 5,
    time_scale: Annotated[
        float,
        typer.Option("--time-scale", help="Stretch every sleep; helps where ops take under some ms."),
    ] = 1.0,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Write a Perfetto trace of both timelines."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a plan with sleeps in place of compute, on real processes, and compare with what is predicted."""
    from eeplan.files import require_writable_file, write_text
    from eeplan.plan import load_plan
    from eeplan.rehearsal_view import rehearsal_tables
    from eeplan.runtime.preflight import require_runtime
    from eeplan.sim.trace import perfetto

    with work() as progress:
        loaded = load_plan(plan)
        if trace:
            require_writable_file(trace, "trace")
        require_runtime()
        from eeplan.runtime.rehearse import rehearse as run_rehearsal

        with progress.step("rehearse", announce=True):
            done = run_rehearsal(loaded, iterations=iterations, time_scale=time_scale)
        if trace:
            write_text(trace, json.dumps(perfetto({"predicted": done.predicted, "measured": done.measured})))
        result = done.to_json() | ({"trace": str(trace)} if trace else {})
    print_result(as_json, result, lambda: rehearsal_tables(result))
