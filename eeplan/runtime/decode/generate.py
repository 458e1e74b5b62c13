"""From a checkpoint and a prompt to text, with the exit of every token."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from eeplan.errors import CheckpointError, DecodeError
from eeplan.runtime import backend
from eeplan.runtime.checkpoint import load_model, load_tokenizer_path
from eeplan.runtime.decode.emission import CheckCounts, Emission
from eeplan.runtime.decode.exit_check import shortlist_facts
from eeplan.runtime.decode.modes import Decoder, decoder_on
from eeplan.runtime.decode.network import DecodeNetwork, Transformer
from eeplan.runtime.decode.options import GenerateOptions, dtype_name
from eeplan.runtime.decode.speculative import SpeculativeDecoder
from eeplan.runtime.decode.stop_text import Piece, StopText
from eeplan.runtime.decode.weights import Weights, weights_of
from eeplan.runtime.model import EarlyExitGPT
from eeplan.runtime.stage import FINAL, exit_name
from eeplan.runtime.tokenizer import Tokenizer, load_tokenizer
from eeplan.spec import RunSpec

WARM_UP_TOKENS = 4
TokenCallback = Callable[[dict[str, Any]], None]
"""Called with each token of the result as soon as it is there; see :func:`continue_prompt`."""


def generate_text(
    checkpoint: Path,
    prompt: str,
    options: GenerateOptions,
    on_token: TokenCallback | None = None,
    *,
    stop: Sequence[str] = (),
    compare_full: bool = False,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Load a checkpoint on this process and continue ``prompt``.

    Args:
        checkpoint: a checkpoint folder, or a run's folder, whose latest one is taken.
        stop: see :func:`continue_prompt`.
        compare_full: also continue with the full model, for its speed and its tokens.
        dtype: to compute in; default, the checkpoint's own.

    Returns:
        As :func:`continue_prompt`; with ``compare_full`` also ``full``: its ``text`` and ``tokens_per_s``,
        ``speed_up`` over it, and ``agreement``, the share of its tokens that are the same at the same place.

    Raises:
        DecodeError: the prompt is empty or longer than the model's sequences; the model lacks an exit.
        CheckpointError: missing or damaged. DataError: the prompt or its tokenizer is not readable.
    """
    if not prompt:
        raise DecodeError("the prompt is empty; give at least one character to continue")
    with this_process() as here:
        loaded, _ = load_model(checkpoint, here)
        tokenizer = load_tokenizer(load_tokenizer_path(checkpoint))
        model = weights_of(loaded, loaded.run.training.seq_length, tokenizer.vocab_size, dtype=dtype)
        if not compare_full:
            return continue_prompt(model, tokenizer, prompt, options, on_token, stop)
        full = replace(options, mode="full")
        for each in (options, full):
            # The first forwards of a process are slower than all that follow.
            continue_prompt(model, tokenizer, prompt, replace(each, max_new_tokens=WARM_UP_TOKENS))
        result = continue_prompt(model, tokenizer, prompt, options, on_token, stop)
        return result | {
            "full": _compared(result, continue_prompt(model, tokenizer, prompt, full, None, stop))
        }


def _compared(result: dict[str, Any], full: dict[str, Any]) -> dict[str, Any]:
    mine, theirs = ([token["id"] for token in one["tokens"]] for one in (result, full))
    same = sum(a == b for a, b in zip(mine, theirs, strict=False))
    return {
        "text": full["text"],
        "tokens_per_s": full["tokens_per_s"],
        "speed_up": result["tokens_per_s"] / full["tokens_per_s"],
        "agreement": same / max(len(mine), len(theirs), 1),
    }


def continue_prompt(
    model: EarlyExitGPT | Weights,
    tokenizer: Tokenizer,
    prompt: str,
    options: GenerateOptions,
    on_token: TokenCallback | None = None,
    stop: Sequence[str] = (),
) -> dict[str, Any]:
    """Continue ``prompt`` with a model that is already loaded, or its weights, whole, on this process.

    Ends after ``max_new_tokens``, at the end-of-text token (listed, with empty text), when the sequence is
    as long as the model was trained for, or at a text of ``stop``, which is not part of the continuation.

    Returns:
        Plain data. ``mode``; ``prompt`` and ``prompt_tokens``; ``text``, the continuation; ``tokens``, each
        {"text", "id", "exit", "confidence", "logprob", "was_draft"} (see ``Emission``), whose texts join to
        ``text``; ``stopped``: "max_new_tokens", "end_of_text", "seq_length" or "stop_string"; ``exits``,
        tokens by exit, shallowest first; ``mean_depth``, layers that the emitting exits read;
        ``layers_per_token``, decoder layers really run per new token after the first, recomputed, forced and
        refused ones included (None for one token); ``seconds``, prompt included; ``tokens_per_s``, new tokens
        over those seconds; ``threshold`` and ``recompute_limit`` as given; ``drafts``, {"drafted",
        "accepted"} of ``self_speculative``, else None; ``dtype``, computed in; ``candidates``, see
        ``exit_check.shortlist_facts``.

    Raises:
        DecodeError: the prompt is empty or too long; the model lacks an exit. CheckpointError: tokenizer and
            model do not belong together. DataError: the prompt is no valid text.
    """
    ids = prompt_ids(model.run, tokenizer, prompt)
    if isinstance(model, EarlyExitGPT):
        model = weights_of(model, model.run.training.seq_length, tokenizer.vocab_size)
    # The last token is emitted, never fed.
    capacity = min(model.run.training.seq_length, len(ids) + options.max_new_tokens - 1)
    decoder = decoder_on(
        DecodeNetwork.of(Transformer(model), capacity),
        options.mode,
        options.policy,
        options.sampling,
        seed=options.seed,
        recompute_limit=options.recompute_limit,
    )
    begin_s = time.perf_counter()
    text = StopText(tokenizer, stop)
    emitted, tokens = _collect(decoder, ids, text, tokenizer.eod, on_token)
    seconds = time.perf_counter() - begin_s
    return {
        "prompt": prompt,
        "prompt_tokens": len(ids),
        "text": "".join(token["text"] for token in tokens),
        "tokens": tokens,
        "stopped": "stop_string"
        if text.stopped
        else _stopped(emitted[-1].token == tokenizer.eod, len(emitted) == options.max_new_tokens),
        "exits": _histogram(model, emitted),
        "mean_depth": sum(e.depth for e in emitted) / len(emitted),
        "layers_per_token": _layers_per_token(decoder, len(ids), len(emitted)),
        "seconds": seconds,
        "tokens_per_s": len(emitted) / seconds,
        "mode": options.mode,
        "threshold": options.policy.threshold,
        "recompute_limit": options.recompute_limit,
        "drafts": _drafts(decoder),
        "dtype": dtype_name(model.dtype),
        "candidates": shortlist_facts(options.policy.candidates, total_checks(emitted)),
    }


def _collect(
    decoder: Decoder, ids: list[int], text: StopText, eod: int, on_token: TokenCallback | None
) -> tuple[list[Emission], list[dict[str, Any]]]:
    """Run until the text ends or the store is full; a token shows when its text is certain."""
    emitted: list[Emission] = []
    tokens: list[dict[str, Any]] = []
    most = decoder.rows.network.store.capacity - len(ids) + 1
    for emission in decoder.emissions(ids):
        emitted.append(emission)
        pieces = text.push(emission, 0.0)
        ends = text.stopped or emission.token == eod or len(emitted) == most
        for piece in [*pieces, *(text.finish() if ends else ())]:
            tokens.append(shown_token(piece))
            if on_token is not None:
                on_token(tokens[-1])
        if ends:
            break
    return emitted, tokens


def total_checks(emitted: Iterable[Emission]) -> CheckCounts:
    """What the checks of all these tokens came to, as far as they tell."""
    total = CheckCounts()
    for emission in emitted:
        if emission.checks is not None:
            total.add(emission.checks)
    return total


def shown_token(piece: Piece) -> dict[str, Any]:
    """A token as results list it."""
    emission = piece.emission
    return {
        "text": piece.text,
        "id": emission.token,
        "exit": emission.exit,
        "confidence": emission.confidence,
        "logprob": emission.logprob,
        "was_draft": emission.was_draft,
    }


def prompt_ids(run: RunSpec, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Tokens of a prompt. Raises as :func:`continue_prompt`."""
    if tokenizer.vocab_size > run.model.vocab_size:
        raise CheckpointError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {run.model.vocab_size}; use the "
            "tokenizer that the model was trained with"
        )
    ids = tokenizer.encode(prompt)
    if not ids:
        raise DecodeError("the prompt is empty; give at least one character to continue")
    if len(ids) > run.training.seq_length:
        raise DecodeError(
            f"the prompt has {len(ids)} tokens, the model was trained on sequences of "
            f"{run.training.seq_length}; shorten the prompt"
        )
    return ids


@contextlib.contextmanager
def this_process() -> Iterator[backend.Backend]:
    """This process's backend: the one that is running already, or one for the time of the body."""
    if parallel_state.model_parallel_is_initialized():
        yield backend.start()
        return
    with backend.single_process() as here:
        yield here


def _histogram(model: Weights, emitted: list[Emission]) -> dict[str, int]:
    counts = Counter(emission.exit for emission in emitted)
    depths = [exit_.depth for exit_ in model.stage.exits]
    return {name: counts[name] for name in (*map(exit_name, depths), FINAL)}


def _layers_per_token(decoder: Decoder, prompt_tokens: int, num_tokens: int) -> float | None:
    if num_tokens < 2:
        return None
    prompt_layer_rows = decoder.rows.network.num_layers * prompt_tokens
    return (decoder.rows.work.layer_rows - prompt_layer_rows) / (num_tokens - 1)


def _drafts(decoder: Decoder) -> dict[str, int] | None:
    if not isinstance(decoder, SpeculativeDecoder):
        return None
    return {"drafted": decoder.drafted, "accepted": decoder.accepted}


def _stopped(at_end_of_text: bool, all_asked_for: bool) -> str:
    if at_end_of_text:
        return "end_of_text"
    return "max_new_tokens" if all_asked_for else "seq_length"
