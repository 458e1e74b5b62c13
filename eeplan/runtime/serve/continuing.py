"""What `eeplan generate` and `eeplan chat` do: continue texts, on this process or on pipeline stages."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eeplan.errors import DecodeError
from eeplan.plan import load_plan
from eeplan.runtime.checkpoint import PLAN, TOKENIZER, usable
from eeplan.runtime.decode.certificate import Certificate
from eeplan.runtime.decode.emission import Emission
from eeplan.runtime.decode.engine import check_exits
from eeplan.runtime.decode.exit_check import shortlist_facts
from eeplan.runtime.decode.frequent import AskedCandidates, known_frequent
from eeplan.runtime.decode.generate import TokenCallback, generate_text, prompt_ids, shown_token, total_checks
from eeplan.runtime.decode.options import GenerateOptions, generate_options, parse_dtype, parse_exits
from eeplan.runtime.decode.policy import Candidates
from eeplan.runtime.decode.requests import Engine, Request
from eeplan.runtime.decode.stop_text import StopText
from eeplan.runtime.precision import dtype_of
from eeplan.runtime.serve.opening import (
    default_thresholds,
    exits_of,
    opened,
    possible_modes,
    threshold_numbers,
    thresholds_sentence,
    valid_certificate,
)
from eeplan.runtime.serve.settings import Served
from eeplan.runtime.stage import FINAL, exit_name
from eeplan.runtime.tokenizer import Tokenizer, load_tokenizer
from eeplan.spec import RunSpec


def generate(
    checkpoint: Path,
    prompt: str,
    *,
    threshold: Sequence[str] = (),
    exits: str | None = None,
    confidence: str | None = None,
    mode: str | None = None,
    stop: Sequence[str] = (),
    compare_full: bool = False,
    candidates: AskedCandidates | None = None,
    dtype: str | None = None,
    pipeline_size: int = 1,
    tensor_size: int = 1,
    on_token: TokenCallback | None = None,
    say: Callable[[str], None],
    **options: Any,
) -> dict[str, Any]:
    """Continue a prompt as the command line asks.

    Args:
        threshold: see ``opening.default_thresholds``.
        exits: depths with commas, None for all.
        confidence: measure of the exits; None is the certificate's, or the largest probability.
        dtype: what to compute in, ``fp32``, ``bf16`` or ``fp16``; default, the checkpoint's own.
        candidates: a shortlist to look at before an exit's full head; None for none.
        say: gets a line where thresholds were not given.
        options: the other fields of ``generate_options``.

    Returns:
        As ``generate.generate_text``; on several stages without layers run and drafts.

    Raises:
        DecodeError, CheckpointError, DataError: see there.
    """
    if not prompt:
        raise DecodeError("the prompt is empty; give at least one character to continue")
    if any(not one for one in stop):
        raise DecodeError("stop is an empty text; give at least one character")
    threshold_numbers(threshold)
    folder, manifest, _ = usable(checkpoint)
    plan, tokenizer = load_plan(folder / PLAN), load_tokenizer(folder / TOKENIZER)
    run, num_processes = plan.run, pipeline_size * tensor_size
    precision = parse_dtype(dtype, run.training.precision)
    certificate = valid_certificate(folder, str(manifest["manifest_sha256"]), run, precision, threshold)
    thresholds = default_thresholds(threshold, certificate)
    shortlist = _shortlist(candidates or AskedCandidates(), run, tokenizer)
    asked = generate_options(
        threshold=thresholds,
        exits=parse_exits(exits),
        confidence=_measure(thresholds, certificate) if confidence is None else confidence,
        mode=possible_modes(mode, num_processes)[1],
        candidates=shortlist.number,
        candidate_source=shortlist.source,
        frequent_tokens=shortlist.frequent,
        measure_candidates=shortlist.measured,
        **options,
    )
    if num_processes > 1 and compare_full:
        raise DecodeError("--compare-full is for one process; leave out --pipeline-size and --tensor-size")
    # Here already, so that what is wrong is said before anything else.
    check_exits(asked, exits_of(plan))
    ids = prompt_ids(run, tokenizer, prompt)
    leaving = "" if threshold else thresholds_sentence(thresholds, certificate, shortlist)
    if num_processes == 1:
        if leaving:
            say(leaving)
        kind = dtype_of(precision)
        return generate_text(
            checkpoint, prompt, asked, on_token, stop=stop, compare_full=compare_full, dtype=kind
        )
    with opened(
        checkpoint,
        # What is asked for is decided above.
        threshold=("1",),
        dtype=dtype,
        max_running=1,
        pipeline_size=pipeline_size,
        tensor_size=tensor_size,
    ) as (served, engine):
        if leaving:
            say(leaving)
        return continue_on(engine, served, ids, asked, stop, on_token) | {"prompt": prompt}


def continue_on(
    engine: Engine,
    served: Served,
    ids: Sequence[int],
    options: GenerateOptions,
    stop: Sequence[str] = (),
    on_token: TokenCallback | None = None,
) -> dict[str, Any]:
    """Continue a text on an engine that has nothing else to do.

    Whatever ends this, Ctrl-C included, the engine has nothing left to do.

    Returns:
        As ``generate.continue_prompt``, without ``prompt``; ``layers_per_token`` and ``drafts`` are None.
    """
    request = Request(tuple(ids), options, frozenset({served.tokenizer.eod}))
    text, tokens = StopText(served.tokenizer, stop), []
    emitted: list[Emission] = []
    finish, began_s = None, time.perf_counter()
    number = engine.submit(request)
    try:
        while finish is None and not text.stopped:
            for event in engine.step():
                pieces, finish = [], event.finish
                if event.emission is not None:
                    emitted.append(event.emission)
                    pieces = text.push(event.emission, event.latency_s)
                for piece in [*pieces, *(text.finish() if finish is not None else ())]:
                    tokens.append(shown_token(piece))
                    if on_token is not None:
                        on_token(tokens[-1])
    finally:
        engine.cancel(number)
    seconds, count = time.perf_counter() - began_s, len(emitted)
    exits = Counter(emission.exit for emission in emitted)
    return {
        "prompt_tokens": len(ids),
        "text": "".join(token["text"] for token in tokens),
        "tokens": tokens,
        "stopped": _stopped(text.stopped, finish == "stop", count == options.max_new_tokens),
        "exits": {name: exits[name] for name in (*map(exit_name, served.exit_depths), FINAL)},
        "mean_depth": sum(e.depth for e in emitted) / count if count else float(served.num_layers),
        "layers_per_token": None,
        "seconds": seconds,
        "tokens_per_s": count / seconds,
        "mode": options.mode,
        "threshold": options.policy.threshold,
        "recompute_limit": options.recompute_limit,
        "drafts": None,
        "dtype": served.dtype,
        "candidates": shortlist_facts(options.policy.candidates, total_checks(emitted)),
    }


def _shortlist(asked: AskedCandidates, run: RunSpec, tokenizer: Tokenizer) -> Candidates:
    """Of frequent tokens, if they are wanted, by the checkpoint's own tokenizer and training data."""
    if asked == AskedCandidates():
        return Candidates()
    if asked.number == 0:
        raise DecodeError("candidates: their options are there, but no number; give --candidates N as well")
    return asked.resolved(known_frequent(asked, run, tokenizer))


def _measure(thresholds: tuple[float, ...], certificate: Certificate | None) -> str:
    if certificate is not None and thresholds == certificate.thresholds:
        return certificate.confidence_kind
    return "max_probability"


def _stopped(at_stop: bool, at_end: bool, all_asked_for: bool) -> str:
    if at_stop:
        return "stop_string"
    if at_end:
        return "end_of_text"
    return "max_new_tokens" if all_asked_for else "seq_length"
