"""Commands that put a trained model to use: calibrate, serve, chat.

Same conventions as ``cli``: parses, calls, prints, and imports nothing heavy before it is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eeplan.cli_output import Checkpoint, Json, PipelineSize, TensorSize, print_result, work

app = typer.Typer(rich_markup_mode=None)


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


@app.command()
def serve(
    checkpoint: Checkpoint,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8000,
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            "--threshold",
            help="Default of requests: 'calibrated', one number, or one for each exit. Without: calibrated "
            "if there is a certificate, else 1.",
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option("--mode", help="Of requests that name none; catch_up or pipeline if absent."),
    ] = None,
    pipeline_size: PipelineSize = 1,
    tensor_size: TensorSize = 1,
    name: Annotated[
        str | None, typer.Option("--model-name", help="As clients call it; the run's name by default.")
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="File with the key that clients must send; or EEPLAN_API_KEY."),
    ] = None,
    max_running: Annotated[int, typer.Option("--max-running", help="Sequences decoded at once.")] = 8,
    max_waiting: Annotated[int, typer.Option("--max-waiting", help="Sequences that may wait.")] = 64,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="New tokens of one sequence.")] = 4096,
    max_choices: Annotated[int, typer.Option("--max-choices", help="Sequences of one request.")] = 16,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that running answers have after SIGTERM.")
    ] = 30.0,
) -> None:
    """Serve a checkpoint by OpenAI's protocol, with a page to try it on."""
    import os
    import sys

    from eeplan.files import read_bytes
    from eeplan.runtime.preflight import require_runtime

    with work() as progress:
        require_runtime()
        require_serving()
        from eeplan.runtime.serve.opening import opened, thresholds_sentence
        from eeplan.runtime.serve.server import serve as run
        from eeplan.runtime.serve.settings import LOOPBACK, Limits

        limits = Limits(
            max_running=max_running,
            max_waiting=max_waiting,
            max_tokens=max_tokens,
            max_choices=max_choices,
            grace_s=grace,
        )
        key = os.environ.get("EEPLAN_API_KEY")
        if api_key_file is not None:
            key = read_bytes(api_key_file, "API key file").decode(errors="replace").strip()
        with opened(
            checkpoint,
            name=name,
            threshold=threshold or (),
            mode=mode,
            max_running=max_running,
            pipeline_size=pipeline_size,
            tensor_size=tensor_size,
        ) as (served, engine):
            progress.line(f"{served.name}: {thresholds_sentence(served.thresholds, served.certificate)}")
            if key is None and host not in (LOOPBACK, "localhost", "::1"):
                progress.line(f"no API key: whoever reaches {host} can use this server")
            run(
                engine,
                served,
                limits,
                host=host,
                port=port,
                api_key=key,
                on_ready=lambda url: print(f"serving on {url}", file=sys.stderr, flush=True),
            )


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
    threshold: Annotated[
        list[str] | None,
        typer.Option("--threshold", help="'calibrated', one number, or one for each exit; as for serve."),
    ] = None,
    mode: Annotated[str | None, typer.Option("--mode", help="Decoding mode; see generate.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Of an answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token.")] = 0.7,
    top_p: Annotated[float, typer.Option("--top-p", help="See generate.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of the drawing.")] = 1,
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
            pipeline_size=pipeline_size,
            tensor_size=tensor_size,
        ) as (served, engine):
            certificate = served.certificate

            def options(thresholds: tuple[float, ...]) -> GenerateOptions:
                return generate_options(
                    threshold=thresholds,
                    confidence=certificate.confidence_kind if certificate else "max_probability",
                    max_new_tokens=max_new_tokens,
                    mode=served.default_mode,
                    temperature=temperature,
                    top_p=top_p,
                    seed=seed,
                )

            options(served.thresholds)
            talk = Conversation(served, engine, options, out, served.thresholds)
            talk.run(typed_lines("> " if sys.stdin.isatty() else ""))
