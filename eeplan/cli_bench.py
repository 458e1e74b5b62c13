"""The commands ``eeplan bench …``. Same conventions as ``cli``: parse, call, print."""

from __future__ import annotations

from typing import Annotated

import typer

from eeplan.cli_output import Json, print_result, work

app = typer.Typer(rich_markup_mode=None, help="Time eeplan's own parts.")


@app.command("sim")
def bench_simulator(as_json: Json = False) -> None:
    """Time the simulator and the closed forms."""
    from eeplan.bench import bench_sim
    from eeplan.views import bench_table

    with work():
        result = bench_sim()
    print_result(as_json, result, lambda: (bench_table(result),))


@app.command("train")
def bench_training(
    stages: Annotated[
        list[int] | None, typer.Option("--stages", min=1, help="Pipeline stages; may be repeated (1 and 2).")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measured iterations of each kind.")] = 25,
    as_json: Json = False,
) -> None:
    """Time the executor against megatron-core's schedule, and what two planned exits cost."""
    from eeplan.bench_train import STAGES, bench_train
    from eeplan.bench_views import train_bench_tables
    from eeplan.runtime.preflight import require_runtime

    with work() as progress:
        require_runtime()
        result = bench_train(stages=stages or STAGES, rounds=rounds, progress=progress.line)
    print_result(as_json, result, lambda: train_bench_tables(result))
