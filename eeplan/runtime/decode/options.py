"""How to decode: the checked options of one generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from eeplan.errors import DecodeError
from eeplan.runtime.decode.modes import (
    DEFAULT_LIMIT,
    DEFAULT_MODE,
    Mode,
    check_recompute_limit,
    decode_mode,
)
from eeplan.runtime.decode.policy import Candidates, ExitPolicy, candidates_of, exit_policy
from eeplan.runtime.decode.sampling import Sampling, sampling
from eeplan.runtime.precision import dtype_of
from eeplan.spec import Precision

LEAST_TEMPERATURE = 1e-3
"""Below, all probability is the most likely token's, and dividing by it would overflow."""
NO_CANDIDATES: dict[Mode, str] = {
    "full": "checks no exit",
    "self_speculative": "takes drafts from the whole head of an exit",
}
"""Modes that have no use for a shortlist, and why."""


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """Checked options of one generation; made by :func:`generate_options`."""

    mode: Mode
    policy: ExitPolicy
    sampling: Sampling
    max_new_tokens: int
    seed: int
    recompute_limit: int
    top_logprobs: int = 0
    """How many likeliest tokens an emission lists."""


def generate_options(
    *,
    threshold: float | Sequence[float],
    max_new_tokens: int,
    mode: str = DEFAULT_MODE,
    confidence: str = "max_probability",
    exits: Sequence[int] | None = None,
    first_early_token: int = 0,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 1,
    recompute_limit: int = DEFAULT_LIMIT,
    top_logprobs: int = 0,
    candidates: int = 0,
    candidate_source: str = "previous_exit",
    frequent_tokens: Sequence[int] = (),
    measure_candidates: bool = False,
) -> GenerateOptions:
    """Check what a user asks for.

    Args:
        threshold: confidence at which a token leaves early, one for all exits or one for each by depth; 1
            never, 0 always. ``self_speculative`` drafts while its exit is so confident.
        mode: one of ``MODES``.
        confidence: one of ``CONFIDENCE_KINDS``.
        exits: depths of the exits in use; None is all.
        first_early_token: how many tokens go through all layers before the first that may leave early.
        temperature: 0 takes the most likely token.
        top_k, top_p: draw from the k likeliest tokens, or the smallest likeliest set of this probability; 0
            draws from all.
        repetition_penalty: above 1 makes tokens less likely that are there already.
        recompute_limit: most tokens whose deep keys and values may be missing, drafts included.
        top_logprobs: how many likeliest tokens to list with each emitted one.
        candidates: tokens on the shortlist that is looked at before an exit's full head; 0 for none.
        candidate_source: one of ``CANDIDATE_SOURCES``.
        frequent_tokens: for source ``frequent``, most frequent first.
        measure_candidates: run the full head as well and count where it disagrees.

    Raises:
        DecodeError: an option is out of range.
    """
    if max_new_tokens < 1:
        raise DecodeError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    if not 0 <= seed < 2**63:
        raise DecodeError(f"seed is {seed}; expected a whole number from 0 to 2^63 - 1")
    if top_logprobs < 0:
        raise DecodeError(f"top_logprobs is {top_logprobs}; expected 0 or more")
    if 0.0 < temperature < LEAST_TEMPERATURE:
        raise DecodeError(
            f"temperature is {temperature}; expected 0, which takes the most likely token, or at least "
            f"{LEAST_TEMPERATURE:g}"
        )
    check_recompute_limit(recompute_limit)
    shortlist = candidates_of(candidates, candidate_source, frequent_tokens, measure_candidates)
    chosen = decode_mode(mode)
    check_candidates(shortlist, chosen)
    return GenerateOptions(
        mode=chosen,
        policy=exit_policy(threshold, confidence, exits, first_early_token, shortlist),
        sampling=sampling(temperature, top_k, top_p, repetition_penalty),
        max_new_tokens=max_new_tokens,
        seed=seed,
        recompute_limit=recompute_limit,
        top_logprobs=top_logprobs,
    )


def check_candidates(candidates: Candidates, mode: Mode) -> None:
    """Refuse a shortlist that nothing would look at.

    Raises:
        DecodeError: the mode has no use for it.
    """
    if candidates.number and mode in NO_CANDIDATES:
        raise DecodeError(
            f"candidates: mode '{mode}' {NO_CANDIDATES[mode]}; use another mode, or leave candidates out"
        )


def parse_dtype(name: str | None, own: Precision) -> Precision:
    """Kind of number to compute in; None is the checkpoint's own.

    Raises:
        DecodeError: there is none of this name.
    """
    for precision in get_args(Precision):
        if name in (None, precision):
            return own if name is None else precision
    raise DecodeError(f"dtype is '{name}'; expected one of {', '.join(get_args(Precision))}")


def dtype_name(dtype: torch.dtype) -> str:
    """As :func:`parse_dtype` takes it; torch's own name for others."""
    names = {dtype_of(precision): precision for precision in get_args(Precision)}
    return names.get(dtype, str(dtype).removeprefix("torch."))


def parse_exits(text: str | None) -> list[int] | None:
    """Depths from "2,4"; None stays None.

    Raises:
        DecodeError: something else is between the commas.
    """
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise DecodeError(f"exits is '{text}'; expected depths with commas between them, as 2,4") from None
