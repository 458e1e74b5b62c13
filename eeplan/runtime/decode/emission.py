"""A generated token, and what is said about it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from eeplan.errors import DecodeError
from eeplan.runtime.decode.policy import ConfidenceKind, Judgement, judge


@dataclass(slots=True)
class CheckCounts:
    """What the checks of exits came to."""

    full: int = 0
    """Heads whose logits were computed for all tokens."""
    candidates: int = 0
    """Shortlists looked at."""
    refused: int = 0
    """Of these, tokens that stayed because of the shortlist."""
    measured: int = 0
    """Refusals that were held against the full head."""
    wrong: int = 0
    """Of these, tokens that the full head would have let go."""

    def add(self, other: CheckCounts) -> None:
        """Count those of another token, too."""
        self.full += other.full
        self.candidates += other.candidates
        self.refused += other.refused
        self.measured += other.measured
        self.wrong += other.wrong


@dataclass(frozen=True, slots=True)
class Emission:
    """One generated token and where it came from."""

    token: int
    exit: str
    """``exit_<depth>``, or ``final``."""
    depth: int
    """Layers that the emitting exit reads; the number of layers for the final one."""
    confidence: float
    """Of that exit, by the policy's measure."""
    logprob: float
    """Log-probability of the token by that exit's own distribution: temperature 1, no penalty."""
    was_draft: bool = False
    """Whether an early exit drafted the token and the final one confirmed it (``self_speculative``)."""
    top_logprobs: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens of that exit's own distribution with their log-probabilities, likeliest first: as
    many as ``GenerateOptions.top_logprobs`` asks for. See :func:`top_logprobs`."""
    checks: CheckCounts | None = None
    """What its checks came to; None where no shortlist was asked for."""


def checked_judgement(logits_V: Tensor, kind: ConfidenceKind, name: str) -> Judgement:
    """:func:`policy.judge`, refusing what is no distribution.

    Raises:
        DecodeError: the logits are not finite.
    """
    found = judge(logits_V, kind)
    if not (math.isfinite(found.confidence) and math.isfinite(found.log_normalizer)):
        raise DecodeError(
            f"the logits of {name} are not finite numbers; the checkpoint is damaged or diverged"
        )
    return found


def top_logprobs(logits_V: Tensor, log_normalizer: float, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` likeliest tokens and their log-probabilities, likeliest first; none for 0.

    Args:
        logits_V: of one position.
        log_normalizer: of these logits, see ``Judgement``.
    """
    if count == 0:
        return ()
    found = logits_V.topk(min(count, len(logits_V)))
    pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
    return tuple((token, logit - log_normalizer) for token, logit in pairs)
