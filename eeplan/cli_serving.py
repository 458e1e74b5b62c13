"""Commands that put a trained model to use: calibrate, serve, chat.

Same conventions as ``cli``: parses, calls, prints, and imports nothing heavy before it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eeplan import cli_options as options
from eeplan.cli_output import Checkpoint, Json, PipelineSize, TensorSize, print_result, work

app = typer.Typer(rich_markup_mode=None)


@app.command()
def calibrate(
    checkpoint: Checkpoint,
    data: options.JudgedData,
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


@app.command()
def serve(
    checkpoint: Checkpoint,
    host: options.Host = "127.0.0.1",
    port: options.Port = 8000,
    threshold: options.Thresholds = None,
    mode: options.DecodeMode = None,
    candidates: options.CandidateNumber = 0,
    candidate_source: options.CandidateSource = None,
    frequent_from: options.FrequentFrom = None,
    measure_candidates: options.MeasureCandidates = False,
    dtype: options.Dtype = None,
    pipeline_size: PipelineSize = 1,
    tensor_size: TensorSize = 1,
    name: options.ModelName = None,
    api_key_file: options.ApiKeyFile = None,
    max_running: options.MaxRunning = 8,
    max_waiting: options.MaxWaiting = 64,
    max_tokens: options.MaxTokens = 4096,
    max_choices: options.MaxChoices = 16,
    grace: options.Grace = 30.0,
) -> None:
    """Serve a checkpoint by OpenAI's protocol, with a page to try it on.

    Threshold, mode and candidates are those of requests that name none.
    """
    from eeplan.runtime.preflight import require_runtime

    with work() as progress:
        require_runtime()
        require_serving()
        from eeplan.runtime.decode.frequent import AskedCandidates
        from eeplan.runtime.serve.opening import opened, thresholds_sentence
        from eeplan.runtime.serve.server import serve as run
        from eeplan.runtime.serve.settings import LOOPBACK, Limits

        limits = Limits(max_running, max_waiting, max_tokens, max_choices, grace_s=grace)
        key = _api_key(api_key_file)
        with opened(
            checkpoint,
            name=name,
            threshold=threshold or (),
            mode=mode,
            candidates=AskedCandidates(candidates, candidate_source, frequent_from, measure_candidates),
            max_running=max_running,
            dtype=dtype,
            pipeline_size=pipeline_size,
            tensor_size=tensor_size,
        ) as (served, engine):
            leaving = thresholds_sentence(served.thresholds, served.certificate, served.candidates)

            def ready(url: str) -> None:
                progress.line(f"{served.name}: {leaving}")
                if key is None and host not in (LOOPBACK, "localhost", "::1"):
                    progress.line(f"no API key: whoever reaches {host} can use this server")
                progress.line(f"serving on {url}")

            run(engine, served, limits, host=host, port=port, api_key=key, on_ready=ready)


def _api_key(file: Path | None) -> str | None:
    """From the file, or else from the environment."""
    import os

    from eeplan.files import read_bytes

    if file is None:
        return os.environ.get("EEPLAN_API_KEY")
    return read_bytes(file, "API key file").decode(errors="replace").strip()


def require_serving() -> None:
    """Refuse where the packages of the server are missing.

    Raises:
        DecodeError: they are.
    """
    import importlib.util

    from eeplan.errors import DecodeError

    missing = [
        one for one in ("fastapi", "uvicorn", "prometheus_client") if not importlib.util.find_spec(one)
    ]
    if missing:
        raise DecodeError(f"serving needs {', '.join(missing)}; install with: pip install 'eeplan[serve]'")


@app.command()
def chat(
    checkpoint: Checkpoint,
    threshold: options.Thresholds = None,
    mode: options.DecodeMode = None,
    max_new_tokens: options.MaxNewTokens = 256,
    temperature: options.Temperature = 0.7,
    top_p: options.TopP = 0.0,
    seed: options.Seed = 1,
    dtype: options.Dtype = None,
    pipeline_size: PipelineSize = 1,
    tensor_size: TensorSize = 1,
) -> None:
    """Talk with a model, every token in the colour of its exit."""
    import sys

    from eeplan.runtime.preflight import require_runtime

    out = sys.stdout
    with work():
        require_runtime()
        from eeplan.runtime.decode.options import GenerateOptions, generate_options
        from eeplan.runtime.serve.chatting import Conversation, typed_lines
        from eeplan.runtime.serve.opening import opened

        with opened(
            checkpoint,
            threshold=threshold or (),
            mode=mode,
            max_running=1,
            dtype=dtype,
            pipeline_size=pipeline_size,
            tensor_size=tensor_size,
        ) as (served, engine):
            certificate = served.certificate

            def answering(thresholds: tuple[float, ...]) -> GenerateOptions:
                return generate_options(
                    threshold=thresholds,
                    confidence=certificate.confidence_kind if certificate else "max_probability",
                    max_new_tokens=max_new_tokens,
                    mode=served.default_mode,
                    temperature=temperature,
                    top_p=top_p,
                    seed=seed,
                )

            answering(served.thresholds)
            talk = Conversation(served, engine, answering, out, served.thresholds)
            talk.run(typed_lines("> " if sys.stdin.isatty() else ""))
