"""Commands for a trained model: generate and evaluate.

Same conventions as ``cli``: parses, calls, prints, and imports nothing heavy before it is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from eeplan.cli_output import Checkpoint, Json, PipelineSize, TensorSize, print_json, print_result, work

app = typer.Typer(rich_markup_mode=None)


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option("--prompt", help="Text to continue.")],
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            "--threshold",
            help="Leave at the first exit this confident; 1.0 never. Once for all exits, or once for each; "
            "or 'calibrated', the default where the checkpoint has a certificate.",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1)] = 64,
    mode: Annotated[
        str | None,
        typer.Option("--mode", help="full, kv_recompute, catch_up, self_speculative; or pipeline."),
    ] = None,
    recompute_limit: Annotated[
        int,
        typer.Option("--recompute-limit", help="Most tokens that wait for deep layers, or are drafts."),
    ] = 8,
    exits: Annotated[
        str | None, typer.Option("--exits", metavar="DEPTHS", help="Exits to use, as 2,4; else all.")
    ] = None,
    confidence: Annotated[
        str | None,
        typer.Option("--confidence", help="max_probability (default), margin or entropy."),
    ] = None,
    first_early_token: Annotated[
        int, typer.Option("--first-early-token", help="So many tokens go through all layers first.")
    ] = 0,
    temperature: Annotated[
        float, typer.Option("--temperature", help="0 takes the likeliest token, more draws more freely.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from the k likeliest; 0 from all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw from the likeliest that have this probability; 0 from all.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1 discourages tokens that are there already.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the drawing.")] = 1,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the continuation; may be repeated.")
    ] = None,
    compare_full: Annotated[
        bool, typer.Option("--compare-full", help="Also run the full model, and say how much slower it is.")
    ] = False,
    pipeline_size: PipelineSize = 1,
    tensor_size: TensorSize = 1,
    as_json: Json = False,
) -> None:
    """Continue a prompt and show the exit of every token."""
    from eeplan.generation_view import GenerationView
    from eeplan.runtime.preflight import require_runtime

    # Made before the body, in which stdout is nobody's.
    view = None if as_json else GenerationView(prompt, sys.stdout)
    with work() as progress:
        require_runtime()
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
            pipeline_size=pipeline_size,
            tensor_size=tensor_size,
            on_token=view.token if view else None,
            say=progress.line,
            max_new_tokens=max_new_tokens,
            first_early_token=first_early_token,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            recompute_limit=recompute_limit,
        )
    if view is None:
        print_json(result)
    else:
        view.finish(result)


@app.command()
def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[
        Path,
        typer.Option("--data", metavar="PREFIX|FILE", help="Dataset, or a text or .jsonl file, to judge on."),
    ],
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
    as_json: Json = False,
) -> None:
    """Judge every exit on held-out text, and measure how often tokens could leave early."""
    from eeplan.decode_views import evaluation_cells
    from eeplan.runtime.preflight import require_runtime
    from eeplan.views import table_of

    with work() as progress:
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
                progress=progress,
            )
    print_result(as_json, result, lambda: tuple(map(table_of, evaluation_cells(result))))
