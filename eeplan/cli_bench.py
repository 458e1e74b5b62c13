"""The commands ``eeplan bench …``. Same conventions as ``cli``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
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
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measured iterations of each kind.")] = 24,
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


@app.command("decode")
def bench_decoding(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="Run directory, or a checkpoint folder in it.")
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", help="Dataset prefix or text for prompts; else held-out text of the run's own."
        ),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Op costs for predictions (profile.yaml beside the run).")
    ] = None,
    threshold: Annotated[
        list[float] | None,
        typer.Option(
            "--threshold", min=0.0, max=1.0, help="Besides the calibrated one; may be repeated (0.9 0.6 0.3)."
        ),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option("--batch", min=1, help="Sequences at once; may be repeated (1 and 8).")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Generations of every contender.")] = 8,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=2, help="Of each sequence.")] = 48,
    pipeline_size: Annotated[
        int, typer.Option("--pipeline-size", min=1, help="Processes of mode pipeline; 1 leaves it out.")
    ] = 2,
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="DIR", help="Folder to draw figures into.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time every decoding mode on a checkpoint, beside what was predicted and beside transformers."""
    from eeplan.bench_views import decode_bench_tables
    from eeplan.runtime.preflight import require_runtime

    with work() as progress:
        require_runtime()
        from eeplan.runtime.benches.decode_bench import Asked, bench_decode

        default = Asked()
        asked = Asked(
            batches=tuple(batch or default.batches),
            thresholds=tuple(threshold or default.thresholds),
            rounds=rounds,
            new_tokens=max_new_tokens,
            pipeline_size=pipeline_size,
        )
        result = bench_decode(checkpoint, asked, data=data, profile=profile, progress=progress)
        if figures is not None:
            from eeplan.report.figures.decode_bench import write_figures

            write_figures(figures, result)
    print_result(as_json, result, lambda: decode_bench_tables(result))
