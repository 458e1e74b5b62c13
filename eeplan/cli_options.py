"""Options of the commands that decode, by name, so that a command lists what it takes a line each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompt = Annotated[str, typer.Option("--prompt", help="Text to continue.")]
Thresholds = Annotated[
    list[str] | None,
    typer.Option(
        "--threshold",
        help="Leave at the first exit this confident; 1.0 never. Once for all exits, or once for each; "
        "or 'calibrated', the default where the checkpoint has a certificate.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", min=1, help="Of one continuation.")]
DecodeMode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        help="full, kv_recompute, catch_up (default), self_speculative; on several processes pipeline.",
    ),
]
RecomputeLimit = Annotated[
    int, typer.Option("--recompute-limit", help="Most tokens that wait for deep layers, or are drafts.")
]
Exits = Annotated[
    str | None, typer.Option("--exits", metavar="DEPTHS", help="Exits to use, as 2,4; else all.")
]
Confidence = Annotated[
    str | None, typer.Option("--confidence", help="max_probability (default), margin or entropy.")
]
FirstEarlyToken = Annotated[
    int, typer.Option("--first-early-token", help="So many tokens go through all layers first.")
]
CandidateNumber = Annotated[
    int,
    typer.Option(
        "--candidates", metavar="N", help="Look at N tokens before an exit's full head; 0 does not."
    ),
]
CandidateSource = Annotated[
    str | None,
    typer.Option("--candidate-source", help="previous_exit (its likeliest tokens; default), or frequent."),
]
FrequentFrom = Annotated[
    Path | None,
    typer.Option(
        "--frequent-from",
        metavar="PREFIX|FILE",
        help="Dataset or text to count frequent tokens in; else the data that the model was trained on.",
    ),
]
MeasureCandidates = Annotated[
    bool,
    typer.Option(
        "--measure-candidates", help="Run the full head as well, and say how often the candidates were wrong."
    ),
]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="fp32, bf16 or fp16 to compute in; else the checkpoint's own.")
]
Temperature = Annotated[
    float, typer.Option("--temperature", help="0 takes the likeliest token, more draws more freely.")
]
TopK = Annotated[int, typer.Option("--top-k", help="Draw from the k likeliest; 0 from all.")]
TopP = Annotated[
    float, typer.Option("--top-p", help="Draw from the likeliest that have this probability; 0 from all.")
]
RepetitionPenalty = Annotated[
    float, typer.Option("--repetition-penalty", help="Above 1 discourages tokens that are there already.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of the drawing.")]
Stop = Annotated[
    list[str] | None, typer.Option("--stop", help="Text that ends the continuation; may be repeated.")
]
CompareFull = Annotated[
    bool, typer.Option("--compare-full", help="Also run the full model, and say how much slower it is.")
]
JudgedData = Annotated[
    Path,
    typer.Option("--data", metavar="PREFIX|FILE", help="Dataset, or a text or .jsonl file, to judge on."),
]

Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")]
ModelName = Annotated[
    str | None, typer.Option("--model-name", help="As clients call it; the run's name by default.")
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option("--api-key-file", help="File with the key that clients must send; or EEPLAN_API_KEY."),
]
MaxRunning = Annotated[int, typer.Option("--max-running", help="Sequences decoded at once.")]
MaxWaiting = Annotated[int, typer.Option("--max-waiting", help="Sequences that may wait.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="New tokens of one sequence.")]
MaxChoices = Annotated[int, typer.Option("--max-choices", help="Sequences of one request.")]
Grace = Annotated[float, typer.Option("--grace", help="Seconds that running answers have after SIGTERM.")]
