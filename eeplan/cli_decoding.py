"""Commands for a trained model: generate and evaluate.

Same conventions as ``cli``: parses, calls, prints, and imports nothing heavy before it is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from eeplan import cli_options as options
from eeplan.cli_output import Checkpoint, Json, PipelineSize, TensorSize, print_json, print_result, work

app = typer.Typer(rich_markup_mode=None)


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: options.Prompt,
    threshold: options.Thresholds = None,
    max_new_tokens: options.MaxNewTokens = 64,
    mode: options.DecodeMode = None,
    recompute_limit: options.RecomputeLimit = 8,
    exits: options.Exits = None,
    confidence: options.Confidence = None,
    first_early_token: options.FirstEarlyToken = 0,
    candidates: options.CandidateNumber = 0,
    candidate_source: options.CandidateSource = None,
    frequent_from: options.FrequentFrom = None,
    measure_candidates: options.MeasureCandidates = False,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = 1,
    stop: options.Stop = None,
    compare_full: options.CompareFull = False,
    dtype: options.Dtype = None,
    pipeline_size: PipelineSize = 1,
    tensor_size: TensorSize = 1,
    as_json: Json = False,
) -> None:
    """Continue a prompt and show the exit of every token."""
    from eeplan.generation_view import GenerationView
    from eeplan.runtime.preflight import require_runtime

    # Made before the body, in which stdout is nobody's.
    view = None if as_json else GenerationView(prompt, sys.stdout)
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    with work() as progress:
        require_runtime()
        from eeplan.runtime.decode.frequent import AskedCandidates
        from eeplan.runtime.serve.continuing import generate as run

        result = run(
            checkpoint,
            prompt,
            threshold=threshold or (),
            exits=exits,
            confidence=confidence,
            mode=mode,
            stop=tuple(stop or ()),
            compare_full=compare_full,
            candidates=AskedCandidates(candidates, candidate_source, frequent_from, measure_candidates),
            dtype=dtype,
            pipeline_size=pipeline_size,
            tensor_size=tensor_size,
            on_token=view.token if view else None,
            say=progress.line,
            max_new_tokens=max_new_tokens,
            first_early_token=first_early_token,
            repetition_penalty=repetition_penalty,
            recompute_limit=recompute_limit,
            **drawing,
        )
    if view is None:
        print_json(result)
    else:
        view.finish(result)


@app.command()
def evaluate(
    checkpoint: Checkpoint,
    data: options.JudgedData,
    usage_out: Annotated[
        Path | None,
        typer.Option("--usage-out", metavar="FILE", help="Usage file to write, for `eeplan plan --usage`."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Op costs to predict speed from; else the run's.")
    ] = None,
    confidence: Annotated[
        str, typer.Option("--confidence", help="max_probability, margin or entropy.")
    ] = "max_probability",
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Of the text, from its start.")] = 16_384,
    speed_prompts: Annotated[
        int,
        typer.Option(
            "--speed-prompts", min=0, help="To decode at every threshold, for the real speed-up; 0: none."
        ),
    ] = 4,
    figures: Annotated[
        Path | None, typer.Option("--figures", metavar="FOLDER", help="Folder to draw figures into.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Judge every exit on held-out text; measure how often tokens could leave early, and how fast that is."""
    from eeplan.decode_views import evaluation_cells
    from eeplan.files import require_writable_folder
    from eeplan.runtime.preflight import require_runtime
    from eeplan.views import table_of

    with work() as progress:
        if figures is not None:
            require_writable_folder(figures, "folder of figures")
        require_runtime()
        from eeplan.runtime.evaluate import evaluate as judge

        with progress.step("evaluate"):
            result = judge(
                checkpoint,
                data,
                usage_out=usage_out,
                profile=profile,
                confidence=confidence,
                max_tokens=max_tokens,
                speed_prompts=speed_prompts,
                progress=progress,
            )
        if figures is not None:
            from eeplan.report.figures.evaluation import write_figures

            result["figures"] = [str(path) for path in write_figures(figures, result)]
    print_result(as_json, result, lambda: tuple(map(table_of, evaluation_cells(result))))
