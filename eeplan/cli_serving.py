"""Commands that put a trained model to use: calibrate, serve, chat.

Same conventions as ``cli``: parses, calls, prints, and imports nothing heavy before it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eeplan.cli_output import Json, print_result, work

app = typer.Typer(rich_markup_mode=None)
Checkpoint = Annotated[Path, typer.Argument(metavar="CHECKPOINT", help="Checkpoint folder of a run.")]


@app.command()
def calibrate(
    checkpoint: Checkpoint,
    data: Annotated[
        Path,
        typer.Option("--data", metavar="PREFIX|FILE", help="Dataset, or a text or .jsonl file, to judge on."),
    ],
    risk: Annotated[float, typer.Option("--risk", help="Largest expected loss of a new document.")] = 0.02,
    confidence: Annotated[
        float, typer.Option("--confidence", help="Probability that the risk is kept.")
    ] = 0.95,
    metric: Annotated[
        str, typer.Option("--metric", help="disagreement (with the full model) or accuracy_loss.")
    ] = "disagreement",
    unit: Annotated[
        str, typer.Option("--unit", help="What counts as independent: document or sequence.")
    ] = "document",
    exit_confidence: Annotated[
        str, typer.Option("--exit-confidence", help="max_probability, margin or entropy.")
    ] = "max_probability",
    p_value: Annotated[
        str, typer.Option("--p-value", help="hoeffding_bentkus, or betting, which often allows more.")
    ] = "hoeffding_bentkus",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="To judge, of the text.")] = 131_072,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice of text.")] = 1,
    as_json: Json = False,
) -> None:
    """Choose exit thresholds that keep a stated distance from the full model, with a certificate."""
    from eeplan.runtime.preflight import require_runtime
    from eeplan.serving_views import certificate_cells
    from eeplan.views import table_of

    with work() as progress:
        require_runtime()
        from eeplan.runtime.decode.calibration import asked_for
        from eeplan.runtime.decode.calibration import calibrate as run

        asked = asked_for(
            risk=risk,
            confidence=confidence,
            metric=metric,
            unit=unit,
            kind=exit_confidence,
            p_value=p_value,
            max_tokens=max_tokens,
            seed=seed,
        )
        with progress.step("calibrate"):
            certificate, path = run(checkpoint, data, asked, progress)
        result = {"certificate": str(path), "thresholds": list(certificate.thresholds)}
        result |= certificate.model_dump(mode="json")
    print_result(as_json, result, lambda: tuple(map(table_of, certificate_cells(result))))
    if not as_json:
        print(f"\n{certificate.statement}\nassumed: {certificate.assumption}\nwritten: {path}")
